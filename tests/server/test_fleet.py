"""Tests of several engines: they answer as one does, and if one dies, the others keep serving."""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import SETTINGS

from slotzero import LLM, SamplingParams
from slotzero.cli import main as cli
from slotzero.errors import EngineDiedError, EngineUnavailableError, OverloadedError
from slotzero.server import client as client_module
from slotzero.server import fleet as fleet_module
from slotzero.server.broadcast import Broadcast
from slotzero.server.fleet import Fleet, RoutedRequest
from slotzero.server.messages import SpeculationReport, Stats, TokenDelta
from slotzero.server.share import Share
from slotzero.server.stream import Mail, Stream
from slotzero.server.sum_stats import sum_stats

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": None}
SOON = 120.0  # seconds: enough for a busy machine, and a limit for a test that hangs


@pytest.fixture(scope="module", autouse=True)
def _without_gpu() -> Iterator[None]:
    """Hide GPUs from the processes that are started here, as conftest.py does for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


async def tokens_of(errand: RoutedRequest) -> list[int]:
    async with asyncio.timeout(SOON), aclosing(errand):
        return [token async for grown in errand for token in grown.token_ids]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.01)


def states(fleet: Fleet) -> list[str]:
    return [replica.state for replica in fleet.replicas]


# Two engines


class Served:
    """A fleet for many tests, with an event loop that runs only during a test."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.fleet = Fleet(SETTINGS, 2)
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _start(self) -> None:
        assert self.fleet.state == "stopped"
        await self.fleet.start()
        assert self.fleet.state == "loading"
        with pytest.raises(EngineUnavailableError, match="engine 0 is loading"):
            self.fleet.submit("early", [1], GREEDY)
        await until(lambda: self.fleet.num_ready)
        assert self.fleet.state == "ready", "ready once the first engine is"
        await until(lambda: self.fleet.num_ready == 2)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.run(made.fleet.stop())
    made.runner.close()
    assert [replica.pid for replica in made.fleet.replicas] == [None, None]
    assert made.fleet.exit_code == 0


def test_two_answer_as_one_does(served: Served) -> None:
    prompts = [[(7 * i + j) % 256 for j in range(5 + 7 * i)] for i in range(20)]
    fleet, alone = served.fleet, LLM(**SETTINGS)
    wanted = [
        output.outputs[0].token_ids
        for output in alone.generate(prompts, SamplingParams(**GREEDY), use_tqdm=False)
    ]

    async def ask() -> tuple[list[list[int]], list[int]]:
        errands = [fleet.submit(f"{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
        num_open = [replica.num_open for replica in fleet.replicas]
        return await asyncio.gather(*map(tokens_of, errands)), num_open

    answers, num_open = served.run(ask())
    assert answers == wanted
    assert num_open == [10, 10]

    def all_told() -> bool:
        stats = fleet.stats
        return stats is not None and stats.generated_tokens == sum(map(len, wanted))

    served.run(until(all_told))
    assert fleet.stats is not None
    assert fleet.stats.slots == 8


def test_requests_without_a_seed_are_sampled_independently(served: Served) -> None:
    """Engines that drew from the same seed would give each answer twice."""
    params = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 16}

    async def ask() -> tuple[list[list[int]], list[int]]:
        errands = [served.fleet.submit(f"{i}", [1, 2, 3], params) for i in range(8)]
        num_open = [replica.num_open for replica in served.fleet.replicas]
        return await asyncio.gather(*map(tokens_of, errands)), num_open

    answers, num_open = served.run(ask())
    assert min(num_open) > 0, "an engine got no request"
    assert len(set(map(tuple, answers))) == 8


def seeds_of(monkeypatch: pytest.MonkeyPatch, given: Mapping[str, Any]) -> list[int]:
    """Return the seeds that a fleet of two gives four requests without one; one of them is
    refused."""
    fleet, sent = Fleet(given, 2), []

    def send(request_id: str, prompt: list[int], params: Mapping[str, Any]) -> None:
        if request_id == "refused":
            raise EngineUnavailableError("loading")
        sent.append(params["seed"])

    monkeypatch.setattr(fleet, "send", send)
    for i in range(4):
        with pytest.raises(EngineUnavailableError):
            fleet.submit("refused", [1], {})
        fleet.submit(f"{i}", [1], {})
    fleet.submit("5", [1], {"seed": 5})
    assert sent.pop() == 5, "a request's own seed is kept"
    return sent


def test_seeds_differ_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [seed for _ in range(3) for seed in seeds_of(monkeypatch, {})]
    assert len(set(drawn)) == 12
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_a_seed_of_the_server_gives_the_same_distinct_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, again, other = (seeds_of(monkeypatch, {"seed": seed}) for seed in (7, 7, 8))
    assert first == again
    assert len({*first, *other}) == 8


def test_a_prompt_goes_to_the_engine_that_knows_it(served: Served) -> None:
    prompt = [3] * 100

    async def ask() -> list[int]:
        found = []
        for _ in range(4):
            errand = served.fleet.submit("a", prompt, GREEDY)
            async with aclosing(errand):
                found.append((await anext(errand)).num_cached)
        return found

    first, *rest = served.run(ask())
    assert first == 0
    assert min(rest) >= 64


def test_too_many_waiting_requests_are_refused_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.fleet, "max_waiting", 3)

    async def ask() -> list[list[int]]:
        errands = [served.fleet.submit(f"{i}", [i + 1], GREEDY) for i in range(3)]
        with pytest.raises(OverloadedError, match="3 requests are waiting already") as caught:
            served.fleet.admit()
        assert caught.value.retry_after > 0
        answers = [await tokens_of(errand) for errand in errands]
        return [*answers, await tokens_of(served.fleet.submit("3", [5], GREEDY))]

    assert [len(tokens) for tokens in served.run(ask())] == [8] * 4


