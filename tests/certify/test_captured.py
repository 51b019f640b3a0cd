"""Tests of certificates of captured functions of other engines, on functions of a few operators."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import slotzero.certify
from slotzero.certify import (
    CapturedStep,
    Certificate,
    Constant,
    Input,
    Output,
    State,
    Workspace,
    certify_captured,
)
from slotzero.certify.captured_step import Declared
from slotzero.errors import ContractError, RecordingError

SIZES = (1, 2, 4)
OWNERS = 6  # requests, and rows of the state


class Counters:
    """A step that adds a gain to the counters of the requests of a batch, and returns the sum of
    each with a scratch value."""

    def __init__(self) -> None:
        self.slots = torch.zeros(4, dtype=torch.long)
        self.counts = torch.arange(OWNERS + 1.0)  # the last one is nobody's
        self.scratch = torch.zeros(4)
        self.sums = torch.zeros(4)
        self.gain = torch.tensor([1.5])

    def run(self, size: int) -> None:
        slots = self.slots[:size]
        after = self.counts[slots] + self.gain
        self.counts[slots] = after
        self.scratch[:size] = after * 2
        self.sums[:size] = after + self.scratch[:size]

    def stage(self, requests: Sequence[int], size: int) -> None:
        self.slots.fill_(OWNERS)
        self.slots[: len(requests)] = torch.tensor(requests)

    def declared(self, **changes: Any) -> CapturedStep[int]:
        step = CapturedStep(
            name="count",
            sizes=SIZES,
            tensors=[
                Input("slots", self.slots, OWNERS, "the last counter is nobody's"),
                State("counts", self.counts, lambda r: [r], lambda r: [r], null=(OWNERS,)),
                Workspace("scratch", self.scratch),
                Output("sums", self.sums),
                Constant("gain", self.gain),
            ],
            stage=self.stage,
            step=self.run,
        )
        return replace(step, **changes)

    def without(self, name: str) -> list[Declared]:
        return [one for one in self.declared().tensors if one.name != name]


def certified(step: CapturedStep[int]) -> Certificate:
    return certify_captured(step, range(OWNERS))


def findings(certificate: Certificate) -> set[tuple[str, str]]:
    return {(found.check, found.tensor) for found in certificate.violations}


def test_a_sound_step_passes_and_leaves_memory_as_it_was() -> None:
    counters = Counters()
    before = counters.counts.clone()
    certificate = certified(counters.declared())
    assert certificate.passed, str(certificate)
    assert str(certificate).startswith("count on cpu: passed, 3 of 3 sizes in ")
    assert torch.equal(counters.counts, before)
    assert not counters.slots.any()
    assert not counters.sums.any()
    report = json.loads(json.dumps(certificate.as_json()))
    assert (report["passed"], report["sizes"]) == (True, ["count[1]", "count[2]", "count[4]"])


def test_a_violation_is_printed_and_in_the_json() -> None:
    counters = Counters()

    def run(size: int) -> None:
        counters.run(size)
        counters.sums[:size] += counters.counts.sum()  # of all requests

    certificate = certified(counters.declared(step=run))
    assert ("S1", "counts") in findings(certificate)
    assert "count[1]: S1: tensor 'counts', row 0: poisoned, it changed 'sums'" in str(certificate)
    assert "NOT passed" in str(certificate)
    failures = certificate.as_json()["failures"]
    assert isinstance(failures, list)
    assert {failure["tensor"] for failure in failures} >= {"counts"}


def test_a_batch_in_other_places_of_a_larger_buffer_has_the_same_rows() -> None:
    """Several entries for each row, as in verification of drafts."""
    tokens, out = torch.zeros(8, dtype=torch.long), torch.zeros(8)

    def stage(requests: Sequence[int], size: int) -> None:
        tokens.zero_()
        tokens[: 2 * len(requests)] = torch.tensor([t for r in requests for t in (r, r + 1)])

    def run(size: int) -> None:
        out[: 2 * size] = tokens[: 2 * size] * 2.0

    pair = CapturedStep(
        "pairs", SIZES,
        [Input("tokens", tokens, 0, "any token will do", width=2), Output("out", out, width=2)],
        stage, run,
    )  # fmt: skip
    assert certified(pair).passed

    def shifted(size: int) -> None:
        out[: 2 * size] = tokens[: 2 * size] * 2.0 + tokens[2 * size - 1]

    assert {check for check, _ in findings(certified(replace(pair, step=shifted)))} >= {"S2", "S3"}


# One fault for each check


def test_padding_that_staging_forgets_is_named() -> None:
    counters = Counters()

    def stage(requests: Sequence[int], size: int) -> None:
        counters.slots[: len(requests)] = torch.tensor(requests)

    certificate = certified(counters.declared(stage=stage))
    assert ("S0", "slots") in findings(certificate)
    assert ("S4", "counts") in findings(certificate), "the larger step's slots were still there"
    assert {v.size for v in certificate.violations} == {"count[4]"}, "2 rows fill size 2"


def test_a_constant_that_a_step_changes_is_named() -> None:
    counters = Counters()

    def run(size: int) -> None:
        counters.run(size)
        counters.gain.add_(1)

    assert ("S0", "gain") in findings(certified(counters.declared(step=run)))


def test_memory_that_is_replaced_is_named() -> None:
    counters = Counters()

    def stage(requests: Sequence[int], size: int) -> None:
        counters.stage(requests, size)
        if len(requests) == 2:
            counters.scratch.set_(torch.zeros(4))

    assert ("S0", "scratch") in findings(certified(counters.declared(stage=stage)))


def test_scratch_memory_that_is_read_before_it_is_written_is_named() -> None:
    counters = Counters()

    def run(size: int) -> None:
        counters.sums[:size] = counters.scratch[:size]
        counters.run(size)
        counters.sums[:size] += counters.scratch[:1] * 0  # NaN times 0 is NaN

    def late(size: int) -> None:
        held = counters.scratch[:1] * 0
        counters.run(size)
        counters.sums[:size] += held

    assert certified(counters.declared(step=run)).passed
    assert ("S1", "scratch") in findings(certified(counters.declared(step=late)))


def test_an_engine_that_replays_something_else_is_found() -> None:
    counters = Counters()

    def replay(size: int) -> None:
        counters.run(size)
        counters.sums[:size] += 1

    certificate = certified(counters.declared(replay=replay))
    assert certificate.backend == "own replay"
    assert findings(certificate) == {("S2", "sums")}


def test_a_write_outside_of_the_batch_is_named() -> None:
    counters = Counters()

    def run(size: int) -> None:
        counters.run(size)
        counters.counts[OWNERS - 1] += 1

    certificate = certified(counters.declared(step=run))
    assert ("S4", "counts") in findings(certificate)
    assert {v.row for v in certificate.violations if v.check == "S4"} == {OWNERS - 1}


def test_a_step_that_writes_its_input_is_named() -> None:
    counters = Counters()

    def run(size: int) -> None:
        counters.run(size)
        counters.slots[:size] = 0

    assert ("S4", "slots") in findings(certified(counters.declared(step=run)))


def test_memory_that_is_not_declared_is_found() -> None:
    counters = Counters()
    certificate = certified(counters.declared(tensors=counters.without("gain")))
    assert findings(certificate) == {("S5", "unregistered")}


def test_a_number_of_the_host_is_found() -> None:
    counters, held = Counters(), [0]

    def stage(requests: Sequence[int], size: int) -> None:
        counters.stage(requests, size)
        held[0] = len(requests)

    def run(size: int) -> None:
        counters.run(size)
        counters.sums[:size] *= held[0]

    certificate = certified(counters.declared(stage=stage, step=run))
    assert "S5" in {check for check, _ in findings(certificate)}


def test_a_value_that_the_host_reads_is_refused_or_found() -> None:
    counters = Counters()

    def run(size: int) -> None:
        counters.run(size)
        counters.sums[:size] *= counters.gain.item()

    with pytest.raises(RecordingError, match="cannot be recorded"):
        certified(counters.declared(step=run))
    certificate = certified(counters.declared(step=run, replay=run))
    assert findings(certificate) == {("S5", "gain")}


def test_shared_memory_is_named_and_alternating_memory_is_not() -> None:
    counters = Counters()
    counters.scratch = counters.sums
    assert ("S6", "sums") in findings(certified(counters.declared()))
    counters = Counters()
    pairs = torch.zeros(4, 2)
    counters.scratch, counters.sums = pairs[:, 0], pairs[:, 1]
    certificate = certified(counters.declared())
    assert certificate.passed, str(certificate)


def test_a_choice_is_compared_only_where_its_scores_are_equal() -> None:
    x, scores, best = torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    near = torch.tensor([1.0, 1.0 + 1e-6, 0.0])

    def stage(requests: Sequence[int], size: int) -> None:
        x.zero_()
        x[: len(requests)] = near

    def run(size: int) -> None:
        tilted = x[:size].clone()
        tilted[:, 0] += 2e-6 * size  # a rounding that differs from size to size
        scores[:size] = tilted
        best[:size] = tilted.argmax(-1)

    def step(chosen_from: str) -> CapturedStep[int]:
        tensors = [
            Input("x", x, 0, "rows are computed independently"),
            Output("scores", scores),
            Output("best", best, chosen_from=chosen_from),
        ]
        return CapturedStep("choose", SIZES, tensors, stage, run)

    certificate = certified(step("scores"))
    assert certificate.passed, str(certificate)
    near.copy_(torch.tensor([1.0, 1.0 + 6e-6, 0.0]))  # chosen by the larger sizes only
    assert certified(step("scores")).passed
    assert ("S3", "best") in findings(certified(step("")))


# Declarations


def declared_with(*tensors: Declared) -> Callable[[], object]:
    def declare() -> object:
        return Counters().declared(tensors=[*Counters().declared().tensors, *tensors])

    return declare


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (declared_with(Workspace("sums", torch.zeros(1))), "output 'sums' is declared twice"),
        (declared_with(Input("x", torch.zeros(4), 0, "")), "input 'x' needs the reason"),
        (
            declared_with(Output("y", torch.zeros(7), width=2)),
            "output 'y' is too short: 7 entries, size 4 needs 8",
        ),
        (
            declared_with(Output("y", torch.zeros(4), chosen_from="gain")),
            "output 'y' is chosen from 'gain', which is no output",
        ),
        (declared_with(Constant("w", torch.zeros(1, device="meta"))), "constant 'w' is on meta"),
        (lambda: Counters().declared(tensors=[Output("y", torch.zeros(4))]), "declares no Input"),
        (lambda: Counters().declared(replay={1: None}), "has no graph of size 2"),
        (
            lambda: certify_captured(Counters().declared(), range(4)),
            "4 requests are too few: one more than its largest size, 4",
        ),
        (
            lambda: certify_captured(Counters().declared(), range(3, 9)),
            "state 'counts': a request owns index 7 of 7",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_by_name(
    declare: Callable[[], object], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        declare()


def test_the_public_names_are_those_of_their_modules() -> None:
    for name in slotzero.certify.__all__:
        assert getattr(slotzero.certify, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = slotzero.certify.nothing


def test_parameters_and_buffers_of_a_module_are_constants() -> None:
    norm = torch.nn.BatchNorm1d(3)
    names = [one.name for one in slotzero.certify.constants_of(norm, "norm.")]
    assert names[:2] == ["norm.weight", "norm.bias"]
    assert "norm.running_mean" in names
    tensor: Tensor = slotzero.certify.constants_of(norm)[0].tensor
    assert tensor.data_ptr() == norm.weight.data_ptr()
