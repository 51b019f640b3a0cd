"""Tests of check S7: a fault in any tensor is caught by a check that names the tensor."""

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slotzero.certify import mutants as mutants_module
from slotzero.certify.certify import certify, checksums
from slotzero.certify.checks import CHECK_FUNCTIONS
from slotzero.certify.faults import FAULTS
from slotzero.certify.faults.device import KERNELS, RECORDINGS
from slotzero.certify.faults.layers import LAYERS
from slotzero.certify.faults.ranks import RANKS
from slotzero.certify.faults.recurrent import RECURRENT
from slotzero.certify.faults.replays import REPLAYS
from slotzero.certify.faults.sampling import SAMPLING
from slotzero.certify.known_bugs import BUGS
from slotzero.certify.late_faults import LATE_FAULTS
from slotzero.certify.mutants import Mutant, mutate, padded_size, tensors_of
from slotzero.certify.padding import PADDED_ROWS
from slotzero.certify.prevention import PREVENTED, PREVENTION
from slotzero.certify.report import ENGINE, ORDER, Certificate
from slotzero.certify.scenario import GRAPH_MEMORY, kind_of
from slotzero.certify.scenarios import bounds_of, counts_of, scenario_for, states_of
from slotzero.certify.traffic import TRAFFIC_FAULTS
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import ContractError, RecordingError
from slotzero.graph import Runner, TensorKind
from slotzero.graph.backend import EagerBackend, PlainPieces, Recording, StepFunction
from slotzero.kernels.cpu.build import compiler
from slotzero.sampling.params import SamplingParams
from slotzero.speculative.drafter import NUM_DRAFTS
from slotzero.speculative.passes import DRAFT, EXTEND, VERIFY

pytestmark = pytest.mark.slow

SEEDS = {"SGLang 26292", "SGLang 24743", "SGLang 22404", "SGLang 21987"}
ASKED = {  # the issue's list, in its order
    "skip the publish",
    "skip the pad",
    "pad to bucket only",
    "pad off by one",
    "wrong dtype",
    "stale row",
    "wrong axis",
    "packed instead of uniform stride",
    "global instead of local count",
    "baked host value",
    "buffer replaced",
    "aliased into the pool",
    "kernel writes slot 0",
    "kernel reads past its length",
    "late host copy",
}
PREFILLS = ("prefill", "pooled prefill", "scored prefill")
KINDS = ("decode", *PREFILLS, VERIFY, EXTEND, DRAFT)
GRAPH_MEMORY_FAULTS = ("contents of graph memory needed", "graph memory no longer held")
BAKED = {  # by a backend that records
    *GRAPH_MEMORY_FAULTS,
    "captured before the warm-up has ended",
    "capture of another size writes",
}
LACKED = {  # runners in which a fault would break nothing
    "global instead of local count": (EXTEND,),
    "wrong width": ("decode", *PREFILLS, DRAFT),
    "counted in rows instead of tokens": ("decode", DRAFT),
    "grammar masks laid out by rows": (VERIFY, EXTEND, DRAFT),
    "host predicate evaluated at capture": (DRAFT,),
    "padded tokens join the last row": (DRAFT,),
    **dict.fromkeys(  # no count, no output and no target's layer is theirs
        (
            "not reset between replays",
            "padded row below zero",
            "padding enters a reduction",
            "recording for fewer rows",
            "sampling state of a neighbour",
        ),
        (EXTEND, DRAFT),
    ),
    "draft that writes KV": ("decode", *PREFILLS, VERIFY),
    "expert routing that counts padded rows": KINDS,  # the models have no experts
    "frozen-KV position advanced by one": KINDS,  # except for an assistant
    **dict.fromkeys((fault.name for fault in RANKS), KINDS),  # there is one rank
}
PROMPT = [7 * i % 250 for i in range(60)]  # long enough for the prefix cache


class Scored(NamedTuple):
    engine: Engine
    runners: tuple[Runner, ...]
    mutants: list[Mutant]
    answer_before: list[int]
    constants_before: dict[str, int]

    @property
    def kinds(self) -> list[str]:
        return [kind_of(runner) for runner in self.runners]


