"""Tiny models of transformers for the bridge, and configs that it must refuse."""

import json
from pathlib import Path
from typing import Any

import transformers
from oracle import BASE, ROPE, Family

WINDOWED = {"sliding_window": 20}
MIXED = {**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
HEADS = {"head_dim": 16}

BRIDGED = {
    family.model: family
    for family in (
        Family("Apertus", {"rope_parameters": {**ROPE, "rope_type": "default"}}),
        Family("BitNet"),
        Family("Cohere"),
        Family("Cohere2", MIXED),
        Family("Exaone4", MIXED),
        Family("GPTNeoX"),
        Family("Glm", HEADS),
        Family("Granite", {"attention_multiplier": 0.3, "logits_scaling": 1.7}),
        Family("Helium", HEADS),
        Family("Nemotron"),
        Family("OPT"),
        Family("Olmo", {"clip_qkv": 2.0}),
        Family("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
        Family("Persimmon"),
        Family("Phi"),
        Family("Phi3"),
        Family("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
        Family("StableLm"),
        Family("Starcoder2", WINDOWED),
        Family("VaultGemma", {**HEADS, **WINDOWED, "query_pre_attn_scalar": 20}),
    )
}
"""By name; all have other layers than Llama's. Every one runs eagerly, a few are compiled."""


def config_of(name: str, **fields: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    config: dict[str, Any] = kind.config_class(**{**BASE, **fields}).to_dict()
    return {**config, "architectures": [kind.__name__]}


def config_folder(folder: Path, name: str, **fields: Any) -> str:
    """Write a folder that has a config.json only, for --load-format dummy."""
    (folder / "config.json").write_text(json.dumps(config_of(name, **fields)))
    return str(folder)
