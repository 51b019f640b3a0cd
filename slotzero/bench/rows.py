"""Rows of fixed length: the requests of one step, which is run repeatedly at the same length.

They are dummy requests, and their KV is noise. This module does not measure time. The rule: a run
advances every row, so `rewind` must come before the next run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slotzero.bench.workloads import VOCAB_SIZE, fixed
from slotzero.certify.dummy_requests import dummy_requests
from slotzero.engine.engine import Engine
from slotzero.errors import CapacityError, ContractError
from slotzero.executor.worker import Worker
from slotzero.graph import GraphKey, NoCaptureSize, Runner
from slotzero.sampling.params import SamplingParams
from slotzero.step import Row, Step

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


class StandingRows:
    def __init__(self, worker: Worker, runner: Runner, key: GraphKey, step: Step) -> None:
        self.step = step
        self._worker, self._runner, self._key = worker, runner, key
        worker.tables.apply()
        self._length = worker.tables.length.clone()
        self.issue()  # publishes the step, so that `replay` and `eager` may follow

    def issue(self) -> None:
        """Launch a whole step as the engine does, without waiting for it."""
        self._worker.run(self.step)

    def replay(self) -> None:
        self._runner.run(self._key, self.step.num_tokens)

    def unchecked(self) -> None:
        """Replay without the checks that every replay makes."""
        self._runner.replay(self._key)

    def check(self) -> None:
        self._runner.check(self._key, self.step.num_tokens)

    def eager(self) -> None:
        """Run the same function over the same published rows eagerly."""
        self._runner.eager(self._key)

    def rewind(self) -> None:
        """Reset the rows' lengths on the device in stream order, without waiting or allocating."""
        self._worker.tables.length.copy_(self._length)


@contextmanager
def standing(engine: Engine, runner: Runner, key: GraphKey, context: int) -> Iterator[StandingRows]:
    """Set up as many rows as fill the size, each with `context` tokens in its KV cache."""
    reason = refusal(engine, key, context)
    if reason is not None:
        raise CapacityError(reason.reason)
    counts, lens = _counts(key), _prompt_lens(engine, key, context)
    vocab_size = min(VOCAB_SIZE, engine.worker.vocab_size)
    prompts = fixed(len(counts), max(lens), 1, vocab_size).prompts
    rows: list[Row] = []
    with dummy_requests(engine) as dummies:
        for i, prompt in enumerate(prompts):
            request = dummies.admit(prompt[: lens[i]], _GREEDY, context)
            is_decode = runner is engine.worker.decode
            rows.append(Row(request, request.slot, context, counts[i], samples=is_decode))
        for group, name in enumerate(engine.limits.windows):
            pages = [page for request in dummies.requests for page in request.pages[group] if page]
            _fill_with_noise(engine.worker.registry[f"kv_{name}"], pages)
        yield StandingRows(engine.worker, runner, key, Step((tuple(rows),)))


def refusal(engine: Engine, key: GraphKey, context: int) -> NoCaptureSize | None:
    """Return why rows of this size cannot be set up at this context, or None."""
    if engine.has_work:
        raise ContractError("rows need an idle engine: wait until all its requests have finished")
    lens, limit = _prompt_lens(engine, key, context), engine.limits.max_model_len
    if max(lens) >= limit:
        return NoCaptureSize(
            f"{key} with --context {context} needs {max(lens) + 1} tokens per row, and the "
            f"model's context is {limit}: lower --context"
            + (" or raise --max-model-len" if limit < engine.worker.model.max_position else "")
        )
    ledger, page_size = engine.schedulers[0].ledger, engine.limits.page_size
    for name, window, available in zip(
        engine.limits.windows, engine.limits.windows.values(), ledger.num_pages, strict=True
    ):
        first = 0 if window is None else max(0, context + 1 - window) // page_size
        num_pages = sum(-(-length // page_size) - first for length in lens)
        if num_pages > available:
            return NoCaptureSize(
                f"{key} with --context {context} needs {num_pages} KV pages of {name} layers, and "
                f"there are {available}: lower --context or raise --kv-cache-memory"
            )
    return None


def _counts(key: GraphKey) -> list[int]:
    """Return the tokens of each row, evenly distributed, without padding."""
    num_rows = min(key.rows, key.tokens)
    each, more = divmod(key.tokens, num_rows)
    return [each + (i < more) for i in range(num_rows)]


def _prompt_lens(engine: Engine, key: GraphKey, context: int) -> list[int]:
    """Return the prompt lengths. Decode computes the last token of a prompt, prefill a chunk that
    is not the last, so that it stays prefill even if every row has one token."""
    more = key.runner != engine.worker.decode.spec.name
    return [context + count + more for count in _counts(key)]


def _fill_with_noise(kv: Tensor, pages: Sequence[int]) -> None:
    """Fill pages with noise, since reading zeros is faster than reading real data."""
    index = torch.tensor(pages, device=kv.device)
    noise = torch.randn_like(kv[0, :1])  # [1, page_size, ...]
    for layer in kv:
        layer[index] = noise
