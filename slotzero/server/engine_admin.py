"""Actions of administrators in the engine's process: pausing, and replacing weights.

This module knows the engine and the tensors that wait for an update, not HTTP. The rules: actions
run one after another, between two steps; each gets one reply; and an update that fails after its
check has left a mixture of two models, so the process ends.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slotzero.checkpoint.pickled import tensors_of_file, tensors_of_pickle
from slotzero.distributed.update_group import Announced, UpdateGroup
from slotzero.errors import InvalidInputError, SlotzeroError
from slotzero.executor.step_watch import ACTION_LIMIT
from slotzero.server.messages import (
    AbortAll,
    Action,
    AdminReply,
    AdminRequest,
    CheckWeights,
    DropStaged,
    JoinGroup,
    LeaveGroup,
    LongAction,
    Pause,
    ResetPrefixCache,
    Resume,
    RunningAction,
    Sleep,
    StageBroadcast,
    StagePickled,
    UpdateWeights,
    WakeUp,
)

if TYPE_CHECKING:
    from torch import Tensor

    from slotzero.checkpoint.named_tensors import NamedTensors
    from slotzero.engine.engine import Engine

_log = logging.getLogger("slotzero.server")


class EngineAdmin:
    def __init__(
        self,
        engine: "Engine",
        reply: Callable[[AdminReply], None],
        abort: Callable[[], None],
        report: Callable[[], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`abort` ends all requests; `report` sends those that have ended; `later` calls a function
        between two steps, from any thread."""
        self._engine, self._reply, self._abort, self._report = engine, reply, abort, report
        self._later = later
        self._waiting: deque[AdminRequest] = deque()
        self._is_busy = False  # with a long action
        self._groups: dict[str, UpdateGroup] = {}
        self._staged: dict[str, Tensor] = {}
        self.is_paused = False
        self.asleep: set[str] = set()
        """The memory that was given back: weights, kv_cache."""
        self.bytes_given_back = 0
        self._lacks_weights = False
        self.is_broken = False
        """Whether the weights may be a mixture of two models."""

    @property
    def lets_run(self) -> bool:
        """Whether steps may run."""
        return not (self.is_paused or self.asleep or self._lacks_weights)

    def take(self, request: AdminRequest) -> None:
        if isinstance(request.action, AbortAll):  # also ends the wait for running requests
            self._perform(request)
        else:
            self._waiting.append(request)

    def turn(self) -> None:
        """Perform the actions that need not wait for running requests."""
        while self._waiting and not self._must_wait(self._waiting[0].action):
            self._engine.schedulers.allow_admission(True)
            request = self._waiting.popleft()
            if isinstance(request.action, LongAction):
                self._is_busy = True
                threading.Thread(target=self._run_long, args=(request,), daemon=True).start()
            else:
                self._perform(request)

    def _must_wait(self, action: Action) -> bool:
        """Return whether a long action has not ended, or running requests are to end first; then
        let them run, but no others."""
        if self._is_busy:
            return True
        if not isinstance(action, Pause | Sleep | UpdateWeights) or action.running != "finish":
            return False
        if not self.lets_run or not self._engine.schedulers.num_running:
            return False
        self._engine.schedulers.allow_admission(False)
        return True

    def _run_long(self, request: AdminRequest) -> None:
        """Do the part of a long action that waits for a trainer, in a thread."""
        try:
            keep = self._wait_for_trainer(request.action)
        except Exception as error:
            keep = partial(_raise, error)
        self._later(partial(self._end_long, request, keep))

    def _end_long(self, request: AdminRequest, keep: Callable[[], None]) -> None:
        self._is_busy = False
        self._answer(request, keep)

    def _wait_for_trainer(self, action: Action) -> Callable[[], None]:
        """Return what keeps the outcome, between two steps."""
        if isinstance(action, JoinGroup):
            address, device = (action.host, action.port), self._engine.worker.registry.device
            made = UpdateGroup(action.group, address, action.rank, action.size, device)
            return partial(self._groups.__setitem__, action.group, made)
        assert isinstance(action, StageBroadcast)
        group = self._groups.get(action.group)
        if group is None:
            raise InvalidInputError(f"there is no group {action.group!r}: make it first")
        announced = [Announced(*one) for one in action.tensors]
        return partial(self._stage, list(group.receive(announced, action.chunk_bytes)))

    def _perform(self, request: AdminRequest) -> None:
        def perform() -> None:
            try:
                self._run(request.action)
            finally:
                self._report()

        self._answer(request, perform)

    def _answer(self, request: AdminRequest, work: Callable[[], None]) -> None:
        what = f"the action {type(request.action).__name__}"
        try:
            with self._engine.worker.watch.doing(what, at_least=ACTION_LIMIT):
                work()
        except Exception as error:
            name = type(error).__name__
            if isinstance(error, InvalidInputError):
                name = InvalidInputError.__name__  # whatever it is about, the caller can correct it
            else:
                self.is_broken |= isinstance(request.action, UpdateWeights)
                if not isinstance(error, SlotzeroError):
                    _log.exception("an action of an administrator failed")
            self._reply(AdminReply(request.id, name, str(error) or name))
        else:
            self._reply(AdminReply(request.id))

    def _run(self, action: Action) -> None:
        match action:
            case ResetPrefixCache():
                self._engine.reset_prefix_cache()
            case Pause(running):
                self.is_paused = True
                if running == "abort":
                    self._abort()
            case Resume():
                self.is_paused = False
            case AbortAll():
                self._abort()
            case CheckWeights(path, is_partial):
                is_partial &= not self._lacks_weights
                self._engine.check_weights(self._weights(path), is_partial)
            case UpdateWeights():
                self._update(action)
            case StagePickled(data):
                self._stage(tensors_of_pickle(data))
            case Sleep(level, running):
                self._sleep(level, running)
            case WakeUp(tags):
                self.asleep.difference_update(tags)
                self.bytes_given_back *= bool(self.asleep)
            case LeaveGroup(group):
                self._groups.pop(group, None)
            case DropStaged():
                self._staged = {}

    def _sleep(self, level: int, running: RunningAction) -> None:
        if self.asleep:
            raise InvalidInputError(
                f"{' and '.join(sorted(self.asleep))} sleep already: wake them up first"
            )
        self._engine.worker.check_giving_back(weights=level == 2)
        if running == "abort":
            self._abort()
        self.bytes_given_back = self._engine.give_back_memory(weights=level == 2)
        self.asleep = {"weights", "kv_cache"}
        self._lacks_weights |= level == 2

    def _update(self, action: UpdateWeights) -> None:
        if "weights" in self.asleep:
            raise InvalidInputError("the weights sleep: wake them up first")
        running = action.running
        if running == "finish":
            if self._engine.schedulers.num_running:
                raise InvalidInputError(
                    "generation is paused with requests that have begun: resume it to let them "
                    "finish, or hold or abort them"
                )
            running = "hold"  # none is left
        self._engine.update_weights(
            self._weights(action.path),
            running=running,
            partial=action.is_partial and not self._lacks_weights,
            version=action.version,
        )
        self._staged, self._lacks_weights = {}, False

    def _weights(self, path: str | None) -> "NamedTensors | str":
        """Return the tensors that were staged, those of a .safetensors file, or a folder."""
        if path is None:
            if not self._staged:
                raise InvalidInputError("no tensors were sent for this update: send some first")
            return self._staged
        if Path(path).is_file() and path.endswith(".safetensors"):
            return tensors_of_file(path)
        if not Path(path).is_dir():
            raise InvalidInputError(
                f"{path}: there is no such folder, nor .safetensors file, on the server's machine"
            )
        return path

    def _stage(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        for name, tensor in tensors:
            if name in self._staged:
                raise InvalidInputError(f"tensor {name} is given twice for one update")
            self._staged[name] = tensor


def _raise(error: Exception) -> None:
    raise error
