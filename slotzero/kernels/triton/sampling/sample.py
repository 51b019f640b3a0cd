"""Choosing the next token of each row on the GPU; sampling/reference.py defines it.

A row costs what it asks for: who asks for less leaves each kernel early. No kernel sorts.

- `_scan_kernel`, a program per chunk of a row: the chunk's highest logit. Logits that a mask, a
  penalty, a bias or a ban changes are written down in float32; whoever owns a chunk counts the
  tokens that fall into it. Filtered rows also get the highest logit of every 64, and rows with log
  probabilities the sum and the top of the logits as they came.
- `floor_kernel` of floors.py, a program per row: the lowest value that its filters leave.
- `_choose_kernel`, a few programs per row. Exact noise costs two logarithms in double, so only
  those get it whose cheap upper bound beats the best so far. Who finishes a row last reports it; a
  greedy row has but one program, which only reports.

The rules: nothing depends on the batch or on who comes first. Chunks are cut from the row alone,
a sum is taken by one program in one order, and between programs only integers are compared and
counted. A value and its place travel as one integer, of which the largest is the highest value and,
among equals, the first. Whatever must be zero is zeroed in the same call.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.sampling.noise import (
    MAX_GUMBEL,
    cell_of,
    gumbel,
    gumbel_bound,
    noise_key,
)
from slotzero.kernels.triton.sampling.packed import (
    BROKEN,
    CHUNK,
    GROUP,
    GROUPS,
    INF,
    NOBODY,
    is_finite,
    mass_of,
    pack,
    place_of,
    read_logits,
    scaled_logit,
    value_of,
)
from slotzero.kernels.triton.sampling.thresholds import floor_kernel
from slotzero.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from slotzero.sampling.tables import Sampled, SamplingTables

HISTORY = tl.constexpr(2048)  # tokens counted at a time
MAX_BIAS = tl.constexpr(MAX_LOGIT_BIAS)
BIAS_LANES = tl.constexpr(triton.next_power_of_2(MAX_LOGIT_BIAS))
MAX_STOP = tl.constexpr(MAX_STOP_IDS)
MAX_TOP = tl.constexpr(MAX_LOGPROBS)
TOP_LANES = tl.constexpr(triton.next_power_of_2(MAX_LOGPROBS))
CHOOSERS = 2112  # programs that choosing is spread over: 16 to each of 132 processors

NAN = tl.constexpr(float("nan"))
IN_PROMPT = tl.constexpr(1 << 30)


class Scratch(NamedTuple):
    """What the kernels of one call tell each other."""

    best: Tensor  # [rows, chunks] int64: the highest adjusted logit and its place, packed
    raw_top: Tensor  # [rows, chunks, MAX_LOGPROBS] int64: the highest logits as they came, packed
    noisy: Tensor  # [rows, choosers] int64: the highest logit with noise and its place, packed
    mass: Tensor  # [rows, chunks] float64: the sum of exp((logit - chunk's best) / temperature)
    raw_mass: Tensor  # [rows, chunks] float64: the sum of exp(logit - chunk's best), as they came
    groups: Tensor  # [rows, chunks * GROUPS] float32: the highest adjusted logit of each group
    listed: Tensor  # [rows, chunks * GROUPS] int32: groups in which a floor is looked for
    adjusted: Tensor  # [rows, chunks * CHUNK] float32, where `changed`
    changed: Tensor  # [rows] int32: 0 where the logits are used as they came
    floor: Tensor  # [rows] float32: the lowest scaled logit that may be chosen
    arrived: Tensor  # [rows] int32: choosers that are done


# ---- mask, penalties, bias, ban ----


@triton.jit
def _is_changed(slot, position, tables):
    by_penalty = (
        (tl.load(tables.repetition_penalty + slot) != 1.0)
        | (tl.load(tables.presence_penalty + slot) != 0.0)
        | (tl.load(tables.frequency_penalty + slot) != 0.0)
    )
    by_bias = tl.load(tables.bias_ids + slot * MAX_BIAS) != -1
    by_mask = tl.load(tables.is_masked + slot) != 0
    num_new = position - tl.load(tables.prompt_len + slot)
    by_ban = num_new < tl.load(tables.min_tokens + slot)
    return (by_penalty | by_bias | by_mask | by_ban).to(tl.int32)


@triton.jit
def _adjust(x, index, begin, slot, position, tables, adjusted, token_stride, mask_stride, vocab):
    """Writes one chunk of the row's `adjusted`, where its tokens are counted first."""
    num_masked = tl.where(tl.load(tables.is_masked + slot) != 0, vocab, 0)
    words = tables.allowed + slot * mask_stride
    word = tl.load(words + (index >> 5), mask=index < num_masked, other=-1)
    x = tl.where(((word >> (index & 31)) & 1) != 0, x, -INF)
    prompt_len = tl.load(tables.prompt_len + slot)
    repetition = tl.load(tables.repetition_penalty + slot)
    presence = tl.load(tables.presence_penalty + slot)
    frequency = tl.load(tables.frequency_penalty + slot)
    counts = adjusted.to(tl.pointer_type(tl.int32))
    tl.store(counts + index, 0)
    tl.debug_barrier()
    is_penalised = (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)
    known = tl.where(is_penalised, tl.minimum(position, token_stride), 0)
    first = tl.where(repetition == 1.0, tl.maximum(prompt_len, 0), 0)
    for at in range(first, known, HISTORY):
        place = at + tl.arange(0, HISTORY)
        token = tl.load(tables.tokens + slot * token_stride + place, mask=place < known, other=-1)
        mine = (token >= begin) & (token < begin + CHUNK)
        tl.atomic_or(counts + token, IN_PROMPT, mask=mine & (place < prompt_len), sem="relaxed")
        tl.atomic_add(counts + token, 1, mask=mine & (place >= prompt_len), sem="relaxed")
    tl.debug_barrier()
    count = tl.load(counts + index)
    uses = (count & (IN_PROMPT - 1)).to(tl.float32)
    x = tl.where(count != 0, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    x = x - frequency * uses
    x = x - tl.where(uses > 0, presence, 0.0)
    tl.store(adjusted + index, x)
    tl.debug_barrier()
    lane = tl.arange(0, BIAS_LANES)
    biased = slot * MAX_BIAS + lane
    token = tl.load(tables.bias_ids + biased, mask=lane < MAX_BIAS, other=-1)  # all distinct
    mine = (token >= begin) & (token < begin + CHUNK)
    bias = tl.load(tables.bias_values + biased, mask=mine, other=0.0)
    tl.store(adjusted + token, tl.load(adjusted + token, mask=mine, other=0.0) + bias, mask=mine)
    tl.debug_barrier()
    token = tl.load(tables.stop_ids + slot * MAX_STOP + tl.arange(0, MAX_STOP))
    is_early = position - prompt_len < tl.load(tables.min_tokens + slot)
    banned = (token >= begin) & (token < tl.where(is_early, begin + CHUNK, 0))
    tl.store(adjusted + token, -INF, mask=banned)
    tl.debug_barrier()


# ---- the chunks of a row ----


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    logits, slots, positions, tables, scratch, vocab, stride, token_stride, mask_stride, chunks,
    PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wait_for_writer(PDL)
    logits += row * stride
    group, lane = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    index = (chunk * CHUNK + group * GROUP)[:, None] + lane[None, :]
    inside = index < vocab
    x = tl.load(logits + index, mask=inside, other=-INF).to(tl.float32)  # [GROUPS, GROUP]
    slot = tl.load(slots + row).to(tl.int64)
    # Both are on their way before either is used. So rows of slot 0 are scanned like others: to
    # leave them out would be to wait twice.
    tl.debug_barrier()
    adjusted = scratch.adjusted + row * chunks * CHUNK
    temperature = tl.load(tables.temperature + slot)
    is_filtered = (tl.load(tables.top_k + slot) > 0) | (tl.load(tables.top_p + slot) < 1)
    num_top = tl.minimum(tl.load(tables.num_logprobs + slot), MAX_TOP)
    position = tl.load(positions + row)
    changed = _is_changed(slot, position, tables)
    at = row * chunks + chunk
    if chunk == 0:
        tl.store(scratch.changed + row, changed)
        tl.store(scratch.arrived + row, 0)
    if num_top >= 0:
        left = tl.max(tl.where(inside, pack(x, index), NOBODY), axis=1)  # [GROUPS]
        tl.store(scratch.raw_mass + at, mass_of(x, value_of(tl.max(left)), 1.0))
        for i in range(tl.maximum(num_top, 1)):
            top = tl.max(left)
            tl.store(scratch.raw_top + at * MAX_TOP + i, top)
            its_group = tl.minimum(place_of(top), vocab - 1) // GROUP
            near = its_group * GROUP + lane
            packed = pack(tl.load(logits + near, mask=near < vocab).to(tl.float32), near)
            packed = tl.where((near < vocab) & (packed < top), packed, NOBODY)
            left = tl.where(chunk * GROUPS + group == its_group, tl.max(packed), left)
        x = tl.load(logits + index, mask=inside, other=-INF).to(tl.float32)  # not held so long
    if changed != 0:
        _adjust(
            x, index, chunk * CHUNK, slot, position, tables, adjusted, token_stride, mask_stride,
            vocab,
        )  # fmt: skip
        x = tl.load(adjusted + index, mask=inside, other=-INF)
    # The maximum forgets NaN, a sum does not. Shrunk, no sum of finite ones is infinite, and
    # where two infinities make a NaN, the higher one has broken the row anyway.
    total = tl.sum(x * 2.0**-16)
    highest = tl.max(x, axis=1)  # [GROUPS]
    near = chunk * CHUNK + place_of(tl.max(pack(highest, group))) * GROUP + lane
    packed = pack(read_logits(logits, adjusted, changed, vocab, near), near)
    best = tl.max(tl.where(near < vocab, packed, NOBODY))
    best = tl.where(total == total, best, BROKEN)
    tl.store(scratch.best + at, best)
    if is_filtered & (temperature > 0):
        tl.store(scratch.groups + at * GROUPS + group, highest)
        tl.store(scratch.mass + at, mass_of(x, value_of(best), temperature))


# ---- the choice and the report ----


@triton.jit
def _with_noise(index, row, noise, floor):
    """One token, packed; nobody if it is below the floor."""
    scaled = scaled_logit(row, index)
    return tl.where(scaled >= floor, pack(scaled + gumbel(cell_of(index, noise)), index), NOBODY)


@triton.jit
def _choose(winner, chunk, top, row, noise, floor):
    """The highest with noise, packed, of `winner` and a chunk whose highest logit is `top`."""
    logits, adjusted, changed, vocab, peak, temperature = row
    ceiling = tl.div_rn(top - peak, temperature)
    if (ceiling >= floor) & (ceiling + MAX_GUMBEL >= value_of(winner)):
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        # Not a division, and never below it.
        scale = (1 - 2.0**-20) / tl.maximum(temperature, 2.0**-126)
        scaled = (read_logits(logits, adjusted, changed, vocab, index) - peak) * scale
        bound = scaled + gumbel_bound(cell_of(index, noise))
        bound = tl.where(scaled >= floor, bound, -INF)
        if tl.max(bound) >= value_of(winner):
            left = pack(bound, index)
            likeliest = tl.max(left)
            while value_of(likeliest) >= value_of(winner):
                winner = tl.maximum(winner, _with_noise(place_of(likeliest), row, noise, floor))
                left = tl.where(left == likeliest, NOBODY, left)
                likeliest = tl.max(left)
    return winner


@triton.jit
def _report(r, token, num_top, logits, scratch, out, vocab, chunks, CHUNKS: tl.constexpr):
    """Writes a row's outputs; num_top is -1 where no log probability is wanted."""
    lane, chunk = tl.arange(0, TOP_LANES), tl.arange(0, CHUNKS)
    logprob = 0.0
    top_ids = tl.zeros_like(lane)
    top_logprobs = tl.zeros((TOP_LANES,), tl.float32)
    if num_top >= 0:
        at = r * chunks + chunk
        best = tl.load(scratch.raw_top + at * MAX_TOP, mask=chunk < chunks, other=NOBODY)
        peak = value_of(tl.max(best))
        mass = tl.load(scratch.raw_mass + at, mask=chunk < chunks, other=0.0)
        total = tl.sum(mass * tl.exp((value_of(best) - peak).to(tl.float64)))
        log_total = tl.where(is_finite(peak), tl.log(total).to(tl.float32), NAN)
        logprob = (tl.load(logits + token).to(tl.float32) - peak) - log_total
        wanted = (lane < num_top)[None, :] & (chunk < chunks)[:, None]
        left = scratch.raw_top + (at * MAX_TOP)[:, None] + lane[None, :]
        left = tl.load(left, mask=wanted, other=NOBODY)
        found = tl.full((TOP_LANES,), NOBODY, tl.int64)
        for i in range(num_top):
            top = tl.max(left)
            found = tl.where(lane == i, top, found)
            left = tl.where(left == top, NOBODY, left)
        num_found = tl.minimum(num_top, vocab)
        num_ids = tl.where(is_finite(peak), num_found, 0)
        top_ids = tl.where(lane < num_ids, place_of(found), 0)
        top_logprobs = tl.where(lane < num_found, (value_of(found) - peak) - log_total, 0.0)
    tl.store(out.tokens + r, token)
    tl.store(out.logprobs + r, logprob)
    tl.store(out.top_ids + r * MAX_TOP + lane, top_ids, mask=lane < MAX_TOP)
    tl.store(out.top_logprobs + r * MAX_TOP + lane, top_logprobs, mask=lane < MAX_TOP)


@triton.jit(do_not_specialize=["chunks", "choosers"])
def _choose_kernel(
    logits, slots, positions, tables, scratch, out, vocab, stride, chunks, choosers,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    wait_for_writer(PDL)
    slot = tl.load(slots + r).to(tl.int64)
    temperature = tl.load(tables.temperature + slot)
    logits += r * stride
    token, num_top, is_last = 0, -1, part == 0
    if (slot > 0) & (is_last | (temperature > 0)):
        num_top = tl.minimum(tl.load(tables.num_logprobs + slot), MAX_TOP)
        best = scratch.best + r * chunks
        chunk = tl.arange(0, CHUNKS)
        highest = tl.max(tl.load(best + chunk, mask=chunk < chunks, other=NOBODY))
        peak = value_of(highest)
        token = tl.where(is_finite(peak), place_of(highest), 0)
        if (temperature > 0) & is_finite(peak):
            adjusted = scratch.adjusted + r * chunks * CHUNK
            changed = tl.load(scratch.changed + r)
            row = (logits, adjusted, changed, vocab, peak, temperature)
            seed = tables.seed + slot * 2
            position = tl.load(positions + r)
            low = noise_key(0x243F6A88, seed, position)
            noise = (low, noise_key(0x85A308D3, seed, position))
            floor = tl.load(scratch.floor + r)
            winner = _with_noise(token, row, noise, floor)
            for i in range(part, chunks, choosers):
                winner = _choose(winner, i, value_of(tl.load(best + i)), row, noise, floor)
            tl.store(scratch.noisy + r * choosers + part, winner)
            tl.debug_barrier()
            is_last = tl.atomic_add(scratch.arrived + r, 1) == choosers - 1
            if is_last:
                noisy = scratch.noisy + r * choosers + chunk
                token = place_of(tl.max(tl.load(noisy, mask=chunk < choosers, other=NOBODY)))
                token = tl.where(token < vocab, token, 0)
    if is_last:
        _report(r, token, num_top, logits, scratch, out, vocab, chunks, CHUNKS)


def sample(
    logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, out: Sampled
) -> None:
    """`logits` [rows, vocab]; `positions` [rows]: the index that the new token will have."""
    rows, vocab = logits.shape
    stride, token_stride = logits.stride(0), tables.tokens.stride(0)
    mask_stride = tables.allowed.stride(0)
    chunks = triton.cdiv(vocab, CHUNK.value)
    choosers = min(chunks, triton.cdiv(CHOOSERS, rows))
    scratch = _scratch(rows, chunks, choosers, logits.device)
    sizes = {"CHUNKS": triton.next_power_of_2(chunks), **overlap()}
    launch(
        _scan_kernel, (rows, chunks),
        logits, slots, positions, tables, scratch, vocab, stride, token_stride, mask_stride, chunks,
        num_warps=4, maxnreg=80, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    launch(
        floor_kernel,
        (rows,),
        logits,
        slots,
        tables,
        scratch,
        vocab,
        stride,
        chunks,
        num_warps=8,
        maxnreg=128,
        **sizes,
    )
    launch(
        _choose_kernel, (rows, choosers),
        logits, slots, positions, tables, scratch, out, vocab, stride, chunks, choosers,
        num_warps=4, maxnreg=96, **sizes,
    )  # fmt: skip


def _scratch(rows: int, chunks: int, choosers: int, device: torch.device) -> Scratch:
    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    groups = chunks * GROUPS.value
    return Scratch(
        best=empty(torch.int64, chunks),
        raw_top=empty(torch.int64, chunks, MAX_LOGPROBS),
        noisy=empty(torch.int64, choosers),
        mass=empty(torch.float64, chunks),
        raw_mass=empty(torch.float64, chunks),
        groups=empty(torch.float32, groups),
        listed=empty(torch.int32, groups),
        adjusted=empty(torch.float32, chunks * CHUNK.value),
        changed=empty(torch.int32),
        floor=empty(torch.float32),
        arrived=empty(torch.int32),
    )
