"""Hidden states of a target for whole sequences, the training data of a head.

The engine computes them as it will when the head is used: a hook keeps the features of every
prefill. This module knows sequences, not heads or training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slotzero.engine.engine import Engine
from slotzero.errors import ContractError
from slotzero.graph import Pieces
from slotzero.kernels.types import Tokens
from slotzero.runners.passes import DrafterInputs
from slotzero.sampling.params import SamplingParams
from slotzero.step import Step
from slotzero.system.progress import prompts_bar
from slotzero.training.data import Answered
from slotzero.training.samples import Sample

_ONE = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)


class Collector:
    """Hook into every prefill of an engine that has recorded none yet and has no prefix cache,
    since cached tokens are not computed."""

    writes: tuple[str, ...] = ()

    def __init__(self, engine: Engine, layers: Sequence[int]) -> None:
        worker, limits = engine.worker, engine.limits
        if limits.enable_prefix_caching or worker.cycles:
            raise ContractError("collecting needs an engine without prefix cache and speculation")
        self.taps = (*layers, worker.model.num_layers)
        self._engine, self._hidden = engine, worker.model.hidden_size
        self._seen = worker.decoder.new_hidden(limits.max_num_batched_tokens, len(self.taps))
        self._parts: dict[str, list[Tensor]] = {}
        self._kept_on: torch.device | None = None  # set while collecting
        worker.passes.drafter = self
        self._run, worker.run = worker.run, self._run_and_keep  # type: ignore[method-assign]

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        self._seen[: len(inputs.features)].copy_(inputs.features)

    def defer(self, tokens: Tokens, features: Tensor) -> None:
        """Ignore decoded tokens."""

    def collect(self, sequences: Sequence[Answered], show_progress: bool = True) -> list[Sample]:
        engine = self._engine
        self._kept_on = self._where(sum(len(one.tokens) for one in sequences))
        with prompts_bar(show_progress, len(sequences)) as progress:
            for i, sequence in enumerate(sequences):
                engine.add(f"sequence-{i}", sequence.tokens, _ONE)
            while engine.has_work:
                grown = engine.step()
                progress(len(grown), sum(len(a.request.prompt_token_ids) for a in grown))
        self._kept_on = None
        return [self._sample(f"sequence-{i}", one) for i, one in enumerate(sequences)]

    def _where(self, num_tokens: int) -> torch.device:
        """Return where samples are kept: on the GPU if a quarter of its free memory stays free,
        else in main memory."""
        seen = self._seen
        needed = num_tokens * seen.shape[1] * seen.itemsize
        is_large = seen.is_cuda and needed > 0.75 * torch.cuda.mem_get_info(seen.device)[0]
        return torch.device("cpu") if is_large else seen.device

    def _sample(self, name: str, sequence: Answered) -> Sample:
        states = torch.cat(self._parts.pop(name))
        size = self._hidden * (len(self.taps) - 1)
        tokens = torch.tensor(sequence.tokens, device=states.device)
        return Sample(tokens, states[:, :size], states[:, size:], sequence.first)

    def _run_and_keep(self, step: Step) -> Any:
        results = self._run(step)
        start = 0
        if self._kept_on is not None and not step.is_decode:
            for row in step.rows:  # on the device, in the order of steps
                part = self._seen[start : start + row.count]
                kept = part.to(self._kept_on, copy=True)
                self._parts.setdefault(row.request.id, []).append(kept)
                start += row.count
        return results
