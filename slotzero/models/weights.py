"""Weight loading: allocate a decoder's weights in the registry and fill them from a checkpoint.

This module knows the kernels' packed layout; it does not know where or how a checkpoint is stored.
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
from slotzero.kernels.types import LinearWeight
from slotzero.models.blocks.layer_input import LayerEmbeddingWeights
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.layer import LayerWeights
from slotzero.models.param import Param, Stored
from slotzero.models.stacks import Stack, StackedParam, model_params, model_stacks
from slotzero.pools.budget import refuse_beyond

OR_SMALLER = " or --dtype bfloat16"

Progress = Callable[[int, int], None]  # (values loaded, values in total)

_ROWS_PER_COMPARISON = 1 << 14
# Some exporters store these tensors; Slotzero computes them.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "attn.masked_bias")


@dataclass(frozen=True)
class DecoderWeights:
    embedding: LinearWeight  # [vocab, hidden]
    head: LinearWeight  # the same tensor as the embedding if embeddings are tied
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
    read_elsewhere: frozenset[str] = frozenset(),
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """Load this rank's part of a model.

    `config` is the config of the whole model. `prefix` is put before the names in the registry, to
    tell several models apart. `read_elsewhere` names tensors of the checkpoint that other code
    reads.
    """
    params = model_params(config, ranks)
    _refuse_unexpected(config, checkpoint, read_elsewhere)
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    total, done = sum(t.numel() for t in tensors.values()), 0
    for target in fill(params, tensors, checkpoint, kernels):
        done += target.numel()
        progress(done, total)
    return _assemble(config, params, tensors, ranks)


def load_params(
    params: Sequence[StackedParam],
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    prefix: str,
) -> dict[str, Tensor]:
    """Load parameters that are not part of a model; return them by name."""
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    for _ in fill(params, tensors, checkpoint, kernels):
        pass
    return tensors


def fill(
    params: Sequence[StackedParam],
    tensors: dict[str, Tensor],
    checkpoint: Checkpoint,
    kernels: Kernels,
) -> Iterator[Tensor]:
    """Read parameters into their tensors; yield each part of a tensor after filling it."""
    for stacked in params:
        for target, stored in _targets(stacked, tensors[stacked.name]):
            target.copy_(_read(stacked.param, stored, checkpoint, kernels, target))
            yield target


def random_weights(
    config: ModelConfig,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int,
    prefix: str = "",
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """Draw the random weights of `--load-format dummy`.

    They are drawn on the device, so that a large model starts quickly. All ranks use the same seed.
    """
    params = model_params(config, ranks)
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    generator = torch.Generator(registry.device).manual_seed(seed)
    for name, param, _ in params:
        tensor = tensors[name]
        if param.starts_at_one:
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=generator)
            if not any(source.scale for source in param.sources):  # a bias that another rank adds
                tensor.zero_()
    return _assemble(config, params, tensors, ranks)


def _allocate(
    params: Sequence[StackedParam],
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    prefix: str,
) -> dict[str, Tensor]:
    wanted = {p.name: _shape_and_dtype(p, kernels, dtype) for p in params}
    total = sum(math.prod(shape) * kind.itemsize for shape, kind in wanted.values())
    refuse_beyond(total, registry.device, "weights", "use a smaller model")
    tensors = {}
    for name, (shape, kind) in wanted.items():
        try:
            tensor = torch.empty(shape, dtype=kind, device=registry.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise CapacityError(
                f"weight {name} {list(shape)} does not fit into memory: use a smaller model"
                + ("" if dtype.itemsize == 2 or registry.device.type == "cpu" else OR_SMALLER)
            ) from error
        tensors[name] = registry.constant(f"weight.{prefix}{name}", tensor)
    return tensors


def _shape_and_dtype(
    stacked: StackedParam, kernels: Kernels, dtype: torch.dtype
) -> tuple[tuple[int, ...], torch.dtype]:
    """Return the shape and dtype of a parameter's tensor in the registry."""
    param = stacked.param
    shape: tuple[int, ...] = (param.out_features,)
    if param.columns is not None:
        shape = (param.out_features, param.columns)
        shape = kernels.packed_shape(*shape) if param.is_packed else shape
    if param.experts is not None:
        shape = (param.experts, *shape)
    if stacked.prefixes is not None:
        shape = (len(stacked.prefixes), *shape)
    return shape, torch.float32 if param.is_float32 else dtype


