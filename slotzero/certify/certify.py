"""Certification: every check at every size, with one scenario per size."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from slotzero.certify.checks import CHECK_FUNCTIONS, Bounds, Examination
from slotzero.certify.checksum import checksum
from slotzero.certify.report import Cell, Certificate, Violation
from slotzero.certify.scenario import Scenario, Trial
from slotzero.errors import ContractError, RequestError
from slotzero.graph import GraphKey, Registry, Runner, TensorKind

Plan = Sequence[tuple[Runner, GraphKey]]
MakeScenario = Callable[[Runner, GraphKey], AbstractContextManager[Scenario]]
Seen = Callable[[Cell], None]
NOTHING: Mapping[tuple[GraphKey, str], str] = {}


def certify(
    certificate: Certificate,
    plan: Iterable[tuple[Runner, GraphKey]],
    make_scenario: MakeScenario,
    bounds: Bounds,
    seen: Seen = lambda cell: None,
    checks: Sequence[str] = tuple(CHECK_FUNCTIONS),
    skipped: Mapping[tuple[GraphKey, str], str] = NOTHING,
) -> Certificate:
    """Fill in the certificate cell by cell. `skipped`: by size and check, why it is not run."""
    start = time.perf_counter()
    constants: Mapping[str, int] | None = None
    with torch.inference_mode():
        for runner, key in plan:
            if constants is None:
                constants = checksums(runner.registry)
            runner.prepare(key)
            planned = [check for check in checks if (key, check) not in skipped]
            try:
                for cell in _size(runner, key, make_scenario, bounds, constants, planned):
                    certificate.cells.append(cell)
                    seen(cell)
            except RequestError as error:  # the context is too short for this many tokens per row
                certificate.uncertified[str(key)] = f"no scenario could be set up: {error}"
    certificate.cells += [
        Cell(key.runner, str(key), check, 0.0, left_out=why)
        for (key, check), why in skipped.items()
    ]
    certificate.seconds += time.perf_counter() - start
    return certificate


def _size(
    runner: Runner,
    key: GraphKey,
    make_scenario: MakeScenario,
    bounds: Bounds,
    constants: Mapping[str, int],
    checks: Sequence[str],
) -> Iterator[Cell]:
    start = time.perf_counter()
    try:
        with make_scenario(runner, key) as scenario:
            yield from examine(Examination(Trial(runner, scenario), bounds, constants), checks)
    except ContractError as error:  # the scenario could not be set up
        seconds = time.perf_counter() - start
        yield Cell(key.runner, str(key), "S0", seconds, (_raised(error, "S0", key),))


def examine(examination: Examination, checks: Iterable[str]) -> Iterator[Cell]:
    key = examination.trial.scenario.key
    for check in checks:
        start = time.perf_counter()
        try:
            violations = tuple(CHECK_FUNCTIONS[check](examination))
        except ContractError as error:
            violations = (_raised(error, check, key),)
        yield Cell(key.runner, str(key), check, time.perf_counter() - start, violations)


def _raised(error: ContractError, check: str, key: GraphKey) -> Violation:
    return Violation(check, key.runner, str(key), error.tensor or "", str(error))


def checksums(registry: Registry) -> dict[str, int]:
    return {e.name: checksum(e.tensor) for e in registry.entries() if e.kind is TensorKind.CONSTANT}


def all_sizes(runners: Iterable[Runner]) -> Iterator[tuple[Runner, GraphKey]]:
    """Yield every recorded size. A runner that is not recorded runs the same code at every size, so
    its smallest, a middle and its largest size represent all."""
    for runner in runners:
        keys = list(runner.all_keys())
        if not runner.is_recorded:
            keys = [keys[i] for i in sorted({0, len(keys) // 2, len(keys) - 1})]
        yield from ((runner, key) for key in reversed(keys))


def few_sizes(runners: Iterable[Runner]) -> Iterator[tuple[Runner, GraphKey]]:
    """Yield the smallest and largest size of runners with a fixed row width. For the other runners,
    yield the smallest size with two tokens: with one token, a row's count equals the step's."""
    for runner in runners:
        keys = list(runner.all_keys())
        smallest = keys[-1]
        if runner.spec.rows is not None:
            smallest = next((key for key in reversed(keys) if key.tokens > 1), smallest)
        ends = (smallest,) if runner.spec.rows is not None else (smallest, keys[0])
        yield from ((runner, key) for key in dict.fromkeys(ends))


def few_checks(plan: Plan) -> dict[tuple[GraphKey, str], str]:
    """Return the checks that --quick skips: S5 inspects code, which is the same at every size, and
    is slow."""
    first = {runner.spec.name: key for runner, key in reversed(plan)}
    return {
        (key, "S5"): f"--quick runs it only at {first[key.runner]}"
        for _, key in plan
        if key != first[key.runner]
    }


def left_out(runners: Iterable[Runner], plan: Plan, is_quick: bool) -> dict[str, str]:
    """Return, for each runner with sizes that are not planned, how many are and why not all."""
    why = "--quick" if is_quick else "this runner is not recorded, every size runs the same code"
    planned = Counter(runner.spec.name for runner, _ in plan)
    totals = {runner.spec.name: len(list(runner.all_keys())) for runner in runners}
    return {
        name: f"{planned[name]} of {total} sizes checked: {why}"
        for name, total in totals.items()
        if planned[name] < total
    }
