"""FP8 (e4m3) weights: in blocks of 128 by 128 (DeepSeek-V3, Qwen3-FP8), or with one scale each.

A block's scale is repeated for each of its rows: then rows can be reordered, joined and shared out
without regard to blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import Activations, WeightFormat
from slotzero.quantization.method import (
    Layout,
    Method,
    TensorSource,
    WeightPart,
    finite,
    is_count,
    is_layer_linear,
    matches,
    names_of,
    read_input_scale,
    refuse_field,
    settings_of,
    take,
    take_one,
)

NOT_A_NUMBER = 0x7F  # with either sign
Block = tuple[int, int]
"""Rows and columns that share a scale."""


@dataclass(frozen=True)
class Fp8Layout(Layout):
    activations: Activations
    block: Block | None = None
    is_per_row: bool = False  # one scale per row; if neither this nor a block, one per tensor
    scale: str = "weight_scale"

    @property
    def format(self) -> WeightFormat:
        group = None if self.block is None else self.block[1]
        return WeightFormat("float8", group, activations=self.activations)

    def tensors(self, module: str) -> Mapping[str, bool]:
        fields = ["weight", self.scale]
        if self.activations == "float8_static":
            fields.append("input_scale")
        return {f"{module}.{field}": True for field in fields}

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        name = f"{module}.weight"
        codes = take(source, name, part.shape, part.rows, slice(None))
        if codes.dtype is not torch.float8_e4m3fn:
            raise UnsupportedModelError(
                f"{source.name}: tensor {name} is {codes.dtype}: implemented is float8_e4m3fn; "
                "list the module among those that are not converted if it is not quantised"
            )
        codes = codes.view(torch.uint8)
        if (codes & NOT_A_NUMBER == NOT_A_NUMBER).any():
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} holds a number that is not finite; fetch it again"
            )
        scales = self._read_scales(source, module, part)
        is_static = self.activations == "float8_static"
        input_scale = read_input_scale(source, module) if is_static else None
        return QuantizedRows(codes, scales, input_scale=input_scale)

    def _read_scales(self, source: TensorSource, module: str, part: WeightPart) -> Tensor:
        (num_rows, columns), name = part.shape, f"{module}.{self.scale}"
        rows = torch.arange(num_rows)[part.rows]
        if self.block is not None:
            height, width = self.block
            shape = -(-num_rows // height), -(-columns // width)
            stored = take(source, name, shape, of=f"{module}.weight")
            return finite(source, name, stored)[rows // height]
        if self.is_per_row:
            return finite(source, name, take(source, name, (num_rows, 1)))[rows]
        return finite(source, name, take_one(source, name)).expand(len(rows), 1)


@dataclass(frozen=True)
class Fp8Method(Method):
    layout: Fp8Layout
    ignored: tuple[str, ...] = ()
    kv_cache_scheme: bool = False

    name = "fp8"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        given = settings_of(config)
        scheme = given.get("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise refuse_field("activation_scheme", scheme, "dynamic or static")
        if given.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise refuse_field("fmt", given["fmt"], "e4m3")
        block, cache = given.get("weight_block_size"), given.get("kv_cache_scheme")
        if cache not in (None, "static"):
            raise refuse_field("kv_cache_scheme", cache, "static")
        has_cache = cache is not None
        ignored = names_of(given, "modules_to_not_convert") + names_of(given, "ignored_layers")
        if block is None:
            layout = Fp8Layout("float8_static" if scheme == "static" else "float8_row")
            return cls(layout, ignored, has_cache)
        if scheme == "static":
            raise refuse_field("activation_scheme", scheme, "dynamic, where weights are in blocks")
        size = block_of(block, "weight_block_size")
        return cls(Fp8Layout("float8_group", size, scale="weight_scale_inv"), ignored, has_cache)

    def format_of(self, module: str) -> WeightFormat | None:
        if not is_layer_linear(module) or matches(module, self.ignored):
            return None
        return self.layout.format

    def tensors(self, module: str) -> Mapping[str, bool]:
        return self.layout.tensors(module)

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        return self.layout.read(source, module, part)


def block_of(given: object, field: str) -> Block:
    if not isinstance(given, list | tuple) or len(given) != 2 or not all(map(is_count, given)):
        raise refuse_field(field, given, "two positive numbers")
    return given[0], given[1]
