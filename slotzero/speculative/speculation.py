"""The runners of speculative decoding, and the results that they send to the host.

The worker decides which runners are launched, and when.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slotzero.graph import Ladder, Registry, Runner
from slotzero.graph.backend import Backend
from slotzero.kernels.types import PagedKv
from slotzero.kernels.types_recurrent import States, Trail
from slotzero.models.model import Model
from slotzero.runners.results import ResultRing
from slotzero.sampling.tables import TableSpec
from slotzero.speculative.drafter import (
    MOST_PENDING,
    SPECULATION_TABLES,
    Drafter,
    LogitsDrafter,
)
from slotzero.speculative.passes import SpeculativePasses
from slotzero.speculative.tree import Trees, tree_tables
from slotzero.tree_shape import TreeShape


def speculation_tables(tree: TreeShape | None) -> tuple[TableSpec, ...]:
    return (*SPECULATION_TABLES, *(() if tree is None else tree_tables(tree)))


class Cycle(NamedTuple):
    """The runners of a step that verifies drafts, in launch order."""

    verify: Runner
    extend: Runner
    draft: Runner


class SpeculativeRunners:
    def __init__(
        self,
        registry: Registry,
        decoder: Model,
        drafter: Drafter,
        kv: Mapping[str, PagedKv],
        tree: TreeShape | None,
        widths: Sequence[int],  # that verify drafts, ascending
        graphs: Backend,
        deadline: float | None = None,  # of results
        states: States | None = None,
        trail: Trail | None = None,
    ) -> None:
        trees = None
        if tree is not None:
            assert isinstance(drafter, LogitsDrafter), drafter
            trees = Trees(drafter, tree, registry)
        step = SpeculativePasses(registry, decoder, drafter, kv, widths[-1], trees, states, trail)
        rows = Ladder.doubling(drafter.tables.num_slots)
        specs = step.verify_spec, step.extend_spec, step.draft_spec
        self.cycles = {
            width: Cycle(*(Runner(spec(width, rows), registry, graphs) for spec in specs))
            for width in widths
        }
        if MOST_PENDING in self.cycles:
            self.catch_up = self.cycles[MOST_PENDING].extend
        else:
            self.catch_up = Runner(step.extend_spec(MOST_PENDING, rows), registry, graphs)
        self.verified = ResultRing(registry, step.results, deadline)

    @property
    def runners(self) -> tuple[Runner, ...]:
        cycles = (runner for cycle in self.cycles.values() for runner in cycle)
        return tuple(dict.fromkeys((*cycles, self.catch_up)))  # catch_up may be part of a cycle
