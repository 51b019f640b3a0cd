"""Tests of the loop of the engine process, run in the test's own process."""

import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_process import LONG, greedy, prompt_of
from served import SETTINGS

from slotzero.certify.start import start_engine
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import (
    CapacityError,
    ConfigError,
    RequestError,
)
from slotzero.executor.results import Results
from slotzero.grammars.grammar import Grammar
from slotzero.server import client as client_module
from slotzero.server import process
from slotzero.server.messages import (
    Add,
    AdminReply,
    AdminRequest,
    Cancel,
    Failed,
    Frames,
    FromEngine,
    Progress,
    Refused,
    ResetPrefixCache,
    Sleep,
    Stats,
    ToEngine,
    UpdateWeights,
)
from slotzero.server.share import WHOLE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gpu")]


class Desk:
    """An EngineLoop and the other end of its socket."""

    def __init__(self, **more: Any) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.engine = start_engine(EngineConfig(**SETTINGS | more))
        self.inbox: process.Inbox = queue.SimpleQueue()
        self.outbox = process.Outbox(self.ours)
        self.loop = process.EngineLoop(self.engine, self.inbox, self.outbox)
        self._frames = Frames(FromEngine)

    def turn(self, *messages: ToEngine) -> list[Any]:
        for message in messages:
            self.inbox.put(message)
        self.loop.turn()
        return self.read()

    def read(self) -> list[Any]:
        messages: list[Any] = []
        try:
            while data := self.theirs.recv(1 << 20):
                messages += self._frames.feed(data)
        except BlockingIOError:
            pass
        return messages

    def fail_next(self, *errors: Exception) -> None:
        run, left = self.engine.worker.run, list(errors)

        def fragile(step: Any) -> Any:
            if left:
                raise left.pop(0)
            return run(step)

        self.engine.worker.run = fragile  # type: ignore[method-assign]

    def finish(self) -> list[Any]:
        messages = []
        while self.engine.has_work:
            messages += self.turn()
        return messages


MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk() -> Iterator[MakeDesk]:
    with ExitStack() as sockets:

        def make(**more: Any) -> Desk:
            desk = Desk(**more)
            sockets.enter_context(desk.ours)
            sockets.enter_context(desk.theirs)
            return desk

        yield make


def kinds(messages: list[Any], kind: type) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def test_prefixes_are_forgotten_on_request(make_desk: MakeDesk) -> None:
    desk = make_desk()

    def num_cached(name: str, *before: Any) -> int:
        grown = [one for message in kinds(
            [*desk.turn(*before, Add(name, prompt_of(40), greedy(2))), *desk.finish()],
            Progress) for one in message.grown]  # fmt: skip
        return int(grown[0].num_cached)

    assert num_cached("a") == 0
    assert num_cached("b") > 0
    assert num_cached("c", AdminRequest("1", ResetPrefixCache())) == 0
    desk.engine.check()