def engine_of(model: str, backend: str, drafter: str | None = None, **more: Any) -> Engine:
    if backend == "cpu" and compiler() is None:
        pytest.skip("the cpu backend needs a C++ compiler")
    more.setdefault("max_num_seqs", 5)
    if drafter is not None:
        more |= {"speculative": drafter, "speculative_steps": 2, "speculative_adaptive": False}
    return Engine(
        EngineConfig(
            model=model,
            backend=backend,
            skip_tokenizer_init=True,
            show_progress=False,
            lazy_recording=True,
            kv_cache_memory=1 << 20,
            **more,
        )
    )


def answer_of(engine: Engine) -> list[int]:
    answer = engine.add("asked", PROMPT, SamplingParams(temperature=0.0, max_tokens=6))
    while not answer.finished:
        engine.step()
    while engine.has_work:
        engine.step()
    return answer.token_ids


@pytest.fixture(
    scope="module",
    params=[("tiny:llama", "cpu"), ("tiny:gemma3", "eager"), ("tiny:llama", "eager", "eagle3")],
    ids=lambda param: " ".join(param),
)
def scored(request: pytest.FixtureRequest) -> Scored:
    """Return the scored mutants; with a drafter, of its three runners only. Recorded are decode and
    prefill. Scored prefill, which is never recorded on a CPU, writes all tensors of prefill and of
    pooled prefill, so it stands for them where they run eagerly."""
    engine = engine_of(*request.param)
    worker = engine.worker
    prefills = worker.prefills if "cpu" in request.param else worker.scored_prefills
    drafting = tuple(r for cycle in worker.cycles.values() for r in cycle)
    runners = drafting or (worker.decode, *prefills)
    answer, constants = answer_of(engine), checksums(engine.worker.registry)
    seen: list[Mutant] = []
    mutants = mutate(engine, seen.append, runners=runners)
    assert seen == mutants
    return Scored(engine, runners, mutants, answer, constants)


def test_every_mutant_is_caught(scored):
    assert len(scored.mutants) > 500
    assert [str(mutant) for mutant in scored.mutants if not mutant.caught] == []


def test_at_least_95_in_100_are_named(scored):
    unnamed = [str(mutant) for mutant in scored.mutants if not mutant.is_named]
    assert len(unnamed) <= 0.05 * len(scored.mutants), unnamed


def test_a_check_names_few_tensors_beside_the_guilty_one(scored):
    """Naming every tensor would also score: nearly always, the guilty tensor must be named
    first."""
    first = [mutant for mutant in scored.mutants if mutant.named[:1] == (mutant.tensor,)]
    assert len(first) >= 0.95 * len(scored.mutants)


def test_every_tensor_of_every_runner_is_in_the_matrix(scored):
    for runner in scored.runners:
        tried = {m.tensor for m in scored.mutants if m.runner == runner.spec.name}
        tried -= {GRAPH_MEMORY, PADDED_ROWS}  # which are not registered
        entries = runner.entries()
        constants = {e.name for e in entries if e.kind is TensorKind.CONSTANT}
        assert tried - constants == {e.name for e in entries} - constants
        assert len(tried & constants) == 4
        assert {name for name in tried if name.startswith("rope_")}


def test_every_fault_of_the_issue_is_in_the_matrix_of_every_runner(scored):
    for runner in scored.runners:
        tried = {m.fault for m in scored.mutants if m.runner == runner.spec.name}
        missing = {fault for fault, kinds in LACKED.items() if kind_of(runner) in kinds}
        if "sliding" not in scored.engine.limits.windows:  # other groups have the same pages
            missing.add("another group's location")
        if scored.engine.worker.states is None:
            missing |= {fault.name for fault in RECURRENT}
        if runner.backend.name == "eager":
            missing |= BAKED
        assert tried >= ASKED - missing
        assert tried == {fault.name for fault in FAULTS} - missing


def test_no_mutant_is_counted_twice(scored):
    names = [(m.runner, m.tensor, m.fault) for m in scored.mutants]
    assert len(set(names)) == len(names)


def test_every_number_is_a_mutant_that_is_named(scored):
    tried = {number for m in scored.mutants for number in m.numbers}
    named = {number for m in scored.mutants if m.is_named for number in m.numbers}
    assert tried == named
    for runner in scored.runners:
        of_runner = {n for m in scored.mutants if m.runner == runner.spec.name for n in m.numbers}
        assert "SGLang 26292" in of_runner


