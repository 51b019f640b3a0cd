"""Rows that stand still: one step's worth of real requests, run again and again at one length.

They are stand-ins, and their KV is noise. It does not know time. The rule: a run moves every row
on, so `rewind` comes before the next one.
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
        self._length = worker.tables["length"].clone()
        self.issue()  # from here on the step is published, so `replay` and `eager` may follow

    def issue(self) -> None:
        """The whole of a step as the engine launches it, not waited for."""
        self._worker.run(self.step)

    def replay(self) -> None:
        self._runner.run(self._key, self.step.num_tokens)

    def unchecked(self) -> None:
        """A replay without what is checked at every one."""
        self._runner.replay(self._key)

    def check(self) -> None:
        self._runner.check(self._key, self.step.num_tokens)

    def eager(self) -> None:
        """The same function over the same published rows, kernel by kernel."""
        self._runner.eager(self._key)

    def rewind(self) -> None:
        """On the device and in stream order: it waits for nothing and allocates nothing."""
        self._worker.tables["length"].copy_(self._length)


@contextmanager
def standing(engine: Engine, runner: Runner, key: GraphKey, context: int) -> Iterator[StandingRows]:
    """As many rows as fill the key, each with `context` tokens stored and the next ones known."""
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
    """Why rows of this key cannot stand at this context, if they cannot."""
    if engine.has_work:
        raise ContractError("rows stand only in an engine without requests: let it finish first")
    lens, limit = _prompt_lens(engine, key, context), engine.limits.max_model_len
    if max(lens) >= limit:
        return NoCaptureSize(
            f"{key} at a context of {context} needs {max(lens) + 1} tokens a row and the context "
            f"holds {limit}: lower --context"
            + (" or raise --max-model-len" if limit < engine.worker.model.max_position else "")
        )
    ledger, page_size = engine.lanes[0].ledger, engine.limits.page_size
    for name, window, available in zip(
        engine.limits.windows, engine.limits.windows.values(), ledger.num_pages, strict=True
    ):
        first = 0 if window is None else max(0, context + 1 - window) // page_size
        num_pages = sum(-(-length // page_size) - first for length in lens)
        if num_pages > available:
            return NoCaptureSize(
                f"{key} at a context of {context} needs {num_pages} KV pages of {name} layers and "
                f"there are {available}: lower --context or raise --kv-cache-memory"
            )
    return None


def _counts(key: GraphKey) -> list[int]:
    """Tokens of each row: as even as can be, none of them padding."""
    num_rows = min(key.rows, key.tokens)
    each, more = divmod(key.tokens, num_rows)
    return [each + (i < more) for i in range(num_rows)]


def _prompt_lens(engine: Engine, key: GraphKey, context: int) -> list[int]:
    """Decode computes the last token of a prompt, prefill a chunk that is not the last: it is then
    prefill even where every row has one token."""
    more = key.runner != engine.worker.decode.spec.name
    return [context + count + more for count in _counts(key)]


def _fill_with_noise(kv: Tensor, pages: Sequence[int]) -> None:
    """One page of noise, everywhere: memory that holds zeros is faster than it will be."""
    index = torch.tensor(pages, device=kv.device)
    noise = torch.randn_like(kv[0, :1])  # [1, page_size, ...]
    for layer in kv:
        layer[index] = noise
