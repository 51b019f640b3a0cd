"""A decoder's weights: a few stacked tensors, [layers, ...], filled from a checkpoint.

Stacking keeps the registry short, so that every replay can afford to check every fingerprint. It
knows the kernels' packed layout; it does not know where a checkpoint lives.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.errors import CapacityError, CorruptCheckpointError, UnsupportedModelError
from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.loading.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.params import Param, params_of

Progress = Callable[[int, int], None]  # parameters done, parameters in all

# Stored by some exporters and derived by us.
_IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias")


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    qkv: Tensor  # packed [(heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # packed [hidden, heads * head_dim]
    out_bias: Tensor | None
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # packed [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # packed [hidden, intermediate]
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    embedding: Tensor  # packed [vocab, hidden]
    head: Tensor  # the same tensor where embeddings are tied
    final_norm: Tensor  # [hidden]
    layers: tuple[LayerWeights, ...]


def load_weights(
    config: ModelConfig,
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
    progress: Progress,
) -> DecoderWeights:
    params = params_of(config)
    _refuse_unexpected(params, checkpoint)
    tensors = _allocate(params, registry, kernels, dtype)
    total, done = sum(t.numel() for t in tensors.values()), 0
    for param in params:
        for target, sources in _places(param, tensors[param.name]):
            target.copy_(_read(param, sources, checkpoint, kernels, target))
            done += target.numel()
            progress(done, total)
    return _assemble(config, tensors)


def random_weights(
    config: ModelConfig, registry: Registry, kernels: Kernels, dtype: torch.dtype, seed: int
) -> DecoderWeights:
    """`--load-format dummy`: drawn on the device, so that a large model starts at once."""
    tensors = _allocate(params_of(config), registry, kernels, dtype)
    generator = torch.Generator(registry.device).manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("norm"):
            tensor.fill_(1)
        else:
            tensor.normal_(0, 0.02, generator=generator)
    return _assemble(config, tensors)


def _allocate(
    params: list[Param], registry: Registry, kernels: Kernels, dtype: torch.dtype
) -> dict[str, Tensor]:
    tensors = {}
    for p in params:
        shape: tuple[int, ...] = (p.out_features,)
        if p.columns is not None:
            shape = kernels.packed_shape(p.out_features, p.columns)
        if p.layers is not None:
            shape = (p.layers, *shape)
        try:
            tensor = torch.empty(shape, dtype=dtype, device=registry.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise CapacityError(
                f"weight {p.name} {list(shape)} does not fit into memory: "
                "use a smaller model or --dtype bfloat16"
            ) from error
        tensors[p.name] = registry.constant(f"weight.{p.name}", tensor)
    return tensors


def _places(param: Param, tensor: Tensor) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    if param.layers is None:
        yield tensor, param.names(0)
        return
    for i in range(param.layers):
        yield tensor[i], param.names(i)


def _read(
    param: Param, names: tuple[str, ...], checkpoint: Checkpoint, kernels: Kernels, target: Tensor
) -> Tensor:
    parts = []
    for name, rows in zip(names, param.rows, strict=True):
        part = checkpoint.read(name)
        expected = (rows,) if param.columns is None else (rows, param.columns)
        if tuple(part.shape) != expected:
            raise CorruptCheckpointError(
                f"{checkpoint.name}: tensor {name} has shape {list(part.shape)}, "
                f"its config asks for {list(expected)}"
            )
        parts.append(part.to(target.device).to(target.dtype))  # converted where it is fast
    joined = torch.cat(parts) if len(parts) > 1 else parts[0]
    return joined if param.columns is None else kernels.pack(joined)


def _refuse_unexpected(params: list[Param], checkpoint: Checkpoint) -> None:
    """A tensor that we would not use changes results; one that is missing cannot be made up."""
    expected = {name for p in params for i in range(p.layers or 1) for name in p.names(i)}
    names = set(checkpoint.names())
    missing = sorted(expected - names)
    if missing:
        raise CorruptCheckpointError(
            f"{checkpoint.name}: tensor {missing[0]} is missing ({len(missing)} in all): "
            "the checkpoint is incomplete, fetch it again"
        )
    tied = {"lm_head.weight"}  # a copy of the embedding that some exporters store
    extra = sorted(n for n in names - expected - tied if not n.endswith(_IGNORED))
    if extra:
        raise UnsupportedModelError(
            f"{checkpoint.name}: tensor {extra[0]} is not part of this architecture as we know it "
            f"({len(extra)} such)"
        )


def _assemble(config: ModelConfig, tensors: dict[str, Tensor]) -> DecoderWeights:
    def layer(i: int) -> LayerWeights:
        fields = LayerWeights.__dataclass_fields__
        return LayerWeights(**{f: tensors[f][i] if f in tensors else None for f in fields})  # type: ignore[arg-type]

    return DecoderWeights(
        embedding=tensors["embedding"],
        head=tensors.get("head", tensors["embedding"]),
        final_norm=tensors["final_norm"],
        layers=tuple(layer(i) for i in range(config.num_layers)),
    )
