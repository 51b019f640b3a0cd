"""Gumbel noise for sampling, computed from a hash instead of a random number generator.

There is no state. The number for a vocabulary index is a hash of four 32-bit words (seed low, seed
high, position, index). So the noise of a row does not depend on other rows, their order, the
captured size, the device or earlier steps, and all ranks compute the same noise.

The rule: `kernels/cpu/sample.cpp` does the same integer arithmetic. torch has no unsigned 32-bit
multiplication, so words are int64 here, masked after each operation that can exceed 32 bits.

A uniform number has 23 bits and lies in the middle of its cell: u = (cell + 0.5) * 2^-23. This is
the finest grid on which float32 represents every point; with a 24th bit, the last u would round to
1, whose Gumbel number is infinite. The largest number is then 16.6, so a token that is 2^28 times
less likely than the most likely one is never chosen.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
STEP = 0x9E3779B9
KEY_STARTS = (0x243F6A88, 0x85A308D3)


def mix(word: Tensor) -> Tensor:
    """Mix 32-bit words with a bijection in which every input bit affects every output bit."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def row_keys(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Hash `seed` [rows, 2] and `position` [rows] to two words, [rows] int64 each.

    With only one word, two of 80,000 (seed, position) pairs would probably have the same noise.
    """
    words = (seed[:, 0], seed[:, 1], position)
    low, high = (torch.full_like(position, start, dtype=torch.int64) for start in KEY_STARTS)
    for word in words:
        unsigned = word.long() & WORD
        low = mix(((low ^ unsigned) + STEP) & WORD)
        high = mix(((high ^ unsigned) + STEP) & WORD)
    return low, high


def hash_words(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return the hash of every vocabulary index: [rows, vocab] int64 in [0, 2^32)."""
    low, high = row_keys(seed, position)
    index = torch.arange(vocab, dtype=torch.int64, device=seed.device)
    return mix((index + low[:, None]) & WORD) ^ high[:, None]


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return standard Gumbel numbers, [rows, vocab] float32. All are finite."""
    cell = (hash_words(seed, position, vocab) >> 9).to(torch.float32)
    uniform = (cell + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
