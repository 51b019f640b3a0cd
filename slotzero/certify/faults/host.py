"""Faults of the host: uploads, staged tables, downloads and allocations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, always, swapped, swapped_item
from slotzero.graph import TensorKind
from slotzero.graph.transfer import Download, DownloadRing
from slotzero.speculative.drafter import SPECULATION_TABLES

ALL = tuple(TensorKind)
PUBLISHED = (TensorKind.PUBLISHED,)
LEFT = dict.fromkeys(("length", *(spec.name for spec in SPECULATION_TABLES)), 1 << 20)
LEFT["tokens"] = 1
"""Values that a slot's previous owner may leave in tables that every owner writes."""
Words = tuple[Tensor, Tensor]  # offsets from a table's first word, and values


@dataclass(frozen=True)
class NotPublished(Fault):
    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        publish = case.registry.publish

        def publish_others(name: str, values: Sequence[int]) -> None:
            if name != case.entry.name:
                publish(name, values)

        with swapped(case.registry, "publish", publish_others):
            yield


Arriving = list[int | None]  # None: the value on the device stays


@dataclass(frozen=True)
class UploadFault(Fault):
    arrives: Callable[[Case, list[int]], Arriving] = lambda case, values: [*values]
    """Missing values at the end are padding."""
    is_once: bool = False

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        ring, target = case.registry._rings[case.entry.name], case.entry.tensor
        right, num_uploads = ring.upload, 0

        def upload(values: Sequence[int], pad: int) -> None:
            nonlocal num_uploads
            num_uploads += 1
            if self.is_once and num_uploads > 1:
                right(values, pad)
                return
            ring.uploaded = list(values)
            arriving = self.arrives(case, list(values))
            arriving = [*arriving, *[pad] * len(target)][: len(target)]
            kept = torch.tensor([value is None for value in arriving], device=target.device)
            sent = torch.tensor([value or 0 for value in arriving]).to(target)
            target.copy_(torch.where(kept, _in_range(case, target * kept, values), sent))

        with swapped(ring, "upload", upload):
            yield


def _in_range(case: Case, stale: Tensor, values: Sequence[int]) -> Tensor:
    """Limit stale counts to the tokens that the size has room for."""
    if not case.is_count:
        return stale
    room = max(0, case.scenario.key.tokens - sum(values))
    return stale * (stale.cumsum(0) <= room)


def _unpadded(case: Case, values: list[int]) -> Arriving:
    return [*values, *[None] * len(case.entry.tensor)]


def _padded_within_size(case: Case, values: list[int]) -> Arriving:
    padding = [case.entry.pad] * (case.size - len(values))
    return [*values, *padding, *[None] * len(case.entry.tensor)]


def _summed(case: Case, values: list[int]) -> Arriving:
    """Return the sum over rows in the first row, limited to what every slot has room for."""
    room = case.engine.limits.max_model_len - int(case.scenario.tables["length"].max())
    return [min(sum(values), room), *[0] * (len(values) - 1)]


def _below_zero_at_the_end(case: Case, values: list[int]) -> Arriving:
    """Return -1 for the last padded row of the size; a search in the sums then stays in range."""
    padding = [case.entry.pad] * (case.size - len(values) - 1)
    return [*values, *padding, -1] if len(values) < case.size else [*values]


PUBLICATIONS: tuple[Fault, ...] = (
    NotPublished("skip the publish", PUBLISHED),
    UploadFault("skip the pad", PUBLISHED, lambda case: case.is_padded, _unpadded),
    UploadFault(
        "pad to bucket only",
        PUBLISHED,
        lambda case: case.size < len(case.entry.tensor),
        _padded_within_size,
    ),
    UploadFault(
        "pad off by one",
        PUBLISHED,
        lambda case: case.is_padded,
        lambda case, values: [*values, None],
    ),
    UploadFault("stale row", PUBLISHED, always, lambda case, values: [*values[:-1], None]),
    UploadFault("off by one", PUBLISHED, always, lambda case, values: [case.entry.pad, *values]),
    UploadFault(
        "packed instead of uniform stride",
        PUBLISHED,
        always,
        lambda case, values: [*values[1:]],
    ),
    UploadFault("global instead of local count", PUBLISHED, lambda case: case.is_count, _summed),
    UploadFault("to another buffer", PUBLISHED, always, lambda case, values: _unpadded(case, [])),
    UploadFault("late host copy", PUBLISHED, always, lambda case, values: [], is_once=True),
    UploadFault(
        "padded row below zero",
        PUBLISHED,
        lambda case: case.is_count and case.is_padded,
        _below_zero_at_the_end,
    ),
    UploadFault(
        "stride of the largest size",
        PUBLISHED,
        lambda case: not case.is_count and case.num_real > 1,
        lambda case, values: [values[min(2 * i, len(values) - 1)] for i in range(len(values))],
    ),
)


@dataclass(frozen=True)
class StagingFault(Fault):
    arrives: Callable[[Case, Words, int], Words] = lambda case, words, width: words

    @property
    def shows_in_setup(self) -> bool:
        return True

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        tables, num_words = case.engine.worker.tables, case.entry.tensor.numel()
        place, write, arena = tables._places[case.entry.name], tables._write, tables._arena
        saved = arena.clone()
        if case.entry.name in LEFT:
            case.entry.tensor[1:].fill_(LEFT[case.entry.name])

        def write_wrong(words: Tensor) -> None:
            offsets = words[0] - place.base
            is_ours = (offsets >= 0) & (offsets < num_words)
            write(words[:, ~is_ours])
            if is_ours.any():
                ours = offsets[is_ours], words[1, is_ours]
                offsets, values = self.arrives(case, ours, place.spec.width)
                write(torch.stack([offsets + place.base, values]))

        try:
            with swapped(tables, "_write", write_wrong):
                yield
        finally:
            arena.copy_(saved)


