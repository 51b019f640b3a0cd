"""Speculation between the passes of target and drafter: token layout, acceptance, stored features
and n-gram drafts. torch_speculation.py defines the operations; each is one kernel.

This module does not know models or sampling. Kernels that derive token layouts are not launched
with overlap: all later kernels may read their outputs without a wait. `load_features` lets the next
kernel start early but does not start early itself, like the kernels of embed.py. Kernels that end
a pass or write to tables do both. A slot has one row per step, so no other program writes what a
program reads of its slot.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_speculation import (
    DraftRows,
    DraftTables,
    DraftTargets,
)

ITEMS = 128  # rows or tokens per program with one warp
ACCEPTED_ROWS = 16
COPIED_BLOCK, VOCAB_BLOCK, SEARCHED_BLOCK = 1024, 2048, 1024
ALIGNED = 4  # int32 values: other addresses than multiples of 16 bytes need another compilation


# ---- token layout ----


@triton.jit
def _lay_out(
    token, slot, start, count, token_slots, positions, row_slots, row_starts, row_counts, row_ends,
    num_tokens, width,
):  # fmt: skip
    """Write tokens, and a row for each first token of a row -> which tokens are real."""
    inside = token < num_tokens
    row, place = token // width, token % width
    is_real = place < count
    tl.store(token_slots + token, tl.where(is_real, slot, 0), mask=inside)
    tl.store(positions + token, tl.where(is_real, start + place, 0), mask=inside)
    is_first = inside & (place == 0)
    owner = tl.where(count > 0, slot, 0)
    tl.store(row_slots + row, owner, mask=is_first)
    tl.store(row_starts + row, tl.where(owner > 0, start, 0), mask=is_first)
    tl.store(row_counts + row, tl.zeros_like(slot) + width, mask=is_first)
    tl.store(row_ends + row, (row + 1) * width, mask=is_first)
    return is_real


@triton.jit(do_not_specialize=["num_tokens", "width"])
def _locate_drafts_kernel(
    slots, length, limit, num_drafts, drafted_at, token_slots, positions, verify_len, after,
    row_slots, row_starts, row_counts, row_ends, num_tokens, width, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    row, place = token // width, token % width
    slot = tl.load(slots + row, mask=inside, other=0)
    start = tl.load(length + slot)
    room = tl.load(limit + slot) - start - 1
    is_good = tl.load(drafted_at + slot) == start
    num = tl.minimum(tl.where(is_good, tl.load(num_drafts + slot), 0), room - 1)
    count = tl.where(room > 0, tl.minimum(tl.maximum(num, 0), width - 1) + 1, 0)
    is_real = _lay_out(
        token, slot, start, count, token_slots, positions,
        row_slots, row_starts, row_counts, row_ends, num_tokens, width,
    )  # fmt: skip
    is_owned = (is_real & (slot > 0)).to(tl.int32)
    tl.store(after + token, tl.where(is_real, start + place, 0) + is_owned, mask=inside)
    tl.store(verify_len + row, count, mask=inside & (place == 0))


@triton.jit(do_not_specialize=["num_tokens", "width"])
def _locate_confirmed_kernel(
    slots, length, drafter_len, token_slots, positions, last,
    row_slots, row_starts, row_counts, row_ends, num_tokens, width, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, place = token // width, token % width
    slot = tl.load(slots + row, mask=token < num_tokens, other=0)
    start = tl.load(drafter_len + slot)
    count = tl.minimum(tl.maximum(tl.load(length + slot) - start, 0), width)
    _lay_out(
        token, slot, start, count, token_slots, positions,
        row_slots, row_starts, row_counts, row_ends, num_tokens, width,
    )  # fmt: skip
    is_first = (token < num_tokens) & (place == 0)
    tl.store(last + row, token + tl.maximum(count - 1, 0), mask=is_first)


def locate_drafts(
    slots: Tensor,
    tables: DraftTables,
    tokens: Tokens,
    verify_len: Tensor,  # [R]
) -> tuple[Rows, Tensor]:
    num, width = _shape(slots, tokens)
    after, rows = torch.empty_like(tokens.positions), new_rows(slots, width)
    launch(
        _locate_drafts_kernel, (triton.cdiv(num, ITEMS),),
        slots, tables.length, tables.limit, tables.num_drafts, tables.drafted_at,
        *tokens, verify_len, after, rows.slots, rows.starts, rows.counts, rows.ends, num, width,
        BLOCK=ITEMS, num_warps=1,
    )  # fmt: skip
    return rows, after


def locate_confirmed(
    slots: Tensor, length: Tensor, drafter_len: Tensor, tokens: Tokens
) -> tuple[Rows, Tensor]:
    num, width = _shape(slots, tokens)
    last, rows = torch.empty_like(slots), new_rows(slots, width)
    launch(
        _locate_confirmed_kernel, (triton.cdiv(num, ITEMS),),
        slots, length, drafter_len, *tokens, last,
        rows.slots, rows.starts, rows.counts, rows.ends, num, width, BLOCK=ITEMS, num_warps=1,
    )  # fmt: skip
    return rows, last


def _shape(slots: Tensor, tokens: Tokens) -> tuple[int, int]:
    num = len(tokens.slots)
    return num, num // len(slots)


def new_rows(slots: Tensor, width: int) -> Rows:
    owners, starts, counts, ends = aligned(4, len(slots), slots).unbind()
    return Rows(owners, starts, counts, ends, span=width)


def aligned(num: int, size: int, like: Tensor) -> Tensor:
    """Return an uninitialized tensor [num, size] of int32 whose rows are aligned."""
    padded = triton.cdiv(size, ALIGNED) * ALIGNED
    return like.new_empty(num, padded, dtype=torch.int32)[:, :size]


# ---- acceptance and stored features ----


@triton.jit(do_not_specialize=["num_rows", "sampled_stride", "token_stride"])
def _accept_kernel(
    slots, verify_len, sampled, tokens, length, num_confirmed,
    num_rows, sampled_stride, token_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Accept drafts. Every write of a row depends on all its reads, so no read comes too late."""
    may_follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, WIDTH)[None, :]
    wait_for_writer(PDL)
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int64)
    count = tl.load(verify_len + row, mask=row < num_rows, other=0)
    start = tl.load(length + slot)
    at = tokens + (slot * token_stride + start + 1)[:, None] + place
    is_draft = place < count[:, None] - 1
    drafted = tl.load(at, mask=is_draft, other=0)
    source = sampled + row[:, None] * sampled_stride + place
    chosen = tl.load(source, mask=place < count[:, None], other=0)
    is_right = is_draft & (drafted == chosen)
    num = tl.where(count > 0, tl.min(tl.where(is_right, WIDTH, place), axis=1) + 1, 0)
    is_real = slot > 0
    tl.store(at, chosen, mask=is_real[:, None] & (place < num[:, None]))
    tl.store(length + slot, start + num, mask=is_real)
    tl.store(num_confirmed + row, num, mask=row < num_rows)


