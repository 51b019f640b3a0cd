"""Hidden states of a target for whole sequences, the training data of a head.

The engine computes them as it will when the head is used. This module knows sequences, not heads or
training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slotzero.engine.engine import Engine
from slotzero.engine.hidden_states import HiddenStates
from slotzero.training.data import Answered
from slotzero.training.samples import Sample


class Collector:
    """Collect samples with an engine that meets the rule of HiddenStates."""

    def __init__(self, engine: Engine, layers: Sequence[int]) -> None:
        model = engine.worker.model
        self._states = HiddenStates(engine, (*layers, model.num_layers))
        self._size = model.hidden_size * len(layers)

    def collect(self, sequences: Sequence[Answered], show_progress: bool = True) -> list[Sample]:
        states = self._states.collect([one.tokens for one in sequences], show_progress)
        return [self._sample(*pair) for pair in zip(states, sequences, strict=True)]

    def _sample(self, states: Tensor, sequence: Answered) -> Sample:
        tokens = torch.tensor(sequence.tokens, device=states.device)
        size = self._size
        return Sample(tokens, states[:, :size], states[:, size:], sequence.first)
