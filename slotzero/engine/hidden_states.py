"""Hidden states of every token of a prompt, kept as the engine computes them in its prefill.

A hook in the place of a drafter receives the features of each step; they are kept by request. This
module knows token ids, not what the hidden states are for.

The rule: the engine has recorded no prefill yet, and has no prefix cache and no drafter, since the
hidden states of cached tokens are not computed.
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

_ONE = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, ignore_eos=True)


class HiddenStates:
    writes: tuple[str, ...] = ()

    def __init__(self, engine: Engine, taps: tuple[int, ...]) -> None:
        """`taps`: layers whose input is kept; num_layers means the state after the final norm."""
        worker, limits = engine.worker, engine.limits
        if limits.enable_prefix_caching or worker.cycles:
            raise ContractError("collecting needs an engine without prefix cache and speculation")
        self.taps, self._engine = taps, engine
        self._seen = worker.decoder.new_hidden(limits.max_num_batched_tokens, len(taps))
        self._parts: dict[str, list[Tensor]] = {}
        self._kept_on: torch.device | None = None  # set while collecting
        worker.passes.drafter = self
        self._run, worker.run = worker.run, self._run_and_keep  # type: ignore[method-assign]

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        self._seen[: len(inputs.features)].copy_(inputs.features)

    def defer(self, tokens: Tokens, features: Tensor) -> None:
        """Ignore decoded tokens."""

    def collect(
        self, prompts: Sequence[Sequence[int]], show_progress: bool = False
    ) -> list[Tensor]:
        """Return the states [tokens, taps * hidden] of each prompt."""
        engine = self._engine
        self._kept_on = self._where(sum(map(len, prompts)))
        with prompts_bar(show_progress, len(prompts)) as progress:
            for i, prompt in enumerate(prompts):
                engine.add(f"sequence-{i}", prompt, _ONE)
            while engine.has_work:
                grown = engine.step()
                progress(len(grown), sum(len(a.request.prompt_token_ids) for a in grown))
        self._kept_on = None
        return [torch.cat(self._parts.pop(f"sequence-{i}")) for i in range(len(prompts))]

    def _where(self, num_tokens: int) -> torch.device:
        """Return where states are kept: on the GPU if a quarter of its free memory stays free,
        else in main memory."""
        seen = self._seen
        needed = num_tokens * seen.shape[1] * seen.itemsize
        is_large = seen.is_cuda and needed > 0.75 * torch.cuda.mem_get_info(seen.device)[0]
        return torch.device("cpu") if is_large else seen.device

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
