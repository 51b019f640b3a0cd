"""The inner loop of products with quantised weights: codes are decoded in registers.

A format's scales are applied in one of two ways. By sums: a step of the loop lies within one group,
numbers are multiplied as they are decoded, which is exact, and the sum of the step is scaled. By
numbers: for smaller groups, each number is scaled, and rounded to the type of the rows.

The weight comes first in every product, so that decoded numbers can stay in registers, where matrix
units accept their first operand only.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels import quantized

BIAS = tl.constexpr(quantized.MXFP4_BIAS)
EXACT = tl.constexpr(128)  # float8 products that matrix units may add up in fewer bits than float32


@triton.jit
def _integers(codes, ZERO: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return bytes minus ZERO. They become the low bits of a large number, which is faster than a
    conversion; all steps are exact."""
    if DTYPE == tl.float16:  # noqa: SIM300
        return (codes | 0x6400).to(tl.float16, bitcast=True) - (1024 + ZERO)
    elif DTYPE == tl.bfloat16 and BITS == 4:  # noqa: RET505, SIM300
        return (codes | 0x4300).to(tl.bfloat16, bitcast=True) - (128 + ZERO)
    else:
        wide = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        return (wide - (8388608 + ZERO)).to(DTYPE)


@triton.jit
def _small_floats(codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, DTYPE: tl.constexpr):
    """Return numbers with so many bits of exponent and mantissa: their bits, in the place of
    another type's, times a power of two. It is exact, and faster than a conversion."""
    size: tl.constexpr = EXPONENT + MANTISSA
    sign: tl.constexpr = 1 << size
    if DTYPE == tl.float16:  # noqa: SIM300
        bits = ((codes & sign) << (15 - size)) | ((codes & (sign - 1)) << (10 - MANTISSA))
        return bits.to(tl.float16, bitcast=True) * 2.0 ** (16 - (1 << (EXPONENT - 1)))
    elif DTYPE == tl.bfloat16:  # noqa: RET505, SIM300
        bits = ((codes & sign) << (15 - size)) | ((codes & (sign - 1)) << (7 - MANTISSA))
        return bits.to(tl.bfloat16, bitcast=True) * 2.0 ** (128 - (1 << (EXPONENT - 1)))
    else:
        bits = ((codes & sign) << (31 - size)) | ((codes & (sign - 1)) << (23 - MANTISSA))
        return bits.to(tl.float32, bitcast=True) * 2.0 ** (128 - (1 << (EXPONENT - 1)))