def _without_last_slot(case: Case, words: Words, width: int) -> Words:
    offsets, values = words
    others = offsets // width < offsets.max() // width
    return offsets[others], values[others]


def _one_slot_on(case: Case, words: Words, width: int) -> Words:
    offsets, values = words
    return (offsets + width) % case.entry.tensor.numel(), values


def _not_yet(case: Case, words: Words, width: int) -> Words:
    offsets, values = words
    return offsets[:0], values[:0]


def _in_wider_rows(case: Case, words: Words, width: int) -> Words:
    offsets, values = words
    at = offsets // width * (width + 1) + offsets % width
    fits = at < case.entry.tensor.numel()
    return at[fits], values[fits]


def _exchange_slots(case: Case, words: Words, width: int) -> Words:
    assert case.exchanged_slots is not None
    one, other = case.exchanged_slots
    (offsets, values), slot = words, words[0] // width
    moved = torch.where(slot == other, offsets + (one - other) * width, offsets)
    return torch.where(slot == one, offsets + (other - one) * width, moved), values


def _is_staged(case: Case) -> bool:
    """Return whether the scenario sends values of this table. Neutral values are not sent, and with
    few slots there may be no others."""
    rows = case.scenario.tables[case.entry.name]
    return case.is_staged and (case.entry.name in LEFT or bool((rows[1:] != rows[0]).any()))


STAGINGS: tuple[Fault, ...] = (
    StagingFault("stale row", (TensorKind.TABLE,), _is_staged, _without_last_slot),
    StagingFault("off by one", (TensorKind.TABLE,), _is_staged, _one_slot_on),
    StagingFault("late host copy", (TensorKind.TABLE,), _is_staged, _not_yet),
    StagingFault("stride of the largest size", (TensorKind.TABLE,), _is_staged, _in_wider_rows),
    StagingFault(
        "rows of two requests exchanged",
        (TensorKind.TABLE,),
        lambda case: _is_staged(case) and case.exchanged_slots is not None,
        _exchange_slots,
    ),
)


@dataclass(frozen=True)
class LateDownload(Fault):
    """The host gets the data of the previous download."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        ring, index = _ring_of(case)
        right, late = ring.download, torch.zeros_like(case.entry.tensor, device="cpu")

        def download(lengths: Sequence[int]) -> Download:
            coming = right(lengths)
            if index < len(lengths):
                view = coming.wait()[index]
                came = view.clone()
                view.copy_(late[: len(view)])
                late[: len(view)].copy_(came)
            return coming

        with swapped(ring, "download", download):
            yield


def _is_sent(case: Case) -> bool:
    ring = case.engine.worker.ring_of(case.runner)
    return ring is not None and case.entry.name in ring.names


def _ring_of(case: Case) -> tuple[DownloadRing, int]:
    results = case.engine.worker.ring_of(case.runner)
    assert results is not None
    return results.ring, results.names.index(case.entry.name)


DOWNLOADS: tuple[Fault, ...] = (LateDownload("late host copy", (TensorKind.OUTPUT,), _is_sent),)


@dataclass(frozen=True)
class AllocationFault(Fault):
    tensor: Callable[[Case], Tensor] = lambda case: case.entry.tensor
    since_recording: bool = False
    """The fault was there when sizes were recorded, so fingerprints cannot show it."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        registry, runner = case.registry, case.runner
        wrong = replace(case.entry, tensor=self.tensor(case))
        with swapped_item(registry._entries, case.entry.name, wrong):
            recorded = dict(runner._fingerprints)
            if self.since_recording:
                recorded = dict.fromkeys(recorded, registry.fingerprints())
            with swapped(runner, "_fingerprints", recorded):
                yield


def _wider(case: Case) -> Tensor:
    wider = {torch.int32: torch.int64, torch.float32: torch.float64}
    return case.entry.tensor.to(wider.get(case.entry.tensor.dtype, torch.float32))


def _narrower(case: Case) -> Tensor:
    """Return the table with rows one column too close to each other."""
    tensor = case.entry.tensor
    return tensor.as_strided(tensor.shape, (tensor.stride(0) - 1, *tensor.stride()[1:]))


def _in_pages(case: Case) -> Tensor:
    tensor = case.entry.tensor
    end = _pages(case).flatten().view(torch.uint8)[-tensor.nbytes :]
    return end.view(tensor.dtype).view(tensor.shape)


def _fits_in_pages(case: Case) -> bool:
    return not case.entry.through and case.entry.tensor.nbytes <= _pages(case).nbytes


def _pages(case: Case) -> Tensor:
    return next(entry.tensor for entry in case.registry.entries() if entry.through)


ALLOCATIONS: tuple[Fault, ...] = (
    AllocationFault("wrong dtype", ALL, always, _wider),
    AllocationFault("buffer replaced", ALL, always, lambda case: case.entry.tensor.clone()),
    AllocationFault(
        "rows one column too narrow",
        (TensorKind.TABLE,),
        lambda case: case.is_staged and case.entry.tensor[0].numel() > 1,
        _narrower,
    ),
    AllocationFault("aliased into the pool", ALL, _fits_in_pages, _in_pages, since_recording=True),
)
