"""Faults of the device, in a recording or in a kernel.

A fault of a recording is in the replay and not in the eager run that it is compared with. A fault
of a kernel is in the step function itself, so both have it. Both are plain torch without a host
read, so that they can be captured with the function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, always, swapped, swapped_item
from slotzero.certify.reach import is_drafter
from slotzero.certify.scenario import kind_of
from slotzero.graph import GraphKey, Pieces, Runner, TensorKind
from slotzero.graph.backend import StepFunction
from slotzero.runners.passes import PLACES as PASS_PLACES
from slotzero.speculative.passes import DRAFT, EXTEND
from slotzero.speculative.passes import PLACES as VERIFY_PLACES

DERIVED, OUTPUT, TABLE = (TensorKind.DERIVED,), (TensorKind.OUTPUT,), (TensorKind.TABLE,)
TOKEN_OWNERS = (PASS_PLACES[0], VERIFY_PLACES[0])
LEAKED = -1000.0  # in place of NaN, which integers cannot hold


@dataclass(frozen=True)
class RecordedFault(Fault):
    effect: Callable[[Case, Tensor, Tensor], None] = lambda case, now, was: None
    """Called with the rows now, and as they were when the replay began."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, key, kind = case.runner, case.scenario.key, case.entry.kind
        now, was = case.view, case.view.clone()
        damage = partial(self.effect, case, now, was)

        def damaged(pieces: Pieces) -> None:
            """Damage a tensor that is read within the step before it is read."""
            was.copy_(now)
            if kind is TensorKind.PUBLISHED:
                damage()
            damaging = _Damaging(pieces, damage)
            runner.spec.function(key, damaging if kind in DERIVED else pieces)
            if kind in (*OUTPUT, *TABLE) or (kind in DERIVED and not damaging.is_done):
                damage()

        with recorded(runner, key, damaged):
            yield


class _Damaging(Pieces):
    """Does its damage after tensors are derived and before the first piece runs."""

    def __init__(self, pieces: Pieces, damage: Callable[[], None]) -> None:
        self._pieces, self._damage = pieces, damage
        self.is_done = False

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if not self.is_done:
            self._damage()
            self.is_done = True
        return self._pieces(function, *arguments)


@contextmanager
def recorded(runner: Runner, key: GraphKey, damaged: StepFunction) -> Iterator[None]:
    runner._publish_empty_step()
    with swapped_item(runner._recordings, key, runner.backend.record(damaged)):
        yield


def _keep_all(case: Case, now: Tensor, was: Tensor) -> None:
    now.copy_(was)


def _keep_last_row(case: Case, now: Tensor, was: Tensor) -> None:
    row = case.written_rows[-1] if case.entry.kind is TensorKind.TABLE else case.num_real - 1
    now[row].copy_(was[row])


def _keep_padding(case: Case, now: Tensor, was: Tensor) -> None:
    now[case.num_real :].copy_(was[case.num_real :])


def _fill_first_padding(case: Case, now: Tensor, was: Tensor) -> None:
    now[case.num_real].fill_(1)


def _zero_columns(case: Case, now: Tensor, was: Tensor) -> None:
    now[:, case.num_real : case.size].zero_()
    _keep_padding(case, now, was)


def _one_less(case: Case, now: Tensor, was: Tensor) -> None:
    now.sub_(1).clamp_(min=0)


def _pack(case: Case, now: Tensor, was: Tensor) -> None:
    now[:-1].copy_(now[1:].clone())


def _lay_out_narrower(case: Case, now: Tensor, was: Tensor) -> None:
    """Use the layout for rows with one token fewer."""
    width = case.scenario.key.width
    rows = now.view(-1, width, *now.shape[1:])[:, : width - 1].flatten(0, 1)
    now[: len(rows)].copy_(rows.clone())


def _sum_up(case: Case, now: Tensor, was: Tensor) -> None:
    real = now[case.real_rows]
    most = case.engine.limits.max_model_len
    now.index_copy_(0, case.real_rows, real.sum().clamp(max=most).to(now.dtype).expand_as(real))


