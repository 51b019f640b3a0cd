"""After a verify step: the state after the last accepted token becomes the state of the slot."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.recurrent.rows import snapshot_row
from slotzero.kernels.types_recurrent import Scan, States, Trail

BLOCK = 4096


@triton.jit(do_not_specialize=["num_slots", "num_kept", "rows_stride"])
def _commit_kernel(
    trail, slots, length, num_confirmed, table, kept, rows, num_slots, num_kept, rows_stride,
    LAYERS: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, INTERVAL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Commit a part of one layer's state of one row."""
    may_follow(PDL)
    parts: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row, layer = tl.program_id(1).to(tl.int64), (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    left = trail + (row * SPAN * LAYERS + layer) * SIZE + at
    wait_for_writer(PDL)

    slot, num = tl.load(slots + row).to(tl.int64), tl.load(num_confirmed + row)
    if (slot == 0) | (num == 0):
        return
    last = tl.load(left + (num.to(tl.int64) - 1) * (LAYERS * SIZE), mask=inside)
    target = table + (layer * num_slots + slot) * SIZE + at
    tl.store(target, last.to(table.dtype.element_ty), mask=inside)
    if INTERVAL > 0:
        after = tl.load(length + slot) - num + 1  # the length with the first accepted token
        for i in range(num):
            into = snapshot_row(rows, slot, after + i, rows_stride, INTERVAL)
            if into > 0:
                value = tl.load(left + tl.cast(i, tl.int64) * (LAYERS * SIZE), mask=inside)
                target = kept + (layer * num_kept + into) * SIZE + at
                tl.store(target, value.to(kept.dtype.element_ty), mask=inside)


def commit_trail(
    trail: Trail, slots: Tensor, length: Tensor, num_confirmed: Tensor, states: States, shape: Scan
) -> None:
    for left, table, kept in (
        (trail.conv, states.conv, states.conv_kept),
        (trail.scan, states.scan, states.scan_kept),
    ):
        if table is None or left is None:
            continue
        layers, num_slots = table.shape[:2]
        size = table[0, 0].numel()
        launch(
            _commit_kernel, (layers * triton.cdiv(size, BLOCK), len(slots)),
            left, slots, length, num_confirmed, table, kept, states.rows,
            num_slots, 0 if kept is None else kept.shape[1],
            0 if states.rows is None else states.rows.stride(0),
            LAYERS=layers, SPAN=left.shape[1], SIZE=size, INTERVAL=shape.interval,
            BLOCK=BLOCK, **overlap(),
        )  # fmt: skip
