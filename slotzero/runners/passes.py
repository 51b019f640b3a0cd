"""The decode and prefill passes of a decoder, and their runner specs. A pooled prefill also
computes vectors of prompts, a scored prefill also log probabilities of prompt tokens.

A step publishes the slots that run, `slots`, and for prefill the number of tokens of each row,
`counts`. The start of a row is not published: it is `length[slot]`, the number of tokens whose KV
is stored. All else is derived below, by the same code for recording, replay and eager steps. The
drafter, if there is one, processes the tokens of every prefill.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slotzero.graph import GraphKey, Ladder, Pieces, Registry, RunnerSpec
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, PagedKv, Rows, Tokens
from slotzero.kernels.types_recurrent import States
from slotzero.models.model import NO_TAPS, DecoderBatch, Model
from slotzero.models.pooling import Pooling
from slotzero.pools.tables import SlotTables
from slotzero.runners.pooler import Pooler
from slotzero.runners.prompt_scores import SCORED, PromptScores
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled

SLOTS, COUNTS = "slots", "counts"
SAMPLED, LOGPROBS, TOP_IDS, TOP_LOGPROBS = "sampled", "logprobs", "top_ids", "top_logprobs"
LOGITS = "logits"
RESULTS = (SAMPLED, LOGPROBS, TOP_IDS, TOP_LOGPROBS)
PLACES = ("token_slots", "positions", "new_length")
WRITES = (*PLACES, *RESULTS, LOGITS)


class DrafterInputs(NamedTuple):
    """Confirmed tokens of a step: the decoder has computed them, and the token after each is known.

    They are grouped by `rows`; padding and rejected drafts belong to slot 0.
    """

    tokens: Tokens
    rows: Rows
    features: Tensor  # [T, taps * hidden]: hidden states of the decoder at its taps
    last: Tensor  # [R]: index of each row's newest token; undefined if it has none


class DrafterHook(Protocol):
    """Interface of a drafter, which processes every confirmed token."""

    taps: tuple[int, ...]
    """Layers whose input it needs; num_layers means the state after the final norm."""
    writes: tuple[str, ...]
    """Outputs of `extend`."""

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None: ...

    def defer(self, tokens: Tokens, features: Tensor) -> None:
        """Store the features of a step with one token per row, to be processed later."""


def views_of(features: Tensor, taps: tuple[int, ...]) -> dict[int, Tensor]:
    """Return each layer's part of [T, taps * hidden]."""
    return dict(zip(taps, features.chunk(len(taps), dim=1), strict=True)) if taps else {}


