"""Certification: every check over every size, one scene a size."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from slotzero.errors import ContractError
from slotzero.graph import GraphKey, Kind, Registry, Runner
from slotzero.sanitizer.checks import CHECK_FUNCTIONS, Bounds, Examination, checksum
from slotzero.sanitizer.report import Cell, Certificate, Violation
from slotzero.sanitizer.scene import Scene, Trial

MakeScene = Callable[[Runner, GraphKey], AbstractContextManager[Scene]]
Seen = Callable[[Cell], None]
_NAMED = re.compile(r"tensor '([^']+)'")


def certify(
    certificate: Certificate,
    plan: Iterable[tuple[Runner, GraphKey]],
    make_scene: MakeScene,
    bounds: Bounds,
    seen: Seen = lambda cell: None,
    checks: Sequence[str] = tuple(CHECK_FUNCTIONS),
) -> Certificate:
    """Fills the certificate, cell by cell."""
    start = time.perf_counter()
    constants: Mapping[str, int] | None = None
    with torch.inference_mode():
        for runner, key in plan:
            if constants is None:
                constants = checksums(runner.registry)
            runner.prepare(key)
            for cell in _size(runner, key, make_scene, bounds, constants, checks):
                certificate.cells.append(cell)
                seen(cell)
    certificate.seconds += time.perf_counter() - start
    return certificate


def _size(
    runner: Runner,
    key: GraphKey,
    make_scene: MakeScene,
    bounds: Bounds,
    constants: Mapping[str, int],
    checks: Sequence[str],
) -> Iterator[Cell]:
    start = time.perf_counter()
    try:
        with make_scene(runner, key) as scene:
            yield from examine(Examination(Trial(runner, scene), bounds, constants), checks)
    except ContractError as error:  # the scene could not be set
        seconds = time.perf_counter() - start
        yield Cell(key.runner, str(key), "S0", seconds, (_raised(error, "S0", key),))


def examine(examination: Examination, checks: Iterable[str]) -> Iterator[Cell]:
    key = examination.trial.scene.key
    for check in checks:
        start = time.perf_counter()
        try:
            violations = tuple(CHECK_FUNCTIONS[check](examination))
        except ContractError as error:
            violations = (_raised(error, check, key),)
        yield Cell(key.runner, str(key), check, time.perf_counter() - start, violations)


def _raised(error: ContractError, check: str, key: GraphKey) -> Violation:
    named = _NAMED.search(str(error))
    return Violation(check, key.runner, str(key), named[1] if named else "", str(error))


def checksums(registry: Registry) -> dict[str, int]:
    return {e.name: checksum(e.tensor) for e in registry.entries() if e.kind is Kind.CONSTANT}


def all_sizes(runners: Iterable[Runner]) -> Iterator[tuple[Runner, GraphKey]]:
    """Every recorded size. A runner that is not recorded runs the same code at every size: its
    smallest, a middle one and its largest stand for all."""
    for runner in runners:
        keys = list(runner.all_keys())
        if not runner.is_recorded:
            keys = [keys[i] for i in sorted({0, len(keys) // 2, len(keys) - 1})]
        yield from ((runner, key) for key in reversed(keys))
