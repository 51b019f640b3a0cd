"""S7 for live traffic: faults of the engine rather than of a tensor, and whether S8 or S0 names
them.

Most show only in an answer: replayed and eager steps contain them equally, and every step is
consistent by itself. A few requests are served without the fault and with it. A fault that changed
no answer is not counted. This works on one rank only, like the live sanitizer.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from slotzero.certify.answers import AnswerCheck
from slotzero.certify.faults.case import swapped
from slotzero.certify.faults.device import replaced
from slotzero.certify.known_bugs import numbers_of
from slotzero.certify.mutants import Mutant
from slotzero.certify.report import ENGINE, Violation
from slotzero.engine.engine import Engine
from slotzero.errors import ContractError, PoolError
from slotzero.graph import GraphKey, Pieces, Runner
from slotzero.request import Request
from slotzero.runners.passes import COUNTS, SLOTS
from slotzero.sampling.params import SamplingParams
from slotzero.speculative.passes import NUM_CONFIRMED, VERIFIED, VERIFY_LEN
from slotzero.speculative.widths import FixedWidth
from slotzero.step import Step

LETTERS = (3, 5, 6, 7)  # token ids that every vocabulary has
ANSWER_LEN = 24


class TrafficRequest(NamedTuple):
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class TrafficFault(ABC):
    name: str

    @abstractmethod
    def applies(self, engine: Engine) -> bool: ...

    @abstractmethod
    def tensor(self, engine: Engine) -> str:
        """Return the tensor that S8 should name."""

    @abstractmethod
    def requests(self, engine: Engine) -> list[TrafficRequest]:
        """Return requests that run into the fault, to be served in order."""

    @abstractmethod
    def inject(self, engine: Engine) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class WrongDraft(TrafficFault):
    """Verification accepts the first wrong draft of a row."""

    def applies(self, engine: Engine) -> bool:
        return bool(engine.worker.cycles) and engine.worker.tree is None and _fits(engine, self)

    def tensor(self, engine: Engine) -> str:
        return VERIFIED

    def requests(self, engine: Engine) -> list[TrafficRequest]:
        """Return prompts with every pair of a few letters, so that an n-gram drafter has drafts."""
        pairs = [letter for pair in product(LETTERS, repeat=2) for letter in pair]
        bias = dict.fromkeys(LETTERS, 100.0)
        return [
            TrafficRequest(pairs, _params(temperature=1.0, seed=i, logit_bias=bias))
            for i in range(3)
        ]

    @contextmanager
    def inject(self, engine: Engine) -> Iterator[None]:
        runner = engine.worker.cycles[engine.limits.max_width].verify
        key = runner.pick(1, 1)
        assert isinstance(key, GraphKey), key
        damaged = _accepting_one_more(engine, runner.spec.function)
        with ExitStack() as stack:
            with torch.inference_mode():
                runner.prepare(key)
                stack.enter_context(replaced(runner, key, damaged))
            yield


def _accepting_one_more(
    engine: Engine, function: Callable[[GraphKey, Pieces], None]
) -> Callable[[GraphKey, Pieces], None]:
    """Return a step function that accepts one more draft. It reads no value back to the host."""
    registry = engine.worker.registry
    tokens, length = registry["tokens"], registry["length"]

    def damaged(key: GraphKey, pieces: Pieces) -> None:
        slots = registry[SLOTS][: key.rows].long()
        start, guesses = length[slots], tokens[slots]
        function(key, pieces)
        tried, num = (registry[name][: key.rows] for name in (VERIFY_LEN, NUM_CONFIRMED))
        sampled = registry[VERIFIED][: key.tokens].view(key.rows, -1)
        is_more = (num > 0) & (num < tried)
        place = torch.where(is_more, num, 1).long()  # of the wrong draft, after the newest token
        at, column = start + place, (place - 1)[:, None]
        guess = guesses.gather(1, at[:, None])
        kept = sampled.gather(1, column)
        sampled.scatter_(1, column, torch.where(is_more[:, None], guess, kept))
        after = sampled.gather(1, place.clamp_max(sampled.shape[1] - 1)[:, None])
        for where, values in ((at, guess), (at + 1, after)):
            new = torch.where(is_more, values[:, 0], tokens[slots, where])
            tokens.index_put_((slots, where), new)
        length.index_add_(0, slots, is_more.to(length.dtype))
        num.add_(is_more)

    return damaged


@dataclass(frozen=True)
class ShortKey(TrafficFault):
    """The second half of a page is missing in its prefix-cache key.

    A single token would change some answers so little that S8 takes them for near-ties in bfloat16.
    """

    def applies(self, engine: Engine) -> bool:
        return engine.limits.enable_prefix_caching and _fits(engine, self)

    def tensor(self, engine: Engine) -> str:
        return engine.worker.page_tables[0]

    def requests(self, engine: Engine) -> list[TrafficRequest]:
        """Return two prompts that differ only in the second half of every page."""
        size = engine.limits.page_size
        least = max(4 * size, engine.limits.snapshot_interval)
        rng = random.Random(0)
        first = [rng.choice(LETTERS) for _ in range(least + 1)]
        ends = [i for i in range(least) if i % size >= size // 2]
        other = {i: rng.choice([letter for letter in LETTERS if letter != first[i]]) for i in ends}
        second = [other.get(i, token) for i, token in enumerate(first)]
        return [TrafficRequest(prompt, _params(temperature=0.0, speculative=False))
                for prompt in (first, second)]  # fmt: skip

    @contextmanager
    def inject(self, engine: Engine) -> Iterator[None]:
        cache = engine.schedulers[0].ledger.cache
        right = cache._keys

        def short(token_ids: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, ...]]:
            keys = right(token_ids, first, stop)
            return ((*key[: len(key) // 2], *[0] * -(-len(key) // 2)) for key in keys)

        with swapped(cache, "_keys", short):
            try:
                yield
            finally:
                cache.clear()


@dataclass(frozen=True)
class PromptInDecode(TrafficFault):
    """The graph is chosen by the number of rows alone, so a prompt is replayed as decode."""

    def applies(self, engine: Engine) -> bool:
        return _fits(engine, self)

    def tensor(self, engine: Engine) -> str:
        return COUNTS

    def requests(self, engine: Engine) -> list[TrafficRequest]:
        return [TrafficRequest([*LETTERS], _params(temperature=0.0, speculative=False))]

    @contextmanager
    def inject(self, engine: Engine) -> Iterator[None]:
        worker = engine.worker

        def dispatch(step: Step) -> list[tuple[Runner, GraphKey]]:
            key = worker.decode.pick(step.num_rows, step.num_rows)
            assert isinstance(key, GraphKey), key
            return [(worker.decode, key)]

        with swapped(worker, "_dispatch", dispatch):
            yield


def _params(**more: object) -> SamplingParams:
    fields: dict[str, object] = {"max_tokens": ANSWER_LEN, "ignore_eos": True, **more}
    return SamplingParams(**fields)  # type: ignore[arg-type]


def _fits(engine: Engine, fault: TrafficFault) -> bool:
    """Return whether the fault's requests fit into the context."""
    longest = max(len(request.prompt) for request in fault.requests(engine))
    return longest + ANSWER_LEN <= engine.limits.max_model_len


