"""Codes of 4 or 8 bits packed into words of 32 bits, the earlier ones in the lower bits."""

import torch
from torch import Tensor

from slotzero.kernels.quantized import unpack_pairs


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [..., words] to uint8 [..., words * 32 / bits]."""
    # A copy: `contiguous` leaves the stride of an axis of one word as it is, and view refuses it.
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return codes if bits == 8 else unpack_pairs(codes, 2 * codes.shape[-1])


def words_around(wanted: range, bits: int) -> tuple[slice, slice]:
    """Return the words that hold some codes, and the place of these codes among those of the
    words."""
    per_word = 32 // bits
    first, last = wanted.start // per_word, -(-wanted.stop // per_word)
    start = wanted.start - first * per_word
    return slice(first, last), slice(start, start + len(wanted))


def num_words(num_codes: int, bits: int) -> int:
    return -(-num_codes * bits // 32)
