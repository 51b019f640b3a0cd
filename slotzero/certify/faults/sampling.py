"""Faults of sampling: a row is sampled with what belongs to another row of the step.

The kernel itself is wrong, replayed or eager; only other rows, or another order of rows, show it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, swapped
from slotzero.certify.faults.device import OUTPUT, recorded
from slotzero.runners.passes import SAMPLED
from slotzero.sampling.tables import Sampled, SamplingTables
from slotzero.speculative.passes import VERIFIED_LOGPROBS

Sampling = tuple[Tensor, SamplingTables]  # the slot of each row, and what it is sampled with


@dataclass(frozen=True)
class WrongSampling(Fault):
    wrong: Callable[[Case, Tensor, SamplingTables], Sampling] = lambda case, slots, tables: (
        slots,
        tables,
    )

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        kernels, runner, key = case.engine.worker.kernels, case.runner, case.scenario.key
        right = kernels.sample

        def sample(
            logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, out: Sampled
        ) -> None:
            used, tables = self.wrong(case, slots, tables)
            right(logits, used, positions, tables, out)

        with (
            swapped(kernels, "sample", sample),
            recorded(runner, key, partial(runner.spec.function, key)),
        ):
            yield


def _of_next_row(case: Case, slots: Tensor, tables: SamplingTables) -> Sampling:
    """Use the slot of the next row, and for the last one that of the first."""
    after = slots.roll(-case.runner.spec.width)
    other = torch.where(after > 0, after, slots[:1])
    return torch.where((slots > 0) & (other > 0), other, slots), tables


def _masks_by_row(case: Case, slots: Tensor, tables: SamplingTables) -> Sampling:
    """Lay out the masks as if row r of the step were slot r."""
    row = torch.arange(len(slots), device=slots.device) // case.runner.spec.width
    place, row = slots.long(), row % len(tables.is_masked)
    moved = {
        name: table.index_put((place,), table[row])
        for name, table in (("is_masked", tables.is_masked), ("allowed", tables.allowed))
    }
    return slots, tables._replace(**moved)


def _is_chosen(case: Case) -> bool:
    """Return whether the tensor shows how rows were sampled. Where drafts are verified, a bias
    decides the tokens, and their log probabilities show the rest."""
    return case.entry.name in (SAMPLED, VERIFIED_LOGPROBS) and case.scenario.num_rows > 1


def _masks_move(case: Case) -> bool:
    """Return whether a row would get the mask of a slot whose mask differs."""
    masks = case.scenario.tables["is_masked"]
    own = [bool(masks[slot]) for slot in case.plain.slots]
    by_row = [bool(masks[row]) for row in range(len(own))]
    return case.entry.name == SAMPLED and own != by_row


SAMPLING: tuple[Fault, ...] = (
    WrongSampling("sampling state of a neighbour", OUTPUT, _is_chosen, _of_next_row),
    WrongSampling("grammar masks laid out by rows", OUTPUT, _masks_move, _masks_by_row),
)
