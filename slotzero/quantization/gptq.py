"""GPTQ weights, as AutoGPTQ and GPTQModel store them: integers of 4 or 8 bits, [in, out] and packed
along the input features.

With `desc_act`, a table (g_idx) says which group an input feature is in. The format `gptq` stores
every zero less one, and a zero of 0 borrows from its neighbours in the word; `gptq_v2` stores zeros
as they are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.method import (
    Method,
    TensorSource,
    WeightPart,
    finite,
    flag_of,
    group_of,
    is_layer_linear,
    matches,
    names_of,
    refuse_field,
    scale_dtype_of,
    settings_of,
    take,
)
from slotzero.quantization.words import num_words, unpack_words, words_around

FORMATS = ("gptq", "gptq_v2")
ONES = {4: 0x11111111, 8: 0x01010101}
"""A one for each zero in a word, by bits."""
ALL = slice(None)


@dataclass(frozen=True)
class GptqMethod(Method):
    bits: int
    group: int | None
    is_symmetric: bool
    has_order: bool  # desc_act
    stores_zeros_less_one: bool
    scale_dtype: torch.dtype
    only: tuple[str, ...] = ()  # parts of a layer that are quantised; empty: all
    ignored: tuple[str, ...] = ()

    name = "gptq"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        given = settings_of(config)
        bits, stored_as = given.get("bits"), given.get("checkpoint_format") or "gptq"
        if bits not in (4, 8):
            raise refuse_field("bits", bits, "4 or 8")
        if stored_as not in FORMATS:
            raise refuse_field("checkpoint_format", stored_as, " or ".join(FORMATS))
        if given.get("pack_dtype", "int32") != "int32":
            raise refuse_field("pack_dtype", given["pack_dtype"], "int32")
        for field in ("lm_head", "is_marlin_format"):
            if flag_of(given, field, False):
                raise refuse_field(field, True, "false")
        return cls(
            bits,
            group_of(given),
            flag_of(given, "sym", True),
            flag_of(given, "desc_act", False),
            stored_as == "gptq",
            scale_dtype_of(config),
            names_of(given, "modules_in_block_to_quantize"),
            names_of(given, "modules_to_not_convert") + _left_out(given),
        )

    def format_of(self, module: str) -> WeightFormat | None:
        if not is_layer_linear(module) or matches(module, self.ignored):
            return None
        if self.only and not matches(module, self.only):
            return None
        return self._format

    @property
    def _format(self) -> WeightFormat:
        return WeightFormat(
            "uint4" if self.bits == 4 else "uint8",
            self.group,
            zero=self._middle if self.is_symmetric else 0,
            has_offsets=not self.is_symmetric,
            is_scattered=self._is_scattered,
            scale_dtype=self.scale_dtype,
        )

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _is_scattered(self) -> bool:
        return self.has_order and self.group is not None

    def tensors(self, module: str) -> Mapping[str, bool]:
        fields = {"qweight": True, "qzeros": True, "scales": True, "g_idx": self._is_scattered}
        return {f"{module}.{field}": needed for field, needed in fields.items()}

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        num_rows, columns = part.shape
        name, shape = f"{module}.qweight", (num_words(columns, self.bits), num_rows)
        words = take(source, name, shape, ALL, part.rows, dtype=torch.int32)
        codes = unpack_words(words.T, self.bits)[:, :columns]
        name, shape = f"{module}.scales", (self._format.num_groups(columns), num_rows)
        stored = take(source, name, shape, ALL, part.rows)
        scales = finite(source, name, stored, self.scale_dtype).T
        zeros = self._read_zeros(source, module, part)
        order = self._read_order(source, module, columns)
        if not self.is_symmetric:
            return QuantizedRows(codes, scales, -zeros * scales, order)
        if (zeros != self._middle).any():
            raise CorruptCheckpointError(
                f"{source.name}: tensor {module}.qzeros holds zeros other than {self._middle}, "
                "although quantization_config has sym=true; fetch it again"
            )
        return QuantizedRows(codes, scales, group_of=order)

    def _read_zeros(self, source: TensorSource, module: str, part: WeightPart) -> Tensor:
        """Read the zeros of some rows, [rows, groups] in float32."""
        num_rows, columns = part.shape
        wanted = range(num_rows)[part.rows]
        held, place = words_around(wanted, self.bits)
        shape = self._format.num_groups(columns), num_words(num_rows, self.bits)
        words = take(source, f"{module}.qzeros", shape, ALL, held, dtype=torch.int32)
        if self.stores_zeros_less_one:
            words = words + ONES[self.bits]
        return unpack_words(words, self.bits)[:, place].T.float()

    def _read_order(self, source: TensorSource, module: str, columns: int) -> Tensor | None:
        """Read the group of each input feature; None if groups are consecutive."""
        name = f"{module}.g_idx"
        if not self._is_scattered and name not in source.names():
            return None
        groups = take(source, name, (columns,), dtype=torch.int32)
        if not self._is_scattered:
            if not torch.equal(groups, torch.arange(columns).int() // (self.group or columns)):
                raise CorruptCheckpointError(
                    f"{source.name}: tensor {name} reorders input features, although "
                    "quantization_config has desc_act=false; fetch it again"
                )
            return None
        last = self._format.num_groups(columns) - 1
        if groups.min() < 0 or groups.max() > last:
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} holds groups from {int(groups.min())} to "
                f"{int(groups.max())}, and there are those from 0 to {last}; fetch it again"
            )
        return groups


def _left_out(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the patterns of modules that `dynamic` leaves out (-:...); refuse other settings."""
    settings = given.get("dynamic") or {}
    if not isinstance(settings, Mapping):
        raise refuse_field("dynamic", settings, "a mapping")
    for pattern, changes in settings.items():
        if not pattern.startswith("-:"):
            raise refuse_field("dynamic", {pattern: changes}, "leaving modules out (-:...)")
    patterns = [f"re:{pattern.removeprefix('-:')}" for pattern in settings]
    return names_of({"dynamic": patterns}, "dynamic")