TRAFFIC_FAULTS: tuple[TrafficFault, ...] = (
    WrongDraft("wrong draft accepted"),
    ShortKey("prefix-cache key of half a page"),
    PromptInDecode("prompt row in the decode graph"),
)


class _Watch:
    """Replacement for an engine's sanitizer: S8 for every answer, and the ownership check S9."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._answers = engine, AnswerCheck(engine, is_full=True)
        self.violations: list[Violation] = []

    def committed(self, finished: Sequence[Request]) -> None:
        self.violations += self._answers.committed(finished, is_due=True)
        try:
            self._engine.check()
        except PoolError as error:
            self.violations.append(Violation("S9", ENGINE, "a step", "", str(error)))

    def refused(self, error: ContractError) -> None:
        self.violations.append(Violation("S0", ENGINE, "a step", error.tensor or "", str(error)))


def mutate_traffic(
    engine: Engine, seen: Callable[[Mutant], None] = lambda mutant: None
) -> list[Mutant]:
    """Try the faults that apply to this engine and change an answer. Restores the engine."""
    mutants: list[Mutant] = []
    if engine.worker.ranks.is_distributed:
        return mutants
    for fault in TRAFFIC_FAULTS:
        if not fault.applies(engine):
            continue
        right, violations = _serve(engine, fault)
        for violation in violations:
            raise ContractError(f"a check fails without any fault: {violation}")
        with fault.inject(engine):
            wrong, violations = _serve(engine, fault)
        if wrong != right:
            first = violations[0].check if violations else ""
            named = dict.fromkeys(v.tensor for v in violations if v.check == first)
            name = fault.tensor(engine)
            numbers = numbers_of(ENGINE, name, None, fault.name)
            mutants.append(Mutant(ENGINE, name, fault.name, numbers, first, tuple(named)))
            seen(mutants[-1])
    return mutants


def _serve(engine: Engine, fault: TrafficFault) -> tuple[list[list[int]], list[Violation]]:
    """Serve the fault's requests; return the answers and the violations."""
    watch, cache = _Watch(engine), engine.schedulers[0].ledger.cache
    answers = []
    cache.clear()
    with ExitStack() as stack:
        stack.enter_context(swapped(engine, "sanitizer", watch))
        stack.enter_context(
            swapped(engine.draft_widths, "policy", FixedWidth(engine.limits.max_width))
        )
        for runner in engine.worker.runners:
            stack.enter_context(swapped(runner, "observer", None))
        for i, request in enumerate(fault.requests(engine)):
            answers.append(engine.add(f"{fault.name} {i}", *request))
            try:
                while engine.has_work:
                    engine.step()
            except ContractError as error:  # S0 stopped the step; its requests have ended
                watch.refused(error)
    cache.clear()
    return [answer.token_ids for answer in answers], watch.violations
