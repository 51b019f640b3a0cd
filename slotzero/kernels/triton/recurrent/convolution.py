"""The short convolution of recurrent layers, over tokens of any step.

A program takes some tokens in order and passes each input on to the tokens after it. Where a row or
the program begins, it loads the inputs before: those of the row, and before these the state that
the row began with. A step with one token per row shifts the state in place, and a step with a trail
writes the state after each token. With longer rows other programs may still read the state that a
row began with, so a second kernel writes the row's last inputs to the state.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.recurrent.rows import load_begin, num_real, snapshot_row
from slotzero.kernels.types_recurrent import RecurrentStep, Scan

TOKENS, CHANNELS = 16, 512  # per program
MAX_WIDTH = 4


@triton.jit
def _input(
    x, table, kept, rows, token, before, slot, start, channel, is_channel, x_stride, rows_stride,
    LAG: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, INTERVAL: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Return the input LAG tokens before a token that has `before` tokens of its row before it;
    zeros where the convolution does not reach."""
    value = tl.zeros(channel.shape, tl.float32)
    if LAG < WIDTH:
        is_own = tl.where(before >= LAG, is_channel, False)
        value = _given(x + (token - LAG) * x_stride + channel, is_own, SIZE, GATED)
        is_old = tl.where(before >= LAG, False, is_channel)
        offset = channel * (WIDTH - 1) + (WIDTH - 1 - LAG) + before
        held: tl.constexpr = SIZE * (WIDTH - 1)
        old = load_begin(
            table, kept, rows, slot, start, rows_stride, offset, is_old, held, INTERVAL
        )
        value = tl.where(is_own, value, old)
    return value


@triton.jit
def _given(at, mask, SIZE: tl.constexpr, GATED: tl.constexpr):
    """Return a token's inputs: the values, or their product with the gates in the same dtype."""
    value = tl.load(at, mask=mask, other=0.0)
    if GATED:
        dtype: tl.constexpr = at.dtype.element_ty
        other = tl.load(at + 2 * SIZE, mask=mask, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * other).to(dtype)
    return value.to(tl.float32)


