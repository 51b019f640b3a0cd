"""The configuration of an EAGLE head; unsupported settings are refused by name.

This module knows no tensors. The kind of head is recognised by the names of its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Heads
from slotzero.models.blocks.attention import KvGroup
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.rope import parse_rope
from slotzero.quantization.quantization import refuse_quantized

GROUP = "draft"
ARCHITECTURES = (
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
)


@dataclass(frozen=True)
class EagleConfig:
    is_third: bool
    taps: tuple[int, ...]
    group: KvGroup
    hidden_size: int
    intermediate_size: int
    norm_eps: float
    vocab_size: int  # of the target
    draft_vocab: int
    chains_normed: bool = False
    """Whether the next draft continues from hidden states under the last norm."""

    def __post_init__(self) -> None:
        if len(set(self.taps)) < len(self.taps):  # of equal taps only the last would be written
            raise UnsupportedModelError(f"the layers of an EAGLE-3 head, {self.taps}, must differ")


def parse_eagle(checkpoint: Checkpoint, target: ModelConfig, wanted: str) -> EagleConfig:
    """Read a head's config. `wanted` is eagle or eagle3."""
    config, name, names = checkpoint.config, checkpoint.name, plain_names(checkpoint)
    architecture = (config.get("architectures") or [""])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name}: {architecture!r} is not an EAGLE head; supported: {', '.join(ARCHITECTURES)}"
        )
    refuse_quantized(config, name, "EAGLE head")
    is_third = "midlayer.hidden_norm.weight" in names
    if is_third != (wanted == "eagle3"):
        other = "eagle3" if is_third else "eagle"
        raise UnsupportedModelError(
            f"{name} is an {other} head: use --speculative {other}, not {wanted}"
        )
    for field in ("hidden_size", "vocab_size"):
        theirs = getattr(target, field)
        fits(name, field, config.get(field, theirs), theirs)
    if int(config.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModelError(
            f"{name}: num_hidden_layers={config['num_hidden_layers']}: a head has one layer"
        )
    num_heads = int(config.get("num_attention_heads", 0))
    kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads < 1 or num_heads % kv_heads:
        raise UnsupportedModelError(
            f"{name}: num_attention_heads={num_heads} is not a multiple of {kv_heads} KV heads"
        )
    head_dim = int(config.get("head_dim") or target.hidden_size // num_heads)
    eps = float(config.get("rms_norm_eps", 1e-6))
    heads = Heads(num_heads, kv_heads, head_dim, head_dim, eps, head_dim**-0.5)
    max_position = int(config.get("max_position_embeddings") or target.max_position)
    rope = parse_rope({"rope_theta": 10000.0, **config}, head_dim, max_position)
    if rope.depends_on_prompt:
        raise UnsupportedModelError(f"{name}: a head with {rope.kind} rope is not implemented")
    return EagleConfig(
        is_third=is_third,
        taps=_taps(config, target, name) if is_third else (target.num_layers,),
        group=KvGroup(GROUP, (0,), heads, rope),
        hidden_size=target.hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        norm_eps=eps,
        vocab_size=target.vocab_size,
        draft_vocab=int(config.get("draft_vocab_size") or target.vocab_size),
    )


def random_eagle(target: ModelConfig, wanted: str) -> EagleConfig:
    """Return the config of a head with the target's shape, for models with random weights."""
    heads = replace(target.groups[0].heads, window=None, softcap=None)
    heads = replace(heads, is_chunked=False, norms_whole=False)
    if heads.mla is not None:
        size = heads.mla.nope_dim + heads.mla.rope_dim
        heads = replace(heads, num_kv_heads=heads.num_heads, head_dim=size, mla=None)
    heads = replace(heads, value_dim=heads.head_dim, scale=heads.head_dim**-0.5, norms_values=False)
    rope = parse_rope({"rope_theta": 10000.0}, heads.head_dim, target.max_position)
    num = target.num_layers
    taps = (0, num // 2, num) if wanted == "eagle3" else (num,)
    return EagleConfig(
        is_third=wanted == "eagle3",
        taps=taps,
        group=KvGroup(GROUP, (0,), heads, rope),
        hidden_size=target.hidden_size,
        intermediate_size=target.mlp_size,
        norm_eps=target.norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab=target.vocab_size,
    )


def fits(name: str, what: str, ours: object, wanted: object) -> None:
    if ours != wanted:
        raise UnsupportedModelError(
            f"{name}: its {what} is {ours}, the target's {wanted}: it was made for another model"
        )


def _taps(config: Mapping[str, Any], target: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the layers whose input the head gets; by default an early, a middle and a late one, as
    in EAGLE-3."""
    num = target.num_layers
    given = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = tuple(given) if given is not None else (2, num // 2, num - 3)
    if len(taps) != 3 or not all(isinstance(i, int) and 0 <= i < num for i in taps):
        raise UnsupportedModelError(
            f"{name}: eagle_aux_hidden_state_layer_ids={list(taps)}: must be three layers of the "
            f"target, from 0 to {num - 1}"
        )
    return taps


def plain_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the stored name of each tensor by its name without the prefix of some exporters."""
    return {name.removeprefix("model."): name for name in checkpoint.names()}
