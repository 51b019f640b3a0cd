"""S7: mutation testing of the checks. Every rule of every tensor is broken, one at a time.

A mutant is one fault in one tensor of one runner. It is caught if a check fails, and named if that
check names the tensor. This module knows neither how a fault is injected nor what a check looks
for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from slotzero.certify.certify import checksums, examine
from slotzero.certify.checks import CHECK_FUNCTIONS, Examination
from slotzero.certify.faults import FAULTS, Case, Fault, swapped
from slotzero.certify.known_bugs import numbers_of
from slotzero.certify.report import ORDER
from slotzero.certify.scenario import Scenario, Trial, kind_of
from slotzero.certify.scenarios import bounds_of, counts_of, scenario_for
from slotzero.distributed.ranks import Ranks
from slotzero.engine.engine import Engine
from slotzero.errors import ContractError, RecordingError, SlotzeroError
from slotzero.executor.build import KV_SCALES
from slotzero.graph import GraphKey, Registry, Runner, TensorKind
from slotzero.graph.registry import Entry

FEWEST_ROWS = 3  # enough to swap rows, and to leave out every other one


@dataclass(frozen=True)
class Mutant:
    runner: str
    tensor: str
    fault: str
    numbers: tuple[str, ...]
    """Numbers of real bugs that were this fault in this tensor."""
    caught_by: str
    """The first check that failed; empty if none did."""
    named: tuple[str, ...]
    """All tensors that this check named, or the size where it named no tensor."""

    @property
    def caught(self) -> bool:
        return bool(self.caught_by)

    @property
    def is_named(self) -> bool:
        return self.tensor in self.named

    def __str__(self) -> str:
        by = f"{self.caught_by} named {', '.join(self.named)}" if self.caught else "not caught"
        return f"{self.runner}: {self.tensor}: {self.fault}: {by}"


def mutate(
    engine: Engine,
    seen: Callable[[Mutant], None] = lambda mutant: None,
    checks: Sequence[str] = tuple(dict.fromkeys((*ORDER, *CHECK_FUNCTIONS))),
    runners: Sequence[Runner] | None = None,
) -> list[Mutant]:
    """Try every mutant of these runners, by default of all. Restores the engine afterwards."""
    mutants = []
    try:
        with torch.inference_mode():
            for runner in engine.worker.runners if runners is None else runners:
                with swapped(runner, "observer", None):  # an observer would catch them first
                    for mutant in _mutants_of(engine, runner, checks):
                        mutants.append(mutant)
                        seen(mutant)
    finally:
        engine.worker.registry.reupload_published()
    return mutants


def tensors_of(runner: Runner) -> list[Entry]:
    """Return the tensors that a runner can see. A few constants represent all, since one rule and
    one check cover them. Among them are codes of a quantised weight, the scales of one weight for
    each name of a linear layer (some are column-parallel and some row-parallel), and the scales of
    the KV cache."""
    entries = [e for e in runner.entries() if e.tensor.numel()]
    constants = [e for e in entries if e.kind is TensorKind.CONSTANT]
    kept = {constants[i].name for i in (0, len(constants) // 2, -2, -1)} if constants else set()
    kept.update([e.name for e in constants if e.name.endswith(".codes")][:1])
    scales = [e.name for e in reversed(constants) if e.name.endswith(".scales")]
    kept.update({tuple(name.split(".")[2:]): name for name in scales}.values())
    kept.update(e.name for e in constants if e.name.startswith(KV_SCALES))
    return [e for e in entries if e.kind is not TensorKind.CONSTANT or e.name in kept]


def padded_size(runner: Runner) -> GraphKey:
    """Return the smallest size with padded rows and tokens and a few real rows, or the largest."""

    def is_fit(key: GraphKey) -> bool:
        counts = counts_of(runner, key)
        has_tokens = runner.spec.rows is None or max(counts) > 1
        is_padded = len(counts) < key.rows and sum(counts) < key.tokens
        return len(counts) >= FEWEST_ROWS and is_padded and has_tokens

    keys = sorted(runner.all_keys(), key=lambda key: (key.tokens, key.rows))
    return next(filter(is_fit, keys), keys[-1])


def _mutants_of(engine: Engine, runner: Runner, checks: Sequence[str]) -> Iterator[Mutant]:
    key, registry, ranks = padded_size(runner), runner.registry, engine.worker.ranks
    runner.prepare(key)
    constants = checksums(registry)

    def examination(scenario: Scenario) -> Examination:
        return Examination(Trial(runner, scenario), bounds_of(engine), constants)

    with scenario_for(engine, runner, key) as scenario:
        sound = examination(scenario)
        _require_clean(sound)
        cases = [Case(engine, runner, e, scenario, sound.plain) for e in tensors_of(runner)]
        for case, fault in _matrix(cases, shows_in_setup=False):
            with _injected(case, fault):
                caught_by, named = _first_failure(examination(scenario), checks, ranks)
            _put_back(registry, scenario)
            yield _mutant(case, fault, caught_by, named)
    for case, fault in _matrix(cases, shows_in_setup=True):
        with _injected(case, fault):
            try:
                with scenario_for(engine, runner, key) as scenario:
                    caught_by, named = _first_failure(examination(scenario), checks, ranks)
            except SlotzeroError as error:
                caught_by, named = "S0", _named_by(error)
        yield _mutant(case, fault, caught_by, named)


def _named_by(error: SlotzeroError) -> list[str]:
    if isinstance(error, ContractError) and error.tensor is not None:
        return [error.tensor]
    return []


@contextmanager
def _injected(case: Case, fault: Fault) -> Iterator[None]:
    """Inject a fault; if that fails, or it breaks more than its rule, raise an error that names
    it."""
    try:
        with fault.inject(case):
            yield
    except Exception as error:  # a capture, or a kernel, raises whatever it raises
        what = f"{case.runner.spec.name}: {case.entry.name}: {fault.name}"
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise RecordingError(f"mutant {what}: could not be tried: {first}") from error


def _matrix(cases: Iterable[Case], shows_in_setup: bool) -> Iterator[tuple[Case, Fault]]:
    for case in cases:
        for fault in FAULTS:
            if fault.shows_in_setup == shows_in_setup and _applies(case, fault):
                yield case, fault


def _applies(case: Case, fault: Fault) -> bool:
    """Return whether the fault applies on every rank, since all inject it together."""
    if case.entry.kind not in fault.kinds:
        return False
    return not case.engine.worker.ranks.any(not fault.applies(case))


def _mutant(case: Case, fault: Fault, caught_by: str, named: Iterable[str]) -> Mutant:
    runner, culprit = case.runner, fault.culprit(case)
    numbers = numbers_of(kind_of(runner), culprit, case.entry.kind, fault.name)
    return Mutant(runner.spec.name, culprit, fault.name, numbers, caught_by, tuple(named))


def _first_failure(
    examination: Examination, checks: Sequence[str], ranks: Ranks
) -> tuple[str, list[str]]:
    """Return the first check that fails and the tensors that it names. It may have failed on
    another rank, and name none here."""
    try:
        for cell in examine(examination, checks):
            if ranks.any(bool(cell.violations)):
                return cell.check, list(dict.fromkeys(v.tensor or v.size for v in cell.violations))
    except SlotzeroError as error:
        return "S0", _named_by(error)
    return "", []


def _require_clean(examination: Examination) -> None:
    """Run every check, whichever are scored, and raise if one fails. This also records every size
    that they replay."""
    for cell in examine(examination, CHECK_FUNCTIONS):
        for violation in cell.violations:
            raise ContractError(
                f"a check fails without any fault; run slotzero certify first: {violation}"
            )


def _put_back(registry: Registry, scenario: Scenario) -> None:
    for name, tensor in scenario.tables.items():
        registry[name].copy_(tensor)
