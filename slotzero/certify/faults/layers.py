"""Faults of layers: padding that is computed with, and a drafter that stands one token on.

They are in the step function, replayed or eager.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, swapped
from slotzero.certify.faults.device import OUTPUT, TABLE, recorded, replaced
from slotzero.certify.padding import PADDED_ROWS, PaddingPieces
from slotzero.certify.scenario import Trial, kind_of
from slotzero.graph import GraphKey, Pieces, TensorKind
from slotzero.models.layer import LayerStep
from slotzero.speculative.assistant import AssistantDrafter
from slotzero.speculative.passes import DRAFT, EXTEND


@dataclass(frozen=True)
class RoutedPadding(Fault):
    """Experts treat padded rows as real ones."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        function = case.runner.spec.function

        def damaged(key: GraphKey, pieces: Pieces) -> None:
            function(key, _Unpadded(pieces))

        with replaced(case.runner, case.scenario.key, damaged):
            yield


class _Unpadded(Pieces):
    """Gives layers a slot for every row; only experts read it there."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        step, *rest = arguments
        assert isinstance(step, LayerStep) and step.moe is not None
        moe = step.moe._replace(slots=step.moe.slots.clamp_min(1))
        return self._pieces(function, step._replace(moe=moe), *rest)


@dataclass(frozen=True)
class ReducedPadding(Fault):
    """A layer ends with a reduction over all rows, as a scale of a whole tensor needs one. It is
    right as long as padding is finite, which kernels that skip padded rows do not promise."""

    def culprit(self, case: Case) -> str:
        return PADDED_ROWS

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        function, num_rows = case.runner.spec.function, case.scenario.num_rows
        num_tokens = Trial(case.runner, case.scenario).num_tokens(
            case.scenario.published, range(num_rows)
        )

        def damaged(key: GraphKey, pieces: Pieces) -> None:
            function(key, PaddingPieces(pieces, key, num_rows, num_tokens, _reduce))

        with replaced(case.runner, case.scenario.key, damaged):
            yield


def _reduce(rows: Tensor, num_real: int) -> None:
    rows.add_(rows[num_real:].sum() * 0)


def _has_padded_layers(case: Case) -> bool:
    """Return whether layers of the target run over padding; one tensor stands for it."""
    is_first = case.entry.name == case.runner.spec.published[0]
    return is_first and case.is_padded and kind_of(case.runner) not in (EXTEND, DRAFT)


@dataclass(frozen=True)
class AdvancedPosition(Fault):
    """A drafter that reads the target's KV advances as if its drafts were stored there."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        drafter, runner, key = case.engine.worker.drafter, case.runner, case.scenario.key
        assert isinstance(drafter, AssistantDrafter)
        right = drafter.stand
        with (
            swapped(drafter, "stand", lambda slots: right(slots) + 1),
            recorded(runner, key, partial(runner.spec.function, key)),
        ):
            yield


def _is_stood_in(case: Case) -> bool:
    stands = isinstance(case.engine.worker.drafter, AssistantDrafter)
    return stands and bool(case.entry.through) and kind_of(case.runner) == DRAFT


LAYERS: tuple[Fault, ...] = (
    RoutedPadding(
        "expert routing that counts padded rows", OUTPUT, lambda case: case.entry.per == "step"
    ),
    ReducedPadding("padding enters a reduction", (TensorKind.PUBLISHED,), _has_padded_layers),
    AdvancedPosition("frozen-KV position advanced by one", TABLE, _is_stood_in),
)
