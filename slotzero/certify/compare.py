"""Comparison of two outcomes: outputs by row, tables by slot, bit by bit or within a bound."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.certify.scenario import Outcome, Tables, owned_rows
from slotzero.graph import Runner, TensorKind
from slotzero.graph.registry import Entry
from slotzero.kernels.float8_kv import from_codes

FLOAT8_STEP = 2**-3
"""How far a number of e4m3 may be from the next one, relative to the larger of the two."""


@dataclass(frozen=True)
class Mismatch:
    tensor: str
    row: int | None
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.got} where {self.expected} was expected"


def leaks(
    names: Sequence[str], changed: Callable[[Sequence[str]], Mismatch | None]
) -> Iterator[tuple[str, Mismatch]]:
    """Yield the tensors whose poison changes a result, found by bisection; `changed` returns what
    poisoning these tensors changes.

    If only both halves together change a result, no single tensor can be blamed, and the first
    tensor whose value changed is named.
    """
    mismatch = changed(names)
    if mismatch is None:
        return
    middle = len(names) // 2
    halves = (names[:middle], names[middle:]) if middle else ()
    found = [leak for half in halves for leak in leaks(half, changed)]
    yield from found or [(mismatch.tensor if middle else names[0], mismatch)]


def differences(
    runner: Runner, got: Outcome, expected: Outcome, bound: float = 0.0
) -> Iterator[Mismatch]:
    """Yield mismatches in the rows that both have; derived tensors only if the layout is the same.

    `bound` is relative, see `magnitude`; 0 requires identical bits. With a bound, a value that was
    chosen from a tensor (a token from logits) is compared only where that tensor is bit-identical;
    if the tensor is not kept, a slot is compared only if the same value was chosen.
    """
    entries = [e for e in runner.entries() if e.name in got.tensors]
    shared = [slot for slot in got.slots if slot in expected.slots]
    sources = {e.name: runner.spec.chosen_from.get(e.name, e.chosen_from) for e in entries if bound}
    for entry in entries:
        if sources.get(entry.name) and sources[entry.name] not in got.tensors:
            shared = _with_equal(entry, shared, got, expected)
    same_layout = got.key == expected.key and got.slots == expected.slots
    same_step = {*shared} == {*got.slots, *expected.slots}
    for kind in (TensorKind.PUBLISHED, TensorKind.DERIVED, TensorKind.TABLE, TensorKind.OUTPUT):
        for entry in entries:
            if entry.kind is not kind or (
                not same_layout and kind in (TensorKind.PUBLISHED, TensorKind.DERIVED)
            ):
                continue
            if entry.per == "step" and not same_step:
                continue
            if same_layout and torch.equal(got.tensors[entry.name], expected.tensors[entry.name]):
                continue  # the common case: then all parts are equal
            slots, source = shared, sources.get(entry.name, "")
            if source in got.tensors:
                slots = _with_equal(runner.registry.entry(source), shared, got, expected)
            ours, theirs = (_part(entry, slots, o, expected.tensors) for o in (got, expected))
            if entry.is_float8 and bound:
                found = first_difference(_numbers(ours), _numbers(theirs), bound + FLOAT8_STEP)
            else:
                found = first_difference(ours, theirs, bound)
            if found is not None:
                index, a, b = found
                row = _row(entry, index, slots, got)
                yield Mismatch(entry.name, row, a, b)


def _numbers(codes: Tensor) -> Tensor:
    return from_codes(codes, torch.ones((), device=codes.device))


def _row(entry: Entry, index: int, slots: Sequence[int], got: Outcome) -> int | None:
    """Return the row of the step, or None for a table: its rows are slots or owned by slots."""
    if entry.kind is TensorKind.TABLE or entry.per == "step":
        return None
    if entry.kind is not TensorKind.OUTPUT:
        return index
    rows = [got.slots.index(slot) for slot in slots]
    if entry.per == "token" and got.counts is not None:  # the index is that of a token
        rows = [row for row in rows for _ in range(got.counts[row])]
    return rows[index]


def first_difference(a: Tensor, b: Tensor, bound: float) -> tuple[int, str, str] | None:
    """Return the index on the first axis and both values there, or None if there is none."""
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
    """Return what a bound is relative to: the largest finite value in a row of a batch, or, for
    tables with more axes, in what one token stores in one layer or in one head's state.

    The rounding error of a value grows with the terms that were summed for it. Terms may cancel, so
    a single value can be small compared with its rounding error, but not all values of a row are.
    No larger unit is used, because zeros in place of one layer's small values would then pass
    beside another layer's large ones.
    """
    axes = tuple(range(1, expected.dim()))[-2:]
    sizes = expected.nan_to_num(0, 0, 0).abs()
    return sizes.amax(axes, keepdim=True) if axes and expected.numel() else sizes


def _is_near(a: Tensor, b: Tensor, bound: float) -> bool:
    """Return whether all values are well within the bound, so that no further comparison is needed;
    False if there is any NaN."""
    return a.is_floating_point() and bool(((a - b).abs() <= magnitude(b) * (bound / 2)).all())


def _is_same(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return where both values are NaN; the arguments are values that differ."""
    if not ours.is_floating_point():
        return torch.zeros_like(ours, dtype=torch.bool)
    return ours.isnan() & theirs.isnan()


def extent(entry: Entry, outcome: Outcome) -> int:
    return entry.extent(outcome.key.tokens, outcome.key.rows)


def _rows(entry: Entry, outcome: Outcome) -> Tensor | Sequence[Tensor]:
    """Return an output within the size, by row. Real rows may have different numbers of tokens;
    then padding is not a row."""
    part = outcome.tensors[entry.name][: extent(entry, outcome)]
    if entry.per == "row":
        return part
    if outcome.counts is not None:
        return torch.split(part[: sum(outcome.counts)], list(outcome.counts))
    return part.view(outcome.key.rows, -1, *part.shape[1:])


def padding_of(entry: Entry, outcome: Outcome) -> Tensor:
    """Return the padding of an output: rows, or tokens if rows have different numbers of them. An
    output of the step as a whole has none."""
    tensor = outcome.tensors[entry.name]
    if entry.per == "step":
        return tensor[:0]
    if entry.per == "token" and outcome.counts is not None:
        return tensor[sum(outcome.counts) : extent(entry, outcome)]
    rows = _rows(entry, outcome)
    assert isinstance(rows, Tensor)
    return rows[len(outcome.slots) :]


def _part(entry: Entry, slots: Sequence[int], outcome: Outcome, tables: Tables) -> Tensor:
    """Return the part of an outcome that these slots own according to `tables`; the outcome's own
    tables can be damaged."""
    tensor = outcome.tensors[entry.name]
    if entry.kind is TensorKind.PUBLISHED:
        return tensor
    if entry.kind is TensorKind.DERIVED or entry.per == "step":
        return tensor[: extent(entry, outcome)]
    if entry.kind is TensorKind.OUTPUT:
        rows, index = _rows(entry, outcome), [outcome.slots.index(slot) for slot in slots]
        if isinstance(rows, Tensor):
            return rows[index]
        return torch.cat([rows[i] for i in index]) if index else tensor[:0]
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
    chosen_from: Entry, slots: Sequence[int], got: Outcome, expected: Outcome
) -> list[int]:
    return [
        slot
        for slot in slots
        if torch.equal(*(_part(chosen_from, [slot], o, expected.tensors) for o in (got, expected)))
    ]
