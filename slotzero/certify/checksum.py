"""Checksums of a tensor's bits that depend on the position of every word.

A plain sum does not notice that two words, rows or blocks were exchanged. Here a row of words is
viewed as a matrix, and each line and each column of it is summed: a word that moves changes a line,
a column or both. There are few such sums, so mixing them with their position costs little. No
temporary is larger than a small fraction of the tensor. Arithmetic is on 64-bit integers that wrap
around, so the result is the same on every device, and NaN equals itself.

An exchange that keeps every line sum and every column sum goes unnoticed.
"""

from math import isqrt

import torch
from torch import Tensor

BLOCK = 1 << 12  # words of a tensor that are summed as one row
STEP = -7046029254386353131  # odd, as are all multipliers: none loses a bit
FOLD = 29


def checksum(tensor: Tensor) -> int:
    words = _words(tensor.contiguous().flatten())
    num_whole = len(words) // BLOCK
    whole, rest = words[: num_whole * BLOCK].view(-1, BLOCK), words[num_whole * BLOCK :]
    sums = [_of_rows(whole)] if num_whole else []
    if len(rest):
        sums.append(_of_rows(rest[None]))
    return int(_joined(torch.cat(sums)).item()) if sums else 0


def row_checksums(tensor: Tensor, axis: int) -> Tensor:
    """Return one checksum per index on `axis`, which is not the last one: [rows] int64."""
    words = _words(tensor.flatten(axis + 1))
    layers = words[None] if axis == 0 else words.flatten(0, axis - 1)  # [layers, rows, words]
    return _joined(_of_rows(layers).movedim(0, -1))


def _of_rows(words: Tensor) -> Tensor:
    """[..., rows, words] -> [..., rows]"""
    num_columns = _num_columns(words.shape[-1])
    matrix = words.view(*words.shape[:-1], -1, num_columns)
    columns = _joined(matrix.sum(-2, dtype=torch.int64))
    return columns.add_(_joined(matrix.sum(-1, dtype=torch.int64), num_columns))


def _joined(sums: Tensor, first: int = 0) -> Tensor:
    """[..., n] -> [...]: multiply each value by a number derived from its position, and sum."""
    positions = torch.arange(first + 1, first + 1 + sums.shape[-1], device=sums.device)
    return _mixed(sums).mul_(_mixed(positions) | 1).sum(-1)


def _mixed(values: Tensor) -> Tensor:
    """Carry high bits down, which a product alone never does."""
    values = values * STEP
    return values.bitwise_xor_(values >> FOLD)


def _num_columns(num_words: int) -> int:
    """Return a power of two that divides `num_words` and makes the matrix about square."""
    largest = num_words & -num_words
    return min(largest, 1 << (isqrt(num_words).bit_length() - 1))


def _words(tensor: Tensor) -> Tensor:
    """View the last axis as the largest integers that its length and alignment allow."""
    num_bytes = tensor.shape[-1] * tensor.itemsize
    start = tensor.storage_offset() * tensor.itemsize
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    size = next(n for n in sizes if num_bytes % n == 0 and start % n == 0)
    return tensor.view(sizes[size])
