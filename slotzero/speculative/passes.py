"""The three passes of speculative decoding, verify, draft-extend and draft, and their runner specs.

All publish only `slots`; a row has a fixed number of tokens, so strides are uniform.

    verify[W]        runs the newest token and up to W - 1 drafts through the target, and samples
                     each position as without drafts: a draft is accepted if it equals the sample.
                     Writes tokens and length, and the target's features for the drafter.
    draft-extend[W]  runs the drafter over the tokens confirmed since its last extension, by verify
                     or by plain steps; the rest is slot 0 and ignored.
    draft[W]         writes W - 1 draft tokens in sequence into the places after the newest token;
                     or the best W - 1 of a tree, side by side.

Because a position is sampled with noise that depends on its request and position only, the tokens
are those of decoding one by one, whatever the drafter predicts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from slotzero.graph import GraphKey, Ladder, Pieces, Registry, RunnerSpec
from slotzero.kernels.types import PagedKv, Tokens
from slotzero.kernels.types_recurrent import States, Trail
from slotzero.kernels.types_speculation import DraftTables
from slotzero.models.model import DecoderBatch, Model
from slotzero.pools.states import SNAPSHOTS, STATES, TRAILS, stored
from slotzero.runners.passes import LOGITS, SLOTS, DrafterInputs, views_of
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled
from slotzero.speculative.drafter import (
    DRAFTED_AT,
    DRAFTER_LEN,
    FEATURES,
    LIMIT,
    MOST_PENDING,
    NUM_DRAFTS,
    PAGED,
    SPECULATES,
    Drafter,
)
from slotzero.speculative.tree import Trees
from slotzero.tree_shape import places_ahead

VERIFIED, NUM_CONFIRMED, VERIFY_LEN = "verified", "num_confirmed", "verify_len"
PATH = "verified_path"
VERIFIED_LOGPROBS, VERIFIED_TOP_IDS = "verified_logprobs", "verified_top_ids"
VERIFIED_TOP_LOGPROBS, VERIFY_LOGITS = "verified_top_logprobs", "verify_logits"
VERIFY, EXTEND, DRAFT = "verify", "draft-extend", "draft"
PLACES = ("verify_slots", "verify_positions")
RESULTS = (VERIFIED, VERIFIED_LOGPROBS, VERIFIED_TOP_IDS, VERIFIED_TOP_LOGPROBS)


class SpeculativePasses:
    def __init__(
        self,
        registry: Registry,
        decoder: Model,
        drafter: Drafter,
        kv: Mapping[str, PagedKv],
        max_width: int,
        trees: Trees | None,
        states: States | None = None,
        trail: Trail | None = None,  # [tokens, layers, ...]
    ) -> None:
        self._states, self._trail = states, trail
        self._decoder, self._drafter, self._kv, self._trees = decoder, drafter, kv, trees
        self._kernels, self._tables = drafter.kernels, drafter.tables
        names = "tokens", "length", "target", LIMIT, PAGED, SPECULATES, NUM_DRAFTS, DRAFTED_AT
        self._draft_tables = DraftTables(*(self._tables[name] for name in names))
        self._groups = [group.name for group in decoder.config.groups]
        self._slots = registry[SLOTS]
        max_rows = len(self._slots)
        most = max_rows * max_width

        def derived(name: str) -> Tensor:
            size = max_rows * max(max_width, MOST_PENDING)
            return registry.derived(name, (size,), torch.int32, per="token")

        def output(name: str, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return registry.output(
                name, (most, *shape), dtype, per="token", chosen_from=VERIFY_LOGITS
            )

        self._token_slots, self._positions = map(derived, PLACES)
        self._num_confirmed = registry.output(
            NUM_CONFIRMED, (max_rows,), torch.int32, chosen_from=VERIFY_LOGITS
        )
        self._verify_len = registry.output(VERIFY_LEN, (max_rows,), torch.int32)
        self._path: Tensor | None = None
        if trees is not None:
            shape = max_rows, max_width
            self._path = registry.output(PATH, shape, torch.int32, chosen_from=VERIFY_LOGITS)
        path = () if trees is None else (PATH,)
        self.results = (NUM_CONFIRMED, VERIFY_LEN, *path, *RESULTS)
        """Outputs that are sent to the host: for each row the number of confirmed and of verified
        tokens, and the confirmed nodes of a tree; then the results of each token."""
        self._sampled = Sampled(
            output(VERIFIED),
            output(VERIFIED_LOGPROBS, dtype=torch.float32),
            output(VERIFIED_TOP_IDS, MAX_LOGPROBS),
            output(VERIFIED_TOP_LOGPROBS, MAX_LOGPROBS, dtype=torch.float32),
        )
        logits = registry[LOGITS]
        shape = most, logits.shape[1]
        self._logits = registry.output(VERIFY_LOGITS, shape, logits.dtype, per="token")

    def verify_spec(self, width: int, rows: Ladder) -> RunnerSpec:
        chosen = dict.fromkeys(("length", FEATURES), NUM_CONFIRMED) | {"tokens": VERIFIED}
        if self._trees is not None:
            chosen |= {f"kv_{name}": PATH for name in self._groups}
        writes = (*PLACES, *self.results, VERIFY_LOGITS, *self._decoder.writes)
        if self._states is not None:
            states = self._states
            writes += stored(TRAILS, states)
            kept = stored(SNAPSHOTS, states) if states.rows is not None else ()
            chosen |= dict.fromkeys((*stored(STATES, states), *kept), NUM_CONFIRMED)
        return RunnerSpec(
            f"{VERIFY}-{width}", rows, None, (SLOTS,), self._verify, writes, width, chosen
        )

    def extend_spec(self, width: int, rows: Ladder) -> RunnerSpec:
        name, writes = f"{EXTEND}-{width}", (*PLACES, *self._drafter.writes)
        return RunnerSpec(name, rows, None, (SLOTS,), self._extend, writes, width)

    def draft_spec(self, width: int, rows: Ladder) -> RunnerSpec:
        name, ahead = f"{DRAFT}-{width}", self._ahead(width)
        writes = self._drafter.writes_of(ahead if self._trees is None else self._trees.shape.steps)
        return RunnerSpec(name, rows, None, (SLOTS,), self._draft, writes, width, ahead=ahead)

    def _verify(self, key: GraphKey, pieces: Pieces) -> None:
        tables, kernels = self._tables, self._kernels
        mine = self._slots, self._verify_len, self._num_confirmed
        slots, verify_len, num_confirmed = (tensor[: key.rows] for tensor in mine)
        tokens, length = self._tokens(key), tables.length
        rows, after = kernels.locate_drafts(slots, self._draft_tables, tokens, verify_len)
        branches = None
        if self._trees is not None:
            branches = kernels.tree_branches(rows, tokens, self._trees.parents)
            after = branches.positions + (tokens.slots > 0)
        features = self._decoder.new_hidden(key.tokens, len(self._drafter.taps))
        batch = DecoderBatch(tokens, tables.tokens, tables.sampling.prompt_len, rows, branches)
        taps = views_of(features, self._drafter.taps)
        trail = self._trail_of(key)
        normed = self._decoder.forward(batch, self._kv, pieces, taps, self._states, trail)
        logits = self._logits[: key.tokens]
        self._decoder.logits(normed, tokens.slots, logits)
        out = Sampled(*(tensor[: key.tokens] for tensor in self._sampled))
        kernels.sample(logits, tokens.slots, after, tables.sampling, out)
        sampled, path = out.tokens.view(key.rows, key.width), None
        if self._trees is None:
            kernels.accept(slots, verify_len, sampled, self._draft_tables, num_confirmed)
        else:
            assert self._path is not None and branches is not None
            path = self._path[: key.rows]
            kernels.accept_tree(
                slots, verify_len, sampled, self._trees.parents, branches,
                self._draft_tables, num_confirmed, path,
            )  # fmt: skip
            for name in self._groups:
                kernels.move_kv(slots, length, num_confirmed, path, self._kv[name])
        kernels.store_features(slots, num_confirmed, features, self._drafter.pending, path)
        if self._states is not None and trail is not None:
            shape = self._decoder.scan_of(self._states)
            kernels.commit_trail(trail, slots, length, num_confirmed, self._states, shape)

    def _extend(self, key: GraphKey, pieces: Pieces) -> None:
        tables, slots = self._tables, self._slots[: key.rows]
        tokens = self._tokens(key)
        rows, last = self._kernels.locate_confirmed(
            slots, tables.length, tables[DRAFTER_LEN], tokens
        )
        states = self._kernels.load_features(slots, self._drafter.pending[:, : key.width])
        self._drafter.extend(DrafterInputs(tokens, rows, states, last), pieces)

    def _draft(self, key: GraphKey, pieces: Pieces) -> None:
        slots, most = self._slots[: key.rows], self._ahead(key.width)
        rows = self._kernels.draft_budget(slots, self._draft_tables, most)
        if self._trees is None:
            num = self._drafter.draft(*rows, most, pieces)
        else:
            num = self._trees.draft(*rows, pieces)
        self._kernels.set_num_drafts(rows._replace(num=num), self._draft_tables)

    def _trail_of(self, key: GraphKey) -> Trail | None:
        """Return the trail for rows with this many tokens each."""
        if self._trail is None:
            return None

        def rows_of(part: Tensor) -> Tensor:
            return part[: key.tokens].view(key.rows, key.width, *part.shape[1:])

        conv, scan = self._trail
        return Trail(rows_of(conv), None if scan is None else rows_of(scan))

    def _ahead(self, width: int) -> int:
        return places_ahead(width, None if self._trees is None else self._trees.shape)

    def _tokens(self, key: GraphKey) -> Tokens:
        return Tokens(self._token_slots[: key.tokens], self._positions[: key.tokens])
