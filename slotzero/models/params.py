"""The weights that a config promises: which tensors of a checkpoint make up each stacked one.

It knows names and shapes, and no numbers. Real checkpoints are compared to it and random ones are
made from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotzero.kernels.types import Heads
from slotzero.models.assistant import (
    BACK,
    CENTROIDS,
    JOIN,
    MODEL_TYPE,
    ORDER,
    AssistantConfig,
    parse_assistant,
)
from slotzero.models.config import KvGroup, ModelConfig, parse_config
from slotzero.models.param import LayerParams, Param, Shared, Source, abreast
from slotzero.models.params_recurrent import recurrent_params
from slotzero.models.rope import halves


def params_of(config: ModelConfig) -> list[Param]:
    vocab, hidden, offset = config.vocab_size, config.hidden_size, config.norm_offset

    def single(name: str, source: str, rows: int, columns: int | None, offset: float = 0) -> Param:
        return Param(name, name, (Source(source, rows),), columns, offset=offset)

    everywhere = LayerParams(tuple(range(config.num_layers)))
    _norms(everywhere, config, has_two=config.mlp_layers is None)
    _layer_ends(everywhere, config)
    params = [
        single("embedding", "model.embed_tokens.weight", vocab, hidden),
        *([] if config.tied_embeddings else [single("head", "lm_head.weight", vocab, hidden)]),
        single("final_norm", "model.norm.weight", hidden, None, offset),
        *everywhere.made,
    ]
    if config.input_size:
        size, stored = config.input_size, "model.per_layer_model_projection.weight"
        every, table = config.num_layers * size, "model.embed_tokens_per_layer.weight"
        norm = "model.per_layer_projection_norm.weight"
        params.append(single("input_embedding", table, config.input_vocab, every))
        params.append(single("input_projection", stored, every, hidden))
        params.append(single("projected_norm", norm, size, None, offset))
    for group in config.groups:
        if group.layers:
            params += _attention(config, group)
        if group.readers:
            params += _attention(config, group, reads=True)
    if config.recurrent is not None:
        params += recurrent_params(hidden, config.recurrent)
    wide = {i for group in config.groups for i in group.readers if config.reader_width > 1}
    sparse = set(config.sparse_layers)
    dense = {i for i in range(config.num_layers) if config.has_mlp(i)} - sparse
    for of_kind, beside in ((dense, False), (sparse if config.shared_mlp else set(), True)):
        for layers, width in ((of_kind - wide, 1), (of_kind & wide, config.reader_width)):
            if layers:
                params += _mlp(config, tuple(sorted(layers)), width, beside)
    if config.sparse_layers:
        params += _experts(config, config.sparse_layers)
    return [replace(param, renames=RENAMES.get(config.family, ())) for param in params]


RENAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "falcon_h1": (
        ("model.norm.", "model.final_layernorm."),
        (".post_attention_layernorm.", ".pre_ff_layernorm."),
        (".mlp.", ".feed_forward."),
    ),
    "nemotron_h": (
        ("model.norm.", "model.norm_f."),
        (".embed_tokens.", ".embeddings."),
        (".input_layernorm.", ".norm."),
        (".self_attn.", ".mixer."),
        (".mlp.", ".mixer."),
        ("model.", "backbone."),
    ),
}
"""By family, where a checkpoint has other names than most."""


def ahead_params(config: ModelConfig, layer: int) -> list[Param]:
    """Of a layer behind the last that guesses ahead; it is like the last, and begins by joining."""
    own, hidden = LayerParams((layer,)), config.hidden_size
    _norms(own, config, has_two=True)
    own.norm("embed_norm", "enorm", hidden, config.norm_offset)
    own.norm("hidden_norm", "hnorm", hidden, config.norm_offset)
    own.norm("norm", "shared_head.norm", hidden, config.norm_offset)
    own.matrix("join", 2 * hidden, Source("eh_proj", hidden))
    params = [*own.made, *_attention(config, replace(config.groups[-1], layers=(layer,)))]
    is_sparse = config.num_layers - 1 in config.sparse_layers
    if not is_sparse or config.shared_mlp:
        params += _mlp(config, (layer,), 1, is_sparse)
    if is_sparse:
        params += _experts(config, (layer,))
    renames = (
        _ahead_names(layer, layer - config.num_layers) if config.family == "qwen3_next" else ()
    )
    return [replace(param, renames=renames) for param in params]


def _ahead_names(layer: int, index: int) -> tuple[tuple[str, str], ...]:
    """Of families that store such layers apart from the others."""
    at = f"model.layers.{layer}."
    return (
        (f"{at}enorm.", "mtp.pre_fc_norm_embedding."),
        (f"{at}hnorm.", "mtp.pre_fc_norm_hidden."),
        (f"{at}shared_head.norm.", "mtp.norm."),
        (f"{at}eh_proj.", "mtp.fc."),
        (at, f"mtp.layers.{index}."),
    )


def ahead_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How names begin that are of layers which guess ahead."""
    if config.family in ("qwen3_next", "nemotron_h"):
        return ("mtp.",)
    num = config.num_layers
    return tuple(f"model.layers.{num + i}." for i in range(config.num_mtp_layers))


