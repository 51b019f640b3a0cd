"""A whole certification of an engine and of its mutants, on every rank.

All ranks do the same at the same time, each on its own part of the model; rank 0 joins the results.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slotzero.certify.batch_invariance import INVARIANCE, REQUESTS, check_batch_invariance
from slotzero.certify.certify import all_sizes, certify, few_checks, few_sizes, left_out
from slotzero.certify.late_device import COPIES, LATE_COPIES, late_copies
from slotzero.certify.late_faults import mutate_copies
from slotzero.certify.mutants import Mutant, mutate
from slotzero.certify.order_faults import mutate_order
from slotzero.certify.report import CHECKS, ENGINE, Cell, Certificate, Violation
from slotzero.certify.scenarios import bounds_of, scenario_for
from slotzero.certify.traffic import mutate_traffic
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.executor.rank_group import RankGroup


@dataclass(frozen=True)
class Findings:
    certificate: Certificate
    mutants: list[Mutant] | None


class CertifySession:
    def __init__(
        self, engine: Engine, model: str, is_quick: bool, is_deterministic: bool = False
    ) -> None:
        """In deterministic mode, on one rank, S10 is run as well."""
        self._engine, self._is_quick = engine, is_quick
        self._checks_invariance = is_deterministic and not engine.worker.ranks.is_distributed
        runners = engine.worker.runners
        self.plan = list(few_sizes(runners) if is_quick else all_sizes(runners))
        num_sizes = sum(len(list(runner.all_keys())) for runner in runners)
        self.certificate = Certificate(model, engine.limits.backend, num_all_sizes=num_sizes)
        self.certificate.uncertified.update(left_out(runners, self.plan, is_quick))

    @property
    def num_cells(self) -> int:
        return len(self.plan) * len(CHECKS) + 1 + self._checks_invariance

    def certify(self, seen: Callable[[Cell], None] = lambda cell: None) -> Certificate:
        engine = self._engine
        certificate = certify(
            self.certificate,
            self.plan,
            lambda runner, key: scenario_for(engine, runner, key),
            bounds_of(engine),
            seen,
            skipped=few_checks(self.plan) if self._is_quick else {},
        )
        certificate.copies = self._whole(
            COPIES, LATE_COPIES, lambda: late_copies(engine.worker), seen
        )
        if self._checks_invariance:
            certificate.batch_invariance = self._whole(
                REQUESTS, INVARIANCE, lambda: check_batch_invariance(engine), seen
            )
        return certificate

    def _whole(
        self,
        what: str,
        check: str,
        find: Callable[[], Iterable[Violation]],
        seen: Callable[[Cell], None],
    ) -> Cell:
        """Run a check that belongs to no size."""
        start = time.perf_counter()
        violations = tuple(find())
        cell = Cell(ENGINE, what, check, time.perf_counter() - start, violations)
        self.certificate.seconds += cell.seconds
        seen(cell)
        return cell

    def mutate(self, seen: Callable[[Mutant], None] = lambda mutant: None) -> list[Mutant]:
        """Try all mutants. Returns none if a check failed before on any rank: a fault would then
        prove nothing."""
        engine = self._engine
        if engine.worker.ranks.any(not self.certificate.passed):
            return []
        mutants = [
            *mutate(engine, seen), *mutate_copies(engine, seen), *mutate_traffic(engine, seen)
        ]  # fmt: skip
        return [*mutants, *mutate_order(engine, seen)] if self._checks_invariance else mutants


def certify_rank(
    config: EngineConfig, rank_group: RankGroup, is_quick: bool, with_mutants: bool
) -> Findings:
    """Certify the part of the model that a rank other than the first holds."""
    session = CertifySession(
        Engine(replace(config, show_progress=False), rank_group), config.model, is_quick
    )
    certificate = session.certify()
    return Findings(certificate, session.mutate() if with_mutants else None)


def joined(findings: Sequence[Findings]) -> Findings:
    """Join what all ranks found, in the order of ranks."""
    first, *others = findings
    cells = {(cell.size, cell.check): cell for cell in first.certificate.cells}
    for rank, other in enumerate(others, start=1):
        for new in other.certificate.cells:
            cell = cells.setdefault((new.size, new.check), replace(new, violations=()))
            found = tuple(replace(v, found=f"rank {rank}: {v.found}") for v in new.violations)
            cells[cell.size, cell.check] = replace(cell, violations=cell.violations + found)
    certificate = replace(first.certificate, cells=list(cells.values()))
    if first.mutants is None:
        return Findings(certificate, None)
    every = zip(*(found.mutants or () for found in findings), strict=True)
    return Findings(certificate, [_named_by_all(mutants) for mutants in every])


def _named_by_all(mutants: Iterable[Mutant]) -> Mutant:
    first, *others = mutants
    named = dict.fromkeys((*first.named, *(name for other in others for name in other.named)))
    return replace(first, named=tuple(named))