@triton.jit
def decode(
    packed, ZERO: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the numbers [ROWS, COLUMNS] of bytes, exactly, before their scale. None is NaN: a
    checkpoint with a code for that is refused."""
    wide = packed.to(tl.int32 if DTYPE == tl.float32 else tl.int16)  # noqa: SIM300
    if CODES == "float8":
        return _small_floats(wide, 4, 3, DTYPE)
    elif CODES == "uint8":  # noqa: RET505
        return _integers(wide, ZERO, 8, DTYPE)
    elif CODES == "uint4":
        low, high = _integers(wide & 15, ZERO, 4, DTYPE), _integers(wide >> 4, ZERO, 4, DTYPE)
        return tl.reshape(tl.join(low, high), [ROWS, COLUMNS])
    else:
        tl.static_assert(CODES == "mxfp4")
        low, high = _small_floats(wide & 15, 2, 1, DTYPE), _small_floats(wide >> 4, 2, 1, DTYPE)
        return tl.reshape(tl.join(low, high), [ROWS, COLUMNS])


@triton.jit
def load_scales(scales, at, mask):
    """Load scales as float32. Bytes are exponents; no power of two is so small that it is zero."""
    if scales.dtype.element_ty == tl.uint8:
        power = tl.load(scales + at, mask=mask, other=0).to(tl.int32)
        bits = tl.where(power == 0, 1 << 22, power << 23)
        return bits.to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _spread(
    scales, n, inside, first, INNER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load the scale of each number of a step, [FEATURES, DEPTH], where it holds whole groups."""
    each: tl.constexpr = DEPTH // GROUP
    group = first // GROUP + tl.arange(0, each)
    known = inside & (group < GROUPS)[None, :]
    its = load_scales(scales, n[:, None] * GROUPS + group[None, :], known)
    return tl.reshape(tl.broadcast_to(its[:, :, None], [FEATURES, each, GROUP]), [FEATURES, DEPTH])


@triton.jit
def scaled(
    numbers, scales, offsets, group_of, n, inside, first, INNER: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EXACT_SCALES: tl.constexpr,
):  # fmt: skip
    """Scale each number of [FEATURES, DEPTH], in float32 unless scaling is exact."""
    if group_of is None and DEPTH % GROUP == 0:
        by = _spread(scales, n, inside, first, INNER, GROUP, GROUPS, FEATURES, DEPTH)
        if EXACT_SCALES:
            numbers *= by.to(numbers.dtype)
        else:
            numbers = numbers.to(tl.float32) * by
        if offsets is not None:
            numbers += _spread(offsets, n, inside, first, INNER, GROUP, GROUPS, FEATURES, DEPTH)
    else:
        k = first + tl.arange(0, DEPTH)
        group = k // GROUP
        if group_of is not None:
            group = tl.load(group_of + k, mask=k < INNER, other=0)
        at, known = n[:, None] * GROUPS + group[None, :], inside & (k < INNER)[None, :]
        numbers = numbers.to(tl.float32) * load_scales(scales, at, known)
        if offsets is not None:
            numbers += load_scales(offsets, at, known)
    return numbers


@triton.jit
def multiply(
    x, x_scales, codes, scales, offsets, group_of, source, known, n, inside, begin, end,
    x_stride, x_scale_stride,
    INNER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, X_GROUPS: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, PER_BYTE: tl.constexpr, BY_SUMS: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows `source` of x by rows n of a weight -> [FEATURES, ROWS] in float32.

    Rows that are not known, and rows of the weight that are not inside, are not read. With
    x_scales [X_GROUPS, rows], x holds codes in float8, as does the weight.
    """
    num_bytes: tl.constexpr = (INNER + PER_BYTE - 1) // PER_BYTE
    float8: tl.constexpr = x_scales is not None
    each_step: tl.constexpr = BY_SUMS and GROUPS > 1
    k, b = tl.arange(0, DEPTH), tl.arange(0, DEPTH // PER_BYTE)
    n, source = n.to(tl.int64), source.to(tl.int64)
    at = codes + n[:, None] * num_bytes + b[None, :]
    x_at = x + source[:, None] * x_stride + k[None, :]
    acc = tl.zeros([FEATURES, ROWS], tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    scale = tl.zeros([FEATURES], tl.float32)
    offset, x_scale = scale, totals
    if each_step:
        scale = load_scales(scales, n * GROUPS + begin // GROUP, inside)
        if offsets is not None:
            offset = load_scales(offsets, n * GROUPS + begin // GROUP, inside)
        if X_GROUPS > 1:
            x_scale = load_scales(x_scales, begin // GROUP * x_scale_stride + source, known)
    for first in tl.range(begin, end, DEPTH, num_stages=STAGES):
        here, there = known[:, None], inside[:, None]
        if not EVEN:
            here = here & (first + k < INNER)[None, :]
            there = there & (first // PER_BYTE + b < num_bytes)[None, :]
        packed = tl.load(at + first // PER_BYTE, mask=there, other=0)
        if float8:
            value = tl.load(x_at + first, mask=here, other=0).to(tl.float8e4nv, bitcast=True)
            w = packed.to(tl.float8e4nv, bitcast=True)
        else:
            value = tl.load(x_at + first, mask=here, other=0.0).to(DTYPE)
            w = decode(packed, ZERO, CODES, DTYPE, FEATURES, DEPTH)
            if not BY_SUMS:
                exact: tl.constexpr = CODES == "mxfp4" and DTYPE == tl.bfloat16  # noqa: SIM300
                w = scaled(
                    w, scales, offsets, group_of, n, inside[:, None], first,
                    INNER, GROUP, GROUPS, FEATURES, DEPTH, exact,
                ).to(DTYPE)  # fmt: skip
        if each_step:
            after = (first + DEPTH) // GROUP  # loaded a step ahead, which the compiler does not do
            more = tl.zeros([1], tl.int32) + first + DEPTH < end
            next_scale = load_scales(scales, n * GROUPS + after, inside & more)
            # at most EXACT products, which are added to the others in float32
            part = tl.dot(w, tl.trans(value), input_precision=PRECISION)
            if X_GROUPS > 1:
                next_x = load_scales(x_scales, after * x_scale_stride + source, known & more)
                part *= x_scale[None, :]
                x_scale = next_x
            acc += part * scale[:, None]
            if offsets is not None:
                acc += offset[:, None] * tl.sum(value.to(tl.float32), axis=1)[None, :]
                offset = load_scales(offsets, n * GROUPS + after, inside & more)
            scale = next_scale
        elif float8:
            acc = tl.dot(w, tl.trans(value), acc, max_num_imprecise_acc=min(DEPTH, EXACT))
        else:
            acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
            if BY_SUMS and offsets is not None:
                totals += tl.sum(value.to(tl.float32), axis=1)
    if BY_SUMS and GROUPS == 1:
        acc *= load_scales(scales, n, inside)[:, None]
        if offsets is not None:
            acc += load_scales(offsets, n, inside)[:, None] * totals[None, :]
    if float8 and X_GROUPS == 1:
        acc *= load_scales(x_scales, source, known)[None, :]
    return acc