def _norms(params: LayerParams, config: ModelConfig, has_two: bool) -> None:
    """Of layers that have a mixer and an MLP, or one of the two."""
    hidden, offset = config.hidden_size, config.norm_offset
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    if config.norms == "before":
        before = after
    if config.norms in ("before", "around"):
        params.norm("input_norm", "input_layernorm", hidden, offset)
        if has_two:
            params.norm("mlp_norm", before, hidden, offset)
    if config.norms in ("after", "around"):
        params.norm("after_attention", after, hidden, offset)
        params.norm("after_mlp", "post_feedforward_layernorm", hidden, offset)


def _layer_ends(params: LayerParams, config: ModelConfig) -> None:
    hidden, size = config.hidden_size, config.input_size
    if size:
        params.matrix("input_gate", hidden, Source("per_layer_input_gate", size))
        params.matrix("input_out", size, Source("per_layer_projection", hidden))
        params.norm("after_input", "post_per_layer_input_norm", hidden, config.norm_offset)
    if config.scales_layers:
        params.add("scale", (Source("layer_scalar", 1),))


def _attention(config: ModelConfig, group: KvGroup, reads: bool = False) -> list[Param]:
    """Of layers that own KV, or of those that read it."""
    if group.heads.mla is not None:
        return _latent_attention(config, group)
    hidden, heads = config.hidden_size, group.reader_heads if reads else group.heads
    suffix = "" if group is config.groups[0] else f"_{group.name}"
    params = (
        LayerParams(group.readers, f"{suffix}_readers")
        if reads
        else LayerParams(group.layers, suffix)
    )
    order, scales = halves(group.rope), config.scales
    q_size, k_size, v_size = heads.sizes
    q = Source("self_attn.q_proj", q_size, _by_head(order, heads.num_heads), scale=scales.qkv)
    gate = None
    if config.gates_attention:
        q, gate = _with_gates(q, order, heads)
    qkv = [q]
    if heads.stores:
        values = "k_proj" if group.values_are_keys else "v_proj"
        k_order, k_scale = _by_head(order, heads.num_kv_heads), scales.key * scales.qkv
        qkv += (
            Source("self_attn.k_proj", k_size, k_order, scale=k_scale),
            Source(f"self_attn.{values}", v_size, scale=config.value_scale * scales.qkv),
        )
    out = Source("self_attn.o_proj", hidden, scale=scales.out)
    params.matrix("qkv", hidden, *qkv)
    params.matrix("out", heads.out_size, out)
    if gate is not None:
        params.matrix("out_gate", hidden, gate)
        if config.qkv_bias:
            params.bias("out_gate_bias", gate)
    if config.qkv_bias:
        params.bias("qkv_bias", *(replace(s, scale=s.scale / scales.qkv) for s in qkv))
    if config.out_bias:
        params.bias("out_bias", out)
    if config.qk_norm:
        is_whole = config.qk_norm == "whole"
        sizes = (q_size, k_size) if is_whole else (heads.head_dim, heads.head_dim)
        for name, size in zip("qk" if heads.stores else "q", sizes, strict=False):
            turned = _by_head(order, size // heads.head_dim)
            source = Source(f"self_attn.{name}_norm.weight", size, turned)
            params.add(f"{name}_norm", (source,), offset=config.norm_offset)
    if group.has_sinks:
        name = "attention_sink_bias" if config.family == "mimo_v2_flash" else "sinks"
        params.add("sinks", (Source(f"self_attn.{name}", heads.num_heads),))
    return params.made


def _with_gates(q: Source, order: Sequence[int] | None, heads: Heads) -> tuple[Source, Source]:
    """Rows of queries and of gates, which take turns head by head."""
    size = heads.head_dim
    rows = order or range(size)

    def taken(first: int, rows: Sequence[int]) -> list[int]:
        return [2 * size * head + first + row for head in range(heads.num_heads) for row in rows]

    both = replace(q, rows=2 * q.rows)
    return replace(both, order=taken(0, rows)), replace(both, order=taken(size, range(size)))


def _latent_attention(config: ModelConfig, group: KvGroup) -> list[Param]:
    heads, latent, hidden = group.heads, group.heads.mla, config.hidden_size
    assert latent is not None
    plain, turned, rank = latent.nope_dim, latent.rope_dim, heads.value_dim
    params, (q_size, k_size, _) = LayerParams(group.layers), heads.sizes
    order = halves(group.rope) or range(turned)
    q_order = _by_head([*range(plain), *(plain + row for row in order)], heads.num_heads)
    k_order = [*(rank + row for row in order), *range(rank)]  # the latent comes last
    key = Source("self_attn.kv_a_proj_with_mqa", k_size, k_order)
    if config.q_rank is None:
        params.matrix("qkv", hidden, Source("self_attn.q_proj", q_size, q_order), key)
    else:
        params.matrix("qkv", hidden, Source("self_attn.q_a_proj", config.q_rank), key)
        params.norm("q_norm", "self_attn.q_a_layernorm", config.q_rank, 0.0)
        params.matrix("q_up", config.q_rank, Source("self_attn.q_b_proj", q_size, q_order))
    params.norm("k_norm", "self_attn.kv_a_layernorm", rank, 0.0)
    each = plain + latent.v_head_dim
    for name, rows in (("up_k", range(plain)), ("up_v", range(plain, each))):
        taken = [head * each + row for head in range(heads.num_heads) for row in rows]
        source = Source("self_attn.kv_b_proj", heads.num_heads * each, taken)
        params.matrix(name, rank, source, is_packed=False)
    params.matrix("out", heads.out_size, Source("self_attn.o_proj", hidden))
    return params.made


def _by_head(order: Sequence[int] | None, num_heads: int) -> list[int] | None:
    if order is None:
        return None
    return [head * len(order) + row for head in range(num_heads) for row in order]


def _mlp(config: ModelConfig, layers: tuple[int, ...], width: int, beside: bool) -> list[Param]:
    """Alone, or beside experts."""
    params = LayerParams(layers, "_wide" if width > 1 else "")
    inner, hidden = config.intermediate_size * width, config.hidden_size
    if beside and config.shared_expert_size is not None:
        inner = config.shared_expert_size
    gate_up, down = _mlp_sources(config, inner, beside)
    prefix = "dense_" if beside else ""
    params.matrix(f"{prefix}gate_up", hidden, *gate_up)
    params.matrix(f"{prefix}down", inner, down)
    if beside and config.gates_beside:
        params.matrix("dense_gate", hidden, Source("mlp.shared_expert_gate", 1))
    if config.mlp_bias:
        params.bias("gate_up_bias", *gate_up)
        params.bias("down_bias", down)
    return params.made


_BESIDE = {"qwen3_next": "mlp.shared_expert", "nemotron_h": "mlp.shared_experts"}


def _mlp_sources(config: ModelConfig, inner: int, beside: bool) -> tuple[Sequence[Source], Source]:
    hidden, scales = config.hidden_size, config.scales
    if config.family == "granitemoehybrid":
        down = Source("shared_mlp.output_linear", hidden, scale=scales.down)
        return abreast("shared_mlp.input_linear", (inner, inner)), down
    at = _BESIDE.get(config.family, "mlp") if beside else "mlp"
    down = Source(f"{at}.down_proj", hidden, scale=scales.down)
    up = Source(f"{at}.up_proj", inner)
    if not config.gates_mlp:
        return [up], down
    return [Source(f"{at}.gate_proj", inner, scale=scales.gate), up], down


def _experts(config: ModelConfig, layers: tuple[int, ...]) -> list[Param]:
    shape, hidden = config.experts, config.hidden_size
    assert shape is not None
    num, inner = shape.num_experts, shape.inner_size
    params = LayerParams(layers, "_experts")
    if config.family == "gpt_oss":  # gates and values take turns in its rows
        order = [*range(0, 2 * inner, 2), *range(1, 2 * inner, 2)]
        params.matrix("router", hidden, Source("mlp.router", num))
        params.bias("router_bias", Source("mlp.router", num))
        for name, rows, columns, taken in (
            ("gate_up", 2 * inner, hidden, order),
            ("down", hidden, inner, None),
        ):
            source = Source(f"mlp.experts.{name}_proj", rows, taken)
            bias = Source(f"mlp.experts.{name}_proj_bias", rows, taken)
            params.add(name, (source,), columns=columns, experts=shape.num_held, is_joint=True)
            params.add(f"{name}_bias", (bias,), experts=shape.num_held, is_joint=True)
        return params.made
    if config.family == "gemma4_text":
        params.matrix("router", hidden, Source("router.proj", num))
        params.add("router_norm", (Source("router.scale", hidden, scale=hidden**-0.5),))
        params.add("factors", (Source("router.per_expert_scale", num),))
        for name, ending in (
            ("expert_norm", "pre_feedforward_layernorm_2"),
            ("after_dense", "post_feedforward_layernorm_1"),
            ("after_experts", "post_feedforward_layernorm_2"),
        ):
            params.norm(name, ending, hidden, config.norm_offset)
        joint = {"experts": shape.num_held, "is_joint": True, "is_turned": False}
        halves_of = [
            Source("experts.gate_up_proj", inner, whole=2 * inner, first=first)
            for first in (0, inner)
        ]
        params.add("gate_up", tuple(halves_of), columns=hidden, **joint)
        params.add("down", (Source("experts.down_proj", hidden),), columns=inner, **joint)
        return params.made
    if config.family == "granitemoehybrid":
        at = "block_sparse_moe"
        joint = {"experts": shape.num_held, "is_joint": True, "is_turned": False}
        down = Source(f"{at}.output_linear.weight", hidden, scale=config.scales.down)
        params.matrix("router", hidden, Source(f"{at}.router.layer", num))
        gate_up = abreast(f"{at}.input_linear.weight", (inner, inner))
        params.add("gate_up", tuple(gate_up), columns=hidden, **joint)
        params.add("down", (down,), columns=inner, **joint)
        return params.made
    params.matrix("router", hidden, Source("mlp.gate", num))
    if shape.scores == "sigmoid":
        correction = Source("mlp.gate.e_score_correction_bias", num)
        params.add("correction", (correction,), is_wide=True)

    def of_each(name: str, rows: int) -> Source:
        shared = Shared(f"mlp.shared_experts.{name}_proj", in_columns=name == "down")
        return Source(f"mlp.experts.{{expert}}.{name}_proj", rows, shared=shared)

    every = {"experts": shape.num_held, "num_shared": shape.num_shared}
    gate = "gate" if config.gates_mlp else "up"  # which then gates itself
    params.matrix("gate_up", hidden, of_each(gate, inner), of_each("up", inner), **every)
    params.matrix("down", inner, of_each("down", hidden), **every)
    return params.made


def unread_tensors(config: ModelConfig) -> set[str]:
    """Some exporters store projections of layers that own no KV, which no one computes."""
    return {
        f"model.layers.{layer}.self_attn.{name}"
        for group in config.groups
        for layer in group.readers
        for name in (
            "k_proj.weight",
            "k_proj.bias",
            "v_proj.weight",
            "v_proj.bias",
            "k_norm.weight",
        )
    }


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this config: Hugging Face name to shape."""
    if config.get("model_type") == MODEL_TYPE:
        return _assistant_tensors(parse_assistant(config, MODEL_TYPE))
    ours = parse_config(config)
    ahead = range(ours.num_layers, ours.num_layers + ours.num_mtp_layers)
    params = [*params_of(ours), *(param for layer in ahead for param in ahead_params(ours, layer))]
    return _shapes(params)


def _assistant_tensors(config: AssistantConfig) -> dict[str, tuple[int, ...]]:
    hidden, theirs, num = config.model.hidden_size, config.backbone_size, config.num_clusters
    more: dict[str, tuple[int, ...]] = {JOIN: (hidden, 2 * theirs), BACK: (theirs, hidden)}
    if num:
        more |= {CENTROIDS: (num, hidden), ORDER: (config.model.vocab_size,)}
    return _shapes(params_of(config.model)) | more


def _shapes(params: list[Param]) -> dict[str, tuple[int, ...]]:
    return {
        stored.name: stored.shape
        for param in params
        for layer in param.layers or (0,)
        for stored in param.stored(layer)
    }
