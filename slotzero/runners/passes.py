"""The two passes of a decoder, decode and prefill, and the specs that make them runners.

A step publishes who runs: `slots`, and for prefill how many tokens of each, `counts`. Where a row
begins is not published: it is `length[slot]`, the number of tokens whose KV is stored. All else is
derived below, by the same lines for recording, replay and eager.
"""

import torch
from torch import Tensor

from slotzero.graph import GraphKey, Ladder, Pieces, Registry, RunnerSpec
from slotzero.kernels.contract import Kernels
from slotzero.models.decoder import Decoder, KvPages, Tokens
from slotzero.pools.tables import SlotTables
from slotzero.sampling.params import MAX_LOGPROBS

SLOTS, COUNTS = "slots", "counts"
SAMPLED, LOGPROBS, TOP_IDS, TOP_LOGPROBS = "sampled", "logprobs", "top_ids", "top_logprobs"
LOGITS = "logits"


class Passes:
    def __init__(
        self,
        registry: Registry,
        decoder: Decoder,
        kernels: Kernels,
        tables: SlotTables,
        kv: KvPages,
        max_rows: int,
        max_tokens: int,
    ) -> None:
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
        self._token_slots = registry.derived("token_slots", (max_tokens,), torch.int32)
        self._positions = registry.derived("positions", (max_tokens,), torch.int32)
        self._last_token = registry.derived("last_token", (max_rows,), torch.int32)
        self._new_length = registry.derived("new_length", (max_rows,), torch.int32)
        self._sampled = registry.output(SAMPLED, (max_rows,), torch.int32)
        self._logprobs = registry.output(LOGPROBS, (max_rows,), torch.float32)
        self._top_ids = registry.output(TOP_IDS, (max_rows, MAX_LOGPROBS), torch.int32)
        self._top_logprobs = registry.output(TOP_LOGPROBS, (max_rows, MAX_LOGPROBS), torch.float32)
        self._logits = registry.output(LOGITS, (max_rows, decoder.config.vocab_size), torch.float32)

    def decode_spec(self, ladder: Ladder) -> RunnerSpec:
        return RunnerSpec("decode", ladder, None, (SLOTS,), self._decode)

    def prefill_spec(self, tokens: Ladder, rows: Ladder) -> RunnerSpec:
        return RunnerSpec("prefill", tokens, rows, (SLOTS, COUNTS), self._prefill)

    def _decode(self, key: GraphKey, pieces: Pieces) -> None:
        """Row r is token r."""
        slots = self._slots[: key.rows]
        real = (slots > 0).int()
        start = self._tables["length"][slots]
        self._token_slots[: key.tokens].copy_(slots)
        self._positions[: key.tokens].copy_(start)
        self._last_token[: key.rows].copy_(torch.arange(key.rows, device=slots.device))
        self._new_length[: key.rows].copy_(start + real)
        self._finish(key, pieces)

    def _prefill(self, key: GraphKey, pieces: Pieces) -> None:
        """Row r holds tokens [ends[r] - counts[r], ends[r]); later ones are padding."""
        slots, counts = self._slots[: key.rows], self._counts[: key.rows]
        ends = counts.cumsum(0)  # [rows]
        token = torch.arange(key.tokens, device=slots.device)
        row = torch.searchsorted(ends, token, right=True)  # [tokens]; == rows for padding
        real = row < key.rows
        row = row.clamp_max(key.rows - 1)
        start = self._tables["length"][slots]
        offset = token - (ends - counts)[row]
        self._token_slots[: key.tokens].copy_(slots[row] * real)
        self._positions[: key.tokens].copy_((start[row] + offset) * real)
        self._last_token[: key.rows].copy_((ends - 1).clamp_min(0))
        self._new_length[: key.rows].copy_(start + counts)
        self._finish(key, pieces)

    def _finish(self, key: GraphKey, pieces: Pieces) -> None:
        """All layers, then sampling and write-back of every row that reached its target."""
        slots, new_length = self._slots[: key.rows], self._new_length[: key.rows]
        hidden = self._decoder.forward(self._tokens(key), self._kv, pieces)
        hidden = hidden[self._last_token[: key.rows]].masked_fill((slots == 0)[:, None], 0)
        logits = self._logits[: key.rows]
        logits.copy_(self._decoder.logits(hidden))  # zeros for slot 0
        chosen = self._kernels.sample(logits, slots, new_length, self._tables.sampling)
        samples = (slots > 0) & (new_length >= self._tables["target"][slots])
        self._write_back(slots, new_length, chosen.tokens, samples)
        self._sampled[: key.rows].copy_(chosen.tokens * samples)
        self._logprobs[: key.rows].copy_(chosen.logprobs)
        self._top_ids[: key.rows].copy_(chosen.top_ids)
        self._top_logprobs[: key.rows].copy_(chosen.top_logprobs)

    def _tokens(self, key: GraphKey) -> Tokens:
        slots, positions = self._token_slots[: key.tokens], self._positions[: key.tokens]
        ids = self._tables["tokens"][slots, positions]
        return Tokens(ids, slots, positions, self._tables["prompt_len"][slots])

    def _write_back(
        self, slots: Tensor, new_length: Tensor, chosen: Tensor, samples: Tensor
    ) -> None:
        """A row of slot 0 writes what is there: its length stays 0 and its token stays 0."""
        tokens = self._tables["tokens"]
        kept = tokens[slots, new_length]
        tokens.index_put_((slots, new_length), torch.where(samples, chosen, kept))
        self._tables["length"].index_put_((slots,), new_length)
