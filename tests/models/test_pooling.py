"""Tests of vectors of prompts: they are those of transformers, however prompts are computed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle
from traced import prompts_of

from slotzero import LLM, PoolingParams

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