@triton.jit(do_not_specialize=["width", "path_stride"])
def _store_kernel(
    slots, counts, last, path, x, table, width, size, path_stride, x_stride, slot_stride,
    place_stride, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy one of the first `counts` items of a row or of its path; or item `last`, to place 0."""
    may_follow(PDL)
    item = tl.program_id(0)
    row, place = item // width, item % width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    count = 1
    if last is not None:
        item = tl.load(last + row)
    else:
        count = tl.load(counts + row)
        if path is not None:
            item = row * width + tl.load(path + row * path_stride + place)
    inside = column < tl.where((slot > 0) & (place < count), size, 0)
    value = tl.load(x + item.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    tl.store(table + slot * slot_stride + place * place_stride + column, value, mask=inside)


@triton.jit
def _store_next_kernel(
    slots, positions, drafter_len, x, table, most, size, x_stride, slot_stride, place_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    place = tl.load(positions + token) - tl.load(drafter_len + slot)
    has_room = (slot > 0) & (place >= 0) & (place < most)
    inside = column < tl.where(has_room, size, 0)
    value = tl.load(x + token.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    tl.store(table + slot * slot_stride + place * place_stride + column, value, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _set_drafter_len_kernel(
    slots, counts, positions, last, drafter_len, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    may_follow(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row, mask=row < num_rows, other=0)
    has_moved = (slot > 0) & (tl.load(counts + row, mask=row < num_rows, other=0) > 0)
    newest = tl.load(last + row, mask=has_moved, other=0)
    tl.store(drafter_len + slot, tl.load(positions + newest, mask=has_moved) + 1, mask=has_moved)


@triton.jit(do_not_specialize=["width"])
def _load_features_kernel(
    slots, table, out, width, size, slot_stride, place_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    item = tl.program_id(0)
    row, place = item // width, item % width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row).to(tl.int64)
    source = table + slot * slot_stride + place * place_stride
    value = tl.load(source + column, mask=column < size, other=0.0)
    tl.store(out + item.to(tl.int64) * size + column, value, mask=column < size)


def accept(
    slots: Tensor,
    verify_len: Tensor,  # [R], from locate_drafts
    sampled: Tensor,  # [R, W]: the token sampled after each token
    tables: DraftTables,
    num_confirmed: Tensor,  # [R]
) -> None:
    num_rows, width = sampled.shape
    launch(
        _accept_kernel, (triton.cdiv(num_rows, ACCEPTED_ROWS),),
        slots, verify_len, sampled, tables.tokens, tables.length, num_confirmed,
        num_rows, sampled.stride(0), tables.tokens.stride(0),
        ROWS=ACCEPTED_ROWS, WIDTH=triton.next_power_of_2(width), num_warps=1, **overlap(),
    )  # fmt: skip


def store_features(
    slots: Tensor, counts: Tensor, x: Tensor, table: Tensor, path: Tensor | None = None
) -> None:
    _store(slots, counts, None, path, x, table, len(x) // len(slots), table.stride(1))


def store_last(slots: Tensor, last: Tensor, x: Tensor, table: Tensor) -> None:
    _store(slots, None, last, None, x, table, 1, 0)


def _store(
    slots: Tensor,
    counts: Tensor | None,
    last: Tensor | None,
    path: Tensor | None,
    x: Tensor,
    table: Tensor,
    width: int,
    place_stride: int,
) -> None:
    size = x.shape[1]
    if size:  # a drafter may need no features
        launch(
            _store_kernel, (len(slots) * width, triton.cdiv(size, COPIED_BLOCK)),
            slots, counts, last, path, x, table, width, size,
            0 if path is None else path.stride(0), x.stride(0), table.stride(0), place_stride,
            BLOCK=COPIED_BLOCK, **overlap(),
        )  # fmt: skip


def store_next(tokens: Tokens, drafter_len: Tensor, x: Tensor, table: Tensor) -> None:
    num, size = x.shape
    if size:
        launch(
            _store_next_kernel, (num, triton.cdiv(size, COPIED_BLOCK)),
            *tokens, drafter_len, x, table, table.shape[1], size,
            x.stride(0), table.stride(0), table.stride(1), BLOCK=COPIED_BLOCK, **overlap(),
        )  # fmt: skip


def set_drafter_len(rows: Rows, tokens: Tokens, last: Tensor, drafter_len: Tensor) -> None:
    num_rows = len(rows.slots)
    launch(
        _set_drafter_len_kernel, (triton.cdiv(num_rows, ITEMS),),
        rows.slots, rows.counts, tokens.positions, last, drafter_len, num_rows,
        BLOCK=ITEMS, num_warps=1, **overlap(),
    )  # fmt: skip


def load_features(slots: Tensor, table: Tensor) -> Tensor:
    _, width, size = table.shape
    out = table.new_empty(len(slots) * width, size)
    if size:
        launch(
            _load_features_kernel, (len(out), triton.cdiv(size, COPIED_BLOCK)),
            slots, table, out, width, size, table.stride(0), table.stride(1),
            BLOCK=COPIED_BLOCK, PDL=overlap()["PDL"],
        )  # fmt: skip
    return out


# ---- drafts ----


@triton.jit(do_not_specialize=["num_rows", "most"])
def _draft_budget_kernel(
    slots, length, limit, paged, speculates, target, its_length, num, num_rows, most,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < num_rows, other=0)
    start = tl.load(length + slot)
    room = tl.minimum(tl.load(limit + slot) - start - 2, tl.load(paged + slot) - start - 1)
    is_wanted = (tl.load(speculates + slot) > 0) & (start >= tl.load(target + slot))
    room = tl.minimum(tl.maximum(room, 0), most)
    tl.store(its_length + row, start, mask=row < num_rows)
    tl.store(num + row, tl.where(is_wanted, room, 0), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_aims", "stride", "behind"])
def _draft_targets_kernel(
    slots, length, num, wanted, places, after, num_rows, num_aims, stride, behind,
    BLOCK: tl.constexpr,
):  # fmt: skip
    aim = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = aim < num_aims
    step, row = aim // num_rows, aim % num_rows
    is_real = inside & (step < tl.load(num + row, mask=inside, other=0))
    slot = tl.load(slots + row, mask=is_real, other=0)
    newest = tl.load(length + row, mask=is_real, other=0) + step
    at = step * stride + row
    tl.store(wanted + at, slot, mask=inside)
    tl.store(places + at, tl.where(slot > 0, newest - behind, 0), mask=inside)
    tl.store(after + at, tl.where(slot > 0, newest + 1, 0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "token_stride"])
def _store_drafts_kernel(
    slots, positions, ids, tokens, num_rows, token_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    may_follow(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=slot > 0, other=0)
    token = tl.load(ids + row, mask=slot > 0, other=0)
    tl.store(tokens + slot * token_stride + position, token, mask=slot > 0)


@triton.jit(do_not_specialize=["columns"])
def _propose_ngrams_kernel(
    slots, length, num, tokens, num_found, columns,
    STEPS: tl.constexpr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Search one row, from its end to its beginning, or until no match could be better."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    newest, wanted = tl.load(length + row), tl.load(num + row)
    known = tokens + slot * columns
    best = tl.full([], -1, tl.int32)  # rank: match length, then position
    first = tl.where((slot > 0) & (wanted > 0), (newest - 1) // BLOCK * BLOCK, -1)
    while (first >= 0) & (best < LONGEST * columns):
        place = first + tl.arange(0, BLOCK)
        is_match = place < newest
        score = tl.zeros([BLOCK], tl.int32)
        for back in tl.static_range(LONGEST):
            is_match = is_match & (place >= back)
            there = tl.load(known + place - back, mask=is_match, other=0)
            is_match = is_match & (there == tl.load(known + tl.maximum(newest - back, 0)))
            score += is_match.to(tl.int32)
        rank = tl.where(score >= SHORTEST, score * columns + place, -1)
        best = tl.maximum(best, tl.max(rank, axis=0))
        first -= BLOCK
    found = tl.where(best >= 0, wanted, 0)
    tl.store(num_found + row, found)
    # Past the newest token the drafts themselves continue the text, which repeats with a period.
    at, step = best % columns, tl.arange(0, STEPS)
    period = tl.maximum(newest - at, 1)
    ids = tl.load(known + at + 1 + step % period, mask=step < found, other=0)
    tl.store(known + newest + 1 + step, ids, mask=step < found)


@triton.jit(do_not_specialize=["num_rows"])
def _set_num_drafts_kernel(
    slots, length, num, num_drafts, drafted_at, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    may_follow(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    slot = tl.load(slots + row, mask=row < num_rows, other=0)
    is_real = slot > 0
    tl.store(num_drafts + slot, tl.load(num + row, mask=is_real, other=0), mask=is_real)
    tl.store(drafted_at + slot, tl.load(length + row, mask=is_real, other=0), mask=is_real)


@triton.jit
def _expand_vocab_kernel(
    logits, draft_of, out, vocab, logits_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    draft = tl.load(draft_of + token, mask=token < vocab, other=-1)
    wait_for_writer(PDL)
    source = logits + row * logits_stride + draft
    value = tl.load(source, mask=draft >= 0, other=float("-inf"))
    tl.store(out + row * vocab + token, value, mask=token < vocab)


def draft_budget(slots: Tensor, tables: DraftTables, most: int) -> DraftRows:
    num_rows, (its_length, num) = len(slots), aligned(2, len(slots), slots).unbind()
    launch(
        _draft_budget_kernel, (triton.cdiv(num_rows, ITEMS),),
        slots, tables.length, tables.limit, tables.paged, tables.speculates, tables.target,
        its_length, num, num_rows, most, BLOCK=ITEMS, num_warps=1,
    )  # fmt: skip
    return DraftRows(slots, its_length, num)


def draft_targets(rows: DraftRows, steps: int, behind: int) -> DraftTargets:
    num_rows, num_aims = len(rows.slots), steps * len(rows.slots)
    aims = DraftTargets(*aligned(3 * steps, num_rows, rows.slots).view(3, steps, num_rows).unbind())
    launch(
        _draft_targets_kernel, (triton.cdiv(num_aims, ITEMS),),
        *rows, *aims, num_rows, num_aims, aims.slots.stride(0), behind,
        BLOCK=ITEMS, num_warps=1,
    )  # fmt: skip
    return aims


def store_drafts(slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor) -> None:
    num_rows = len(slots)
    launch(
        _store_drafts_kernel, (triton.cdiv(num_rows, ITEMS),),
        slots, positions, ids, tokens, num_rows, tokens.stride(0),
        BLOCK=ITEMS, num_warps=1, **overlap(),
    )  # fmt: skip


def propose_ngrams(
    rows: DraftRows, tokens: Tensor, steps: int, shortest: int, longest: int
) -> Tensor:
    num_found = torch.empty_like(rows.num)
    launch(
        _propose_ngrams_kernel, (len(rows.slots),), *rows, tokens, num_found, tokens.stride(0),
        STEPS=triton.next_power_of_2(steps), SHORTEST=shortest, LONGEST=longest,
        BLOCK=SEARCHED_BLOCK,
    )  # fmt: skip
    return num_found


def set_num_drafts(rows: DraftRows, tables: DraftTables) -> None:
    num_rows = len(rows.slots)
    launch(
        _set_num_drafts_kernel, (triton.cdiv(num_rows, ITEMS),),
        *rows, tables.num_drafts, tables.drafted_at, num_rows,
        BLOCK=ITEMS, num_warps=1, **overlap(),
    )  # fmt: skip


def expand_draft_vocab(logits: Tensor, draft_of: Tensor) -> Tensor:
    rows, vocab = len(logits), len(draft_of)
    out = logits.new_empty(rows, vocab)
    launch(
        _expand_vocab_kernel, (rows, triton.cdiv(vocab, VOCAB_BLOCK)),
        logits, draft_of, out, vocab, logits.stride(0), BLOCK=VOCAB_BLOCK, **overlap(),
    )  # fmt: skip
    return out
