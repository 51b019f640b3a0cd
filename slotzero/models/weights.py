"""A decoder's weights: a few stacked tensors, [layers, ...], filled from a checkpoint.

Stacking keeps the registry short, so that every replay can afford to check every fingerprint. It
knows the kernels' packed layout; it does not know where a checkpoint lives.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import CapacityError, CorruptCheckpointError, UnsupportedModelError
from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.param import Param, Stored
from slotzero.models.params import ahead_prefixes, params_of, unread_tensors
from slotzero.models.shards import cut, sharded
from slotzero.pools.budget import refuse_beyond

OR_SMALLER = " or --dtype bfloat16"

Progress = Callable[[int, int], None]  # parameters done, parameters in all

_HEAD, _COMPARED = "lm_head.weight", 1 << 14  # rows at a time
# Stored by some exporters and derived by us.
_IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias")


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor | None  # [hidden], like all norms but those of q and k
    qkv: Tensor | None  # packed [sum(heads.sizes), hidden], or q_rank in place of q's
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_up: Tensor | None  # of latent heads: packed [sizes of q, q_rank]
    up_k: Tensor | None  # [heads * plain, latent]
    up_v: Tensor | None  # [heads * result, latent]
    sinks: Tensor | None  # [heads]
    out: Tensor | None  # packed [hidden, heads.out_size]
    out_bias: Tensor | None
    out_gate: Tensor | None  # packed [heads.out_size, hidden]
    out_gate_bias: Tensor | None
    in_proj: Tensor | None  # of a recurrence, like the next nine: packed [its parts, hidden]
    in_bias: Tensor | None
    conv: Tensor | None  # [channels, conv_width]
    conv_bias: Tensor | None
    a_log: Tensor | None  # [heads]
    dt_bias: Tensor | None
    d: Tensor | None
    gate_norm: Tensor | None
    scan_out: Tensor | None  # packed [hidden, inner]
    scan_out_bias: Tensor | None
    after_attention: Tensor | None
    mlp_norm: Tensor | None
    router: Tensor | None  # packed [experts, hidden]; None: no experts, and the MLP is plain
    router_bias: Tensor | None
    correction: Tensor | None
    gate_up: Tensor | None  # packed [2 * intermediate, hidden]; without gates half of it
    gate_up_bias: Tensor | None
    down: Tensor | None  # packed [hidden, intermediate]
    down_bias: Tensor | None
    dense_gate_up: Tensor | None  # of an MLP beside experts, like the next seven
    dense_down: Tensor | None
    dense_gate: Tensor | None  # packed [1, hidden]
    router_norm: Tensor | None
    expert_norm: Tensor | None
    factors: Tensor | None  # [experts]
    after_dense: Tensor | None
    after_experts: Tensor | None
    after_mlp: Tensor | None
    input_gate: Tensor | None  # packed [input_size, hidden]
    input_out: Tensor | None  # packed [hidden, input_size]
    after_input: Tensor | None
    scale: Tensor | None  # [1]


@dataclass(frozen=True)
class DecoderWeights:
    embedding: Tensor  # packed [vocab, hidden]
    head: Tensor  # the same tensor where embeddings are tied
    final_norm: Tensor  # [hidden]
    layers: tuple[LayerWeights, ...]
    input_embedding: Tensor | None = None  # packed [input_vocab, layers * input_size]
    input_projection: Tensor | None = None  # packed [layers * input_size, hidden]
    projected_norm: Tensor | None = None  # [input_size]


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
    """Of the whole model's config, this rank's part. `prefix` is of their names in the registry,
    where there is more than one model; `besides` are tensors that somebody else reads."""
    params = _params_of(config, ranks)
    _refuse_unexpected(config, checkpoint, besides)
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    total, done = sum(t.numel() for t in tensors.values()), 0
    for param in params:
        for target, stored in _places(param, tensors[param.name]):
            target.copy_(_read(param, stored, checkpoint, kernels, target))
            done += target.numel()
            progress(done, total)
    return _assemble(config, params, tensors)


def load_params(
    params: list[Param],
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    prefix: str,
) -> dict[str, Tensor]:
    """By field, of what is no part of the model; of layers, [layers, ...]"""
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    for param in params:
        for target, stored in _places(param, tensors[param.name]):
            target.copy_(_read(param, stored, checkpoint, kernels, target))
    return {param.field: tensors[param.name] for param in params}


def random_weights(
    config: ModelConfig,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int,
    prefix: str = "",
    ranks: Ranks = ALONE,
) -> DecoderWeights:
    """`--load-format dummy`: drawn on the device, so that a large model starts at once; every rank
    draws the same."""
    params = _params_of(config, ranks)
    tensors = _allocate(params, registry, kernels, dtype, prefix)
    generator = torch.Generator(registry.device).manual_seed(seed)
    for param in params:
        tensor = tensors[param.name]
        if param.field.endswith(("norm", "scale", "factors")) or param.field.startswith("after"):
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=generator)
            if not any(source.scale for source in param.sources):  # another rank adds it
                tensor.zero_()
    return _assemble(config, params, tensors)


def _params_of(config: ModelConfig, ranks: Ranks) -> list[Param]:
    return cut(params_of(config), params_of(sharded(config, ranks)), ranks)


def _allocate(
    params: list[Param], registry: Registry, kernels: Kernels, dtype: torch.dtype, prefix: str
) -> dict[str, Tensor]:
    wanted = {p.name: _stored(p, kernels, dtype) for p in params}
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


def _stored(p: Param, kernels: Kernels, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """-> the shape and the type in which it is stored"""
    shape: tuple[int, ...] = (p.out_features,)
    if p.columns is not None:
        shape = (p.out_features, p.columns)
        shape = kernels.packed_shape(*shape) if p.is_packed else shape
    if p.experts is not None:
        shape = (p.experts, *shape)
    if p.layers is not None:
        shape = (len(p.layers), *shape)
    return shape, torch.float32 if p.is_wide else dtype


def _places(param: Param, tensor: Tensor) -> Iterator[tuple[Tensor, list[Stored]]]:
    """What is filled at once, and with what: a layer, or an expert of it that is stored alone."""
    for i, layer in enumerate(param.layers or (0,)):
        target = tensor if param.layers is None else tensor[i]
        stored = list(param.stored(layer))
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
                f"{checkpoint.name}: tensor {name} has shape {list(whole)}, "
                f"its config asks for {wanted}"
            )
        if param.is_joint and param.is_turned and param.columns is not None:
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
        parts.append(part.to(target.device).to(target.dtype))  # converted where it is fast
    joined = torch.cat(parts, dim=int(param.is_joint)) if len(parts) > 1 else parts[0]
    return joined if param.columns is None or not param.is_packed else kernels.pack(joined)


def _refuse_unexpected(
    config: ModelConfig, checkpoint: Checkpoint, besides: frozenset[str]
) -> None:
    """A tensor that we would not use changes results; one that is missing cannot be made up. Layers
    that guess ahead are a drafter's."""
    expected = {s.name for p in params_of(config) for i in p.layers or (0,) for s in p.stored(i)}
    names = set(checkpoint.names())
    missing = sorted(expected - names)
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {missing[0]} is missing ({len(missing)} in all): "
            "the checkpoint is incomplete, fetch it again"
        )
    if config.tied_embeddings and _HEAD in names:
        _refuse_another_head(config, checkpoint)
    ahead_of = ahead_prefixes(config)
    extra = sorted(
        n
        for n in names - expected - {_HEAD} - unread_tensors(config) - besides
        if not n.endswith(_IGNORED) and not n.startswith(ahead_of)
    )
    if extra:
        raise UnsupportedModelError(
            f"{checkpoint.name}: tensor {extra[0]} is not part of this architecture as we know it "
            f"({len(extra)} such)"
        )


