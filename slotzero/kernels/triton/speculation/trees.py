"""Draft trees: tree masks, acceptance, moving accepted KV, and tree growth. torch_speculation.py
defines the operations; each is one kernel, with one program per row.

Trees are small: at most 63 nodes, chosen from a few hundred candidates, so the best are found by
comparing all with all. As in speculation.py, kernels that derive token layouts are not launched
with overlap, and those that end a pass are.

Nothing of a node that is not real is read, in particular not its parent.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.sampling.packed import INF, is_finite, pack
from slotzero.kernels.triton.speculation.speculation import aligned, new_rows
from slotzero.kernels.types import Branches, PagedKv, Rows, Tokens
from slotzero.kernels.types_speculation import (
    Candidates,
    DraftRows,
    DraftTables,
    TreeFront,
    TreeStep,
)
from slotzero.sampling.tables import Sampled, SamplingTables

MOVED_PLACES, MOVED_BLOCK = 8, 1024  # places of a path, and values of a place, at a time
COMPARED = 16  # candidates that all others are compared with at a time


@triton.jit
def _bit(place):
    """Return the bit of a place; 0 from place 64 on."""
    return tl.where(place < 64, tl.full(place.shape, 1, tl.int64) << (place & 63), 0)


# ---- verification of a tree ----


@triton.jit(do_not_specialize=["width", "parent_stride"])
def _branch_kernel(
    row_slots, starts, token_slots, parents, bases, seen, stands, width, parent_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Walk from all nodes to their root at once."""
    row, place = tl.program_id(0), tl.arange(0, WIDTH)
    token, inside = row * width + place, place < width
    is_real = tl.load(token_slots + token, mask=inside, other=0) > 0
    its_parents = parents + tl.load(row_slots + row).to(tl.int64) * parent_stride
    bits, depth = _bit(place) | 1, tl.zeros([WIDTH], tl.int32)
    node = tl.where(is_real, place, 0)
    while tl.max(node, axis=0) > 0:
        above = tl.load(its_parents + node, mask=node > 0, other=0)
        above = tl.minimum(above, tl.maximum(node - 1, 0))  # ends even with invalid parents
        bits |= tl.where(node > 0, _bit(above), 0)
        depth += (node > 0).to(tl.int32)
        node = above
    base = tl.where(is_real, tl.load(starts + row), 0)
    tl.store(bases + token, base, mask=inside)
    tl.store(seen + token, bits, mask=inside)
    tl.store(stands + token, base + depth, mask=inside)


