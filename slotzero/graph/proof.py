"""The start-up check: the cheap part of certification, run on every new recording.

An empty step is replayed over poisoned memory: derived tensors must be rewritten over the whole
size, outputs must be zero, and no table may change. It costs one replay. `slotzero certify` checks
what needs real rows.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slotzero.graph.registry import Entry, TensorKind

if TYPE_CHECKING:
    from slotzero.graph.runner import GraphKey, Runner

POISON = (1, 2)  # in range for every table: code that uses them is wrong, but does not crash


def find_violation(runner: "Runner", key: "GraphKey") -> str:
    """Replay an empty step, which must be published already, and return what is wrong, or an empty
    string."""
    entries = runner.entries()
    written = [e for e in entries if e.kind in (TensorKind.DERIVED, TensorKind.OUTPUT)]
    tables = {e.name: _witness(e).clone() for e in entries if e.kind is TensorKind.TABLE}
    wrong = _over(POISON[0], runner, key, written)
    if wrong:  # a right value may equal the poison: try another
        wrong = [entry for entry in _over(POISON[1], runner, key, written) if entry in wrong]
    for entry in written:
        entry.tensor.zero_()
    wrong += [
        e for e in entries
        if e.kind is TensorKind.TABLE and not torch.equal(_witness(e), tables[e.name])
    ]  # fmt: skip
    return "; ".join(_rule(entry) for entry in wrong)


def _over(poison: int, runner: "Runner", key: "GraphKey", written: list[Entry]) -> list[Entry]:
    """Replay over memory filled with `poison`, and return the derived tensors that still contain
    it and the outputs that are not zero."""
    for entry in written:
        entry.tensor.fill_(torch.nan if entry.tensor.is_floating_point() else poison)
    runner.replay(key)
    return [entry for entry in written if _is_wrong(entry, key, poison)]


def _is_wrong(entry: Entry, key: "GraphKey", poison: int) -> bool:
    part = entry.tensor[: entry.extent(key.tokens, key.rows)]
    if entry.kind is TensorKind.OUTPUT:
        return bool((part != 0).any())  # NaN is not 0 either
    return bool((part.isnan() if part.is_floating_point() else part == poison).any())


def _witness(entry: Entry) -> Tensor:
    """Return the part that must not change: all of a table by slot, or row 0 of a paged table,
    which no slot owns."""
    return entry.tensor.select(entry.axis, 0) if entry.through else entry.tensor


def _rule(entry: Entry) -> str:
    rule = {
        TensorKind.DERIVED: "is not rewritten over the whole size",
        TensorKind.OUTPUT: "is not zero after an empty step",
        TensorKind.TABLE: "changes in an empty step",
    }[entry.kind]
    return f"{entry.kind.value} tensor {entry.name!r} {rule}"
