"""Loading: a decoder's weights are allocated in the registry and filled from a checkpoint.

It knows the kernels' packed layout; it does not know where a checkpoint lives.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import CapacityError, CorruptCheckpointError, UnsupportedModelError
from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.quantized import QuantizedRows, join_rows, quantise
from slotzero.kernels.weights import LinearWeight, WeightFormat
from slotzero.models.blocks.layer_input import LayerEmbeddingWeights
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.layer import LayerWeights
from slotzero.models.param import Param, Stored
from slotzero.models.stacks import (
    Stack,
    StackedParam,
    model_params,
    model_stacks,
    outer_stack,
    vocabulary_weights,
)
from slotzero.pools.budget import refuse_beyond
from slotzero.quantization.quantization import NOT_QUANTIZED, Quantization

OR_SMALLER = " or --dtype bfloat16"

Progress = Callable[[int, int], None]  # parameters done, parameters in all

INPUT_SCALE = "input_scale"
_COMPARED = 1 << 14  # rows at a time
# Stored by some exporters and derived by us.
_IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias")


@dataclass(frozen=True)
class DecoderWeights:
    embedding: LinearWeight  # [vocab, hidden]
    head: LinearWeight  # the same tensor where embeddings are tied
    final_norm: Tensor  # [hidden]
    layers: tuple[LayerWeights, ...]
    layer_embedding: LayerEmbeddingWeights | None = None


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    progress: Progress,
    prefix: str = "",
    besides: frozenset[str] = frozenset(),
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """Load this rank's part of a model; `config` is the whole model's. `prefix` begins the names in
    the registry where there is more than one model; `besides` are tensors that others read."""
    params = model_params(config, ranks)
    _refuse_unexpected(config, checkpoint, besides)
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    total, done = sum(t.numel() for t in tensors.values()), 0
    for target in fill(params, tensors, checkpoint, kernels, config.quantization):
        done += target.numel()
        progress(done, total)
    return _assemble(config, tensors, ranks, dtype)


def load_params(
    params: Sequence[StackedParam],
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    prefix: str,
    quantization: Quantization = NOT_QUANTIZED,
) -> dict[str, Tensor]:
    """Load parameters that are not part of a model, by name."""
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    for _ in fill(params, tensors, checkpoint, kernels, quantization):
        pass
    return tensors


def fill(
    params: Sequence[StackedParam],
    tensors: dict[str, Tensor],
    checkpoint: Checkpoint,
    kernels: Kernels,
    quantization: Quantization,
) -> Iterator[Tensor]:
    """Read parameters into their tensors; yield each part when it is filled."""
    for stacked in params:
        for targets, stored in _places(stacked, tensors):
            if stacked.format is None:
                (target,) = targets.values()
                read = _read(stacked.param, stored, checkpoint, kernels, quantization, target)
                target.copy_(read)
            else:
                device = targets["codes"].device
                rows = _read_rows(stored, checkpoint, quantization, stacked.format, device)
                _store(kernels.pack_quantized(rows, stacked.format), targets)
            yield from targets.values()


def random_weights(
    config: ModelConfig,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int,
    prefix: str = "",
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """Draw the weights of `--load-format dummy` on the device, so that a large model starts at
    once; every rank draws the same."""
    params = model_params(config, ranks)
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    generator = torch.Generator(registry.device).manual_seed(seed)
    for stacked in params:
        param = stacked.param
        for targets, _ in _places(stacked, tensors):
            if stacked.format is not None:
                rows = _draw_rows(stacked, targets["codes"], generator)
                _store(kernels.pack_quantized(rows, stacked.format), targets)
                continue
            (tensor,) = targets.values()
            if param.starts_at_one:
                tensor.fill_(1)
            elif not any(source.scale for source in param.sources):  # another rank adds it
                tensor.zero_()
            else:
                tensor.normal_(0, 0.02, generator=generator)
    return _assemble(config, tensors, ranks, dtype)


def _draw_rows(stacked: StackedParam, target: Tensor, generator: torch.Generator) -> QuantizedRows:
    """Draw one quantised weight; a weight of all experts at once has an axis of them."""
    param, format = stacked.param, stacked.format
    assert format is not None and param.columns is not None
    experts = (param.experts,) if param.is_joint and param.experts is not None else ()
    shape = (*experts, param.out_features, param.columns)
    drawn = torch.empty(shape, device=target.device).normal_(0, 0.02, generator=generator)
    rows = quantise(drawn, format)
    if format.is_scattered:
        group_of = torch.arange(param.columns, device=target.device) * format.num_groups(
            param.columns
        )
        group_of = (group_of // param.columns).int().expand(*experts, param.columns)
        rows = rows._replace(group_of=group_of)
    if format.activations == "float8_static":
        rows = rows._replace(input_scale=torch.full((1,), 0.05, device=target.device))
    return rows


def _allocate(
    params: Sequence[StackedParam],
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    prefix: str,
) -> dict[str, Tensor]:
    wanted = {name: shape for p in params for name, shape in _shapes(p, kernels, dtype).items()}
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in wanted.values())
    refuse_beyond(total, registry.device, "weights", "use a smaller model")
    tensors = {}
    for name, (shape, kind) in wanted.items():
        try:
            tensor = torch.empty(shape, dtype=kind, device=registry.device)
            if name.endswith(INPUT_SCALE):
                tensor.zero_()  # then the largest of several is stored
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise CapacityError(
                f"weight {name} {list(shape)} does not fit into memory: use a smaller model"
                + ("" if dtype.itemsize == 2 or registry.device.type == "cpu" else OR_SMALLER)
            ) from error
        tensors[name] = registry.constant(f"weight.{prefix}{name}", tensor)
    return tensors


def _shapes(
    stacked: StackedParam, kernels: Kernels, dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return by name the shapes and types of the tensors in which a weight is kept."""
    param, format = stacked.param, stacked.format
    layers = () if stacked.prefixes is None else (len(stacked.prefixes),)
    experts = () if param.experts is None else (param.experts,)
    if format is not None:
        assert param.columns is not None
        parts = kernels.quantized_shapes(param.out_features, param.columns, format)
        return {
            f"{stacked.name}.{field}": (
                (*layers, *(() if field == INPUT_SCALE else experts), *shape),
                kind,
            )
            for field, (shape, kind) in parts.items()
        }
    shape: tuple[int, ...] = (param.out_features,)
    if param.columns is not None:
        shape = (param.out_features, param.columns)
        shape = kernels.packed_shape(*shape) if param.is_packed else shape
    kind = torch.float32 if param.is_float32 else dtype
    return {stacked.name: ((*layers, *experts, *shape), kind)}