class Passes:
    def __init__(
        self,
        registry: Registry,
        decoder: Model,
        kernels: Kernels,
        tables: SlotTables,
        kv: Mapping[str, PagedKv],
        max_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        pooling: Pooling,
        drafter: DrafterHook | None = None,
        states: States | None = None,
    ) -> None:
        self.drafter, self._states = drafter, states
        self._decoder = decoder
        self._kernels = kernels
        self._tables = tables
        self._kv = kv
        self._slots = registry.published(
            SLOTS, max_rows, pad=0, reason="slot 0 owns no page, reads nothing and writes nothing"
        )
        self._counts = registry.published(
            COUNTS, max_rows, pad=0, reason="a row without tokens moves no other row's tokens"
        )
        token_slots, positions, new_length = PLACES
        self._token_slots = registry.derived(token_slots, (max_tokens,), torch.int32, per="token")
        self._positions = registry.derived(positions, (max_tokens,), torch.int32, per="token")
        self._new_length = registry.derived(new_length, (max_rows,), torch.int32)
        self._chosen = Sampled(
            registry.output(SAMPLED, (max_rows,), torch.int32, chosen_from=LOGITS),
            registry.output(LOGPROBS, (max_rows,), torch.float32, chosen_from=LOGITS),
            registry.output(TOP_IDS, (max_rows, MAX_LOGPROBS), torch.int32, chosen_from=LOGITS),
            registry.output(
                TOP_LOGPROBS, (max_rows, MAX_LOGPROBS), torch.float32, chosen_from=LOGITS
            ),
        )
        # float16 logits would lose precision; with bfloat16 everything else is less precise anyway
        wide = torch.float32 if dtype is torch.float16 else dtype
        self._logits = registry.output(LOGITS, (max_rows, decoder.config.vocab_size), wide)
        self._scores = PromptScores(registry, decoder, kernels, tables, max_tokens, wide)
        self._pooler = Pooler(registry, kernels, pooling, max_rows, self._logits)

    def decode_spec(self, ladder: Ladder) -> RunnerSpec:
        writes = (*WRITES, *self._decoder.writes)
        return RunnerSpec("decode", ladder, None, (SLOTS,), self._decode, writes)

    def prefill_spec(
        self, name: str, tokens: Ladder, rows: Ladder, is_scored: bool, is_pooled: bool
    ) -> RunnerSpec:
        extra = () if self.drafter is None else self.drafter.writes
        scored = SCORED if is_scored else ()
        pooled = self._pooler.writes if is_pooled else ()
        writes = tuple(dict.fromkeys((*WRITES, *self._decoder.writes, *extra, *scored, *pooled)))
        prefill = partial(self._prefill, is_scored=is_scored, is_pooled=is_pooled)
        return RunnerSpec(name, tokens, rows, (SLOTS, COUNTS), prefill, writes)

    def _decode(self, key: GraphKey, pieces: Pieces) -> None:
        """Compute one token per row: row r is token r."""
        derived = (self._token_slots, self._positions, self._new_length)
        rows = [tensor[: key.rows] for tensor in derived]
        self._kernels.decode_positions(self._slots[: key.rows], self._tables.length, *rows)
        taps = () if self.drafter is None else self.drafter.taps
        features = self._decoder.new_hidden(key.tokens, len(taps))
        normed = self._forward(key, None, pieces, views_of(features, taps))
        if self.drafter is not None:
            self.drafter.defer(Tokens(*rows[:2]), features)
        self._finish(key, normed)

    def _prefill(self, key: GraphKey, pieces: Pieces, is_scored: bool, is_pooled: bool) -> None:
        """Compute tokens [ends[r] - counts[r], ends[r]) of row r; later ones are padding."""
        slots, counts = self._slots[: key.rows], self._counts[: key.rows]
        ends = counts.cumsum(0, dtype=torch.int32)  # [rows]
        token = torch.arange(key.tokens, dtype=torch.int32, device=slots.device)
        row = torch.searchsorted(ends, token, right=True)  # [tokens]; == rows for padding
        real = row < key.rows
        row = row.clamp_max(key.rows - 1)
        start = self._tables.length[slots]
        offset = token - (ends - counts)[row]
        self._token_slots[: key.tokens].copy_(slots[row] * real)
        self._positions[: key.tokens].copy_((start[row] + offset) * real)
        torch.add(start, counts, out=self._new_length[: key.rows])
        rows, last = Rows(slots, start, counts, ends), (ends - 1).clamp_min(0)
        taps = () if self.drafter is None else self.drafter.taps
        features = self._decoder.new_hidden(key.tokens, len(taps))
        normed = self._forward(key, rows, pieces, views_of(features, taps))
        tokens = Tokens(self._token_slots[: key.tokens], self._positions[: key.tokens])
        if is_scored:
            self._scores.write(tokens, normed)
        self._finish(key, normed.select(last))
        if is_pooled:
            self._pooler.write(tokens, rows, normed)
        if self.drafter is not None:
            self.drafter.extend(DrafterInputs(tokens, rows, features, last), pieces)

    def _forward(
        self,
        key: GraphKey,
        rows: Rows | None,
        pieces: Pieces,
        taps: Mapping[int, Tensor] = NO_TAPS,
    ) -> Normed:
        slots, positions = self._token_slots[: key.tokens], self._positions[: key.tokens]
        tokens, prompt_len = self._tables.tokens, self._tables.sampling.prompt_len
        batch = DecoderBatch(Tokens(slots, positions), tokens, prompt_len, rows)
        return self._decoder.forward(batch, self._kv, pieces, taps, self._states)

    def _finish(self, key: GraphKey, normed: Normed) -> None:
        """Sample, and write back every row that reached its target."""
        tables = self._tables
        slots, new_length = self._slots[: key.rows], self._new_length[: key.rows]
        logits = self._logits[: key.rows]
        self._decoder.logits(normed, slots, logits)
        out = Sampled(*(tensor[: key.rows] for tensor in self._chosen))
        self._kernels.sample(logits, slots, new_length, tables.sampling, out)
        self._kernels.advance(
            slots, new_length, tables.target, tables.length, tables.tokens, out.tokens
        )
