"""Tests of speculation in CUDA graphs: same tokens as plain decoding, and replay equal to eager."""

import pytest
import torch
from shadow import Shadow
from traced import prompts_of

from slotzero import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BACKEND, VOCAB = "cuda", 256
TIE = 1e-3  # log probabilities, in float32: passes over one and over many tokens round differently
GREEDY = SamplingParams(temperature=0, max_tokens=48, logprobs=2, ignore_eos=True)
WARM = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True)
DRAFTERS = {
    "ngram": {"speculative": "ngram"},
    "eagle": {"speculative": "eagle"},
    "eagle3": {"speculative": "eagle3"},
    "draft": {"speculative": "draft"},
    "eagle3 tree": {"speculative": "eagle3", "speculative_topk": 3},
    "draft tree": {"speculative": "draft", "speculative_topk": 4, "speculative_steps": 3},
    "mtp": {"speculative": "mtp", "speculative_steps": 3},
    "assistant": {"speculative": "mtp", "speculative_model": "tiny:gemma4-assistant"},
    "assistant tree": {
        "speculative": "mtp", "speculative_model": "tiny:gemma4-assistant", "speculative_topk": 3,
    },
}  # fmt: skip
MODELS = ["tiny:llama", "tiny:gemma3", "tiny:gpt-oss", "tiny:deepseek-v3"]
ONE_MODEL = {
    "mtp": "tiny:deepseek-v3",
    "assistant": "tiny:gemma4",
    "assistant tree": "tiny:gemma4",
}
"""Models whose drafter no other model has."""
PAIRS = [
    (drafter, model)
    for drafter in DRAFTERS
    for model in ([ONE_MODEL[drafter]] if drafter in ONE_MODEL else MODELS)
]
LENGTHS = [5, 40, 17, 1, 60, 9, 33, 21]


def make(model: str, drafter: str | None = None, **more) -> LLM:
    settings = {
        "backend": BACKEND, "dtype": "float32", "kv_cache_memory": 1 << 26, "max_num_seqs": 4,
        "max_model_len": 160, "skip_tokenizer_init": True, "show_progress": False,
        "lazy_recording": True,
    }  # fmt: skip
    if drafter is not None:
        settings |= DRAFTERS[drafter] | {"speculative_adaptive": False}
        if settings["speculative"] == "draft":
            settings["speculative_model"] = model
    return LLM(model, **{**settings, **more})


@pytest.mark.parametrize(("drafter", "model"), [*PAIRS, ("draft", "tiny:gemma4")])
def test_answers_diverge_only_at_near_ties(drafter, model):
    prompts = prompts_of(LENGTHS, VOCAB)
    guessing = make(model, drafter)
    pairs = zip(
        make(model).generate(prompts, GREEDY, use_tqdm=False),
        guessing.generate(prompts, GREEDY, use_tqdm=False),
        strict=True,
    )
    num_parted = 0
    for plain, guessed in ((a.outputs[0], b.outputs[0]) for a, b in pairs):
        tokens = zip(plain.token_ids, guessed.token_ids, strict=True)
        place = next((i for i, (a, b) in enumerate(tokens) if a != b), None)
        if place is not None:
            num_parted += 1
            best, second = sorted((e.logprob for e in plain.logprobs[place].values()), reverse=True)
            assert best - second < TIE, f"parted at {place} by {best - second}"
    assert num_parted <= 1
    guessing.engine.check()
    stats = guessing.engine.speculation
    assert stats.num_drafts > 0
    if drafter == "draft":  # the model itself
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replay_equals_eager_to_the_bit(drafter, dtype):
    """This covers every table and output of verify, draft-extend and draft, with padded rows."""
    llm = make(ONE_MODEL.get(drafter, "tiny:gemma3"), drafter, dtype=dtype)
    shadow = Shadow(llm.engine)
    llm.generate(prompts_of([5, 30, 17], VOCAB), GREEDY, use_tqdm=False)
    llm.generate(prompts_of([9, 21], VOCAB), WARM, use_tqdm=False)
    runners = {key.runner for runner in llm.engine.worker.runners for key in runner.records}
    assert {name.rsplit("-", 1)[0] for name in runners} >= {"verify", "draft-extend", "draft"}
    assert shadow.num_compared > 60
    assert {name: d for name, d in shadow.differences.items() if d} == {}
