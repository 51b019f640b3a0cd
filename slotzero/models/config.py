"""What a checkpoint's config says, in our words; what we do not implement is refused by name.

It reads a Hugging Face style mapping and knows no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.rope import RopeConfig, parse_rope


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the skeleton where its config does not say so."""

    model_type: str
    qkv_bias: bool | None = None  # None: the config's attention_bias decides
    out_bias: bool | None = None
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama"),  # SmolLM2 too
    "MistralForCausalLM": Family("mistral", qkv_bias=False, out_bias=False),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, out_bias=False),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True),
}

ARCHITECTURES: Mapping[str, str] = {f.model_type: name for name, f in FAMILIES.items()}

# Fields that change results and that we do not implement, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "clip_qkv": (None,),
    "no_rope_layers": (None,),
    "no_rope_layer_interval": (None,),
}


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    family = _family(config)
    _refuse_unimplemented(config)
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    if heads % kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim={head_dim}: rotary embedding needs an even size")
    bias = bool(config.get("attention_bias", False))
    max_position = _positive(config, "max_position_embeddings")
    rope = parse_rope(config, head_dim, max_position)
    return ModelConfig(
        family=family.model_type,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=rope.extended(max_position),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=rope,
    )


def _family(config: Mapping[str, Any]) -> Family:
    named = ARCHITECTURES.get(str(config.get("model_type")), str(config.get("model_type")))
    architectures = config.get("architectures") or [named]
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise UnsupportedModelError(
            f"architecture {architectures[0]!r} is not supported; supported: {', '.join(FAMILIES)}"
        )
    model_type = config.get("model_type", family.model_type)
    if model_type != family.model_type:
        raise UnsupportedModelError(
            f"config field model_type={model_type!r} does not fit architecture {architectures[0]}"
        )
    return family


def _refuse_unimplemented(config: Mapping[str, Any]) -> None:
    for field, neutral in NEUTRAL.items():
        if field in config and config[field] not in neutral:
            raise UnsupportedModelError(
                f"config field {field}={config[field]!r} changes results and is not implemented"
            )
    window = config.get("sliding_window")
    uses_window = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if window is not None and uses_window and window < config.get("max_position_embeddings", 0):
        raise UnsupportedModelError(
            f"config field sliding_window={window} changes results and is not implemented"
        )
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModelError(
            f"config field layer_types holds {', '.join(sorted(kinds))}: "
            "only full_attention is implemented"
        )


def _positive(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config field {field}={value!r}: a positive number is needed")
    return value
