"""An engine's process: `python -m slotzero.server.process FD SETTINGS SHARE`, started by client.py.

Requests arrive and tokens leave over the inherited socket FD. SHARE is this engine's share of the
machine, such as 0/1 (share.py). This process does not know text. The rule: it lives exactly as long
as the other end of the socket and the process that started it; it ignores stop signals, because the
other end decides when to stop.
"""

import json
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from msgspec import structs

from slotzero.errors import (
    CapacityError,
    ConfigError,
    RankLostError,
    RequestError,
    SlotzeroError,
)
from slotzero.server.heartbeat import HeartbeatSender
from slotzero.server.messages import (
    ABORTED,
    Add,
    AdminRequest,
    Cancel,
    EngineReady,
    Failed,
    Frames,
    FromEngine,
    Loading,
    Progress,
    Refused,
    SpeculationReport,
    Stats,
    ToEngine,
    TokenDelta,
    TokenExperts,
    TokenLogprobs,
    frame,
)
from slotzero.server.share import Share
from slotzero.system.child import end_with_parent
from slotzero.system.stacks import write_bare_stacks_when_asked

if TYPE_CHECKING:  # torch is imported only after signals and the socket are set up
    from slotzero.engine.engine import Engine
    from slotzero.engine.request_handle import RequestHandle
    from slotzero.executor.rank_group import RankGroup
    from slotzero.sampling.params import SamplingParams
    from slotzero.speculative.widths import SpeculationStats

MOST_RECEIVING = 0.01  # seconds between two steps
SOONEST, LATEST = 0.25, 2.0  # seconds between two Stats: after a change, and without one
MOST_FAILURES = 2  # failed steps in a row after which the device counts as broken
_READ = 1 << 18
_MOST_UNSENT = 64 << 20
_NOT_OURS = ("n", "stop", "detokenize")  # SamplingParams that the HTTP process resolves
_log = logging.getLogger("slotzero.server")

Inbox = queue.SimpleQueue[ToEngine | Callable[[], None]]


class Outbox:
    """Buffers messages that the socket does not accept, so that a slow reader delays no step."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unsent = bytearray()
        self._lock = threading.RLock()  # heartbeats come from another thread

    def put(self, message: FromEngine) -> None:
        with self._lock:
            self._unsent += frame(message)
            self.push()
            if len(self._unsent) > _MOST_UNSENT:
                self.flush()

    def push(self) -> None:
        with self._lock:
            while self._unsent and self._send(socket.MSG_DONTWAIT):
                pass

    def flush(self) -> None:
        """Send everything, waiting for the reader."""
        with self._lock:
            while self._unsent:
                self._send()

    def _send(self, flags: int = 0) -> bool:
        try:
            del self._unsent[: self._socket.send(self._unsent, flags)]
        except BlockingIOError:
            return False
        return True


class LoadingReport:
    """Reports the progress of loading: when a stage begins or ends, and at intervals between."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._stage = ""
        self._due = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage or done == total or time.monotonic() >= self._due:
            self._stage, self._due = stage, time.monotonic() + SOONEST
            self._outbox.put(Loading(stage, done, total))


