"""Reading: fills a weight's tensors from a checkpoint, packed or plain.

It knows which stored tensors make up a weight; it does not know what the weight is for.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.contract import Kernels
from slotzero.kernels.quantized import QuantizedRows, join_rows, quantise
from slotzero.kernels.weights import WeightFormat
from slotzero.models.param import Param, Stored
from slotzero.models.stacks import StackedParam
from slotzero.quantization.method import TensorSource, check_plain, read_input_scale
from slotzero.quantization.quantization import Quantization

INPUT_SCALE = "input_scale"


class Filling(ABC):
    """Something that is filled at once, from some tensors of a checkpoint."""

    @property
    @abstractmethod
    def num_values(self) -> int: ...

    @abstractmethod
    def names(self) -> Iterator[tuple[str, bool]]:
        """Yield the tensors of the checkpoint that are read, and whether each must be there."""

    @abstractmethod
    def fill(self, checkpoint: TensorSource, kernels: Kernels) -> None: ...


@final
@dataclass(frozen=True)
class WeightFilling(Filling):
    """A weight of a layer, or of an expert of a layer: its tensors, and what they are made of."""

    stacked: StackedParam
    targets: Mapping[str, Tensor]
    stored: Sequence[Stored]
    quantization: Quantization

    @property
    def num_values(self) -> int:
        return sum(target.numel() for target in self.targets.values())

    def names(self) -> Iterator[tuple[str, bool]]:
        for one in self.stored:
            yield from stored_names(self.stacked, one, self.quantization).items()

    def fill(self, checkpoint: TensorSource, kernels: Kernels) -> None:
        format = self.stacked.format
        if format is None:
            (target,) = self.targets.values()
            read = _read(
                self.stacked.param, self.stored, checkpoint, kernels, self.quantization, target
            )
            target.copy_(read)
        else:
            device = self.targets["codes"].device
            rows = _read_rows(self.stored, checkpoint, self.quantization, format, device)
            put_fields(kernels.pack_quantized(rows, format), self.targets)


@final
@dataclass(frozen=True)
class SharedScaleFilling(Filling):
    """The largest scale of the inputs of a layer's experts, including those on other ranks, for all
    of them. So results do not depend on the number of ranks."""

    target: Tensor
    modules: Sequence[str]

    @property
    def num_values(self) -> int:
        return self.target.numel()

    def names(self) -> Iterator[tuple[str, bool]]:
        return ((f"{module}.{INPUT_SCALE}", True) for module in self.modules)

    def fill(self, checkpoint: TensorSource, kernels: Kernels) -> None:
        scales = [read_input_scale(checkpoint, module) for module in self.modules]
        self.target.copy_(torch.stack(scales).amax(0))


def fillings(
    params: Sequence[StackedParam], tensors: Mapping[str, Tensor], quantization: Quantization
) -> Iterator[Filling]:
    """Yield what must be filled, in order, so that all parameters are read into their tensors."""
    for stacked in params:
        for targets, stored in targets_of(stacked, tensors):
            yield WeightFilling(stacked, targets, stored, quantization)
        if stacked.param.whole_experts is not None and stacked.has_input_scale:
            scales = tensors[f"{stacked.name}.{INPUT_SCALE}"]
            for i, prefix in enumerate(stacked.prefixes or ("",)):
                modules = [one.module for one in stacked.param.of_all_ranks.stored(prefix)]
                yield SharedScaleFilling(scales if stacked.prefixes is None else scales[i], modules)


def stored_names(
    stacked: StackedParam, stored: Stored, quantization: Quantization
) -> Mapping[str, bool]:
    """Return the tensors that a checkpoint has for a source, and whether each must be there."""
    packed = None if stacked.param.columns is None else quantization.tensors(stored.module)
    return packed or {stored.name: True}


def targets_of(
    stacked: StackedParam, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], list[Stored]]]:
    """Yield the tensors that are filled at once, with the stored tensors they are made of.

    They are the fields of a quantised weight, or one tensor, of a layer, or, if the checkpoint
    stores experts one by one, of an expert of a layer.
    """
    format = stacked.format
    if format is None:
        parts = {"": tensors[stacked.name]}
    else:
        parts = {field: tensors[f"{stacked.name}.{field}"] for field in format.fields}
    for layer, expert, stored in read_together(stacked):
        targets = parts if stacked.prefixes is None else {f: t[layer] for f, t in parts.items()}
        if expert is not None:
            targets = {f: t if f == INPUT_SCALE else t[expert] for f, t in targets.items()}
        yield targets, stored


def read_together(stacked: StackedParam) -> Iterator[tuple[int, int | None, list[Stored]]]:
    """Yield the stored tensors that make up one weight, with its layer within the stack and its
    expert, if the checkpoint stores experts one by one."""
    param = stacked.param
    for layer, prefix in enumerate(stacked.prefixes or ("",)):
        stored = list(param.stored(prefix))
        if param.experts is None or param.is_joint:
            yield layer, None, stored
            continue
        size = len(param.sources)
        for expert in range(param.experts):
            yield layer, expert, stored[expert * size : (expert + 1) * size]


def check_stored(
    stacked: StackedParam, stored: Stored, checkpoint: TensorSource, quantization: Quantization
) -> None:
    """Raise if a source of a weight cannot be read as `fill` does."""
    if stacked.format is None or quantization.online is not None:
        _read_plain(stored, checkpoint, quantization)
    else:
        quantization.read_rows(checkpoint, stored.module, *stored.part, stacked.format)


def put_fields(packed: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy a quantised weight to its place. The experts of a layer share the largest scale of their
    inputs."""
    for field, target in targets.items():
        given = packed[field].to(target.device)
        target.copy_(torch.maximum(target, given) if field == INPUT_SCALE else given)


