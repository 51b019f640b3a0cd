"""Words of codes: whatever the strides of the words, and whichever codes are wanted."""

import pytest
import torch

from slotzero.quantization.words import num_words, unpack_words, words_around


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 4), (2, 3, 4)])
def test_codes_do_not_depend_on_strides(bits: int, shape: tuple[int, ...]) -> None:
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    shifts = torch.arange(0, 32, bits)
    expected = (words.long()[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
    assert torch.equal(unpack_words(words, bits).long(), expected)
    turned = words.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(unpack_words(turned, bits).long(), expected)
    part = torch.stack((words, words), dim=-1)[..., 0]
    assert torch.equal(unpack_words(part, bits).long(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_around_codes_hold_all_of_them_and_no_word_too_many(bits: int) -> None:
    codes = list(range(64))
    per_word = 32 // bits
    for first in range(64):
        for last in range(first + 1, 65):
            held, place = words_around(range(first, last), bits)
            assert codes[held.start * per_word : held.stop * per_word][place] == codes[first:last]
            assert held.stop - held.start <= num_words(last - first, bits) + 1
            assert held.stop <= num_words(64, bits)
