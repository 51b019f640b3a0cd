"""Checkpoints in memory, for tests of quantisation methods and of loading."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import CorruptCheckpointError
from slotzero.graph import Registry
from slotzero.kernels.quantized import QuantizedRows, dequantise
from slotzero.kernels.reference import ReferenceKernels
from slotzero.models.checkpoint import Checkpoint, CheckpointView
from slotzero.models.families.family import parse_config
from slotzero.models.weight_store import WeightStore
from slotzero.models.weights import load_weights
from slotzero.quantization.method import CACHE_SCALES, Method, WeightPart

MODULE = "model.layers.0.mlp.up_proj"


class MemorySource:
    """Tensors by name. Those of one module may be given by the ends of their names."""

    name = "memory"

    def __init__(self, tensors: Mapping[str, Tensor], module: str = "") -> None:
        prefix = f"{module}." if module else ""
        self.tensors = {prefix + name: tensor for name, tensor in tensors.items()}

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise CorruptCheckpointError(f"{self.name} has no tensor {name}")
        return self.tensors[name]

    def read_part(self, name: str, *wanted: slice) -> tuple[Tensor, tuple[int, ...]]:
        tensor = self.read(name)
        whole = tuple(tensor.shape)
        return (tensor[wanted] if len(whole) == len(wanted) else tensor[:0]), whole

    def replaced(self, **tensors: Tensor | None) -> "MemorySource":
        """Return a copy in which MODULE has other tensors; None removes one."""
        changed = self.tensors | {f"{MODULE}.{name}": t for name, t in tensors.items()}
        return MemorySource({name: t for name, t in changed.items() if t is not None})


def read_rows(
    method: Method, source: MemorySource, shape: tuple[int, int], rows: slice = slice(None)
) -> QuantizedRows:
    return method.read(source, MODULE, WeightPart(rows, shape))


def read_numbers(method: Method, source: MemorySource, shape: tuple[int, int]) -> Tensor:
    """Read and dequantise a whole weight. Check that every needed tensor is declared, that parts of
    its rows agree with the whole, and that the tensors are those of the format."""
    format = method.format_of(MODULE)
    assert format is not None
    declared = method.tensors(MODULE)
    assert set(source.names()) <= declared.keys()
    for name in (name for name, needed in declared.items() if needed):
        with pytest.raises(CorruptCheckpointError, match=name):
            rest = {other: t for other, t in source.tensors.items() if other != name}
            read_rows(method, MemorySource(rest), shape)
    whole = read_rows(method, source, shape)
    assert whole.codes.dtype is torch.uint8
    assert whole.codes.shape == shape
    assert whole.scales.shape == (shape[0], format.num_groups(shape[1]))
    assert (whole.offsets is not None) == format.has_offsets
    assert (whole.group_of is not None) == format.is_scattered
    assert (whole.input_scale is not None) == (format.activations == "float8_static")
    numbers = dequantise(whole, format)
    for rows in (slice(0, 1), slice(3, 12), slice(8, 16), slice(shape[0] - 5, shape[0])):
        part = dequantise(read_rows(method, source, shape, rows), format)
        assert torch.equal(part, numbers[rows])
    return numbers


class PackedCheckpoint(CheckpointView):
    """A checkpoint in which the chosen modules are quantised.

    `pack` returns the tensors of a weight by the ends of their names.
    """

    def __init__(
        self,
        stored: Checkpoint,
        settings: Mapping[str, Any],
        chosen: Callable[[str], bool],
        pack: Callable[[tuple[int, ...]], Mapping[str, Tensor]],
    ) -> None:
        super().__init__(stored)
        self.config = {**stored.config, "quantization_config": settings}
        self.tensors: dict[str, Tensor] = {}
        for name in stored.names():
            module, tensor = name.removesuffix(".weight"), stored.read(name)
            if chosen(module) and not name.endswith(CACHE_SCALES):
                made = pack(tuple(tensor.shape))
                self.tensors |= {module + end: value for end, value in made.items()}
            else:
                self.tensors[name] = tensor

    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def load(checkpoint: Checkpoint, ranks: Ranks = ALONE) -> Registry:
    """Load the weights of one rank."""
    registry = Registry(torch.device("cpu"))
    load_weights(
        parse_config(checkpoint.config),
        checkpoint,
        WeightStore(registry, ReferenceKernels(), torch.float32),
        lambda done, total: None,
        ranks=ranks,
    )
    return registry
