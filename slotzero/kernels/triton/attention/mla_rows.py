"""Tokens of latent heads before they attend: a row of each is normed, turned and stored; of each
head's query one part is turned, and the other brought to the latents by the head's own product.

In a step of few tokens all of it is one kernel, of programs of three kinds.

A token of slot 0 stores nothing; what becomes of its queries nobody reads.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.attention.decode import norm_and_rotate
from slotzero.kernels.triton.attention.per_head import cut_for, multiply_head, per_head
from slotzero.kernels.triton.attention.verify import load_angles, load_halves
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear.elementwise import norm_part
from slotzero.kernels.types import Angles, Heads, MlaWeights, PagedKv, Tokens

HEADS_PER_PROGRAM = 16  # of queries


@triton.jit(do_not_specialize=["table_stride", "tokens", "products", "column_blocks"])
def _store_kernel(
    q, k, k_norm, up_k, cos, sin, kv_pages, page_table, slots, positions, query, own,
    q_stride, k_stride, up_head, up_inner, up_column, table_stride, eps, tokens, products,
    column_blocks,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, LATENT: tl.constexpr,
    PAGE: tl.constexpr, SOME: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """First programs of products, if there are any: ROWS tokens by BLOCK columns of a head. Then of
    a token: its row, or what is turned of SOME of its heads' queries."""
    may_follow(PDL)
    size: tl.constexpr = TURNED + LATENT
    if ROWS > 0:  # noqa: SIM102  the compiler decides this one
        if tl.program_id(0) < products:
            program = tl.program_id(0) // HEADS
            multiply_head(
                q, up_k, query + TURNED, tokens, tl.program_id(0) % HEADS,
                program % column_blocks * BLOCK, program // column_blocks * ROWS,
                q_stride, PLAIN + TURNED, up_head, up_inner, up_column, HEADS * size, size,
                PLAIN, LATENT, DEPTH, BLOCK, ROWS, PDL,
            )  # fmt: skip
            return
    program = tl.program_id(0) - products
    token, part = (program // PARTS).to(tl.int64), program % PARTS
    head, half, one = tl.arange(0, SOME), tl.arange(0, HALF), tl.arange(0, 1)
    wait_for_writer(PDL)

    c, s = load_angles(cos, sin, token + one, one == 0, half, TURNED)
    if part > 0:
        head += (part - 1) * SOME
        source = q + token * q_stride + head * (PLAIN + TURNED) + PLAIN
        a, b = load_halves(source, TURNED // 2, head < HEADS, half, TURNED)
        a, b = norm_and_rotate(a, b, 1.0, 1.0, c, s, eps, TURNED, False)
        target = query + (token * HEADS + head)[:, None] * size + half[None, :]
        inside = (head < HEADS)[:, None] & (half < TURNED // 2)[None, :]
        tl.store(target, a, mask=inside)
        tl.store(target + TURNED // 2, b, mask=inside)
        return
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token)
    if slot > 0:
        page = tl.load(page_table + slot * table_stride + position // PAGE).to(tl.int64)
        stored = kv_pages + (page * PAGE + position % PAGE) * size
        source = k + token * k_stride
        a, b = load_halves(source + one, TURNED // 2, one == 0, half, TURNED)
        a, b = norm_and_rotate(a, b, 1.0, 1.0, c, s, eps, TURNED, False)
        _store_halves(stored, a, b, half, TURNED)
        norm_part(source + TURNED, k_norm, stored + TURNED, eps, LATENT, WIDTH)
        if own is not None:
            own += token * size
            _store_halves(own, a, b, half, TURNED)
            norm_part(source + TURNED, k_norm, own + TURNED, eps, LATENT, WIDTH)


@triton.jit
def _store_halves(target, a, b, half, DIM: tl.constexpr):
    inside = (half < DIM // 2)[None, :]
    tl.store(target + half[None, :], a, mask=inside)
    tl.store(target + DIM // 2 + half[None, :], b, mask=inside)


def store(
    q: Tensor,  # [T, heads * (plain + turned)]
    k: Tensor,  # [T, turned + latent]
    weights: MlaWeights,
    angles: Angles,
    kv: PagedKv,
    tokens: Tokens,
    query: Tensor,  # [T, heads, turned + latent]
    own: Tensor | None,  # [T, turned + latent]
    heads: Heads,
) -> None:
    """The rows into their pages, and into `own` if it is given; the queries into `query`."""
    assert heads.mla is not None
    shape, latent, num, num_heads = heads.mla, heads.value_dim, len(q), heads.num_heads
    cut, products, column_blocks = cut_for(num, shape.nope_dim, latent, q.dtype), 0, 1
    if cut is None:
        straight = q.view(num, num_heads, -1)[:, :, : shape.nope_dim]
        per_head(straight, weights.up_k, query[:, :, shape.rope_dim :])
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
        HEADS=num_heads, PLAIN=shape.nope_dim, TURNED=shape.rope_dim, LATENT=latent,
        PAGE=kv.pages.shape[1], SOME=HEADS_PER_PROGRAM,
        HALF=triton.next_power_of_2(shape.rope_dim // 2), WIDTH=triton.next_power_of_2(latent),
        PARTS=parts, DEPTH=depth, BLOCK=columns, ROWS=rows, num_warps=4, **overlap(),
    )  # fmt: skip
