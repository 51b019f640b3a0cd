"""Configs of the `tiny:` models: random models for tests and for trying out the engine.

Their shapes are irregular on purpose (nine query heads for three KV heads, a head size that is not
hidden / heads, a vocabulary of 259), so that code that assumes round sizes fails here first.
Weights have a large standard deviation (0.3 instead of the usual 0.02), so that greedy outputs vary
and an error in the cache or in a mask changes them.
"""

from collections.abc import Mapping
from typing import Any

COMMON: Mapping[str, Any] = {
    "dtype": "float32",  # with weights this large, rounding to bfloat16 changes the output
    "hidden_act": "silu",
    "vocab_size": 259,  # 256 bytes, <bos>, <eos>, <pad>
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def tiny(
    model_type: str,
    architecture: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int, int],  # query heads, KV heads, head_dim
    **fields: Any,
) -> Mapping[str, Any]:
    """Return a config.json; `fields` are added to it."""
    num_heads, num_kv_heads, head_dim = heads
    return {
        **COMMON,
        "model_type": model_type,
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        **fields,
    }


def layer_types(letters: str) -> list[str]:
    """Return layer_types from one letter per layer: s (sliding), f (full) or r (recurrent)."""
    kinds = {"s": "sliding_attention", "f": "full_attention", "r": "linear_attention"}
    return [kinds[letter] for letter in letters]