def test_a_killed_engine_loses_only_requests_that_had_output(served: Served) -> None:
    """Waiting requests go to the other engine, and the killed one comes back."""
    fleet = served.fleet
    dying = fleet.replicas[1]
    ends: dict[tuple[int, bool], list[str]] = {}

    async def run(i: int) -> None:
        errand = fleet.submit(f"{i}", [i % 256], GREEDY | {"max_tokens": 40 + i})
        home = 1 if errand._stream._mail in [o.mail for o in dying._open.values()] else 0
        num = 0
        try:
            async with asyncio.timeout(SOON), aclosing(errand):
                async for grown in errand:
                    num += len(grown.token_ids)
            end = "whole" if num == 40 + i else f"{num} of {40 + i}"
        except EngineDiedError:
            end = "died"
        ends.setdefault((home, num > 0), []).append(end)

    async def kill() -> None:
        tasks = [asyncio.create_task(run(i)) for i in range(30)]
        await until(lambda: dying.num_open - dying.num_waiting >= 2)
        assert dying.num_waiting
        assert dying.pid is not None
        os.kill(dying.pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert fleet.state == "ready"
        await until(lambda: fleet.num_ready == 2)
        before = dying.stats
        assert before is None or before.generated_tokens == 0
        errands = [fleet.submit(f"{i}", [i], GREEDY) for i in range(2)]
        assert dying.num_open == 1, "the restarted engine gets no requests"
        await asyncio.gather(*map(tokens_of, errands))

    served.run(kill())
    assert set(ends) <= {(0, True), (1, True)}, "a request ended without a reason"
    assert set(ends[0, True]) == {"whole"}
    counts = Counter(ends[1, True])
    assert set(counts) == {"whole", "died"}
    assert counts["died"] <= 4, "at most one per slot"
    assert (dying.generation, fleet.replicas[0].generation) == (1, 0)


def test_both_engines_are_killed_at_once(served: Served) -> None:
    """Requests without output wait until an engine is back."""
    fleet = served.fleet

    async def kill() -> list[str]:
        async def run(i: int) -> str:
            errand, num = fleet.submit(f"{i}", [i], GREEDY | {"max_tokens": 200}), 0
            try:
                async with asyncio.timeout(SOON), aclosing(errand):
                    async for grown in errand:
                        num += len(grown.token_ids)
                return "whole" if num == 200 else "short"
            except EngineDiedError:
                return "died" if num else "died without a word"

        tasks = [asyncio.create_task(run(i)) for i in range(20)]
        await until(lambda: all(r.num_open > r.num_waiting for r in fleet.replicas))
        for replica in fleet.replicas:
            assert replica.pid is not None
            os.kill(replica.pid, signal.SIGKILL)
        await until(lambda: fleet.state == "restarting")
        await until(lambda: fleet.num_waiting == fleet.num_moving > 0)
        return await asyncio.gather(*tasks)

    counts = Counter(served.run(kill()))
    assert set(counts) == {"whole", "died"}
    assert counts["died"] <= 8, "at most one per slot of both engines"
    served.run(until(lambda: fleet.num_ready == 2))


# Death, step by step, with fake engines


class FakeReplica:
    """Fake engine that keeps its requests; the test decides how they end."""

    def __init__(self, fleet: Fleet, state: str = "ready") -> None:
        self._changes = fleet.changes
        self.state = state
        self.failure, self.exit_code, self.progress = "", 0, None
        self.info: Mapping[str, Any] = {
            "limits": {"max_num_seqs": 4},
            "kv_cache": {"dtype": "float32", "tokens": 4096},
            "num_schedulers": 1,
        }
        self.stats: Stats | None = None
        self.generation = 0
        self.is_draining = False
        self.mails: list[Mail] = []
        self.cancelled: list[int] = []

    @property
    def num_open(self) -> int:
        return len(self.mails)

    num_waiting = num_open

    def submit(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> Stream:
        if self.state != "ready":
            raise EngineUnavailableError(f"it is {self.state}")
        mail: Mail = asyncio.Queue()
        self.mails.append(mail)
        number = len(self.mails)
        return Stream(mail, lambda: self.cancelled.append(number))

    def say(self, token: int, finish_reason: str | None = None) -> None:
        for mail in self.mails:
            mail.put_nowait(TokenDelta("a", [token], [], 0, finish_reason))

    def enter(self, state: str) -> None:
        if state == "restarting":
            for mail in self.mails:
                mail.put_nowait(EngineDiedError("it died"))
            self.mails = []
        self.state = state
        self._changes.notify()


Play = Callable[[Fleet, list[FakeReplica]], Coroutine[Any, Any, None]]


def play(size: int, part: Play) -> None:
    async def run() -> None:
        fleet = Fleet({}, size)
        replicas = [FakeReplica(fleet) for _ in range(size)]
        fleet.replicas = tuple(replicas)  # type: ignore[assignment]
        async with asyncio.timeout(SOON):
            await part(fleet, replicas)
        assert fleet.num_moving == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "PAUSE", 0)
        asyncio.run(run())


async def begin(fleet: Fleet) -> "asyncio.Task[list[int]]":
    task = asyncio.create_task(tokens_of(fleet.submit("a", [1], {})))
    await asyncio.sleep(0.01)
    return task


def test_a_request_without_output_goes_to_another_engine() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        task = await begin(fleet)
        (home,) = (replica for replica in replicas if replica.mails)
        home.enter("restarting")
        await asyncio.sleep(0.01)
        other = replicas[1 - replicas.index(home)]
        assert len(other.mails) == 1
        other.say(5)
        other.say(6, "length")
        assert await task == [5, 6]

    play(2, part)


def test_an_unresponsive_engine_gets_no_requests() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        replicas[0].enter("unresponsive")
        tasks = [await begin(fleet) for _ in range(6)]
        assert [replica.num_open for replica in replicas] == [0, 6]
        replicas[1].say(7, "stop")
        assert await asyncio.gather(*tasks) == [[7]] * 6
        replicas[0].enter("ready")
        await fleet.submit("a", [1], {}).aclose()
        assert replicas[0].num_open == 1

    play(2, part)


def test_a_request_with_output_ends_with_an_error() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        task = await begin(fleet)
        for replica in replicas:
            replica.say(5)
        for replica in [replica for replica in replicas if replica.mails]:
            replica.enter("restarting")
        with pytest.raises(EngineDiedError, match="it died"):
            await task
        assert not any(replica.mails for replica in replicas)

    play(2, part)


def test_a_request_is_sent_again_only_once() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        task = await begin(fleet)
        for _ in range(2):
            (home,) = (replica for replica in replicas if replica.mails)
            home.enter("restarting")
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDiedError, match="it died"):
            await task
        assert fleet.num_ready == 1, "a third engine could have taken it"

    play(3, part)


