"""Tests of the sanitizer on live traffic: it changes nothing, and has no false alarms."""

import argparse
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traced import Traced
from traffic import NUM_PAGES, draw_batch, engine_of, send, settings_of

from slotzero.certify import live
from slotzero.certify.compare import first_difference
from slotzero.certify.live import LiveSanitizer
from slotzero.certify.start import start_engine
from slotzero.cli import flags
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import ConfigError, ContractError, SanitizerError, outcome_of
from slotzero.graph import GraphKey, Recording, Runner, TensorKind
from slotzero.graph.runner import Counts
from slotzero.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

BACKENDS = ("eager", "cpu")
WATCHED = (("llama", "tight"), ("qwen3", "wide"))
OFF = """
import sys
from slotzero import LLM, SamplingParams
llm = LLM("tiny:llama", backend="eager", skip_tokenizer_init=True, show_progress=False)
llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=3), use_tqdm=False)
assert llm.engine.sanitizer is None
light = {"slotzero.certify", "slotzero.certify.start"}
sys.exit(any(name.startswith("slotzero.certify") for name in {*sys.modules} - light))
"""


def memory_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return a copy of every tensor that steps may change."""
    entries = engine.worker.registry.entries()
    return {e.name: e.tensor.clone() for e in entries if e.kind is not TensorKind.CONSTANT}


def settings_with(family: str, shape: str, drafter: str | None) -> dict[str, object]:
    """Return the settings, with room for the KV cache of a drafter."""
    wanted = settings_of(family, shape)
    if drafter is None:
        return wanted
    more = {"speculative": drafter, "speculative_steps": 3, "speculative_adaptive": False}
    return {**wanted, "kv_cache_memory": 2 * int(str(wanted["kv_cache_memory"])), **more}


def num_launches(engine: Engine) -> int:
    """Count launches: three in a step that verifies drafts, two in one that the drafter follows."""
    counts = [runner.counts for runner in engine.worker.runners]
    return sum(count.replays + count.eager.total() for count in counts)


def changed(engine: Engine, before: dict[str, torch.Tensor]) -> list[str]:
    now = memory_of(engine)
    return [name for name, was in before.items() if first_difference(now[name], was, 0.0)]


# Nothing is changed


def test_off_does_not_import_the_sanitizer() -> None:
    assert subprocess.run([sys.executable, "-c", OFF], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize(
    ("family", "shape", "drafter", "backend"),
    [
        *((*pair, None, "eager") for pair in WATCHED),
        (*WATCHED[0], None, "cpu"),
        ("llama", "wide", "eagle3", "eager"),
    ],
)
def test_a_watched_engine_gives_the_same_answers(
    family: str, shape: str, drafter: str | None, backend: str
) -> None:
    """Tokens, log probabilities, logits and, after every batch, all memory are bitwise equal."""
    wanted = settings_with(family, shape, drafter)
    del wanted["lazy_recording"]  # Traced sets it itself
    plain, watched = (
        Traced(**wanted, backend=backend, sanitize=mode)  # type: ignore[arg-type]
        for mode in ("off", "full")
    )
    rng = random.Random(3)
    for _ in range(4):
        batch = draw_batch(rng, plain.engine.limits.max_model_len)
        ours, theirs = (send(traced.engine, batch) for traced in (watched, plain))
        assert [a.token_ids for a in ours] == [a.token_ids for a in theirs]
        assert [a.logprobs for a in ours] == [a.logprobs for a in theirs]
        assert [a.finish_reason for a in ours] == [a.finish_reason for a in theirs]
        assert changed(watched.engine, memory_of(plain.engine)) == []
    assert watched.logits.keys() == plain.logits.keys()
    for request_id, rows in plain.logits.items():
        assert torch.equal(torch.stack(rows), torch.stack(watched.logits[request_id]))
    sanitizer, scheduler = watched.engine.sanitizer, watched.engine.schedulers[0]
    assert sanitizer is not None
    assert (sanitizer.steps_watched, sanitizer.violations) == (num_launches(watched.engine), 0)
    assert scheduler.ledger.cache.stats.num_hit_tokens > 0
    assert (scheduler.num_preemptions > 0) == (shape == "tight")


def test_sample_watches_every_nth_step_of_each_runner() -> None:
    engine = engine_of("llama", "wide", backend="eager", sanitize="sample", sanitize_every=7)
    rng = random.Random(5)
    for _ in range(20):
        send(engine, draw_batch(rng, 128))
    assert engine.sanitizer is not None
    by_runner = [sum(runner.counts.eager.values()) for runner in engine.worker.runners]
    assert sum(by_runner) == num_launches(engine) == engine.num_steps
    assert min(by_runner) > 7
    assert engine.sanitizer.steps_watched == sum(-(-steps // 7) for steps in by_runner)
    assert engine.worker.tables.observer is None


def test_a_gpu_without_room_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(live, "StepMemory", full)
    engine = engine_of("llama", "wide", backend="eager", sanitize="full", sanitize_action="raise")
    tokens = [answer.token_ids for answer in send(engine, draw_batch(random.Random(6), 128))]
    plain = engine_of("llama", "wide", backend="eager")
    assert tokens == [a.token_ids for a in send(plain, draw_batch(random.Random(6), 128))]
    assert engine.sanitizer is not None
    assert engine.sanitizer.steps_watched == 0
    assert engine.sanitizer.steps_without_room == engine.num_steps
    assert len([r for r in caplog.records if "the sanitizer skips" in r.message]) == 1


# Faults

Damage = Callable[[Runner, Callable[[], None]], None]


class Damaged(Recording):
    num_bytes = 0

    def __init__(self, runner: Runner, replay: Callable[[], None], damage: Damage) -> None:
        self._runner, self._replay, self._damage = runner, replay, damage

    def replay(self) -> None:
        self._damage(self._runner, self._replay)


def keeps_positions(runner: Runner, replay: Callable[[], None]) -> None:
    """Inject a fault: a derived tensor keeps the values of the previous step."""
    positions = runner.registry["positions"]
    stale = positions.clone()
    replay()
    positions.copy_(stale)


def forgets_to_locate(runner: Runner, replay: Callable[[], None]) -> None:
    """Inject a fault: the step runs with the slots and positions of the previous step.

    The step runs eagerly, since a recording repeats operators and calls no kernel set.
    """
    kernels = runner.spec.function.__self__._kernels  # type: ignore[attr-defined]
    kernels.decode_positions = lambda *_: None
    try:
        replay()
    finally:
        del kernels.decode_positions


def writes_all_other_pages(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    registry = runner.registry
    mine = registry["page_table"][registry.published_values("slots")].unique().long()
    kv = registry["kv_full"]
    kept = kv[:, mine].clone()
    kv.fill_(1.0)
    kv[:, mine] = kept


def writes_rows_of_others(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    idle = set(range(1, len(runner.registry["length"]))) - set(
        runner.registry.published_values("slots")
    )
    runner.registry["length"][min(idle)] = 3


def writes_slot_0(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    runner.registry["tokens"][0, 1] = 5


def writes_what_was_published(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    runner.registry["slots"][-1] = 1


def reads_all_other_pages(runner: Runner, replay: Callable[[], None]) -> None:
    """Inject a fault that changes nothing while the other pages hold finite values."""
    registry = runner.registry
    replay()
    registry["logits"][0] += registry["kv_full"][0].sum() * 0


def reads_past_its_length(runner: Runner, replay: Callable[[], None]) -> None:
    registry = runner.registry
    slot, _ = registry.published_values("slots")[:2]
    position, page_size = int(registry["length"][slot]) + 1, registry["kv_full"].shape[2]
    page = registry["page_table"][slot, position // page_size]
    replay()
    registry["logits"][0] += registry["kv_full"][0, page, position % page_size].sum() * 0


def computes_wrongly(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    runner.registry["logits"][0, 7] += 0.5


def computes_wrong_logits(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    runner.registry["verify_logits"][0, 7] += 0.5


FAULTS = [
    (keeps_positions, {"S1", "S2"}, "positions"),
    (forgets_to_locate, {"S1", "S2"}, "positions"),
    (writes_all_other_pages, {"S4"}, "kv_full"),
    (writes_rows_of_others, {"S4"}, "length"),
    (writes_slot_0, {"S4"}, "tokens"),
    (writes_what_was_published, {"S4"}, "slots"),
    (reads_all_other_pages, {"S1"}, "kv_full"),
    (reads_past_its_length, {"S1"}, "kv_full"),
    (computes_wrongly, {"S2"}, "logits"),
]
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [2, 7, 1, 8, 2, 8])
# One prompt, which the prefix cache keeps; another; the first again; and both at once.
ROUNDS = (PROMPTS[:1], PROMPTS[1:], PROMPTS[:1], PROMPTS)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def recorded() -> Engine:
    """Return an engine with all sizes captured, and room to poison all pages of others at once."""
    wanted = settings_of("llama", "wide")
    kv = int(str(wanted["kv_cache_memory"])) // NUM_PAGES["wide"] * 10
    more = {"max_num_seqs": 3, "kv_cache_memory": kv, "lazy_recording": False}
    return engine_of("llama", "wide", backend="cpu", **more)


@pytest.fixture
def engine(recorded: Engine) -> Iterator[Engine]:
    """Return the captured engine in its original state, and restore it after the test."""
    worker, runner = recorded.worker, recorded.worker.decode
    recordings, records, memory = (
        dict(runner._recordings),
        dict(runner.records),
        memory_of(recorded),
    )
    yield recorded
    runner._recordings, runner.records, runner.counts = recordings, records, Counts()
    for each in worker.runners:
        each.observer = None
    worker.tables.observer = recorded.sanitizer = None
    recorded._abandon(RuntimeError("the test is over"), [])
    worker.tables.apply()
    worker.registry.reupload_published()
    for name, tensor in memory.items():
        worker.registry[name].copy_(tensor)


def damage(engine: Engine, how: Damage, runner: Runner | None = None) -> None:
    """Inject the fault into every captured graph of a runner, by default of decode."""
    runner = runner or engine.worker.decode
    for key, recording in runner._recordings.items():
        replay = partial(runner.eager, key) if how is forgets_to_locate else recording.replay
        runner._recordings[key] = Damaged(runner, replay, how)


def watch(engine: Engine, action: str) -> LiveSanitizer:
    config = EngineConfig(sanitize="full", sanitize_action=action)
    engine.sanitizer = live.attach(engine, config)
    return engine.sanitizer


def ask(engine: Engine, rounds: Sequence[Sequence[list[int]]] = ROUNDS) -> list[list[int]]:
    answers = []
    for i, prompts in enumerate(rounds):
        answers += [engine.add(f"{i} {j}", prompt, GREEDY) for j, prompt in enumerate(prompts)]
        while engine.has_work:
            engine.step()
    engine.check()
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(("how", "checks", "tensor"), FAULTS)
def test_a_fault_is_logged_counted_and_named(
    engine: Engine,
    how: Damage,
    checks: set[str],
    tensor: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sanitizer = watch(engine, "log")
    damage(engine, how)
    ask(engine)
    assert {violation.check for violation in sanitizer.last} & checks
    assert tensor in {violation.tensor for violation in sanitizer.last}
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert {record.name for record in errors} == {"slotzero.certify"}
    assert len(errors) == sanitizer.violations > 0
    assert [str(v) for v in sanitizer.last] == [r.message for r in errors][-live.KEPT :]


def test_log_changes_nothing_but_the_log(engine: Engine) -> None:
    """The answers are as wrong as without the sanitizer."""
    good = ask(engine)
    damage(engine, forgets_to_locate)
    engine.schedulers[0].ledger.cache.clear()
    bad = ask(engine)
    assert bad != good
    engine.schedulers[0].ledger.cache.clear()
    watch(engine, "log")
    assert ask(engine) == bad


@pytest.mark.parametrize("how", [fault[0] for fault in FAULTS])
def test_raise_stops_the_engine_before_a_token_leaves_it(engine: Engine, how: Damage) -> None:
    watch(engine, "raise")
    damage(engine, how)
    answer = engine.add("a", PROMPTS[0], GREEDY)
    engine.step()  # the prompt: prefill has no fault
    had = list(answer.token_ids)
    before = memory_of(engine)
    with pytest.raises(SanitizerError, match=r"^decode\[1\]: S\d: tensor '") as caught:
        engine.step()
    assert caught.value.exit_code == outcome_of(ContractError).exit_code == 5
    assert answer.token_ids == had
    assert answer.finish_reason == "abort"
    engine.check()
    lost = ["kv_full"] if how is writes_all_other_pages else []  # no request owns these pages
    assert set(changed(engine, before)) <= set(lost)


@pytest.mark.parametrize("how", [fault[0] for fault in FAULTS])
def test_fallback_answers_as_if_there_were_no_fault(
    engine: Engine, how: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    """This includes prompts in the prefix cache, and a second run without further violations."""
    runner = engine.worker.decode
    expected = ask(engine)
    replays = runner.counts.replays
    engine.schedulers[0].ledger.cache.clear()
    sanitizer = watch(engine, "fallback")
    damage(engine, how)
    assert ask(engine) == expected
    found = sanitizer.violations
    assert found > 0
    assert ask(engine) == expected
    assert sanitizer.violations == found
    assert runner.counts.replays == replays
    assert {record.backend for record in runner.records.values()} == {"eager"}
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1
    assert said[0].startswith("runner decode runs eagerly from now on: sanitizer: S")


def test_a_size_that_is_recorded_after_the_fallback_runs_eagerly_too() -> None:
    engine = engine_of("llama", "wide", backend="cpu")
    sanitizer, runner = watch(engine, "fallback"), engine.worker.decode
    with torch.inference_mode():
        runner.prepare(GraphKey("decode", 1, 1))
    damage(engine, computes_wrongly)
    ask(engine)
    assert sanitizer.violations == 1
    assert {key.rows for key in runner.records} == {1, 2}
    assert {record.backend for record in runner.records.values()} == {"eager"}
    assert runner.counts.replays == 0


def test_a_step_that_raises_leaves_memory_as_it_was(engine: Engine) -> None:
    def breaks(runner: Runner, replay: Callable[[], None]) -> None:
        replay()
        raise MemoryError("the device")

    watch(engine, "log")
    ask(engine)  # something is in the prefix cache
    engine.add("a", PROMPTS[1], GREEDY)
    engine.step()
    damage(engine, breaks)
    before = memory_of(engine)
    with pytest.raises(MemoryError, match="the device"):
        engine.step()
    assert changed(engine, before) == []


def test_a_staged_write_that_is_lost_raises(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(engine, "log")
    monkeypatch.setattr(engine.worker.tables, "_write", lambda words: None)
    engine.add("a", PROMPTS[0], GREEDY)
    with pytest.raises(ContractError, match="does not hold the value that was staged"):
        engine.step()


# Faults of the runners that verify and create drafts


def writes_states_of_others(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    runner.registry["draft_hidden"][-1] = 3.0


def reads_features_past_the_new(runner: Runner, replay: Callable[[], None]) -> None:
    registry = runner.registry
    slot = registry.published_values("slots")[0]
    num_new = int(registry["length"][slot] - registry["drafter_len"][slot])
    replay()
    unused = registry["features"][slot, num_new:]
    registry["draft_hidden"][slot] += unused.sum() * 0


def reads_drafts_past_the_last(runner: Runner, replay: Callable[[], None]) -> None:
    registry = runner.registry
    slot = registry.published_values("slots")[0]
    replay()
    position = int(registry["length"][slot] + registry["num_drafts"][slot])
    page = registry["page_table_draft"][slot, position // registry["kv_draft"].shape[2]]
    stored = registry["kv_draft"][0, page, position % registry["kv_draft"].shape[2]]
    registry["draft_hidden"][slot] += stored.sum() * 0


def writes_an_output_of_another(runner: Runner, replay: Callable[[], None]) -> None:
    replay()
    runner.registry["verified"][0] += 1


DRAFTING_FAULTS = [
    ("verify", writes_slot_0, "S4", "tokens"),
    ("verify", computes_wrong_logits, "S2", "verify_logits"),
    ("extend", writes_states_of_others, "S4", "draft_hidden"),
    ("extend", reads_features_past_the_new, "S1", "features"),
    ("draft", reads_drafts_past_the_last, "S1", "kv_draft"),
    ("draft", writes_an_output_of_another, "S4", "verified"),
]


@pytest.mark.parametrize(("which", "how", "check", "tensor"), DRAFTING_FAULTS)
def test_a_fault_of_a_drafting_runner_is_named(
    which: str, how: Damage, check: str, tensor: str
) -> None:
    engine = start_engine(EngineConfig(**settings_with("llama", "wide", "eagle3"), backend="eager"))
    good = ask(engine, [PROMPTS])
    sanitizer = watch(engine, "fallback")
    damage(engine, how, getattr(engine.worker.cycles[4], which))
    engine.schedulers[0].ledger.cache.clear()
    assert ask(engine, [PROMPTS]) == good
    assert (check, tensor) in {(v.check, v.tensor) for v in sanitizer.last}


# False alarms


@pytest.fixture(scope="module")
def strict() -> dict[str, Engine]:
    return {
        backend: engine_of("llama", "tight", backend=backend, sanitize="full",
                           sanitize_action="raise")
        for backend in BACKENDS
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_no_alarm_is_false(strict: dict[str, Engine], backend: str, rng: random.Random) -> None:
    """benchmarks/sanitizer/false_alarms.py does the same with a thousand batches."""
    engine = strict[backend]
    send(engine, draw_batch(rng, 64))
    assert engine.sanitizer is not None
    assert engine.sanitizer.violations == 0


@pytest.mark.parametrize(
    ("family", "shape", "drafter", "is_adaptive"),
    [("llama", "tight", "ngram", True), ("gemma3", "wide", "eagle3", False)],
)
def test_no_alarm_is_false_where_drafts_are_verified(
    family: str, shape: str, drafter: str, is_adaptive: bool
) -> None:
    more = {"sanitize": "full", "sanitize_action": "raise", "speculative_adaptive": is_adaptive}
    watched, plain = (
        start_engine(EngineConfig(**{**settings_with(family, shape, of), **with_}, backend="eager"))
        for of, with_ in ((drafter, more), (None, {}))
    )
    rng = random.Random(drafter)
    for _ in range(2):
        batch = [replace(v, patience=None) for v in draw_batch(rng, plain.limits.max_model_len)]
        ours, theirs = (send(engine, batch) for engine in (watched, plain))
        assert [a.token_ids for a in ours] == [a.token_ids for a in theirs]
    assert watched.sanitizer is not None
    assert watched.sanitizer.steps_watched == num_launches(watched) > watched.num_steps
    assert all(runner.counts.eager for runner in watched.worker.cycles[4])  # the widest is tried


# Settings


@pytest.mark.parametrize(
    ("name", "value"), [("sanitize", "loud"), ("sanitize_every", 0), ("sanitize_action", "panic")]
)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_every_command_with_an_engine_has_the_flags() -> None:
    parser = argparse.ArgumentParser()
    flags.add_engine_flags(parser)
    words = "--sanitize sample --sanitize-every 10 --sanitize-action fallback"
    chosen = flags.engine_settings(parser.parse_args(words.split()))
    config = EngineConfig(**chosen)
    assert (config.sanitize, config.sanitize_every) == ("sample", 10)
    assert config.sanitize_action == "fallback"
