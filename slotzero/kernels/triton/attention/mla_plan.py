"""The MLA attention plan: which programs read which stored rows, once per step for all layers."""

import torch
import triton
from torch import Tensor

from slotzero.kernels.attention_plans import MlaPlan
from slotzero.kernels.triton.attention import mla_prefill, prefill
from slotzero.kernels.triton.attention.decode import plan_kernel
from slotzero.kernels.triton.attention.verify import padded_rows
from slotzero.kernels.triton.launch import launch, num_processors
from slotzero.kernels.types import NO_BRANCHES, Branches, Heads, Rows, Tokens

MAX_PAIRS = 32  # (token, head) pairs of a tile, at most
BLOCK_HEADS = 16  # assumed at most when ragged rows are cut: blocks of at least eight tokens
MAX_PARTIAL = 1 << 14  # pairs of all spare chunks: two results of each take at most 64 MB


def plan(
    tokens: Tokens, rows: Rows | None, heads: Heads, branches: Branches | None = None
) -> MlaPlan:
    """Return the plan of a step, for rows of any kind."""
    assert heads.mla is not None
    firsts = sizes = own = None
    if rows is None:
        slots, starts, span = *tokens, 1
    elif rows.span > 0:
        slots, starts, span = rows.slots, rows.starts, rows.span
    else:
        group = min(heads.num_heads, BLOCK_HEADS)
        blocks = prefill.cut_rows(rows, len(tokens.slots), prefill.block_tokens(group))
        slots, firsts, sizes, starts, befores = _columns(blocks)
        span = prefill.block_tokens(group)
        if branches is None and mla_prefill.pays(len(tokens.slots), rows, heads.mla):
            starts, own = (
                befores - 1,
                prefill.cut_rows(rows, len(tokens.slots), prefill.block_tokens(1)),
            )
    num_rows, pairs = len(slots), span * heads.num_heads
    spare, smallest = cut_for(num_rows, pairs)
    num_chunks = num_rows + spare
    num_chunks += -num_chunks % 4  # the parts of one allocation are aligned
    row, slot, begin, end, first, num = slots.new_empty(6, num_chunks).unbind()
    partial = torch.empty(2 * spare, pairs, heads.value_dim, device=slots.device)
    peak, total = (torch.empty(2 * spare, pairs, device=slots.device) for _ in range(2))
    no_done = row, 0  # MLA does not count finished programs
    launch(
        plan_kernel, (1,), slots, starts, starts, num_rows, row, slot, begin, end, first, num,
        *no_done, num_chunks, spare, smallest,
        WINDOW=None, CHUNKED=False, SPAN=1, SPLIT_NEWEST=False, MAY_BE_EMPTY=True,
        ROWS=padded_rows(num_rows, 256), BLOCK=1024,
    )  # fmt: skip
    bases, seen, _ = branches or NO_BRANCHES
    return MlaPlan(
        *tokens, starts, firsts, sizes, row, slot, begin, end, first, num, partial, peak, total,
        bases, seen, own,
    )  # fmt: skip


def _columns(blocks: Tensor) -> tuple[Tensor, ...]:
    """Return the columns, each contiguous and aligned, like all kernel arguments."""
    num = len(blocks)
    return blocks.new_empty(blocks.shape[1], num + -num % 4)[:, :num].copy_(blocks.t()).unbind()


def cut_for(rows: int, pairs: int) -> tuple[int, int]:
    """Return the number of chunks beyond one per row, and the fewest keys of a chunk (whole tiles).

    `pairs` is the number of (token, head) pairs of a row. Contexts are spread over as many programs
    as run at once, two per multiprocessor; a row's last chunk counts as half a chunk. But merging a
    row reads all of its chunks: more than 64 of them, or short ones in a large batch, cost more
    than they save.
    """
    parts = triton.cdiv(pairs, MAX_PAIRS)
    spread = min(triton.cdiv(2 * num_processors(), parts) - rows // 2, 64 * rows)
    spare = max(1, min(max(spread, rows), MAX_PARTIAL // pairs))
    return spare, 256 if rows > 64 else 32 if pairs <= 16 else 64
