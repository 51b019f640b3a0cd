"""Parts of a config.json that most families read the same way.

Each function reads one part; a family file combines them and overrides what is different.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Experts, Heads
from slotzero.models.blocks.attention import Attention, KvGroup
from slotzero.models.blocks.dense_mlp import DenseMlp
from slotzero.models.config import FULL, SLIDING, ModelConfig
from slotzero.models.fields import activation, eps, mapping, positive
from slotzero.models.layer import DecoderLayer, LayerNorms, Mlp
from slotzero.models.rope import parse_rope

Config = Mapping[str, Any]
IsSliding = Callable[[int], bool]

LAYER_TYPES: Mapping[str, str] = {"full_attention": FULL, "sliding_attention": SLIDING}
NO_ROPE: Config = {"rope_parameters": {"rope_type": "none"}}
MROPE = "type", "mrope_section", "mrope_interleaved"


def model(config: Config, layers: Sequence[DecoderLayer], **overrides: Any) -> ModelConfig:
    """Return the model with these layers; `overrides` are fields of ModelConfig."""
    softcap = config.get("final_logit_softcapping")
    max_position = positive(config, "max_position_embeddings")
    ropes = [layer.group.rope for layer in layers if layer.group is not None]
    standard: dict[str, Any] = {
        "family": str(config["model_type"]),
        "vocab_size": positive(config, "vocab_size"),
        "hidden_size": positive(config, "hidden_size"),
        "norm_eps": eps(config),
        "max_position": min(rope.extended(max_position) for rope in ropes),
        "layers": tuple(layers),
        "mlp_size": overrides.get("mlp_size") or positive(config, "intermediate_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "final_softcap": None if softcap is None else float(softcap),
    }
    return ModelConfig(**(standard | overrides))


def sparse_model(
    config: Config,
    attention: Sequence[Attention],
    moe: Mlp,
    dense: DenseMlp | None = None,  # None: as configured
    **overrides: Any,
) -> ModelConfig:
    """Return a pre-norm model with this attention in each layer, and experts in sparse layers."""
    sparse, norms = sparse_layers(config), pre_norms(config)
    mlps = [moe if is_sparse else dense or dense_mlp(config) for is_sparse in sparse]
    layers = [DecoderLayer(norms, a, mlp) for a, mlp in zip(attention, mlps, strict=True)]
    return model(config, layers, **overrides)


def pre_norms(config: Config, **overrides: Any) -> LayerNorms:
    """Return norms before the mixer and the MLP; `overrides` are fields of LayerNorms."""
    return LayerNorms(positive(config, "hidden_size"), eps(config), **overrides)


def sandwich_norms(config: Config, offset: float = 0.0) -> LayerNorms:
    """Return norms before and after the mixer and the MLP."""
    return pre_norms(
        config,
        post_mixer="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        post_mlp="post_feedforward_layernorm",
        offset=offset,
    )


def post_norms(config: Config) -> LayerNorms:
    """Return norms after the mixer and the MLP only."""
    return pre_norms(
        config,
        input=None,
        post_mixer="post_attention_layernorm",
        mlp=None,
        post_mlp="post_feedforward_layernorm",
    )


def dense_mlp(config: Config, **overrides: Any) -> DenseMlp:
    """Return a dense MLP; `overrides` are fields of DenseMlp."""
    size_field = overrides.get("size_field", "intermediate_size")
    standard: dict[str, Any] = {
        "hidden_size": positive(config, "hidden_size"),
        "inner_size": positive(config, size_field),
        "has_bias": bool(config.get("mlp_bias", False)),
    }
    if "activation" not in overrides:
        standard["activation"] = activation(config)
    return DenseMlp(**(standard | overrides))


def attention_heads(config: Config, **overrides: Any) -> Heads:
    """Return the heads of an attention layer; `overrides` are fields of Heads."""
    num_heads = positive(config, "num_attention_heads")
    head_dim = config.get("head_dim") or positive(config, "hidden_size") // num_heads
    softcap = config.get("attn_logit_softcapping")
    field = "num_key_value_heads"
    standard: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": num_heads if config.get(field) is None else positive(config, field),
        "head_dim": head_dim,
        "value_dim": config.get("v_head_dim") or head_dim,
        "norm_eps": eps(config),
        "scale": (config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        "softcap": None if softcap is None else float(softcap),
    }
    return Heads(**(standard | overrides))


def never(layer: int) -> bool:
    """Return False: the rule of a model without sliding layers."""
    return False


def layer_groups(
    config: Config, is_sliding: IsSliding = never, ends_full: bool = False
) -> list[str]:
    """Return the KV group of each layer, by layer_types or else by the rule `is_sliding`."""
    num_layers, given = positive(config, "num_hidden_layers"), config.get("layer_types")
    if given is None:
        return [SLIDING if is_sliding(layer) else FULL for layer in range(num_layers)]
    if len(given) != num_layers:
        raise UnsupportedModelError(
            f"config field layer_types has {len(given)} entries for {num_layers} layers"
        )
    unknown = sorted({str(kind) for kind in given if kind not in LAYER_TYPES})
    if unknown:
        raise UnsupportedModelError(
            f"config field layer_types contains {', '.join(unknown)}, which is not implemented; "
            f"implemented: {', '.join(LAYER_TYPES)}"
        )
    if ends_full and LAYER_TYPES[given[-1]] != FULL:
        raise UnsupportedModelError(
            f"config field layer_types ends with {given[-1]}: the last layer must have "
            "full_attention"
        )
    return [LAYER_TYPES[kind] for kind in given]


def kv_group(
    config: Config,
    name: str,
    layers: Sequence[int],
    heads: Heads,
    rope: Config,
    readers: Sequence[int] = (),
) -> KvGroup:
    """Return a KV group of layers with these heads; `rope` is a config for parse_rope."""
    max_position = positive(config, "max_position_embeddings")
    if heads.head_dim % 2:
        raise UnsupportedModelError(
            f"config field head_dim={heads.head_dim}: must be even for rotary embedding"
        )
    if name == SLIDING:
        heads = replace(heads, window=_window(config, max_position))
    if heads.num_heads % heads.num_kv_heads:
        raise UnsupportedModelError(
            f"config field num_attention_heads={heads.num_heads} is not a multiple of "
            f"num_key_value_heads={heads.num_kv_heads} of {name} layers"
        )
    parsed = parse_rope(rope, heads.head_dim, max_position)
    return KvGroup(name, tuple(layers), heads, parsed, tuple(readers))


def kv_groups(
    config: Config,
    names: Sequence[str],
    heads: Heads,
    thetas: tuple[float, float] = (10000.0, 10000.0),  # of full and of sliding layers
    scales_full_only: bool = False,
    is_interleaved: bool = False,
    unrotated: Sequence[str] = (),
) -> dict[str, KvGroup]:
    """Return the KV groups by name, for layers that all have the same heads.

    With `scales_full_only`, RoPE scaling in flat fields applies to full layers only. Groups named
    in `unrotated` have no RoPE. See RopeConfig.is_interleaved.
    """
    groups = {}
    for name in dict.fromkeys(names):
        layers = [layer for layer, group in enumerate(names) if group == name]
        rope = rope_of(config, name, thetas[name == SLIDING], scales_full_only)
        group = kv_group(config, name, layers, heads, NO_ROPE if name in unrotated else rope)
        groups[name] = replace(group, rope=replace(group.rope, is_interleaved=is_interleaved))
    return groups


def rope_of(
    config: Config, group: str, theta: float = 10000.0, scales_full_only: bool = False
) -> Config:
    """Return the RoPE config of one group of layers.

    The config has nested parameters by group, or the older flat fields for all layers. In some
    families (`scales_full_only`) the flat fields scale full layers only, and sliding layers have
    another base.
    """
    nested = nested_rope(config, group, theta)
    if nested is not None:
        return nested
    if group == SLIDING and scales_full_only:
        return {"rope_theta": config.get("rope_local_base_freq") or theta}
    return {**config, "rope_theta": config.get("rope_theta") or theta}


def nested_rope(config: Config, group: str, theta: float = 10000.0) -> Config | None:
    """Return the entry of rope_parameters for this group; None if it has none."""
    nested = config.get("rope_parameters") or {}
    for kind, name in LAYER_TYPES.items():
        if name == group and isinstance(nested.get(kind), Mapping):
            return {"rope_parameters": {"rope_theta": theta, **nested[kind]}}
    return None


def partial_rope(config: Config, theta: float, default: float) -> Config:
    """Return the RoPE config of heads that are rotated in part: by default, the part `default`."""
    partial = config.get("partial_rotary_factor") or default
    given = config.get("rope_parameters") or mapping(config, "rope_scaling")
    parameters = {"partial_rotary_factor": partial, **given}
    theta = config.get("rope_theta") or theta
    return {**config, "rope_theta": theta, "rope_parameters": parameters}


def without_mrope(config: Config) -> Config:
    """Return the config without the fields of multimodal RoPE, which has three positions per token:
    for a token of text they are equal, so it is rotated as without them."""
    fields = "rope_parameters", "rope_scaling"
    given = {field: mapping(config, field) for field in fields if config.get(field)}
    plain = {
        field: {name: rope[name] for name in rope if name not in MROPE} | _plain_kind(rope)
        for field, rope in given.items()
    }
    return {**config, **plain}


def _plain_kind(rope: Config) -> dict[str, str]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {"rope_type": "default" if kind == "mrope" else kind}


def rope_if_configured(config: Config) -> Config:
    """Return the RoPE config of heads that are rotated only if position_embedding_type=rope."""
    if config.get("position_embedding_type") == "rope":
        return rope_of(config, FULL)
    if mapping(config, "rope_scaling"):
        raise UnsupportedModelError(
            "config field rope_scaling has no effect without position_embedding_type=rope: set "
            "that, or remove rope_scaling"
        )
    return NO_ROPE


def experts(config: Config, num: str, top_k: str, inner_size: str, **overrides: Any) -> Experts:
    """Return the experts of a config.

    `num`, `top_k` and `inner_size` are names of config fields; `overrides` are fields of Experts.
    """
    shape = Experts(
        num_experts=positive(config, num),
        top_k=positive(config, top_k),
        inner_size=positive(config, inner_size),
        **{"activation": activation(config), **overrides},
    )
    if shape.top_k > shape.num_experts:
        raise UnsupportedModelError(
            f"config fields {num}={shape.num_experts}, {top_k}={shape.top_k}: a token cannot use "
            "more experts than there are"
        )
    return shape


def sigmoid_experts(config: Config, num_shared: int = 0, **overrides: Any) -> Experts:
    """Return experts with DeepSeek-V3's router: sigmoid scores with a correction, and groups."""
    if config.get("topk_method") not in (None, "noaux_tc"):
        raise UnsupportedModelError(
            f"config field topk_method={config['topk_method']!r}: only noaux_tc is implemented"
        )
    return Experts(
        num_experts=positive(config, "n_routed_experts"),
        top_k=positive(config, "num_experts_per_tok"),
        inner_size=positive(config, "moe_intermediate_size"),
        **{"activation": activation(config), **overrides},
        scores="sigmoid",
        is_corrected=True,
        is_normed=bool(config.get("norm_topk_prob", True)),
        factor=float(config.get("routed_scaling_factor") or 1.0),
        num_shared=num_shared,
        **expert_groups(config, scores_per_group=2),
    )


