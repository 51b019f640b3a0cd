"""LLM that records its logits, and prompts of random token ids."""

import random

import pytest
import torch

from slotzero import LLM, SamplingParams
from slotzero.executor.results import Results
from slotzero.step import Step


def prompts_of(lengths: list[int], vocab: int, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(n)]} for n in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


class Traced:
    """An LLM that records logits: `logits[request id]` has one row per sampled token."""

    def __init__(self, model: str, **settings: object) -> None:
        settings = {"skip_tokenizer_init": True, "show_progress": False, **settings}
        self.llm = LLM(model, lazy_recording=True, **settings)
        self.engine = self.llm.engine
        self.logits: dict[str, list[torch.Tensor]] = {}
        worker = self.engine.worker
        run = worker.run

        def traced(step: Step) -> list[Results]:
            results = run(step)
            name = "logits" if step.width == 1 else "verify_logits"
            logits = worker.registry[name][: step.num_rows * step.width].cpu()
            by_row = logits.view(step.num_rows, step.width, -1)
            for row, values, sampled in zip(step.rows, by_row, results[0].tokens(), strict=True):
                if row.samples:
                    kept = self.logits.setdefault(row.request.id, [])
                    kept += [value.clone() for value in values[: len(sampled)]]
            return results

        worker.run = traced  # type: ignore[method-assign]

    def generate(self, prompts: list, params: SamplingParams = GREEDY) -> list[list[int]]:
        """Return the token ids for each prompt, and keep this batch's logits in `self.logits`."""
        self.logits.clear()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.request_ids = [output.request_id for output in outputs]
        self.engine.check()
        return [output.outputs[0].token_ids for output in outputs]


def expect_equal(traced: Traced, oracle, prompts, num_tokens: int = 64) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    tokens = traced.generate(prompts, params)
    for prompt, got, request_id in zip(prompts, tokens, traced.request_ids, strict=True):
        expected, logits = oracle.generate(prompt["prompt_token_ids"], num_tokens, guess=got)
        assert got == expected
        # a preempted request samples no token twice, so there is one row per token
        rows = torch.stack(traced.logits[request_id][:num_tokens])
        # larger logits round more coarsely, and Gemma 4's reach 5
        assert (rows - logits).abs().max() < max(1e-4, 3e-5 * logits.abs().max().item())


def expect_scored(traced: Traced, oracle, prompts) -> None:
    """Check the log probabilities of prompts, and which of their tokens are the most likely."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=3)
    for output in traced.llm.generate(prompts, params, use_tqdm=False):
        ids = output.prompt_token_ids
        expected = oracle.prompt_logits(ids).double().log_softmax(-1)
        assert len(output.prompt_logprobs) == len(ids)
        for token, row, by_id in zip(ids[1:], expected, output.prompt_logprobs[1:], strict=False):
            assert by_id[token].logprob == pytest.approx(row[token].item(), abs=2e-4)
            best = sorted((e.rank, e.logprob) for e in by_id.values() if e.rank is not None)
            wanted = row.topk(3).values.tolist()
            assert [value for _, value in best] == pytest.approx(wanted, abs=2e-4)
