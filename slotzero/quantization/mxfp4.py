"""MXFP4, the format of gpt-oss's experts: blocks of 32 four-bit numbers, each with a power of two.

One tensor holds all experts of a layer, output features before input features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.quantized import QuantizedRows, unpack_pairs
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.method import (
    Method,
    TensorSource,
    WeightPart,
    matches,
    names_of,
    settings_of,
    take,
)

GROUP = 32
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")
NOT_A_NUMBER = 255
FORMAT = WeightFormat("mxfp4", GROUP, scale_dtype=torch.uint8)


@dataclass(frozen=True)
class Mxfp4Method(Method):
    ignored: tuple[str, ...] = ()

    name = "mxfp4"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        return cls(names_of(settings_of(config), "modules_to_not_convert"))

    def format_of(self, module: str) -> WeightFormat | None:
        is_packed = module.endswith(EXPERTS) and not matches(module, self.ignored)
        return FORMAT if is_packed else None

    def tensors(self, module: str) -> Mapping[str, bool]:
        return {f"{module}_blocks": True, f"{module}_scales": True}

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        (num_rows, columns), experts = part.shape, part.experts or slice(None)
        shape = part.num_experts, num_rows, FORMAT.num_groups(columns)
        name, wanted = f"{module}_blocks", (experts, part.rows, slice(None), slice(None))
        blocks = take(source, name, (*shape, GROUP // 2), *wanted, dtype=torch.uint8)
        name = f"{module}_scales"
        scales = take(source, name, shape, *wanted[:3], dtype=torch.uint8)
        if (scales == NOT_A_NUMBER).any():
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} holds a scale that is not a number; fetch it again"
            )
        return QuantizedRows(unpack_pairs(blocks.flatten(-2), columns), scales)
