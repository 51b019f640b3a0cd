"""Tests on a GPU of a kernel that does not end: the host names the step that it waits for."""

import logging

import pytest
import torch

from slotzero import LLM, SamplingParams
from slotzero.graph import GraphKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SPIN = 20_000_000_000  # cycles: ten seconds at 2 GHz
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, detokenize=False)


def test_a_kernel_that_spins_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(
        "tiny:llama", backend="cuda", max_num_seqs=4, kv_cache_memory=1 << 28, step_timeout=2.0,
        skip_tokenizer_init=True, show_progress=False,
    )  # fmt: skip
    prompt = {"prompt_token_ids": [1, 2, 3]}
    (before,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    runner = llm.engine.worker.decode
    replay, spins = runner.replay, [SPIN]

    def spinning(key: GraphKey) -> None:
        if spins:
            torch.cuda._sleep(spins.pop())
        replay(key)

    monkeypatch.setattr(runner, "replay", spinning)
    with caplog.at_level(logging.ERROR, "slotzero.engine"):
        (after,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    named = "waiting for decode[1] with 1 row on rank 0 has taken more than 2 s; stacks of all"
    assert named in caplog.text
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