def test_every_bug_of_a_runner_is_among_its_mutants(scored):
    """A bug needs its runner, its fault, and one of its tensors."""
    tried = {number for m in scored.mutants for number in m.numbers}
    faults = {m.fault for m in scored.mutants}
    entries = [e for runner in scored.runners for e in runner.entries()]
    there = {name for e in entries for name in (e.name, e.kind.value)}
    there |= {GRAPH_MEMORY, PADDED_ROWS}
    bugs = [b for b in BUGS if b.fault in faults and not there.isdisjoint(b.where)]
    assert {b.number for b in bugs if b.runner in scored.kinds} <= tried
    if "decode" in scored.kinds:
        assert tried == {b.number for b in bugs if b.runner in ("", *scored.kinds)}


def test_the_table_has_the_seed_faults_and_those_of_2026():
    numbers = {bug.number for bug in BUGS}
    assert numbers >= SEEDS
    assert len(numbers) >= 140
    assert numbers.isdisjoint(one.number for one in PREVENTED)
    assert {bug.runner for bug in BUGS} <= {"", ENGINE, *KINDS}
    names = {fault.name for fault in (*FAULTS, *LATE_FAULTS, *TRAFFIC_FAULTS)}
    for bug in BUGS:
        assert bug.fault in names, bug
        assert bug.why, bug
    assert {bug.fault for bug in BUGS} == {*PREVENTION}


def test_no_bug_is_in_the_table_twice():
    """One number may have several faults, and a fault several tensors."""
    kept = [(bug.number, bug.fault, name) for bug in BUGS for name in bug.where]
    assert len(set(kept)) == len(kept)


def test_every_check_catches_some_mutants(scored):
    """S3 is the only check in which replay and eager may differ by rounding; S5 needs a capture."""
    catching = {mutant.caught_by for mutant in scored.mutants}
    assert catching >= {"S0", "S1", "S2", "S4", "S6"}
    assert set(ORDER) == set(CHECK_FUNCTIONS)


def test_the_engine_is_clean_afterwards(scored):
    engine = scored.engine
    engine.check()
    assert checksums(engine.worker.registry) == scored.constants_before
    certificate = Certificate("tiny", engine.limits.backend)
    certify(
        certificate,
        [(runner, padded_size(runner)) for runner in scored.runners],
        lambda runner, key: scenario_for(engine, runner, key),
        bounds_of(engine),
    )
    assert certificate.passed, [str(violation) for violation in certificate.violations]
    assert answer_of(engine) == scored.answer_before


def test_no_fault_remains(scored):
    worker = scored.engine.worker
    worker.tables.apply()  # writes that the release of the last answer has staged
    sent = [worker.ring_of(runner) for runner in worker.runners]
    rings = [results.ring for results in sent if results is not None]
    for owner in (worker.registry, worker.tables, *rings):
        assert not {"publish", "_write", "download"} & vars(owner).keys()
    assert not any("upload" in vars(ring) for ring in worker.registry._rings.values())
    # left by the last owner; no step reads it
    left = "tokens", NUM_DRAFTS, *states_of(scored.engine)
    for entry in worker.registry.entries():
        if entry.kind is TensorKind.TABLE:
            by_row = entry.tensor.movedim(entry.axis, 0)
            neutral = by_row[0].flatten()
            assert (neutral == neutral[0]).all(), entry.name
        if entry.kind is TensorKind.TABLE and not entry.through and entry.name not in left:
            assert (by_row == by_row[0]).all(), f"{entry.name}: every slot is free"


