"""The three passes of speculation: verify, draft-extend and draft, and their specs as runners.

All publish `slots` and nothing else; a row has a fixed number of tokens, so strides are uniform.

    verify[W]        the newest token and up to W - 1 drafts through the target, each place sampled
                     as it would be without drafts: a draft is right where it is what was sampled.
                     Writes tokens and length, and what the drafter wants to know of the target.
    draft-extend[W]  the drafter over what verify made certain; the rest is slot 0 and ignored.
    draft[W]         W - 1 guesses, one after another, written where the tokens would be.

Because a place is sampled with the noise of its request and position, the tokens are those of
decoding one by one, whatever the drafter guesses.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from slotzero.graph import GraphKey, Ladder, Pieces, Registry, RunnerSpec
from slotzero.kernels.contract import Kernels, Tokens
from slotzero.models.decoder import Batch, Decoder, KvPages
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import SLOTS, Followed, views_of
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled
from slotzero.speculative.drafter import (
    DRAFTED_AT,
    LIMIT,
    NUM_DRAFTS,
    NUM_NEW,
    PAGED,
    SPECULATES,
    Drafter,
)

VERIFIED, NUM_VERIFIED, NUM_TRIED = "verified", "num_verified", "num_tried"
VERIFIED_LOGPROBS, VERIFIED_TOP_IDS = "verified_logprobs", "verified_top_ids"
VERIFIED_TOP_LOGPROBS, VERIFY_LOGITS = "verified_top_logprobs", "verify_logits"
FEATURES = "features"
VERIFY, EXTEND, DRAFT = "verify", "draft-extend", "draft"
PLACES = ("verify_slots", "verify_positions")
RESULTS = (VERIFIED, VERIFIED_LOGPROBS, VERIFIED_TOP_IDS, VERIFIED_TOP_LOGPROBS)
VERIFY_RESULTS = (NUM_VERIFIED, NUM_TRIED, *RESULTS)
"""What the host is sent: of each row, tokens that are certain and tokens that were tried; then of
each token."""


class SpeculativePasses:
    def __init__(
        self,
        registry: Registry,
        decoder: Decoder,
        drafter: Drafter,
        kernels: Kernels,
        tables: SlotTables,
        kv: Mapping[str, KvPages],
        max_rows: int,
        max_width: int,
        logits_dtype: torch.dtype,
    ) -> None:
        self._decoder, self._drafter, self._kernels = decoder, drafter, kernels
        self._tables, self._kv = tables, kv
        self._slots = registry[SLOTS]
        most = max_rows * max_width

        def derived(name: str) -> Tensor:
            return registry.derived(name, (most,), torch.int32, per="token")

        def output(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return registry.output(name, (most, *shape), dtype, per="token", follows=VERIFY_LOGITS)

        self._token_slots, self._positions = map(derived, PLACES)
        self._num_verified = registry.output(
            NUM_VERIFIED, (max_rows,), torch.int32, follows=VERIFY_LOGITS
        )
        self._num_tried = registry.output(NUM_TRIED, (max_rows,), torch.int32)
        self._sampled = Sampled(
            output(VERIFIED),
            output(VERIFIED_LOGPROBS, dtype=torch.float32),
            output(VERIFIED_TOP_IDS, MAX_LOGPROBS),
            output(VERIFIED_TOP_LOGPROBS, MAX_LOGPROBS, dtype=torch.float32),
        )
        vocab = decoder.config.vocab_size
        self._logits = registry.output(VERIFY_LOGITS, (most, vocab), logits_dtype, per="token")
        size = decoder.new_hidden(0, len(drafter.taps))
        rows = len(tables["length"])
        self._features = registry.table(FEATURES, size.new_zeros(rows, max_width, size.shape[1]))

    def verify_spec(self, width: int, rows: Ladder) -> RunnerSpec:
        chosen = dict.fromkeys(("length", NUM_NEW, FEATURES), NUM_VERIFIED) | {"tokens": VERIFIED}
        writes = (*PLACES, *VERIFY_RESULTS, VERIFY_LOGITS)
        return RunnerSpec(
            f"{VERIFY}-{width}", rows, None, (SLOTS,), self._verify, writes, width, chosen
        )

    def extend_spec(self, width: int, rows: Ladder) -> RunnerSpec:
        return RunnerSpec(f"{EXTEND}-{width}", rows, None, (SLOTS,), self._extend, PLACES, width)

    def draft_spec(self, width: int, rows: Ladder) -> RunnerSpec:
        return RunnerSpec(f"{DRAFT}-{width}", rows, None, (SLOTS,), self._draft, (), width)

    def _verify(self, key: GraphKey, pieces: Pieces) -> None:
        tables, kernels = self._tables, self._kernels
        mine = self._slots, self._num_tried, self._num_verified
        slots, num_tried, num_verified = (tensor[: key.rows] for tensor in mine)
        tokens, length = self._tokens(key), tables["length"]
        rows, after = kernels.locate_drafts(
            slots, length, tables[LIMIT], tables[NUM_DRAFTS], tables[DRAFTED_AT], tokens, num_tried
        )
        features = self._decoder.new_hidden(key.tokens, len(self._drafter.taps))
        batch = Batch(tokens, tables["tokens"], tables["prompt_len"], rows)
        taps = views_of(features, self._drafter.taps)
        normed = self._decoder.forward(batch, self._kv, pieces, taps)
        logits = self._logits[: key.tokens]
        self._decoder.logits(normed, tokens.slots, logits)
        out = Sampled(*(tensor[: key.tokens] for tensor in self._sampled))
        kernels.sample(logits, tokens.slots, after, tables.sampling, out)
        sampled = out.tokens.view(key.rows, key.width)
        kernels.accept(
            slots, num_tried, sampled, tables["tokens"], length, tables[NUM_NEW], num_verified
        )
        kernels.keep(slots, num_verified, features, self._features)

    def _extend(self, key: GraphKey, pieces: Pieces) -> None:
        tables, slots = self._tables, self._slots[: key.rows]
        tokens = self._tokens(key)
        rows, last = self._kernels.locate_new(slots, tables["length"], tables[NUM_NEW], tokens)
        states = self._kernels.fetch(slots, self._features[:, : key.width])
        self._drafter.extend(Followed(tokens, rows, states, last), pieces)

    def _draft(self, key: GraphKey, pieces: Pieces) -> None:
        tables, slots, most = self._tables, self._slots[: key.rows], key.width - 1
        length, num = self._kernels.allot(
            slots, tables["length"], tables[LIMIT], tables[PAGED], tables[SPECULATES],
            tables["target"], most,
        )  # fmt: skip
        num = self._drafter.draft(slots, length, num, most, pieces)
        self._kernels.close_draft(slots, length, num, tables[NUM_DRAFTS], tables[DRAFTED_AT])

    def _tokens(self, key: GraphKey) -> Tokens:
        return Tokens(self._token_slots[: key.tokens], self._positions[: key.tokens])