def _bake(case: Case, now: Tensor, was: Tensor) -> None:
    """Bake in zeros: a recording is made over an empty step, in which every row is slot 0's."""
    row = case.row_unlike_padding
    assert row is not None
    now[row].fill_(0)


def _pad_below_zero(case: Case, now: Tensor, was: Tensor) -> None:
    now[case.num_real :].fill_(-1)


def _join_padding(case: Case, now: Tensor, was: Tensor) -> None:
    assert case.last_owned is not None
    now[case.num_real :].copy_(now[case.last_owned])


def _keep_beyond_rows(case: Case, now: Tensor, was: Tensor) -> None:
    rows = case.scenario.num_rows
    now[rows:].copy_(was[rows:])


def _widen_stride(case: Case, now: Tensor, was: Tensor) -> None:
    now.copy_(now[case.places_at_double_stride])


def _is_written(case: Case) -> bool:
    return case.is_written


def _changes_at_double_stride(case: Case) -> bool:
    rows = case.plain.tensors[case.entry.name][: case.size]
    at_stride = rows[case.places_at_double_stride]
    return case.entry.per != "step" and not torch.equal(at_stride, rows)


RECORDINGS: tuple[Fault, ...] = (
    RecordedFault("skip the write", DERIVED, always, _keep_all),
    RecordedFault("skip the write", TABLE, _is_written, _keep_all),
    RecordedFault("stale row", (*DERIVED, *OUTPUT), always, _keep_last_row),
    # For any other table, a staging fault leaves a stale row.
    RecordedFault(
        "stale row", TABLE, lambda case: not case.is_staged and case.is_written, _keep_last_row
    ),
    RecordedFault(
        "skip the pad", (*DERIVED, *OUTPUT), lambda case: case.is_padded, _keep_padding
    ),
    RecordedFault("pad off by one", OUTPUT, lambda case: case.is_padded, _fill_first_padding),
    RecordedFault(
        "wrong axis",
        OUTPUT,
        lambda case: case.is_padded and case.entry.tensor.dim() > 1,
        _zero_columns,
    ),
    RecordedFault("off by one", DERIVED, always, _one_less),
    RecordedFault("packed instead of uniform stride", (*DERIVED, *OUTPUT), always, _pack),
    RecordedFault(
        "wrong width",
        (*DERIVED, *OUTPUT),
        lambda case: case.entry.per == "token" and case.runner.spec.width > 1,
        _lay_out_narrower,
    ),
    RecordedFault(
        "global instead of local count",
        (*DERIVED, *OUTPUT, *TABLE),
        lambda case: case.is_count and case.is_written,
        _sum_up,
    ),
    RecordedFault(
        "baked host value",
        (TensorKind.PUBLISHED, *DERIVED, *OUTPUT),
        lambda case: case.row_unlike_padding is not None,
        _bake,
    ),
    RecordedFault(
        "padded row below zero",
        (*DERIVED, *OUTPUT),
        lambda case: case.is_count and case.is_padded,
        _pad_below_zero,
    ),
    RecordedFault(
        "padded tokens join the last row",
        DERIVED,
        lambda case: (
            case.entry.name in TOKEN_OWNERS and case.is_padded and case.last_owned is not None
        ),
        _join_padding,
    ),
    RecordedFault(
        "counted in rows instead of tokens",
        (*DERIVED, *OUTPUT),
        lambda case: case.entry.per == "token" and case.scenario.num_rows < case.num_real,
        _keep_beyond_rows,
    ),
    RecordedFault(
        "stride of the largest size", (*DERIVED, *OUTPUT), _changes_at_double_stride, _widen_stride
    ),
)  # fmt: skip


