"""The weights that a config promises: which tensors of a checkpoint make up each stacked one.

It knows names and shapes, and no numbers. Real checkpoints are compared to it and random ones are
made from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from slotzero.models.rope import halves


@dataclass(frozen=True)
class Source:
    """A tensor of a checkpoint, or one for each layer and expert, and how its rows are used."""

    name: str  # with {expert} where every expert has its own
    rows: int  # output features; a vector has only these
    order: Sequence[int] | None = None  # the rows that we want, if not all as they come
    scale: float = 1.0
    shared: "Shared | None" = None
    column_scales: Sequence[float] | None = None

    @property
    def num_taken(self) -> int:
        return self.rows if self.order is None else len(self.order)


class Shared(NamedTuple):
    """One tensor that holds what all shared experts have for a source, rows or columns abreast."""

    name: str
    in_columns: bool = False


@dataclass(frozen=True)
class Param:
    """One stacked weight: the checkpoint's tensors that it joins, row upon row."""

    name: str  # of the stacked tensor
    field: str  # of LayerWeights or DecoderWeights
    sources: tuple[Source, ...]
    columns: int | None = None  # input features; None for a vector
    layers: tuple[int, ...] | None = None  # None: not a weight of a layer
    experts: int | None = None
    num_shared: int = 0  # of the experts, the last
    is_packed: bool = True
    is_joint: bool = False
    """Each source holds all experts, and of a matrix input features before output features."""
    offset: float = 0.0  # to be added to what is stored
    is_wide: bool = False  # float32, whatever the others are

    @property
    def out_features(self) -> int:
        return sum(source.num_taken for source in self.sources)

    def stored(self, layer: int) -> Iterator["Stored"]:
        """What a checkpoint holds of it; `layer` counts for weights of a layer only."""
        prefix = "" if self.layers is None else f"model.layers.{layer}."
        for expert in range(self.experts or 1) if not self.is_joint else (None,):
            for source in self.sources:
                shape: tuple[int, ...] = (source.rows,)
                if self.columns is not None:
                    shape = (source.rows, self.columns)
                if self.is_joint:
                    assert self.experts is not None
                    shape = (self.experts, *reversed(shape))
                name, part = source.name.format(expert=expert), None
                if source.shared is not None and expert is not None:
                    part = expert - ((self.experts or 0) - self.num_shared)
                if part is None or part < 0 or source.shared is None:
                    yield Stored(prefix + name, shape, source)
                    continue
                axis = int(source.shared.in_columns)
                whole = [
                    size * (self.num_shared if i == axis else 1) for i, size in enumerate(shape)
                ]
                cut = (axis, part * shape[axis], shape[axis])
                yield Stored(prefix + source.shared.name, tuple(whole), source, cut)


class Stored(NamedTuple):
    name: str
    shape: tuple[int, ...]
    source: Source
    cut: tuple[int, int, int] | None = None  # along which axis, from where, how much; None: all


@dataclass
class _Params:
    """Makes params of the layers that it is for."""

    layers: tuple[int, ...]
    suffix: str = ""
    made: list[Param] = field(default_factory=list)

    def matrix(self, name: str, columns: int, *sources: Source, **more: Any) -> None:
        sources = tuple(_named(source, ".weight") for source in sources)
        self.add(name, sources, columns=columns, **more)

    def bias(self, name: str, *sources: Source) -> None:
        self.add(name, tuple(_named(source, ".bias") for source in sources))

    def norm(self, name: str, source: str, size: int, offset: float) -> None:
        self.add(name, (Source(f"{source}.weight", size),), offset=offset)

    def add(self, name: str, sources: tuple[Source, ...], **more: Any) -> None:
        self.made.append(Param(name + self.suffix, name, sources, layers=self.layers, **more))


def _named(source: Source, ending: str) -> Source:
    shared = source.shared and source.shared._replace(name=source.shared.name + ending)
    return replace(source, name=source.name + ending, shared=shared)


def params_of(config: ModelConfig) -> list[Param]:
    vocab, hidden, offset = config.vocab_size, config.hidden_size, config.norm_offset

    def single(name: str, source: str, rows: int, columns: int | None, offset: float = 0) -> Param:
        return Param(name, name, (Source(source, rows),), columns, offset=offset)

    everywhere = _Params(tuple(range(config.num_layers)))
    _norms(everywhere, config)
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
    wide = {i for group in config.groups for i in group.readers if config.reader_width > 1}
    dense = set(range(config.num_layers)).difference(config.sparse_layers)
    for layers, width in ((dense - wide, 1), (dense & wide, config.reader_width)):
        if layers:
            params += _mlp(config, tuple(sorted(layers)), width)
    if config.sparse_layers:
        params += _experts(config, config.sparse_layers)
    return params


def ahead_params(config: ModelConfig, layer: int) -> list[Param]:
    """Of a layer behind the last that guesses ahead; it is like the last, and begins by joining."""
    own, hidden = _Params((layer,)), config.hidden_size
    _norms(own, config)
    own.norm("embed_norm", "enorm", hidden, config.norm_offset)
    own.norm("hidden_norm", "hnorm", hidden, config.norm_offset)
    own.norm("norm", "shared_head.norm", hidden, config.norm_offset)
    own.matrix("join", 2 * hidden, Source("eh_proj", hidden))
    params = [*own.made, *_attention(config, replace(config.groups[-1], layers=(layer,)))]
    is_sparse = config.num_layers - 1 in config.sparse_layers
    return params + (_experts(config, (layer,)) if is_sparse else _mlp(config, (layer,), width=1))


