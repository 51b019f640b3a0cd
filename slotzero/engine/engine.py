"""The engine: `step` is plan, run, commit. It owns requests from their arrival to their last token.

It handles token ids only. A caller that wants text gives `add` an OutputText, which reads the
tokens at each commit and says when a stop string has ended the answer.

On a device that overlaps with the host (a GPU), the step that was just launched is not waited for:
the one before it is committed while it runs. There the end of an answer is noticed one step late,
and the token computed meanwhile is discarded. On a CPU a launched step has already run, so it is
committed at once: each token is returned by the call that computed it, and none is discarded.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, get_args

from slotzero.checkpoint.named_tensors import NamedTensors, checkpoint_of_tensors
from slotzero.checkpoint.source import checkpoint_of
from slotzero.config import EngineConfig
from slotzero.engine.admission import GrammarAdmission, refuse
from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.engine.draft_widths import DraftWidths
from slotzero.engine.output_text import OutputText
from slotzero.engine.request_factory import RequestFactory
from slotzero.engine.request_handle import RequestHandle
from slotzero.engine.scheduler import Scheduler, SchedulerConfig
from slotzero.errors import CapacityError, ConfigError, RequestError, WeightUpdateError
from slotzero.executor.build import build_worker
from slotzero.executor.rank0 import start_ranks
from slotzero.executor.rank_group import RankGroup
from slotzero.executor.results import Results
from slotzero.executor.routed_experts import RoutedExperts
from slotzero.executor.step_watch import Work
from slotzero.executor.worker import Worker
from slotzero.grammars.limits import GrammarLimits
from slotzero.grammars.pool import Grammars
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.implementation import parse_model
from slotzero.models.pooling import Pooling
from slotzero.pools.slots import SlotPool
from slotzero.request import Request
from slotzero.sampling.params import SamplingParams
from slotzero.speculative.widths import SpeculationStats
from slotzero.step import Step
from slotzero.system.interrupt import uninterrupted
from slotzero.system.progress import OnProgress, ignore_progress, recording_bar, weights_bar
from slotzero.text.chat_template import read_template
from slotzero.text.tokenizer import Tokenizer

RunningAction = Literal["hold", "finish", "abort"]
"""What happens to running requests when weights change; see `Engine.update_weights`."""


class LiveChecks(Protocol):
    """The checks on live traffic."""

    steps_watched: int
    violations: int

    @property
    def is_pending(self) -> bool:
        """Whether a check of earlier answers is to be continued."""

    def committed(self, finished: Sequence[Request]) -> None:
        """Check the step that was just committed, in which these requests ended."""

    def weights_will_change(self) -> None:
        """Drop everything that only the present weights can confirm."""


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        rank_group: RankGroup | None = None,
        on_progress: OnProgress = ignore_progress,
        attach_checks: "Callable[[Engine], LiveChecks] | None" = None,
    ) -> None:
        """`rank_group`: ranks that are already running and need no messages. `on_progress` is
        called with the progress of loading. `attach_checks` attaches the live checks, see
        certify/start.py."""
        checkpoint = checkpoint_of(config)
        self.tokenizer = None if config.skip_tokenizer_init else _load_tokenizer(config, checkpoint)
        self.sampling = checkpoint.sampling() if config.generation_config == "auto" else {}
        """Default sampling parameters of the model, which the callers apply."""
        self.rank_group = rank_group or start_ranks(
            config, parse_model(checkpoint.config, config.model_impl)
        )
        on_progress("kernels", 0, 0)
        bar = weights_bar(config.show_progress, checkpoint.name, on_progress)
        with bar as progress, self.rank_group.watched("loading"):
            self.worker = build_worker(config, checkpoint, progress, self.rank_group)
        self.limits = self.worker.limits
        self.lock = threading.RLock()
        """Held by every call that changes requests; hold it to read outputs while others step."""
        self.request_factory = RequestFactory(
            self.limits.max_model_len,
            self.worker.model.max_position,
            self.worker.vocab_size,
            checkpoint.eos_token_ids,
            self.worker.pooling,
            # drafts have positions after the prompt
            self.limits.max_model_len - (self.limits.ahead > 0),
            generates=checkpoint.has_head,
            has_priorities=config.scheduling_policy == "priority",
        )
        self.admission = GrammarAdmission(self._grammars(config, checkpoint), self.lock)
        self.schedulers = _schedulers(config, self.worker)
        if self.worker.routed_experts is not None:
            for scheduler in self.schedulers:
                scheduler.before_release = partial(self._store_experts, self.worker.routed_experts)
        self.recording_seconds = 0.0 if config.lazy_recording else self._record(config, on_progress)
        self.num_steps = 0
        self.weight_version = "0"
        self._num_updates = 0
        self._config, self._stored_config = config, checkpoint.config
        self.draft_widths = DraftWidths(config, self.worker)
        self._seeds = random.Random(config.seed)
        self._arrivals = 0
        self._handles: dict[str, RequestHandle] = {}
        self._in_flight: deque[tuple[Step, Work | None, list[Results]]] = deque()
        self._max_in_flight = 1 if self.worker.overlaps else 0  # between two calls of `step`
        if config.sanitize != "off" and attach_checks is None:
            raise ConfigError("sanitize: build this engine by slotzero.certify.start.start_engine")
        self.sanitizer = attach_checks(self) if attach_checks is not None else None

    def _grammars(self, config: EngineConfig, checkpoint: Checkpoint) -> Grammars:
        tokenizer = self.tokenizer
        return Grammars(
            checkpoint.tokenizer if tokenizer is None else lambda: tokenizer,
            self.worker.vocab_size,
            self.eos_token_ids,
            GrammarLimits(reply_seconds=config.grammar_timeout, memory=config.grammar_memory),
        )

    def _record(self, config: EngineConfig, on_progress: OnProgress) -> float:
        """Capture every size, and return the seconds that took."""
        num_sizes = len(self.worker.recorded_keys)
        records = recording_bar(config.show_progress, self.limits.backend, num_sizes, on_progress)
        with records as seen, self.rank_group.watched("recording"):
            return self.worker.record(seen)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        output_text: OutputText | None = None,
    ) -> RequestHandle:
        """Queue one request; raises RequestError without affecting other requests.

        `params.n` is ignored: the caller adds n requests. `output_text` is required for stop
        strings. A grammar that is not cached is compiled first, while other requests run; if that
        fails, the request ends with a `failure`.
        """
        if params.stop and output_text is None:
            raise RequestError("stop: stop strings need an OutputText; use stop_token_ids", "stop")
        request = self.request_factory.create(request_id, prompt, params)
        with self.lock, uninterrupted():
            if request_id in self._handles:
                raise RequestError(f"request {request_id}: this id is in use; choose another")
            self.admission.begin(request)
            if params.seed is None:
                request.seed = self._seeds.getrandbits(63)
            if request.awaits_mask:
                self.admission.hold(request)
            else:
                self._enqueue(request)
            handle = RequestHandle(request, output_text, weight_version=self.weight_version)
            self._handles[request_id] = handle
            return handle

    def cancel(self, request_id: str) -> None:
        """Cancel a request at any moment; one that is unknown or finished is left alone."""
        with self.lock, uninterrupted():
            handle = self._handles.pop(request_id, None)
            if handle is None:
                return
            if not self.admission.cancel(handle.request):
                self.schedulers.of(handle.request).cancel(handle.request)
            handle.notify()

    def validate(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Return the request that `add` would queue, without its grammar; raises RequestError.

        Waits until the grammar is compiled.
        """
        (outcome,) = self.validate_batch([(request_id, prompt, params)])
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def validate_batch(
        self, inputs: Iterable[tuple[str, Sequence[int], SamplingParams]]
    ) -> list[Request | RequestError]:
        """Validate many requests, and compile their grammars in parallel. The engine's lock is not
        held while this waits."""
        created: list[Request | RequestError] = []
        for request_input in inputs:
            try:
                created.append(self.request_factory.create(*request_input))
            except RequestError as error:
                created.append(error)
        return self.admission.check(created)

    def prepare_grammars(self) -> None:
        """Start the process that compiles grammars, before a request waits for it."""
        with self.lock:
            self.admission.grammars.prepare()

    @property
    def has_work(self) -> bool:
        return self.schedulers.has_work or bool(self._in_flight) or self.admission.is_busy

    @property
    def eos_token_ids(self) -> Sequence[int]:
        return self.request_factory.eos_token_ids

    @property
    def pooling(self) -> Pooling:
        """How vectors of prompts are computed."""
        return self.worker.pooling

    @property
    def speculation(self) -> SpeculationStats | None:
        return self.draft_widths.stats

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar to be compiled."""
        return self.admission.num_compiling

    def step(self) -> list[RequestHandle]:
        """Plan and launch the next step, then commit the oldest step if too many are in flight;
        return the requests that grew."""
        with self.lock, uninterrupted(), self.worker.watch.doing("planning a step"):
            grown: list[RequestHandle] = []
            try:
                self._admit(grown)
                step = self._plan()
                if step is not None:
                    self._launch(step)
                has_committed = self._commit_if_due(grown, is_idle=step is None)
                self._run_live_checks(grown, has_committed, is_idle=step is None)
            except BaseException as error:
                self._abandon(error, grown)
                raise
            for handle in grown:
                handle.notify()
            return grown

    def check(self) -> None:
        """Recount every pool."""
        self.schedulers.check()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep their pages."""
        for scheduler in self.schedulers:
            scheduler.ledger.cache.clear()

    def check_weights(self, weights: NamedTensors | str | Path, partial: bool = False) -> None:
        """Raise WeightUpdateError unless `update_weights` can take these; change nothing."""
        with self.lock:
            self.worker.check_update(self._checkpoint_of(weights), partial)

    def update_weights(
        self,
        weights: NamedTensors | str | Path,
        *,
        running: RunningAction = "hold",
        partial: bool = False,
        version: str | None = None,
    ) -> str:
        """Replace the weights in place, and return their version, by default the next number.

        `weights` are tensors with their names in the model's checkpoint, or a folder or file with
        another checkpoint of the same model. Nothing is captured again. If they do not fit,
        WeightUpdateError is raised and the old weights stay. With `partial`, weights that are
        missing stay as they are. Cached prefixes are dropped. Running requests keep their tokens,
        which are recomputed with the new weights (`hold`), finish with the old weights first
        (`finish`), or end now (`abort`).
        """
        if running not in get_args(RunningAction):
            raise ConfigError(f"running={running}: use one of {', '.join(get_args(RunningAction))}")
        checkpoint = self._checkpoint_of(weights)
        with self.lock, uninterrupted():
            names = self.worker.check_update(checkpoint, partial)
            self._stop_running(running)
            if self.sanitizer is not None:
                self.sanitizer.weights_will_change()
            with self.rank_group.watched("updating weights", in_step=True):
                self.worker.update_weights(checkpoint, names)
            self.reset_prefix_cache()
            self._num_updates += 1
            self.weight_version = str(self._num_updates) if version is None else version
            for handle in self._handles.values():
                handle.weight_version = self.weight_version
                handle.request.saw_update = bool(handle.token_ids)
            return self.weight_version

    def give_back_memory(self, *, weights: bool) -> int:
        """Give the memory of the KV cache, and of the weights if wanted, back to the operating
        system; return the bytes that were in use. Running requests are recomputed later; weights
        that were given back must be replaced before the next step."""
        with self.lock, uninterrupted():
            self.worker.check_giving_back(weights=weights)
            self._stop_running("hold")
            self.reset_prefix_cache()
            if weights and self.sanitizer is not None:
                self.sanitizer.weights_will_change()
            return self.worker.give_back_memory(weights=weights)

    def decode_plainly(self) -> None:
        """Stop verifying drafts and reusing prefixes, because one of them was wrong."""
        self.draft_widths.disable()
        for scheduler in self.schedulers:
            scheduler.ledger.enable_prefix_caching = False
            scheduler.ledger.cache.clear()

    # Weights

    def _checkpoint_of(self, weights: NamedTensors | str | Path) -> Checkpoint:
        if not isinstance(weights, str | Path):
            return checkpoint_of_tensors(self._stored_config, weights)
        checkpoint = checkpoint_of(replace(self._config, model=str(weights)))
        whole, other = (
            parse_model(config, self._config.model_impl)
            for config in (self._stored_config, checkpoint.config)
        )
        if whole != other:
            raise WeightUpdateError(
                f"{weights}: its config describes another model than {self._config.model}; start "
                "an engine with it instead"
            )
        return checkpoint

    def _stop_running(self, running: RunningAction) -> None:
        """Commit all steps in flight, then end or preempt the running requests, so that the next
        step may use other weights."""
        if running == "finish":
            self.schedulers.allow_admission(False)
            try:
                while self.schedulers.num_running:
                    self.step()
            finally:
                self.schedulers.allow_admission(True)
        while self._in_flight:
            grown: list[RequestHandle] = []
            self._commit(grown)
            for handle in grown:
                handle.notify()
        for scheduler in self.schedulers:
            for request in scheduler.preempt_all():
                if running == "abort":
                    self.cancel(request.id)

    # Admission

    def _admit(self, grown: list[RequestHandle]) -> None:
        """Queue requests whose grammar is compiled, and resume requests whose mask has arrived.
        Requests that end instead are appended to `grown`."""
        ended = []
        for request, error in self.admission.take_compiled():
            if error is None:
                try:
                    self._enqueue(request)
                    continue
                except RequestError as not_queued:
                    refuse(request, not_queued)
            ended.append(self._handles[request.id])
        for request in self.admission.take_late():
            if self.schedulers.of(request).settle(request):
                handle = self._handles[request.id]
                self._extend_output(handle, 0)
                ended.append(handle)
        for handle in ended:
            del self._handles[handle.request.id]
        grown += ended

    def _enqueue(self, request: Request) -> None:
        """Give a request to a scheduler; if none takes it, release its grammar."""
        self._arrivals += 1
        request.arrival = self._arrivals
        try:
            self.schedulers.add(request)
        except BaseException:
            if request.grammar is not None:
                request.grammar.release()
            raise

    # Plan and run

    def _plan(self) -> Step | None:
        with self.rank_group.watched("timing a step", in_step=True):
            width = self.draft_widths.choose(self.schedulers.most_running)
        step = self.schedulers.plan(width)
        is_waiting = bool(self._in_flight) or self.admission.has_late
        if step is None and self.schedulers.has_work and not is_waiting:
            self._fail_stalled_requests()
        return step

    def _fail_stalled_requests(self) -> None:
        """End all requests, because none can continue and nothing in flight will change that."""
        num_running, num_waiting = self.schedulers.num_running, self.schedulers.num_waiting
        error = CapacityError(
            f"none of {num_running} running and {num_waiting} waiting requests can continue: raise "
            "--kv-cache-memory"
        )
        for request_id, handle in list(self._handles.items()):
            handle.error = error
            self.cancel(request_id)
        raise error

    def _launch(self, step: Step) -> None:
        with self.rank_group.watched(self.worker.watch, in_step=True):
            results = self.worker.run(step)
            self._in_flight.append((step, self.worker.watch.latest, results))
        self.num_steps += 1

    # Commit

    def _commit_if_due(self, grown: list[RequestHandle], is_idle: bool) -> bool:
        """Commit the oldest step if it is due, or else wait for grammars if nothing else can be
        done; return whether a step was committed."""
        is_due = len(self._in_flight) > (0 if is_idle else self._max_in_flight)
        if is_due:
            self._commit(grown)
        elif is_idle and not grown:
            self.admission.wait()
        return is_due

    def _commit(self, grown: list[RequestHandle]) -> None:
        """Append the samples of the oldest step to its requests, and those requests to `grown`."""
        step, work, results = self._in_flight[0]
        watch = self.worker.watch
        with self.rank_group.watched(watch, in_step=True), watch.doing("waiting for", work):
            tokens = [from_rank.tokens() for from_rank in results]
        self.draft_widths.learn(step, results)
        if step.is_scored:
            self._take_scores(step, results)
        if step.is_pooled:
            self._take_vectors(step, results)
        committed = [
            scheduler.commit(rows, sampled)
            for scheduler, rows, sampled in zip(
                self.schedulers, step.rows_by_dp_rank, tokens, strict=True
            )
        ]
        receivers = [request for from_rank in committed for request, _ in from_rank]
        for request in self.admission.await_masks(receivers):
            self.schedulers.of(request).settle(request)
        for rows, gains, from_rank in zip(step.rows_by_dp_rank, committed, results, strict=True):
            row_of = {row.request.id: i for i, row in enumerate(rows)}
            for request, num_new in gains:
                handle = self._handles[request.id]
                grown.append(handle)
                num_new = self._extend_output(handle, num_new)
                if request.params.logprobs is not None:
                    handle.logprobs += from_rank.logprobs(row_of[request.id])[:num_new]
        self._in_flight.popleft()
        for handle in grown:
            if handle.finished:
                self._handles.pop(handle.request.id, None)

    def _store_experts(self, stored: RoutedExperts, request: Request) -> None:
        """Read the experts of a request that is about to release its pages."""
        handle = self._handles.get(request.id)
        if handle is not None and handle.request is request:
            handle.stored_experts = stored.read(request.pages[stored.group])

    def _take_scores(self, step: Step, results: Sequence[Results]) -> None:
        """Hand out the log probabilities of the prompts that were scored in this step."""
        for rows, from_rank in zip(step.rows_by_dp_rank, results, strict=True):
            first = 0
            for row in rows:
                handle = self._handles.get(row.request.id)
                if row.is_scored and handle is not None and handle.request is row.request:
                    num = min(row.count, len(row.request.prompt_token_ids) - 1 - row.start)
                    num_top = row.request.params.prompt_logprobs or 0
                    handle.take_scores(row.start, from_rank.scores(first, num, num_top))
                first += row.count

    def _take_vectors(self, step: Step, results: Sequence[Results]) -> None:
        """Hand out the vectors of the prompts that were completed in this step."""
        for rows, from_rank in zip(step.rows_by_dp_rank, results, strict=True):
            for i, row in enumerate(rows):
                handle = self._handles.get(row.request.id)
                is_complete = row.is_pooled and row.samples
                if is_complete and handle is not None and handle.request is row.request:
                    handle.vector = from_rank.vector(i)

    def _extend_output(self, handle: RequestHandle, num_new: int) -> int:
        """Pass the new tokens to the request's OutputText, and end the request if a stop string is
        complete; return how many of the new tokens are kept."""
        request, output = handle.request, handle.output_text
        if output is None:
            return num_new
        tokens = request.output_token_ids
        first = len(tokens) - num_new
        num_kept = len(output.extend(tokens[first:], request.finish_reason))
        if output.stop is not None:
            self.schedulers.of(request).finish(request, "stop", output.stop)
            del tokens[first + num_kept :]
        return num_kept

    def _run_live_checks(
        self, grown: Sequence[RequestHandle], has_committed: bool, is_idle: bool
    ) -> None:
        """Run the live checks."""
        if self.sanitizer is None:
            return
        if has_committed or grown or (is_idle and self.sanitizer.is_pending):
            self.sanitizer.committed([h.request for h in grown if h.finished])

    def _abandon(self, error: BaseException, grown: Sequence[RequestHandle]) -> None:
        """End the running requests, and those in `grown`, with the error of a failed step.

        Waiting requests stay queued. The table writes of this step may be lost, including resets of
        released slots, so they are staged again.
        """
        for writer in self.worker.writers:
            writer.staging.take_back()
        self.schedulers.abandon()
        try:  # or late results of other ranks would be read as those of the next step
            for _, _, results in self._in_flight:
                for from_rank in results:
                    from_rank.wait()
        except Exception:  # they will not come: the next step reports that
            self.rank_group.close()
        self._in_flight.clear()
        lost = [handle for handle in self._handles.values() if handle.finished]
        for handle in lost:
            del self._handles[handle.request.id]
        not_returned = [h for h in grown if h.finished and h not in lost]
        for handle in lost + not_returned:
            handle.error = error
            handle.notify()


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer:
    tokenizer = checkpoint.tokenizer()
    if config.chat_template is not None:
        tokenizer.set_chat_template(read_template(config.chat_template))
    return tokenizer


def _schedulers(config: EngineConfig, worker: Worker) -> DpSchedulers:
    """Make one scheduler for each DP rank."""
    limits = worker.limits
    settings = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        page_size=limits.page_size,
        ahead=limits.ahead,
        depth=None if config.tree is None else config.tree.steps,
        most_behind=worker.most_behind,
        enable_prefix_caching=limits.enable_prefix_caching,
    )
    return DpSchedulers(
        [
            Scheduler(settings, SlotPool(limits.max_num_seqs), limits.pools(), writer)
            for writer in worker.writers
        ]
    )
