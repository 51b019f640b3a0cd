"""Recomputation of one request's answer from its tokens alone, in separate memory.

It has one slot, pages for that slot and recurrent states, none of which belong to the engine. There
is no prefix cache, no draft, no recording and no neighbour: tokens go through the model in chunks,
eagerly, and the sampler chooses the next token at every position. Noise depends on seed and
position alone, so the choice is the same as in the engine.

The rule: a token of the answer is right if the sampler chooses it here, or would choose it if
logits differed by rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotzero.executor.build import KV_SCALES
from slotzero.executor.worker import Worker
from slotzero.graph.backend import PlainPieces
from slotzero.kernels.float8_kv import CODES
from slotzero.kernels.types import Normed, PagedKv, Rows, Tokens
from slotzero.kernels.types_recurrent import States
from slotzero.models.model import DecoderBatch
from slotzero.request import Request
from slotzero.runners.passes import LOGITS
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import SAMPLING_TABLES, Sampled, SamplingTables, encode, mask_tables

SLOT = 1  # row 0 of every table is unowned, here too
MOST_ROWS = 32  # positions whose logits are in memory at once


@dataclass(frozen=True)
class Disagreement:
    position: int  # counted from the start of the prompt
    got: int
    expected: int


class Recomputation:
    def __init__(
        self,
        worker: Worker,
        request: Request,
        rounding: float,
        masks: Iterator[np.ndarray] | None = None,
    ) -> None:
        """`rounding`: error of logits, relative to the largest one. `masks`: the tokens that may
        be chosen, one mask per token of the answer."""
        self._worker, self._rounding = worker, rounding
        self._text = request.all_token_ids
        self._prompt_len = len(request.prompt_token_ids)
        self._masks = masks
        penalty = request.params.repetition_penalty
        self._stretch = max(penalty, 1 / penalty)  # the factor on logits and on their rounding
        self._device = worker.registry.device
        self._tables = self._sampling_tables(request)
        self._kv = {group.name: self._pages(group.name) for group in worker.decoder.config.groups}
        self._states: States | None = None
        if worker.states is not None:
            conv, scan = worker.states[:2]
            self._states = States(_nothing(conv), None if scan is None else _nothing(scan))

    def chunks(self) -> Iterator[Disagreement | None]:
        """Recompute the text in chunks of at most one step's tokens, up to the first
        disagreement."""
        end = len(self._text) - 1  # nothing follows the last token
        size = self._worker.limits.max_num_batched_tokens
        for start in range(0, end, size):
            found = self._chunk(start, min(start + size, end))
            yield found
            if found is not None:
                return

    def _chunk(self, start: int, end: int) -> Disagreement | None:
        outputs = [self._worker.registry[name] for name in self._worker.decoder.writes]
        kept = [output.clone() for output in outputs]  # from the engine's last step
        normed = self._forward(start, end)
        for output, before in zip(outputs, kept, strict=True):
            output.copy_(before)
        most = 1 if self._masks is not None else MOST_ROWS  # one mask at a time
        for first in range(max(start, self._prompt_len - 1), end, most):
            last = min(first + most, end)
            index = torch.arange(first - start, last - start, device=self._device)
            found = self._compare(self._logits(normed.select(index)), first + 1)
            if found is not None:
                return found
        return None

    def _forward(self, start: int, end: int) -> Normed:
        positions = torch.arange(start, end, dtype=torch.int32, device=self._device)
        tokens = Tokens(torch.full_like(positions, SLOT), positions)
        slot, first, count = (self._int32([value]) for value in (SLOT, start, end - start))
        rows = Rows(slot, first, count, count)
        batch = DecoderBatch(tokens, self._tables.tokens, self._tables.prompt_len, rows)
        decoder = self._worker.decoder
        return decoder.forward(batch, self._kv, PlainPieces(), states=self._states)

    def _logits(self, normed: Normed) -> Tensor:
        shape = len(normed.x), self._worker.vocab_size
        logits = self._worker.registry[LOGITS].new_empty(shape)
        self._worker.decoder.logits(normed, self._int32([SLOT] * len(logits)), logits)
        return logits

    def _compare(self, logits: Tensor, first: int) -> Disagreement | None:
        """Compare the answer with what is sampled from logits: row i is for position first + i."""
        answer = self._text[first : first + len(logits)]
        if self._masks is not None:
            allowed = torch.from_numpy(next(self._masks).view("int32").copy())
            self._tables.is_masked[SLOT] = 1
            self._tables.allowed[SLOT, : len(allowed)] = allowed.to(self._device)
        for i, (got, expected) in enumerate(zip(answer, self._sample(logits, first), strict=True)):
            if got != expected and not self._is_near_tie(logits[i : i + 1], first + i, got):
                return Disagreement(first + i, got, expected)
        return None

    def _is_near_tie(self, logits: Tensor, position: int, token: int) -> bool:
        """Return whether `token` would be chosen if logits differed by rounding.

        Its logit is raised by the largest rounding difference between two logits, and tokens that
        are chosen in its place are lowered by as much: they may be just above the threshold of
        top_k, top_p or min_p.
        """
        logits = logits.float()
        largest = logits.nan_to_num(0, 0, 0).abs().max().item()
        apart = 2 * self._rounding * largest * self._stretch
        logits[0, token] += apart
        lowered: set[int] = set()
        while True:
            (chosen,) = self._sample(logits, position)
            if chosen == token or chosen in lowered:
                return chosen == token
            logits[0, chosen] -= apart
            lowered.add(chosen)

    def _sample(self, logits: Tensor, first: int) -> list[int]:
        """Return the tokens sampled for positions [first, first + rows)."""
        num = len(logits)
        places = torch.arange(first, first + num, dtype=torch.int32, device=self._device)
        shape = num, MAX_LOGPROBS
        out = Sampled(
            torch.empty_like(places),
            logits.new_empty(num, dtype=torch.float32),
            places.new_empty(shape),
            logits.new_empty(shape, dtype=torch.float32),
        )
        slots = torch.full_like(places, SLOT)
        self._worker.kernels.sample(logits, slots, places, self._tables, out)
        chosen: list[int] = out.tokens.tolist()  # waits: the comparison is on the host
        return chosen

    def _sampling_tables(self, request: Request) -> SamplingTables:
        row = encode(request.params, request.seed, self._prompt_len, request.stop_ids)
        tables = {"tokens": self._int32([[0] * (len(self._text) + 1), [*self._text, 0]])}
        for spec in (*SAMPLING_TABLES, *mask_tables(self._worker.vocab_size)):
            dtype = getattr(torch, spec.dtype)
            table = torch.full(spec.shape(SLOT), spec.neutral, dtype=dtype, device=self._device)
            if spec.name in row:
                table[SLOT] = torch.tensor(row[spec.name], dtype=dtype).view(table[SLOT].shape)
            tables[spec.name] = table
        return SamplingTables(**tables)

    def _pages(self, group: str) -> PagedKv:
        like = self._worker.registry[f"kv_{group}"]
        num_layers, _, page_size, *shape = like.shape
        num_pages = -(-len(self._text) // page_size)
        pages = like.new_zeros(num_layers, num_pages + 1, page_size, *shape)
        page_table = self._int32([[0] * num_pages, [*range(1, num_pages + 1)]])
        scales = self._worker.registry[f"{KV_SCALES}_{group}"] if pages.dtype is CODES else None
        return PagedKv(pages, page_table, scales)

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)


def _nothing(states: Tensor) -> Tensor:
    """Return zeros in the shape of stacked states, for slots up to SLOT."""
    return states.new_zeros(len(states), SLOT + 1, *states.shape[2:])