def _norms(params: _Params, config: ModelConfig) -> None:
    hidden, offset = config.hidden_size, config.norm_offset
    after, before = "post_attention_layernorm", "pre_feedforward_layernorm"
    if config.norms == "before":
        before = after
    if config.norms in ("before", "around"):
        params.norm("input_norm", "input_layernorm", hidden, offset)
        params.norm("mlp_norm", before, hidden, offset)
    if config.norms in ("after", "around"):
        params.norm("after_attention", after, hidden, offset)
        params.norm("after_mlp", "post_feedforward_layernorm", hidden, offset)


def _layer_ends(params: _Params, config: ModelConfig) -> None:
    hidden, size = config.hidden_size, config.input_size
    if size:
        params.matrix("input_gate", hidden, Source("per_layer_input_gate", size))
        params.matrix("input_out", size, Source("per_layer_projection", hidden))
        params.norm("after_input", "post_per_layer_input_norm", hidden, config.norm_offset)
    if config.scales_layers:
        params.add("scale", (Source("layer_scalar", 1),))


def _attention(config: ModelConfig, group: KvGroup, reads: bool = False) -> list[Param]:
    """Of layers that own KV, or of those that read it."""
    if group.heads.latent is not None:
        return _latent_attention(config, group)
    hidden, heads = config.hidden_size, group.reader_heads if reads else group.heads
    suffix = "" if group is config.groups[0] else f"_{group.name}"
    params = _Params(group.readers, f"{suffix}_readers") if reads else _Params(group.layers, suffix)
    order = halves(group.rope)
    q_size, k_size, v_size = heads.sizes
    qkv = [Source("self_attn.q_proj", q_size, _by_head(order, heads.num_heads))]
    if heads.stores:
        values = "k_proj" if group.values_are_keys else "v_proj"
        qkv += (
            Source("self_attn.k_proj", k_size, _by_head(order, heads.num_kv_heads)),
            Source(f"self_attn.{values}", v_size, scale=config.value_scale),
        )
    out = Source("self_attn.o_proj", hidden)
    params.matrix("qkv", hidden, *qkv)
    params.matrix("out", heads.out_size, out)
    if config.qkv_bias:
        params.bias("qkv_bias", *qkv)
    if config.out_bias:
        params.bias("out_bias", out)
    if config.qk_norm:
        is_whole = config.qk_norm == "whole"
        sizes = (q_size, k_size) if is_whole else (heads.head_dim, heads.head_dim)
        for name, size in zip("qk" if heads.stores else "q", sizes, strict=False):
            params.norm(f"{name}_norm", f"self_attn.{name}_norm", size, config.norm_offset)
    if group.has_sinks:
        name = "attention_sink_bias" if config.family == "mimo_v2_flash" else "sinks"
        params.add("sinks", (Source(f"self_attn.{name}", heads.num_heads),))
    return params.made


def _latent_attention(config: ModelConfig, group: KvGroup) -> list[Param]:
    heads, latent, hidden = group.heads, group.heads.latent, config.hidden_size
    assert latent is not None
    plain, turned, rank = latent.plain_dim, latent.turned_dim, heads.value_dim
    params, (q_size, k_size, _) = _Params(group.layers), heads.sizes
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
    each = plain + latent.result_dim
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


def _mlp(config: ModelConfig, layers: tuple[int, ...], width: int) -> list[Param]:
    params = _Params(layers, "_wide" if width > 1 else "")
    inner = config.intermediate_size * width
    gate_up = Source("mlp.gate_proj", inner), Source("mlp.up_proj", inner)
    down = Source("mlp.down_proj", config.hidden_size)
    params.matrix("gate_up", config.hidden_size, *gate_up)
    params.matrix("down", inner, down)
    if config.mlp_bias:
        params.bias("gate_up_bias", *gate_up)
        params.bias("down_bias", down)
    return params.made


def _experts(config: ModelConfig, layers: tuple[int, ...]) -> list[Param]:
    shape, hidden = config.experts, config.hidden_size
    assert shape is not None
    num, inner = shape.num_experts, shape.inner_size
    params = _Params(layers, "_experts")
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
            params.add(name, (source,), columns=columns, experts=num, is_joint=True)
            params.add(f"{name}_bias", (bias,), experts=num, is_joint=True)
        return params.made
    params.matrix("router", hidden, Source("mlp.gate", num))
    if shape.scores == "sigmoid":
        correction = Source("mlp.gate.e_score_correction_bias", num)
        params.add("correction", (correction,), is_wide=True)

    def of_each(name: str, rows: int) -> Source:
        shared = Shared(f"mlp.shared_experts.{name}_proj", in_columns=name == "down")
        return Source(f"mlp.experts.{{expert}}.{name}_proj", rows, shared=shared)

    every = {"experts": shape.num_all, "num_shared": shape.num_shared}
    params.matrix("gate_up", hidden, of_each("gate", inner), of_each("up", inner), **every)
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
    ahead = range(ours.num_layers, ours.num_layers + ours.num_ahead)
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