class EngineLoop:
    """Feeds one engine from the inbox and sends results to the outbox."""

    def __init__(
        self,
        engine: "Engine",
        inbox: Inbox,
        outbox: Outbox,
    ) -> None:
        from slotzero.server.engine_admin import EngineAdmin

        self._engine = engine
        self._admin = EngineAdmin(
            engine, outbox.put, self._abort, self._report_ended, later=inbox.put
        )
        self._inbox = inbox
        self._outbox = outbox
        self._handles: dict[str, RequestHandle] = {}
        self._prompt_tokens = self._generated_tokens = 0
        self._num_failures = 0
        self._has_changed = True
        self._has_grammars = False
        self._reported_at = -LATEST

    def run(self) -> int:
        """Run until the device counts as broken, and return the exit code."""
        while self._num_failures < MOST_FAILURES and not self._admin.is_broken:
            self.turn()
        self._outbox.flush()
        return 1

    def turn(self) -> None:
        """Apply messages for a limited time, then run one step. Without work, wait for a message
        until the next report is due."""
        with self._engine.worker.watch.doing("handling messages"):
            self._receive()
            self._admin.turn()
            if self._can_step:
                self._step()
                self._has_changed = True
            if time.monotonic() >= self._report_due:
                self._report()

    @property
    def _can_step(self) -> bool:
        return self._engine.has_work and self._admin.lets_run

    @property
    def _report_due(self) -> float:
        return self._reported_at + (SOONEST if self._has_changed else LATEST)

    def _receive(self) -> None:
        timeout = 0.0
        if self._can_step:
            self._outbox.push()
        else:
            self._outbox.flush()
            timeout = max(0.0, self._report_due - time.monotonic())
        until = math.inf
        try:
            while time.monotonic() < until or not self._can_step:
                message = self._next_message(timeout)
                timeout, until = 0.0, min(until, time.monotonic() + MOST_RECEIVING)
                self._apply(message)
        except queue.Empty:
            if timeout > SOONEST and not self._has_grammars:  # idle for a while
                self._has_grammars = True
                self._engine.prepare_grammars()

    def _next_message(self, timeout: float) -> ToEngine | Callable[[], None]:
        if not timeout:
            return self._inbox.get_nowait()
        with self._engine.worker.watch.doing("waiting for messages", at_least=math.inf):
            return self._inbox.get(timeout=timeout)

    def _apply(self, message: ToEngine | Callable[[], None]) -> None:
        self._has_changed = True
        if callable(message):
            message()
            return
        if isinstance(message, Cancel):
            self._engine.cancel(message.id)
            self._handles.pop(message.id, None)
            return
        if isinstance(message, AdminRequest):
            self._admin.take(message)
            return
        try:
            self._add(message)
        except Exception as error:
            if not isinstance(error, SlotzeroError):
                _log.exception("a request could not be added")
            self._outbox.put(_refused(message.id, error))

    def _add(self, message: Add) -> None:
        params = _sampling_params(message.params)
        self._handles[message.id] = self._engine.add(message.id, message.prompt, params)

    def _step(self) -> None:
        try:
            answers = self._engine.step()
        except Exception as error:
            self._lose_answers(error)
            return
        self._num_failures = 0
        deltas = [self._delta(answer) for answer in answers]
        if new := [delta for delta in deltas if delta.token_ids or delta.finish_reason]:
            self._outbox.put(Progress(new))
        self._refuse(answers)

    def _refuse(self, answers: Iterable["RequestHandle"]) -> None:
        """Report which of these requests their grammar has ended."""
        for answer in answers:
            if answer.refusal is not None:
                if answer.token_ids:  # else it was refused before it began
                    _log.warning("a request was aborted: %s", answer.refusal)
                self._outbox.put(_refused(answer.request.id, answer.refusal))

    def _abort(self) -> None:
        for request_id in self._handles:
            self._engine.cancel(request_id)

    def _report_ended(self) -> None:
        """Report the requests that ended between two steps, by an action of an administrator."""
        ended = [answer for answer in self._handles.values() if answer.finished]
        deltas = [self._delta(answer) for answer in ended]
        for i, delta in enumerate(deltas):
            if delta.finish_reason == "abort":
                deltas[i] = structs.replace(delta, stop_reason=ABORTED)
        if deltas:
            self._outbox.put(Progress(deltas))
        self._refuse(ended)

    def _delta(self, answer: "RequestHandle") -> TokenDelta:
        request = answer.request
        is_first = answer.num_taken == 0
        tokens, logprobs = answer.take()
        num_top = request.params.logprobs
        scores = answer.prompt_logprobs if is_first else []
        if (tokens or answer.vector is not None) and is_first:
            self._prompt_tokens += len(request.prompt_token_ids)
        self._generated_tokens += len(tokens)
        if answer.finished:
            del self._handles[request.id]
        return TokenDelta(
            request.id,
            tokens,
            [
                TokenLogprobs(p.chosen, p.top_ids[:num_top], p.top_values[:num_top])
                for p in logprobs
            ],
            request.num_found,
            None if answer.failure else request.finish_reason,
            request.stop_reason,
            [TokenLogprobs(p.chosen, p.top_ids, p.top_values) for p in scores],
            b"" if answer.vector is None else answer.vector.astype("<f4").tobytes(),
            answer.weight_version,
            _experts_of(answer) if answer.finished else None,
        )

    def _lose_answers(self, error: Exception) -> None:
        """Handle a failed step: the engine has ended the requests that ran, and those whose new
        tokens were not sent would have a gap."""
        _log.error("a step failed", exc_info=error)
        # out of memory concerns this step only; any other error may mean a broken device
        self._num_failures += not isinstance(error, CapacityError)
        self._outbox.put(Failed(*_name_and_message(error)))
        if isinstance(error, RankLostError):  # the process ends: the server ends its requests
            self._num_failures = MOST_FAILURES
            return
        for request_id, answer in list(self._handles.items()):
            if answer.finished or len(answer.token_ids) != answer.num_taken:
                self._engine.cancel(request_id)
                del self._handles[request_id]
                self._outbox.put(_refused(request_id, error))

    def _report(self) -> None:
        stats = stats_of(self._engine, self._prompt_tokens, self._generated_tokens)
        self._outbox.put(
            structs.replace(
                stats,
                paused=int(self._admin.is_paused),
                asleep=int(bool(self._admin.asleep)),
                bytes_given_back=self._admin.bytes_given_back,
            )
        )
        self._reported_at = time.monotonic()
        self._has_changed = False


