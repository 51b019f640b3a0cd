"""The operations of speculation in plain torch: the definition of every fused kernel."""

import torch
from torch import Tensor

from slotzero.kernels.contract.speculation import SpeculationKernels
from slotzero.kernels.types import Branches, PagedKv, Rows, Tokens
from slotzero.kernels.types_speculation import (
    Candidates,
    DraftRows,
    DraftTables,
    DraftTargets,
    TreeFront,
    TreeStep,
)
from slotzero.sampling.tables import Sampled, SamplingTables


class TorchSpeculation(SpeculationKernels):
    def locate_drafts(
        self,
        slots: Tensor,
        tables: DraftTables,
        tokens: Tokens,
        verify_len: Tensor,  # [R]
    ) -> tuple[Rows, Tensor]:
        width, start = len(tokens.slots) // len(slots), tables.length[slots]
        room = tables.limit[slots] - start - 1  # tokens that may still be added
        num_good = tables.num_drafts[slots] * (tables.drafted_at[slots] == start)
        num_good = torch.minimum(num_good, room - 1)
        verify_len.copy_(torch.where(room > 0, num_good.clamp(0, width - 1) + 1, 0))
        rows = lay_out(slots, start, verify_len, tokens)
        return rows, tokens.positions + (tokens.slots > 0)

    def locate_confirmed(
        self, slots: Tensor, length: Tensor, drafter_len: Tensor, tokens: Tokens
    ) -> tuple[Rows, Tensor]:
        width = len(tokens.slots) // len(slots)
        start = drafter_len[slots]
        num = (length[slots] - start).clamp(0, width)
        rows = lay_out(slots, start, num, tokens)
        return rows, rows.ends - width + (num - 1).clamp_min(0)

    def accept(
        self,
        slots: Tensor,
        verify_len: Tensor,  # [R], from locate_drafts
        sampled: Tensor,  # [R, W]: what follows each token
        tables: DraftTables,
        num_confirmed: Tensor,  # [R]
    ) -> None:
        tokens, length = tables.tokens, tables.length
        start, place = length[slots], up_to(sampled.shape[1], slots)
        at = (start[:, None] + 1 + place) * (place < verify_len[:, None])  # where each would go
        is_draft = place < verify_len[:, None] - 1
        is_right = (tokens[slots[:, None], at] == sampled) & is_draft
        num = is_right.int().cumprod(1).sum(1, dtype=torch.int32) + 1
        num_confirmed.copy_(torch.where(verify_len > 0, num, 0))
        is_new = place < num_confirmed[:, None]
        owners = torch.where(is_new, slots[:, None], 0)
        put(tokens, (owners, at * is_new), sampled, is_new)
        put(length, (slots,), start + num_confirmed, slots > 0)

    def store_features(
        self, slots: Tensor, counts: Tensor, x: Tensor, table: Tensor, path: Tensor | None = None
    ) -> None:
        x = x.view(len(slots), len(x) // len(slots), x.shape[1])
        place = up_to(x.shape[1], slots)
        is_new = place < counts[:, None]
        owners = torch.where(is_new, slots[:, None], 0)
        if path is not None:
            x = x.gather(1, path.long()[:, :, None].expand_as(x))
        put(table, (owners, place * is_new), x, is_new)

    def store_last(self, slots: Tensor, last: Tensor, x: Tensor, table: Tensor) -> None:
        put(table, (slots,), x[last], slots > 0)

    def store_next(self, tokens: Tokens, drafter_len: Tensor, x: Tensor, table: Tensor) -> None:
        slots, positions = tokens
        place = positions - drafter_len[slots]
        has_room = (slots > 0) & (place >= 0) & (place < table.shape[1])
        put(table, (slots * has_room, place * has_room), x, has_room)

    def set_drafter_len(
        self, rows: Rows, tokens: Tokens, last: Tensor, drafter_len: Tensor
    ) -> None:
        end = torch.where(rows.counts > 0, tokens.positions[last] + 1, drafter_len[rows.slots])
        put(drafter_len, (rows.slots,), end, rows.slots > 0)

    def load_features(self, slots: Tensor, table: Tensor) -> Tensor:
        return table[slots].flatten(0, 1)

    def draft_budget(self, slots: Tensor, tables: DraftTables, most: int) -> DraftRows:
        length = tables.length[slots]
        room = torch.minimum(tables.limit[slots] - length - 2, tables.paged[slots] - length - 1)
        is_wanted = (tables.speculates[slots] > 0) & (length >= tables.target[slots])
        num = torch.where(is_wanted, room.clamp(0, most), 0)
        return DraftRows(slots, length, num)

    def draft_targets(self, rows: DraftRows, steps: int, behind: int) -> DraftTargets:
        step = up_to(steps, rows.slots)[:, None]
        wanted = torch.where(step < rows.num, rows.slots, 0)
        newest = rows.length + step
        return DraftTargets(wanted, (newest - behind) * (wanted > 0), (newest + 1) * (wanted > 0))

    def store_drafts(self, slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor) -> None:
        put(tokens, (slots, positions * (slots > 0)), ids, slots > 0)

    def propose_ngrams(
        self, rows: DraftRows, tokens: Tensor, steps: int, shortest: int, longest: int
    ) -> Tensor:
        slots, length, num = rows
        known = tokens[slots]  # [R, max_len + 1]
        place = up_to(known.shape[1], slots)
        match = (place < length[:, None]).expand_as(known)  # ends here, before the newest token
        score = torch.zeros_like(known)
        for back in range(longest):
            newest = known.gather(1, (length - back).clamp_min(0).long()[:, None])
            moved = torch.roll(known, back, dims=1)  # the token `back` positions before
            match = match & (moved == newest) & (place >= back) & (length >= back)[:, None]
            score = score + match.int()
        rank = torch.where(score >= shortest, score * known.shape[1] + place, -1)
        best, at = rank.max(dim=1)
        num = torch.where(best >= 0, num, 0)
        for i in range(steps):
            wanted = torch.where(i < num, slots, 0)
            ids = tokens[wanted, (at + 1 + i) * (wanted > 0)]  # may be drafts of this call
            self.store_drafts(wanted, length + 1 + i, ids, tokens)
        return num

    def set_num_drafts(self, rows: DraftRows, tables: DraftTables) -> None:
        put(tables.num_drafts, (rows.slots,), rows.num, rows.slots > 0)
        put(tables.drafted_at, (rows.slots,), rows.length, rows.slots > 0)

    def expand_draft_vocab(self, logits: Tensor, draft_of: Tensor) -> Tensor:
        return logits[:, draft_of.clamp_min(0)].masked_fill(draft_of < 0, -torch.inf)

    def tree_branches(self, rows: Rows, tokens: Tokens, parents: Tensor) -> Branches:
        above = parents[rows.slots][:, : rows.span].long()  # [R, W]
        place = up_to(rows.span, above).expand_as(above)
        is_real = tokens.slots.view_as(place) > 0
        above = above * (is_real & (place > 0))
        seen, depth = 1 << place.long(), (place > 0).int()
        for _ in range(rows.span.bit_length()):  # reaches twice as far in each iteration
            seen, depth = seen | seen.gather(1, above), depth + depth.gather(1, above)
            above = above.gather(1, above)
        bases = (rows.starts[:, None] * is_real).flatten()
        return Branches(bases, seen.flatten(), bases + (depth * is_real).flatten())

    def accept_tree(
        self,
        slots: Tensor,
        verify_len: Tensor,
        sampled: Tensor,  # [R, W]: what follows each node
        parents: Tensor,
        branches: Branches,
        tables: DraftTables,
        num_confirmed: Tensor,
        path: Tensor,  # [R, W]
    ) -> None:
        width, tokens, length = sampled.shape[1], tables.tokens, tables.length
        start, place = length[slots], up_to(width, slots)
        is_tried = place < verify_len[:, None]
        drafts = tokens[slots[:, None], (start[:, None] + place) * is_tried]
        is_draft = is_tried & (place > 0)
        wanted = sampled.gather(1, parents[slots][:, :width].long() * is_draft)
        is_right = (place == 0) | ((drafts == wanted) & is_draft)
        right = (is_right.long() << place.long()).sum(1, keepdim=True)
        # A node is accepted if all its ancestors are.
        is_good = (branches.seen.view_as(sampled) & ~right == 0) & is_tried
        num_confirmed.copy_(is_good.sum(1, dtype=torch.int32))
        is_new = place < num_confirmed[:, None]
        path.copy_(torch.where(is_good, place, width).sort(dim=1).values * is_new)
        owners = torch.where(is_new, slots[:, None], 0)
        at = (start[:, None] + 1 + place) * is_new
        put(tokens, (owners, at), sampled.gather(1, path.long()), is_new)
        put(length, (slots,), start + num_confirmed, slots > 0)

    def move_kv(
        self,
        slots: Tensor,
        length: Tensor,  # after accept_tree
        num_confirmed: Tensor,
        path: Tensor,
        kv: PagedKv,  # stacked: [layers, pages, ...]
    ) -> None:
        place, page_size = up_to(path.shape[1], slots), kv.pages.shape[2]
        is_moved = (place < num_confirmed[:, None]) & (path != place)
        owners = torch.where(is_moved, slots[:, None], 0)
        start = (length[slots] - num_confirmed)[:, None]

        def stored(places: Tensor) -> tuple[Tensor, Tensor]:
            at = (start + places) * is_moved
            return kv.page_table[owners, at // page_size], at % page_size

        by_place = kv.pages.movedim(0, 2)  # [pages, page_size, layers, kv_heads, size]
        put(by_place, stored(place), by_place[stored(path)], is_moved)

    def grow_tree(
        self,
        rows: DraftRows,
        drawn: Sampled,  # for the newest token of each row, or for its front
        front: TreeFront | None,
        candidates: Candidates,
        at: TreeStep,
        tables: SamplingTables,
    ) -> TreeFront:
        (slots, length, room), (step, topk, behind) = rows, at
        num_rows, owners = len(slots), slots if front is None else front.tokens.slots
        ids, scores = _candidates(drawn, owners, topk, tables)
        nodes = torch.full_like(slots, -1) if front is None else front.nodes
        scores = scores if front is None else scores + front.scores[:, None]
        new = Candidates(ids, scores, nodes[:, None].expand_as(ids))
        new = Candidates(*(part.reshape(num_rows, -1) for part in new))
        first = min(step, 1) * topk + max(step - 1, 0) * topk**2
        for part, values in zip(candidates, new, strict=True):
            part[:, first : first + values.shape[1]] = values
        best, chosen = (part[:, :topk] for part in _best_first(new.scores))
        number = up_to(topk, slots) + step * topk  # place in the tree
        is_real = (number < room[:, None]) & best.isfinite()
        where = torch.where(is_real, slots[:, None], 0)
        put(tables.tokens, (where, (length[:, None] + 1 + number) * is_real),
            new.ids.gather(1, chosen), is_real)  # fmt: skip
        origins = chosen // topk + (len(owners) // num_rows * up_to(num_rows, slots))[:, None]
        seen = torch.zeros_like(owners, dtype=torch.int64) if front is None else front.branches.seen
        start = (length + 1 - behind)[:, None]  # the place of the tree's first node
        bases = (start * is_real).flatten()
        positions = bases + (step * is_real.int()).flatten()
        front_rows = Rows(
            where[:, 0],
            (start[:, 0] + step * topk) * is_real[:, 0],
            torch.full_like(slots, topk),
            (up_to(num_rows, slots) + 1) * topk,
            span=topk,
        )
        return TreeFront(
            Tokens(where.flatten(), bases + (number * is_real).flatten()),
            front_rows,
            Branches(bases, (seen[origins] | 1 << number.long()).flatten(), positions),
            (positions + 1 + behind) * (where.flatten() > 0),
            origins.flatten(),
            (chosen + first).flatten().int(),
            best.flatten(),
        )

    def select_nodes(
        self, rows: DraftRows, candidates: Candidates, most: int, tokens: Tensor, parents: Tensor
    ) -> Tensor:
        slots, length, room = rows
        num = candidates.scores.isfinite().sum(1, dtype=torch.int32)
        num = torch.minimum(num, room.clamp_max(most)) * (slots > 0)
        _, order = _best_first(candidates.scores)
        rank = up_to(order.shape[1], slots).long().expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, rank)
        is_chosen = rank < num[:, None]
        node = is_chosen.cumsum(1, dtype=torch.int32) * is_chosen
        above = node.gather(1, candidates.parents.long().clamp_min(0))
        above = torch.where(candidates.parents < 0, 0, above)
        owners = torch.where(is_chosen, slots[:, None], 0)
        put(tokens, (owners, (length[:, None] + node) * is_chosen), candidates.ids, is_chosen)
        put(parents, (owners, node), above, is_chosen)
        return num


def _candidates(
    drawn: Sampled, slots: Tensor, topk: int, tables: SamplingTables
) -> tuple[Tensor, Tensor]:
    """Return the candidates after each token: ids and scores, [T, topk] each."""
    likely, scores = drawn.top_ids[:, :topk], drawn.top_logprobs[:, :topk]
    is_passed = (likely == drawn.tokens[:, None]).cumsum(1)[:, :-1] > 0  # the drawn token is first
    others = up_to(topk - 1, slots) + is_passed
    ids = torch.cat((drawn.tokens[:, None], likely.gather(1, others)), 1)
    scores = torch.cat((scores[:, :1], scores.gather(1, others)), 1)
    has_penalty = (tables.repetition_penalty != 1) | (tables.presence_penalty != 0)
    has_penalty = (has_penalty | (tables.frequency_penalty != 0))[slots]
    is_out = (slots == 0)[:, None] | (has_penalty[:, None] & (up_to(topk, slots) > 0))
    return ids, scores.masked_fill(is_out | ~scores.isfinite(), -torch.inf)


def _best_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sort scores [R, M] in descending order -> values and indices; the earlier of equals first."""
    ordered = scores.sort(dim=1, descending=True, stable=True)
    return ordered.values, ordered.indices


def lay_out(slots: Tensor, starts: Tensor, counts: Tensor, tokens: Tokens) -> Rows:
    """Give row r the tokens [r * W, (r + 1) * W) from its start on; counts[r] of them are real."""
    width = len(tokens.slots) // len(slots)
    place = up_to(width, slots)
    is_real = place < counts[:, None]
    tokens.slots.copy_((slots[:, None] * is_real).flatten())
    tokens.positions.copy_(((starts[:, None] + place) * is_real).flatten())
    owners = torch.where(counts > 0, slots, 0)
    ends = (up_to(len(slots), slots) + 1) * width
    counts = torch.full_like(slots, width)
    return Rows(owners, starts * (owners > 0), counts, ends, span=width)


def put(table: Tensor, index: tuple[Tensor, ...], values: Tensor, real: Tensor) -> None:
    """Set table[index] = values where real; elsewhere the old values are written again."""
    kept = table[index]
    real = real.view(*real.shape, *[1] * (kept.dim() - real.dim()))
    table.index_put_(index, torch.where(real, values.to(table.dtype), kept))


def up_to(num: int, like: Tensor) -> Tensor:
    return torch.arange(num, dtype=torch.int32, device=like.device)
