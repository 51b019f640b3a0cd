"""Tests of steps that hang: their limits, their names, and what is written about them."""

import gc
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hanging import FILE
from served import wait_until

from slotzero import LLM, SamplingParams
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError, RankLostError
from slotzero.executor import step_watch
from slotzero.executor.step_watch import FACTOR, FIRST_LIMIT, INTERVAL, StepWatch, Work
from slotzero.graph import GraphKey
from slotzero.system import child, stacks

DECODE = Work((GraphKey("decode", 8, 8),), 5)
DRAFT = Work((GraphKey("verify-2", 8, 4), GraphKey("draft-2", 8, 4)), 1)
LATE = "running decode[8] with 5 rows on rank 0 has taken more than {:g} s (see --step-timeout)"
TINY = {
    "backend": "eager", "max_num_seqs": 4, "max_num_batched_tokens": 64, "show_progress": False,
    "kv_cache_memory": 4 << 20, "skip_tokenizer_init": True,
}  # fmt: skip
PROMPT = {"prompt_token_ids": [1, 2, 3]}
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=4, detokenize=False)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> StepWatch:
    """A watch whose time passes by hand."""
    monkeypatch.setattr(step_watch, "_start_thread", lambda: None)
    made = StepWatch()
    step_watch._watched.discard(made)
    return made


