"""The weights that a config promises: which tensors of a checkpoint make up each stacked one.

It knows names and shapes, and no numbers. Real checkpoints are compared to it and random ones are
made from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotzero.models.config import ModelConfig, parse_config


@dataclass(frozen=True)
class Param:
    """One stacked weight: the checkpoint's tensors that it joins, row upon row."""

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...]  # output features of each source; a vector has only these
    columns: int | None = None  # input features; None for a vector
    layers: int | None = None  # None: not a weight of a layer

    @property
    def out_features(self) -> int:
        return sum(self.rows)

    def names(self, layer: int) -> tuple[str, ...]:
        """Its sources as a checkpoint names them; `layer` counts for weights of a layer only."""
        if self.layers is None:
            return self.sources
        return tuple(f"model.layers.{layer}.{source}" for source in self.sources)


def params_of(config: ModelConfig) -> list[Param]:
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def matrix(name: str, modules: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Param:
        return Param(name, tuple(f"{m}.weight" for m in modules), rows, columns, layers)

    def vector(name: str, source: tuple[str, ...], rows: tuple[int, ...]) -> Param:
        return Param(name, source, rows, None, layers)

    def bias(name: str, modules: tuple[str, ...], rows: tuple[int, ...]) -> Param:
        return vector(name, tuple(f"{m}.bias" for m in modules), rows)

    mlp = ("mlp.gate_proj", "mlp.up_proj")
    norms = [vector(f"{n}_norm", (f"self_attn.{n}_norm.weight",), (config.head_dim,)) for n in "qk"]
    head = [Param("head", ("lm_head.weight",), (config.vocab_size,), hidden)]
    return [
        Param("embedding", ("model.embed_tokens.weight",), (config.vocab_size,), hidden),
        *([] if config.tied_embeddings else head),
        Param("final_norm", ("model.norm.weight",), (hidden,)),
        vector("input_norm", ("input_layernorm.weight",), (hidden,)),
        matrix("qkv", attention, (q, kv, kv), hidden),
        *([bias("qkv_bias", attention, (q, kv, kv))] if config.qkv_bias else []),
        *(norms if config.qk_norm else []),
        matrix("out", ("self_attn.o_proj",), (hidden,), q),
        *([bias("out_bias", ("self_attn.o_proj",), (hidden,))] if config.out_bias else []),
        vector("post_norm", ("post_attention_layernorm.weight",), (hidden,)),
        matrix("gate_up", mlp, (inner, inner), hidden),
        *([bias("gate_up_bias", mlp, (inner, inner))] if config.mlp_bias else []),
        matrix("down", ("mlp.down_proj",), (hidden,), inner),
        *([bias("down_bias", ("mlp.down_proj",), (hidden,))] if config.mlp_bias else []),
    ]


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with this config: Hugging Face name to shape."""
    return {
        name: (rows,) if param.columns is None else (rows, param.columns)
        for param in params_of(parse_config(config))
        for i in range(param.layers or 1)
        for name, rows in zip(param.names(i), param.rows, strict=True)
    }
