"""Sampling the next token of each row on the GPU; sampling/reference.py defines it.

A row costs only what its parameters need: programs without work return early. No kernel sorts.

- `_scan_kernel`, one program per chunk of a row: the chunk's highest logit. Logits that a mask, a
  penalty, a bias or a ban changes are written in float32; the program of a chunk counts the tokens
  that belong to it. Filtered rows also get the highest logit of every 64, and rows with log
  probabilities the sum and the top of the logits of which these are: the original or adjusted ones.
- `floor_kernel` of thresholds.py, one program per row: the lowest value that passes its filters.
- `_choose_kernel`, a few programs per row. Exact noise costs two logarithms in double, so it is
  computed only for tokens whose cheap upper bound beats the best so far. The program that finishes
  a row last writes its outputs; a greedy row has a single program, which only does that.

The rules: nothing depends on the batch or on the order of programs. Chunks depend on the row alone,
a sum is computed by one program in one order, and between programs only integers are compared and
counted. A value and its index are packed into one integer, so that the largest integer is the
highest value and, among equal values, the first. Memory that must be zero is zeroed in the same
call.
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
    NO_TOKEN,
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
CHOOSERS = 2112  # programs of `_choose_kernel`: 16 for each of 132 multiprocessors

PART = tl.constexpr(512)  # tokens summed at a time

IN_PROMPT = tl.constexpr(1 << 30)


class Scratch(NamedTuple):
    """Scratch tensors that the kernels of one call share."""

    best: Tensor  # [rows, chunks] int64: the highest adjusted logit and its index, packed
    top: Tensor  # [rows, chunks, MAX_LOGPROBS] int64: the highest reported logits, packed
    noisy: Tensor  # [rows, choosers] int64: the highest logit with noise and its index, packed
    mass: Tensor  # [rows, chunks] float64: the sum of exp((logit - chunk's best) / temperature)
    top_mass: Tensor  # [rows, chunks] float64: the sum of exp(reported logit - chunk's top)
    groups: Tensor  # [rows, chunks * GROUPS] float32: the highest adjusted logit of each group
    listed: Tensor  # [rows, chunks * GROUPS] int32: groups in which the floor is searched
    adjusted: Tensor  # [rows, chunks * CHUNK] float32, where `changed`
    changed: Tensor  # [rows] int32: 0 where the original logits are used
    floor: Tensor  # [rows] float32: the lowest scaled logit that may be chosen
    arrived: Tensor  # [rows] int32: programs of `_choose_kernel` that are done


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
    """Write one chunk of the row's `adjusted` logits, in which its tokens are first counted."""
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