@triton.jit(
    do_not_specialize=["width", "sampled_stride", "parent_stride", "token_stride", "path_stride"]
)
def _accept_tree_kernel(
    slots, verify_len, sampled, parents, seen, tokens, length, num_confirmed, path,
    width, sampled_stride, parent_stride, token_stride, path_stride,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept a path. Every write of a row depends on all its reads, so no read comes too late."""
    may_follow(PDL)
    row, place = tl.program_id(0), tl.arange(0, WIDTH)
    wait_for_writer(PDL)
    slot, count = tl.load(slots + row).to(tl.int64), tl.load(verify_len + row)
    start = tl.load(length + slot)
    is_tried = place < count
    its_tokens = tokens + slot * token_stride + start
    its_sampled = sampled + row * sampled_stride
    drafted = tl.load(its_tokens + place, mask=is_tried, other=0)
    above = tl.load(parents + slot * parent_stride + place, mask=is_tried & (place > 0), other=0)
    is_right = is_tried & (drafted == tl.load(its_sampled + above, mask=is_tried, other=0))
    right = tl.sum(tl.where(is_right | (place == 0), _bit(place), 0), axis=0)
    bits = tl.load(seen + row * width + place, mask=is_tried, other=0)
    is_good = is_tried & ((bits & ~right) == 0)  # and so are all its ancestors
    good = is_good.to(tl.int32)
    num, before = tl.sum(good, axis=0), tl.cumsum(good, axis=0) - good
    order = tl.where(is_good, before, num + place - before)
    tl.store(path + row * path_stride + order, place * good, mask=place < width)
    follows = tl.load(its_sampled + place, mask=is_good, other=0)
    num_new_tokens = tl.where(slot > 0, num, 0)
    tl.store(its_tokens + 1 + before, follows, mask=is_good & (before < num_new_tokens))
    tl.store(length + slot, start + num, mask=slot > 0)
    tl.store(num_confirmed + row, num)


@triton.jit
def _stored_at(pages, at, is_moved, page_stride, place_stride, PAGE: tl.constexpr):
    page = tl.load(pages + at // PAGE, mask=is_moved, other=0).to(tl.int64)
    return page * page_stride + at % PAGE * place_stride


@triton.jit(do_not_specialize=["path_stride", "table_stride"])
def _move_kv_kernel(
    slots, length, num_confirmed, path, kv_pages, page_table, path_stride, table_stride,
    size, layer_stride, page_stride, place_stride,
    PAGE: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Move one layer of a row. A path ascends, so no target is the source of a later move."""
    may_follow(PDL)
    row, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    num = tl.load(num_confirmed + row)
    start = tl.load(length + slot) - num
    pages, kv = page_table + slot * table_stride, kv_pages + layer * layer_stride
    for first in range(0, tl.where(slot > 0, num, 0), PLACES):
        place = first + tl.arange(0, PLACES)
        node = tl.load(path + row * path_stride + place, mask=place < num, other=0)
        is_moved = (place < num) & (node != place)
        source = _stored_at(pages, start + node, is_moved, page_stride, place_stride, PAGE)
        target = _stored_at(pages, start + place, is_moved, page_stride, place_stride, PAGE)
        inside = is_moved[:, None] & (column < size)[None, :]
        value = tl.load(kv + source[:, None] + column[None, :], mask=inside, other=0)
        tl.debug_barrier()  # all reads come before the first write
        tl.store(kv + target[:, None] + column[None, :], value, mask=inside)


def tree_branches(rows: Rows, tokens: Tokens, parents: Tensor) -> Branches:
    num_tokens, width = len(tokens.slots), rows.span
    branches = _new_branches(num_tokens, rows.slots)
    launch(
        _branch_kernel, (len(rows.slots),),
        rows.slots, rows.starts, tokens.slots, parents, *branches, width, parents.stride(0),
        WIDTH=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return branches


def accept_tree(
    slots: Tensor,
    verify_len: Tensor,
    sampled: Tensor,  # [R, W]: the token sampled after each node
    parents: Tensor,
    branches: Branches,
    tables: DraftTables,
    num_confirmed: Tensor,
    path: Tensor,  # [R, W]
) -> None:
    num_rows, width = sampled.shape
    launch(
        _accept_tree_kernel, (num_rows,),
        slots, verify_len, sampled, parents, branches.seen, tables.tokens, tables.length,
        num_confirmed, path,
        width, sampled.stride(0), parents.stride(0), tables.tokens.stride(0), path.stride(0),
        WIDTH=triton.next_power_of_2(width), num_warps=1, **overlap(),
    )  # fmt: skip


def move_kv(
    slots: Tensor,
    length: Tensor,  # after accept_tree
    num_confirmed: Tensor,
    path: Tensor,
    kv: PagedKv,  # stacked: [layers, pages, ...]
) -> None:
    num_layers, _, page_size, *shape = kv.pages.shape
    size = shape[0] * shape[1]
    block = min(MOVED_BLOCK, triton.next_power_of_2(size))
    launch(
        _move_kv_kernel, (len(slots), num_layers, triton.cdiv(size, block)),
        slots, length, num_confirmed, path, kv.pages, kv.page_table,
        path.stride(0), kv.page_table.stride(0), size, *kv.pages.stride()[:3],
        PAGE=page_size, PLACES=MOVED_PLACES, BLOCK=block, **overlap(),
    )  # fmt: skip


def _new_branches(num_tokens: int, like: Tensor) -> Branches:
    bases, stands = aligned(2, num_tokens, like).unbind()
    return Branches(bases, like.new_empty(num_tokens, dtype=torch.int64), stands)


# ---- growth of a tree ----


@triton.jit
def _candidates(
    drawn, tables, token, child, owner, inside, id_stride, score_stride, K: tl.constexpr
):
    """Return id and score of each child candidate of a token."""
    its_ids = drawn.top_ids + token * id_stride
    first = tl.load(drawn.tokens + token, mask=inside, other=0)
    is_passed = tl.zeros_like(child)  # the drawn token is among the likelier ones
    for i in tl.static_range(K - 1):
        likely = tl.load(its_ids + i, mask=inside, other=0)
        is_passed |= ((likely == first) & (i < child)).to(tl.int32)
    index = tl.maximum(child - 1, 0) + is_passed
    other = tl.load(its_ids + index, mask=inside, other=0)
    score = tl.load(
        drawn.top_logprobs + token * score_stride + index, mask=inside, other=float("-inf")
    )
    has_penalty = (
        (tl.load(tables.repetition_penalty + owner) != 1.0)
        | (tl.load(tables.presence_penalty + owner) != 0.0)
        | (tl.load(tables.frequency_penalty + owner) != 0.0)
    )
    is_out = (owner == 0) | (has_penalty & (child > 0)) | ~is_finite(score)
    return tl.where(child > 0, other, first), tl.where(is_out, -INF, score)


@triton.jit(do_not_specialize=["step", "first", "behind", "guess_stride", "token_stride"])
def _grow_tree_kernel(
    slots, length, room, drawn, front, candidates, out, tables,
    step, first, behind, id_stride, score_stride, guess_stride, token_stride,
    K: tl.constexpr, FRONT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grow the tree of one row: children of FRONT tokens, and the best K of them."""
    row, i = tl.program_id(0), tl.arange(0, SIZE)
    inside = i < FRONT * K
    token, child = row * FRONT + i // K, i % K
    slot, newest = tl.load(slots + row), tl.load(length + row)
    owner, node = tl.zeros_like(i) + slot, tl.full([SIZE], -1, tl.int32)
    seen = tl.zeros([SIZE], tl.int64)
    if front is not None:
        owner = tl.load(front.tokens.slots + token, mask=inside, other=0)
        node = tl.load(front.nodes + token, mask=inside, other=0)
        seen = tl.load(front.branches.seen + token, mask=inside, other=0)
    ids, score = _candidates(drawn, tables, token, child, owner, inside, id_stride, score_stride, K)
    if front is not None:
        score += tl.load(front.scores + token, mask=inside, other=0.0)
    guess = row * guess_stride + first + i
    tl.store(candidates.ids + guess, ids, mask=inside)
    tl.store(candidates.scores + guess, score, mask=inside)
    tl.store(candidates.parents + guess, node, mask=inside)

    worth = pack(score, i)
    rank = tl.sum((worth[None, :] > worth[:, None]).to(tl.int32), axis=1)
    is_best, number = inside & (rank < K), step * K + rank  # number: place in the tree
    is_real = is_best & (number < tl.load(room + row)) & is_finite(score)
    its_tokens = tables.tokens + slot.to(tl.int64) * token_stride + newest + 1
    tl.store(its_tokens + number, ids, mask=is_real)
    start, at = newest + 1 - behind, row * K + rank
    stand = start + step
    tl.store(out.tokens.slots + at, tl.where(is_real, slot, 0), mask=is_best)
    tl.store(out.tokens.positions + at, tl.where(is_real, start + number, 0), mask=is_best)
    tl.store(out.branches.bases + at, tl.where(is_real, start, 0), mask=is_best)
    tl.store(out.branches.seen + at, seen | _bit(number), mask=is_best)
    tl.store(out.branches.positions + at, tl.where(is_real, stand, 0), mask=is_best)
    tl.store(out.after + at, tl.where(is_real, stand + 1 + behind, 0), mask=is_best)
    tl.store(out.origins + at, token.to(tl.int64), mask=is_best)
    tl.store(out.nodes + at, first + i, mask=is_best)
    tl.store(out.scores + at, score, mask=is_best)
    is_first, its_row = inside & (rank == 0), tl.zeros_like(i) + row
    tl.store(out.rows.slots + its_row, tl.where(is_real, slot, 0), mask=is_first)
    tl.store(out.rows.starts + its_row, tl.where(is_real, start + step * K, 0), mask=is_first)
    tl.store(out.rows.counts + row, K)
    tl.store(out.rows.ends + row, (row + 1) * K)


@triton.jit(do_not_specialize=["size", "most", "guess_stride", "token_stride", "parent_stride"])
def _select_kernel(
    slots, length, room, candidates, tokens, parents, num_selected,
    size, most, guess_stride, token_stride, parent_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row, i = tl.program_id(0), tl.arange(0, SIZE)
    inside, at = i < size, row * guess_stride + i
    wait_for_writer(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    score = tl.load(candidates.scores + at, mask=inside, other=float("-inf"))
    num = tl.sum(is_finite(score).to(tl.int32), axis=0)
    num = tl.where(slot > 0, tl.minimum(num, tl.minimum(tl.load(room + row), most)), 0)
    tl.store(num_selected + row, num)
    if num <= 0:
        return
    worth, rank = pack(score, i), tl.zeros([SIZE], tl.int32)
    for begin in range(0, size, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        others = candidates.scores + row * guess_stride + j
        other = pack(tl.load(others, mask=j < size, other=float("-inf")), j)
        rank += tl.sum((other[None, :] > worth[:, None]).to(tl.int32), axis=1)
    is_chosen = inside & (rank < num)
    chosen = is_chosen.to(tl.int32)
    node = tl.cumsum(chosen, axis=0) * chosen
    parent = tl.load(candidates.parents + at, mask=inside, other=-1)
    above = tl.where(parent < 0, 0, tl.gather(node, tl.maximum(parent, 0), 0))
    ids = tl.load(candidates.ids + at, mask=is_chosen, other=0)
    its_tokens = tokens + slot * token_stride + tl.load(length + row)
    tl.store(its_tokens + node, ids, mask=is_chosen)
    tl.store(parents + slot * parent_stride + node, above, mask=is_chosen)


def grow_tree(
    rows: DraftRows,
    drawn: Sampled,  # for the newest token of each row, or for its front
    front: TreeFront | None,
    candidates: Candidates,
    at: TreeStep,
    tables: SamplingTables,
) -> TreeFront:
    topk = at.topk
    out, num_parents = _new_front(rows.slots, topk), 1 if front is None else topk
    size = triton.next_power_of_2(num_parents * topk)
    launch(
        _grow_tree_kernel, (len(rows.slots),),
        *rows, drawn, front, candidates, out, tables,
        at.step, min(at.step, 1) * topk + max(at.step - 1, 0) * topk**2, at.behind,
        drawn.top_ids.stride(0), drawn.top_logprobs.stride(0), candidates.ids.stride(0),
        tables.tokens.stride(0),
        K=topk, FRONT=num_parents, SIZE=size, num_warps=1 if size <= 16 else 4,
    )  # fmt: skip
    return out


def select_nodes(
    rows: DraftRows, candidates: Candidates, most: int, tokens: Tensor, parents: Tensor
) -> Tensor:
    num_rows, size = candidates.scores.shape
    num = torch.empty_like(rows.slots)
    launch(
        _select_kernel, (num_rows,),
        *rows, candidates, tokens, parents, num,
        size, most, candidates.ids.stride(0), tokens.stride(0), parents.stride(0),
        SIZE=triton.next_power_of_2(size), BLOCK=COMPARED, num_warps=8 if size > 128 else 4,
        **overlap(),
    )  # fmt: skip
    return num


def _new_front(slots: Tensor, topk: int) -> TreeFront:
    num = len(slots) * topk
    token_slots, positions, after, nodes = aligned(4, num, slots).unbind()
    return TreeFront(
        Tokens(token_slots, positions),
        new_rows(slots, topk),
        _new_branches(num, slots),
        after,
        slots.new_empty(num, dtype=torch.int64),
        nodes,
        slots.new_empty(num, dtype=torch.float32),
    )
