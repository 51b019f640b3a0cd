"""Weights of linear layers: dense ones, quantised ones, and several side by side.

Kernels take a weight whole. Models never look inside one.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Codes = Literal["uint4", "uint8", "float8", "mxfp4"]
"""How one number of a quantised weight is stored. A byte holds one code, or two of uint4 and mxfp4.
float8 is e4m3; mxfp4 is e2m1, and its scales are bytes too: powers of two, biased by 127."""

Activations = Literal["plain", "float8_row", "float8_group", "float8_static"]
"""How the input of a linear layer is rounded before the product: not at all; to float8 with one
scale per token; with one per token and group of input features; with one from the checkpoint."""


@dataclass(frozen=True)
class WeightFormat:
    """The storage format of a quantised weight [out_features, in_features].

    A number is (code - zero) * scale + offset, with a scale (and offset) for each output feature
    and group of input features.
    """

    codes: Codes
    group: int | None = None  # input features that share a scale; None: whole rows
    zero: int = 0
    has_offsets: bool = False
    has_half_offsets: bool = False  # float16 holds the offsets exactly
    is_scattered: bool = False
    """A table says which group an input feature is in (GPTQ's desc_act). Otherwise groups are
    consecutive."""
    groups: int | None = None  # number of groups, if they are scattered
    scale_dtype: torch.dtype = torch.float32  # as stored; uint8 for mxfp4
    activations: Activations = "plain"

    @property
    def bits(self) -> int:
        return 4 if self.codes in ("uint4", "mxfp4") else 8

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields of QuantizedWeight that are tensors of the weight."""
        return tuple(self.shapes(1, 1))

    def num_groups(self, in_features: int) -> int:
        if self.group is None:
            return 1
        return self.groups or -(-in_features // self.group)

    def shapes(
        self, out_features: int, in_features: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each tensor of a weight, by field of QuantizedWeight, in the
        plain layout: codes in rows, two 4-bit codes per byte with the earlier one in the low half.
        """
        groups = out_features, self.num_groups(in_features)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((out_features, -(-in_features * self.bits // 8)), torch.uint8),
            "scales": (groups, self.scale_dtype),
        }
        if self.has_offsets:
            shapes["offsets"] = (groups, torch.float32)
        if self.is_scattered:
            shapes["group_of"] = ((in_features,), torch.int32)
        if self.activations == "float8_static":
            shapes["input_scale"] = ((1,), torch.float32)
        return shapes


class DenseWeight(NamedTuple):
    """A weight in the compute type, in the kernel set's packed layout.

    The experts of a layer are one weight whose tensors have an axis of experts before the others;
    so it is with quantised ones.
    """

    data: Tensor  # packed [out_features, in_features]
    bias: Tensor | None  # [out_features]
    out_features: int

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


class QuantizedWeight(NamedTuple):
    """A quantised weight, in the kernel set's layout of WeightFormat.shapes."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None  # [out_features]
    out_features: int
    in_features: int
    dtype: torch.dtype  # of the layer's result
    format: WeightFormat
    offsets: Tensor | None = None
    group_of: Tensor | None = None  # [in_features]: the group of each input feature
    input_scale: Tensor | None = None  # [1], one for all experts


class JoinedWeight(NamedTuple):
    """Weights of different formats that have the same input, one after the other along the output
    features."""

    parts: tuple[DenseWeight | QuantizedWeight, ...]
    out_features: int

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype


LinearWeight = DenseWeight | QuantizedWeight | JoinedWeight
