"""Observer that runs every captured step twice from one state, replayed and eagerly, and compares
all tensors."""

import torch

from slotzero.engine.engine import Engine
from slotzero.graph import GraphKey, Runner, TensorKind
from slotzero.graph.observer import Observer


class Shadow(Observer):
    """The observer; `differences[name]` is the largest difference seen in that tensor."""

    def __init__(self, engine: Engine) -> None:
        self.differences: dict[str, float] = {}
        self.num_compared = 0
        self._registry = engine.worker.registry
        for runner in engine.worker.runners:
            if runner.is_recorded:
                runner.observer = self

    def replay(self, runner: Runner, key: GraphKey, num_tokens: int) -> None:
        before = self._state()
        runner.replay(key)
        replayed = self._state()
        for name, tensor in before.items():
            self._registry[name].copy_(tensor)
        runner.eager(key)
        for name, eager in self._state().items():
            worst = (replayed[name].double() - eager.double()).abs().max().item()
            self.differences[name] = max(self.differences.get(name, 0.0), worst)
        self.num_compared += 1

    def _state(self) -> dict[str, torch.Tensor]:
        kinds = (TensorKind.TABLE, TensorKind.OUTPUT, TensorKind.DERIVED)
        entries = (e for e in self._registry.entries() if e.kind in kinds and e.tensor.numel())
        return {e.name: e.tensor.clone() for e in entries}