def expert_groups(config: Config, scores_per_group: int) -> dict[str, Any]:
    """Return the fields of Experts for expert groups; see Experts.num_groups."""
    num = config.get("n_group") or 1
    top = (config.get("topk_group") or 1) if num > 1 else 1
    routed, top_k = positive(config, "n_routed_experts"), positive(config, "num_experts_per_tok")
    if routed % num:
        raise UnsupportedModelError(
            f"config field n_routed_experts={routed} is not a multiple of n_group={num}"
        )
    if top > num or top_k > routed // num * top or scores_per_group > routed // num:
        raise UnsupportedModelError(
            f"config fields n_group={num}, topk_group={top}, num_experts_per_tok={top_k}: "
            f"{routed} experts are too few for that selection"
        )
    return {"num_groups": num, "top_groups": top, "scores_per_group": scores_per_group}


def sparse_layers(config: Config, num_dense: int = 0) -> list[bool]:
    """Return for each layer whether it has experts.

    `num_dense` is the number of first layers without experts, if the config does not set it.
    """
    num_layers = positive(config, "num_hidden_layers")
    if config.get("decoder_sparse_step") is not None or config.get("mlp_only_layers"):
        every = positive({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
        dense = config.get("mlp_only_layers") or ()
        return [i not in dense and (i + 1) % every == 0 for i in range(num_layers)]
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        first = config.get("first_k_dense_replace")
        first = min(num_dense if first is None else first, num_layers)
        kinds = ["dense"] * first + ["sparse"] * (num_layers - first)
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise UnsupportedModelError(
            f"config field mlp_layer_types={kinds!r}: must be dense or sparse for each of "
            f"{num_layers} layers"
        )
    return [kind == "sparse" for kind in kinds]


def _window(config: Config, max_position: int) -> int:
    window = config.get("sliding_window")
    if not isinstance(window, int) or not 1 <= window <= max_position:
        raise UnsupportedModelError(
            f"config field sliding_window={window!r}: must be a number from 1 to "
            f"max_position_embeddings={max_position}"
        )
    return window