def run(watch: StepWatch, work: Work, seconds: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a step of this duration, and return what was overdue at its end."""
    now = [0.0]
    monkeypatch.setattr(step_watch.time, "monotonic", lambda: now[0])
    with watch.doing("running", work):
        now[0] = seconds
        pass_seconds(watch, seconds)
        overdue = watch.overdue
    monkeypatch.undo()
    return overdue


def pass_seconds(watch: StepWatch, seconds: float) -> None:
    for _ in range(round(seconds / INTERVAL)):
        watch.pass_time(INTERVAL)


def test_a_first_run_has_a_long_limit_and_is_not_measured(
    watch: StepWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(watch, DECODE, FIRST_LIMIT - 1, monkeypatch) == ""
    assert run(watch, DECODE, FIRST_LIMIT - 1, monkeypatch) == "", "only the second one is measured"
    assert run(watch, DRAFT, FIRST_LIMIT, monkeypatch).startswith(
        "running verify-2[8t x 4r], draft-2[8t x 4r] with 1 row on rank 0 has taken more than 600 s"
    )


def test_a_limit_follows_the_slowest_run_of_the_same_sizes(
    watch: StepWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in (1.0, 10.0, 2.0):
        run(watch, DECODE, seconds, monkeypatch)
    assert run(watch, DECODE, 10 * FACTOR - 1, monkeypatch) == ""
    slowest = 10 * FACTOR - 1
    assert run(watch, DECODE, FACTOR * slowest, monkeypatch) == LATE.format(FACTOR * slowest)


def test_a_fast_step_may_take_a_minute(watch: StepWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        run(watch, DECODE, 0.001, monkeypatch)
    with watch.doing("running", DECODE):
        pass_seconds(watch, 59)
        assert watch.overdue == ""
        pass_seconds(watch, 1)
        assert watch.overdue == LATE.format(60)
    assert watch.overdue == ""


def test_with_other_ranks_a_step_is_reported_before_they_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_watch, "_start_thread", lambda: None)
    watch = StepWatch(rank=1, rank_timeout=40.0)
    step_watch._watched.discard(watch)
    for _ in range(2):
        run(watch, DECODE, 0.001, monkeypatch)
    assert "on rank 1 has taken more than 30 s" in run(watch, DECODE, 31, monkeypatch)


@pytest.mark.parametrize(("timeout", "overdue"), [(7.0, LATE.format(7)), (0.0, "")])
def test_a_given_limit_is_that_of_every_step(timeout: float, overdue: str) -> None:
    watch = StepWatch(timeout)
    step_watch._watched.discard(watch)
    with watch.doing("running", DECODE):
        pass_seconds(watch, 6)
        assert watch.overdue == ""
        pass_seconds(watch, 1000)
        assert watch.overdue == overdue


@pytest.mark.parametrize(
    ("timeout", "seconds", "overdue"),
    [(7.0, 59, ""), (7.0, 60, "reading"), (70.0, 69, ""), (70.0, 70, "reading"), (0.0, 1000, "")],
)
def test_a_block_may_have_a_longer_limit(timeout: float, seconds: int, overdue: str) -> None:
    watch = StepWatch(timeout)
    step_watch._watched.discard(watch)
    with watch.doing("reading", at_least=60.0):
        pass_seconds(watch, seconds)
        assert watch.overdue.startswith(overdue) and bool(watch.overdue) == bool(overdue)


def test_time_in_which_the_process_did_not_run_does_not_count(watch: StepWatch) -> None:
    with watch.doing("running", DECODE):
        watch.pass_time(10 * FIRST_LIMIT)
        assert watch.overdue == ""


def test_a_block_inside_another_is_watched_in_its_place(watch: StepWatch) -> None:
    with watch.doing("planning a step"):
        pass_seconds(watch, FIRST_LIMIT - 1)
        with watch.doing("waiting for", DECODE):
            pass_seconds(watch, 10)
            assert (watch.overdue, str(watch)) == ("", "waiting for decode[8] with 5 rows")
        pass_seconds(watch, 1)
        assert watch.overdue.startswith("planning a step on rank 0 has taken more than 600 s")
    pass_seconds(watch, 10 * FIRST_LIMIT)
    assert watch.overdue == "", "nothing runs"


def test_it_is_reported_once_with_the_stacks_of_all_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []
    watch = StepWatch(5.0, ask_others=lambda: asked.append("asked"))
    step_watch._watched.discard(watch)
    release = threading.Event()

    def wait_for_release() -> None:
        release.wait()

    thread = threading.Thread(target=wait_for_release, name="a thread that waits")
    thread.start()
    try:
        with caplog.at_level(logging.WARNING, "slotzero.engine"), watch.doing("running", DECODE):
            pass_seconds(watch, 20)
    finally:
        release.set()
        thread.join()
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("running decode[8] with 5 rows on rank 0 has taken more than 5 s; ")
    assert "thread a thread that waits:" in first
    assert "in wait_for_release" in first
    assert "thread MainThread:" in first
    assert last == "rank 0: running decode[8] with 5 rows has ended"
    assert asked == ["asked"]


def test_the_thread_that_watches_keeps_no_engine_alive() -> None:
    num = len(step_watch._watched)
    watches = [StepWatch() for _ in range(3)]
    assert len(step_watch._watched) == num + 3
    assert sum(thread.name == "step watch" for thread in threading.enumerate()) == 1
    del watches
    gc.collect()
    assert len(step_watch._watched) <= num


# Engines


@pytest.mark.slow
def test_an_offline_engine_names_a_step_that_hangs_and_goes_on_if_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM("tiny:llama", step_timeout=1.0, **TINY)
    (before,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    release = threading.Event()
    runner = llm.engine.worker.decode
    replay = runner.replay

    def endless_operator(key: GraphKey) -> None:
        release.wait()
        replay(key)

    monkeypatch.setattr(runner, "replay", endless_operator)
    answers: list[list[int]] = []

    def generate() -> None:
        (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))

    thread = threading.Thread(target=generate)
    with caplog.at_level(logging.ERROR, "slotzero.engine"):
        thread.start()
        try:
            wait_until(lambda: "in endless_operator" in caplog.text)
        finally:
            release.set()
            thread.join()
    assert "running decode[1] with 1 row on rank 0 has taken more than 1 s" in caplog.text
    assert answers == [list(before.outputs[0].token_ids)]


def two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Start two ranks, of which rank 1 hangs in a collective while the file `hang` exists."""
    monkeypatch.setenv(FILE, str(folder / "hang"))
    monkeypatch.setattr(child, "FOLLOWER", "hanging_follower")
    llm = LLM("tiny:llama", tensor_parallel_size=2, rank_timeout=300.0, step_timeout=5.0, **TINY)
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return llm


@pytest.mark.slow
def test_a_collective_that_never_ends_is_named_and_every_rank_writes_its_stacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = two_ranks(tmp_path, monkeypatch)
    (pid,) = llm.engine.rank_group.pids
    (tmp_path / "hang").touch()
    errors: list[Exception] = []
    written = [""]

    def generate() -> None:
        try:
            llm.generate([PROMPT], GREEDY, use_tqdm=False)
        except RankLostError as error:
            errors.append(error)

    def is_written() -> bool:
        written[0] += capfd.readouterr().err
        return "in endless" in written[0] and "stacks of all threads" in caplog.text

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        wait_until(is_written)
    finally:
        os.kill(pid, signal.SIGKILL)
        thread.join()
    assert "with 1 row on rank 0 has taken more than 5 s" in caplog.text
    assert f"rank 1 (process {pid}), stacks of all threads:" in written[0]
    assert "was killed by signal 9" in str(errors[0])


@pytest.mark.slow
def test_a_collective_that_times_out_says_in_which_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = two_ranks(tmp_path, monkeypatch)
    (pid,) = llm.engine.rank_group.pids

    def time_out(*_: object) -> None:
        raise RuntimeError("Timed out waiting 300000ms for recv operation to complete")

    monkeypatch.setattr(llm.engine.worker, "_launch", time_out)
    monkeypatch.setattr(llm.engine.rank_group, "send", lambda messages: None)
    named = r"while running prefill\[.*\] with 1 row \(see --rank-timeout\): Timed out waiting"
    with pytest.raises(RankLostError, match=named):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert f"rank 1 (process {pid}), stacks of all threads:" in capfd.readouterr().err


def test_a_negative_limit_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="step_timeout must be at least 0 seconds"):
        EngineConfig(model="tiny:llama", step_timeout=-1.0)


def test_stacks_name_threads_and_functions() -> None:
    text = stacks.stacks()
    assert text.startswith("thread ")
    assert "in test_stacks_name_threads_and_functions" in text


def test_a_watch_on_the_clock_sees_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_watch, "INTERVAL", 0.01)
    watch = StepWatch(0.05)
    with watch.doing("running", DECODE):
        until = time.monotonic() + 60
        while not watch.overdue and time.monotonic() < until:
            time.sleep(0.01)
        assert watch.overdue == LATE.format(0.05)
