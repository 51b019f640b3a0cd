"""The engine: `step` is plan, run, commit. It owns requests from their arrival to their last token.

On a device that overlaps with the host (a GPU), the step that was just launched is not waited for:
the one before it is committed while it runs. There the end of an answer is noticed one step late,
and the token computed meanwhile is discarded. On a CPU a launched step has already run, so it is
committed at once: each token is returned by the call that computed it, and none is discarded.
"""

import operator
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slotzero.checkpoint.source import open_checkpoint
from slotzero.config import EngineConfig
from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.engine.output_text import Transcript
from slotzero.engine.scheduler import Scheduler, SchedulerConfig
from slotzero.errors import CapacityError, ConfigError, RequestError, TokenizerMissingError
from slotzero.executor.build import build_worker
from slotzero.executor.rank0 import start_ranks
from slotzero.executor.rank_group import RankGroup
from slotzero.executor.results import Results, RowLogprobs
from slotzero.grammars.grammar import Grammar
from slotzero.grammars.pool import GrammarLimits, Grammars
from slotzero.models.families.family import parse_config
from slotzero.pools.slots import SlotPool
from slotzero.request import FinishReason, Request, Status
from slotzero.sampling.params import MAX_STOP_IDS, SamplingParams
from slotzero.sampling.structured import structured_outputs
from slotzero.speculative.widths import FixedWidth, SpeculationStats, WidthPolicy, Widths
from slotzero.step import Step
from slotzero.system.interrupt import uninterrupted
from slotzero.system.progress import Told, not_told, recording_bar, weights_bar
from slotzero.text.chat_template import read_template
from slotzero.text.tokenizer import Tokenizer

MOST_UNCUT = 24  # tokens; of a tree that is cut by less the policy learns too, or never would
MASK_GRACE = 0.005  # seconds that a step waits for the masks of the tokens that it commits
IDLE_WAIT = 0.01  # seconds that a step waits for grammars when nothing else can be done
COMPILE_WAIT = 0.001  # seconds between two looks at grammars that are validated


@dataclass(eq=False)  # two requests with equal answers are still two
class Answer:
    """One request in the engine, with the text and the log probabilities of what it has so far."""

    request: Request
    transcript: Transcript | None
    logprobs: list[RowLogprobs] = field(default_factory=list)
    error: BaseException | None = None
    """The error of the step that failed with this request in it; else None."""
    listener: "Callable[[Answer], None] | None" = None
    """Called whenever the answer has grown or ended, with the engine's lock held."""

    def notify(self) -> None:
        if self.listener is not None:
            self.listener(self)

    @property
    def finished(self) -> bool:
        return self.request.status is Status.FINISHED

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason

    @property
    def failure(self) -> str:
        """Why it was given up, where whoever asked can mend that; else empty."""
        grammar = self.request.grammar
        return grammar.failure if grammar is not None and self.finish_reason == "abort" else ""

    @property
    def token_ids(self) -> list[int]:
        return self.request.output_token_ids

    @property
    def text(self) -> str:
        return self.transcript.text if self.transcript else ""