def stats_of(engine: "Engine", prompt_tokens: int, generated_tokens: int) -> Stats:
    """Return the engine's statistics. Pages of all layer groups are counted as used by requests,
    else as cached, else as free."""
    schedulers, runners = engine.schedulers, engine.worker.runners
    ledgers = [scheduler.ledger for scheduler in schedulers]
    eager: Counter[str] = Counter()
    for runner in runners:
        eager.update(runner.counts.eager)
    return Stats(
        running=schedulers.num_running,
        waiting=schedulers.num_waiting + engine.num_compiling,
        slots=sum(scheduler.slots.num_slots for scheduler in schedulers),
        pages_used=sum(sum(ledger.num_used) for ledger in ledgers),
        pages_cached=sum(sum(ledger.num_cached) for ledger in ledgers),
        pages=sum(sum(ledger.num_pages) for ledger in ledgers),
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        prefix_asked_tokens=sum(ledger.cache.stats.num_asked_tokens for ledger in ledgers),
        prefix_hit_tokens=sum(ledger.cache.stats.num_hit_tokens for ledger in ledgers),
        preemptions=schedulers.num_preemptions,
        steps=engine.num_steps,
        replays={str(key): n for runner in runners for key, n in runner.counts.sizes.items()},
        eager=dict(eager),
        real_tokens={runner.spec.name: runner.counts.real_tokens for runner in runners},
        padded_tokens={runner.spec.name: runner.counts.padded_tokens for runner in runners},
        failed_sizes={
            str(record.key): record.failure
            for runner in runners
            for record in runner.records.values()
            if record.failure
        },
        steps_watched=engine.sanitizer.steps_watched if engine.sanitizer else 0,
        violations=engine.sanitizer.violations if engine.sanitizer else 0,
        speculation=speculation_of(engine.speculation),
    )


def speculation_of(stats: "SpeculationStats | None") -> SpeculationReport | None:
    if stats is None:
        return None
    return SpeculationReport(
        width=stats.width,
        drafts=stats.num_drafts,
        draft_tokens=stats.num_draft_tokens,
        accepted_tokens=stats.num_accepted_tokens,
        accepted_per_pos=list(stats.accepted_per_pos),
        steps=dict(stats.num_steps_by_width),
    )


def info_of(engine: "Engine", seconds: float, sanitize: str) -> dict[str, Any]:
    """Return what EngineReady reports. `seconds`: from the start of loading to the end of
    recording."""
    from slotzero.bench.hardware import versions

    return {
        "limits": asdict(engine.limits),
        "num_schedulers": len(engine.schedulers),
        "kv": engine.worker.kv,
        "kv_cache": {
            "dtype": engine.limits.kv_cache_dtype,
            "tokens": engine.limits.num_kv_tokens,
        },
        "eos_token_ids": list(engine.eos_token_ids),
        "vocab_size": engine.worker.vocab_size,
        "pooling": asdict(engine.pooling),
        "sizes": {
            runner.spec.name: [
                {
                    "key": str(record.key),
                    "backend": record.backend,
                    "seconds": record.seconds,
                    "bytes": record.num_bytes,
                    "failure": record.failure,
                }
                for record in runner.records.values()
            ]
            for runner in engine.worker.runners
        },
        "load_seconds": seconds - engine.recording_seconds,
        "recording_seconds": engine.recording_seconds,
        "versions": versions(),
        "sanitize": sanitize,
    }


