"""The tensors that a config promises: Hugging Face name to shape, for the families we run.

It reads no file. Random checkpoints are made from this table, and real ones are compared to it.

The rule: what the families differ in (biases, the norms of queries and keys) is a row of
`FAMILIES`, so a new family is a new row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    architecture: str
    always_qkv_bias: bool = False
    """Queries, keys and values have a bias whatever the config says (the output has none)."""
    may_attention_bias: bool = False
    """`attention_bias` in the config adds a bias to all four attention projections."""
    may_mlp_bias: bool = False
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", may_attention_bias=True, may_mlp_bias=True),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", always_qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", may_attention_bias=True, qk_norm=True),
}


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Shape]:
    family = family_of(config)
    vocab, hidden = _size(config, "vocab_size"), _size(config, "hidden_size")
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(_size(config, "num_hidden_layers")):
        for name, shape in _layer_tensors(config, family):
            tensors[f"model.layers.{layer}.{name}"] = shape
    tensors["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = (vocab, hidden)
    return tensors


def family_of(config: Mapping[str, Any]) -> Family:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; use one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def _layer_tensors(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, Shape]]:
    hidden, inner = _size(config, "hidden_size"), _size(config, "intermediate_size")
    heads = _size(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    q_size = heads * head_dim
    kv_size = (config.get("num_key_value_heads") or heads) * head_dim
    attention_bias = family.may_attention_bias and bool(config.get("attention_bias"))
    qkv_bias = attention_bias or family.always_qkv_bias
    mlp_bias = family.may_mlp_bias and bool(config.get("mlp_bias"))

    yield "input_layernorm.weight", (hidden,)
    yield from _linear("self_attn.q_proj", q_size, hidden, qkv_bias)
    yield from _linear("self_attn.k_proj", kv_size, hidden, qkv_bias)
    yield from _linear("self_attn.v_proj", kv_size, hidden, qkv_bias)
    if family.qk_norm:
        yield "self_attn.q_norm.weight", (head_dim,)
        yield "self_attn.k_norm.weight", (head_dim,)
    yield from _linear("self_attn.o_proj", hidden, q_size, attention_bias)
    yield "post_attention_layernorm.weight", (hidden,)
    yield from _linear("mlp.gate_proj", inner, hidden, mlp_bias)
    yield from _linear("mlp.up_proj", inner, hidden, mlp_bias)
    yield from _linear("mlp.down_proj", hidden, inner, mlp_bias)


def _linear(name: str, out_size: int, in_size: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise CorruptCheckpointError(
            f"config.json: {key} is {value!r}; it must be a positive number"
        )
    return value
