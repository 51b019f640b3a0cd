"""Tests of grammars that take too long or too much memory: no other request is affected."""

import array
import contextlib
import ctypes
import errno
import fcntl
import gc
import itertools
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import PAGE, check_nothing_leaked, drain, greedy, make, prompt_of
from structures import begun, settled, shaped, tokens_of

from slotzero import LLM
from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import ConfigError, RequestError
from slotzero.grammars.fork_server import _ForkServer
from slotzero.grammars.grammar import Grammar
from slotzero.grammars.limits import GrammarLimits
from slotzero.grammars.messages import NotStarted
from slotzero.grammars.pool import Grammars
from slotzero.sampling.structured import StructuredOutputs
from slotzero.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

pytest.importorskip("llguidance")

MIB = 1 << 20
VOCAB = 151_936
# After five characters llguidance must expand the 30,000: 20 ms for each token, and 10 MB.
LARGE = "a(1|2){4}a{30000}"
SLOWER = "a(1|2){4}a{1000000}"
SLOW = {"json_schema": {"type": "integer", "multipleOf": 99_999_989}}  # minutes, gigabytes
HOSTILE: dict[str, dict[str, Any]] = {
    "multipleOf": {"json_schema": {"type": "integer", "multipleOf": 999_983}},
    "a larger multipleOf": SLOW,
    "patternProperties": {
        "json_schema": {
            "type": "object",
            "patternProperties": {f"^a{i}[a-z]+$": {"type": "integer"} for i in range(400)},
        }
    },
    "allOf": {
        "json_schema": {
            "type": "string",
            "allOf": [{"pattern": f"^(.*{chr(97 + i)}){{3}}.*$"} for i in range(24)],
        }
    },
    "regex": {"regex": "|".join(f"(.*{c}.{{{12 + i}}}x)" for i, c in enumerate("abcdefgh"))},
}
ORDINARY: dict[str, dict[str, Any]] = {
    "100 properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "maxLength": 20} for i in range(100)},
            "required": [f"p{i}" for i in range(100)],
            "additionalProperties": False,
        }
    },
    "nested models": {
        "json_schema": {
            "$defs": {
                f"M{i}": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "integer", "minimum": 0},
                        "at": {"type": "string", "format": "date-time"},
                        "parts": {"type": "array", "items": {"$ref": f"#/$defs/M{i + 1}"}},
                    },
                    "required": ["id", "at"],
                }
                for i in range(30)
            }
            | {"M30": {"type": "object"}},
            "$ref": "#/$defs/M0",
        }
    },
    "object": {"json_object": True},
    "2,000 choices": {"choice": [f"option number {i} of many" for i in range(2000)]},
}


def pool(vocab_size: int = 259, **limits: Any) -> Grammars:
    return Grammars(Tokenizer.bytes_tokenizer, vocab_size, (257,), GrammarLimits(**limits))


def workers_of(grammars: Grammars) -> set[int]:
    """Return the process ids of the grammar workers."""
    assert grammars.supervisor.server is not None
    server = grammars.supervisor.server.pid
    return {int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()}


def num_unread_bytes(grammars: Grammars) -> int:
    """Return how many bytes from its only worker were not read yet."""
    (fd,) = (
        key.fd for key in grammars.supervisor.selector.get_map().values() if key.data is not None
    )
    num = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, num)
    return num[0]


