"""Tests of checks S8 and S9 under traffic: recomputed answers, and recounted owners."""

import logging
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from traffic import draw_batch, send, settings_of

from slotzero.certify import answers as answers_module
from slotzero.certify import session
from slotzero.certify.answers import AnswerCheck
from slotzero.certify.live import LiveSanitizer
from slotzero.certify.recompute import Disagreement, Recomputation
from slotzero.certify.scenarios import bounds_of
from slotzero.certify.start import start_engine
from slotzero.certify.traffic import TRAFFIC_FAULTS, TrafficFault, mutate_traffic
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import SanitizerError
from slotzero.executor import worker
from slotzero.graph import TensorKind
from slotzero.kernels.cpu.build import compiler
from slotzero.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

DRAFT, KEY, PROMPT_ROW = TRAFFIC_FAULTS
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [7 * i % 250 for i in range(40)]


def engine_of(family: str, shape: str = "wide", drafter: str = "", **more: Any) -> Engine:
    wanted: dict[str, Any] = {"backend": "eager", **settings_of(family, shape), **more}
    if wanted["backend"] == "cpu" and compiler() is None:
        pytest.skip("the cpu backend needs a C++ compiler")
    if drafter:
        wanted |= {"speculative": drafter, "speculative_steps": 3, "speculative_adaptive": False}
        wanted["kv_cache_memory"] *= 2
    return start_engine(EngineConfig(**wanted))


def sanitizer_of(engine: Engine) -> LiveSanitizer:
    assert engine.sanitizer is not None
    return engine.sanitizer


