"""Routing of requests to engines: to the one that has the prompt cached, unless it is crowded.

It knows token ids and counts, neither processes nor HTTP. Each whole chunk of 64 tokens of a prompt
has a key, derived from the chunk and all chunks before it. For each engine the keys of its latest
prompts are remembered, a bounded number of them, and only as long as its process lives.

The rule, among engines that are ready:

    load     a running request counts 1, one that waits for its first token counts 4
    least    the least loaded engine, one with a free slot before any without; among equals, the
             one chosen longest ago
    crowded  no free slot while the least loaded has one, or a load above twice the least plus 16;
             for DP ranks, which step together, a load above the least plus 8
    chosen   the engine, among those that are not crowded, that has most of the prompt cached;
             among equals, the least loaded
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CHUNK = 64  # tokens
MAX_CHUNKS = 1 << 14  # per engine: a million tokens
MAX_PROMPT_CHUNKS = 256  # prompts that agree for this long are taken as equal
WAITING_WEIGHT = 4
TIMES, CROWD = 2, 16


class RouteLoad(NamedTuple):
    """Load of one engine that is ready."""

    life: int  # which of its processes this is
    running: int
    waiting: int
    slots: int

    @property
    def score(self) -> int:
        return self.running + WAITING_WEIGHT * self.waiting

    @property
    def is_full(self) -> bool:
        return self.running + self.waiting >= self.slots

    def is_crowded(self, least: "RouteLoad", times: int = TIMES, crowd: int = CROWD) -> bool:
        return (self.is_full and not least.is_full) or self.score > times * least.score + crowd


class Prefixes:
    """Keys of the chunks that one process was sent, the latest ones."""

    def __init__(self, life: int = 0) -> None:
        self.life = life
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_known(self, keys: Sequence[int]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))

    def remember(self, keys: Sequence[int]) -> None:
        # from the end: without its beginning a prompt is not found, so that is forgotten last
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > MAX_CHUNKS:
            self._keys.popitem(last=False)


class Router:
    def __init__(self, size: int, times: int = TIMES, crowd: int = CROWD) -> None:
        self._crowd = times, crowd
        self.prefixes = [Prefixes() for _ in range(size)]
        self._turn = 0
        self._chosen_at = [0] * size

    def choose(self, prompt: Sequence[int], loads: Mapping[int, RouteLoad]) -> int:
        """Choose an engine for a prompt; `loads` has the engines that are ready, at least one."""
        keys = chunk_keys(prompt)
        known = {i: self._of(i, load.life).num_known(keys) for i, load in loads.items()}
        rank = {i: (load.is_full, load.score, self._chosen_at[i]) for i, load in loads.items()}
        least = loads[min(loads, key=rank.__getitem__)]
        roomy = [i for i, load in loads.items() if not load.is_crowded(least, *self._crowd)]
        chosen = min(roomy, key=lambda i: (-known[i], rank[i]))
        self.prefixes[chosen].remember(keys)
        self._turn += 1
        self._chosen_at[chosen] = self._turn
        return chosen

    def _of(self, index: int, life: int) -> Prefixes:
        if self.prefixes[index].life != life:  # it died, and its cache with it
            self.prefixes[index] = Prefixes(life)
        return self.prefixes[index]


def chunk_keys(prompt: Sequence[int]) -> list[int]:
    keys, key = [], 0
    for end in range(CHUNK, min(len(prompt), CHUNK * MAX_PROMPT_CHUNKS) + 1, CHUNK):
        key = hash((key, *prompt[end - CHUNK : end]))
        keys.append(key)
    return keys
