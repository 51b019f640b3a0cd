"""Tests of tensor checksums: every moved or changed bit is noticed, in every dtype and layout."""

import pytest
import torch
from torch import Tensor

from slotzero.certify.checksum import BLOCK, checksum, row_checksums

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)


def random_bits(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a tensor of random bits, including NaN."""
    generator = torch.Generator().manual_seed(seed)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype)


def exchanged(tensor: Tensor, first: slice, second: slice) -> Tensor:
    """Return a copy in which two parts of the first axis are exchanged."""
    changed = tensor.clone()
    changed[first], changed[second] = tensor[second].clone(), tensor[first].clone()
    return changed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(7, 3), (96, 64), (301, 129)])
def test_exchanged_rows_are_noticed(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight = random_bits(rows, columns, dtype=dtype)
    for other in {1, rows // 2, rows - 1}:
        moved = exchanged(weight, slice(0, 1), slice(other, other + 1))
        assert checksum(moved) != checksum(weight)


@pytest.mark.parametrize("size", [1, 2, 64, BLOCK // 2, BLOCK, 2 * BLOCK])
def test_exchanged_blocks_of_any_size_are_noticed(size: int) -> None:
    """This includes blocks that end with a row of words, so that one of the two sums is
    unchanged."""
    weight = random_bits(8 * BLOCK, dtype=torch.float32)
    moved = exchanged(weight, slice(0, size), slice(4 * BLOCK, 4 * BLOCK + size))
    assert checksum(moved) != checksum(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_differ_only_in_sign_have_different_checksums(dtype: torch.dtype) -> None:
    """The sign is the highest bit, which a multiplication by an even number would lose."""
    weight = torch.ones(64, 64, dtype=dtype)
    weight[3] = -1
    assert checksum(exchanged(weight, slice(3, 4), slice(40, 41))) != checksum(weight)
    weight = torch.ones(4096, dtype=dtype)
    weight[7] = -1  # the highest bit of a 64-bit word
    for other in (3, 15, 71, 1023, 4095):
        moved = exchanged(weight, slice(7, 8), slice(other, other + 1))
        assert checksum(moved) != checksum(weight), other


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    weight = random_bits(33, 5, dtype=dtype)
    before, flat = checksum(weight), weight.view(torch.uint8).flatten()
    for byte in (0, len(flat) // 2, len(flat) - 1):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert checksum(weight) != before
            flat[byte] ^= 1 << bit
    assert checksum(weight) == before


def test_the_address_of_a_tensor_does_not_matter() -> None:
    """One view is not aligned to whole words, and one is not contiguous."""
    weight = random_bits(40, 6, dtype=torch.bfloat16)
    padded = torch.zeros(1 + weight.numel(), dtype=weight.dtype)
    padded[1:] = weight.flatten()
    before = checksum(padded[1:])
    assert checksum(exchanged(padded, slice(1, 7), slice(7, 13))[1:]) != before
    assert checksum(padded[1:].view_as(weight)) == before
    assert checksum(weight.t()) == checksum(weight.t().contiguous())
    assert checksum(weight[:0]) == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_a_table_have_separate_checksums(axis: int) -> None:
    pages = random_bits(3, 10, 16, 2, 24, dtype=torch.bfloat16).movedim(1, axis).contiguous()
    before = row_checksums(pages, axis)
    assert before.shape == (10,)
    assert len(before.unique()) == 10
    by_page = pages.movedim(axis, 0)
    kept = by_page.clone()
    for what in (
        (slice(4, 5), 0, slice(0, 2)),  # the heads of two tokens, in one layer of page 4
        (slice(4, 5), 2, slice(7, 9)),
    ):
        by_page[what] = kept[what].flip(2)
        assert (row_checksums(pages, axis) != before).nonzero().flatten().tolist() == [4]
        by_page.copy_(kept)
    by_page[4] = kept[4].flip(0)
    assert (row_checksums(pages, axis) != before).nonzero().flatten().tolist() == [4]
    by_page[[2, 5]] = kept[[5, 2]]
    by_page[4] = kept[4]
    assert (row_checksums(pages, axis) != before).nonzero().flatten().tolist() == [2, 5]
