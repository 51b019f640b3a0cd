"""An engine that returns the logits of every token of a prompt.

Prompts go through the engine's own prefill. Logits are computed a few positions at a time, since
those of a whole prompt may need gigabytes.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slotzero.certify.start import start_engine
from slotzero.config import EngineConfig
from slotzero.engine.hidden_states import HiddenStates
from slotzero.kernels.types import Normed
from slotzero.runners.passes import LOGITS

MOST_ROWS = 32  # positions whose logits are in memory at once


class Scorer:
    def __init__(self, config: EngineConfig) -> None:
        self.engine = start_engine(config)
        self._states = HiddenStates(self.engine, (self.engine.worker.model.num_layers,))

    def logits(self, prompt: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits [positions, vocab] that follow each token of the prompt but the last, in
        chunks."""
        (states,) = self._states.collect([prompt])
        for part in torch.split(states[:-1], MOST_ROWS):
            yield self._logits(part)

    def _logits(self, states: Tensor) -> Tensor:
        worker = self.engine.worker
        kept = worker.registry[LOGITS]
        states = states.to(kept.device)
        out = kept.new_empty(len(states), worker.vocab_size)
        slots = torch.ones(len(states), dtype=torch.int32, device=kept.device)  # any but slot 0
        worker.decoder.logits(Normed(states), slots, out)
        return out
