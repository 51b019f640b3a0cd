"""The gated delta rule over long rows: the relations between the tokens of a chunk, for all chunks
at once.

A token changes the state h before it to g h + u k^T, with u = beta (v - g h k). Written out over a
chunk, with g(j, i] the product of the g after j up to i, the changes u depend on each other:

    u_i + sum over j < i of A_ij u_j = beta_i v_i - beta_i g(.., i] h k_i
    A_ij = beta_i g(j, i] (k_i k_j)

So with the inverse X of 1 + A, u = X (beta v) - X (beta g k) h: `changes` and `removed`. The rest:

    pairs_ij = (q_i k_j) g(j, i]  for j <= i
    into_i = passed_i = g(.., i], from the chunk's beginning;  onto_j = g(j, ..], to its end

The L2 norms of q and k are divided out where other scales are applied.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.torch_recurrent import L2_EPS
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.recurrent.chunks import Chunks, cut_for, padded, precision
from slotzero.kernels.triton.recurrent.rows import chunk_tokens, falling, find_chunk, softplus
from slotzero.kernels.triton.recurrent.step import constants
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import Scan, ScanWeights

EPS = tl.constexpr(L2_EPS)


@triton.jit
def _inverse(below, lane, LANES: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + below, where `below` is strictly lower triangular.

    Blocks on the diagonal are inverted, then those of twice the size: for neighbours P and Q on the
    diagonal and B to the left of Q, the inverse has -1/Q B 1/P in the place of B.
    """
    inverse = tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)
    size = 1
    while size < LANES:
        block, other = lane[:, None] // size, lane[None, :] // size
        left = tl.where((block % 2 == 1) & (other == block - 1), below, 0.0)
        left = tl.dot(inverse, left, input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _relate_kernel(
    mixed, gates, beta, a_log, dt_bias, slots, row_slots, row_starts, row_counts, row_ends,
    pairs, scales, changes, removed, num_tokens, num_rows, mixed_stride, gates_stride, beta_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    VALUES_AT: tl.constexpr, KEYS_AT: tl.constexpr, QUERIES_AT: tl.constexpr,
    SIZE: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr,
    DIMS: tl.constexpr, STATES: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    head, lane = tl.program_id(0), tl.arange(0, LANES)
    n, dim = tl.arange(0, STATES)[None, :], tl.arange(0, DIMS)[None, :]
    group = head // (HEADS // GROUPS) * STATE
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    shift = tl.load(dt_bias + head).to(tl.float32)
    wait_for_writer(PDL)

    row, low = find_chunk(tl.program_id(1), row_slots, row_starts, row_counts, num_rows, SIZE)
    if row >= num_rows:
        return
    token, real = chunk_tokens(
        row, low, lane, slots, row_slots, row_starts, row_counts, row_ends, SIZE, PADDED
    )
    is_n, is_dim = real[:, None] & (n < STATE), real[:, None] & (dim < DIM)
    at = mixed + token[:, None] * mixed_stride
    query = tl.load(at + QUERIES_AT + group + n, mask=is_n, other=0.0)
    key = tl.load(at + KEYS_AT + group + n, mask=is_n, other=0.0)
    step = tl.load(gates + token * gates_stride + head, mask=real, other=0.0).to(tl.float32)
    power = tl.where(real, -rate * softplus(step + shift), 0.0)
    strength = tl.load(beta + token * beta_stride + head, mask=real, other=0.0).to(tl.float32)
    strength = tl.where(real, tl.sigmoid(strength), 0.0)
    q_scale, k_scale = _scale(query) * STATE**-0.5, _scale(key)

    total = tl.cumsum(power, axis=0)
    into = tl.exp(total)
    fall = falling(total, lane) * k_scale[None, :]
    pair = tl.dot(query, key.T, input_precision=PRECISION) * fall * q_scale[:, None]
    target = pairs + (token[:, None] * HEADS + head) * LANES + lane[None, :]
    tl.store(target, pair.to(pairs.dtype.element_ty), mask=real[:, None])

    below = tl.dot(key, key.T, input_precision=PRECISION) * fall * (strength * k_scale)[:, None]
    below = tl.where(lane[:, None] > lane[None, :], below, 0.0)
    inverse = _inverse(below, lane, LANES, EXACT)
    # Loaded late, and the key again: registers are scarce during the inversion.
    value = tl.load(at + VALUES_AT + head * DIM + dim, mask=is_dim, other=0.0)
    by_value = (inverse * strength[None, :]).to(value.dtype)
    change = tl.dot(by_value, value, input_precision=PRECISION)
    target = changes + (token[:, None] * HEADS + head) * DIM + dim
    tl.store(target, change.to(changes.dtype.element_ty), mask=is_dim)
    key = tl.load(at + KEYS_AT + group + n, mask=is_n, other=0.0)
    by_key = (inverse * (strength * into * k_scale)[None, :]).to(key.dtype)
    taken = tl.dot(by_key, key, input_precision=PRECISION)
    target = removed + (token[:, None] * HEADS + head) * STATE + n
    tl.store(target, taken.to(removed.dtype.element_ty), mask=is_n)

    onto = tl.exp(tl.sum(power, axis=0) - total) * k_scale
    target, apart = scales + token * HEADS + head, num_tokens.to(tl.int64) * HEADS
    tl.store(target, into * q_scale, mask=real)
    tl.store(target + apart, onto, mask=real)
    tl.store(target + 2 * apart, into, mask=real)


@triton.jit
def _scale(x):
    """Return the factor that gives each row L2 norm 1."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)


def relate(
    mixed: Tensor,
    gates: Tensor,
    beta: Tensor,
    weights: ScanWeights,
    tokens: Tokens,
    rows: Rows,
    shape: Scan,
) -> Chunks:
    num_tokens, heads, cut = len(mixed), shape.num_heads, cut_for(shape, mixed.dtype)
    pairs = mixed.new_empty(num_tokens, heads, cut.lanes)
    scales = torch.empty(3, num_tokens, heads, device=mixed.device)
    changes = mixed.new_empty(num_tokens, heads, shape.head_dim)
    removed = mixed.new_empty(num_tokens, heads, shape.state_size)
    launch(
        _relate_kernel, (heads, cut.num_chunks(num_tokens, rows)),
        mixed, gates, beta, weights.a_log, weights.dt_bias, tokens.slots, *rows[:4],
        pairs, scales, changes, removed,
        num_tokens, len(rows.slots), mixed.stride(0), gates.stride(0), beta.stride(0),
        **constants(shape), SIZE=cut.size, LANES=cut.lanes, PADDED=rows.span > 0,
        DIMS=padded(shape.head_dim), STATES=cut.states,
        PRECISION=precision(mixed.dtype), EXACT=precision(mixed.dtype) or "tf32x3",
        num_warps=4, **overlap(),
    )  # fmt: skip
    return Chunks(pairs, scales, changes, removed)
