"""Tests of `enable_return_routed_experts`: the experts are those that transformers chooses."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engines import drain, greedy, make, prompt_of
from oracle import Oracle

from slotzero import LLM, SamplingParams
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import ConfigError, UnsupportedModelError

pytestmark = pytest.mark.slow

LENGTHS = (1, 5, 33, 70)
NUM_NEW = 9
Oracles = Callable[[str], Oracle]


def start(model: str, **settings: Any) -> Engine:
    settings |= {"enable_return_routed_experts": True, "max_num_seqs": 6}
    if "sanitize" not in settings:
        return make(model=model, **settings)
    settings |= {"backend": "eager", "show_progress": False, "skip_tokenizer_init": True}
    return LLM(model, **settings).engine


def run(engine: Engine, prompts: Sequence[list[int]], **more: Any) -> list[RequestHandle]:
    params = greedy(NUM_NEW, **more)
    handles = [engine.add(f"{i}", prompt, params) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        engine.step()
    engine.check()
    return handles


def check(handle: RequestHandle, oracle: Oracle) -> None:
    ours = handle.routed_experts
    assert ours is not None and ours.dtype == np.int16
    tokens = handle.request.all_token_ids[:-1]
    with torch.no_grad():
        made = oracle.model(torch.tensor([tokens]), output_router_logits=True, use_cache=False)
    scores = torch.stack([layer.view(len(tokens), -1) for layer in made.router_logits], dim=1)
    theirs = scores.topk(ours.shape[-1]).indices
    assert ours.shape == theirs.shape
    assert np.array_equal(np.sort(ours), theirs.sort().values.numpy())


def prompts_of(oracle: Oracle) -> list[list[int]]:
    return [[token % oracle.vocab_size for token in prompt_of(length)] for length in LENGTHS]


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt-oss"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},  # prompts in chunks
        {"backend": "cpu", "lazy_recording": True},
        {"speculative": "ngram"},
        {"sanitize": "full"},
    ],
    ids=str,
)
def test_experts_are_those_of_transformers(
    family: str, settings: dict[str, Any], oracles: Oracles, overlaps: bool
) -> None:
    """Run twice: the second time, prompts begin in the prefix cache."""
    oracle = oracles(family)
    engine = start(oracle.path, **settings)
    for _ in range(2):
        handles = run(engine, prompts_of(oracle))
        for handle in handles:
            check(handle, oracle)
    assert handles[-1].request.num_found > 0
    assert engine.sanitizer is None or engine.sanitizer.violations == 0


def test_a_preempted_request_has_all_experts(oracles: Oracles, overlaps: bool) -> None:
    oracle = oracles("qwen3-moe")
    engine = start(oracle.path, max_num_batched_tokens=16)
    prompt = prompts_of(oracle)[-1]
    for num_steps in range(9):
        handle = engine.add(f"{num_steps}", prompt, greedy(NUM_NEW))
        for _ in range(num_steps):
            engine.step()
        with engine.lock:
            engine._stop_running("hold")
        drain(engine)
        assert handle.request.num_preemptions == (num_steps > 0)
        check(handle, oracle)


def test_pages_are_read_before_another_request_has_them(oracles: Oracles, overlaps: bool) -> None:
    oracle = oracles("mixtral")
    engine = start(oracle.path, enable_prefix_caching=False, max_model_len=96)
    prompts = [prompts_of(oracle)[i % 4] for i in range(24)]  # one after another in six slots
    for handle in run(engine, prompts):
        check(handle, oracle)


def test_a_drafter_with_experts_stores_none() -> None:
    """MTP layers have experts of their own."""
    prompts = [prompt_of(length) for length in LENGTHS]
    plain, drafting = (
        run(start("tiny:deepseek-v3", **more), prompts) for more in ({}, {"speculative": "mtp"})
    )
    for left, right in zip(plain, drafting, strict=True):
        assert left.token_ids == right.token_ids
        assert left.routed_experts is not None and right.routed_experts is not None
        assert np.array_equal(np.sort(left.routed_experts), np.sort(right.routed_experts))


def test_offline() -> None:
    llm = LLM(
        "tiny:deepseek-v3", backend="eager", show_progress=False, enable_return_routed_experts=True
    )
    wanted = SamplingParams(temperature=0, max_tokens=6, stop="\n", n=2)
    (output,) = llm.generate("Hello", wanted)
    for answer in output.outputs:
        made = answer.routed_experts
        assert made is not None
        num_tokens = len(output.prompt_token_ids) + len(answer.token_ids)
        assert made.shape[0] == num_tokens - 1
        assert len(np.unique(made)) > 1
    plain = LLM("tiny:deepseek-v3", backend="eager", show_progress=False)
    assert plain.generate("Hello", wanted)[0].outputs[0].routed_experts is None
    assert plain.generate("Hello", wanted)[0].outputs[0].text == output.outputs[0].text


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"model": "tiny:llama"}, UnsupportedModelError, "no experts"),
        ({"enable_expert_parallel": True}, ConfigError, "enable_expert_parallel"),
        ({"enable_dp_attention": True}, ConfigError, "enable_dp_attention"),
        ({"speculative": "mtp", "speculative_topk": 2}, ConfigError, "speculative_topk"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"enable_return_routed_experts.*{match}"):
        start(**{"model": "tiny:qwen3-moe", **settings})