class Watcher(Protocol):
    """Checks on live traffic."""

    steps_watched: int
    violations: int

    @property
    def is_pending(self) -> bool:
        """Whether a check of earlier answers is to be continued."""

    def committed(self, finished: Sequence[Request]) -> None:
        """A step was committed, in which these requests ended."""


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        rank_group: RankGroup | None = None,
        told: Told = not_told,
        watch: "Callable[[Engine], Watcher] | None" = None,
    ) -> None:
        """`rank_group`: ranks that run already, and do what this one does without being told.
        `told` is called with the progress of loading. `watch` attaches the live checks, see
        certify/start.py."""
        checkpoint = open_checkpoint(config.model, config.load_format)
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = checkpoint.tokenizer()
            if config.chat_template is not None:
                self.tokenizer.set_chat_template(read_template(config.chat_template))
        self.sampling = checkpoint.sampling() if config.generation_config == "auto" else {}
        """Of requests that do not say; whoever makes their parameters takes them from here."""
        self.rank_group = rank_group or start_ranks(config, parse_config(checkpoint.config))
        told("kernels", 0, 0)
        bar = weights_bar(config.show_progress, checkpoint.name, told)
        with bar as progress, self.rank_group.watched("loading"):
            self.worker = build_worker(config, checkpoint, progress, self.rank_group)
        self.limits = limits = self.worker.limits
        self.eos_token_ids = checkpoint.eos_token_ids
        tokenizer = self.tokenizer
        self._grammars = Grammars(
            checkpoint.tokenizer if tokenizer is None else lambda: tokenizer,
            self.worker.vocab_size,
            self.eos_token_ids,
            GrammarLimits(reply_seconds=config.grammar_timeout, memory=config.grammar_memory),
        )
        self.lanes = DpSchedulers(
            [
                Scheduler(
                    SchedulerConfig(
                        max_num_seqs=limits.max_num_seqs,
                        max_num_batched_tokens=limits.max_num_batched_tokens,
                        max_model_len=limits.max_model_len,
                        page_size=limits.page_size,
                        ahead=limits.ahead,
                        depth=None if config.tree is None else config.tree.steps,
                        most_behind=self.worker.most_behind,
                        enable_prefix_caching=limits.enable_prefix_caching,
                    ),
                    SlotPool(limits.max_num_seqs),
                    limits.pools(),
                    writer,
                )
                for writer in self.worker.writers
            ]
        )
        self.recording_seconds = 0.0
        if not config.lazy_recording:
            num_sizes = len(self.worker.recorded_keys)
            records = recording_bar(config.show_progress, limits.backend, num_sizes, told)
            with records as seen, self.rank_group.watched("recording"):
                self.recording_seconds = self.worker.record(seen)
        self.num_steps = 0
        steps = config.speculative_steps
        self.speculation = SpeculationStats(steps) if self.worker.cycles else None
        self._widths: Widths = FixedWidth(limits.max_width)
        if config.speculative is not None and config.speculative_adaptive:
            self._widths = WidthPolicy(limits.widths, steps, self.worker.seconds)
        self._seeds = random.Random(config.seed)
        self._arrivals = 0
        self._answers: dict[str, Answer] = {}
        self._compiling: dict[str, Answer] = {}
        """Those of them whose grammar is being compiled: no lane has them yet."""
        self._late: list[Answer] = []
        """Those whose next mask did not come within MASK_GRACE: they sit out until it is there."""
        self._in_flight: deque[tuple[Step, list[Results]]] = deque()
        self._max_in_flight = 1 if self.worker.overlaps else 0  # between two calls of `step`
        self.lock = threading.RLock()
        """Held by every call that changes requests; hold it to read answers while others step."""
        if config.sanitize != "off" and watch is None:
            raise ConfigError("sanitize: build this engine by slotzero.certify.start.start_engine")
        self.sanitizer = watch(self) if watch is not None else None

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """Queues one request (n is for the caller); raises RequestError, disturbing nobody. A
        grammar that was not used lately is compiled first, while others run: if that fails, the
        answer ends with a `failure`."""
        request = self._request(request_id, prompt, params)
        with self.lock, uninterrupted():
            if request_id in self._answers:
                raise RequestError(f"request {request_id}: this id is in use; choose another")
            transcript = None
            if params.detokenize and self.tokenizer is not None:
                transcript = Transcript(self.tokenizer, params)
            answer = Answer(request, transcript)
            self._begin(request)
            if params.seed is None:
                request.seed = self._seeds.getrandbits(63)
            if request.awaits_mask:
                self._compiling[request_id] = answer
            else:
                self._enqueue(request)
            self._answers[request_id] = answer
            return answer

    def cancel(self, request_id: str) -> None:
        """At any moment; a request that is unknown or finished is left alone."""
        with self.lock, uninterrupted():
            answer = self._answers.pop(request_id, None)
            if self._compiling.pop(request_id, None) is not None:
                assert answer is not None
                _abort(answer.request)
            elif answer is not None:
                self.lanes.of(answer.request).cancel(answer.request)
            if answer is not None:
                answer.notify()

    def prepare_grammars(self) -> None:
        """Start what the first structured answer needs, before a request waits for it."""
        with self.lock:
            self._grammars.prepare()

    @property
    def has_work(self) -> bool:
        is_waiting = bool(self._compiling) or self._grammars.is_busy
        return self.lanes.has_work or bool(self._in_flight) or is_waiting

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar to be compiled."""
        return len(self._compiling)

    def step(self) -> list[Answer]:
        """Plan and launch the next step, then commit the oldest one if more are in flight than may
        be; -> answers that grew."""
        with self.lock, uninterrupted():
            grown: list[Answer] = []
            try:
                grown += self._settle()
                step = self.lanes.plan(self._width())
                if step is not None:
                    self._launch(step)
                elif self.lanes.has_work and not self._in_flight and not self._late:
                    self._refuse_to_wait()
                is_due = len(self._in_flight) > self._max_in_flight
                is_due |= bool(self._in_flight) and step is None
                if is_due:
                    self._commit(grown)
                elif step is None and not grown and self._grammars.is_busy:
                    self._grammars.poll(IDLE_WAIT)
                if self.sanitizer is not None and (
                    is_due or grown or (step is None and self.sanitizer.is_pending)
                ):
                    self.sanitizer.committed([a.request for a in grown if a.finished])
            except BaseException as error:
                self._abandon(error, grown)
                raise
            for answer in grown:
                answer.notify()
            return grown

    def _width(self) -> int:
        num_running = self.lanes.most_running
        with self.rank_group.watched("timing a step", in_step=True):
            return self._widths.choose(num_running) if num_running else 1

    def check(self) -> None:
        """Recounts every pool."""
        self.lanes.check()

    def decode_plainly(self) -> None:
        """From now on verify no drafts and reuse no prefix: one of them was wrong."""
        self._widths = FixedWidth(1)
        for lane in self.lanes:
            lane.ledger.enable_prefix_caching = False
            lane.ledger.cache.clear()

    def _launch(self, step: Step) -> None:
        with self.rank_group.watched("running a step", in_step=True):
            self._in_flight.append((step, self.worker.run(step)))
        self.num_steps += 1

    def _commit(self, grown: list[Answer]) -> None:
        """Append what the oldest step sampled to its answers, and them to `grown`."""
        step, results = self._in_flight[0]
        with self.rank_group.watched("waiting for a step", in_step=True):
            tokens = [of_lane.tokens() for of_lane in results]
        if self.speculation is not None:
            self._learn(self.speculation, step, results)
        committed = [
            lane.commit(rows, sampled)
            for lane, rows, sampled in zip(self.lanes, step.lanes, tokens, strict=True)
        ]
        self._await_masks([request for receivers in committed for request, _ in receivers])
        for rows, receivers, of_lane in zip(step.lanes, committed, results, strict=True):
            row_of = {row.request.id: i for i, row in enumerate(rows)}
            for request, num_new in receivers:
                answer = self._answers[request.id]
                grown.append(answer)
                num_new = self._extend_text(answer, num_new)
                if request.params.logprobs is not None:
                    answer.logprobs += of_lane.logprobs(row_of[request.id])[:num_new]
        self._in_flight.popleft()
        for answer in grown:
            if answer.finished:
                self._answers.pop(answer.request.id, None)

    def _await_masks(self, requests: Sequence[Request]) -> None:
        """Ask for masks all at once, and wait for them for a moment."""
        pending = [r for r in requests if r.awaits_mask and r.status is not Status.FINISHED]
        grammars = [request.grammar for request in pending if request.grammar is not None]
        self._grammars.wait(grammars, MASK_GRACE)
        for request, grammar in zip(pending, grammars, strict=True):
            if grammar.is_settled:
                self.lanes.of(request).settle(request)
            else:
                self._late.append(self._answers[request.id])

    def _settle(self) -> list[Answer]:
        """Admit the requests whose grammar is compiled, and let those go on whose mask has come;
        -> answers that ended instead"""
        if not self._compiling and not self._late and not self._grammars.is_busy:
            return []
        self._grammars.poll(0.0)
        ended = []
        for answer in [a for a in self._compiling.values() if _grammar(a).is_settled]:
            del self._compiling[answer.request.id]
            try:
                _check_beginning(answer.request, _grammar(answer))
                self._enqueue(answer.request)
            except RequestError as error:
                _grammar(answer).failure = str(error)
                _abort(answer.request)
                ended.append(answer)
        settled = [a for a in self._late if a.finished or _grammar(a).is_settled]
        self._late = [a for a in self._late if not (a.finished or _grammar(a).is_settled)]
        for answer in settled:
            if not answer.finished and self.lanes.of(answer.request).settle(answer.request):
                self._close_text(answer)
                ended.append(answer)
        for answer in ended:
            del self._answers[answer.request.id]
        return ended

    def _begin(self, request: Request) -> None:
        """Give it its grammar, which need not be ready; raises RequestError if that is known to be
        wrong."""
        asked = structured_outputs(request.params.structured_outputs)
        if asked is None:
            return
        request.grammar = self._grammars.begin(asked)
        if request.grammar.is_ready:
            _check_beginning(request, request.grammar)

    def masks(self, request: Request) -> Iterator[np.ndarray]:
        """Compute the masks of an answer with a grammar again, one for each of its tokens, and wait
        for each; raises RequestError if its grammar fails."""
        asked = structured_outputs(request.params.structured_outputs)
        assert asked is not None
        grammar = self._grammars.begin(asked)
        try:
            for token in request.output_token_ids:
                while not grammar.is_settled:
                    self._grammars.poll(IDLE_WAIT)
                if grammar.failure:
                    raise RequestError(grammar.failure)
                yield grammar.allowed
                grammar.advance(token)
        finally:
            grammar.release()

    def _enqueue(self, request: Request) -> None:
        """Give it to a lane; if none takes it, its grammar is released."""
        self._arrivals += 1
        request.arrival = self._arrivals
        try:
            self.lanes.add(request)
        except BaseException:
            if request.grammar is not None:
                request.grammar.release()
            raise

    def _learn(self, stats: SpeculationStats, step: Step, results: Sequence[Results]) -> None:
        if not step.is_decode and step.width == 1:
            return  # of a prompt nothing is guessed
        stats.add_step(step.width)
        if step.width == 1:
            return
        depth = min(step.width - 1, stats.num_positions)
        uncut = 2 * (depth + 1) + self.limits.ahead - depth  # tokens with which a draft is whole
        drafts = (of_row for of_lane in results for of_row in of_lane.drafts())
        for row, (num_drafts, num_right) in zip(step.rows, drafts, strict=True):
            stats.add(num_drafts, num_right)
            has_room = row.request.max_len - row.start > min(uncut, MOST_UNCUT)
            if row.request.speculates and has_room:
                self._widths.learn(depth, num_right)  # a place left empty was wrong too

    def _refuse_to_wait(self) -> None:
        """Nobody can go on, and nothing that would change that is under way: all of them end, or
        they would be asked again for ever."""
        num_running, num_waiting = self.lanes.num_running, self.lanes.num_waiting
        error = CapacityError(
            f"of {num_running} requests that run and {num_waiting} that wait, none can go on: give "
            "more memory for KV"
        )
        for request_id, answer in list(self._answers.items()):
            answer.error = error
            self.cancel(request_id)
        raise error

    def _abandon(self, error: BaseException, grown: Sequence[Answer]) -> None:
        """A step failed: running requests end with this error, and so do those that ended in it and
        were not handed out; waiting ones go on waiting. The writes of this step may be lost, and
        with them what resets a slot after its last owner."""
        for writer in self.worker.writers:
            writer.staging.take_back()
        self.lanes.abandon()
        try:  # what other ranks have sampled must not be taken for what they will
            for _, results in self._in_flight:
                for of_lane in results:
                    of_lane.wait()
        except Exception:  # nor will it come: the next step says so
            self.rank_group.close()
        self._in_flight.clear()
        lost = [answer for answer in self._answers.values() if answer.finished]
        for answer in lost:
            del self._answers[answer.request.id]
        not_handed_out = [a for a in grown if a.finished and a not in lost]
        for answer in lost + not_handed_out:
            answer.error = error
            answer.notify()

    def _extend_text(self, answer: Answer, num_new: int) -> int:
        """-> how many of the new tokens are kept: none after a stop string"""
        request, transcript = answer.request, answer.transcript
        if transcript is None:
            return num_new
        tokens = request.output_token_ids
        first = len(tokens) - num_new
        for i in range(first, len(tokens)):
            is_last = answer.finished and i == len(tokens) - 1
            stop = transcript.push(
                tokens[i],
                hide=is_last and request.finish_reason == "stop" and tokens[i] in request.stop_ids,
                may_stop=i + 1 >= request.params.min_tokens,
            )
            if stop is not None:
                self.lanes.of(request).finish(request, "stop", stop)
                transcript.close()
                del tokens[i + 1 :]
                return i + 1 - first
        if answer.finished:
            self._close_text(answer)
        return num_new

    def _close_text(self, answer: Answer) -> None:
        """No more tokens come. The last bytes may still complete a stop string."""
        stop = answer.transcript.close() if answer.transcript is not None else None
        if stop is not None:
            self.lanes.of(answer.request).finish(answer.request, "stop", stop)

    def validate(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        """The request that `add` would queue, without its grammar, or a RequestError that names
        what is wrong. Waits until the grammar is compiled."""
        (outcome,) = self.validate_batch([(request_id, prompt, params)])
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def validate_batch(
        self, asks: Iterable[tuple[str, Sequence[int], SamplingParams]]
    ) -> list[Request | RequestError]:
        """Do what `validate` does for many requests, whose grammars are compiled at the same time.
        The engine's lock is not held while this waits."""
        outcomes: list[Request | RequestError] = []
        pending: dict[int, Request] = {}
        try:
            for i, asked in enumerate(asks):
                try:
                    request = self._request(*asked)
                    with self.lock, uninterrupted():
                        self._begin(request)
                        if request.grammar is not None:
                            pending[i] = request
                    outcomes.append(request)
                except RequestError as error:
                    outcomes.append(error)
            while pending:
                with self.lock, uninterrupted():
                    self._grammars.poll(0.0)
                    for i in [i for i, r in pending.items() if _is_settled(r)]:
                        outcomes[i] = _without_grammar(pending.pop(i))
                if pending:
                    time.sleep(COMPILE_WAIT)
        finally:
            with self.lock, uninterrupted():
                for request in pending.values():
                    _without_grammar(request)
        return outcomes

    def _request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> Request:
        limit, most = self.limits.max_model_len, self.worker.model.max_position
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise RequestError("the prompt holds something that is no token id") from None
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        if len(tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and the context holds {limit}, one of them "
                "for the answer: shorten the prompt"
                + (f" or raise --max-model-len, up to {most}" if limit < most else "")
            )
        vocab = self.worker.vocab_size
        for what, ids in (
            ("prompt", tokens),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            bad = next((t for t in ids if not 0 <= t < vocab), None)
            if bad is not None:
                raise RequestError(f"{what}: token id {bad} is not in the vocabulary of {vocab}")
        if params.stop and self.tokenizer is None:
            raise TokenizerMissingError("stop strings need a tokenizer: use stop_token_ids")
        stop_ids = params.ends_at(self.eos_token_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stop_ids)} stop ids with the model's own: at most {MAX_STOP_IDS} fit, "
                "name fewer stop_token_ids"
            )
        room = limit - len(tokens)
        return Request(
            id=request_id,
            prompt_token_ids=tokens,
            params=params,
            seed=params.seed or 0,  # `add` draws one where none was given
            arrival=0,
            stop_ids=stop_ids,
            max_len=len(tokens) + min(params.max_tokens or room, room),
        )


def _grammar(answer: Answer) -> Grammar:
    assert answer.request.grammar is not None
    return answer.request.grammar


def _is_settled(request: Request) -> bool:
    assert request.grammar is not None
    return request.grammar.is_settled


def _without_grammar(request: Request) -> Request | RequestError:
    """Release its grammar; -> the request, or what is wrong with its grammar"""
    grammar, request.grammar = request.grammar, None
    assert grammar is not None
    try:
        if grammar.is_settled:
            _check_beginning(request, grammar)
    except RequestError as error:
        return error
    finally:
        grammar.release()
    return request


def _check_beginning(request: Request, grammar: Grammar) -> None:
    """Raise RequestError unless an answer can begin, and then release the grammar."""
    if not grammar.failure and not grammar.can_go_on(request.banned_ids):
        grammar.failure = "structured_outputs: no token can begin such an answer"
    if grammar.failure:
        grammar.release()
        raise RequestError(grammar.failure)


def _abort(request: Request) -> None:
    """End a request that no lane has."""
    request.status, request.finish_reason = Status.FINISHED, "abort"
    assert request.grammar is not None
    request.grammar.release()
