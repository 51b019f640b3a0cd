"""Faults in the order of summation, which S10 must catch.

Each breaks one rule of docs/determinism.md in every layer. They need kernels that keep the rules,
so that S10 finds nothing without a fault. Steps run eagerly, because recordings contain the intact
kernels.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slotzero.certify.batch_invariance import check_batch_invariance
from slotzero.certify.faults.case import swapped
from slotzero.certify.mutants import Mutant
from slotzero.certify.report import ENGINE
from slotzero.engine.engine import Engine
from slotzero.errors import ContractError
from slotzero.graph import GraphKey, Runner
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, Tokens
from slotzero.kernels.weights import LinearWeight
from slotzero.runners.passes import LOGPROBS

FEW_ROWS = 4
PARTS = 3
KEYS = 8  # of a part of the longest context


@dataclass(frozen=True)
class OrderFault(ABC):
    name: str

    @abstractmethod
    def damaged(self, kernels: Kernels) -> dict[str, Callable[..., Any]]:
        """Return the operations that replace those of the kernel set, by name."""

    @contextmanager
    def inject(self, engine: Engine) -> Iterator[None]:
        kernels = engine.worker.kernels
        with ExitStack() as stack:
            for runner in engine.worker.runners:  # nothing is recorded with the fault either
                stack.enter_context(swapped(runner, "prepare", lambda key: None))
                stack.enter_context(swapped(runner, "run", _eagerly(runner)))
            for name, operation in self.damaged(kernels).items():
                stack.enter_context(swapped(kernels, name, operation))
            yield


@dataclass(frozen=True)
class SplitByRows(OrderFault):
    """A product over few rows splits its inner dimension; over more rows it does not."""

    def damaged(self, kernels: Kernels) -> dict[str, Callable[..., Any]]:
        right = kernels.linear

        def linear(x: Normed, weight: LinearWeight) -> Tensor:
            if len(x.x) > FEW_ROWS:
                return right(x, weight)
            return _in_parts(right, x, weight, range(PARTS))

        return {"linear": linear}


@dataclass(frozen=True)
class AtomicSum(OrderFault):
    """The parts of a split product are added in the order in which they are finished."""

    def damaged(self, kernels: Kernels) -> dict[str, Callable[..., Any]]:
        right, rng = kernels.linear, random.Random(0)

        def linear(x: Normed, weight: LinearWeight) -> Tensor:
            return _in_parts(right, x, weight, rng.sample(range(PARTS), PARTS))

        return {"linear": linear}


@dataclass(frozen=True)
class SplitByLongest(OrderFault):
    """Attention merges as many parts as the longest context of the step has."""

    def damaged(self, kernels: Kernels) -> dict[str, Callable[..., Any]]:
        right_plan, parts = kernels.plan, [1]

        def plan(tokens: Tokens, *others: Any) -> Any:
            parts[0] = 1 + int(tokens.positions.max()) // KEYS  # the host waits; this is a test
            return right_plan(tokens, *others)

        def split(right: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def attention(*given: Any) -> Tensor:
                part = right(*given) / parts[0]
                total = torch.zeros_like(part)
                for _ in range(parts[0]):
                    total = total + part
                return total

            return attention

        return {
            "plan": plan,
            "attention": split(kernels.attention),
            "mla_attention": split(kernels.mla_attention),
        }


ORDER_FAULTS: tuple[OrderFault, ...] = (
    SplitByRows("contraction split that depends on the rows"),
    SplitByLongest("key split that depends on the longest context"),
    AtomicSum("atomic sum"),
)


def _eagerly(runner: Runner) -> Callable[[GraphKey, int], None]:
    return lambda key, num_tokens: runner.eager(key)


def _in_parts(
    product: Callable[[Normed, LinearWeight], Tensor], x: Normed, weight: LinearWeight, order: Any
) -> Tensor:
    """Add up products of parts of the inner dimension, in this order."""
    size = x.x.shape[1]
    bounds = [size * i // PARTS for i in range(PARTS + 1)]
    total: Tensor | None = None
    for i in order:
        part = torch.zeros_like(x.x)
        part[:, bounds[i] : bounds[i + 1]] = x.x[:, bounds[i] : bounds[i + 1]]
        added = product(x._replace(x=part, float8=None), weight)
        total = added if total is None else total + added
    assert total is not None
    return total


def mutate_order(
    engine: Engine, seen: Callable[[Mutant], None] = lambda mutant: None
) -> list[Mutant]:
    """Try every fault. Restores the engine."""
    for violation in check_batch_invariance(engine):
        raise ContractError(f"a check fails without any fault: {violation}")
    mutants = []
    for fault in ORDER_FAULTS:
        with fault.inject(engine):
            violations = check_batch_invariance(engine)
        named = dict.fromkeys(violation.tensor for violation in violations)
        caught_by = violations[0].check if violations else ""
        mutants.append(Mutant(ENGINE, LOGPROBS, fault.name, (), caught_by, tuple(named)))
        seen(mutants[-1])
    return mutants
