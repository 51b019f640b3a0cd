"""The cheap part of certification, made of every recording before it serves.

A step of nobody is replayed over hostile memory: derived tensors must be rewritten over the whole
size, outputs must be zeros, and no table may change. It costs one replay. What it cannot see, for
want of real rows, is in `slotzero certify`.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slotzero.graph.registry import Entry, Kind

if TYPE_CHECKING:
    from slotzero.graph.runner import GraphKey, Runner

HOSTILE = (1, 2)  # indices that every table has: whoever follows one is wrong, and does not crash


def find_violation(runner: "Runner", key: "GraphKey") -> str:
    """Replays a step of nobody, which is published already; -> what is wrong, or nothing."""
    entries = runner.entries()
    written = [e for e in entries if e.kind in (Kind.DERIVED, Kind.OUTPUT)]
    tables = {e.name: _witness(e).clone() for e in entries if e.kind is Kind.TABLE}
    wrong = _over(HOSTILE[0], runner, key, written)
    if wrong:  # or it is right by chance: then it is not what was put there this time
        wrong = [entry for entry in _over(HOSTILE[1], runner, key, written) if entry in wrong]
    for entry in written:
        entry.tensor.zero_()
    wrong += [
        e for e in entries
        if e.kind is Kind.TABLE and not torch.equal(_witness(e), tables[e.name])
    ]  # fmt: skip
    return "; ".join(_rule(entry) for entry in wrong)


def _over(hostile: int, runner: "Runner", key: "GraphKey", written: list[Entry]) -> list[Entry]:
    """Replays over memory full of it; -> derived tensors that still have some of it, and outputs
    that are not zero."""
    for entry in written:
        entry.tensor.fill_(torch.nan if entry.tensor.is_floating_point() else hostile)
    runner.replay(key)
    return [entry for entry in written if _is_wrong(entry, key, hostile)]


def _is_wrong(entry: Entry, key: "GraphKey", hostile: int) -> bool:
    part = entry.tensor[: entry.extent(key.tokens, key.rows)]
    if entry.kind is Kind.OUTPUT:
        return bool((part != 0).any())  # NaN is not 0 either
    return bool((part.isnan() if part.is_floating_point() else part == hostile).any())


def _witness(entry: Entry) -> Tensor:
    """All of a table by slot; of one that slots own parts of, row 0, which nobody owns."""
    return entry.tensor.select(entry.axis, 0) if entry.through else entry.tensor


def _rule(entry: Entry) -> str:
    rule = {
        Kind.DERIVED: "is not rewritten over the whole size",
        Kind.OUTPUT: "is not zero where nobody runs",
        Kind.TABLE: "changes where nobody runs",
    }[entry.kind]
    return f"{entry.kind.value} tensor {entry.name!r} {rule}"
