"""Who may watch replays. Nothing here watches: whoever does attaches itself to a runner."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slotzero.graph.runner import GraphKey, Runner


class Observer(ABC):
    @abstractmethod
    def replay(self, runner: "Runner", key: "GraphKey", num_tokens: int) -> None:
        """Called in place of `runner.replay(key)`. Afterwards memory is as after one replay; it may
        raise to keep the step's results from everyone."""
