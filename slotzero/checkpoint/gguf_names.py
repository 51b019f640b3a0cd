"""Translation of GGUF to Hugging Face: tensor names, and a config from the file's metadata.

Llama 3 files store their RoPE scaling as a tensor, `rope_freqs.weight`: the factors that divide the
frequencies, instead of the parameters they are computed from. This module computes the factors from
the parameters of Llama 3.1 and later, and accepts the file only if they match.

The rule: a tensor, an architecture or a scaling rule without an equivalent raises an error that
names it.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.models.families.family import architecture_of

ROPE_FACTORS = "rope_freqs.weight"
IN_PAIRS = ("llama", "smollm3", "granite", "arcee")
"""Architectures whose files store the rows of queries and keys in llama.cpp's order."""
SUPPORTED = (*IN_PAIRS, "qwen2", "qwen3")
# Mistral files have the architecture llama, because the computation is the same.
POOLING_TYPES = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}  # 0: none

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def hugging_face_name(name: str) -> str:
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise UnsupportedModelError(
            f"GGUF tensor {name} is not supported; use a dense model with one of the architectures "
            f"{', '.join(SUPPORTED)}"
        )
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def hugging_face_config(
    metadata: Mapping[str, Any], names: Collection[str], vocab_size: int
) -> dict[str, Any]:
    """Return the config without the scaling in `rope_freqs.weight`; see `llama3_scaling`."""
    arch = metadata.get("general.architecture")
    if arch not in SUPPORTED:
        raise UnsupportedModelError(
            f"GGUF architecture {arch!r} is not supported; use one of {', '.join(SUPPORTED)}"
        )
    fields = _Fields(metadata, arch)
    fields.refuse_above("expert_count", 0)
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.size(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"GGUF metadata {arch}.{key} differs from the head size {head_dim}, which is not "
                "implemented"
            )
    window = metadata.get(f"{arch}.attention.sliding_window")
    model_type = "mistral" if arch == "llama" and window else arch
    config = {
        "model_type": model_type,
        "architectures": [architecture_of(model_type)],
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": vocab_size,
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    more = {"sliding_window": window} if window else {}
    if arch == "arcee":
        more["hidden_act"] = "relu2"
    if arch == "granite":
        more = {field: fields.number(key) for key, field in _GRANITE.items()}
    return config | more


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text, a turn or a message. Each ends an answer."""
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def llama3_scaling(factors: Sequence[float], rope_theta: float) -> dict[str, Any] | None:
    """Return the RoPE scaling with these factors, one per pair of a head; None if all are 1."""
    if all(factor == 1.0 for factor in factors):
        return None
    scaling = {"rope_type": "llama3", "factor": float(round(max(factors))), **_LLAMA3}
    expected = llama3_factors(scaling, rope_theta, len(factors))
    if not all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-3), factors, expected)):
        raise UnsupportedModelError(
            f"GGUF tensor {ROPE_FACTORS} does not have the values of Llama 3's RoPE scaling; use a "
            "safetensors folder, whose config.json has the parameters of the scaling"
        )
    return scaling


def llama3_factors(scaling: Mapping[str, Any], rope_theta: float, num_pairs: int) -> list[float]:
    """Return the divisor of each frequency.

    It is `factor` for long wavelengths, 1 for short ones, and in between for the others.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for pair in range(num_pairs):
        wave_len = 2 * math.pi * rope_theta ** (pair / num_pairs)
        turns = scaling["original_max_position_embeddings"] / wave_len
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - kept) / scaling["factor"] + kept))
    return factors


def _rope_scaling(fields: "_Fields") -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "none")
    linear_factor = fields.get("rope.scale_linear", 1.0)  # the key in files from 2023
    if kind == "none" and linear_factor != 1.0:
        return {"rope_type": "linear", "factor": float(linear_factor)}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"GGUF metadata {fields.arch}.rope.scaling.type={kind!r} is not implemented; "
            "implemented: none, linear, yarn"
        )
    scaling = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        original = fields.get("rope.scaling.original_context_length", None)
        optional = {
            "original_max_position_embeddings": original,
            "beta_fast": fields.get("rope.scaling.yarn_beta_fast", None),
            "beta_slow": fields.get("rope.scaling.yarn_beta_slow", None),
        }
        scaling |= {key: value for key, value in optional.items() if value is not None}
    return scaling


class _Fields:
    """The metadata below `<architecture>.`; errors name the entry that is missing or invalid."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.arch = arch
        self._metadata = metadata

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float):
            raise CorruptCheckpointError(
                f"GGUF metadata {self.arch}.{key} is {value!r}; convert the file again"
            )
        return float(value)

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one entry per layer, all equal
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(
                f"GGUF metadata {self.arch}.{key} differs by layer, which is not implemented; use "
                "a model whose layers are equal"
            )
        if not isinstance(value, int) or value <= 0:
            raise CorruptCheckpointError(
                f"GGUF metadata {self.arch}.{key} is {value!r}; convert the file again"
            )
        return value

    def refuse_above(self, key: str, limit: int) -> None:
        if self.get(key, 0) > limit:
            raise UnsupportedModelError(
                f"GGUF metadata {self.arch}.{key} is {self.get(key, 0)}, and more than {limit} is "
                "not implemented for GGUF files; use a dense model or a safetensors folder"
            )


def pooling_modules(metadata: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the modules of sentence-transformers that a file's pooling_type stands for."""
    kind = metadata.get(f"{metadata['general.architecture']}.pooling_type", 0)
    if not kind:  # none: the model generates
        return []
    mode = POOLING_TYPES.get(kind, f"type {kind}")
    return [("Pooling", {"pooling_mode": mode}), ("Normalize", {})]  # llama.cpp normalises
