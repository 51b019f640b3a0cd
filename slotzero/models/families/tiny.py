"""Shapes of the `tiny:` models, random models for tests and first steps.

Shapes are odd on purpose (nine heads over three, a head size that is not hidden / heads, a
vocabulary that is no multiple of anything): code that assumes round sizes fails here first. Weights
are drawn wide (0.3, where real models start at 0.02), so that greedy outputs vary and a wrong cache
or mask changes them.
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
}


def tiny(
    model_type: str,
    architecture: str,
    layers: int,
    hidden: int,
    inner: int,
    heads: tuple[int, int, int],  # query heads, KV heads, head_dim
    **more: Any,
) -> Mapping[str, Any]:
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
        **more,
    }


def layer_types(letters: str) -> list[str]:
    kinds = {"s": "sliding_attention", "f": "full_attention", "r": "linear_attention"}
    return [kinds[letter] for letter in letters]
