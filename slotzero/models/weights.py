"""Weight loading: allocate a decoder's weights in the registry and fill them from a checkpoint.

This module knows the kernels' packed layout; it does not know where or how a checkpoint is stored.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import CapacityError, CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.contract import Kernels
from slotzero.kernels.quantized import QuantizedRows, quantise
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.layer_input import LayerEmbeddingWeights
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.layer import LayerWeights
from slotzero.models.reading import INPUT_SCALE, fillings, put_fields, stored_names, targets_of
from slotzero.models.stacks import (
    Stack,
    StackedParam,
    model_params,
    model_stacks,
    outer_stack,
    vocabulary_weights,
)
from slotzero.models.weight_store import WeightSet, WeightStore
from slotzero.pools.budget import refuse_beyond
from slotzero.quantization.method import CACHE_SCALES, WeightPart, take
from slotzero.quantization.quantization import NOT_QUANTIZED, Quantization

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
    store: WeightStore,
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
    _refuse_missing(config, checkpoint)
    refuse_extra(config, checkpoint, config.quantization, read_elsewhere)
    tensors = _allocate(params, store, prefix)
    _remember(config, params, tensors, store)
    total, done = sum(t.numel() for t in tensors.values()), 0
    for filling in fillings(params, tensors, config.quantization):
        filling.fill(checkpoint, store.kernels)
        done += filling.num_values
        progress(min(done, total), total)  # experts share the scale of their inputs
    return _assemble(config, tensors, ranks, store.dtype)


def load_params(
    params: Sequence[StackedParam],
    checkpoint: Checkpoint,
    store: WeightStore,
    prefix: str,
    quantization: Quantization = NOT_QUANTIZED,
) -> dict[str, Tensor]:
    """Load parameters that are not part of a model; return them by name."""
    tensors = _allocate(params, store, prefix)
    for filling in fillings(params, tensors, quantization):
        filling.fill(checkpoint, store.kernels)
    return tensors


def random_weights(
    config: ModelConfig,
    store: WeightStore,
    seed: int,
    prefix: str = "",
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """Draw the random weights of `--load-format dummy`.

    They are drawn on the device, so that a large model starts quickly. All ranks use the same seed.
    """
    params = model_params(config, ranks)
    tensors = _allocate(params, store, prefix)
    _remember(config, params, tensors, store)
    generator = torch.Generator(store.registry.device).manual_seed(seed)
    for stacked in params:
        param = stacked.param
        if stacked.format is not None:
            for targets, _ in targets_of(stacked, tensors):
                rows = _draw_rows(stacked, targets["codes"], generator)
                put_fields(store.kernels.pack_quantized(rows, stacked.format), targets)
            continue
        tensor = tensors[stacked.name]
        if param.starts_at_one:
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=generator)
            if not any(source.scale for source in param.sources):  # a bias that another rank adds
                tensor.zero_()
    return _assemble(config, tensors, ranks, store.dtype)


def weight_bytes(config: ModelConfig, kernels: Kernels, dtype: torch.dtype) -> int:
    """Return the bytes that the weights of a whole model take, without allocating them."""
    return sum(_bytes_of(_shapes(param, kernels, dtype)) for param in model_params(config, ALONE))


def _bytes_of(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(math.prod(shape) * kind.itemsize for shape, kind in tensors.values())


def _draw_rows(stacked: StackedParam, target: Tensor, generator: torch.Generator) -> QuantizedRows:
    """Draw one quantised weight; a weight of all experts at once has an axis of them."""
    param, format = stacked.param, stacked.format
    assert format is not None and param.columns is not None
    experts = (param.experts,) if param.is_joint and param.experts is not None else ()
    shape = (*experts, param.out_features, param.columns)
    drawn = torch.empty(shape, device=target.device).normal_(0, 0.02, generator=generator)
    rows = quantise(drawn, format)
    if format.is_scattered:  # all ranks have the scales of all groups
        assert format.group is not None
        group_of = (torch.arange(param.columns, device=target.device) // format.group).int()
        more = 0, format.num_groups(param.columns) - rows.scales.shape[-1]
        rows = rows._replace(
            scales=F.pad(rows.scales, more),
            offsets=None if rows.offsets is None else F.pad(rows.offsets, more),
            group_of=group_of.expand(*experts, param.columns),
        )
    if format.activations == "float8_static":
        rows = rows._replace(input_scale=torch.full((1,), 0.05, device=target.device))
    return rows


def _remember(
    config: ModelConfig,
    params: Sequence[StackedParam],
    tensors: Mapping[str, Tensor],
    store: WeightStore,
) -> None:
    whole = tuple(model_params(config, ALONE))
    store.sets.append(WeightSet(tuple(params), whole, tensors, config.quantization))


def _allocate(params: Sequence[StackedParam], store: WeightStore, prefix: str) -> dict[str, Tensor]:
    registry, kernels, dtype = store.registry, store.kernels, store.dtype
    wanted = {name: shape for p in params for name, shape in _shapes(p, kernels, dtype).items()}
    refuse_beyond(_bytes_of(wanted), registry.device, "weights", "use a smaller model")
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
    """Return by name the shapes and dtypes of a parameter's tensors in the registry."""
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


