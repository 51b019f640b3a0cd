"""PTX that decodes a word of a fragment (`fragments.py`): the codes of both half words at once.

Masks and shifts bring codes into the low bits of a large number, or the bits of a small float to
their places in a larger one. A multiply-add on both halves then removes the large number, or
restores the exponent. All steps are exact.
"""

import functools

import torch

from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.weights import WeightFormat

OR, XOR = "0xEA", "0x6A"  # of lop3: (a & b) | c, and (a & b) ^ c
SIGNS = 0x8000
LARGE = {torch.bfloat16: 0x4300, torch.float16: 0x6400}  # whose last bit is worth 1: 128 and 1024
ONE = {torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
BIG = {torch.bfloat16: 0x7E80, torch.float16: 0x7400}  # restores mxfp4's exponent: 2^126 and 2^14
KIND = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}


@functools.cache
def decoder(format: WeightFormat, dtype: torch.dtype) -> str | None:
    """Return PTX whose outputs are the numbers of the first codes of both half words, of the
    second codes, and so on; or None where plain arithmetic decodes."""
    if INTERPRETED or dtype not in KIND:
        return None
    match format.codes:
        case "uint4":
            steps = [_uint4(i, format.zero, dtype) for i in range(4)]
        case "uint8":
            steps = [_uint8(i, format.zero, dtype) for i in range(2)]
        case _:
            steps = [_mxfp4(i, dtype) for i in range(4)]
    lines = [f"mov.b32 w, ${2 * len(steps)};", f"mov.b32 one, {_twice(ONE[dtype])};"]
    for i, step in enumerate(steps):
        lines += [*step, f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, a;"]
    return "\n".join(["{", ".reg .b32 w, a, b, c, one;", *lines, "}"])


def _uint4(i: int, zero: int, dtype: torch.dtype) -> list[str]:
    large = LARGE[dtype]
    return [
        f"shr.u32 b, w, {4 * i};",
        f"lop3.b32 a, b, {_twice(0xF)}, {_twice(large)}, {OR};",
        _add(SIGNS | large | zero, dtype),
    ]


def _uint8(i: int, zero: int, dtype: torch.dtype) -> list[str]:
    """Codes are stored as signed numbers. bfloat16 holds 7 of their bits beside a large number; the
    sign makes it 128 or 256 that is subtracted."""
    large, lines = LARGE[dtype], [f"shr.u32 b, w, {8 * i};"]
    if dtype is torch.float16:
        lines.append(f"lop3.b32 a, b, {_twice(0xFF)}, {_twice(large | 0x80)}, {XOR};")
        return [*lines, _add(SIGNS | large | zero, dtype)]
    lines += [
        f"lop3.b32 a, b, {_twice(0x7F)}, {_twice(large)}, {OR};",
        f"lop3.b32 b, b, {_twice(0x80)}, {_twice(SIGNS | large)}, {OR};",
        "fma.rn.bf16x2 a, a, one, b;",
    ]
    moved = torch.tensor(128 - zero, dtype=dtype).view(torch.int16).item()
    return [*lines, _add(int(moved) & 0xFFFF, dtype)] if zero != 128 else lines


def _mxfp4(i: int, dtype: torch.dtype) -> list[str]:
    if i < 3:
        lines = [f"shl.b32 a, w, {3 * i};", f"and.b32 a, a, {_twice(0x81C0)};"]
    else:
        lines = [
            "shl.b32 a, w, 1;",
            f"and.b32 a, a, {_twice(0x8000)};",
            "shr.u32 b, w, 5;",
            f"lop3.b32 a, b, {_twice(0x0140)}, a, {OR};",
            "shr.u32 b, w, 3;",
            f"lop3.b32 a, b, {_twice(0x0080)}, a, {OR};",
        ]
    if dtype is torch.float16:
        lines += [
            f"and.b32 b, a, {_twice(0x01C0)};",
            "shl.b32 b, b, 3;",
            f"lop3.b32 a, a, {_twice(SIGNS)}, b, {OR};",
        ]
    minus_zero = f"mov.b32 c, {_twice(SIGNS)};"  # keeps the sign of a zero
    lines += [f"mov.b32 b, {_twice(BIG[dtype])};", minus_zero]
    return [*lines, f"fma.rn.{KIND[dtype]} a, a, b, c;"]


def _add(bits: int, dtype: torch.dtype) -> str:
    return f"mov.b32 c, {_twice(bits)}; fma.rn.{KIND[dtype]} a, a, one, c;"


def _twice(bits: int) -> str:
    """Return the bits of a half word, twice in a word."""
    return f"0x{bits << 16 | bits:08X}"