@triton.jit
def _inputs(
    x, table, kept, rows, token, before, slot, start, channel, is_channel, x_stride, rows_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, INTERVAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return the last three inputs before a token, the oldest first."""
    oldest = _input(
        x, table, kept, rows, token, before, slot, start, channel, is_channel,
        x_stride, rows_stride, 3, SIZE, WIDTH, INTERVAL, GATED,
    )  # fmt: skip
    older = _input(
        x, table, kept, rows, token, before, slot, start, channel, is_channel,
        x_stride, rows_stride, 2, SIZE, WIDTH, INTERVAL, GATED,
    )  # fmt: skip
    old = _input(
        x, table, kept, rows, token, before, slot, start, channel, is_channel,
        x_stride, rows_stride, 1, SIZE, WIDTH, INTERVAL, GATED,
    )  # fmt: skip
    return oldest, older, old


@triton.jit
def _store_inputs(target, oldest, older, old, channel, is_channel, WIDTH: tl.constexpr):
    """Store the last inputs, up to three: as many as the state holds."""
    dtype: tl.constexpr = target.dtype.element_ty
    at = target + channel * (WIDTH - 1) + (WIDTH - 2)
    tl.store(at, old.to(dtype), mask=is_channel)
    if WIDTH > 2:
        tl.store(at - 1, older.to(dtype), mask=is_channel)
    if WIDTH > 3:
        tl.store(at - 2, oldest.to(dtype), mask=is_channel)


@triton.jit
def _weight(weight, channel, is_channel, LAG: tl.constexpr, WIDTH: tl.constexpr):
    """Load the weights of the input LAG tokens before."""
    by = tl.zeros(channel.shape, tl.float32)
    if LAG < WIDTH:
        at = weight + channel * WIDTH + (WIDTH - 1 - LAG)
        by = tl.load(at, mask=is_channel, other=0.0).to(tl.float32)
    return by


@triton.jit(do_not_specialize=["num_tokens", "rows_stride"])
def _convolve_kernel(
    x, weight, bias, slots, positions, table, kept, rows, trail, out,
    num_tokens, x_stride, rows_stride, trail_stride, trail_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, INTERVAL: tl.constexpr,
    GATED: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of some tokens. SPAN: tokens of every row; 0: rows are ragged."""
    may_follow(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel, first = channel < SIZE, tl.program_id(1).to(tl.int64) * TOKENS
    held: tl.constexpr = SIZE * (WIDTH - 1)
    by_oldest = _weight(weight, channel, is_channel, 3, WIDTH)
    by_older = _weight(weight, channel, is_channel, 2, WIDTH)
    by_old = _weight(weight, channel, is_channel, 1, WIDTH)
    by_new = _weight(weight, channel, is_channel, 0, WIDTH)
    shift = tl.zeros([CHANNELS], tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    wait_for_writer(PDL)

    oldest = tl.zeros([CHANNELS], tl.float32)
    older, old = oldest, oldest
    last_slot, last_position = tl.full([], 0, tl.int64), 0
    for token in range(first, tl.minimum(first + TOKENS, num_tokens)):
        slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token)
        new = _given(x + token * x_stride + channel, is_channel, SIZE, GATED)
        if (slot > 0) & ((slot != last_slot) | (position != last_position + 1)):
            before = 0  # tokens of its row before it, at most three
            if SPAN != 1:
                before = _num_before(slots, positions, token, slot, position)
            oldest, older, old = _inputs(
                x, table, kept, rows, token, before, slot, position - before, channel, is_channel,
                x_stride, rows_stride, SIZE, WIDTH, INTERVAL, GATED,
            )  # fmt: skip
        total = oldest * by_oldest + older * by_older + old * by_old + new * by_new + shift
        if GATED:
            at = x + token * x_stride + SIZE + channel
            gate = tl.load(at, mask=is_channel, other=0.0).to(tl.float32)
        else:
            gate = tl.sigmoid(total)
        result = tl.where(slot > 0, total * gate, 0.0)
        tl.store(out + token * SIZE + channel, result.to(out.dtype.element_ty), mask=is_channel)
        oldest, older, old = older, old, new
        last_slot, last_position = slot, position

        if trail is not None:
            target = trail + token // SPAN * trail_stride + token % SPAN * trail_step
            _store_inputs(
                target, tl.where(slot > 0, oldest, 0.0), tl.where(slot > 0, older, 0.0),
                tl.where(slot > 0, old, 0.0), channel, is_channel, WIDTH,
            )  # fmt: skip
        elif slot > 0:
            if SPAN == 1:
                tl.debug_barrier()  # every thread has read the old state
                _store_inputs(table + slot * held, oldest, older, old, channel, is_channel, WIDTH)
            if INTERVAL > 0:
                into = snapshot_row(rows, slot, position + 1, rows_stride, INTERVAL)
                if into > 0:
                    _store_inputs(
                        kept + into * held, oldest, older, old, channel, is_channel, WIDTH
                    )


@triton.jit
def _num_before(slots, positions, token, slot, position):
    """Return how many tokens of its row are right before a token, at most three."""
    num, is_near = 0, 1
    for lag in tl.static_range(1, 4):
        there = token >= lag
        its_slot = tl.load(slots + token - lag, mask=there, other=0)
        its_position = tl.load(positions + token - lag, mask=there, other=0)
        is_near *= ((its_slot == slot) & (its_position == position - lag)).to(tl.int32)
        num += is_near
    return num


@triton.jit(do_not_specialize=["rows_stride"])
def _store_state_kernel(
    x, slots, row_slots, row_starts, row_counts, row_ends, table, kept, rows, x_stride, rows_stride,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, INTERVAL: tl.constexpr, GATED: tl.constexpr,
    PADDED: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of a row to the state of its slot."""
    may_follow(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, is_channel = tl.program_id(1), channel < SIZE
    wait_for_writer(PDL)

    slot = tl.load(row_slots + row).to(tl.int64)
    start, count = tl.load(row_starts + row), tl.load(row_counts + row)
    if (slot == 0) | (count == 0):
        return
    begin = tl.load(row_ends + row) - count
    num = num_real(slots, begin, count, slot, PADDED)
    past = (begin + num).to(tl.int64)
    before = tl.minimum(num, 3)
    oldest, older, old = _inputs(
        x, table, kept, rows, past, before, slot, start, channel, is_channel,
        x_stride, rows_stride, SIZE, WIDTH, INTERVAL, GATED,
    )  # fmt: skip
    tl.debug_barrier()  # every thread has read the old state
    _store_inputs(
        table + slot * (SIZE * (WIDTH - 1)), oldest, older, old, channel, is_channel, WIDTH
    )


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    step: RecurrentStep,
    shape: Scan,
    is_exact: bool = False,
) -> Tensor:
    """See RecurrentKernels.convolve. If it is exact, as in deterministic mode, the compiler may not
    contract products and sums, which it could do differently for one token and for several."""
    tokens, rows, states, trail = step
    if not 2 <= shape.conv_width <= MAX_WIDTH:
        raise UnsupportedModelError(
            f"a convolution over {shape.conv_width} tokens: the kernels for CUDA reach over 2 to "
            f"{MAX_WIDTH}; run the model with --backend cpu"
        )
    num_tokens, size, is_gated = len(x), shape.channels, shape.kind == "conv"
    out = x.new_empty(num_tokens, size)
    span = 1 if rows is None else rows.span
    is_alone = span == 1 and trail is None
    at_once = 1 if is_alone else TOKENS
    kept_rows, left = states.rows, None if trail is None else trail.conv
    rows_stride = 0 if kept_rows is None else kept_rows.stride(0)
    strides = (0, 0) if left is None else left.stride()[:2]
    launch(
        _convolve_kernel, (triton.cdiv(size, CHANNELS), triton.cdiv(num_tokens, at_once)),
        x, weight, bias, *tokens, states.conv, states.conv_kept, kept_rows, left, out,
        num_tokens, x.stride(0), rows_stride, *strides,
        SIZE=size, WIDTH=shape.conv_width, SPAN=span, INTERVAL=shape.interval,
        GATED=is_gated, TOKENS=at_once, CHANNELS=CHANNELS, enable_fp_fusion=not is_exact,
        **overlap(),
    )  # fmt: skip
    if rows is not None and not is_alone and trail is None:
        launch(
            _store_state_kernel, (triton.cdiv(size, CHANNELS), len(rows.slots)),
            x, tokens.slots, *rows[:4], states.conv, states.conv_kept, kept_rows,
            x.stride(0), rows_stride,
            SIZE=size, WIDTH=shape.conv_width, INTERVAL=shape.interval, GATED=is_gated,
            PADDED=span > 0, CHANNELS=CHANNELS, **overlap(),
        )  # fmt: skip
    return out