def _refuse_missing(config: ModelConfig, checkpoint: Checkpoint) -> None:
    expected, _ = expected_names(model_params(config, ALONE), config.quantization)
    missing = sorted(expected - set(checkpoint.names()))
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {missing[0]} is missing ({len(missing)} in total): "
            "the checkpoint is incomplete, download it again"
        )


def refuse_extra(
    config: ModelConfig,
    checkpoint: Checkpoint,
    quantization: Quantization,
    read_elsewhere: frozenset[str] = frozenset(),
) -> None:
    """Raise on tensors that the model does not have: ignoring one could change results.

    Tensors of MTP layers are allowed: the drafter reads them. So are the scales of an 8-bit KV
    cache: cache_scales.py reads them, and a cache in 16 bits has no use for them.
    """
    ignored = _IGNORED_SUFFIXES + CACHE_SCALES
    expected, optional = expected_names(model_params(config, ALONE), quantization)
    names = set(checkpoint.names())
    heads = _tensors_of(config.names.head, quantization, names)
    if config.tied_embeddings and not heads.isdisjoint(names):
        _refuse_untied_head(config, checkpoint, quantization)
    extra = sorted(
        n
        for n in names - expected - optional - heads - _unread(config) - read_elsewhere
        if not n.endswith(ignored) and not n.startswith(config.ignored)
    )
    extra = [n for n in extra if not _is_zero_bias(n, quantization, checkpoint)]
    if extra:
        raise UnsupportedModelError(
            f"{checkpoint.name}: tensor {extra[0]} is unknown for this architecture "
            f"({len(extra)} in total): this variant of it is not implemented"
        )


def _is_zero_bias(name: str, quantization: Quantization, checkpoint: Checkpoint) -> bool:
    """Whether a tensor is a bias of zeros, which AutoGPTQ stores for every quantised layer."""
    module, _, field = name.rpartition(".")
    is_bias = field == "bias" and quantization.tensors(module) is not None
    return is_bias and not checkpoint.read(name).any()


def _unread(config: ModelConfig) -> set[str]:
    """Return the tensors that some exporters store although the model does not use them."""
    return {
        prefix + name
        for stack in model_stacks(config).stacks
        for name in stack.block.unread()
        for prefix in stack.prefixes or ()
    }


def _tensors_of(module: str, quantization: Quantization, names: Collection[str]) -> set[str]:
    """Return the tensors of a module's weight."""
    if _is_packed(module, quantization, names):
        return set(quantization.tensors(module) or ())
    return {f"{module}.weight"}


def _is_packed(module: str, quantization: Quantization, names: Collection[str]) -> bool:
    """Return whether all tensors are stored that a quantised weight of this module needs."""
    packed = quantization.tensors(module)
    return packed is not None and all(name in names for name, needed in packed.items() if needed)


def _refuse_untied_head(
    config: ModelConfig, checkpoint: Checkpoint, quantization: Quantization
) -> None:
    """Raise if the stored head differs from the embedding although the config ties them.

    Some exporters store a tied embedding twice, which is fine; a head with other values is not.
    """
    for begin in range(0, config.vocab_size, _ROWS_PER_COMPARISON):
        rows = slice(begin, begin + _ROWS_PER_COMPARISON)
        embedding, head = (
            _vocabulary_rows(config, checkpoint, quantization, module, rows)
            for module in (config.names.embedding, config.names.head)
        )
        if not torch.equal(embedding, head):
            raise UnsupportedModelError(
                f"{checkpoint.name}: tensor {config.names.head}.weight differs from the "
                "embedding, although tie_word_embeddings is true: set it to false in config.json"
            )


def _vocabulary_rows(
    config: ModelConfig,
    checkpoint: Checkpoint,
    quantization: Quantization,
    module: str,
    rows: slice,
) -> Tensor:
    """Read rows of the embedding or of the head in float32; unpack them if they are quantised."""
    shape = config.vocab_size, config.hidden_size
    if _is_packed(module, quantization, checkpoint.names()):
        return quantization.read_dense(checkpoint, module, WeightPart(rows, shape), slice(None))
    return take(checkpoint, f"{module}.weight", shape, rows, slice(None)).float()


def expected_names(
    params: Sequence[StackedParam], quantization: Quantization
) -> tuple[set[str], set[str]]:
    """Return the tensors that a checkpoint must have, and those that it may have."""
    expected, optional = set[str](), set[str]()
    for param in params:
        for stored in param.stored():
            for name, is_needed in stored_names(param, stored, quantization).items():
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
    """Assemble the weights of one layer; `stacks` are by field of LayerWeights."""
    made = {}
    for field, stack in stacks.items():
        assert stack.layers is not None
        made[field] = stack.weights(tensors, stack.layers.index(layer), dtype)
    return LayerWeights(**made)
