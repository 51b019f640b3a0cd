"""Add a model family from outside the package: Helium, which Slotzero does not support itself.

    python examples/add_a_family.py

Helium is Llama with a different RoPE: it rotates neighbouring pairs of each head. Slotzero has all
of its blocks, so the family is one function that turns a config.json into layers. The script then
builds and saves a tiny random model with transformers, and checks that both engines generate the
same tokens.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import HeliumConfig, HeliumForCausalLM

from slotzero import LLM, SamplingParams
from slotzero.models.blocks.attention import Attention
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family, register
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_groups,
    layer_groups,
    model,
    pre_norms,
)
from slotzero.models.fields import require
from slotzero.models.layer import DecoderLayer

PROMPTS = ([1, 5, 9, 14], [1, 77, 30], [1, *range(20, 60)])


def parse_helium(config: Mapping[str, Any]) -> ModelConfig:
    """Turn Helium's config.json into layers."""
    require(config, "attention_bias", False)  # refuse any other value by name
    names = layer_groups(config)  # the KV group of each layer: "full" for all of them
    groups = kv_groups(config, names, attention_heads(config), is_interleaved=True)
    norms, mlp = pre_norms(config), dense_mlp(config)
    return model(
        config,
        [
            DecoderLayer(norms, Attention(groups[name], config["hidden_size"]), mlp)
            for name in names
        ],
    )


HELIUM = Family(
    "helium", "HeliumForCausalLM", parse_helium, defaults={"rope_theta": 100000.0, "head_dim": 128}
)


def save_tiny(folder: Path) -> HeliumForCausalLM:
    """Save a random Helium model of two layers, and return it."""
    torch.manual_seed(0)
    config = HeliumConfig(
        vocab_size=211,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.15,  # large, so that a mistake changes the tokens
        bos_token_id=1,
        eos_token_id=2,
    )
    helium = HeliumForCausalLM(config).eval()
    helium.save_pretrained(folder)
    return helium


def expected_tokens(
    helium: HeliumForCausalLM, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Generate greedily with transformers."""
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(num_tokens):
            with torch.inference_mode():
                logits = helium(torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def main(backend: str = "auto", num_tokens: int = 24) -> None:
    register(HELIUM)
    with tempfile.TemporaryDirectory() as folder:
        expected = expected_tokens(save_tiny(Path(folder)), PROMPTS, num_tokens)
        llm = LLM(
            folder, backend=backend, dtype="float32", max_num_seqs=4, skip_tokenizer_init=True
        )
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], params)
    for prompt, output, wanted in zip(PROMPTS, outputs, expected, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == wanted, f"{list(prompt)}: {tokens} instead of {wanted}"
        print(f"{len(prompt)} tokens in: the same {len(tokens)} tokens out as transformers")


if __name__ == "__main__":
    main()
