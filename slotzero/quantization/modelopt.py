"""FP8 weights of NVIDIA's Model Optimizer: one scale for a weight and one for its input.

It writes quant_method "modelopt" for each of its formats; quant_algo tells them apart. A checkpoint
may also have plain weights, and ask for nothing but a KV cache in FP8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.fp8 import Fp8Layout
from slotzero.quantization.method import (
    Method,
    TensorSource,
    WeightPart,
    has_float8_cache,
    is_layer_linear,
    matches,
    names_of,
    refuse_field,
    settings_of,
)

LAYOUT = Fp8Layout("float8_static")


@dataclass(frozen=True)
class ModelOptMethod(Method):
    ignored: tuple[str, ...] = ()
    has_weights: bool = True
    """Weights are in FP8."""
    kv_cache_scheme: bool = False
    """The KV cache is to be kept in float8."""

    name = "modelopt"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        given = settings_of(config)
        inner = given.get("quantization")  # in files from hf_quant_config.json
        if isinstance(inner, Mapping):
            given = inner
        algorithm, cache = given.get("quant_algo"), given.get("kv_cache_quant_algo")
        if cache not in (None, "FP8"):
            raise refuse_field("kv_cache_quant_algo", cache, "FP8")
        has_cache = cache == "FP8" or has_float8_cache(given)
        if algorithm != "FP8" and not (algorithm is None and has_cache):
            raise refuse_field("quant_algo", algorithm, "FP8")
        return cls(
            names_of(given, "ignore") + names_of(given, "exclude_modules"),
            algorithm is not None,
            has_cache,
        )

    def format_of(self, module: str) -> WeightFormat | None:
        if not self.has_weights or not is_layer_linear(module) or matches(module, self.ignored):
            return None
        return LAYOUT.format

    def tensors(self, module: str) -> Mapping[str, bool]:
        return LAYOUT.tensors(module)

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        return LAYOUT.read(source, module, part)