def _refuse_another_head(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Some exporters store a tied embedding twice; a head that was trained by itself is another."""
    (embedding,) = (p for p in params_of(config) if p.name == "embedding")
    (source,) = embedding.stored(0)
    for begin in range(0, config.vocab_size, _COMPARED):
        rows = slice(begin, begin + _COMPARED), slice(None)
        one, other = (checkpoint.read_part(name, *rows) for name in (source.name, _HEAD))
        if one.whole != other.whole or not torch.equal(one.tensor, other.tensor):
            raise UnsupportedModelError(
                f"{checkpoint.name}: tensor {_HEAD} is not the embedding that tie_word_embeddings "
                "says it is: set that to false in config.json"
            )


def _assemble(
    config: ModelConfig, params: list[Param], tensors: dict[str, Tensor]
) -> DecoderWeights:
    layers: list[dict[str, Tensor | None]] = [
        dict.fromkeys(LayerWeights.__dataclass_fields__) for _ in range(config.num_layers)
    ]
    for param in params:
        for i, layer in enumerate(param.layers or ()):
            layers[layer][param.field] = tensors[param.name][i]
    return DecoderWeights(
        embedding=tensors["embedding"],
        head=tensors.get("head", tensors["embedding"]),
        final_norm=tensors["final_norm"],
        layers=tuple(LayerWeights(**fields) for fields in layers),
        input_embedding=tensors.get("input_embedding"),
        input_projection=tensors.get("input_projection"),
        projected_norm=tensors.get("projected_norm"),
    )