def await_that(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def await_workers(grammars: Grammars, num: int) -> None:
    def are_there() -> bool:
        grammars.poll(0.01)
        return len(workers_of(grammars)) == num

    await_that(are_there)


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def run_until(engine: Engine, is_over: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not is_over():
        assert time.monotonic() < until
        engine.step()


def run(engine: Engine) -> None:
    run_until(engine, lambda: not engine.has_work)


def follow(grammar: Grammar, text: str) -> bool:
    return all(grammar.advance(byte) and settled(grammar) for byte in text.encode())


# ---- one grammar ----


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_grammar_is_compiled(name: str) -> None:
    grammars = pool(reply_seconds=60.0)
    assert tokens_of(begun(grammars, **ORDINARY[name]).allowed)
    (worker,) = grammars._workers.values()
    assert worker.memory < 64 * MIB


def test_a_grammar_that_takes_too_long_is_refused_and_its_process_is_gone() -> None:
    grammars = pool(reply_seconds=0.5, memory=8192 * MIB)
    with pytest.raises(RequestError) as raised:
        begun(grammars, **SLOW)
    assert str(raised.value) == (
        "structured_outputs: json_schema: compiling it took more than 0.5 s: use a simpler "
        "grammar, or raise --grammar-timeout"
    )
    await_that(lambda: not workers_of(grammars))
    with pytest.raises(RequestError, match="took more than"):
        grammars.begin(StructuredOutputs(**SLOW))  # a second request does not try again
    assert not grammars.is_busy


def test_a_grammar_that_needs_too_much_memory_is_refused_and_its_process_is_gone() -> None:
    grammars = pool(reply_seconds=300.0, memory=32 * MIB)
    with pytest.raises(RequestError) as raised:
        begun(grammars, **SLOW)
    assert str(raised.value) == (
        "structured_outputs: json_schema: it needs more than 32 MiB of memory: use a simpler "
        "grammar, or raise --grammar-memory"
    )
    await_that(lambda: not workers_of(grammars))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_within_its_limits_or_refused(name: str) -> None:
    grammars = pool(reply_seconds=1.0, memory=64 * MIB)
    began = time.monotonic()
    grammar = grammars.begin(StructuredOutputs(**HOSTILE[name]))
    if settled(grammar):
        (worker,) = grammars._workers.values()
        assert worker.memory <= 64 * MIB
    else:
        assert grammar.failure.startswith("structured_outputs: ")
    assert time.monotonic() - began < 60.0


def test_a_mask_that_takes_too_long_fails_its_answer() -> None:
    grammars = pool(mask_seconds=0.01, reply_seconds=300.0)
    slow = begun(grammars, regex=SLOWER)
    assert not follow(slow, "a1212a")
    assert slow.failure == (
        "structured_outputs: regex: computing the mask for the next token took more than 0.01 s: "
        "use a simpler grammar"
    )


def test_a_mask_that_takes_too_long_fails_no_other_answer() -> None:
    """Answers with the same grammar are replayed from their own tokens, even if their worker ended
    before the engine, busy with a long step, had read its replies."""
    grammars = pool(vocab_size=VOCAB)
    first, second, slow, third, ready = (begun(grammars, regex="a+x") for _ in range(5))
    assert all(follow(answer, "aa") for answer in (first, second, slow, third, ready))
    assert first.advance(ord("a")) and second.advance(ord("a"))
    await_that(lambda: num_unread_bytes(grammars) > 2 * VOCAB // 8)
    (pid,) = workers_of(grammars)
    os.kill(pid, signal.SIGSTOP)
    assert slow.advance(ord("a")) and third.advance(ord("a"))
    os.kill(pid, signal.SIGPROF)  # the signal that the worker's timer sends
    os.kill(pid, signal.SIGCONT)
    await_that(lambda: not is_alive(pid))
    assert not settled(slow) and "took more than 1 s" in slow.failure
    for answer in (first, second, third, ready):
        assert settled(answer) and follow(answer, "ax") and tokens_of(answer.allowed) == {257}


# ---- many answers ----


def advance_all(grammars: Grammars, answers: Sequence[Grammar]) -> None:
    """Send one token to each answer, as a step of the engine does: all are sent before any
    reply."""
    with alarm(60):
        assert all(answer.advance(ord("a")) for answer in answers)
        assert all(map(settled, answers))


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Fail a test whose process would wait forever."""

    def fail(*_: object) -> None:
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_one_grammar_may_have_more_answers_than_its_socket_buffers_hold() -> None:
    grammars = pool(vocab_size=VOCAB)
    first = begun(grammars, regex="[ab]{50}")
    answers = [first, *(begun(grammars, regex="[ab]{50}") for _ in range(599))]
    for _ in range(2):
        advance_all(grammars, answers)
        assert not any(answer.failure for answer in answers)
    assert tokens_of(answers[-1].allowed) == {ord("a"), ord("b")}


def test_long_answers_of_one_grammar_are_replayed_in_a_new_worker() -> None:
    grammars = pool(vocab_size=VOCAB, reply_seconds=300.0, mask_seconds=300.0)
    answers = [begun(grammars, regex="[ab]*") for _ in range(64)]
    for answer in answers:
        answer.tokens += [ord("a")] * 4000
    (pid,) = workers_of(grammars)
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: not is_alive(pid))
    advance_all(grammars, answers)


# ---- the cache of compiled grammars ----


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes() -> None:
    grammars = pool(memory=40 * MIB, reply_seconds=300.0, mask_seconds=300.0)
    for i in range(8):
        grammar = begun(grammars, regex=f"{i}{LARGE}")
        assert follow(grammar, f"{i}a1212a")
        grammar.release()
        assert 0 < grammars.cached_bytes <= 40 * MIB
    assert 0 < len(grammars._workers) < 8
    assert [*grammars._workers][-1].text.startswith("7")
    await_that(lambda: len(workers_of(grammars)) == len(grammars._workers))


def test_the_bytes_of_a_grammar_are_those_of_its_process() -> None:
    grammars = pool(reply_seconds=300.0, mask_seconds=300.0)
    assert follow(begun(grammars, regex=LARGE), "a1212a")
    (worker,) = grammars._workers.values()
    (pid,) = workers_of(grammars)
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    if not rollup.exists():
        pytest.skip("this kernel does not report private memory")
    lines = (line.split() for line in rollup.read_text().splitlines()[1:])
    private = 1024 * next(int(words[1]) for words in lines if words[0] == "Private_Dirty:")
    assert abs(private - worker.memory) < 8 * MIB  # memory that it copied from the fork server
    assert worker.memory > 4 * MIB


def test_a_grammar_in_use_is_not_evicted() -> None:
    grammars = pool(memory=40 * MIB, reply_seconds=300.0)
    kept = begun(grammars, regex="ab+c")
    for i in range(30):
        begun(grammars, regex=f"{i}x").release()
    grammars._workers[next(iter(grammars._workers))].memory = 41 * MIB
    grammars.supervisor._balance()
    assert follow(kept, "abbc") and tokens_of(kept.allowed) == {257}


def test_grammars_in_use_have_a_limit_together() -> None:
    """To free memory, the answers of the largest grammar fail."""
    grammars = pool(memory=16 * MIB)
    answers = [begun(grammars, regex=f"{i}x+") for i in range(9)]
    for i, worker in enumerate(grammars._workers.values()):
        worker.memory = 15 * MIB + i
    grammars.poll(0.0)
    assert [bool(answer.failure) for answer in answers] == [False] * 8 + [True]
    assert "all grammars in use need more than 128 MiB" in answers[8].failure


def test_no_grammar_is_compiled_while_those_in_use_are_at_their_limit() -> None:
    grammars = pool(memory=16 * MIB)
    first = begun(grammars, regex="a+")
    (worker,) = grammars._workers.values()
    worker.memory = 128 * MIB
    second = grammars.begin(StructuredOutputs(regex="b+"))
    for _ in range(20):
        grammars.poll(0.01)
    assert not second.is_settled
    first.release()
    assert settled(second)


def test_the_number_of_idle_workers_is_limited() -> None:
    grammars = pool()
    for i in range(40):
        begun(grammars, choice=[f"x{i}", "y"]).release()
    assert len(grammars._workers) == 32
    assert next(iter(grammars._workers)).text == '["x8", "y"]'
    await_workers(grammars, 32)


def test_idle_workers_of_small_grammars_are_charged_for_their_process() -> None:
    grammars = pool(memory=4 * MIB)
    for i in range(8):
        begun(grammars, choice=[f"x{i}", "y"]).release()
    assert len(grammars._workers) <= 4


def test_grammars_wait_in_order_while_many_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slotzero.grammars.workers._MAX_RUNNING", 2)
    grammars = pool()
    in_use = [begun(grammars, regex=f"{i}+") for i in range(2)]
    third, fourth = (grammars.begin(StructuredOutputs(regex=f"{i}+")) for i in (2, 3))
    for _ in range(20):
        grammars.poll(0.01)
    assert not third.is_settled and not fourth.is_settled
    in_use[0].release()
    assert settled(third) and not fourth.is_settled
    in_use[1].release()
    assert settled(fourth)


def test_a_worker_is_replaced_while_grammars_in_use_are_at_their_limit() -> None:
    grammars = pool(memory=16 * MIB)
    begun(grammars, regex="a+")
    pids = workers_of(grammars)
    small = begun(grammars, regex="b+")
    next(iter(grammars._workers.values())).memory = 128 * MIB
    (pid,) = workers_of(grammars) - pids
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: not is_alive(pid))
    assert follow(small, "bb")


def test_a_grammar_that_waits_too_long_for_others_is_refused() -> None:
    grammars = pool(memory=16 * MIB)
    first = begun(grammars, regex="a+")
    next(iter(grammars._workers.values())).memory = 128 * MIB
    grammars.supervisor.limits = replace(grammars.supervisor.limits, queue_seconds=0.2)
    second = grammars.begin(StructuredOutputs(regex="b+"))
    assert not settled(second)
    assert second.failure == (
        "structured_outputs: regex: it was not compiled for 0.2 s because of other grammars in "
        "use: send the request again later"
    )
    assert follow(first, "a") and not grammars.is_busy


# ---- too many processes or files ----


@contextlib.contextmanager
def no_more_files(pid: int) -> Iterator[None]:
    """Limit a process so that it can open no further file, until it closes one.

    The limit is on numbers of files. So in this process unused numbers below others are taken
    first: with one of them as the limit, closing a file with a higher number would not help.
    """
    fds = Path(f"/proc/{pid}/fd")
    taken = {int(fd) for fd in os.listdir(fds) if os.path.lexists(fds / fd)}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit, fillers = next(fd for fd in itertools.count() if fd not in taken), list[int]()
    try:
        while pid == os.getpid() and limit <= max(taken):
            fillers.append(os.open(os.devnull, os.O_RDONLY))
            limit = fillers[-1] + 1  # not the lowest number without a file: `accept` reserves one
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for fd in fillers:
            os.close(fd)


@pytest.mark.parametrize("whose", ["the engine's", "the fork server's"])
def test_a_grammar_is_refused_if_no_process_can_be_started_for_it(whose: str) -> None:
    grammars = pool()
    used = begun(grammars, regex="a+")
    assert grammars.supervisor.server is not None
    server = grammars.supervisor.server.pid
    with no_more_files(os.getpid() if whose == "the engine's" else server):
        refused = grammars.begin(StructuredOutputs(regex="b+"))
        assert not settled(refused)
        assert refused.failure == (
            "structured_outputs: regex: no process can be started for it (Too many open files): "
            "send the request again later"
        )
        assert follow(used, "aa") and not grammars.is_busy
    assert follow(begun(grammars, regex="b+"), "b")
    assert grammars.supervisor.server.pid == server


def test_idle_workers_make_room_if_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = pool()
    for i in range(3):
        begun(grammars, regex=f"{i}+").release()
    make_pair = socket.socketpair

    def pair_after_two_are_closed(*args: Any) -> tuple[socket.socket, socket.socket]:
        if len(grammars.supervisor.workers.idle) > 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return make_pair(*args)

    monkeypatch.setattr(socket, "socketpair", pair_after_two_are_closed)
    assert follow(begun(grammars, regex="b+"), "b")
    assert [source.text for source in grammars._workers] == ["2+", "b+"]


def test_a_fork_server_that_cannot_be_started_refuses_grammars() -> None:
    grammars = pool()
    with no_more_files(os.getpid()):
        grammars.prepare()
        with pytest.raises(RequestError, match="no process can be started for it"):
            grammars.begin(StructuredOutputs(regex="a+"))
    assert follow(begun(grammars, regex="a+"), "a")


@pytest.mark.parametrize("failing", ["fork", "pidfd_open"])
def test_the_fork_server_says_that_a_worker_could_not_be_started(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    child = subprocess.Popen(["sleep", "600"])
    engine, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _, theirs = socket.socketpair()
    server = _ForkServer(control, lambda _: 0, ctypes.CDLL(None))
    monkeypatch.setattr(os, "fork", lambda: child.pid)
    monkeypatch.setattr(os, failing, fail)
    try:
        server._fork(7, theirs.detach())
        assert pickle.loads(engine.recv(1000)) == NotStarted(7, "no more processes")
        assert is_alive(child.pid) == (failing == "fork")
    finally:
        child.kill()
        child.wait()


# ---- processes that end ----


def test_a_worker_that_is_killed_is_replaced_once() -> None:
    grammars = pool()
    answer, idle = (begun(grammars, regex="ab+c") for _ in range(2))
    assert follow(answer, "ab")
    (pid,) = workers_of(grammars)
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: not is_alive(pid))
    assert follow(answer, "b") and tokens_of(answer.allowed) == {ord("b"), ord("c")}
    assert follow(idle, "ab")
    (pid,) = workers_of(grammars)
    os.kill(pid, signal.SIGKILL)
    await_that(lambda: not is_alive(pid))
    assert not follow(answer, "b")
    assert "its process was killed by signal 9" in answer.failure
    assert follow(begun(grammars, regex="ab+c"), "abc")


def test_a_killed_fork_server_ends_its_workers_and_is_replaced() -> None:
    grammars = pool(reply_seconds=300.0)
    answer = begun(grammars, regex="ab+c")
    slow = grammars.begin(StructuredOutputs(**SLOW))
    await_workers(grammars, 2)
    pids = workers_of(grammars)
    assert grammars.supervisor.server is not None
    os.kill(grammars.supervisor.server.pid, signal.SIGKILL)
    await_that(lambda: not any(map(is_alive, pids)))
    assert follow(answer, "ab")
    slow.release()
    assert follow(begun(grammars, regex="x"), "x")


def test_a_mask_that_arrived_before_the_fork_server_was_killed_is_used() -> None:
    grammars = pool(reply_seconds=300.0)
    answer = begun(grammars, regex="ab+c")
    assert answer.advance(ord("a"))
    await_that(lambda: num_unread_bytes(grammars) > 0)
    server = grammars.supervisor.server
    assert server is not None
    os.kill(server.pid, signal.SIGKILL)
    await_that(lambda: not is_alive(server.pid))
    grammars._hear(server)  # before the reply is read
    assert answer.is_ready
    assert follow(answer, "b")


def test_processes_end_with_their_owner() -> None:
    grammars = pool(reply_seconds=300.0)
    begun(grammars, regex="a+")
    grammars.begin(StructuredOutputs(**SLOW))
    await_workers(grammars, 2)
    assert grammars.supervisor.server is not None
    pids = {grammars.supervisor.server.pid, *workers_of(grammars)}
    del grammars
    gc.collect()
    await_that(lambda: not any(map(is_alive, pids)))


def test_a_tokenizer_that_cannot_be_loaded_refuses_grammars() -> None:
    def missing() -> Tokenizer:
        raise RequestError("there is no tokenizer")

    grammars = Grammars(missing, 259, (257,), GrammarLimits())
    with pytest.raises(RequestError, match="regex: there is no tokenizer"):
        begun(grammars, regex="a+")


# ---- engines ----


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield make(max_num_seqs=6, grammar_timeout=60.0, skip_tokenizer_init=False)


def asks(num: int) -> Sequence[tuple[list[int], Any]]:
    """Return plain requests, and some with ordinary grammars."""
    shapes = ("regex", "choice", "schema")
    return [
        (prompt_of(5 + i, seed=i), shaped(shapes[i % 3], i) if i % 2 else greedy(40))
        for i in range(num)
    ]


def hostile(i: int) -> Any:
    return shaped({"json_schema": {"type": "integer", "multipleOf": 99_999_989 + 2 * i}})


def test_others_finish_as_if_alone_while_hostile_grammars_are_compiled(engine: Engine) -> None:
    alone = make(max_num_seqs=1)
    expected = []
    for prompt, params in asks(8):
        answer = alone.add("one", prompt, params)
        drain(alone)
        expected.append(answer.token_ids)
    refused = [engine.add(f"hostile {i}", [1, 2], hostile(i)) for i in range(3)]
    await_workers(engine.admission.grammars, 3)
    pids = workers_of(engine.admission.grammars)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # otherwise the memory limit might end them first
    answers: list[RequestHandle] = []
    for i, (prompt, params) in enumerate(asks(8)):
        answers.append(engine.add(f"{i}", prompt, params))
        engine.step()
    plain = answers[::2]
    run_until(engine, lambda: all(answer.finished for answer in plain))
    assert not any(answer.finished for answer in refused)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run(engine)
    assert [answer.token_ids for answer in answers] == expected
    for answer in refused:
        assert (answer.finish_reason, answer.token_ids) == ("abort", [])
        assert re.search("compiling it took more than|it needs more than", answer.failure)
    check_nothing_leaked(engine)


def test_a_request_is_cancelled_while_its_grammar_is_compiled(engine: Engine) -> None:
    before = len(engine.admission.grammars._workers)
    answer = engine.add("one", [1, 2], hostile(10))
    twin = engine.add("two", [1, 2], hostile(10))
    for _ in range(20):
        engine.step()
    assert engine.num_compiling == 2 and engine.has_work
    engine.cancel("one")
    assert (answer.finish_reason, answer.failure) == ("abort", "")
    engine.step()
    assert engine.num_compiling == 1 and engine.has_work
    engine.cancel("two")
    assert twin.finished and not engine.has_work
    assert len(engine.admission.grammars._workers) == before
    check_nothing_leaked(engine)


def test_requests_go_on_when_the_worker_of_their_grammar_is_killed(engine: Engine) -> None:
    params = shaped({"regex": "[a-z]{60}x"})
    expected = engine.add("alone", [1, 2], params)
    run(engine)
    answer = engine.add("killed", [1, 2], params)
    run_until(engine, lambda: len(answer.token_ids) >= 20)
    for pid in workers_of(engine.admission.grammars):
        os.kill(pid, signal.SIGKILL)
    run(engine)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == expected.token_ids
    check_nothing_leaked(engine)


def test_a_late_mask_holds_up_its_own_request_only(
    engine: Engine,
) -> None:
    """Its worker is stopped for a while: the other request runs, and then the answer continues."""
    params = shaped({"regex": "[a-z]{30}y"})
    expected = engine.add("alone", [1, 2], params)
    run(engine)
    answer = engine.add("late", [1, 2], params)
    run_until(engine, lambda: len(answer.token_ids) >= 5)
    pids = workers_of(engine.admission.grammars)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        plain = engine.add("plain", [1, 2], greedy(20))
        run_until(engine, lambda: plain.finished)
        assert 5 <= len(answer.token_ids) <= 6 and not answer.finished
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    run(engine)
    assert answer.token_ids == expected.token_ids
    check_nothing_leaked(engine)


def test_masks_that_come_at_any_time_change_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a grace period every mask is late; with little memory, requests are preempted."""
    monkeypatch.setattr("slotzero.engine.admission.MASK_GRACE", 0.0)
    expected = []
    alone = make(max_num_seqs=1)
    for prompt, params in asks(8):
        answer = alone.add("one", prompt, params)
        run(alone)
        expected.append(answer.token_ids)
    engine = make(
        max_num_seqs=8, max_num_batched_tokens=16, max_model_len=64, page_size=4,
        kv_cache_memory=6 * PAGE,
    )  # fmt: skip
    answers = [engine.add(f"{i}", *asked) for i, asked in enumerate(asks(8))]
    run_until(engine, lambda: engine.check() or not engine.has_work)
    assert [answer.token_ids for answer in answers] == expected
    assert any(answer.request.num_preemptions for answer in answers)
    check_nothing_leaked(engine)


def test_offline_a_hostile_grammar_is_named_before_anything_runs() -> None:
    llm = LLM("tiny:llama", backend="eager", show_progress=False, grammar_memory=32 * MIB)
    with pytest.raises(RequestError, match=r"prompt 1: structured_outputs: json_schema: (it|comp)"):
        llm.generate(["a", "b"], [greedy(4), hostile(20)], use_tqdm=False)
    assert llm.engine.num_steps == 0
    assert llm.generate("a", shaped("regex"), use_tqdm=False)[0].outputs[0].text
    check_nothing_leaked(llm.engine)


def test_validation_does_not_hold_the_engine_lock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    poll = Grammars.poll

    def noted(self: Grammars, seconds: float) -> None:
        waited.append(seconds)
        poll(self, seconds)

    monkeypatch.setattr(Grammars, "poll", noted)
    engine.validate("one", [1, 2], shaped({"regex": "validated"}))
    assert waited and not any(waited)
    check_nothing_leaked(engine)


def test_offline_grammars_of_a_batch_are_compiled_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM("tiny:llama", backend="eager", show_progress=False)
    events: list[str] = []
    begin, poll = Grammars.begin, Grammars.poll

    def begin_noted(self: Grammars, asked: StructuredOutputs) -> Grammar:
        events.append("begin")
        return begin(self, asked)

    def poll_noted(self: Grammars, seconds: float) -> None:
        events.append("poll")
        poll(self, seconds)

    monkeypatch.setattr(Grammars, "begin", begin_noted)
    monkeypatch.setattr(Grammars, "poll", poll_noted)
    params = [shaped({"choice": [f"{i}", "x"]}) for i in range(3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert all(output.outputs[0].text in (f"{i}", "x") for i, output in enumerate(outputs))
    assert events[:4] == ["begin", "begin", "begin", "poll"]
    check_nothing_leaked(llm.engine)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_request_that_every_scheduler_refuses_leaves_nothing_behind(
    engine: Engine, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RequestError("no scheduler takes it")

    params = shaped({"regex": f"refused {is_compiled}"})
    if is_compiled:
        engine.validate("one", [1, 2], params)
    with monkeypatch.context() as patched:
        patched.setattr(DpSchedulers, "add", refuse)
        if is_compiled:
            with pytest.raises(RequestError, match="no scheduler takes it"):
                engine.add("one", [1, 2], params)
        else:
            answer = engine.add("one", [1, 2], params)
            run(engine)
            assert (answer.finish_reason, answer.failure) == ("abort", "no scheduler takes it")
    assert not any(worker.answers for worker in engine.admission.grammars._workers.values())
    check_nothing_leaked(engine)
    assert engine.add("one", [1, 2], params)  # the id is free again
    run(engine)


@pytest.mark.parametrize(
    "settings", [{"grammar_timeout": 0.0}, {"grammar_timeout": -1.0}, {"grammar_memory": 1000}]
)
def test_invalid_limits_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        make(**settings)
