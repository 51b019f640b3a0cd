"""The interface of observers, which attach themselves to a runner and wrap its replays."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotzero.graph.runner import GraphKey, Runner


class Observer(ABC):
    @abstractmethod
    def replay(self, runner: "Runner", key: "GraphKey", num_tokens: int) -> None:
        """Called in place of `runner.replay(key)`. Afterwards memory must be as after one replay;
        it may raise to withhold the step's results."""