def _read_rows(
    stored: Sequence[Stored],
    checkpoint: TensorSource,
    quantization: Quantization,
    format: WeightFormat,
    device: torch.device,
) -> QuantizedRows:
    """Read the sources of a quantised weight and join them, row after row."""
    parts = []
    for one in stored:
        source, (part, columns) = one.source, one.part
        if quantization.online is not None:
            plain = _read_plain(one, checkpoint, quantization)
            rows = quantise(plain.to(device), format)
        else:
            rows = quantization.read_rows(checkpoint, one.module, part, columns, format).to(device)
        if source.order is not None:
            rows = rows.select(torch.tensor(source.order, device=device))
        if source.column_scales is not None:
            raise UnsupportedModelError(
                f"{checkpoint.name}: tensor {one.name} cannot be quantised, because its columns "
                "are scaled"
            )
        parts.append(rows if source.scale == 1 else rows.scaled(source.scale))
    return join_rows(parts, [one.name for one in stored])


def _read_plain(one: Stored, checkpoint: TensorSource, quantization: Quantization) -> Tensor:
    """Read a source as plain numbers, with rows before columns; unpack it if it is quantised."""
    if one.is_matrix and quantization.tensors(one.module) is not None:
        return quantization.read_dense(checkpoint, one.module, *one.part)
    before, after = ((slice(None),) * num for num in one.source.ones)
    wanted = *before, *(span.slice for span in one.spans), *after
    part, whole = checkpoint.read_part(one.name, *wanted)
    if tuple(whole) != one.shape:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {one.name} has shape {list(whole)}, but by its config it "
            f"must have shape {list(one.shape)}"
        )
    check_plain(checkpoint.name, one.name, part)
    part = part.reshape(part.shape[len(before) : part.dim() - len(after)])
    return part.transpose(1, 2) if one.is_joint and one.is_transposed and one.is_matrix else part


def _read(
    param: Param,
    stored: Sequence[Stored],
    checkpoint: TensorSource,
    kernels: Kernels,
    quantization: Quantization,
    target: Tensor,
) -> Tensor:
    if param.num_ones:
        return torch.ones_like(target)
    parts = []
    for one in stored:
        source, part = one.source, _read_plain(one, checkpoint, quantization)
        if param.is_conv:
            part = part.squeeze(1)
        if source.order is not None:
            part = part[:, source.order] if param.is_joint else part[source.order]
        if source.scale != 1:
            part = part.float() * source.scale
        if source.column_scales is not None:
            part = part.float() * torch.tensor(source.column_scales)
        if param.offset:
            part = part.float() + param.offset
        parts.append(part.to(target.device).to(target.dtype))  # convert on the device: faster
    joined = torch.cat(parts, dim=int(param.is_joint)) if len(parts) > 1 else parts[0]
    return joined if param.columns is None or not param.is_packed else kernels.pack(joined)
