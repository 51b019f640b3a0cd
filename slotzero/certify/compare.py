"""Where two outcomes differ: outputs by row, tables by slot, to the bit or within a bound."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.certify.scenario import Outcome, Tables, owned_rows
from slotzero.graph import Kind, Runner
from slotzero.graph.registry import Entry


@dataclass(frozen=True)
class Mismatch:
    tensor: str
    row: int | None
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.got} where {self.expected} was expected"


def differences(
    runner: Runner, got: Outcome, expected: Outcome, bound: float = 0.0
) -> Iterator[Mismatch]:
    """Over the rows that both have; derived tensors only where the layout is the same.

    `bound` is relative, see `magnitude`; 0 is to the bit. Within a bound, what was chosen from
    a tensor is compared only where that tensor is equal to the bit; and where it is not kept, a
    slot is compared only if the choice was the same.
    """
    entries = [e for e in runner.entries() if e.name in got.tensors]
    shared = [slot for slot in got.slots if slot in expected.slots]
    followed = {e.name: runner.spec.follows.get(e.name, e.follows) for e in entries if bound}
    for entry in entries:
        if followed.get(entry.name) and followed[entry.name] not in got.tensors:
            shared = _with_equal(entry, shared, got, expected)
    same_layout = got.key == expected.key and got.slots == expected.slots
    same_step = {*shared} == {*got.slots, *expected.slots}
    for kind in (Kind.PUBLISHED, Kind.DERIVED, Kind.TABLE, Kind.OUTPUT):
        for entry in entries:
            if entry.kind is not kind or (
                not same_layout and kind in (Kind.PUBLISHED, Kind.DERIVED)
            ):
                continue
            if entry.per == "step" and not same_step:
                continue
            slots, chosen_from = shared, followed.get(entry.name, "")
            if chosen_from in got.tensors:
                slots = _with_equal(runner.registry.entry(chosen_from), shared, got, expected)
            ours, theirs = (_part(entry, slots, o, expected.tensors) for o in (got, expected))
            found = first_difference(ours, theirs, bound)
            if found is not None:
                index, a, b = found
                row = _row(entry, index, slots, got)
                yield Mismatch(entry.name, row, a, b)


def _row(entry: Entry, index: int, slots: Sequence[int], got: Outcome) -> int | None:
    """Of the step; a table has none, what is first in it is a slot or what a slot owns."""
    if entry.kind is Kind.TABLE or entry.per == "step":
        return None
    return got.slots.index(slots[index]) if entry.kind is Kind.OUTPUT else index


def first_difference(a: Tensor, b: Tensor, bound: float) -> tuple[int, str, str] | None:
    """-> index on the first axis, and both values there"""
    if torch.equal(a, b) or (bound and _is_near(a, b, bound)):
        return None
    differs = a != b
    ours, theirs = a[differs], b[differs]
    wrong = ~_is_same(ours, theirs)
    if bound and a.is_floating_point():
        allowed = bound * magnitude(b).double().expand_as(b)[differs]
        wrong &= ~((ours.double() - theirs.double()).abs() <= allowed)
    if not wrong.any():
        return None
    first = int(wrong.int().argmax())
    at = int(differs.flatten().nonzero()[first])
    return (
        at // (a.numel() // len(a)),
        f"{ours[first].item():.9g}",
        f"{theirs[first].item():.9g}",
    )


def magnitude(expected: Tensor) -> Tensor:
    """What a bound is relative to: the largest value, NaN and infinity aside, of a row of a batch;
    of tables with more axes, of what one token stores in one layer, or of one head's state.

    The rounding of a value grows with the terms that were summed up for it. They may cancel, so a
    value can be small beside its own rounding; that all values of a row are is another matter. No
    larger part counts, lest zeros in place of a layer's small values pass beside another's.
    """
    axes = tuple(range(1, expected.dim()))[-2:]
    sizes = expected.nan_to_num(0, 0, 0).abs()
    return sizes.amax(axes, keepdim=True) if axes and expected.numel() else sizes


def _is_near(a: Tensor, b: Tensor, bound: float) -> bool:
    """Well within the bound, so that it need not be asked value by value; False with any NaN."""
    return a.is_floating_point() and bool(((a - b).abs() <= magnitude(b) * (bound / 2)).all())


def _is_same(ours: Tensor, theirs: Tensor) -> Tensor:
    """Of values that differ: both NaN."""
    if not ours.is_floating_point():
        return torch.zeros_like(ours, dtype=torch.bool)
    return ours.isnan() & theirs.isnan()


def extent(entry: Entry, outcome: Outcome) -> int:
    return entry.extent(outcome.key.tokens, outcome.key.rows)


def by_row(entry: Entry, outcome: Outcome) -> Tensor:
    """An output within the size; the tokens of a row, all rows have as many, are together."""
    part = outcome.tensors[entry.name][: extent(entry, outcome)]
    return part if entry.per == "row" else part.view(outcome.key.rows, -1, *part.shape[1:])


def padding_of(entry: Entry, outcome: Outcome) -> Tensor:
    """The rows of an output without a slot; what is of the step as a whole has none."""
    if entry.per == "step":
        return outcome.tensors[entry.name][:0]
    return by_row(entry, outcome)[len(outcome.slots) :]


def _part(entry: Entry, slots: Sequence[int], outcome: Outcome, tables: Tables) -> Tensor:
    """Who owns what, `tables` say: those of an outcome can be spoilt."""
    tensor = outcome.tensors[entry.name]
    if entry.kind is Kind.PUBLISHED:
        return tensor
    if entry.kind is Kind.DERIVED or entry.per == "step":
        return tensor[: extent(entry, outcome)]
    if entry.kind is Kind.OUTPUT:
        return by_row(entry, outcome)[[outcome.slots.index(slot) for slot in slots]]
    rows = tensor.movedim(entry.axis, 0)
    if not entry.through:
        return rows[list(slots)]
    owned = owned_rows(entry, slots, tables)
    if entry.name in outcome.owned_only:
        if len(slots) == len(outcome.slots):
            return rows
        owned = owned[owned_rows(entry, outcome.slots, tables)]
    return rows[owned]


def _with_equal(
    followed: Entry, slots: Sequence[int], got: Outcome, expected: Outcome
) -> list[int]:
    return [
        slot
        for slot in slots
        if torch.equal(*(_part(followed, [slot], o, expected.tensors) for o in (got, expected)))
    ]