def test_an_update_that_may_have_left_a_mixture_ends_the_engine(
    make_desk: MakeDesk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()

    def half(*_: Any, **__: Any) -> str:
        raise RuntimeError("the device")

    monkeypatch.setattr(desk.engine, "update_weights", half)
    desk.inbox.put(AdminRequest("1", UpdateWeights(f"{tmp_path}", False, "hold", "1")))
    assert desk.loop.run() == 1
    assert kinds(desk.read(), AdminReply) == [AdminReply("1", "RuntimeError", "the device")]


def test_a_sleep_that_is_refused_ends_no_request(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.turn(Add("a", prompt_of(5), greedy(8)))
    desk.engine.worker.updater = None  # as for a model over the bridge
    (reply,) = kinds(desk.turn(AdminRequest("1", Sleep(2, "abort"))), AdminReply)
    assert (reply.error, reply.message[:32]) == (
        "InvalidInputError",
        "this model runs over the bridge ",
    )
    assert desk.loop._handles["a"].request.num_preemptions == 0
    grown = [one for message in kinds(desk.finish(), Progress) for one in message.grown]
    assert grown[-1].finish_reason == "length"


def test_neither_actions_nor_idle_times_are_steps(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, seen = make_desk(step_timeout=0.5), dict[str, str]()
    watch, get = desk.engine.worker.watch, desk.inbox.get

    def pass_long(name: str) -> None:
        for _ in range(3000):
            watch.pass_time(1.0)
        seen[name] = watch.overdue

    class Inbox:
        put, get_nowait = desk.inbox.put, desk.inbox.get_nowait

        def get(self, *_: Any, **__: Any) -> Any:
            pass_long("idle")
            return get(timeout=0.01)

    monkeypatch.setattr(desk.loop, "_inbox", Inbox())
    monkeypatch.setattr(desk.engine, "reset_prefix_cache", lambda: pass_long("action"))
    desk.turn()
    desk.turn(AdminRequest("1", ResetPrefixCache()))
    desk.turn()
    assert seen == {"action": "", "idle": ""}


def test_a_failed_grammar_is_reported_if_an_action_commits_its_step(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    desk = make_desk()
    desk.engine._max_in_flight = 1  # as on a GPU
    messages = desk.turn(Add("a", prompt_of(5), greedy(20, structured_outputs={"regex": "[a-z]+"})))
    while not desk.engine._in_flight:
        messages += desk.turn()

    def fail(grammar: Grammar, token: int) -> bool:
        grammar.error = RequestError("structured_outputs: too large")
        return False

    monkeypatch.setattr(Grammar, "advance", fail)
    desk.loop._admin.take(AdminRequest("1", Sleep(1, "hold")))
    desk.loop._admin.turn()
    messages += desk.read()
    (refused,) = kinds(messages, Refused)
    assert (refused.id, refused.message) == ("a", "structured_outputs: too large")
    assert desk.loop._handles == desk.engine._handles == {}


def test_requests_with_another_salt_share_no_prefix(make_desk: MakeDesk) -> None:
    desk = make_desk()
    found = []
    for i, salt in enumerate((None, "x", "x", "y", None)):
        params = greedy(2) | ({} if salt is None else {"cache_salt": salt})
        messages = [*desk.turn(Add(f"{i}", prompt_of(40), params)), *desk.finish()]
        found.append(kinds(messages, Progress)[0].grown[0].num_cached)
    assert [num > 0 for num in found] == [False, False, True, False, True]
    desk.engine.check()


def test_requests_begin_by_priority_if_the_policy_says_so(make_desk: MakeDesk) -> None:
    asked = [Add(f"{i}", prompt_of(5), greedy(2) | {"priority": i}) for i in (2, 0, 1)]
    desk = make_desk(max_num_seqs=1, scheduling_policy="priority")
    messages = [*desk.turn(*asked), *desk.finish()]
    ends = [one.id for m in kinds(messages, Progress) for one in m.grown if one.finish_reason]
    assert ends == ["0", "1", "2"]

    desk = make_desk(max_num_seqs=1)
    messages = [*desk.turn(*asked), *desk.finish()]
    assert [(refused.id, refused.param) for refused in kinds(messages, Refused)] == [
        ("2", "priority"), ("1", "priority")
    ]  # fmt: skip
    ends = [one.id for m in kinds(messages, Progress) for one in m.grown if one.finish_reason]
    assert ends == ["0"]


def test_new_requests_do_not_stop_running_ones(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to add a request, a step runs in between."""
    monkeypatch.setattr(process, "MOST_RECEIVING", 0.0)
    desk = make_desk()
    desk.turn(Add("a", prompt_of(5), dict(LONG)))
    steps = desk.engine.num_steps
    desk.turn(*(Add(f"{i}", prompt_of(5), dict(LONG)) for i in range(3)))
    assert (desk.engine.num_steps, desk.inbox.qsize()) == (steps + 1, 2)
    desk.turn()
    desk.turn()
    assert (desk.engine.num_steps, desk.inbox.qsize()) == (steps + 3, 0)


def test_a_cancelled_request_leaves_its_slot_within_two_steps(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.turn(Add("a", prompt_of(40), dict(LONG)))
    for _ in range(3):
        desk.turn()
    steps = desk.engine.num_steps
    after = desk.turn(Cancel("a"), Cancel("nobody"))
    assert desk.engine.schedulers.num_running == 0
    assert desk.engine.num_steps <= steps + 2
    assert desk.engine.schedulers[0].slots.num_free == 4
    assert not kinds(after + desk.finish(), Progress)
    desk.engine.check()


def test_a_failed_step_is_reported_to_its_requests_and_others_continue(
    make_desk: MakeDesk,
) -> None:
    desk = make_desk(max_num_seqs=2)
    asks = [Add(f"{i}", prompt_of(20, seed=i), greedy(5)) for i in range(4)]
    desk.turn(*asks)
    desk.turn()
    desk.fail_next(RuntimeError("the device"))
    messages = desk.turn()
    assert kinds(messages, Failed) == [Failed("RuntimeError", "the device")]
    assert kinds(messages, Refused) == [
        Refused(f"{i}", "RuntimeError", "the device") for i in range(2)
    ]
    ends = [
        (grown.id, grown.finish_reason)
        for progress in kinds(desk.finish(), Progress)
        for grown in progress.grown
        if grown.finish_reason
    ]
    assert ends == [("2", "length"), ("3", "length")]
    assert desk.engine._handles == {}
    desk.engine.check()


def test_an_answer_that_grew_unseen_in_a_failed_step_is_refused(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the tokens but not their log probabilities, so the answer would have a gap."""

    def broken(*_: object) -> None:
        raise RuntimeError("no such row")

    monkeypatch.setattr(Results, "logprobs", broken)
    messages = make_desk().turn(Add("a", prompt_of(5), greedy(1, logprobs=1)))
    assert kinds(messages, Refused) == [Refused("a", "RuntimeError", "no such row")]
    assert not kinds(messages, Progress)


def test_a_failed_grammar_is_reported_as_a_refusal_after_its_tokens(
    make_desk: MakeDesk, caplog: pytest.LogCaptureFixture
) -> None:
    """It affects no other request, and does not count as a failure of the engine."""
    pytest.importorskip("llguidance")
    desk = make_desk(grammar_timeout=60.0)
    endless = greedy(20, structured_outputs={"regex": "(a|b){4}c{1000000}"})
    messages = desk.turn(Add("bad", prompt_of(5), endless), Add("good", prompt_of(5), greedy(30)))
    messages += desk.finish()
    (refused,) = kinds(messages, Refused)
    assert (refused.id, refused.error) == ("bad", "RequestError")
    assert re.match(r"structured_outputs: regex: .*too many expressions", refused.message)
    assert [record.getMessage() for record in caplog.records] == [
        f"a request was aborted: {refused.message}"
    ]
    before = messages[: messages.index(refused)]
    bad = [g for p in kinds(before, Progress) for g in p.grown if g.id == "bad"]
    assert len(bad) == 5 and bad[-1].token_ids == [ord("c")]
    assert not any(grown.finish_reason for grown in bad)
    assert not kinds(messages, Failed)
    good = [g for p in kinds(messages, Progress) for g in p.grown if g.id == "good"]
    assert good[-1].finish_reason == "length"
    assert desk.loop._handles == desk.engine._handles == {}
    desk.engine.check()


def test_a_grammar_that_cannot_be_compiled_is_refused_and_delays_no_request(
    make_desk: MakeDesk, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llguidance")
    desk = make_desk(grammar_timeout=2.0)
    slow = {"json_schema": {"type": "integer", "multipleOf": 99_999_989}}
    messages = desk.turn(
        Add("slow", prompt_of(5), greedy(20, structured_outputs=slow)),
        Add("wrong", prompt_of(5), greedy(20, structured_outputs={"regex": "("})),
        Add("gone", prompt_of(5), greedy(20, structured_outputs={"regex": "a{9}"})),
        Add("good", prompt_of(5), greedy(30)),
    )
    messages += desk.turn(Cancel("gone"))
    while not any(g.finish_reason for p in kinds(messages, Progress) for g in p.grown):
        messages += desk.turn()
    assert "slow" not in [refused.id for refused in kinds(messages, Refused)]
    messages += desk.finish()
    told = {refused.id: refused.message for refused in kinds(messages, Refused)}
    assert told.keys() == {"slow", "wrong"}
    assert told["wrong"] == "structured_outputs: regex: unclosed group"
    limits = "compiling it took more than 2 s", "it needs more than 256 MiB"
    # a fast machine reaches the second limit first
    assert any(limit in told["slow"] for limit in limits)
    assert {g.id for p in kinds(messages, Progress) for g in p.grown} == {"good"}
    assert kinds(messages, Stats)[-1].prompt_tokens <= 5
    assert not caplog.records and not kinds(messages, Failed)
    assert desk.loop._handles == desk.engine._handles == {}


def test_broken_logits_abort_a_structured_request_without_a_reason(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(Grammar, "advance", lambda *_: False)
    desk = make_desk()
    asked = greedy(20, structured_outputs={"regex": "[a-z]+"})
    messages = desk.turn(Add("a", prompt_of(5), asked)) + desk.finish()
    assert not kinds(messages, Refused)
    assert kinds(messages, Progress)[-1].grown[0].finish_reason == "abort"


def test_two_failed_steps_in_a_row_end_the_engine(make_desk: MakeDesk) -> None:
    desk = make_desk(max_num_seqs=1)
    desk.fail_next(RuntimeError("CUDA error"), RuntimeError("CUDA error, still"))
    for i in range(3):
        desk.inbox.put(Add(f"{i}", prompt_of(5), greedy(2)))
    assert desk.loop.run() == 1
    messages = desk.read()
    assert [failed.message for failed in kinds(messages, Failed)] == [
        "CUDA error",
        "CUDA error, still",
    ]
    assert [refused.id for refused in kinds(messages, Refused)] == ["0", "1"]


def test_out_of_memory_does_not_end_the_engine(make_desk: MakeDesk) -> None:
    desk = make_desk(max_num_seqs=1)
    desk.fail_next(*[CapacityError("out of GPU memory")] * 3)
    messages = desk.turn(*(Add(f"{i}", prompt_of(5), greedy(2)) for i in range(4)))
    messages += desk.finish()
    assert [refused.error for refused in kinds(messages, Refused)] == ["CapacityError"] * 3
    assert desk.loop._num_failures == 0
    assert kinds(messages, Progress)[-1].grown[0].finish_reason == "length"


def test_reports_are_neither_too_many_nor_too_few(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    desk = make_desk()
    assert kinds(desk.turn(), Stats)[0].running == 0
    desk.inbox.put(Add("a", prompt_of(5), dict(LONG)))
    for turn in range(100):  # ten seconds of steps of 0.1 s
        now += 0.1
        assert len(kinds(desk.turn(), Stats)) == ((turn + 1) % 3 == 0)
    desk.turn(Cancel("a"))
    desk.finish()
    now += 0.25
    (last,) = kinds(desk.turn(), Stats)
    assert (last.running, last.pages_used) == (0, 0)
    now += 1.9
    monkeypatch.setattr(process, "LATEST", 1.0)
    assert kinds(desk.turn(), Stats) == [last]  # nothing changed: the report is only a sign of life


def test_an_idle_engine_waits_and_wakes(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LATEST", 0.5)
    desk = make_desk()
    desk.turn()
    start, used = time.monotonic(), time.process_time()
    assert len(desk.turn()) == 1
    assert time.monotonic() - start > 0.4
    assert time.process_time() - used < 0.2
    monkeypatch.setattr(process, "LATEST", 60.0)
    timer = threading.Timer(0.1, desk.inbox.put, [Add("a", prompt_of(5), greedy(2))])
    timer.start()
    woken = desk.turn()  # on a busy machine a report is due, too
    assert [type(message) for message in woken if type(message) is not Stats] == [Progress]
    timer.join()
    assert desk.engine.has_work
    assert kinds(desk.finish(), Progress)


def test_a_slow_reader_stops_no_step(make_desk: MakeDesk) -> None:
    """Far more messages than a socket holds are sent, and all of them arrive in order."""
    desk = make_desk(max_num_seqs=1)
    desk.inbox.put(Add("a" * 10_000, prompt_of(5), greedy(100, logprobs=20)))
    desk.loop.turn()
    while desk.engine.has_work:
        desk.loop.turn()
    assert len(desk.outbox._unsent) > 0
    messages = desk.read()
    while desk.outbox._unsent:
        desk.outbox.push()
        messages += desk.read()
    grown = [part for progress in kinds(messages, Progress) for part in progress.grown]
    assert len(grown) == 100
    assert all(len(part.token_ids) == len(part.logprobs) == 1 for part in grown)


def test_settings_are_refused_by_name(make_desk: MakeDesk) -> None:
    desk = make_desk()
    for settings, message in (
        ({"colour": 1}, "unknown engine setting 'colour'"),
        ({"page_size": 3}, "page_size must be a power of two, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            process._start(settings, WHOLE, desk.outbox)
        assert desk.read() == [Failed("ConfigError", message)]


def test_an_unexpected_error_at_the_start_is_reported(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()

    def broken(config: EngineConfig, on_progress: Any) -> Engine:
        raise ZeroDivisionError

    monkeypatch.setattr("slotzero.certify.start.Engine", broken)
    with pytest.raises(client_module.SlotzeroError):
        process._start(SETTINGS, WHOLE, desk.outbox)
    assert desk.read() == [Failed("ZeroDivisionError", "ZeroDivisionError")]


def test_stats_include_the_sanitizer_and_failed_sizes(make_desk: MakeDesk) -> None:
    desk = make_desk(sanitize="full")
    desk.turn(Add("a", prompt_of(5), greedy(3)))
    desk.finish()
    runner = desk.engine.worker.decode
    key = next(iter(runner.records))
    runner.records[key] = replace(runner.records[key], failure="no room")
    stats = process.stats_of(desk.engine, 1, 2)
    assert stats.steps_watched == 3
    assert stats.failed_sizes == {str(key): "no room"}
    assert (stats.prompt_tokens, stats.generated_tokens) == (1, 2)
