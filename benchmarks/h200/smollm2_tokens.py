"""Greedy tokens of the default model compared with transformers in float32 on the same device.

    python benchmarks/h200/smollm2_tokens.py [--dtype bfloat16] [MODEL]

Slotzero generates 32 tokens for each of 100 prompts. transformers then reads prompt and answer in
one pass: if its most likely token equals ours at every position, its own greedy answer is the same.
For a prompt whose answers diverge, the script reports the difference in logits between
transformers' token and ours at the first difference: both agree up to there, so a small difference
is a near-tie. The last line is JSON.
"""

import argparse
import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.source import open_checkpoint

NUM_TOKENS = 32
SUBJECTS = (
    "the capital of France", "photosynthesis", "a binary tree", "the French Revolution",
    "a sonnet", "black holes", "compound interest", "the water cycle", "the Roman Senate",
    "vaccination", "plate tectonics", "a prime number", "jazz", "the immune system", "a compiler",
    "the stock market", "tides", "the Silk Road", "evolution", "a lighthouse",
)  # fmt: skip
QUESTIONS = (
    "Explain {} in one sentence.",
    "Why is {} important?",
    "Write a short poem about {}.",
    "Tell a child about {}.",
    "List three facts about {}.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    messages = [
        [{"role": "user", "content": question.format(subject)}]
        for subject in SUBJECTS
        for question in QUESTIONS
    ]
    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = llm.chat(messages, params)
    device = llm.engine.limits.device
    oracle = transformers_model(args.model).to(device)
    gaps = [
        divergence(oracle, answer.prompt_token_ids, answer.outputs[0].token_ids)
        for answer in answers
    ]
    diverged = [gap for gap in gaps if gap is not None]
    for message, gap in zip(messages, gaps, strict=True):
        if gap is not None:
            print(f"{gap[1]:8.4f} at token {gap[0]:2}: {message[0]['content']}")
    report = {
        "device": device,
        "dtype": llm.engine.limits.dtype,
        "prompts": len(messages),
        "equal": len(messages) - len(diverged),
        "largest_gap": max((gap for _, gap in diverged), default=0.0),
    }
    print(json.dumps(report))


def transformers_model(name: str) -> LlamaForCausalLM:
    checkpoint = open_checkpoint(name)
    model = LlamaForCausalLM(LlamaConfig(**dict(checkpoint.config))).eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.float()


def divergence(
    model: LlamaForCausalLM, prompt: list[int], answer: list[int]
) -> tuple[int, float] | None:
    """Return the first place where transformers chooses another token, and the logit difference."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()  # [answer, vocab]
    chosen = torch.tensor(answer, device=model.device)
    best = logits.max(-1).values
    gap = best - logits.gather(-1, chosen[:, None])[:, 0]
    places = (logits.argmax(-1) != chosen).nonzero()
    return (int(places[0]), float(gap[places[0]])) if len(places) else None


if __name__ == "__main__":
    main()
