"""The plan of attention with one order of summation: chunks of keys, and who computes them.

A text is cut into chunks at positions that follow from nothing else (`chunk_of`): EACH chunks of
FIRST keys, EACH of twice as many, and so on, so that a long text has few. How the chunks of a step
are distributed over programs changes no result; see fixed.py.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import FixedPlan, KeyRuns
from slotzero.kernels.triton.attention import prefill
from slotzero.kernels.triton.attention.prefill import BLOCK_FIELDS
from slotzero.kernels.triton.attention.window import first_seen
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.types import Branches, Heads, Rows, Tokens

FIRST, EACH = tl.constexpr(128), tl.constexpr(8)  # keys of the first chunks; chunks of one length
FEW_TOKENS = 1024  # up to here, chunks of a block may be distributed over programs
FEW_PAIRS, MANY_PAIRS = 64, 128  # (token, head of the group) pairs of a tile; 64 per warpgroup
VALUE_DIMS = 128  # of one program: a thread holds the sums of a chunk, and those before it
ROWS = 128  # of a decode step whose blocks one program writes
PROGRAMS = 512  # over which the chunks of a small step are spread
MOST_PARTIAL = 64 << 20  # bytes of stored chunks


@triton.jit
def _level(length):
    """Return the number of times that chunks have doubled before position `length`."""
    wide = (length // (FIRST * EACH) + 1).to(tl.float32)
    return (wide.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def chunk_of(position):
    """Return the index of the chunk that has a position."""
    level = _level(position)
    begin = (FIRST * EACH) * ((1 << level) - 1)
    return level * EACH + (position - begin) // (FIRST << level)


@triton.jit
def chunk_begin(chunk):
    """Return the first position of a chunk."""
    level = chunk // EACH
    return (FIRST * EACH) * ((1 << level) - 1) + chunk % EACH * (FIRST << level)


@triton.jit
def _range_of(
    start, size, row_start, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BRANCHES: tl.constexpr
):
    """Return the first chunk of a block's tokens, and one past the last."""
    low = start * 0
    if WINDOW is not None:
        # No node of a tree has a position before that of its row's first token.
        low = first_seen(row_start if BRANCHES else start, WINDOW, CHUNKED)
    return chunk_of(low), chunk_of(tl.maximum(start + size - 1, 0)) + 1