@dataclass(frozen=True)
class KernelFault(Fault):
    effect: Callable[[Case, Tensor], None] = lambda case, rows: None

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, spec, rows = case.runner, case.runner.spec, case.view
        saved = (
            rows.clone() if case.entry.kind is TensorKind.CONSTANT else None
        )  # a trial resets others

        def damaged(key: GraphKey, pieces: Pieces) -> None:
            spec.function(key, pieces)
            self.effect(case, rows)

        try:
            with replaced(runner, case.scenario.key, damaged):
                yield
        finally:
            if saved is not None:
                rows.copy_(saved)


@dataclass(frozen=True)
class ReadingFault(KernelFault):
    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        _ = case.victim  # found before the capture, during which nothing may wait for a value
        with super().inject(case):
            yield


@contextmanager
def replaced(
    runner: Runner, key: GraphKey, function: Callable[[GraphKey, Pieces], None]
) -> Iterator[None]:
    with (
        recorded(runner, key, partial(function, key)),
        swapped(runner, "spec", replace(runner.spec, function=function)),
    ):
        yield


def _write_row_0(case: Case, rows: Tensor) -> None:
    rows[0].add_(1)


def _lose(case: Case, rows: Tensor) -> None:
    rows.zero_()


def _has_foreign(case: Case) -> bool:
    return case.foreign is not None


def _write_foreign(case: Case, rows: Tensor) -> None:
    rows[case.foreign].add_(1)


def _write_elsewhere(case: Case, rows: Tensor) -> None:
    rows[case.elsewhere].add_(1)


def write_kept(case: Case, rows: Tensor) -> None:
    assert case.kept is not None
    rows[case.kept].add_(1)


def _is_kv_of_another(case: Case) -> bool:
    """Return whether this is the target's KV in a runner of the drafter."""
    drafts = kind_of(case.runner) in (EXTEND, DRAFT)
    return drafts and bool(case.entry.through) and not is_drafter(case.entry.name)


def _exchange_rows(case: Case, rows: Tensor) -> None:
    """Exchange two rows, as a copy to the wrong place would. All values still exist, and doing it
    twice gives the same result."""
    assert case.exchanged is not None
    rows.index_copy_(0, *case.exchanged)


def _write_column(case: Case, rows: Tensor) -> None:
    rows.select(1, 0).add_(1)


def _read_foreign(case: Case, rows: Tensor) -> None:
    _leak(case, rows[case.foreign])


def _read_unused(case: Case, rows: Tensor) -> None:
    assert case.unused is not None
    _leak(case, rows[case.unused])


def _leak(case: Case, values: Tensor) -> None:
    case.victim.add_(values.float().sum().nan_to_num(LEAKED).to(case.victim.dtype))


KERNELS: tuple[Fault, ...] = (
    KernelFault("kernel writes slot 0", TABLE, always, _write_row_0),
    KernelFault("kernel writes another slot", TABLE, _has_foreign, _write_foreign),
    KernelFault(
        "another group's location",
        TABLE,
        lambda case: bool(case.entry.through) and case.elsewhere is not None,
        _write_elsewhere,
    ),
    KernelFault(
        "kernel writes what it only reads",
        TABLE,
        lambda case: case.kept is not None and not _is_kv_of_another(case),
        write_kept,
    ),
    KernelFault(
        "draft that writes KV",
        TABLE,
        lambda case: case.kept is not None and _is_kv_of_another(case),
        write_kept,
    ),
    ReadingFault("kernel reads another slot", TABLE, _has_foreign, _read_foreign),
    ReadingFault(
        "kernel reads past its length",
        TABLE,
        lambda case: case.unused is not None,
        _read_unused,
    ),
    KernelFault(
        "wrong axis",
        TABLE,
        lambda case: case.entry.tensor.dim() > 1 and _is_written(case),
        _write_column,
    ),
    KernelFault("written by a kernel", (TensorKind.CONSTANT,), always, _write_row_0),
    KernelFault(
        "content lost in a reload",
        (TensorKind.CONSTANT,),
        lambda case: bool(case.entry.tensor.any()),
        _lose,
    ),
    KernelFault(
        "two rows exchanged",
        (TensorKind.CONSTANT,),
        lambda case: case.exchanged is not None,
        _exchange_rows,
    ),
)
