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

HOSTILE = 1_000_003  # an index that no table has; nobody may follow it


def flaw(runner: "Runner", key: "GraphKey") -> str:
    """Replays a step of nobody, which is published already; -> what is wrong, or nothing."""
    entries = list(runner.registry.entries())
    tables = {e.name: _witness(e).clone() for e in entries if e.kind is Kind.TABLE}
    for entry in entries:
        if entry.kind in (Kind.DERIVED, Kind.OUTPUT):
            entry.tensor.fill_(torch.nan if entry.tensor.is_floating_point() else HOSTILE)
    runner.replay(key)
    wrong = [entry for entry in entries if _is_wrong(entry, key, tables)]
    for entry in entries:
        if entry.kind in (Kind.DERIVED, Kind.OUTPUT):
            entry.tensor.zero_()
    return "; ".join(_rule(entry) for entry in wrong)


def _is_wrong(entry: Entry, key: "GraphKey", tables: dict[str, Tensor]) -> bool:
    part = entry.tensor[: key.tokens if entry.per == "token" else key.rows]
    if entry.kind is Kind.DERIVED:
        hostile = part.isnan() if part.is_floating_point() else part == HOSTILE
        return bool(hostile.any())
    if entry.kind is Kind.OUTPUT:
        return bool(part.isnan().any() if part.is_floating_point() else False) or bool(part.any())
    return entry.kind is Kind.TABLE and not torch.equal(_witness(entry), tables[entry.name])


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
