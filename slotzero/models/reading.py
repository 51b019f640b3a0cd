"""Reading: fills a weight's tensors from a checkpoint, packed or plain.

It knows which stored tensors make up a weight; it does not know what the weight is for.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.contract import Kernels
from slotzero.kernels.quantized import QuantizedRows, join_rows, quantise
from slotzero.kernels.weights import WeightFormat
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.param import Param, Stored
from slotzero.models.stacks import StackedParam
from slotzero.quantization.method import check_plain, read_input_scale
from slotzero.quantization.quantization import Quantization

INPUT_SCALE = "input_scale"


def fill(
    params: Sequence[StackedParam],
    tensors: dict[str, Tensor],
    checkpoint: Checkpoint,
    kernels: Kernels,
    quantization: Quantization,
) -> Iterator[Tensor]:
    """Read parameters into their tensors; yield each part of a tensor after filling it."""
    for stacked in params:
        for targets, stored in targets_of(stacked, tensors):
            if stacked.format is None:
                (target,) = targets.values()
                read = _read(stacked.param, stored, checkpoint, kernels, quantization, target)
                target.copy_(read)
            else:
                device = targets["codes"].device
                rows = _read_rows(stored, checkpoint, quantization, stacked.format, device)
                store(kernels.pack_quantized(rows, stacked.format), targets)
            yield from targets.values()
        if stacked.param.whole_experts is not None and stacked.has_input_scale:
            _share_input_scales(stacked, tensors, checkpoint)


def _share_input_scales(
    stacked: StackedParam, tensors: Mapping[str, Tensor], checkpoint: Checkpoint
) -> None:
    """Give the experts of each layer the largest scale of their inputs, including those of experts
    on other ranks. So results do not depend on the number of ranks."""
    scales = tensors[f"{stacked.name}.{INPUT_SCALE}"]
    for i, prefix in enumerate(stacked.prefixes or ("",)):
        modules = [one.module for one in stacked.param.of_all_ranks.stored(prefix)]
        largest = torch.stack([read_input_scale(checkpoint, module) for module in modules]).amax(0)
        (scales if stacked.prefixes is None else scales[i]).copy_(largest)


def targets_of(
    stacked: StackedParam, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], list[Stored]]]:
    """Yield the tensors that are filled at once, with the stored tensors they are made of.

    They are the fields of a quantised weight, or one tensor, of a layer, or, if the checkpoint
    stores experts one by one, of an expert of a layer.
    """
    param, format = stacked.param, stacked.format
    if format is None:
        parts = {"": tensors[stacked.name]}
    else:
        parts = {field: tensors[f"{stacked.name}.{field}"] for field in format.fields}
    for i, prefix in enumerate(stacked.prefixes or ("",)):
        targets = parts if stacked.prefixes is None else {f: t[i] for f, t in parts.items()}
        stored = list(param.stored(prefix))
        if param.experts is None or param.is_joint:
            yield targets, stored
            continue
        size = len(param.sources)
        for expert in range(param.experts):
            of_expert = {f: t if f == INPUT_SCALE else t[expert] for f, t in targets.items()}
            yield of_expert, stored[expert * size : (expert + 1) * size]


def store(packed: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy a quantised weight to its place. The experts of a layer share the largest scale of their
    inputs."""
    for field, target in targets.items():
        given = packed[field].to(target.device)
        target.copy_(torch.maximum(target, given) if field == INPUT_SCALE else given)


def _read_rows(
    stored: Sequence[Stored],
    checkpoint: Checkpoint,
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


def _read_plain(one: Stored, checkpoint: Checkpoint, quantization: Quantization) -> Tensor:
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
    stored: list[Stored],
    checkpoint: Checkpoint,
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
