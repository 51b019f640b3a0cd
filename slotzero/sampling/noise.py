"""The noise of sampling: Gumbel numbers that are computed from a hash, not drawn.

There is no generator and no state. The number for a vocabulary index is a hash of four 32-bit words
(seed low, seed high, position, index), so a row's noise does not depend on its neighbours, on the
bucket, on the order of rows, on the device or on what ran before, and every rank of a parallel
group computes the same one.

The rule: `kernels/cpu/sample.cpp` does the same integer arithmetic. torch has no unsigned 32-bit
multiply, so words live in int64 here and are masked back after each step that can leave 32 bits.

A uniform number has 23 bits and sits in the middle of its cell: u = (cell + 0.5) * 2^-23. That is
the finest grid of which float32 holds every point; a 24th bit would round the last u to 1, whose
Gumbel number is infinite. The largest one is then 16.6, so a token 2^28 times less likely than
the likeliest is never chosen.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
STEP = 0x9E3779B9
KEY_STARTS = (0x243F6A88, 0x85A308D3)


def mix(word: Tensor) -> Tensor:
    """Mix 32-bit words by a bijection in which every input bit affects every output bit."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def row_keys(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Fold seed [rows, 2] and position [rows] into two words: [rows] each, int64.

    Two, because with one word 80,000 (seed, position) pairs would already share a noise row.
    """
    words = (seed[:, 0], seed[:, 1], position)
    low, high = (torch.full_like(position, start, dtype=torch.int64) for start in KEY_STARTS)
    for word in words:
        unsigned = word.long() & WORD
        low = mix(((low ^ unsigned) + STEP) & WORD)
        high = mix(((high ^ unsigned) + STEP) & WORD)
    return low, high


def hash_words(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return the hash for every vocabulary index: [rows, vocab] int64 in [0, 2^32)."""
    low, high = row_keys(seed, position)
    index = torch.arange(vocab, dtype=torch.int64, device=seed.device)
    return mix((index + low[:, None]) & WORD) ^ high[:, None]


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Return standard Gumbel numbers, [rows, vocab] float32; always finite."""
    cell = (hash_words(seed, position, vocab) >> 9).to(torch.float32)
    uniform = (cell + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
