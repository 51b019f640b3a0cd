"""The end of a step: the sampled token and the new length are written to each slot's row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer


@triton.jit(do_not_specialize=["rows"])
def _advance_kernel(
    slots, new_length, target, length, tokens, sampled, rows, token_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row, mask=row < rows, other=0).to(tl.int64)
    is_real = slot > 0
    new = tl.load(new_length + row, mask=is_real, other=0)
    samples = is_real & (new >= tl.load(target + slot, mask=is_real, other=0))
    token = tl.load(sampled + row, mask=samples, other=0)
    tl.store(sampled + row, token, mask=row < rows)
    tl.store(tokens + slot * token_stride + new, token, mask=samples)
    tl.store(length + slot, new, mask=is_real)


def advance(
    slots: Tensor,
    new_length: Tensor,
    target: Tensor,
    length: Tensor,
    tokens: Tensor,
    sampled: Tensor,
) -> None:
    """Set each slot's length to new_length and, if that has reached the target, write the sampled
    token there; elsewhere `sampled` becomes 0. Slot 0 writes to no table."""
    rows, block = slots.shape[0], 128
    launch(
        _advance_kernel, (triton.cdiv(rows, block),),
        slots, new_length, target, length, tokens, sampled, rows, tokens.stride(0),
        BLOCK=block, num_warps=1, **overlap(),
    )  # fmt: skip
