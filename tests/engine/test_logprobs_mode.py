"""Tests of `logprobs_mode`: what log probabilities are those of, in whole engines."""

import math
from typing import Any

import pytest
import torch
from engines import make, prompt_of

from slotzero.config import LOGPROBS_MODES
from slotzero.errors import ConfigError
from slotzero.sampling.params import MAX_LOGPROBS, SamplingParams

pytestmark = pytest.mark.slow

NUM_NEW, TOP_K, TEMPERATURE = 12, 5, 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"backend": "cpu", "lazy_recording": True},
        {"speculative": "ngram"},
        {"model": "tiny:deepseek-v3", "speculative": "mtp", "speculative_topk": 2},
    ],
    ids=str,
)
def test_answers_have_the_mode_and_prompts_are_scored_by_the_model(
    settings: dict[str, Any],
) -> None:
    params = SamplingParams(
        temperature=TEMPERATURE, top_k=TOP_K, seed=3, max_tokens=NUM_NEW, ignore_eos=True,
        logprobs=MAX_LOGPROBS, prompt_logprobs=2,
    )  # fmt: skip
    prompts = [prompt_of(length) for length in (9, 40)]
    made = {}
    for mode in LOGPROBS_MODES:
        engine = make(logprobs_mode=mode, max_num_seqs=4, **settings)
        made[mode] = [engine.add(f"{len(prompt)}", prompt, params) for prompt in prompts]
        while engine.has_work:
            engine.step()
        engine.check()
    for raw, logprobs, logits, processed in zip(
        made["raw_logprobs"],
        made["processed_logprobs"],
        made["raw_logits"],
        made["processed_logits"],
        strict=True,
    ):
        for other in (logprobs, logits, processed):
            assert other.token_ids == raw.token_ids
            assert other.prompt_logprobs == raw.prompt_logprobs
        for rows in zip(
            raw.logprobs, logprobs.logprobs, logits.logprobs, processed.logprobs, strict=True
        ):
            assert len({tuple(row.top_ids) for row in rows}) == 1
            of_model, of_sampling, unchanged, changed = (
                torch.tensor([*row.top_values, row.chosen]) for row in rows
            )
            assert_same(of_model, unchanged - unchanged[0] + of_model[0])
            assert_same(changed[:TOP_K], unchanged[:TOP_K] / TEMPERATURE)
            assert_same(of_sampling[:TOP_K], changed[:TOP_K].log_softmax(0))
            for values in (changed, of_sampling):
                assert (values[TOP_K:MAX_LOGPROBS] == -math.inf).all()
                assert values[-1] in values[:TOP_K]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_other_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"logprobs_mode must be one of raw_logprobs, "):
        make(logprobs_mode="cooked_logprobs")
