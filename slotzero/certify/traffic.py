"""S7 of live traffic: faults of the engine that only an answer shows, and whether S8 names them.

Replay and eager alike do what such a fault says, and every step is sound by itself, so S0 to S6
have nothing to find. A few requests are served without the fault and with it. One that changed no
answer broke nothing and is not counted. The engine has one rank: watching traffic has, too.
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
from slotzero.certify.mutants import Mutant
from slotzero.certify.report import Violation
from slotzero.engine.engine import Engine
from slotzero.errors import ContractError, PoolError
from slotzero.graph import GraphKey, Pieces
from slotzero.request import Request
from slotzero.runners.passes import SLOTS
from slotzero.sampling.params import SamplingParams
from slotzero.speculative.passes import NUM_TRIED, NUM_VERIFIED, VERIFIED
from slotzero.speculative.widths import FixedWidth

LETTERS = (3, 5, 6, 7)  # token ids that every vocabulary has
ANSWER_LEN = 24
RUNNER = "engine"


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class TrafficFault(ABC):
    name: str

    @abstractmethod
    def applies(self, engine: Engine) -> bool: ...

    @abstractmethod
    def tensor(self, engine: Engine) -> str:
        """What S8 should name."""

    @abstractmethod
    def asks(self, engine: Engine) -> list[Ask]:
        """Requests that meet the fault, one after another."""

    @abstractmethod
    def inject(self, engine: Engine) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class WrongDraft(TrafficFault):
    """Verify takes the first wrong draft of a row for right, and goes on from it."""

    def applies(self, engine: Engine) -> bool:
        return bool(engine.worker.cycles) and engine.worker.tree is None and _fits(engine, self)

    def tensor(self, engine: Engine) -> str:
        return VERIFIED

    def asks(self, engine: Engine) -> list[Ask]:
        """Prompts of a few letters with every pair of them, so that an n-gram drafter guesses."""
        pairs = [letter for pair in product(LETTERS, repeat=2) for letter in pair]
        bias = dict.fromkeys(LETTERS, 100.0)
        return [Ask(pairs, _params(temperature=1.0, seed=i, logit_bias=bias)) for i in range(3)]

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
    """As kernels: nothing here reads a value back to the host."""
    registry = engine.worker.registry
    tokens, length = registry["tokens"], registry["length"]

    def damaged(key: GraphKey, pieces: Pieces) -> None:
        slots = registry[SLOTS][: key.rows].long()
        start, guesses = length[slots], tokens[slots]
        function(key, pieces)
        tried, num = (registry[name][: key.rows] for name in (NUM_TRIED, NUM_VERIFIED))
        sampled = registry[VERIFIED][: key.tokens].view(key.rows, -1)
        is_more = (num > 0) & (num < tried)
        place = torch.where(is_more, num, 1).long()  # past the newest token, of the wrong draft
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
    """The last token of a page is no part of its key in the prefix cache."""

    def applies(self, engine: Engine) -> bool:
        return engine.limits.enable_prefix_caching and _fits(engine, self)

    def tensor(self, engine: Engine) -> str:
        return engine.worker.page_tables[0]

    def asks(self, engine: Engine) -> list[Ask]:
        """The second prompt is the first one, but for the last token of every page."""
        size = engine.limits.page_size
        least = max(4 * size, engine.limits.snapshot_interval)
        rng = random.Random(0)
        first = [rng.choice(LETTERS) for _ in range(least + 1)]
        ends = range(size - 1, least, size)
        other = {i: rng.choice([letter for letter in LETTERS if letter != first[i]]) for i in ends}
        second = [other.get(i, token) for i, token in enumerate(first)]
        return [Ask(prompt, _params(temperature=0.0, speculative=False))
                for prompt in (first, second)]  # fmt: skip

    @contextmanager
    def inject(self, engine: Engine) -> Iterator[None]:
        cache = engine.lanes[0].ledger.cache
        right = cache._keys

        def short(token_ids: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, ...]]:
            return ((*key[:-1], 0) for key in right(token_ids, first, stop))

        with swapped(cache, "_keys", short):
            try:
                yield
            finally:
                cache.clear()


def _params(**more: object) -> SamplingParams:
    given: dict[str, object] = {"max_tokens": ANSWER_LEN, "ignore_eos": True, **more}
    return SamplingParams(**given)  # type: ignore[arg-type]


def _fits(engine: Engine, fault: TrafficFault) -> bool:
    """Whether the context has room for what it asks."""
    longest = max(len(ask.prompt) for ask in fault.asks(engine))
    return longest + ANSWER_LEN <= engine.limits.max_model_len


TRAFFIC_FAULTS: tuple[TrafficFault, ...] = (
    WrongDraft("wrong draft accepted"),
    ShortKey("prefix-cache key without a token"),
)


class _Watch:
    """In place of an engine's sanitizer: S8 over every answer, and the ownership of S9."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._answers = engine, AnswerCheck(engine, is_full=True)
        self.violations: list[Violation] = []

    def committed(self, finished: Sequence[Request]) -> None:
        self.violations += self._answers.committed(finished, is_due=True)
        try:
            self._engine.check()
        except PoolError as error:
            self.violations.append(Violation("S9", RUNNER, "a step", "", str(error)))


def mutate_traffic(
    engine: Engine, seen: Callable[[Mutant], None] = lambda mutant: None
) -> list[Mutant]:
    """Faults that apply to this engine and change an answer. Afterwards it is as it was."""
    mutants: list[Mutant] = []
    if engine.worker.ranks.is_distributed:
        return mutants
    for fault in TRAFFIC_FAULTS:
        if not fault.applies(engine):
            continue
        right, violations = _serve(engine, fault)
        for violation in violations:
            raise ContractError(f"nothing was broken yet: {violation}")
        with fault.inject(engine):
            wrong, violations = _serve(engine, fault)
        if wrong != right:
            first = violations[0].check if violations else ""
            named = dict.fromkeys(v.tensor for v in violations if v.check == first)
            name = fault.tensor(engine)
            mutants.append(Mutant(RUNNER, name, fault.name, (), first, tuple(named)))
            seen(mutants[-1])
    return mutants


def _serve(engine: Engine, fault: TrafficFault) -> tuple[list[list[int]], list[Violation]]:
    """-> the answers, and what was found"""
    watch, cache = _Watch(engine), engine.lanes[0].ledger.cache
    answers = []
    cache.clear()
    with ExitStack() as stack:
        stack.enter_context(swapped(engine, "sanitizer", watch))
        stack.enter_context(
            swapped(engine.draft_widths, "policy", FixedWidth(engine.limits.max_width))
        )
        for runner in engine.worker.runners:
            stack.enter_context(swapped(runner, "observer", None))
        for i, ask in enumerate(fault.asks(engine)):
            answers.append(engine.add(f"{fault.name} {i}", *ask))
            while engine.has_work:
                engine.step()
    cache.clear()
    return [answer.token_ids for answer in answers], watch.violations
