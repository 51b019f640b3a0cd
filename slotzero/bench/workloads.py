"""Workloads: requests of random token ids, drawn from a fixed seed.

This module does not know engines or tokenizers: other engines get the same ids, so that their
numbers are comparable. The rule: the order of the random draws is part of a workload and must not
change.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

VOCAB_SIZE = 32000  # or the model's vocabulary size if that is smaller
_FIRST_ID = 10  # below are the special tokens of most models


@dataclass(frozen=True)
class Workload:
    """Requests that arrive all at once."""

    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt plus answer."""
        pairs = zip(self.prompts, self.output_lens, strict=True)
        return max(len(prompt) + output_len for prompt, output_len in pairs)

    def clipped(self, output_len: int) -> "Workload":
        """The same prompts with shorter answers."""
        return Workload(self.prompts, [min(n, output_len) for n in self.output_lens])


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload before its model is known."""

    name: str
    num_requests: int
    draw: Callable[[int], Workload]  # from a vocabulary size


def fixed(
    num_requests: int, input_len: int, output_len: int, vocab_size: int = VOCAB_SIZE, seed: int = 0
) -> Workload:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(_FIRST_ID, vocab_size) for _ in range(input_len)]
        for _ in range(num_requests)
    ]
    return Workload(prompts, [output_len] * num_requests)


def mixed(
    num_requests: int = 256,
    shortest: int = 100,
    longest: int = 1024,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
) -> Workload:
    """Return the workload of nano-vllm: lengths are uniform in [shortest, longest]."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(num_requests):
        input_len = rng.randint(shortest, longest)
        prompts.append([rng.randrange(_FIRST_ID, vocab_size) for _ in range(input_len)])
    return Workload(prompts, [rng.randint(shortest, longest) for _ in range(num_requests)])


def fixed_spec(
    num_requests: int, input_len: int, output_len: int, name: str | None = None
) -> WorkloadSpec:
    return WorkloadSpec(
        name or f"{num_requests}x{input_len}+{output_len}",
        num_requests,
        partial(_clip, partial(fixed, num_requests, input_len, output_len)),
    )


def _clip(draw: Callable[..., Workload], vocab_size: int) -> Workload:
    return draw(vocab_size=min(VOCAB_SIZE, vocab_size))


WORKLOADS: Mapping[str, WorkloadSpec] = {
    spec.name: spec
    for spec in (
        *(fixed_spec(n, 128, 512, name=f"b{n}") for n in (1, 8, 64, 256)),
        WorkloadSpec("mixed", 256, partial(_clip, mixed)),
        WorkloadSpec("prefill", 64, partial(_clip, partial(fixed, 64, 2048, 1, seed=7))),
    )
}