def test_the_request_waits_if_there_is_only_one_engine() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        (only,) = replicas
        task = await begin(fleet)
        only.enter("restarting")
        await asyncio.sleep(0.01)
        assert (fleet.num_moving, fleet.num_waiting) == (1, 1)
        assert not task.done()
        with pytest.raises(EngineUnavailableError, match="it is restarting"):
            fleet.submit("b", [1], {})
        only.enter("ready")
        await asyncio.sleep(0.01)
        only.say(5, "stop")
        assert await task == [5]

    play(1, part)


@pytest.mark.parametrize("end", ["failed", "stopped"])
def test_a_request_fails_if_no_engine_is_left(end: str) -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        task = await begin(fleet)
        for replica in replicas:
            replica.enter("restarting")
        await asyncio.sleep(0.01)
        replicas[0].enter(end)
        await asyncio.sleep(0.01)
        assert not task.done(), "the other engine may come back"
        replicas[1].enter(end)
        with pytest.raises(EngineDiedError):
            await task

    play(2, part)


def test_the_server_ends_while_a_request_waits() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        task = await begin(fleet)
        replicas[0].enter("restarting")
        await asyncio.sleep(0.01)
        replicas[0].is_draining = True
        fleet.changes.notify()
        with pytest.raises(EngineDiedError):
            await task

    play(1, part)


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_the_client_disconnects_while_its_request_waits(how: str) -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        errand = fleet.submit("a", [1], {})
        task = asyncio.create_task(tokens_of(errand))
        await asyncio.sleep(0.01)
        replicas[0].enter("restarting")
        await asyncio.sleep(0.01)
        if how == "aclose":
            await errand.aclose()
            assert await task == []
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        replicas[0].enter("ready")
        await asyncio.sleep(0.01)
        assert not replicas[0].mails

    play(1, part)


