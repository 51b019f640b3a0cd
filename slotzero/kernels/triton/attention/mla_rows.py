"""Preparation of MLA tokens for attention: the row of each token is normed, rotated and stored. The
rope part of each query head is rotated, and its nope part multiplied by up_k (absorbed).

In a step of few tokens all of it is one kernel, with programs of three kinds.

A token of slot 0 stores nothing, and its queries are never read.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.attention.decode import norm_and_rotate
from slotzero.kernels.triton.attention.float8 import as_read, as_stored, load_kv_scales
from slotzero.kernels.triton.attention.per_head import cut_for, multiply_head, per_head
from slotzero.kernels.triton.attention.verify import load_angles, load_halves
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear.elementwise import load_part
from slotzero.kernels.types import Angles, Heads, MlaWeights, PagedKv, Tokens

HEADS_PER_PROGRAM = 16  # query heads


@triton.jit(do_not_specialize=["table_stride", "tokens", "products", "column_blocks"])
def _store_kernel(
    q, k, k_norm, up_k, cos, sin, kv_pages, page_table, kv_scales, slots, positions, query, own,
    q_stride, k_stride, up_head, up_inner, up_column, table_stride, eps, tokens, products,
    column_blocks,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LATENT: tl.constexpr,
    PAGE: tl.constexpr, SOME: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The first programs, if any, compute products: ROWS tokens by BLOCK columns of a head. The
    others take one token each: its row, or the rope part of SOME of its query heads."""
    may_follow(PDL)
    size: tl.constexpr = ROPE_DIM + LATENT
    if ROWS > 0:  # noqa: SIM102  decided at compile time
        if tl.program_id(0) < products:
            program = tl.program_id(0) // HEADS
            multiply_head(
                q, up_k, query + ROPE_DIM, tokens, tl.program_id(0) % HEADS,
                program % column_blocks * BLOCK, program // column_blocks * ROWS,
                q_stride, NOPE_DIM + ROPE_DIM, up_head, up_inner, up_column, HEADS * size, size,
                NOPE_DIM, LATENT, DEPTH, BLOCK, ROWS, PDL,
            )  # fmt: skip
            return
    program = tl.program_id(0) - products
    token, part = (program // PARTS).to(tl.int64), program % PARTS
    head, half, one = tl.arange(0, SOME), tl.arange(0, HALF), tl.arange(0, 1)
    wait_for_writer(PDL)

    c, s = load_angles(cos, sin, token + one, one == 0, half, ROPE_DIM)
    if part > 0:
        head += (part - 1) * SOME
        source = q + token * q_stride + head * (NOPE_DIM + ROPE_DIM) + NOPE_DIM
        a, b = load_halves(source, ROPE_DIM // 2, head < HEADS, half, ROPE_DIM)
        a, b = norm_and_rotate(a, b, 1.0, 1.0, c, s, eps, ROPE_DIM, False)
        target = query + (token * HEADS + head)[:, None] * size + half[None, :]
        inside = (head < HEADS)[:, None] & (half < ROPE_DIM // 2)[None, :]
        tl.store(target, a, mask=inside)
        tl.store(target + ROPE_DIM // 2, b, mask=inside)
        return
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token)
    if slot > 0:
        page = tl.load(page_table + slot * table_stride + position // PAGE).to(tl.int64)
        stored = kv_pages + (page * PAGE + position % PAGE) * size
        source = k + token * k_stride
        a, b = load_halves(source + one, ROPE_DIM // 2, one == 0, half, ROPE_DIM)
        a, b = norm_and_rotate(a, b, 1.0, 1.0, c, s, eps, ROPE_DIM, False)
        latent = load_part(source + ROPE_DIM, k_norm, eps, LATENT, WIDTH)
        scale, _ = load_kv_scales(kv_scales, MLA=True)
        a, b = as_stored(a, scale, kv_pages), as_stored(b, scale, kv_pages)
        latent = as_stored(latent, scale, kv_pages)
        _store_row(stored, a, b, latent, half, ROPE_DIM, LATENT, WIDTH)
        if own is not None:
            dtype: tl.constexpr = own.dtype.element_ty
            a, b = as_read(a, scale, dtype), as_read(b, scale, dtype)
            latent = as_read(latent, scale, dtype)
            _store_row(own + token * size, a, b, latent, half, ROPE_DIM, LATENT, WIDTH)


@triton.jit
def _store_row(
    target, a, b, latent, half, DIM: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    inside, column = (half < DIM // 2)[None, :], tl.arange(0, WIDTH)
    tl.store(target + half[None, :], a, mask=inside)
    tl.store(target + DIM // 2 + half[None, :], b, mask=inside)
    tl.store(target + DIM + column, latent, mask=column < LATENT)


def store(
    q: Tensor,  # [T, heads * (nope_dim + rope_dim)]
    k: Tensor,  # [T, rope_dim + latent]
    weights: MlaWeights,
    angles: Angles,
    kv: PagedKv,
    tokens: Tokens,
    query: Tensor,  # [T, heads, rope_dim + latent]
    own: Tensor | None,  # [T, rope_dim + latent]
    heads: Heads,
    product: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> None:
    """Write the rows to their pages, and to `own` if it is given; write the queries to `query`.
    `product` computes the per-head products, if not the kernels of this module and cuBLAS."""
    assert heads.mla is not None
    shape, latent, num, num_heads = heads.mla, heads.value_dim, len(q), heads.num_heads
    cut = None if product else cut_for(num, shape.nope_dim, latent, q.dtype)
    products, column_blocks = 0, 1
    if cut is None:
        q_nope = q.view(num, num_heads, -1)[:, :, : shape.nope_dim]
        (product or per_head)(q_nope, weights.up_k, query[:, :, shape.rope_dim :])
    else:
        column_blocks, row_blocks = cut.blocks(num, latent)
        products = num_heads * column_blocks * row_blocks
    parts = 1 + triton.cdiv(num_heads, HEADS_PER_PROGRAM)
    depth, columns, rows = cut or (0, 0, 0)
    launch(
        _store_kernel, (products + num * parts,),
        q, k, weights.k_norm, weights.up_k, *angles, *kv, *tokens, query, own,
        q.stride(0), k.stride(0), *weights.up_k.stride(), kv.page_table.stride(0), heads.norm_eps,
        num, products, column_blocks,
        HEADS=num_heads, NOPE_DIM=shape.nope_dim, ROPE_DIM=shape.rope_dim, LATENT=latent,
        PAGE=kv.pages.shape[1], SOME=HEADS_PER_PROGRAM,
        HALF=triton.next_power_of_2(shape.rope_dim // 2), WIDTH=triton.next_power_of_2(latent),
        PARTS=parts, DEPTH=depth, BLOCK=columns, ROWS=rows, num_warps=4, **overlap(),
    )  # fmt: skip
