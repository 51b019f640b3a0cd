"""Tests of the padding between layers that S1 overwrites, and of graph memory."""

import pytest
import torch
from torch import Tensor

from slotzero.certify.padding import PaddingPieces, fill_with_garbage
from slotzero.certify.scenario import GRAPH_MEMORY, Scenario, Trial
from slotzero.graph import GraphKey, Ladder, Pieces, Registry, Runner, RunnerSpec
from slotzero.graph.backend import PlainPieces
from slotzero.graph.cpu import CpuBackend
from slotzero.kernels.types import Normed

KEY = GraphKey("verify-2", 8, 4)  # 3 rows of 2 tokens are real


def garbled(*results: object) -> list[int]:
    """Return how many rows of each tensor are left."""
    pieces = PaddingPieces(PlainPieces(), KEY, 3, 6, fill_with_garbage)
    made: list[Tensor] = []

    def take(value: object) -> None:
        if isinstance(value, Normed):
            take((value.x, value.squares.T if value.squares is not None else ()))
        elif isinstance(value, tuple):
            for part in value:
                take(part)
        elif isinstance(value, Tensor):
            made.append(value)

    take(pieces(lambda: results))
    return [int((~tensor.isnan()).flatten(0, -2).all(-1).sum()) for tensor in made]


@pytest.mark.parametrize(
    ("shape", "left"),
    [((8, 5), 6), ((4, 5), 3), ((1, 8, 5), 6), ((16, 5), 12), ((5, 8), 5), ((3, 3), 3)],
)
def test_rows_that_no_request_owns_are_overwritten(shape, left):
    """The rows are tokens, batch rows or places in a tree; other axes stay as they are."""
    assert garbled(torch.zeros(shape)) == [left]


def test_deferred_scales_have_rows_last():
    normed = Normed(torch.zeros(8, 5), torch.zeros(2, 8))
    assert garbled((torch.zeros(8, 5), normed)) == [6, 6, 6]


def test_overwritten_graph_memory_is_restored_before_the_next_trial():
    registry = Registry(torch.device("cpu"))
    slots = registry.published("slots", 4, pad=0, reason="slot 0 writes nothing")
    table = registry.table("table", torch.zeros(5))
    out = registry.output("out", (4,), torch.float32)

    def double(key: GraphKey, pieces: Pieces) -> None:
        values = table[slots[: key.rows]] * 2
        out[: key.rows].copy_(values + 1 - 1)

    spec = RunnerSpec("decode", Ladder((4,)), None, ("slots",), double, ("out",))
    runner, key = Runner(spec, registry, CpuBackend()), GraphKey("decode", 4, 4)
    runner.prepare(key)
    scenario = Scenario(key, {"slots": [1, 2]}, {"slots": [3]}, 4, {"table": torch.arange(5.0)})
    trial = Trial(runner, scenario)
    assert GRAPH_MEMORY in trial.poisonable()
    plain, before = trial.replay(), [block.clone() for block in runner.backend.blocks()]
    poisoned = trial.replay(poison=[GRAPH_MEMORY])
    assert torch.equal(poisoned.tensors["out"], plain.tensors["out"])
    trial._load(())
    for block, was in zip(runner.backend.blocks(), before, strict=True):
        assert torch.equal(block, was)


def test_a_recording_uses_registered_memory_and_that_of_its_backend():
    registry, backend = Registry(torch.device("cpu")), CpuBackend()
    out = registry.output("out", (4,), torch.float32)
    recording = backend.record(lambda pieces: out.copy_((out + 1) * 2))
    ((first, last),) = backend.memory()
    others = {a for a in recording.addresses() if not first <= a < last}
    assert others == {out.data_ptr()}
    assert recording.addresses() > others
