"""What a check found: a violation names the tensor, the place and the rule that was broken."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

RULES = {
    "S0": "at every replay: published in this step, never replaced, run as planned",
    "S1": "memory that belongs to nobody must not reach a real row",
    "S2": "a replay equals the same function run eagerly, padded or not",
    "S3": "a row's result does not depend on size, order, neighbours or history",
    "S4": "a step changes what its own slots own, and nothing else",
    "S5": "a recording reads registered memory only, and bakes in no value of the host",
    "S6": "no two registered tensors, and no graph's memory, overlap",
}
CHECKS = tuple(RULES)
LIVE_RULES = {
    "S8": "an answer is what its tokens alone lead to, without cache, drafts or neighbours",
    "S9": "every slot and page has the owners that the engine counts",
}
"""Of checks that need traffic: S7 is whether faults are caught, see mutants.py."""
ORDER = ("S6", "S0", "S2", "S4", "S1", "S3", "S5")
"""In which violations are told: what needs no replay first, and the check that names what went in
before those that see what came out of it. A wrong position shows in KV too."""


@dataclass(frozen=True)
class Violation:
    check: str
    runner: str
    size: str
    tensor: str
    found: str
    """The first differing value, what it should have been, and which trial showed it."""
    row: int | None = None

    def __str__(self) -> str:
        where = f"tensor {self.tensor!r}" if self.tensor else "engine"
        if self.row is not None:
            where += f", row {self.row}"
        return f"{self.size}: {self.check}: {where}: {self.found} ({self.rule})"

    @property
    def rule(self) -> str:
        return (RULES | LIVE_RULES)[self.check]


@dataclass(frozen=True)
class Cell:
    """One check of one size."""

    runner: str
    size: str
    check: str
    seconds: float
    violations: tuple[Violation, ...] = ()
    left_out: str = ""
    """Why it was not tried, if it was not."""


@dataclass
class Certificate:
    model: str
    backend: str
    cells: list[Cell] = field(default_factory=list)
    seconds: float = 0.0
    uncertified: dict[str, str] = field(default_factory=dict)
    """Runners of which some sizes were left out, and which and why."""
    num_all_sizes: int = 0
    """How many sizes the runners have, tried or not."""

    @property
    def passed(self) -> bool:
        return bool(self.cells) and not any(cell.violations for cell in self.cells)

    @property
    def violations(self) -> Iterator[Violation]:
        sizes = self.sizes
        cells = sorted(self.cells, key=lambda c: (sizes.index(c.size), ORDER.index(c.check)))
        return (violation for cell in cells for violation in cell.violations)

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(cell.size for cell in self.cells))

    @property
    def runners(self) -> list[str]:
        return list(dict.fromkeys(cell.runner for cell in self.cells))

    @property
    def coverage(self) -> str:
        """How many sizes were tried, of how many there are."""
        return f"{len(self.sizes)} of {self.num_all_sizes} sizes"

    def cell(self, size: str, check: str) -> Cell | None:
        return next((c for c in self.cells if (c.size, c.check) == (size, check)), None)

    def as_json(self) -> dict[str, object]:
        return {
            "passed": self.passed,
            "model": self.model,
            "backend": self.backend,
            "runners": self.runners,
            "sizes": self.sizes,
            "num_all_sizes": self.num_all_sizes,
            "seconds": round(self.seconds, 3),
            "left_out": {**self.uncertified, **{f"{cell.size} {cell.check}": cell.left_out
                                                for cell in self.cells if cell.left_out}},
            "failures": [asdict(violation) | {"rule": violation.rule}
                         for violation in self.violations],
        }  # fmt: skip