@triton.jit
def _list_top(x, source, index, chunk, at, num_top, scratch, vocab):
    """Write the highest values of a chunk, and the sum of its exponentials."""
    group, lane = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    left = tl.max(tl.where(index < vocab, pack(x, index), NO_TOKEN), axis=1)  # [GROUPS]
    tl.store(scratch.top_mass + at, mass_of(x, value_of(tl.max(left)), 1.0))
    for i in range(tl.maximum(num_top, 1)):
        top = tl.max(left)
        tl.store(scratch.top + at * MAX_TOP + i, top)
        its_group = tl.minimum(place_of(top), vocab - 1) // GROUP
        near = its_group * GROUP + lane
        packed = pack(tl.load(source + near, mask=near < vocab).to(tl.float32), near)
        packed = tl.where((near < vocab) & (packed < top), packed, NO_TOKEN)
        left = tl.where(chunk * GROUPS + group == its_group, tl.max(packed), left)


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
    # Both loads are issued before either is used. So rows of slot 0 are scanned like others:
    # skipping them would mean waiting twice.
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
    is_adjusted = changed & tl.load(tables.logprobs_mode + slot)  # bit 0: of processed logits
    if (num_top >= 0) & (is_adjusted == 0):
        _list_top(x, logits, index, chunk, at, num_top, scratch, vocab)
        x = tl.load(logits + index, mask=inside, other=-INF).to(tl.float32)  # saves registers
    if changed != 0:
        _adjust(
            x, index, chunk * CHUNK, slot, position, tables, adjusted, token_stride, mask_stride,
            vocab,
        )  # fmt: skip
        x = tl.load(adjusted + index, mask=inside, other=-INF)
        if (num_top >= 0) & (is_adjusted != 0):
            _list_top(x, adjusted, index, chunk, at, num_top, scratch, vocab)
            x = tl.load(adjusted + index, mask=inside, other=-INF)
    # The maximum drops NaN, a sum does not. Scaled down, no sum of finite values is infinite, and
    # if two infinities sum to NaN, the positive one makes the row invalid anyway.
    total = tl.sum(x * 2.0**-16)
    highest = tl.max(x, axis=1)  # [GROUPS]
    near = chunk * CHUNK + place_of(tl.max(pack(highest, group))) * GROUP + lane
    packed = pack(read_logits(logits, adjusted, changed, vocab, near), near)
    best = tl.max(tl.where(near < vocab, packed, NO_TOKEN))
    best = tl.where(total == total, best, BROKEN)
    tl.store(scratch.best + at, best)
    if is_filtered & (temperature > 0):
        tl.store(scratch.groups + at * GROUPS + group, highest)
        tl.store(scratch.mass + at, mass_of(x, value_of(best), temperature))


# ---- the choice and the outputs ----


@triton.jit
def _with_noise(index, row, noise, floor):
    """Return one token with its noise, packed; NO_TOKEN if it is below the floor."""
    scaled = scaled_logit(row, index)
    return tl.where(scaled >= floor, pack(scaled + gumbel(cell_of(index, noise)), index), NO_TOKEN)


@triton.jit
def _choose(winner, chunk, top, row, noise, floor):
    """Return the highest token with noise, packed, of `winner` and a chunk with maximum `top`."""
    logits, adjusted, changed, vocab, peak, temperature = row
    ceiling = tl.div_rn(top - peak, temperature)
    if (ceiling >= floor) & (ceiling + MAX_GUMBEL >= value_of(winner)):
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        # Cheaper than the exact division, and never below its result (scaled logits are <= 0).
        scale = (1 - 2.0**-20) / tl.maximum(temperature, 2.0**-126)
        scaled = (read_logits(logits, adjusted, changed, vocab, index) - peak) * scale
        bound = scaled + gumbel_bound(cell_of(index, noise))
        bound = tl.where(scaled >= floor, bound, -INF)
        if tl.max(bound) >= value_of(winner):
            left = pack(bound, index)
            likeliest = tl.max(left)
            while value_of(likeliest) >= value_of(winner):
                winner = tl.maximum(winner, _with_noise(place_of(likeliest), row, noise, floor))
                left = tl.where(left == likeliest, NO_TOKEN, left)
                likeliest = tl.max(left)
    return winner


@triton.jit
def _mass_above(row, floor, best, chunks):
    """Return the sum of exp(scaled logit) over the tokens of a row that are not below the floor."""
    peak, temperature = row[4], row[5]
    total = tl.zeros((PART,), tl.float64)
    lane = tl.arange(0, PART)
    for chunk in range(chunks):
        if tl.div_rn(value_of(tl.load(best + chunk)) - peak, temperature) >= floor:
            for first in range(0, CHUNK, PART):
                scaled = scaled_logit(row, lane + (chunk * CHUNK + first))
                total += tl.where(scaled >= floor, tl.exp(scaled), 0.0).to(tl.float64)
    return tl.sum(total)


@triton.jit
def _reported(value, row, floor, log_total, is_logit):
    """Return what is reported of logits: their log probabilities, or the logits themselves."""
    peak, temperature = row[4], row[5]
    scaled = tl.div_rn(value - peak, temperature)
    logit = tl.div_rn(value, temperature)
    made = tl.where(scaled < floor, -INF, tl.where(is_logit, logit, scaled - log_total))
    return tl.where(is_finite(peak), made, float("nan"))


