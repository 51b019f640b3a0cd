"""Results of checks: a violation names the tensor, the place and the rule that was violated."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

RULES = {
    "S0": "every replay uses values published in this step and tensors that were never replaced",
    "S1": "unowned memory must not affect a real row",
    "S2": "a replay equals the same function run eagerly, padded or not",
    "S3": "a row's result does not depend on size, order, neighbours or history",
    "S4": "a step changes only what its own requests own",
    "S5": "a recording reads only registered memory and bakes in no host value",
    "S6": "registered tensors and graph memory do not overlap",
}
CHECKS = tuple(RULES)
ENGINE = "engine"
"""The runner of violations and faults that are in no single runner."""
LIVE_RULES = {
    "S8": "an answer equals the one recomputed from its tokens without cache, drafts or neighbours",
    "S9": "every slot and page has exactly the owners that the engine counts",
    "S10": "a request has the same tokens, log probabilities and vector alone and in any batch",
    "S11": "what is copied belongs to its step, however late the device is",
}
"""Rules of the checks that belong to no size. S7 is whether faults are caught, see mutants.py."""
ORDER = ("S6", "S0", "S2", "S4", "S1", "S3", "S5")
"""Order in which violations are reported: first the checks that need no replay, then a check that
names an input before those that see its effects. A wrong position, for example, changes the KV
cache too."""


@dataclass(frozen=True)
class Violation:
    check: str
    runner: str
    size: str
    tensor: str
    found: str
    """The first value that differs, the expected value, and the trial that showed it."""
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
    """The result of one check at one size."""

    runner: str
    size: str
    check: str
    seconds: float
    violations: tuple[Violation, ...] = ()
    left_out: str = ""
    """Why the check was not run, if it was not."""


@dataclass
class Certificate:
    model: str
    backend: str
    cells: list[Cell] = field(default_factory=list)
    seconds: float = 0.0
    uncertified: dict[str, str] = field(default_factory=dict)
    """Runners of which some sizes were left out, with the reason."""
    num_all_sizes: int = 0
    """Number of sizes of all runners, checked or not."""
    batch_invariance: Cell | None = None
    """The result of S10, which belongs to no size; None: it was not run."""
    copies: Cell | None = None
    """The result of S11, which belongs to no size; None: it was not run."""

    @property
    def passed(self) -> bool:
        return bool(self.cells) and not any(self.violations)

    @property
    def violations(self) -> Iterator[Violation]:
        sizes = self.sizes
        cells = sorted(self.cells, key=lambda c: (sizes.index(c.size), ORDER.index(c.check)))
        cells += [cell for cell in (self.batch_invariance, self.copies) if cell is not None]
        return (violation for cell in cells for violation in cell.violations)

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(cell.size for cell in self.cells))

    @property
    def runners(self) -> list[str]:
        return list(dict.fromkeys(cell.runner for cell in self.cells))

    @property
    def coverage(self) -> str:
        """Number of sizes that were checked, of how many."""
        return f"{len(self.sizes)} of {self.num_all_sizes} sizes"

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "NOT passed"
        head = f"{self.model} on {self.backend}: {verdict}, {self.coverage} in {self.seconds:.1f} s"
        left_out = (
            f"{c.size}: {c.check} was not run: {c.left_out}" for c in self.cells if c.left_out
        )
        return "\n  ".join([head, *map(str, self.violations), *left_out])

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
            "batch invariance": _outcome(self.batch_invariance),
            "copies with a late device": _outcome(self.copies),
            "failures": [asdict(violation) | {"rule": violation.rule}
                         for violation in self.violations],
        }  # fmt: skip


def _outcome(cell: Cell | None) -> bool | None:
    return None if cell is None else not cell.violations