def with_faults(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Keep only the faults of these names."""
    monkeypatch.setattr(mutants_module, "FAULTS", [f for f in FAULTS if f.name in names])


def as_said(mutants: list[Mutant]) -> list[str]:
    assert [str(mutant) for mutant in mutants if not mutant.is_named] == []
    return [f"{mutant.runner}: {mutant.tensor}: {mutant.fault}" for mutant in mutants]


@pytest.fixture(scope="module")
def assisted() -> Engine:
    return engine_of("tiny:gemma4", "eager", "mtp", speculative_model="tiny:gemma4-assistant")


@pytest.fixture(scope="module")
def ahead() -> Engine:
    return engine_of("tiny:deepseek-v3", "eager", "mtp")


def test_an_assistant_that_advances_its_position_is_named(monkeypatch, assisted):
    fault = "frozen-KV position advanced by one"
    with_faults(monkeypatch, fault)
    said = as_said(mutate(assisted))
    assert said == [f"draft-3: kv_{group}: {fault}" for group in assisted.limits.windows]


def test_an_assistant_that_writes_kv_is_named(monkeypatch, assisted):
    fault = "draft that writes KV"
    with_faults(monkeypatch, fault)
    drafting = ("draft-extend-3", "draft-3", "draft-extend-16")
    wanted = [f"{r}: kv_{g}: {fault}" for r in drafting for g in assisted.limits.windows]
    assert as_said(mutate(assisted)) == wanted


@pytest.mark.parametrize("checks", [("S2",), ("S3",), ("S4",)])
def test_experts_that_count_padding_are_named_by_each_check(monkeypatch, ahead, checks):
    fault = "expert routing that counts padded rows"
    with_faults(monkeypatch, fault)
    said = as_said(mutate(ahead, checks=checks))
    assert said == [f"{r.spec.name}: expert_starts: {fault}" for r in ahead.worker.runners]


def test_rows_laid_out_wrongly_are_named_over_latent_kv(monkeypatch, ahead):
    faults = ("packed instead of uniform stride", "wrong width")
    with_faults(monkeypatch, *faults)
    said = as_said(mutate(ahead, runners=ahead.worker.cycles[3]))
    places = ("verify_slots", "verify_positions")
    for runner, place, fault in product(("verify-3", "draft-extend-3"), places, faults):
        assert f"{runner}: {place}: {fault}" in said


def test_exchanged_rows_of_a_weight_are_named(monkeypatch):
    """A plain sum over the words of the weight would not change."""
    with_faults(monkeypatch, "two rows exchanged")
    engine = engine_of("tiny:llama", "eager")
    runner = engine.worker.decode
    mutants = mutate(engine, runners=[runner])
    constants = [e for e in tensors_of(runner) if e.kind is TensorKind.CONSTANT]
    assert as_said(mutants) == [
        f"decode: {e.name}: two rows exchanged"
        for e in constants
        if (e.tensor != e.tensor[0]).any()
    ]
    assert {mutant.caught_by for mutant in mutants} == {"S0"}
    assert any(mutant.tensor.startswith("weight.") for mutant in mutants)


def test_the_scales_of_every_linear_layer_are_in_the_matrix():
    runner = engine_of("tiny:gpt-oss", "eager", quantization="int8").worker.decode
    scales = [e.name for e in tensors_of(runner) if e.name.endswith(".scales")]
    assert [name.split(".")[-2] for name in scales] == ["qkv", "out", "gate_up", "down"]


class _NoValues(TorchFunctionMode):
    """Mode that raises, as a capture does, if a tensor method waits for a value of the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in ("tolist", "cpu", "numpy"), func
        return func(*args, **(kwargs or {}))


class _NoCopies(TorchDispatchMode):
    """Mode that raises if an operator waits for a value or copies one from the host, as an index by
    a list does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch._dynamo, and takes longer for each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        refused = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.lift_fresh)
        assert func.overloadpacket not in refused, func
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype is torch.bool]
            assert not masks, func
        return func(*args, **(kwargs or {}))


class CapturingBackend(EagerBackend):
    """A backend that warms up and captures like the cuda backend, and then runs eagerly."""

    name = "capturing"

    def record(self, function: StepFunction) -> Recording:
        function(PlainPieces())
        with _NoCopies(), _NoValues():
            function(PlainPieces())
        return super().record(function)


def captured(monkeypatch: pytest.MonkeyPatch, engine: Engine, runners: list[Runner]) -> set[str]:
    """Inject all faults while refusing what a GPU capture refuses; return their names."""
    for runner in runners:
        monkeypatch.setattr(runner, "backend", CapturingBackend())
    return {mutant.fault for mutant in mutate(engine, checks=(), runners=runners)}


def test_every_fault_of_the_device_can_be_captured(monkeypatch):
    engine = engine_of("tiny:falcon-h1", "eager", "ngram")
    faults = (*RECORDINGS, *KERNELS, *RECURRENT, *REPLAYS, *SAMPLING)
    device = {fault.name for fault in faults} - {*GRAPH_MEMORY_FAULTS}
    with_faults(monkeypatch, *device)
    runners = [r for r in engine.worker.runners if kind_of(r) in ("decode", "prefill", VERIFY)]
    assert captured(monkeypatch, engine, runners) == device - {"draft that writes KV"}


def test_faults_of_layers_can_be_captured(monkeypatch, assisted, ahead):
    with_faults(monkeypatch, "draft that writes KV", *(fault.name for fault in LAYERS))
    tried = captured(monkeypatch, assisted, [*assisted.worker.cycles[3]])
    tried |= captured(monkeypatch, ahead, [ahead.worker.decode])
    assert tried == {"draft that writes KV", *(fault.name for fault in LAYERS)}


def test_a_fault_that_cannot_be_captured_is_named(monkeypatch):
    engine = engine_of("tiny:llama", "eager")
    wrong = replace(KERNELS[0], effect=lambda case, rows: rows[[0]].tolist())
    monkeypatch.setattr(mutants_module, "FAULTS", [wrong])
    monkeypatch.setattr(engine.worker.decode, "backend", CapturingBackend())
    table = next(e.name for e in tensors_of(engine.worker.decode) if e.kind is TensorKind.TABLE)
    with pytest.raises(RecordingError, match=f"mutant decode: {table}: kernel writes slot 0: .*"):
        mutate(engine)


@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_a_parameter_that_no_request_uses_is_not_broken(monkeypatch, max_num_seqs):
    """If few slots run, no request has a logit bias, so a fault that drops it changes nothing."""
    with_faults(monkeypatch, "stale row", "off by one", "late host copy")
    engine = engine_of("tiny:llama", "eager", max_num_seqs=max_num_seqs)
    said = as_said(mutate(engine, runners=[engine.worker.decode]))
    assert "decode: length: late host copy" in said
    assert "decode: temperature: late host copy" in said
    assert "decode: bias_ids: late host copy" not in said


def test_a_check_that_is_switched_off_lets_mutants_through():
    engine = engine_of("tiny:llama", "eager")
    mutants = mutate(engine, checks=("S6", "S0", "S2"), runners=[engine.worker.decode])
    missed = {(m.tensor, m.fault) for m in mutants if not m.caught}
    assert ("slots", "skip the pad") in missed  # only S1 catches it
    assert ("kv_full", "kernel writes slot 0") in missed  # only S4 catches it
    assert ("kv_full", "kernel reads past its length") in missed  # only S1 catches it
    assert ("kv_full", "skip the write") not in missed
    assert sum(m.caught for m in mutants) > 0.5 * len(mutants)


def test_an_engine_that_is_wrong_already_is_not_scored(monkeypatch):
    engine = engine_of("tiny:llama", "eager")
    runner = engine.worker.decode
    with monkeypatch.context() as patch:
        patch.setattr(mutants_module, "checksums", lambda registry: {"rope_frequency": -1})
        with pytest.raises(ContractError, match=r"certify first.*rope_frequency"):
            mutate(engine)
    engine.check()
    assert padded_size(runner).rows == 4


@pytest.mark.parametrize("drafter", ["ngram", "eagle"])
def test_the_size_has_padding_rows_and_tokens(drafter):
    for runner in engine_of("tiny:llama", "eager", drafter).worker.runners:
        key = padded_size(runner)
        counts = counts_of(runner, key)
        assert 3 <= len(counts) < key.rows
        assert sum(counts) < key.tokens
        assert [e.name for e in tensors_of(runner) if e.kind is TensorKind.PUBLISHED] == list(
            runner.spec.published
        )


def test_rows_of_a_scenario_pick_its_size():
    for runner in engine_of("tiny:llama", "eager").worker.runners:
        for key in runner.all_keys():
            counts = counts_of(runner, key)
            assert runner.pick(sum(counts), len(counts)) == key


def test_a_mutant_reports_its_outcome():
    caught = Mutant("decode", "slots", "skip the pad", ("SGLang 26292",), "S1", ("slots",))
    assert str(caught) == "decode: slots: skip the pad: S1 named slots"
    assert caught.caught
    assert caught.is_named
    misnamed = Mutant("decode", "slots", "skip the pad", (), "S1", ("counts",))
    assert misnamed.caught
    assert not misnamed.is_named
    missed = Mutant("decode", "slots", "skip the pad", (), "", ())
    assert str(missed) == "decode: slots: skip the pad: not caught"
    assert not missed.caught
    assert not missed.is_named
