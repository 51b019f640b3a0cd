"""The inner loop of products with weights in fragments (`fragments.py`).

A warp loads words of the weight several steps ahead, decodes them, and multiplies by matrix units,
without an exchange of values between lanes: a tensor is loaded in such an order that the layout
that the compiler gives it is, once it has been reshaped, that which matrix units expect. Each warp
loads the rows that it needs.

Numbers are multiplied as they are decoded, which is exact; the sum over a group is scaled. Offsets
are multiplied by the sum of the group's rows, which matrix units compute too.

Words are decoded by PTX (`fragment_ptx.py`) or, in the interpreter and to float32, by plain
arithmetic.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

TWO_PAIRS, FOUR_PAIRS = tl.constexpr("=h,=h,=h,=h,r"), tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
WIDE = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8))
"""Whether the compiler lets a lane have four neighbours of joined numbers, rather than two."""
FOUR, EIGHT = tl.constexpr((tl.int16,) * 4), tl.constexpr((tl.int16,) * 8)


@triton.jit
def _block(i, first, apart, blocks, EACH: tl.constexpr):
    """Return the i-th block of a program; past the end, the last."""
    return (tl.minimum(first + i % EACH, blocks - 1) + i // EACH * apart).to(tl.int64)


@triton.jit
def _load_words(
    codes, first, apart, blocks, depth, end, PARTS: tl.constexpr, DEPTHS: tl.constexpr,
    EACH: tl.constexpr, BLOCKS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Load the parts of a step: [2 * BLOCKS * SLICES * 32, 4] words each. Along the first axis are
    lanes, then warps, then registers of a lane: the order in which the compiler assigns them."""
    i, word = tl.arange(0, BLOCKS * SLICES * 64)[:, None], tl.arange(0, 4)[None, :]
    its, u = depth + i // 32 % SLICES, i // (32 * SLICES * BLOCKS)
    block = _block(i // (32 * SLICES) % BLOCKS, first, apart, blocks, EACH)
    at = codes + (block * DEPTHS + its) * (PARTS * 256) + u * 128 + i % 32 * 4 + word
    parts = ()
    for part in tl.static_range(PARTS):
        loaded = tl.load(at + part * 256, mask=its < end, other=0, cache_modifier=".cg")
        parts += (loaded,)  # type: ignore[assignment]
    return parts


@triton.jit
def _load_pairs(
    scales, first, apart, blocks, depth, end, PER: tl.constexpr, GROUPS: tl.constexpr,
    CUT: tl.constexpr, EACH: tl.constexpr, BLOCKS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Load the scales of a step, those of two rows in a word: [BLOCKS * SLICES * 32, CUT], without
    the last axis if it has one. Four lanes load the same."""
    i = tl.arange(0, BLOCKS * SLICES * 32)
    its, row = depth + i // 32 % SLICES, i // 4 % 8
    block = _block(i // (32 * SLICES), first, apart, blocks, EACH)
    at = scales + ((block * GROUPS + its // PER) * 8 + row) * CUT
    if CUT == 1:
        return tl.load(at, mask=its < end, other=0)
    else:  # noqa: RET505
        cut = tl.arange(0, CUT)[None, :]
        return tl.load(at[:, None] + cut, mask=(its < end)[:, None], other=0)


@triton.jit
def _pick(pairs, AT: tl.constexpr, CUT: tl.constexpr, NUM: tl.constexpr):
    if CUT == 1:
        return pairs
    elif CUT == 2:  # noqa: RET505
        low, high = tl.split(pairs)
        return low if AT == 0 else high
    else:
        even, odd = tl.split(tl.reshape(pairs, [NUM, 2, 2]))
        low, high = tl.split(even if AT % 2 == 0 else odd)
        return low if AT < 2 else high


@triton.jit
def as_float(bits, SCALES: tl.constexpr):
    """Return the low bits of words as float32. Bytes are exponents. The least of them, 2^-127, is
    returned as zero: no float32 that is not subnormal comes of it."""
    if SCALES == tl.float32:  # noqa: SIM300
        return bits.to(tl.int32).to(tl.float32, bitcast=True)
    elif SCALES == tl.float16:  # noqa: RET505, SIM300
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif SCALES == tl.bfloat16:  # noqa: SIM300
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return ((bits.to(tl.int32) & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _spread(
    pairs, SCALES: tl.constexpr, SLICES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr
):
    """Return the scale of each sum, in the shape of the sums."""
    bits: tl.constexpr = SCALES.primitive_bitwidth
    both = tl.join(as_float(pairs, SCALES), as_float(pairs >> bits, SCALES))
    features: tl.constexpr = BLOCKS * 16
    split = tl.reshape(both, [BLOCKS, SLICES, 8, 4, 2])
    ordered = tl.permute(split, (1, 0, 4, 2, 3))
    each = tl.reshape(ordered, [SLICES, features, 1, 4, 1])
    each = tl.broadcast_to(each, [SLICES, features, ROWS // 8, 4, 2])
    if SLICES == 1:
        return tl.reshape(each, [features, ROWS])
    else:  # noqa: RET505
        return tl.reshape(each, [SLICES, features, ROWS])


@triton.jit
def plain(half, AT: tl.constexpr, CODES: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr):
    """Return the numbers of the codes at a place of half words."""
    if CODES == "uint4":
        return ((half >> 4 * AT & 15) - ZERO).to(tl.float32).to(DTYPE)
    elif CODES == "uint8":  # noqa: RET505
        return (((half >> 8 * AT & 255) ^ 128) - ZERO).to(tl.float32).to(DTYPE)
    else:
        tl.static_assert(CODES == "mxfp4")
        if AT < 3:
            size, sign = half >> 6 - 3 * AT & 7, half >> 15 - 3 * AT & 1
        else:
            size = (half >> 11 & 1) | (half >> 10 & 1) << 1 | (half >> 13 & 1) << 2
            sign = half >> 14 & 1
        return ((sign << 31 | size << 22).to(tl.float32, bitcast=True) * 2.0**126).to(DTYPE)


@triton.jit
def _operand(low, high, DTYPE: tl.constexpr, SLICES: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the bits of numbers of one chunk as an operand: [SLICES, features, 32]."""
    joined = tl.join(low, high).to(DTYPE, bitcast=True)
    split = tl.reshape(
        joined, [2, BLOCKS, SLICES, 8, 4, 2, 2, 2]
    )  # u, block, slice, row, t, v, ...
    if SLICES == 1:
        return tl.reshape(tl.permute(split, (2, 1, 6, 3, 0, 5, 4, 7)), [BLOCKS * 16, 32])
    elif WIDE:  # noqa: RET505
        return tl.reshape(tl.permute(split, (2, 1, 6, 3, 5, 4, 0, 7)), [SLICES, BLOCKS * 16, 32])
    else:
        return tl.reshape(tl.permute(split, (2, 1, 6, 3, 0, 5, 4, 7)), [SLICES, BLOCKS * 16, 32])


@triton.jit
def _decode(words, CODES: tl.constexpr, ZERO: tl.constexpr, DECODER: tl.constexpr,
    DTYPE: tl.constexpr, SLICES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the operands of the chunks that the words hold."""
    made = ()
    if DECODER is None:
        low, high = words & 0xFFFF, words >> 16 & 0xFFFF
        for i in tl.static_range(2 if CODES == "uint8" else 4):
            first, second = plain(low, i, CODES, ZERO, DTYPE), plain(high, i, CODES, ZERO, DTYPE)
            made += (_operand(first, second, DTYPE, SLICES, BLOCKS),)  # type: ignore[assignment]
    elif CODES == "uint8":
        bits = tl.inline_asm_elementwise(DECODER, TWO_PAIRS, [words], FOUR, True, 1)
        for i in tl.static_range(2):
            made += (_operand(bits[2 * i], bits[2 * i + 1], DTYPE, SLICES, BLOCKS),)  # type: ignore[assignment]
    else:
        bits = tl.inline_asm_elementwise(DECODER, FOUR_PAIRS, [words], EIGHT, True, 1)
        for i in tl.static_range(4):
            made += (_operand(bits[2 * i], bits[2 * i + 1], DTYPE, SLICES, BLOCKS),)  # type: ignore[assignment]
    return made


@triton.jit
def row_of(ROWS: tl.constexpr, SLICES: tl.constexpr):
    """Return the row of a tile that each of [ROWS * SLICES] loads is for: eight rows, their slices,
    the next eight rows."""
    i = tl.arange(0, ROWS * SLICES)
    return i // (8 * SLICES) * 8 + i % 8


@triton.jit
def _load_rows(
    x_at, known, depth, end, INNER: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Load the chunks of a step, each [ROWS * SLICES, 32]."""
    its = depth + (tl.arange(0, ROWS * SLICES) // 8 % SLICES)[:, None]
    k = tl.arange(0, 32)[None, :]
    chunks = ()
    for chunk in tl.static_range(4):
        mask = known & (its < end)
        if INNER % 128 > 0:
            mask = mask & (its * 128 + chunk * 32 + k < INNER)
        value = tl.load(x_at + depth * 128 + chunk * 32, mask=mask, other=0.0)
        chunks += (value.to(DTYPE),)  # type: ignore[assignment]
    return chunks


@triton.jit
def _arrange(value, SLICES: tl.constexpr, ROWS: tl.constexpr, IS_DECODED: tl.constexpr):
    """Return a chunk of the rows as an operand [SLICES, 32, ROWS], in the order of `_operand` if it
    is multiplied by decoded numbers."""
    split = tl.reshape(value, [ROWS // 8, SLICES, 8, 4, 2, 2, 2])  # ..., slice, row, t, u, v, d
    if SLICES == 1:
        return tl.reshape(tl.permute(split, (1, 4, 5, 3, 6, 0, 2)), [32, ROWS])
    elif WIDE and IS_DECODED:  # noqa: RET505
        return tl.reshape(tl.permute(split, (1, 5, 3, 4, 6, 0, 2)), [SLICES, 32, ROWS])
    else:
        return tl.reshape(tl.permute(split, (1, 4, 5, 3, 6, 0, 2)), [SLICES, 32, ROWS])


@triton.jit
def _beside(a, b, c, d, FEATURES: tl.constexpr):
    """Return four chunks of the weight as one operand [FEATURES, 128]."""
    joined = tl.join(tl.join(a, b), tl.join(c, d))  # [features, 32, 2, 2]
    return tl.reshape(tl.permute(joined, (0, 3, 2, 1)), [FEATURES, 128])


@triton.jit
def _below(a, b, c, d, ROWS: tl.constexpr):
    """Return four chunks of the rows as one operand [128, ROWS]."""
    joined = tl.join(tl.join(a, b), tl.join(c, d))  # [32, rows, 2, 2]
    return tl.reshape(tl.permute(joined, (3, 2, 0, 1)), [128, ROWS])


@triton.jit
def _dot(
    w, chunks, acc, FIRST: tl.constexpr, RUN: tl.constexpr, SLICES: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of RUN chunks to acc. Of warps that share their rows, which go through shared
    memory, all chunks are multiplied at once."""
    if SLICES == 1 and RUN == 4:
        a, b = _arrange(chunks[0], 1, ROWS, True), _arrange(chunks[1], 1, ROWS, True)
        c, d = _arrange(chunks[2], 1, ROWS, True), _arrange(chunks[3], 1, ROWS, True)
        left = _beside(w[0], w[1], w[2], w[3], BLOCKS * 16)
        acc = tl.dot(left, _below(a, b, c, d, ROWS), acc, input_precision=PRECISION)
    else:
        for i in tl.static_range(FIRST, FIRST + RUN):
            value = _arrange(chunks[i], SLICES, ROWS, True)
            acc = tl.dot(w[i], value, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _add_totals(
    chunks, acc, FIRST: tl.constexpr, RUN: tl.constexpr, SLICES: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the sums of RUN chunks of the rows to acc, for each feature the same."""
    if SLICES == 1:
        ones = tl.full([BLOCKS * 16, 32], 1.0, DTYPE)
    else:
        ones = tl.full([SLICES, BLOCKS * 16, 32], 1.0, DTYPE)
    for i in tl.static_range(FIRST, FIRST + RUN):
        value = _arrange(chunks[i], SLICES, ROWS, False)
        acc = tl.dot(ones, value, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _zeros(SLICES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    if SLICES == 1:
        return tl.zeros([BLOCKS * 16, ROWS], tl.float32)
    else:  # noqa: RET505
        return tl.zeros([SLICES, BLOCKS * 16, ROWS], tl.float32)


@triton.jit
def _multiply_groups(
    acc, w, chunks, pairs, shifts, CUT: tl.constexpr, SCALES: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, SLICES: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of a step, whose CUT groups have a scale each, to acc."""
    run: tl.constexpr = 4 // CUT
    for cut in tl.static_range(CUT):
        sums = _zeros(SLICES, BLOCKS, ROWS)
        sums = _dot(w, chunks, sums, cut * run, run, SLICES, BLOCKS, ROWS, PRECISION)
        scale = _pick(pairs, cut, CUT, BLOCKS * SLICES * 32)
        acc += sums * _spread(scale, SCALES, SLICES, BLOCKS, ROWS)
        if HAS_OFFSETS:
            totals = _zeros(SLICES, BLOCKS, ROWS)
            totals = _add_totals(
                chunks, totals, cut * run, run, SLICES, BLOCKS, ROWS, DTYPE, PRECISION
            )
            shift = _pick(shifts, cut, CUT, BLOCKS * SLICES * 32)
            acc += totals * _spread(shift, tl.float32, SLICES, BLOCKS, ROWS)
    return acc


@triton.jit
def _load_step(
    codes, scales, offsets, first, apart, blocks, depth, end,
    INNER: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, PER: tl.constexpr,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, HALVES: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Load the words of a step, and its scales and offsets unless whole rows share them."""
    parts: tl.constexpr = 2 if CODES == "uint8" else 1
    depths: tl.constexpr = (INNER + 127) // 128
    each: tl.constexpr = BLOCKS // HALVES
    words = _load_words(
        codes, first, apart, blocks, depth, end, parts, depths, each, BLOCKS, SLICES
    )
    pairs, shifts = (), ()
    if GROUPS * CUT > 1:
        pairs = (
            _load_pairs(
                scales, first, apart, blocks, depth, end, PER, GROUPS, CUT, each, BLOCKS, SLICES
            ),
        )  # type: ignore[assignment]
        if offsets is not None:
            shifts = (
                _load_pairs(
                    offsets, first, apart, blocks, depth, end, PER, GROUPS, CUT,
                    each, BLOCKS, SLICES,
                ),
            )  # type: ignore[assignment]  # fmt: skip
    return words, pairs, shifts


@triton.jit
def load_ahead(
    codes, scales, offsets, first, apart, blocks, begin, end,
    INNER: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, PER: tl.constexpr,
    CODES: tl.constexpr, BLOCKS: tl.constexpr, HALVES: tl.constexpr, SLICES: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Load the steps that `multiply` begins with, and what scales whole rows. These are constants,
    so a program loads them before it waits for its rows."""
    each: tl.constexpr = BLOCKS // HALVES
    steps, whole = (), ()
    for a in tl.static_range(AHEAD):
        loaded = _load_step(
            codes, scales, offsets, first, apart, blocks, begin + a * SLICES, end,
            INNER, GROUPS, CUT, PER, CODES, BLOCKS, HALVES, SLICES,
        )  # fmt: skip
        steps += (loaded,)  # type: ignore[assignment]
    if GROUPS * CUT == 1:
        pairs = _load_pairs(
            scales, first, apart, blocks, 0, SLICES, SLICES, 1, 1, each, BLOCKS, SLICES
        )
        whole += (pairs,)  # type: ignore[assignment]
        if offsets is not None:
            shifts = _load_pairs(
                offsets, first, apart, blocks, 0, SLICES, SLICES, 1, 1, each, BLOCKS, SLICES
            )
            whole += (shifts,)  # type: ignore[assignment]
    return steps, whole


@triton.jit
def multiply(
    ahead, x, codes, scales, offsets, source, known, first, apart, blocks, begin, end, x_stride,
    INNER: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, PER: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, DECODER: tl.constexpr, SCALES: tl.constexpr,
    BLOCKS: tl.constexpr, HALVES: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows `source` of x, in the order of `row_of`, by blocks of a weight -> [features,
    ROWS] in float32.

    With HALVES, half of the blocks begin at `first`, and the others are `apart` from these; each
    half has `blocks` at most. Blocks at depths from begin to end are multiplied, SLICES at a time,
    each of which has its own warp. The weight is loaded AHEAD steps ahead of its use, for the first
    steps by `load_ahead`. Rows are loaded one step ahead or, if warps share them, copied to shared
    memory in STAGES.
    """
    parts: tl.constexpr = 2 if CODES == "uint8" else 1
    has_offsets: tl.constexpr = offsets is not None
    late: tl.constexpr = GROUPS * CUT == 1  # whole rows are scaled at the end
    steps, whole = ahead
    k = (tl.arange(0, ROWS * SLICES) // 8 % SLICES * 128)[:, None] + tl.arange(0, 32)[None, :]
    x_at, known = x + source.to(tl.int64)[:, None] * x_stride + k, known[:, None]
    if SLICES > 1:
        chunks = _load_rows(x_at, known, begin, end, INNER, SLICES, ROWS, DTYPE)
    acc = _zeros(SLICES, BLOCKS, ROWS)
    totals = acc
    for step in tl.range(begin, end, SLICES * AHEAD, num_stages=STAGES):
        next_steps = ()
        for a in tl.static_range(AHEAD):
            at = step + a * SLICES
            if SLICES == 1:
                chunks = _load_rows(x_at, known, at, end, INNER, SLICES, ROWS, DTYPE)
            else:
                next_chunks = _load_rows(x_at, known, at + SLICES, end, INNER, SLICES, ROWS, DTYPE)
            words, pairs, shifts = steps[a]
            w = ()
            for part in tl.static_range(parts):
                w += _decode(words[part], CODES, ZERO, DECODER, DTYPE, SLICES, BLOCKS)
            if late:
                acc = _dot(w, chunks, acc, 0, 4, SLICES, BLOCKS, ROWS, PRECISION)
                if has_offsets:
                    totals = _add_totals(
                        chunks, totals, 0, 4, SLICES, BLOCKS, ROWS, DTYPE, PRECISION
                    )
            else:
                acc = _multiply_groups(
                    acc, w, chunks, pairs[0], shifts[0] if has_offsets else None,
                    CUT, SCALES, has_offsets, SLICES, BLOCKS, ROWS, DTYPE, PRECISION,
                )  # fmt: skip
            loaded = _load_step(
                codes, scales, offsets, first, apart, blocks, at + SLICES * AHEAD, end,
                INNER, GROUPS, CUT, PER, CODES, BLOCKS, HALVES, SLICES,
            )  # fmt: skip
            next_steps += (loaded,)  # type: ignore[assignment]
            if SLICES > 1:
                chunks = next_chunks
        steps = next_steps
    if late:
        acc *= _spread(whole[0], SCALES, SLICES, BLOCKS, ROWS)
        if has_offsets:
            acc += totals * _spread(whole[1], tl.float32, SLICES, BLOCKS, ROWS)
    if SLICES == 1:
        return acc
    else:  # noqa: RET505
        return tl.sum(acc, axis=0)
