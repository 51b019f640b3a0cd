"""Whole models by the Triton set, layer upon layer, against transformers."""

import pytest
import torch
from oracle import FAMILIES, build
from traced import Traced, prompts_of

from slotzero import SamplingParams
from slotzero.kernels.triton.kernels import TritonKernels

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen3", "llama-bias"])
def test_equals_transformers(device, monkeypatch, tmp_path, family):
    """Chunked prompts, contexts that decode attention cuts in two, and a padded batch."""
    if device.type == "cpu":
        monkeypatch.setattr("slotzero.worker.kernels_for", lambda _: TritonKernels())
    torch.manual_seed(0)
    oracle = build(FAMILIES[family], tmp_path)
    settings = {"backend": "eager", "dtype": "float32", "kv_cache_memory": 1 << 24}
    traced = Traced(oracle.path, max_num_seqs=4, max_num_batched_tokens=48, **settings)
    prompts = prompts_of([60, 7, 33], oracle.vocab_size)
    for prompt, tokens, request_id in zip(
        prompts, traced.generate(prompts, GREEDY), traced.request_ids, strict=True
    ):
        expected, logits = oracle.generate(prompt["prompt_token_ids"])
        assert tokens == expected[: len(tokens)]
        got = torch.stack(traced.logits[request_id])
        assert (got - logits[: len(tokens)]).abs().max() < 1e-4
    assert traced.engine.worker.registry["kv_full"][:, 0].abs().max() == 0