def _places(
    stacked: StackedParam, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], list[Stored]]]:
    """Yield what is filled at once (one tensor, or by field those of a quantised weight), and from
    which tensors of the checkpoint: a layer, or one expert of it that is stored by itself."""
    param, format = stacked.param, stacked.format
    if format is None:
        ours = {"": tensors[stacked.name]}
    else:
        ours = {field: tensors[f"{stacked.name}.{field}"] for field in format.fields}
    for i, prefix in enumerate(stacked.prefixes or ("",)):
        targets = ours if stacked.prefixes is None else {f: t[i] for f, t in ours.items()}
        stored = list(param.stored(prefix))
        if param.experts is None or param.is_joint:
            yield targets, stored
            continue
        size = len(param.sources)
        for expert in range(param.experts):
            of_expert = {f: t if f == INPUT_SCALE else t[expert] for f, t in targets.items()}
            yield of_expert, stored[expert * size : (expert + 1) * size]


def _store(packed: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy a quantised weight to its place. Experts share the largest scale of their inputs."""
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
    part, whole = checkpoint.read_part(one.name, *(span.slice for span in one.spans))
    if tuple(whole) != one.shape:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {one.name} has shape {list(whole)}, "
            f"its config asks for {list(one.shape)}"
        )
    return part.transpose(1, 2) if one.is_joint and one.is_transposed and one.is_matrix else part


def _read(
    param: Param,
    stored: list[Stored],
    checkpoint: Checkpoint,
    kernels: Kernels,
    quantization: Quantization,
    target: Tensor,
) -> Tensor:
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
        parts.append(part.to(target.device).to(target.dtype))  # converted where it is fast
    joined = torch.cat(parts, dim=int(param.is_joint)) if len(parts) > 1 else parts[0]
    return joined if param.columns is None or not param.is_packed else kernels.pack(joined)


def _refuse_unexpected(
    config: ModelConfig, checkpoint: Checkpoint, besides: frozenset[str]
) -> None:
    """A tensor that we would not use changes results; one that is missing cannot be made up. MTP
    layers are read by a drafter."""
    expected, optional = expected_names(model_params(config, ALONE), config.quantization)
    names = set(checkpoint.names())
    missing = sorted(expected - names)
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {missing[0]} is missing ({len(missing)} in all): "
            "the checkpoint is incomplete, fetch it again"
        )
    head = f"{config.names.head}.weight"
    if config.tied_embeddings and head in names:
        _refuse_another_head(config, checkpoint, head)
    extra = sorted(
        n
        for n in names - expected - optional - {head} - _unread(config) - besides
        if not n.endswith(_IGNORED) and not n.startswith(config.ignored)
    )
    if extra:
        raise UnsupportedModelError(
            f"{checkpoint.name}: tensor {extra[0]} is not part of this architecture as we know it "
            f"({len(extra)} such)"
        )


def _unread(config: ModelConfig) -> set[str]:
    """Return tensors that some exporters store although nothing computes with them."""
    return {
        prefix + name
        for stack in model_stacks(config).stacks
        for name in stack.block.unread()
        for prefix in stack.prefixes or ()
    }


def _refuse_another_head(config: ModelConfig, checkpoint: Checkpoint, head: str) -> None:
    """Some exporters store a tied embedding twice; a head that was trained by itself is another."""
    embedding = f"{config.names.embedding}.weight"
    for begin in range(0, config.vocab_size, _COMPARED):
        rows = slice(begin, begin + _COMPARED), slice(None)
        one, other = (checkpoint.read_part(name, *rows) for name in (embedding, head))
        if one.whole != other.whole or not torch.equal(one.tensor, other.tensor):
            raise UnsupportedModelError(
                f"{checkpoint.name}: tensor {head} is not the embedding that tie_word_embeddings "
                "says it is: set that to false in config.json"
            )


def expected_names(
    params: Sequence[StackedParam], quantization: Quantization
) -> tuple[set[str], set[str]]:
    """Return the tensors that a checkpoint must have, and those that it may have."""
    expected, optional = set[str](), set[str]()
    for param in params:
        for stored in param.stored():
            packed = None if param.param.columns is None else quantization.tensors(stored.module)
            for name, is_needed in (packed or {stored.name: True}).items():
                (expected if is_needed else optional).add(name)
    return expected, optional


def _assemble(
    config: ModelConfig, tensors: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype
) -> DecoderWeights:
    stacks = model_stacks(config)
    if ranks.is_distributed:
        stacks = stacks.shard(ranks)
    layers = tuple(
        layer_weights(stacks.by_layer[index], tensors, index, dtype)
        for index in range(config.num_layers)
    )
    embedding, head = vocabulary_weights(config, ranks, tensors, dtype)
    block, outer = config.layer_embedding, None
    if block is not None:
        outer = outer_stack(block, config.quantization).weights(tensors, None, dtype)
    return DecoderWeights(embedding, head, tensors["final_norm"], layers, outer)


def layer_weights(
    stacks: Mapping[str, Stack], tensors: Mapping[str, Tensor], layer: int, dtype: torch.dtype
) -> LayerWeights:
    """Put one layer's weights together; `stacks` by field of LayerWeights."""
    made = {}
    for field, stack in stacks.items():
        assert stack.layers is not None
        made[field] = stack.weights(tensors, stack.layers.index(layer), dtype)
    return LayerWeights(**made)
