"""A KV cache in FP8 (e4m3) in plain torch: the definition of what every kernel stores and reads.

Pages then hold codes, one byte for each number. A key is stored as key / scale, rounded to the
nearest code and saturated, and it is read as its code's number times the scale; values have their
own scale. With MLA, the stored row is the key and its end is the value, so the scale of keys is
that of both.

The rule: every token attends to what is stored, also to its own key and value, which it has just
computed. So its result does not depend on which step stored the others.
"""

import torch
from torch import Tensor

from slotzero.kernels.quantized import FLOAT8, FLOAT8_MAX
from slotzero.kernels.types import Heads

CODES = torch.uint8
"""The dtype of pages that hold codes."""
NUM_SCALES = 2  # of a layer: of keys, and of values


def no_scales(num_layers: int) -> Tensor:
    """Return the scales of layers whose checkpoint has none: ones."""
    return torch.ones(num_layers, NUM_SCALES)


def to_codes(numbers: Tensor, scale: Tensor) -> Tensor:
    scaled = (numbers.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    return scaled.to(FLOAT8).view(CODES)


def from_codes(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(FLOAT8).float() * scale


def value_scale(scales: Tensor, heads: Heads) -> Tensor:
    """Return the scale of a layer's values."""
    return scales[0] if heads.mla is not None else scales[1]
