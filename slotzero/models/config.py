"""What a checkpoint's config says, in our words; what we do not implement is refused by name.

It reads a Hugging Face style mapping and knows no tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Activation, Experts, Heads
from slotzero.models.fields import activation, eps, mapping, plain_activation, positive
from slotzero.models.latent import latent_heads
from slotzero.models.mixtures import experts_of, shared_expert_size, sparse_layers
from slotzero.models.per_layer import heads_of, owners_and_readers, with_full_heads
from slotzero.models.recurrent import Mixers, Recurrent, layers_of, plainly, recurrent_of
from slotzero.models.rope import RopeConfig, parse_rope, refuse_two_ropes

FULL, SLIDING, LATENT = "full", "sliding", "latent"
LAYER_TYPES: Mapping[str, str] = {"full_attention": FULL, "sliding_attention": SLIDING}


@dataclass(frozen=True)
class KvGroup:
    """Layers whose KV lies in one pool, behind one page table."""

    name: str
    layers: tuple[int, ...]  # each owns its pages in the pool
    heads: Heads
    rope: RopeConfig
    has_sinks: bool
    readers: tuple[int, ...] = ()
    """Layers that own no KV: they attend to the pages of the last of `layers`."""
    values_are_keys: bool = False
    """Values are what keys are, before norm and rotation."""

    @property
    def reader_heads(self) -> Heads:
        return replace(self.heads, stores=False)

    @property
    def shapes(self) -> tuple[Heads, ...]:
        return (self.heads, self.reader_heads) if self.readers else (self.heads,)

    def owner_of(self, layer: int) -> int:
        """Whose pages it attends to, as an index into `layers`."""
        return len(self.layers) - 1 if layer in self.readers else self.layers.index(layer)


class Scales(NamedTuple):
    """What some models multiply by; but for the last, weights are as they are read."""

    qkv: float = 1.0  # of what goes into attention
    key: float = 1.0
    out: float = 1.0  # of what comes out of attention
    gate: float = 1.0  # of an MLP
    down: float = 1.0  # of what comes out of an MLP and of experts
    logits: float = 1.0


NO_SCALES = Scales()


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    groups: tuple[KvGroup, ...]
    norm_eps: float
    norms: Literal["before", "after", "around"]
    """What attention and MLP have an RMSNorm of: what goes in, what comes out, or both."""
    norm_offset: float
    """What a stored norm weight lacks."""
    qk_norm: Literal["head", "whole"] | None
    max_position: int
    tied_embeddings: bool
    embedding_scale: float
    final_softcap: float | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    activation: Activation
    value_scale: float
    experts: Experts | None
    sparse_layers: tuple[int, ...]
    """Those that have experts in place of one MLP, or beside it."""
    shared_mlp: bool
    q_rank: int | None
    """Of latent heads: queries are made of so many numbers under a norm; None: of the token's."""
    num_mtp_layers: int
    """Layers behind the last that guess tokens ahead, stored with the others."""
    reader_width: int = 1
    """How many times as wide the MLP of a layer is that owns no KV."""
    input_size: int = 0
    """Of what each token has for each layer alone, beside the residual; 0: nothing."""
    input_vocab: int = 0
    scales_layers: bool = False
    """What comes out of a layer is multiplied by a number of its own."""
    recurrent: Recurrent | None = None
    mlp_layers: tuple[int, ...] | None = None
    """Those that have an MLP or experts; None: all."""
    shared_expert_size: int | None = None
    """Of the MLP beside experts, where it is not like the others."""
    gates_beside: bool = False
    """What that MLP brings is gated, by one number of each token."""
    gates_attention: bool = False
    """What attention brings is gated, by as many numbers of the token."""
    gates_mlp: bool = True
    """Else an MLP has no gates: its activation is of the one product."""
    scales: Scales = NO_SCALES

    def group_of(self, layer: int) -> KvGroup | None:
        """None: the layer has no attention."""
        return next((g for g in self.groups if layer in g.layers or layer in g.readers), None)

    def has_mlp(self, layer: int) -> bool:
        return self.mlp_layers is None or layer in self.mlp_layers


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the skeleton where its config does not say so."""

    model_type: str
    knows: frozenset[str] = frozenset()
    """Fields of NEUTRAL that it implements."""
    qkv_bias: bool | None = None  # None: the config's attention_bias decides
    out_bias: bool | None = None
    qk_norm: Literal["head", "whole"] | None = None
    norms: Literal["before", "after", "around"] = "before"
    norm_offset: float = 0.0
    scales_embedding: bool = False
    is_sliding: Callable[[int, Mapping[str, Any]], bool] = lambda layer, config: False
    """Of a layer, where the config has no layer_types."""
    thetas: tuple[float, float] = (10000.0, 10000.0)  # of full and of sliding layers
    scales_full_only: bool = False
    """Rope scaling that the config does not give by kind of layer is for full layers."""
    sinks: frozenset[str] = frozenset()  # groups whose heads have one
    kv_heads_of_sliding: int = 1  # as many times those of full layers
    is_latent: bool = False
    ropes_by_kind: bool = False  # the config says how each kind of layer rotates
    full_head_dim: int | None = None  # where full layers have another, and the config is silent
    ends_full: bool = False  # its last layer is a full one
    score_scale: float | None = None  # None: by the size of a head
    norms_values: bool = False
    scales_layers: bool = False
    shared_mlp: bool = False  # its experts, if it has any, are beside an MLP
    mixers: Mixers = "attention"
    gates_beside: bool = False
    gates_attention: bool = False
    gates_mlp: bool = True
    num_mtp_layers: int = 0  # where the config is silent
    rotates: float = 1.0  # of each head, where the config is silent


def _all_slide(layer: int, config: Mapping[str, Any]) -> bool:
    return config.get("sliding_window") is not None


def _late_slide(layer: int, config: Mapping[str, Any]) -> bool:
    is_late = layer >= config.get("max_window_layers", 0)
    return bool(config.get("use_sliding_window")) and is_late


def _slide_but_every(default: int, field: str = "") -> Callable[[int, Mapping[str, Any]], bool]:
    return lambda layer, config: (layer + 1) % (config.get(field) or default) != 0


def _all_but_every_sixth_and_last(layer: int, config: Mapping[str, Any]) -> bool:
    return (layer + 1) % 6 != 0 and layer + 1 != config["num_hidden_layers"]


def _mimo_slides(layer: int, config: Mapping[str, Any]) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


_DEEPSEEK = frozenset(
    {"n_routed_experts", "n_shared_experts", "v_head_dim", "kv_lora_rank", "quantization_config"}
    | {"num_experts", "num_local_experts", "num_nextn_predict_layers"}
)
_GEMMA = frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"})
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama"),  # SmolLM2 too
    "MistralForCausalLM": Family(
        "mistral", qkv_bias=False, out_bias=False, is_sliding=_all_slide
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", frozenset({"use_sliding_window"}), qkv_bias=True, out_bias=False,
        is_sliding=_late_slide,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", frozenset({"use_sliding_window"}), qk_norm="head", is_sliding=_late_slide
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2", _GEMMA, norms="around", norm_offset=1.0, scales_embedding=True,
        is_sliding=_slide_but_every(2),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text", _GEMMA - {"attn_logit_softcapping"}, qk_norm="head", norms="around",
        norm_offset=1.0, scales_embedding=True,
        is_sliding=_slide_but_every(6, "sliding_window_pattern"), thetas=(1e6, 1e4),
        scales_full_only=True,
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        frozenset({
            "final_logit_softcapping", "per_layer_config", "global_head_dim",
            "num_global_key_value_heads", "attention_k_eq_v", "num_kv_shared_layers",
            "use_double_wide_mlp", "hidden_size_per_layer_input", "enable_moe_block", "num_experts",
        }),
        qk_norm="head", norms="around", scales_embedding=True,
        is_sliding=_all_but_every_sixth_and_last, ropes_by_kind=True, full_head_dim=512,
        ends_full=True, score_scale=1.0, norms_values=True, scales_layers=True,
        shared_mlp=True,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3", qk_norm="whole", norms="after", is_sliding=_slide_but_every(4),
        thetas=(5e5, 5e5), scales_full_only=True,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", frozenset({"num_local_experts", "num_experts", "quantization_config"}),
        is_sliding=_slide_but_every(2), thetas=(150000.0, 150000.0),
        sinks=frozenset({FULL, SLIDING}),
    ),
    "MiMoV2FlashForCausalLM": Family(
        "mimo_v2_flash", frozenset({"n_routed_experts", "v_head_dim", "attention_value_scale"}),
        out_bias=False, is_sliding=_mimo_slides, thetas=(5e6, 1e4), sinks=frozenset({SLIDING}),
        kv_heads_of_sliding=2,
    ),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", _DEEPSEEK, is_latent=True),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", _DEEPSEEK, is_latent=True),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        frozenset({"num_experts", "partial_rotary_factor", "num_nextn_predict_layers"}),
        qk_norm="head", norm_offset=1.0, mixers="either", shared_mlp=True, gates_beside=True,
        gates_attention=True, num_mtp_layers=1, rotates=0.25,
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1", frozenset({"embedding_multiplier"}), mixers="both"
    ),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        frozenset({
            "embedding_multiplier", "logits_scaling", "residual_multiplier", "num_local_experts",
            "attention_multiplier",
        }),
        mixers="either", shared_mlp=True,
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h", frozenset({"n_routed_experts", "n_shared_experts", "num_local_experts"}),
        qkv_bias=False, out_bias=False, mixers="alone", shared_mlp=True, gates_mlp=False,
    ),
}  # fmt: skip

ARCHITECTURES: Mapping[str, str] = {f.model_type: name for name, f in FAMILIES.items()}

# Fields that change results where nobody implements them, with the values that change nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False, "vision"),  # no image ever comes
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "v_head_dim": (None,),
    "kv_lora_rank": (None,),
    "num_nextn_predict_layers": (None, 0),
    "moe_layer_freq": (None, 1),
    "attention_value_scale": (None, 1, 1.0),
    "hybrid_layer_pattern": (None,),
    "swa_num_key_value_heads": (None,),
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
    "per_layer_config": (None, {}),
    "global_head_dim": (None,),
    "num_global_key_value_heads": (None,),
    "attention_k_eq_v": (None, False),
    "num_kv_shared_layers": (None, 0),
    "use_double_wide_mlp": (None, False),
    "hidden_size_per_layer_input": (None, 0),
    "enable_moe_block": (None, False),
}
DEQUANTISED = ("mxfp4", "fp8")  # quant_method of weights that are turned into plain ones at load


_PLAIN_ROPE = ("granitemoehybrid", "nemotron_h")  # heads are not turned unless the config asks
_MLP_SIZE = {"granitemoehybrid": "shared_intermediate_size"}


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    family = family_of(config)
    config = plainly(config, family.model_type)
    _refuse_unimplemented(config, family)
    hidden = positive(config, "hidden_size")
    num_layers = positive(config, "num_hidden_layers")
    max_position = positive(config, "max_position_embeddings")
    layers = layers_of(config, family.mixers, num_layers)
    groups = _groups(config, family, num_layers, max_position, layers.attention)
    bias = bool(config.get("attention_bias", False))
    experts = experts_of(config, family.model_type)
    sparse = layers.sparse
    if sparse is None:
        sparse = sparse_layers(config, num_layers) if experts else ()
    softcap = config.get("final_logit_softcapping")
    return ModelConfig(
        family=family.model_type,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, _MLP_SIZE.get(family.model_type, "intermediate_size")),
        num_layers=num_layers,
        groups=groups,
        norm_eps=eps(config),
        norms=family.norms,
        norm_offset=family.norm_offset,
        qk_norm=family.qk_norm,
        max_position=min(group.rope.extended(max_position) for group in groups),
        tied_embeddings=bool(config.get("tie_word_embeddings", family.scales_embedding)),
        embedding_scale=_embedding_scale(config, family),
        final_softcap=None if softcap is None else float(softcap),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        activation=activation(config) if family.gates_mlp else plain_activation(config),
        value_scale=float(config.get("attention_value_scale") or 1.0),
        experts=experts,
        sparse_layers=sparse,
        shared_mlp=experts is not None and family.shared_mlp,
        q_rank=_q_rank(config) if family.is_latent else None,
        num_mtp_layers=config.get("num_nextn_predict_layers", family.num_mtp_layers) or 0,
        reader_width=2 if config.get("use_double_wide_mlp") else 1,
        scales_layers=family.scales_layers,
        recurrent=recurrent_of(config, family.model_type, layers.recurrent),
        mlp_layers=layers.mlp if family.mixers == "alone" else None,
        shared_expert_size=shared_expert_size(config, family.model_type),
        gates_beside=family.gates_beside,
        gates_attention=family.gates_attention,
        gates_mlp=family.gates_mlp,
        scales=_scales(config, family.model_type),
        **_layer_inputs(config),
    )


def _embedding_scale(config: Mapping[str, Any], family: Family) -> float:
    if family.scales_embedding:
        return math.sqrt(positive(config, "hidden_size"))
    return float(config.get("embedding_multiplier") or 1.0)


def _scales(config: Mapping[str, Any], model_type: str) -> Scales:
    def given(field: str) -> float:
        return float(config.get(field) or 1.0)

    if model_type == "falcon_h1":
        gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
        return Scales(
            qkv=given("attention_in_multiplier"),
            key=given("key_multiplier"),
            out=given("attention_out_multiplier"),
            gate=float(gate),
            down=float(down),
            logits=given("lm_head_multiplier"),
        )
    residual = given("residual_multiplier")
    return Scales(out=residual, down=residual, logits=1.0 / given("logits_scaling"))


def family_of(config: Mapping[str, Any]) -> Family:
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


def _refuse_unimplemented(config: Mapping[str, Any], family: Family) -> None:
    method = quantisation_of(config)
    if method in DEQUANTISED and "quantization_config" not in family.knows:
        raise UnsupportedModelError(
            f"{family.model_type} quantised by {method} is not implemented; use the unquantised "
            "folder or a GGUF file"
        )
    for field, neutral in NEUTRAL.items():
        if field in family.knows or field not in config:
            continue
        if config[field] not in neutral:
            raise UnsupportedModelError(
                f"config field {field}={config[field]!r} changes results and is not implemented"
            )
    if method not in (None, *DEQUANTISED):
        raise UnsupportedModelError(
            f"config field quantization_config has quant_method={method!r}: "
            f"only {', '.join(DEQUANTISED)} is implemented"
        )
    refuse_two_ropes(config)


def quantisation_of(config: Mapping[str, Any]) -> str | None:
    given = mapping(config, "quantization_config")
    return str(given.get("quant_method", "unknown")) if given else None


def _groups(
    config: Mapping[str, Any],
    family: Family,
    num_layers: int,
    max_position: int,
    attending: tuple[int, ...],
) -> tuple[KvGroup, ...]:
    if family.is_latent:
        heads, rope = latent_heads(config, max_position)
        return (KvGroup(LATENT, tuple(range(num_layers)), heads, rope, has_sinks=False),)
    if family.mixers == "attention":
        kinds = _layer_kinds(config, family, num_layers)
    else:
        kinds = [FULL if layer in attending else "" for layer in range(num_layers)]
    num_heads = positive(config, "num_attention_heads")
    head_dim = config.get("head_dim") or positive(config, "hidden_size") // num_heads
    scalar, softcap = config.get("query_pre_attn_scalar"), config.get("attn_logit_softcapping")
    full = Heads(
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        value_dim=config.get("v_head_dim") or head_dim,
        norm_eps=eps(config),
        scale=_score_scale(config, family) or (scalar or head_dim) ** -0.5,
        softcap=None if softcap is None else float(softcap),
        norms_whole=family.qk_norm == "whole",
        norms_values=family.norms_values,
    )
    if family.full_head_dim is not None:
        full_layers = [layer for layer, kind in enumerate(kinds) if kind == FULL]
        config = with_full_heads(config, full_layers, family.full_head_dim)
    groups = []
    for name in (FULL, SLIDING):
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == name)
        if not layers:
            continue
        heads = heads_of(config, name, layers, full)
        if heads.head_dim % 2:
            raise UnsupportedModelError(
                f"head_dim={heads.head_dim}: rotary embedding needs an even size"
            )
        if name == SLIDING:
            more = heads.num_kv_heads * family.kv_heads_of_sliding
            heads = replace(heads, num_kv_heads=more, window=_window(config, max_position))
        if heads.num_heads % heads.num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads={heads.num_heads} is not a multiple of "
                f"num_key_value_heads={heads.num_kv_heads} of {name} layers"
            )
        rope = parse_rope(_rope_of(config, family, name), heads.head_dim, max_position)
        owners, readers = owners_and_readers(config, name, layers, num_layers)
        is_one = name == FULL and bool(config.get("attention_k_eq_v"))
        groups.append(KvGroup(name, owners, heads, rope, name in family.sinks, readers, is_one))
    return tuple(groups)


def _score_scale(config: Mapping[str, Any], family: Family) -> float | None:
    given = config.get("attention_multiplier")
    return family.score_scale if given is None else float(given)


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    field = "num_key_value_heads"
    return num_heads if config.get(field) is None else positive(config, field)


def _layer_kinds(config: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    given = config.get("layer_types")
    if given is None:
        slides = (family.is_sliding(layer, config) for layer in range(num_layers))
        return [SLIDING if is_sliding else FULL for is_sliding in slides]
    if len(given) != num_layers:
        raise UnsupportedModelError(
            f"config field layer_types names {len(given)} layers of {num_layers}"
        )
    unknown = sorted({str(kind) for kind in given if kind not in LAYER_TYPES})
    if unknown:
        raise UnsupportedModelError(
            f"config field layer_types holds {', '.join(unknown)}: "
            f"implemented are {', '.join(LAYER_TYPES)}"
        )
    if family.ends_full and LAYER_TYPES[given[-1]] != FULL:
        raise UnsupportedModelError(
            f"config field layer_types ends with {given[-1]}: full_attention is needed there"
        )
    return [LAYER_TYPES[kind] for kind in given]


def _window(config: Mapping[str, Any], max_position: int) -> int:
    window = config.get("sliding_window")
    if not isinstance(window, int) or not 1 <= window <= max_position:
        raise UnsupportedModelError(
            f"config field sliding_window={window!r}: a number from 1 to "
            f"max_position_embeddings={max_position} is needed"
        )
    return window


def _rope_of(config: Mapping[str, Any], family: Family, group: str) -> Mapping[str, Any]:
    """The config as if all layers were of this group: nested parameters, or the older flat ones,
    of which the scaling is for full layers and another base may be for sliding ones."""
    theta = family.thetas[group == SLIDING]
    if family.model_type in _PLAIN_ROPE and config.get("position_embedding_type") != "rope":
        if mapping(config, "rope_scaling"):
            raise UnsupportedModelError(
                "config field rope_scaling: heads of this model are not turned without "
                "position_embedding_type=rope"
            )
        return {"rope_parameters": {"rope_type": "none"}}
    nested = config.get("rope_parameters") or {}
    for kind, name in LAYER_TYPES.items():
        if name == group and isinstance(nested.get(kind), Mapping):
            return {"rope_parameters": {"rope_theta": theta, **nested[kind]}}
    if family.ropes_by_kind:
        raise UnsupportedModelError(f"config field rope_parameters has nothing for {group} layers")
    if group == SLIDING and family.scales_full_only:
        return {"rope_theta": config.get("rope_local_base_freq") or theta}
    given = {**config, "rope_theta": config.get("rope_theta") or theta}
    if "partial_rotary_factor" in family.knows:
        partial = config.get("partial_rotary_factor") or family.rotates
        said = nested or mapping(config, "rope_scaling")
        given["rope_parameters"] = {"partial_rotary_factor": partial, **said}
    return given


def _q_rank(config: Mapping[str, Any]) -> int | None:
    return None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank")


def _layer_inputs(config: Mapping[str, Any]) -> dict[str, int]:
    if not config.get("hidden_size_per_layer_input"):
        return {}
    vocab, of_inputs = (positive(config, f"vocab_size{end}") for end in ("", "_per_layer_input"))
    if of_inputs < vocab:
        raise UnsupportedModelError(
            f"config field vocab_size_per_layer_input={of_inputs} is below vocab_size={vocab}"
        )
    size = positive(config, "hidden_size_per_layer_input")
    return {"input_size": size, "input_vocab": of_inputs}