def main(argv: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    write_bare_stacks_when_asked()
    end_with_parent()
    end = socket.socket(fileno=int(argv[0]))
    end.set_inheritable(False)  # child processes such as compilers must not keep it open
    inbox: Inbox = queue.SimpleQueue()
    rank_groups: list[RankGroup] = []
    threading.Thread(target=_listen, args=(end, inbox, rank_groups), daemon=True).start()
    outbox = Outbox(end)
    heartbeats = HeartbeatSender(outbox.put)
    heartbeats.start()
    try:
        engine = _start(json.loads(argv[1]), Share.read(argv[2]), outbox)
        rank_groups.append(engine.rank_group)
        watch = engine.worker.watch
        heartbeats.overdue = lambda: watch.overdue
        return EngineLoop(engine, inbox, outbox).run()
    except (ConnectionError, TimeoutError):
        return 0  # the server is gone
    except SlotzeroError as error:
        return error.exit_code


def _start(settings: Mapping[str, Any], share: Share, outbox: Outbox) -> "Engine":
    try:
        from slotzero.certify.start import start_engine
        from slotzero.config import EngineConfig

        unknown = sorted(set(settings) - {field.name for field in fields(EngineConfig)})
        if unknown:
            raise ConfigError(f"unknown engine setting {unknown[0]!r}")
        config = share.taken(EngineConfig(**settings))
        start = time.perf_counter()
        engine = start_engine(config, on_progress=LoadingReport(outbox))
    except Exception as error:
        outbox.put(Failed(*_name_and_message(error)))
        outbox.flush()
        if isinstance(error, SlotzeroError):
            raise
        _log.exception("the engine could not start")
        raise SlotzeroError(str(error)) from error
    outbox.put(EngineReady(info_of(engine, time.perf_counter() - start, config.sanitize)))
    return engine


def _listen(end: socket.socket, inbox: Inbox, rank_groups: "Sequence[RankGroup]") -> None:
    """Read messages in a thread, so that the end of the server is noticed during a step. No other
    engine will then use the ranks, so they are dismissed if they exist already."""
    frames = Frames(ToEngine)
    code = 1
    try:
        while data := end.recv(_READ):
            for message in frames.feed(data):
                inbox.put(message)
        code = 0
    except (ConnectionError, TimeoutError):
        code = 0
    except Exception:
        _log.exception("the server sent a malformed message")
    finally:
        for rank_group in rank_groups:
            rank_group.dismiss()
        os._exit(code)


def _sampling_params(values: Mapping[str, Any]) -> "SamplingParams":
    from slotzero.sampling.params import SamplingParams

    known = {field.name for field in fields(SamplingParams)} - set(_NOT_OURS)
    unknown = sorted(set(values) - known)
    if unknown:
        raise RequestError(f"{unknown[0]!r} is not a sampling parameter of the engine")
    try:
        return SamplingParams(**values, detokenize=False)
    except (TypeError, ValueError, AttributeError) as error:  # a value of an unexpected type
        raise RequestError(f"sampling parameters: {error}") from error


def _experts_of(answer: "RequestHandle") -> TokenExperts | None:
    experts = answer.routed_experts
    if experts is None:
        return None
    tokens, layers, top_k = experts.shape
    return TokenExperts((tokens, layers, top_k), experts.astype("<i2").tobytes())


def _refused(request_id: str, error: Exception) -> Refused:
    if isinstance(error, RequestError):
        return Refused(request_id, *_name_and_message(error), error.param, error.label)
    return Refused(request_id, *_name_and_message(error))


def _name_and_message(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error) or type(error).__name__


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(exit_code)  # without destructors, as the device may be broken
