"""Runs of a captured step, each from the same memory.

A trial stages batches with the engine's own code, over memory that is as it was found, or filled
with hostile values. It does not judge results. The rule: afterwards all memory is as before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from slotzero.certify.captured_step import (
    CapturedStep,
    Declared,
    Input,
    Output,
    Request,
    State,
    Workspace,
)
from slotzero.errors import ContractError
from slotzero.graph.backend import Backend, Pieces, Recording, StepFunction, TraceLine, backend_for

Run = Callable[[int], object]


@dataclass(frozen=True)
class CapturedOutcome:
    size: int
    rows: tuple[int, ...]
    """Which request each row was."""
    before: Mapping[str, Tensor]
    """Inputs and state when the function began."""
    after: Mapping[str, Tensor]


class Replays(Generic[Request]):
    """Replays of each size: of what the engine captured, or of what is captured here."""

    def __init__(self, step: CapturedStep[Request]) -> None:
        self._step = step
        self._recordings: dict[int, Recording] = {}
        self.backend: Backend | None = None
        """Where sizes are captured; None if the engine has captured them itself."""
        if step.replay is None:
            name = "cuda" if step.device.type == "cuda" else "cpu"
            self.backend = backend_for(name, step.device)

    @property
    def name(self) -> str:
        if self.backend is not None:
            return self.backend.name
        return "CUDA graphs" if isinstance(self._step.replay, Mapping) else "own replay"

    def prepare(self, size: int) -> None:
        if self.backend is not None and size not in self._recordings:
            self._recordings[size] = self.backend.record(self._function(size))

    def replay(self, size: int) -> None:
        given = self._step.replay
        if given is None:
            self._recordings[size].replay()
        elif isinstance(given, Mapping):
            given[size].replay()
        else:
            given(size)

    def transcript(self, size: int) -> list[TraceLine]:
        """Return what a capture of this size contains. An engine's own CUDA graphs can be read if
        they were captured with keep_graph=True, and callables not at all."""
        if self.backend is not None:
            return self.backend.transcript(self._function(size))
        if isinstance(self._step.replay, Mapping):
            from slotzero.graph.cuda import lines_of

            return lines_of(self._step.replay[size])
        return []

    def memory(self) -> list[tuple[int, int]]:
        """Return the memory of captures besides declared tensors, as [start, end) addresses."""
        if self.backend is not None:
            return self.backend.memory()
        if isinstance(self._step.replay, Mapping):
            from slotzero.graph.cuda import memory_of

            return memory_of(graph.pool() for graph in self._step.replay.values())
        return []

    def _function(self, size: int) -> StepFunction:
        def function(pieces: Pieces) -> None:
            self._step.step(size)

        return function


class CapturedTrial(Generic[Request]):
    def __init__(self, step: CapturedStep[Request], requests: Sequence[Request]) -> None:
        if len(requests) <= max(step.sizes):
            raise ContractError(
                f"captured step {step.name!r}: {len(requests)} requests are too few: one more than "
                f"its largest size, {max(step.sizes)}, so that one never runs"
            )
        self.step, self.requests = step, requests
        self.replays = Replays(step)
        self._changing: list[Declared] = step.of_kind(Input, State, Workspace, Output)
        self._memory = {one.name: one.tensor.clone() for one in self._changing}
        self._owned = {one.name: self._ownership(one) for one in step.of_kind(State)}
        self._hostile = self._poisons()

    def restore(self) -> None:
        for one in self._changing:
            one.tensor.copy_(self._memory[one.name])

    def rows(self, size: int) -> range:
        """Return the fewest rows that this size is replayed for."""
        smaller = [other for other in self.step.sizes if other < size]
        return range(max(smaller, default=0) + 1)

    def reads(self, state: State[Request], rows: Iterable[int]) -> Tensor:
        """Return [first axis] bool: what a batch of these rows reads."""
        return self._mask(state, rows, 0)

    def writes(self, state: State[Request], rows: Iterable[int]) -> Tensor:
        return self._mask(state, rows, 1)

    def replay(self, rows: Sequence[int], size: int, poison: Iterable[str] = ()) -> CapturedOutcome:
        run = self._prepared(size)
        self._load(rows, poison)
        return self._finish(run, rows, size)

    def eager(self, rows: Sequence[int], size: int) -> CapturedOutcome:
        self.restore()
        return self._finish(self.step.step, rows, size)

    def replay_after_larger_step(self, rows: Sequence[int], size: int) -> CapturedOutcome:
        """Replay with buffers as a full batch of other requests left them."""
        largest, num = max(self.step.sizes), len(self.requests)
        run, run_largest = self._prepared(size), self._prepared(largest)
        self.restore()
        self._finish(run_largest, range(num - largest, num), largest)
        for state in self.step.of_kind(State):
            state.tensor.copy_(self._memory[state.name])
        return self._finish(run, rows, size)

    def stage(self, rows: Sequence[int], size: int, poison: Iterable[str] = ()) -> None:
        """Stage a batch without running it."""
        self._load(rows, poison)
        self.step.stage([self.requests[row] for row in rows], size)

    def _prepared(self, size: int) -> Run:
        """Return the replay of a size. Capturing may run the step, so memory is loaded later."""
        self.replays.prepare(size)
        return self.replays.replay

    def _finish(self, run: Run, rows: Sequence[int], size: int) -> CapturedOutcome:
        self.step.stage([self.requests[row] for row in rows], size)
        kept = self.step.of_kind(Input, State)
        before = {one.name: one.tensor.clone() for one in kept}
        run(size)
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)  # the engine may use streams of its own
        after = {one.name: one.tensor.clone() for one in self._changing}
        return CapturedOutcome(size, tuple(rows), before, after)

    def _load(self, rows: Sequence[int], poison: Iterable[str]) -> None:
        self.restore()
        names = {*poison}
        for one in self._changing:
            if one.name in names:
                self._poison(one, rows)

    def _ownership(self, state: State[Request]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the indices that each request reads, and that it writes."""

        def indices(of: Callable[[Request], Iterable[int]]) -> list[Tensor]:
            return [torch.tensor([*of(r)], dtype=torch.long) for r in self.requests]

        reads, writes = indices(state.reads), indices(state.writes)
        for index in torch.cat([*reads, *writes]).tolist():
            if not 0 <= index < len(state.tensor):
                raise ContractError(
                    f"state {state.name!r}: a request owns index {index} of {len(state.tensor)}",
                    tensor=state.name,
                )
        return reads, writes

    def _mask(self, state: State[Request], rows: Iterable[int], which: int) -> Tensor:
        mask = torch.zeros(len(state.tensor), dtype=torch.bool)
        for row in rows:
            mask[self._owned[state.name][which][row]] = True
        return mask.to(state.tensor.device)

    def _poisons(self) -> dict[str, Tensor]:
        """Return what fills each tensor with hostile values: NaN, or for integers those of the
        request that never runs. They are in range, and wrong wherever they appear."""
        idle = len(self.requests) - 1
        shown = self.eager([idle], min(self.step.sizes)).after
        self.restore()
        poisons = {}
        for one in self._changing:
            entries = shown[one.name]
            if isinstance(one, State):
                held = self.reads(one, [idle])
                entries = entries[held] if held.any() else entries
            poison = entries[: one.width if isinstance(one, Input | Output) else 1].clone()
            if poison.is_floating_point():
                poison.fill_(torch.nan)
            if isinstance(one, State) and one.poison is not None:
                poison.fill_(one.poison)
            poisons[one.name] = poison
        return poisons

    def _poison(self, one: Declared, rows: Sequence[int]) -> None:
        poison = self._hostile[one.name]
        if isinstance(one, State):
            one.tensor[~self.reads(one, rows)] = poison
            return
        for start in range(0, len(one.tensor), len(poison)):
            part = one.tensor[start : start + len(poison)]
            part.copy_(poison[: len(part)])