def test_a_disconnect_cancels_the_request_on_its_engine() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        errand = fleet.submit("a", [1], {})
        await errand.aclose()
        await errand.aclose()
        assert replicas[0].cancelled == [1]
        with pytest.raises(StopAsyncIteration):
            await anext(errand)
        forgotten = fleet.submit("b", [1], {})
        del forgotten
        await asyncio.sleep(0.01)
        assert replicas[1].cancelled == [1]

    play(2, part)


ACTS = st.tuples(
    st.sampled_from(["ask", "say", "end", "restarting", "ready", "failed"]), st.integers(0, 2)
)


@settings(max_examples=60)
@given(st.lists(ACTS, max_size=25))
def test_every_request_ends_with_a_reason_whatever_happens(acts: list[tuple[str, int]]) -> None:
    """A replica that gets a request while it is not ready raises, which would fail the test."""

    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        ends: list[str] = []
        num_deaths = 0

        async def ask() -> None:
            errand, num, deaths = fleet.submit("a", [1], {}), 0, num_deaths
            try:
                async with aclosing(errand):
                    async for grown in errand:
                        num += len(grown.token_ids)
                ends.append("whole")
            except EngineDiedError:
                is_fair = num > 0 or num_deaths - deaths > 1 or not fleet.num_ready
                ends.append("died" if is_fair else "given up too soon")

        tasks = []
        for act, i in acts:
            replica = replicas[i]
            if act == "ask" and fleet.num_ready:
                tasks.append(asyncio.create_task(ask()))
            elif act == "say":
                replica.say(5)
            elif act == "end":
                replica.say(6, "stop")
                replica.mails = []
            elif act == "restarting" and replica.state == "ready":
                num_deaths += 1
                replica.enter("restarting")
            elif act in ("ready", "failed") and replica.state == "restarting":
                replica.generation += 1
                replica.enter(act)
            for _ in range(5):
                await asyncio.sleep(0)
        for replica in replicas:
            if replica.state == "ready":
                num_deaths += 1
                replica.enter("restarting")
        for replica in replicas:
            replica.enter("failed")
        await asyncio.gather(*tasks)
        assert len(ends) == len(tasks)
        assert set(ends) <= {"whole", "died"}

    play(3, part)


