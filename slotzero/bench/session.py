"""An engine for benchmarks: its start-up time, its runners' counts, and the bytes that its steps
must read.

This module does not know how results are shown.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

from slotzero.bench import hardware
from slotzero.bench.timeline import Timeline, measure
from slotzero.bench.workloads import Workload, WorkloadSpec
from slotzero.certify.start import start_engine
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError
from slotzero.executor.limits import choose_backend
from slotzero.graph.runner import Counts
from slotzero.system.progress import prompts_bar

WARMUP_LEN = 16  # tokens per answer: meets every prompt's shape at little cost
_PART = r"(\.\d+)?(\.(codes|scales|offsets|group_of))?"  # of a weight that is quantised
_EXPERTS = re.compile(rf"weight\.moe(_\d+)?(\.moe)?\.(gate_up|down){_PART}")  # of routed experts
_EMBEDDING = re.compile(rf"weight\.embedding{_PART}")
_HEAD = re.compile(rf"weight\.head{_PART}")
_LAYER_EMBEDDING = re.compile(rf"weight\.layer_embedding\.embedding{_PART}")
_SEEN_EVERY = 0.5  # seconds between progress updates, so that they are not measured


class BenchSession:
    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        config = EngineConfig(model=model, skip_tokenizer_init=True, **settings)
        device, _ = choose_backend(config)
        self.model = model
        self.hardware = hardware.describe(device)
        self.read_bandwidth = hardware.read_bandwidth(device)  # before the engine takes the memory
        self._shows_progress = config.show_progress
        start = time.perf_counter()
        self.engine = start_engine(config)
        self.record_seconds = self.engine.recording_seconds
        self.load_seconds = time.perf_counter() - start - self.record_seconds
        self._before = self._counts()
        self._preemptions_before = 0

    def draw(self, spec: WorkloadSpec) -> Workload:
        workload = spec.draw(self.engine.worker.vocab_size)
        limit = self.engine.limits.max_model_len
        if workload.longest > limit:
            raise ConfigError(
                f"workload {spec.name} needs a context of {workload.longest} tokens, and the "
                f"engine's is {limit}: choose another --workload, or shorter --input-len and "
                "--output-len"
            )
        return workload

    def warm_up(self, workload: Workload) -> None:
        """Warm up, and reset the counts."""
        self.measure(workload.clipped(WARMUP_LEN))
        self._before = self._counts()
        self._preemptions_before = self.engine.schedulers.num_preemptions

    def measure(self, workload: Workload) -> Timeline:
        with prompts_bar(self._shows_progress, len(workload.prompts)) as update:
            return measure(self.engine, workload, _now_and_then(update))

    @property
    def num_preemptions(self) -> int:
        return self.engine.schedulers.num_preemptions - self._preemptions_before

    def counts(self) -> Mapping[str, Counts]:
        """Counts by runner since the warm-up."""
        return {name: _since(now, self._before[name]) for name, now in self._counts().items()}

    def bytes_read(self, workload: Workload, num_steps: int) -> int:
        """Bytes that every implementation must move: the weights once per step, and for every
        token after the first the KV of the earlier tokens that it sees and its recurrent state."""
        kv_bytes = sum(
            each * _sum_of_range(len(prompt) + 1, len(prompt) + output_len, window)
            for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True)
            for each, window in self._kv_bytes_per_token()
        )
        num_tokens = sum(output_len - 1 for output_len in workload.output_lens)
        weight_bytes = num_steps * self._weight_bytes(num_tokens / num_steps)
        return weight_bytes + kv_bytes + num_tokens * self._state_bytes()

    def least_seconds(self, contexts: Iterable[int]) -> float:
        """Return the time of one step that reads the weights once and the KV of these rows, and
        moves their recurrent states, at the measured bandwidth."""
        contexts = list(contexts)
        of_rows = sum(
            self._state_bytes()
            + sum(each * min(context, window) for each, window in self._kv_bytes_per_token())
            for context in contexts
        )
        return (self._weight_bytes(len(contexts)) + of_rows) / self.read_bandwidth

    def _state_bytes(self) -> int:
        """Bytes of one row's recurrent states, which are read and written."""
        states = self.engine.worker.states
        parts = () if states is None else states[:2]
        return 2 * sum(part[:, 0].nbytes for part in parts if part is not None)

    def _weight_bytes(self, rows: float) -> int:
        """Return the bytes of the weights that a step reads: without an embedding that is not also
        the head, of which it reads a few rows, and without experts that this number of rows would
        not choose at random."""
        worker = self.engine.worker
        sizes = {
            e.name: e.tensor.numel() * e.tensor.dtype.itemsize for e in worker.registry.entries()
        }

        def size_of(names: re.Pattern[str]) -> int:
            return sum(size for name, size in sizes.items() if names.fullmatch(name))

        unread = size_of(_LAYER_EMBEDDING) + (size_of(_EMBEDDING) if size_of(_HEAD) else 0)
        if (shape := worker.model.experts) is not None:  # though all layers may be dense
            routed = size_of(_EXPERTS) * shape.num_experts // shape.num_all
            unread += round(routed * (1 - shape.top_k / shape.num_experts) ** rows)
        return worker.weight_bytes - unread

    def _kv_bytes_per_token(self) -> list[tuple[int, int]]:
        """Return, for each group of layers, the KV bytes per token and the most tokens it sees."""
        limits, registry = self.engine.limits, self.engine.worker.registry
        found = []
        for name, window in limits.windows.items():
            kv = registry[f"kv_{name}"]  # [layers, pages, page_size, ...]
            found.append((kv[:, 0, 0].nbytes, window or limits.max_model_len))
        return found

    def _counts(self) -> dict[str, Counts]:
        return {runner.spec.name: deepcopy(runner.counts) for runner in self.engine.worker.runners}


def _since(now: Counts, before: Counts) -> Counts:
    return Counts(
        sizes=now.sizes - before.sizes,
        eager=Counter(now.eager) - Counter(before.eager),
        real_tokens=now.real_tokens - before.real_tokens,
        padded_tokens=now.padded_tokens - before.padded_tokens,
    )


def _sum_of_range(start: int, end: int, most: int) -> int:
    """Return start + ... + (end - 1), with each term limited."""
    bend = min(max(start, most), end)
    return (bend - start) * (start + bend - 1) // 2 + (end - bend) * most


def _now_and_then(update: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Collect progress and pass it on twice a second."""
    finished, made, last = 0, 0, time.perf_counter()

    def seen(num_finished: int, num_tokens: int) -> None:
        nonlocal finished, made, last
        finished, made = finished + num_finished, made + num_tokens
        now = time.perf_counter()
        if now - last >= _SEEN_EVERY:
            update(finished, made)
            finished, made, last = 0, 0, now

    return seen