@triton.jit
def _report(
    r, slot, token, num_top, logits, tables, scratch, out, vocab, chunks, CHUNKS: tl.constexpr
):
    """Write a row's outputs; num_top is -1 where no log probability is wanted."""
    lane, chunk = tl.arange(0, TOP_LANES), tl.arange(0, CHUNKS)
    logprob = 0.0
    top_ids = tl.zeros_like(lane)
    top_logprobs = tl.zeros((TOP_LANES,), tl.float32)
    if num_top >= 0:
        at = r * chunks + chunk
        tops = tl.load(scratch.top + at * MAX_TOP, mask=chunk < chunks, other=NO_TOKEN)
        peak = value_of(tl.max(tops))
        mass = tl.load(scratch.top_mass + at, mask=chunk < chunks, other=0.0)
        total = tl.sum(mass * tl.exp((value_of(tops) - peak).to(tl.float64)))
        mode = tl.load(tables.logprobs_mode + slot)
        temperature = tl.load(tables.temperature + slot)
        is_scaled = ((mode & 1) != 0) & (temperature > 0)
        temperature = tl.where(is_scaled, temperature, 1.0)
        floor = tl.load(scratch.floor + r, mask=is_scaled, other=-INF)
        adjusted = scratch.adjusted + r * chunks * CHUNK
        is_adjusted = tl.load(scratch.changed + r) & mode
        row = (logits, adjusted, is_adjusted, vocab, peak, temperature)
        if is_scaled & is_finite(peak):
            total = _mass_above(row, floor, scratch.best + r * chunks, chunks)
        log_total = tl.log(total).to(tl.float32)
        is_logit = (mode & 2) != 0
        value = read_logits(logits, adjusted, is_adjusted, vocab, token)
        logprob = _reported(value, row, floor, log_total, is_logit)
        wanted = (lane < num_top)[None, :] & (chunk < chunks)[:, None]
        left = scratch.top + (at * MAX_TOP)[:, None] + lane[None, :]
        left = tl.load(left, mask=wanted, other=NO_TOKEN)
        found = tl.full((TOP_LANES,), NO_TOKEN, tl.int64)
        for i in range(num_top):
            top = tl.max(left)
            found = tl.where(lane == i, top, found)
            left = tl.where(left == top, NO_TOKEN, left)
        num_found = tl.minimum(num_top, vocab)
        num_ids = tl.where(is_finite(peak), num_found, 0)
        top_ids = tl.where(lane < num_ids, place_of(found), 0)
        top_logprobs = _reported(value_of(found), row, floor, log_total, is_logit)
        top_logprobs = tl.where(lane < num_found, top_logprobs, 0.0)
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
        highest = tl.max(tl.load(best + chunk, mask=chunk < chunks, other=NO_TOKEN))
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
                token = place_of(tl.max(tl.load(noisy, mask=chunk < choosers, other=NO_TOKEN)))
                token = tl.where(token < vocab, token, 0)
    if is_last:
        _report(r, slot, token, num_top, logits, tables, scratch, out, vocab, chunks, CHUNKS)


def sample(
    logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, out: Sampled
) -> None:
    """Sample from logits [rows, vocab]; positions [rows]: the index that the new token gets."""
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
        top=empty(torch.int64, chunks, MAX_LOGPROBS),
        noisy=empty(torch.int64, choosers),
        mass=empty(torch.float64, chunks),
        top_mass=empty(torch.float64, chunks),
        groups=empty(torch.float32, groups),
        listed=empty(torch.int32, groups),
        adjusted=empty(torch.float32, chunks * CHUNK.value),
        changed=empty(torch.int32),
        floor=empty(torch.float32),
        arrived=empty(torch.int32),
    )