def test_the_state_of_a_fleet_is_that_of_its_best_engine() -> None:
    async def part(fleet: Fleet, replicas: list[FakeReplica]) -> None:
        order = ("ready", "restarting", "loading", "unresponsive", "stopped", "failed")
        for one, other in itertools.product(order, repeat=2):
            replicas[0].state, replicas[1].state = one, other
            assert fleet.state == min(one, other, key=order.index)
        replicas[0].state, replicas[0].failure, replicas[0].exit_code = "failed", "no room", 4
        replicas[1].state = "ready"
        assert (fleet.failure, fleet.exit_code) == ("", 0)
        replicas[1].state, replicas[1].failure, replicas[1].exit_code = "failed", "lost", 1
        assert (fleet.failure, fleet.exit_code) == ("no room", 4)

    play(2, part)


# An engine that fails for good


def test_an_engine_that_fails_for_good_stays_out_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = client_module._spawn

    async def spawn(
        theirs: socket.socket, settings: Mapping[str, Any], share: Share
    ) -> asyncio.subprocess.Process:
        if share.index == 0:
            return await real(theirs, settings, share)
        code = "raise SystemExit(7)"
        return await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", code)

    monkeypatch.setattr(client_module, "_spawn", spawn)
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)

    async def live() -> None:
        fleet = Fleet(SETTINGS, 2, restarts=2)
        await fleet.start()
        await until(lambda: states(fleet) == ["ready", "failed"])
        assert fleet.replicas[1].failure.startswith("engine 1's process ended 3 times in 300 s")
        assert (fleet.state, fleet.failure, fleet.exit_code) == ("ready", "", 0)
        errands = [fleet.submit(f"{i}", [i], GREEDY) for i in range(6)]
        assert [len(tokens) for tokens in await asyncio.gather(*map(tokens_of, errands))] == [8] * 6
        await fleet.drain(1)
        await fleet.stop()
        assert (states(fleet), fleet.exit_code) == (["stopped", "stopped"], 0)

    asyncio.run(live())
    assert "engine 1 has failed and is not restarted" in caplog.text
    alarms = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert not any("engine 0" in alarm for alarm in alarms), alarms


def test_if_all_engines_fail_the_server_ends_with_their_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["serve", "tiny:llama", "--backend", "cuda", "--dp", "2", "--port", "0"]
    assert cli.main(words) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "slotzero: error: backend=cuda: torch finds no CUDA device; use --backend cpu"
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("0", "data_parallel_size must be a number of engines, at least 1, got 0"),
        ("-1", "data_parallel_size must be a number of engines, at least 1, got -1"),
        ("two", "--data-parallel-size"),
        ("1.5", "--data-parallel-size"),
    ],
)
def test_an_invalid_size_is_refused_by_name(
    given: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--data-parallel-size", "--dp-size", "--dp"):
        try:
            code = cli.main(["serve", "tiny:llama", f"{flag}={given}"])
        except SystemExit as end:
            code = int(end.code or 0)
        assert code == 2
        assert names in capsys.readouterr().err


# Reports


def test_a_tally_covers_all_engines() -> None:
    one = Stats(
        1, 2, 4, 5, 6, 100, 7, 8, 9, 10, 0, 11, {"decode[8]": 3}, {"x": 1}, {"decode": 5}, {},
        {"decode[4]": "no room"}, 0, 0, SpeculationReport(3, 1, 2, 1, [1], {3: 1}),
    )  # fmt: skip
    other = msgspec.structs.replace(
        one, running=3, replays={"decode[8]": 1, "decode[2]": 2}, failed_sizes={"decode[2]": "odd"},
        speculation=SpeculationReport(2, 1, 2, 2, [1, 1], {1: 4}),
    )  # fmt: skip
    assert sum_stats([]) is None
    assert sum_stats([one]) is one
    both = sum_stats([one, other])
    assert both is not None
    assert (both.running, both.slots, both.pages) == (4, 8, 200)
    assert both.replays == {"decode[8]": 4, "decode[2]": 2}
    assert both.failed_sizes == {"decode[4]": "no room", "decode[2]": "odd"}
    assert both.speculation == SpeculationReport(3, 2, 4, 3, [2, 1], {3: 1, 1: 4})
    plain = msgspec.structs.replace(one, speculation=None)
    assert sum_stats([plain, one]).speculation == one.speculation  # type: ignore[union-attr]


def test_a_pulse_wakes_only_current_waiters() -> None:
    async def live() -> None:
        changes = Broadcast()
        waiting = [asyncio.create_task(changes.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        changes.notify()
        await asyncio.gather(*waiting)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await changes.wait()

    asyncio.run(live())
