"""Tests of the language models of multimodal checkpoints: they equal transformers' on text."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from oracle import BASE, FAMILIES, Oracle, randomise
from safetensors.torch import load_file, save_file
from traced import Traced, expect_equal, prompts_of

from slotzero import LLM
from slotzero.checkpoint.folder import folder_config
from slotzero.errors import UnsupportedModelError
from slotzero.models.families.family import parse_config

pytestmark = pytest.mark.slow

VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 16,
}  # fmt: skip
MODELS = {
    "Gemma3": (
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 20},
        VISION,
        {"mm_tokens_per_image": 4},
    ),
    "Mistral3": ({"model_type": "mistral", "head_dim": 24, "sliding_window": None}, VISION, {}),
    "Llama4": (
        FAMILIES["llama4"].config,
        {**VISION, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
    "Mistral3-Ministral3": (
        {
            "model_type": "ministral3", "head_dim": 24,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5,
            },
        },
        VISION,
        {},
    ),
    "Qwen3VL": (
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        {
            "hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [0],
        },
        {},
    ),
}  # fmt: skip


def build(name: str, folder: Path) -> Oracle:
    torch.manual_seed(1)
    text, vision, more = MODELS[name]
    name = name.split("-")[0]
    config = getattr(transformers, f"{name}Config")(
        text_config={**BASE, **text}, vision_config=vision, tie_word_embeddings=False, **more
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return Oracle(folder, model, None, config.text_config.vocab_size)


@pytest.mark.parametrize("name", MODELS)
def test_text_equals_transformers(name, tmp_path):
    oracle = build(name, tmp_path)
    traced = Traced(oracle.path, backend="eager", max_num_seqs=2)
    expect_equal(traced, oracle, prompts_of([30, 5], oracle.vocab_size), num_tokens=24)


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")],
)
def test_the_text_part_of_a_checkpoint(oracles, tmp_path, body, head):
    """Published checkpoints have a nested config and tensors of other parts."""
    oracle = oracles("gemma4-own")
    text = json.loads((oracle.folder / "config.json").read_text())
    del text["architectures"]
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "text_config": text, "vision_config": {"hidden_size": 8}, "dtype": "float32",
    }  # fmt: skip
    tensors = {"model.vision_tower.x.weight": torch.ones(3), "embed_audio.y": torch.ones(1)}
    for name, tensor in load_file(oracle.folder / "model.safetensors").items():
        first, rest = name.split(".", 1)
        tensors[{"model": body, "lm_head": head}[first] + rest] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    traced = Traced(str(tmp_path), backend="eager", max_num_seqs=2)
    expect_equal(traced, oracle, prompts_of([30, 5], oracle.vocab_size), num_tokens=8)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"text_config": None}, "text_config=None"),
        ({"text_config": {"model_type": "gemma4_assistant"}}, "model_type='gemma4_assistant'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        ({"architectures": ["Gemma9ForConditionalGeneration"]}, "Gemma9ForConditionalGeneration"),
    ],
)
def test_other_multimodal_models_are_refused(tmp_path, fields, word):
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(UnsupportedModelError, match=word):
        LLM(str(tmp_path), backend="eager", skip_tokenizer_init=True, show_progress=False)


def test_fields_that_published_configs_leave_out(tmp_path):
    """The config of Gemma 3 4B: all other fields have the default values of transformers."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = parse_config(folder_config(tmp_path))
    full, sliding = model.groups
    assert (model.vocab_size, full.heads.head_dim, full.heads.num_kv_heads) == (262_208, 256, 4)
    assert (full.rope.theta, full.rope.factor, sliding.rope.theta) == (1e6, 8.0, 1e4)
    assert model.tied_embeddings and full.layers == (5, 11, 17, 23, 29)