def _targets(stacked: StackedParam, tensor: Tensor) -> Iterator[tuple[Tensor, list[Stored]]]:
    """Yield each part of a tensor that is filled at once, with the stored tensors it is made of.

    A part is a layer, or, if the checkpoint stores experts one by one, an expert of a layer.
    """
    param = stacked.param
    for i, prefix in enumerate(stacked.prefixes or ("",)):
        target = tensor if stacked.prefixes is None else tensor[i]
        stored = list(param.stored(prefix))
        if param.experts is None or param.is_joint:
            yield target, stored
            continue
        size = len(param.sources)
        for expert in range(param.experts):
            yield target[expert], stored[expert * size : (expert + 1) * size]


def _read(
    param: Param, stored: list[Stored], checkpoint: Checkpoint, kernels: Kernels, target: Tensor
) -> Tensor:
    parts = []
    for name, spans, source in stored:
        part, whole = checkpoint.read_part(name, *(span.slice for span in spans))
        wanted = [span.whole for span in spans]
        if list(whole) != wanted:
            raise CorruptCheckpointError(
                f"{checkpoint.name}: tensor {name} has shape {list(whole)}, but by its config it "
                f"must have shape {wanted}"
            )
        if param.is_joint and param.is_transposed and param.columns is not None:
            part = part.transpose(1, 2)
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


def _refuse_unexpected(
    config: ModelConfig, checkpoint: Checkpoint, read_elsewhere: frozenset[str]
) -> None:
    """Raise on missing tensors, and on extra ones: ignoring a tensor could change results.

    Tensors of MTP layers are allowed: the drafter reads them.
    """
    expected = {stored.name for param in model_params(config, ALONE) for stored in param.stored()}
    names = set(checkpoint.names())
    missing = sorted(expected - names)
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {missing[0]} is missing ({len(missing)} in total): "
            "the checkpoint is incomplete, download it again"
        )
    head = f"{config.names.head}.weight"
    if config.tied_embeddings and head in names:
        _refuse_untied_head(config, checkpoint, head)
    extra = sorted(
        n
        for n in names - expected - {head} - _unread(config) - read_elsewhere
        if not n.endswith(_IGNORED_SUFFIXES) and not n.startswith(config.ignored)
    )
    if extra:
        raise UnsupportedModelError(
            f"{checkpoint.name}: tensor {extra[0]} is unknown for this architecture "
            f"({len(extra)} in total): this variant of it is not implemented"
        )


def _unread(config: ModelConfig) -> set[str]:
    """Return the tensors that some exporters store although the model does not use them."""
    return {
        prefix + name
        for stack in model_stacks(config).values()
        for name in stack.block.unread()
        for prefix in stack.prefixes or ()
    }


def _refuse_untied_head(config: ModelConfig, checkpoint: Checkpoint, head: str) -> None:
    """Raise if the stored head differs from the embedding although the config ties them.

    Some exporters store a tied embedding twice, which is fine; a head with other values is not.
    """
    embedding = f"{config.names.embedding}.weight"
    for begin in range(0, config.vocab_size, _ROWS_PER_COMPARISON):
        rows = slice(begin, begin + _ROWS_PER_COMPARISON), slice(None)
        one, other = (checkpoint.read_part(name, *rows) for name in (embedding, head))
        if one.whole != other.whole or not torch.equal(one.tensor, other.tensor):
            raise UnsupportedModelError(
                f"{checkpoint.name}: tensor {head} differs from the embedding, although "
                "tie_word_embeddings is true: set it to false in config.json"
            )


def _assemble(
    config: ModelConfig, params: Sequence[StackedParam], tensors: dict[str, Tensor], ranks: Ranks
) -> DecoderWeights:
    stacks = model_stacks(config)
    layers = tuple(
        layer_weights(
            {field: stacks[field, block].shard(ranks) for field, block in layer.blocks().items()},
            tensors,
            index,
        )
        for index, layer in enumerate(config.layers)
    )
    block = config.layer_embedding
    ends = {
        name: LinearWeight(tensors[name], None, param.out_features)
        for name, param, _ in params
        if name in ("embedding", "head")
    }
    return DecoderWeights(
        embedding=ends["embedding"],
        head=ends.get("head", ends["embedding"]),
        final_norm=tensors["final_norm"],
        layers=layers,
        layer_embedding=None
        if block is None
        else Stack(block.name, block, None, None).weights(tensors, None),
    )


def layer_weights(
    stacks: Mapping[str, Stack], tensors: Mapping[str, Tensor], layer: int
) -> LayerWeights:
    """Assemble the weights of one layer; `stacks` are by field of LayerWeights."""
    made = {}
    for field, stack in stacks.items():
        assert stack.layers is not None
        made[field] = stack.weights(tensors, stack.layers.index(layer))
    return LayerWeights(**made)
