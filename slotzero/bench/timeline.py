"""One run of a workload, with the time at which each token became known.

It drives the engine step by step, like a server, and does not look inside. The rule: only useful
tokens count; padding and tokens that are recomputed after a preemption cost time, but are not
output.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from slotzero.bench.workloads import Workload
from slotzero.engine.engine import Engine
from slotzero.sampling.params import SamplingParams

Seen = Callable[[int, int], None]  # answers finished, tokens made


@dataclass(frozen=True)
class Timeline:
    """Times of all tokens, in seconds after the requests arrived, all at once."""

    seconds: float
    num_steps: int
    token_times: list[list[float]]  # by request

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_times))

    def first_tokens(self) -> list[float]:
        return [times[0] for times in self.token_times]

    def last_tokens(self) -> list[float]:
        return [times[-1] for times in self.token_times]

    def gaps(self) -> list[float]:
        """Times between consecutive tokens of the same request."""
        return [b - a for times in self.token_times for a, b in pairwise(times)]


def measure(engine: Engine, workload: Workload, seen: Seen) -> Timeline:
    times: dict[str, list[float]] = {}
    steps_before = engine.num_steps
    start = time.perf_counter()
    for i, prompt in enumerate(workload.prompts):
        engine.add(f"bench-{i}", prompt, _greedy(workload.output_lens[i]))
        times[f"bench-{i}"] = []
    while engine.has_work:
        grown = engine.step()
        now = time.perf_counter() - start
        for answer in grown:
            times[answer.request.id].append(now)
        seen(sum(answer.finished for answer in grown), len(grown))
    seconds = time.perf_counter() - start
    return Timeline(seconds, engine.num_steps - steps_before, list(times.values()))


def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
