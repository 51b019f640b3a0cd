"""How far a live step reaches into the rows of its slots; everything past that is unused.

This is the one module that knows tables by name and reads them. synthetic_requests.py declares the
same for the requests of a scenario.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.certify.scenario import kind_of
from slotzero.graph import Registry, Runner
from slotzero.pools.states import SNAPSHOT_ROWS
from slotzero.speculative.drafter import (
    DRAFTED_AT,
    DRAFTER_LEN,
    FEATURES,
    LIMIT,
    NUM_DRAFTS,
    PAGED,
    SPECULATES,
)
from slotzero.speculative.eagle import HIDDEN
from slotzero.speculative.eagle_config import GROUP
from slotzero.speculative.passes import DRAFT, EXTEND, VERIFY
from slotzero.speculative.tree import PARENTS


class Reach(NamedTuple):
    """By row, [R] each: the end of the part of a slot that its step may read or write."""

    tokens: Tensor
    stored: Tensor | None  # KV of the target; None: not accessed
    drafted: Tensor | None  # KV of the drafter
    features: Tensor | None = None


def unused_tails(runner: Runner, slots: Sequence[int], counts: Sequence[int]) -> dict[str, Tensor]:
    """Return, by table, [rows, columns]: True where rows of running slots hold nothing for this
    step.

    Tables that a step does not access are left out: overwriting them would need a copy of all KV.
    """
    registry = runner.registry
    index = torch.tensor(slots, dtype=torch.long, device=registry.device)
    count = torch.tensor(counts, dtype=torch.int32, device=registry.device)
    reach = reach_of(runner, index, count)
    tails = {"tokens": _past(registry["tokens"], index, reach.tokens)}
    if reach.features is not None:
        tails[FEATURES] = _past(registry[FEATURES], index, reach.features)
        if kind_of(runner) == VERIFY and has(registry, PARENTS):
            tails[PARENTS] = _past(registry[PARENTS], index, reach.features)
    for entry in registry.entries():
        ends = reach.drafted if is_drafter(entry.name) else reach.stored
        if entry.through and entry.through != SNAPSHOT_ROWS and ends is not None:
            table, page_size = registry[entry.through], entry.tensor.shape[entry.axis + 1]
            tails[entry.through] = _past(table, index, -(-ends // page_size))
            position = torch.arange(table.shape[1] * page_size, device=table.device)
            used = (position < ends[:, None]).view(-1, page_size).int()
            shape = entry.tensor.shape[entry.axis], page_size
            num_uses = torch.zeros(shape, dtype=torch.int32, device=table.device)
            pages = table[index].flatten().long()
            tails[entry.name] = num_uses.index_put_((pages,), used, accumulate=True) == 0
    return tails


def is_drafter(name: str) -> bool:
    """Return whether pages of this name hold the drafter's KV."""
    return name.startswith(f"kv_{GROUP}")


def reads_target(registry: Registry) -> bool:
    """Return whether the drafter has no KV of its own and reads the target's."""
    return has(registry, HIDDEN) and not any(is_drafter(e.name) for e in registry.entries())


def has(registry: Registry, name: str) -> bool:
    return any(entry.name == name for entry in registry.entries())


def reach_of(runner: Runner, index: Tensor, count: Tensor) -> Reach:
    """Return how far the rows reach. `index` [R]: slots; `count` [R]: tokens each may compute."""
    tables, kind = runner.registry, kind_of(runner)
    length = tables["length"][index]
    if kind == VERIFY:  # the newest token and the drafts, and one more in place of the last draft
        room = tables[LIMIT][index] - length - 1
        drafts = tables[NUM_DRAFTS][index] * (tables[DRAFTED_AT][index] == length)
        count = torch.minimum(count, torch.minimum(drafts + 1, room)).clamp_min(0)
        return Reach(length + count + 1, length + count, None, count)
    if kind == EXTEND:
        num = torch.minimum(length - tables[DRAFTER_LEN][index], count).clamp_min(0)
        return Reach(length + 1, None, length, num)
    if kind == DRAFT:
        most = torch.minimum(tables[LIMIT][index] - length - 2, tables[PAGED][index] - length - 1)
        drafts = (tables[SPECULATES][index] > 0) & (length >= tables["target"][index])
        num = most.clamp(0, runner.spec.ahead) * drafts
        last = length + num + int(has(tables, PARENTS)) - int(has(tables, HIDDEN))
        seen = length if reads_target(tables) else None
        return Reach(length + num + 1, seen, torch.where(num > 0, last, length))
    # Tokens are known below max(end, target) and one may be sampled at end; KV is stored below end.
    ends = length + count
    tokens = torch.maximum(ends, tables["target"][index] - 1) + 1
    if kind != "decode":
        return Reach(tokens, ends, ends)
    pending = None
    if has(tables, FEATURES):
        pending = length - tables[DRAFTER_LEN][index] + 1
    return Reach(tokens, ends, None, pending)


def _past(table: Tensor, index: Tensor, first: Tensor) -> Tensor:
    """Return the columns [first, ...) of these rows."""
    tail = torch.zeros(table.shape[:2], dtype=torch.bool, device=table.device)
    tail[index] = torch.arange(table.shape[1], device=table.device) >= first[:, None]
    return tail
