"""Certify your own model: a toy passes, then breaks a rule, and the error names the tensor.

    python examples/certify_your_own.py

The model is one counter per slot. A step adds a learned gain to the counters of the slots that run,
and returns their previous values. The model has one tensor of each kind.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slotzero.certify.certify import all_sizes, certify
from slotzero.certify.checks import Bounds
from slotzero.certify.report import Certificate
from slotzero.certify.scenario import Scenario, memory_of
from slotzero.graph import GraphKey, Ladder, Pieces, Registry, Runner, RunnerSpec
from slotzero.graph.backend import EagerBackend

SLOTS, ROWS = 12, 8


class Counters:
    def __init__(self, pad: int = 0) -> None:
        self.registry = registry = Registry(torch.device("cpu"))
        self.counts = registry.table("counts", torch.zeros(SLOTS + 1))
        self.slots = registry.published(
            "slots", ROWS, pad=pad, reason="slot 0 has no owner: what is added to it is dropped"
        )
        self.is_real = registry.derived("is_real", (ROWS,), torch.float32)
        self.before = registry.output("before", (ROWS,), torch.float32)
        self.gain = registry.constant("gain", torch.tensor([1.5]))
        writes = ("is_real", "before")
        spec = RunnerSpec("count", Ladder((1, 2, 4, 8)), None, ("slots",), self.step, writes)
        self.runner = Runner(spec, registry, EagerBackend())

    def step(self, key: GraphKey, pieces: Pieces) -> None:
        """Compute all derived tensors from the published slots and the tables."""
        slots, is_real = self.slots[: key.rows], self.is_real[: key.rows]
        is_real.copy_(slots > 0)
        before = self.counts[slots]
        self.before[: key.rows].copy_(before * is_real)
        after = pieces(torch.addcmul, before, self.gain, is_real)
        self.counts.index_put_((slots,), after)

    @contextmanager
    def scenario(self, runner: Runner, key: GraphKey) -> Iterator[Scenario]:
        """Set up a step with the fewest rows that use this capture size, while other slots idle."""
        rows = key.rows // 2 + 1
        self.counts[1:] = torch.arange(1, SLOTS + 1) / 4
        running = list(range(2, 2 + rows))
        yield Scenario(
            key=key,
            published={"slots": running},
            larger_step={"slots": list(range(SLOTS - ROWS + 1, SLOTS + 1))},
            idle_slot=SLOTS,
            tables=memory_of(self.registry),
        )


def certificate_of(counters: Counters) -> Certificate:
    certificate = Certificate("counters", "eager")
    return certify(certificate, all_sizes([counters.runner]), counters.scenario, Bounds())


def main() -> None:
    for counters in (Counters(), Counters(pad=1)):  # slot 1 may belong to a request
        certificate = certificate_of(counters)
        print("certified" if certificate.passed else "broken")
        for violation in certificate.violations:
            print(f"  {violation}")
    counters = Counters()
    counters.runner.prepare(GraphKey("count", 2, 2))
    counters.registry.begin_step()
    try:
        counters.runner.run(GraphKey("count", 2, 2), 2)  # the slots were not published
    except Exception as error:
        print(error)


if __name__ == "__main__":
    main()