def ask(
    engine: Engine, *prompts: list[int], params: SamplingParams = GREEDY
) -> list[RequestHandle]:
    answers = [engine.add(f"asked {i}", prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    return answers


def serve(engine: Engine, fault: TrafficFault) -> list[list[int]]:
    """Serve the requests that meet the fault, one after another."""
    return [
        ask(engine, prompt, params=params)[0].token_ids for prompt, params in fault.requests(engine)
    ]


def again(
    engine: Engine, answer: RequestHandle, rounding: float | None = None
) -> Disagreement | None:
    rounding = bounds_of(engine).size if rounding is None else rounding
    masks = None
    if answer.request.is_masked:
        masks = engine.admission.masks(answer.request, engine.worker.vocab_size)
    with torch.inference_mode():
        *_, last = Recomputation(engine.worker, answer.request, rounding, masks).chunks()
    return last


# A sound engine


@pytest.mark.parametrize(
    ("family", "shape", "drafter", "more"),
    [
        ("llama", "tight", "", {}),
        ("llama", "wide", "", {"backend": "cpu"}),
        ("gemma3", "wide", "eagle3", {}),
        ("gpt-oss", "tight", "ngram", {}),
        ("qwen3-next", "wide", "ngram", {}),
        ("deepseek-v3", "wide", "mtp", {}),
        ("llama", "wide", "eagle3", {"speculative_topk": 2}),
        ("gemma4", "wide", "mtp", {"speculative_model": "tiny:gemma4-assistant"}),
    ],
)
def test_every_answer_of_a_sound_engine_is_confirmed(
    family: str, shape: str, drafter: str, more: dict[str, Any]
) -> None:
    """Random parameters, chunked prompts, found prefixes, preemptions and cancelled requests."""
    engine = engine_of(family, shape, drafter, sanitize="full", sanitize_action="raise", **more)
    rng, num_answers = random.Random(3), 0
    for _ in range(3):
        done = send(engine, draw_batch(rng, engine.limits.max_model_len))
        answered = [answer for answer in done if answer.token_ids]
        num_answers += sum(answer.finish_reason != "abort" for answer in answered)
    checked = sanitizer_of(engine).answers
    assert checked.num_recomputed == num_answers > 3
    assert (checked.num_left_out, sanitizer_of(engine).violations) == (0, 0)
    if shape == "tight" and not drafter:
        assert engine.schedulers.num_preemptions > 0


def test_a_structured_answer_is_confirmed_with_its_masks() -> None:
    pytest.importorskip("llguidance")
    engine = engine_of("llama", sanitize="full", sanitize_action="raise")
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=20, structured_outputs={"regex": "[a-d]{3}x[0-9]{2,9}"}
    )
    (answer,) = ask(engine, PROMPT, params=params)
    assert answer.token_ids[3] == ord("x")
    assert sanitizer_of(engine).answers.num_recomputed == 1
    answer.request.output_token_ids[0] = ord("z")  # a token that the grammar forbids
    assert again(engine, answer, rounding=1e6) is not None


def test_an_answer_without_banned_sequences_is_confirmed() -> None:
    engine = engine_of("llama", sanitize="full", sanitize_action="raise")
    (free,) = ask(engine, PROMPT)
    banned = [free.token_ids[2:4]]
    (answer,) = ask(engine, PROMPT, params=replace(GREEDY, banned_sequences=banned))
    assert answer.token_ids[:3] == free.token_ids[:3]
    assert answer.token_ids[3] != free.token_ids[3]
    assert sanitizer_of(engine).answers.num_recomputed == 2
    answer.request.params = GREEDY  # another token would be right
    assert again(engine, answer) is not None


def test_recomputation_leaves_no_trace() -> None:
    """The model has experts, whose routing every pass writes to tensors."""
    engine = engine_of("gpt-oss")
    (answer,) = ask(engine, PROMPT)
    engine.worker.tables.apply()
    entries = [e for e in engine.worker.registry.entries() if e.kind is not TensorKind.CONSTANT]
    before = {e.name: e.tensor.clone() for e in entries}
    assert again(engine, answer) is None
    assert [e.name for e in entries if not torch.equal(e.tensor, before[e.name])] == []
    engine.check()


# Near-ties


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("at", [0, 3, 7])
def test_another_token_is_a_near_tie_only_within_rounding(more: dict[str, Any], at: int) -> None:
    engine = engine_of("llama")
    (answer,) = ask(engine, PROMPT, params=replace(GREEDY, **more))
    right = answer.token_ids[at]
    answer.token_ids[at] = wrong = (right + 1) % 250
    assert again(engine, answer) == Disagreement(len(PROMPT) + at, wrong, right)
    del answer.token_ids[at + 1 :]
    assert again(engine, answer, rounding=100.0) is None


def test_a_token_just_above_a_floor_may_fall_below_it() -> None:
    """The recomputation keeps one more token than the engine did, and chooses it."""
    engine = engine_of("llama")
    wide, narrow = (
        replace(GREEDY, temperature=5.0, top_k=k, max_tokens=1, seed=seed)
        for k, seed in ((2, 1), (1, 1))
    )
    for seed in range(20):
        kept, cut = (
            ask(engine, PROMPT, params=replace(params, seed=seed))[0] for params in (wide, narrow)
        )
        if kept.token_ids != cut.token_ids:
            break
    assert kept.token_ids != cut.token_ids
    kept.request.output_token_ids[:] = cut.token_ids
    assert again(engine, kept) is not None
    assert again(engine, kept, rounding=10.0) is None


# Faults


@pytest.mark.parametrize(("fault", "tensor"), [(DRAFT, "verified"), (KEY, "page_table")])
@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_a_fault_of_the_engine_is_logged_and_named(
    fault: TrafficFault, tensor: str, drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of("llama", "wide", drafter, sanitize="full")
    right = serve(engine, fault)
    assert sanitizer_of(engine).violations == 0
    engine.schedulers[0].ledger.cache.clear()
    with fault.inject(engine):
        wrong = serve(engine, fault)
    assert wrong != right
    found = sanitizer_of(engine).last
    assert {(violation.check, violation.tensor) for violation in found} == {("S8", tensor)}
    position = next(
        i
        for i, (ours, theirs) in enumerate(zip(wrong[-1], right[-1], strict=True))
        if ours != theirs
    )
    at = len(fault.requests(engine)[-1].prompt) + position
    got, expected = wrong[-1][position], right[-1][position]
    said = f"token {got} at position {at} where {expected} was expected; "
    assert f"request asked 0: S8: tensor '{tensor}': {said}" in str(found[-1])
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [str(violation) for violation in found]


@pytest.mark.parametrize("fault", [DRAFT, KEY], ids=lambda fault: fault.name)
def test_fallback_continues_without_drafts_and_prefixes(fault: TrafficFault) -> None:
    engine = engine_of("llama", "wide", "ngram", sanitize="full", sanitize_action="fallback")
    right = serve(engine, fault)
    engine.schedulers[0].ledger.cache.clear()
    with fault.inject(engine):
        assert serve(engine, fault) != right
        found = sanitizer_of(engine).violations
        assert found > 0
        assert serve(engine, fault) == right
        assert sanitizer_of(engine).violations == found


def test_raise_keeps_the_last_tokens_of_a_wrong_answer() -> None:
    engine = engine_of("llama", sanitize="full", sanitize_action="raise")
    with KEY.inject(engine), pytest.raises(SanitizerError, match=r"^request asked 0: S8: tensor "):
        serve(engine, KEY)
    engine.check()
    assert not engine.has_work


def test_owners_are_recounted_and_a_miscount_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_of("llama", sanitize="full")
    pool = engine.schedulers[0].ledger.groups[0].pool
    (page,) = pool.take(1)  # a page without an owner
    ask(engine, PROMPT)
    (violation,) = sanitizer_of(engine).last
    assert violation.check == "S9"
    assert f"page {page} of group 0 counts 1 owners" in str(violation)
    assert sum("S9" in record.message for record in caplog.records) == 1
    pool.release(page)
    engine = engine_of("llama", sanitize="full", sanitize_action="raise")
    engine.schedulers[0].ledger.groups[0].pool.take(1)
    with pytest.raises(SanitizerError, match="S9: engine: page"):
        ask(engine, PROMPT)


# Which answers are recomputed, and when


def test_sample_recomputes_one_answer_every_few_steps() -> None:
    engine = engine_of("llama", sanitize="sample", sanitize_every=10)
    # eight or nine steps each: the first answer at once, then one every few steps
    for _ in range(5):
        ask(engine, PROMPT, PROMPT[::-1])
    num_commits = engine.num_steps
    assert 40 <= num_commits <= 50
    assert sanitizer_of(engine).answers.num_recomputed == -(-num_commits // 10)


def test_sample_continues_while_only_grammars_are_busy() -> None:
    """No step commits anything then, and the last one may have left an answer half recomputed."""
    pytest.importorskip("llguidance")
    engine = engine_of("llama", "tight", sanitize="sample", sanitize_every=10**6)
    slow = {"type": "integer", "multipleOf": 99_999_989}
    engine.add("hostile", PROMPT, replace(GREEDY, structured_outputs={"json": slow}))
    answer = engine.add("plain", PROMPT[:32], replace(GREEDY, max_tokens=8))
    while not answer.finished:
        engine.step()
    check = sanitizer_of(engine).answers
    assert check.is_pending
    for _ in range(100):
        if check.is_pending:
            engine.step()
    assert check.num_recomputed == 1 and engine.num_compiling == 1
    engine.cancel("hostile")


def test_sample_continues_chunk_by_chunk_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is delayed by at most one chunk, and the rest is computed when nothing runs."""
    engine = engine_of("llama", "tight", sanitize="sample", sanitize_every=10**6)
    chunks: list[tuple[int, int]] = []
    right = Recomputation._chunk

    def noted(self: Recomputation, start: int, end: int) -> Disagreement | None:
        chunks.append((engine.num_steps, start))
        return right(self, start, end)

    monkeypatch.setattr(Recomputation, "_chunk", noted)
    engine.add("short", PROMPT[:32], replace(GREEDY, max_tokens=2))
    engine.add("long", PROMPT[:8], replace(GREEDY, max_tokens=16))
    while engine.has_work:
        engine.step()
    steps = [step for step, _ in chunks]
    assert [start for _, start in chunks] == [0, 20]
    assert len(set(steps)) == 2
    assert steps[0] < steps[1] < engine.num_steps
    assert sanitizer_of(engine).answers.num_recomputed == 1


def test_an_answer_without_room_is_skipped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(answers_module, "Recomputation", full)
    engine = engine_of("llama", sanitize="full", sanitize_action="raise")
    ask(engine, PROMPT, PROMPT[:7])
    checked = sanitizer_of(engine).answers
    assert (checked.num_recomputed, checked.num_left_out) == (0, 2)
    assert sum("its answer is not recomputed" in record.message for record in caplog.records) == 1


# Mutants


@pytest.mark.parametrize(
    ("family", "drafter", "names"),
    [
        ("llama", "", [KEY.name, PROMPT_ROW.name]),
        ("falcon-h1", "ngram", [DRAFT.name, KEY.name, PROMPT_ROW.name]),
    ],
)
def test_every_fault_of_traffic_is_a_mutant_that_is_named(
    family: str, drafter: str, names: list[str]
) -> None:
    more = {"max_model_len": 512, "kv_cache_memory": 8 << 20}
    engine = engine_of(family, "wide", drafter, **more)
    before = ask(engine, PROMPT)[0].token_ids
    mutants = mutate_traffic(engine)
    assert [mutant.fault for mutant in mutants] == names
    assert [str(mutant) for mutant in mutants if not mutant.is_named] == []
    caught_by = {mutant.fault: mutant.caught_by for mutant in mutants}
    assert caught_by == dict.fromkeys(names, "S8") | {PROMPT_ROW.name: "S0"}
    engine.check()
    assert engine.sanitizer is None
    assert ask(engine, PROMPT)[0].token_ids == before


def test_without_the_check_the_mutants_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerCheck, "committed", lambda self, finished, is_due: iter(()))
    mutants = mutate_traffic(engine_of("llama", "wide", "ngram"))
    assert [(mutant.fault, mutant.caught) for mutant in mutants] == [
        (DRAFT.name, False),
        (KEY.name, False),
        (PROMPT_ROW.name, True),  # the worker refuses the step
    ]


def test_a_prompt_in_the_decode_graph_would_change_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the worker's own check, the recomputed answer shows it."""
    monkeypatch.setattr(worker, "_refuse_prompts", lambda key, orders: None)
    (mutant,) = (
        m for m in mutate_traffic(engine_of("llama", "wide")) if m.fault == PROMPT_ROW.name
    )
    assert mutant.caught_by == "S8"


def test_certification_runs_the_mutants_of_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mutate", "mutate_copies"):
        monkeypatch.setattr(session, name, lambda engine, seen: [])
    engine = engine_of("llama", max_num_seqs=2)
    tried = session.CertifySession(engine, "tiny:llama", is_quick=True)
    assert tried.certify().passed
    assert [str(mutant) for mutant in tried.mutate()] == [
        f"engine: page_table: {KEY.name}: S8 named page_table",
        f"engine: counts: {PROMPT_ROW.name}: S0 named counts",
    ]