@triton.jit(do_not_specialize=["rows"])
def _single_blocks_kernel(slots, positions, blocks, rows, ROWS: tl.constexpr, PDL: tl.constexpr):
    """Write the blocks of a decode step: one token each."""
    may_follow(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wait_for_writer(PDL)
    there = r < rows
    position = tl.load(positions + r, mask=there, other=0)
    at = blocks + r * BLOCK_FIELDS
    tl.store(at, tl.load(slots + r, mask=there, other=0), mask=there)
    tl.store(at + 1, r, mask=there)
    tl.store(at + 2, 1, mask=there)
    tl.store(at + 3, position, mask=there)
    tl.store(at + 4, position, mask=there)


@triton.jit(do_not_specialize=["num_blocks", "num_runs", "num_done", "spare", "most"])
def _runs_kernel(
    blocks, block_of, first_of, last_of, count_of, store_of, done,
    num_blocks, num_runs, num_done, spare, most,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, BRANCHES: tl.constexpr, BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Cut the chunks of every block into runs of one common length, in one program: the shortest
    for which there are enough programs, and room for the chunks of blocks with several runs. Never
    launched with overlap: the kernels after it may read the plan without a wait."""
    b = tl.arange(0, BLOCKS)
    at = blocks + b * BLOCK_FIELDS
    there = b < num_blocks
    slot = tl.load(at, mask=there, other=0)
    size = tl.load(at + 2, mask=there, other=0)
    start, row_start = (
        tl.load(at + 3, mask=there, other=0),
        tl.load(at + 4, mask=there, other=0),
    )
    low, high = _range_of(start, size, row_start, WINDOW, CHUNKED, BRANCHES)
    num = tl.where(slot > 0, high - low, 1)  # padding has one run without keys
    num = tl.where(there, num, 0)
    length = tl.maximum(tl.cdiv(tl.sum(num, axis=0), spare), 1)
    while tl.sum(tl.where(num > length, num, 0), axis=0) > most:
        length *= 2
    runs = tl.cdiv(num, length)
    stored = tl.where(runs > 1, num, 0)
    place, store = tl.cumsum(runs, axis=0) - runs, tl.cumsum(stored, axis=0) - stored
    for i in range(tl.max(runs, axis=0)):
        mine = i < runs
        tl.store(block_of + place + i, b, mask=mine)
        tl.store(first_of + place + i, low + i * length, mask=mine)
        last = tl.minimum(low + (i + 1) * length, low + num)
        tl.store(last_of + place + i, last, mask=mine)
        tl.store(count_of + place + i, runs, mask=mine)
        tl.store(store_of + place + i, store - low, mask=mine)
    used, lane = tl.sum(runs, axis=0), tl.arange(0, LANES)
    for first in range(0, num_runs, LANES):
        unused = (first + lane >= used) & (first + lane < num_runs)
        tl.store(block_of + first + lane, -1, mask=unused)
    for first in range(0, num_done, LANES):
        tl.store(done + first + lane, 0, mask=first + lane < num_done)


def plan(
    tokens: Tokens, rows: Rows | None, heads: Heads, branches: Branches | None = None
) -> FixedPlan:
    group, num_tokens = heads.num_heads // heads.num_kv_heads, len(tokens.slots)
    size = block_tokens(group, num_tokens, heads)
    if rows is None:
        size, blocks = 1, tokens.slots.new_empty(num_tokens, BLOCK_FIELDS.value)
        launch(
            _single_blocks_kernel, (triton.cdiv(num_tokens, ROWS),), *tokens, blocks, num_tokens,
            ROWS=ROWS, **overlap(),
        )  # fmt: skip
    else:
        size = min(size, rows.span or size)
        blocks = prefill.cut_rows(rows, num_tokens, size)
    runs = None
    if num_tokens <= FEW_TOKENS:
        runs = _runs(blocks, size * group, heads, branches)
    return FixedPlan(tokens, blocks, size, branches, runs)


def _runs(blocks: Tensor, pairs: int, heads: Heads, branches: Branches | None) -> KeyRuns:
    num_blocks, kv_heads, parts = len(blocks), heads.num_kv_heads, value_parts(heads)
    programs = kv_heads * parts * pair_parts_of(pairs, heads)
    spare = max(num_blocks, triton.cdiv(PROGRAMS, programs) - num_blocks)
    num_runs = num_blocks + spare
    most = max(4, MOST_PARTIAL // (4 * kv_heads * pairs * heads.value_dim))
    ints = blocks.new_empty(5, num_runs + -num_runs % 4)
    done = blocks.new_empty(num_blocks, programs)
    partial = torch.empty(most, kv_heads, pairs, heads.value_dim, device=blocks.device)
    peak, total = torch.empty(2, most, kv_heads * parts, pairs, device=blocks.device)
    block, first, last, num, store = (of[:num_runs] for of in ints)
    made = KeyRuns(block, first, last, num, store, done, partial, peak, total)
    launch(
        _runs_kernel, (1,), blocks, *made[:6], num_blocks, num_runs, done.numel(), spare, most,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, BRANCHES=branches is not None,
        BLOCKS=triton.next_power_of_2(num_blocks), LANES=1024,
    )  # fmt: skip
    return made


def block_tokens(group: int, num_tokens: int, heads: Heads) -> int:
    """Return the most tokens of a block in a step of that size."""
    return max(1, (FEW_PAIRS if num_tokens <= FEW_TOKENS else most_pairs(heads)) // group)


def most_pairs(heads: Heads) -> int:
    """Return the most pairs of a program. Latent heads are many, and their keys are long."""
    return MANY_PAIRS if heads.mla is None else FEW_PAIRS


def pair_parts_of(pairs: int, heads: Heads) -> int:
    return -(-pairs // most_pairs(heads))


def value_parts(heads: Heads) -> int:
    return -(-heads.value_dim // VALUE_DIMS)
