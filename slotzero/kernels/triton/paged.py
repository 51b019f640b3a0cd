"""Paged KV store and paged attention in Triton.

One program per (token, KV head): it walks the token's pages from position 0 to its own, so its
grid is fixed by the size while its work follows the length. Tokens of slot 0 store nothing and get
zeros. Any grouping of heads, head size and page size; accumulation in float32.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store_kernel(
    k, v, k_pages, v_pages, page_table, slots, positions, table_stride,
    PAGE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot > 0:
        position = tl.load(positions + token)
        page = tl.load(page_table + slot.to(tl.int64) * table_stride + position // PAGE)
        target = (page.to(tl.int64) * PAGE + position % PAGE) * ROW
        source = token.to(tl.int64) * ROW
        column = tl.arange(0, BLOCK)
        inside = column < ROW
        tl.store(k_pages + target + column, tl.load(k + source + column, mask=inside), mask=inside)
        tl.store(v_pages + target + column, tl.load(v + source + column, mask=inside), mask=inside)


@triton.jit
def _attend_kernel(
    q, k_pages, v_pages, page_table, slots, positions, out, scale, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    length = tl.where(slot > 0, position + 1, 0)

    group = tl.arange(0, GROUP_BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    group_size: tl.constexpr = HEADS // KV_HEADS
    inside = (group < group_size)[:, None] & (dim < DIM)[None, :]
    head = kv_head * group_size + group
    row = (token.to(tl.int64) * HEADS + head[:, None]) * DIM + dim[None, :]
    query = tl.load(q + row, mask=inside, other=0.0).to(tl.float32) * scale  # [group, dim]

    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for first in range(0, length, KEYS):
        key = first + tl.arange(0, KEYS)
        known = key < length
        page = tl.load(page_table + slot * table_stride + key // PAGE, mask=known, other=0)
        at = (page.to(tl.int64) * PAGE + key % PAGE) * KV_HEADS + kv_head
        address = at[:, None] * DIM + dim[None, :]
        present = known[:, None] & (dim < DIM)[None, :]
        keys = tl.load(k_pages + address, mask=present, other=0.0).to(tl.float32)  # [keys, dim]
        values = tl.load(v_pages + address, mask=present, other=0.0).to(tl.float32)
        score = tl.sum(query[:, None, :] * keys[None, :, :], axis=2)  # [group, keys]
        score = tl.where(known[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None] + tl.sum(weight[:, :, None] * values[None, :, :], axis=1)
        best = new_best
    result = tl.where(total[:, None] > 0, acc / total[:, None], 0.0)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=inside)


def store_kv(
    k: Tensor,
    v: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    row = k.shape[1] * k.shape[2]
    k_pages, v_pages = kv_pages.unbind(0)
    _store_kernel[(k.shape[0],)](
        k, v, k_pages, v_pages, page_table, slots, positions, page_table.stride(0),
        PAGE=k_pages.shape[1], ROW=row, BLOCK=triton.next_power_of_2(row),
    )  # fmt: skip


def attend(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    num_tokens, heads, dim = q.shape
    k_pages, v_pages = kv_pages.unbind(0)
    kv_heads = k_pages.shape[2]
    out = torch.empty_like(q)
    _attend_kernel[(num_tokens, kv_heads)](
        q, k_pages, v_pages, page_table, slots, positions, out, scale, page_table.stride(0),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, PAGE=k_pages.shape[1],
        GROUP_BLOCK=triton.next_power_of_2(heads // kv_heads),
        DIM_BLOCK=triton.next_power_of_2(dim), KEYS=16,
    )  # fmt: skip
    return out
