"""Tests of vectors of prompts: they are those of transformers, however prompts are computed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle
from safetensors.torch import load_file
from traced import prompts_of

from slotzero import LLM, PoolingParams, SamplingParams
from slotzero.checkpoint.folder import folder_modules
from slotzero.checkpoint.gguf_names import pooling_modules
from slotzero.errors import ConfigError, CorruptCheckpointError, RequestError
from slotzero.models.pooling import read_pooling

pytestmark = pytest.mark.slow

LENGTHS = [1, 2, 19, 40, 64]
FAMILIES = (
    "llama",
    "gemma3",
    "cohere",
    "deepseek-v3",
    "qwen3-moe",
    "gpt-oss",
    "qwen3-next",
    "lfm2",
)
"""Plain, sliding window, LayerNorm, MLA, MoE, sinks, recurrent, short convolutions."""


def start(oracle: Oracle | str, pooling: str, **settings: Any) -> LLM:
    model = oracle if isinstance(oracle, str) else oracle.path
    fixed = {"skip_tokenizer_init": True, "show_progress": False, "lazy_recording": True}
    return LLM(model, pooling=pooling, **{**fixed, "max_num_seqs": 4, **settings})


def vectors(llm: LLM, prompts: Sequence[Any]) -> np.ndarray:
    outputs = llm.embed(prompts, False, pooling_params=PoolingParams(normalize=False))
    check_idle(llm)
    return np.array([output.outputs.embedding for output in outputs])


def check_idle(llm: LLM) -> None:
    llm.engine.check()
    assert not llm.engine.has_work and llm.engine._handles == {}


@torch.no_grad()
def expected(oracle: Oracle, pooling: str, prompts: Sequence[Any]) -> np.ndarray:
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        hidden = oracle.model.get_decoder()(ids, use_cache=False).last_hidden_state[0].double()
        made.append(hidden.mean(0) if pooling == "mean" else hidden[-1])
    return torch.stack(made).float().numpy()


def check_equal(found: np.ndarray, wanted: np.ndarray) -> None:
    """Within 1e-4, or rounding: hidden states of some families are large."""
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < max(1e-4, 3e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(oracles, family, pooling, backend):
    oracle = oracles(family)
    prompts = prompts_of(LENGTHS, oracle.vocab_size)
    wanted = expected(oracle, pooling, prompts)
    llm = start(oracle, pooling, backend=backend)
    check_equal(vectors(llm, prompts), wanted)  # together, some prompts cut by the step's end
    again = vectors(llm, prompts)  # with cached prefixes, unless all tokens are averaged
    check_equal(again, wanted)
    chunked = start(oracle, pooling, backend=backend, max_num_batched_tokens=16)
    check_equal(vectors(chunked, prompts), wanted)


def as_published(oracle: Oracle, folder: Path, files: dict[str, Any], **config: Any) -> None:
    """Save the model without its head, as embedding models are."""
    oracle.model.get_decoder().save_pretrained(folder)
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | config))
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def modules(*kinds: str) -> dict[str, Any]:
    listed = [
        {"idx": i, "name": f"{i}", "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    return {"modules.json": listed}


POOLING = "1_Pooling/config.json"
LAST, MEAN = {"pooling_mode_lasttoken": True}, {"pooling_mode_mean_tokens": True}


def test_a_published_embedding_model(oracles, tmp_path):
    """Names without a prefix, no head, and pooling as sentence-transformers says."""
    oracle = oracles("qwen3")
    off = {"pooling_mode_cls_token": False, "word_embedding_dimension": 96}
    files = modules("Transformer", "Pooling", "Normalize") | {POOLING: {**off, **LAST}}
    as_published(oracle, tmp_path, files, tie_word_embeddings=False, is_matryoshka=True)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    prompts = prompts_of(LENGTHS, oracle.vocab_size)
    for architecture in ("Qwen3Model", "Qwen3ForCausalLM"):
        config = json.loads((tmp_path / "config.json").read_text())
        config["architectures"] = [architecture]
        (tmp_path / "config.json").write_text(json.dumps(config))
        llm = start(str(tmp_path), "auto")
        wanted = expected(oracle, "last", prompts)
        check_equal(vectors(llm, prompts), wanted)
        unit = [output.outputs.embedding for output in llm.embed(prompts, False)]
        check_equal(np.array(unit), wanted / np.linalg.norm(wanted, axis=1, keepdims=True))
        params = PoolingParams(dimensions=8)
        (short,) = llm.embed(prompts[:1], False, pooling_params=params)
        start_of = wanted[0, :8] / np.linalg.norm(wanted[0, :8])
        assert short.outputs.embedding == pytest.approx(start_of.tolist(), abs=1e-4)
        with pytest.raises(RequestError, match="no lm_head"):
            llm.generate(prompts[0], SamplingParams(), use_tqdm=False)
    with pytest.raises(ConfigError, match="no lm_head"):
        start(str(tmp_path), "auto", score_tokens="n,y")
    tensors = {name: 2 * t for name, t in load_file(tmp_path / "model.safetensors").items()}
    llm.update_weights(tensors)  # under the names that the checkpoint has
    assert np.abs(vectors(llm, prompts) - wanted).max() > 0.1


def test_a_bare_model_with_a_tied_head_generates(oracles, tmp_path):
    oracle = oracles("qwen2")
    assert oracle.model.config.tie_word_embeddings
    as_published(oracle, tmp_path, {})
    llm = start(str(tmp_path), "auto")
    (prompt,) = prompts_of([20], oracle.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    tokens, _ = oracle.generate(prompt["prompt_token_ids"], 8)
    assert output.outputs[0].token_ids == tokens


@pytest.mark.parametrize(
    ("kinds", "config", "wanted"),
    [
        ((), {}, ("last", True, "")),
        (("Transformer", "Pooling", "Normalize"), LAST, ("last", True, "")),
        (("Transformer", "Pooling"), MEAN, ("mean", False, "")),
        (("Transformer", "Pooling"), {"pooling_mode": "lasttoken"}, ("last", False, "")),
        (("Transformer", "Pooling"), {"pooling_mode": "mean"}, ("mean", False, "")),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, ("last", False, "cls")),
        (("Transformer", "Pooling"), LAST | MEAN, ("last", False, "mean_tokens")),
        (("Transformer", "Pooling"), {}, ("last", False, "none")),
        (("Transformer", "Pooling", "Dense"), MEAN, ("mean", False, "Dense")),
    ],
)
def test_modules_of_sentence_transformers(kinds, config, wanted, tmp_path):
    kind, is_normalised, refusal = wanted
    for name, content in (modules(*kinds) | {POOLING: config} if kinds else {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    found = folder_modules(tmp_path)
    pooling = read_pooling(Stored(found), 64, "auto", None)
    assert (pooling.kind, pooling.normalize, pooling.size) == (kind, is_normalised, 64)
    assert refusal in pooling.refusal and bool(refusal) == bool(pooling.refusal)
    if pooling.refusal:
        with pytest.raises(RequestError, match=refusal):
            pooling.check_embeds()
    chosen = read_pooling(Stored(found), 64, "mean", None)
    assert chosen.kind == "mean" and bool(chosen.refusal) == ("Dense" in kinds)


class Stored:
    """A checkpoint of which only the modules are read."""

    has_head, config = True, {}

    def __init__(self, found: Any) -> None:
        self.modules = lambda: found


@pytest.mark.parametrize(
    ("kind", "wanted"), [(None, "last"), (0, "last"), (1, "mean"), (3, "last"), (2, None)]
)
def test_the_pooling_type_of_a_gguf_file(kind, wanted):
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": kind}
    pooling = read_pooling(Stored(pooling_modules(metadata)), 64, "auto", None)
    assert pooling.normalize and pooling.is_expected == bool(kind)
    if wanted is None:
        assert "cls" in pooling.refusal
    else:
        assert pooling.kind == wanted and not pooling.refusal


@pytest.mark.parametrize("content", ["{", "{}", '[{"type": 3}]', '[{"type": "a", "path": "../x"}]'])
def test_damaged_modules(content, tmp_path):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CorruptCheckpointError, match=r"modules\.json"):
        folder_modules(tmp_path)


def test_vectors_over_the_bridge(oracles):
    """The bridge to transformers gives the states after its final norm."""
    oracle = oracles("llama")
    prompts = prompts_of(LENGTHS, oracle.vocab_size)
    for pooling in ("last", "mean"):
        llm = start(oracle, pooling, model_impl="transformers", max_num_batched_tokens=16)
        check_equal(vectors(llm, prompts), expected(oracle, pooling, prompts))
