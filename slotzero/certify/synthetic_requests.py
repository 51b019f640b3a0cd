"""Synthetic requests: dummy requests in every state in which a runner may find them.

This module knows which parts of a slot's row each runner accesses. It writes slot tables;
scenarios.py sets up everything else that a step reads.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from slotzero.certify.dummy_requests import DummyRequests
from slotzero.certify.reach import has, is_drafter, reads_target
from slotzero.certify.scenario import kind_of
from slotzero.engine.engine import Engine
from slotzero.errors import RequestError
from slotzero.graph import Runner
from slotzero.models.routing import CHOSEN_EXPERTS
from slotzero.pools.pages import KvPool
from slotzero.pools.states import STATES, stored
from slotzero.request import Request
from slotzero.runners.pooler import POOLED, POOLED_SUMS
from slotzero.sampling.params import SamplingParams
from slotzero.speculative.drafter import (
    DRAFTED_AT,
    DRAFTER_LEN,
    FEATURES,
    LIMIT,
    MOST_PENDING,
    NUM_DRAFTS,
    PAGED,
    SPECULATES,
)
from slotzero.speculative.passes import DRAFT, EXTEND, VERIFY
from slotzero.speculative.tree import PARENTS

MOST_STORED = 37  # tokens stored before the step: two pages and a few more
WIDE_WINDOW = 64  # tokens; wider windows are not filled
LEAST_DRAFTED = 8  # tokens before a draft, so that an n-gram drafter finds a match
PERIOD = 3  # length of the repeated text in tokens
SURE = 1e4  # a logit bias that decides the sampled token
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.9, "logprobs": 2, "top_k": 20, "top_p": 0.9, "seed": 11},
    {"temperature": 1.3, "min_p": 0.05, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.2, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 7: -2.0}, "min_tokens": 3},
)


class PagedTable(NamedTuple):
    """A table of pages, which a step writes for every token that it computes."""

    name: str
    group: int
    """Index of the KV group that owns the pages."""
    window: int | None


def paged_tables(engine: Engine) -> list[PagedTable]:
    windows = engine.limits.windows
    tables = [PagedTable(f"kv_{name}", i, windows[name]) for i, name in enumerate(windows)]
    if (routed := engine.worker.routed_experts) is not None:
        tables.append(PagedTable(CHOSEN_EXPERTS, routed.group, None))
    return tables


class Access(NamedTuple):
    """Accesses of a step to one row: columns of a table, or positions in the KV cache."""

    known: int
    """The step may read [0, known)."""
    written: Collection[int] = ()
    """The step writes these. It reads one that is not known only after it has written it. All
    other places are unused."""

    @classmethod
    def over(cls, start: int, stop: int) -> "Access":
        return cls(start, range(start, stop))

    @property
    def end(self) -> int:
        return max(self.known, max(self.written, default=-1) + 1)


READ, WRITTEN, CHANGED = Access(1), Access.over(0, 1), Access(1, [0])  # for tables of one column


KvAccesses = dict[str, tuple[Access, ...]]  # by KV tensor: one per layer, or one for all layers


class SyntheticRequest(NamedTuple):
    request: Request
    accesses: Mapping[str, Access]
    """By table. The step does not access a speculation table that is missing here."""
    kv_accesses: KvAccesses
    """The step does not access a KV tensor that is missing here."""
    snapshots: "Snapshots | None" = None
    """None: the step does not access the snapshot table."""


class Snapshots(NamedTuple):
    """Columns of the snapshot table that a step reads from and takes snapshots into."""

    reads: Collection[int] = ()
    takes: Collection[int] = ()


class VerifyCase(NamedTuple):
    """One kind of row in a verify step."""

    num_drafts: int
    num_right: int
    room: int | None = None  # tokens that may still be generated; None: enough
    is_stale: bool = False
    speculates: bool = True


class DraftTree(NamedTuple):
    """Drafts in order: `which` is None for the right token, else one of three wrong tokens."""

    which: list[int | None]
    parents: list[int]


def _chain(case: VerifyCase) -> DraftTree:
    which = [None if i < case.num_right else i % 3 for i in range(case.num_drafts)]
    return DraftTree(which, [*range(case.num_drafts)])


def _branching(case: VerifyCase) -> DraftTree:
    """Return a tree with as many right drafts as fit.

    Each right draft has a wrong sibling before it, so that accepting it moves tokens. The remaining
    drafts are groups of three below the last one.
    """
    num_right = min(case.num_right, case.num_drafts // 2)
    tree, last = DraftTree([], []), 0
    for i in range(num_right):
        tree.which.extend((0, None))
        tree.parents.extend((last, last))
        last = 2 * i + 2
    for i in range(case.num_drafts - 2 * num_right):
        tree.which.append(i % 3)
        tree.parents.append(last if i < 3 else 2 * num_right + 1 + 3 * (i // 3 - 1))
    return tree


class DraftPlaces(NamedTuple):
    tokens: Collection[int]  # places after the newest token where a token is written
    computed: Collection[int]  # places of the tokens that the drafter computes
    num: int  # number of drafts in the result


def _behind(first: int, places: Collection[int]) -> Access:
    return Access(first, [first + place for place in places])


class SyntheticRequestBuilder:
    """Admits synthetic requests for the steps of one runner."""

    def __init__(
        self, engine: Engine, runner: Runner, dummies: DummyRequests, rng: random.Random
    ) -> None:
        self._engine, self._runner, self._dummies, self._rng = engine, runner, dummies, rng
        self._width, self._shape = runner.spec.width, engine.worker.tree
        self._most = max(runner.spec.width, runner.spec.ahead)
        self._tables, self._vocab = engine.worker.tables, engine.worker.vocab_size
        pages = [table.name for table in paged_tables(engine)]
        self._kv = [name for name in pages if not is_drafter(name)]
        self._drafter_kv = [name for name in pages if is_drafter(name)]
        drafter = engine.worker.drafter
        self._states = () if drafter is None else drafter.states
        self._num_turns = 1 if drafter is None else drafter.num_turns
        self._reads_target = reads_target(engine.worker.registry)
        self._recurrent = engine.worker.states
        self._sums = has(engine.worker.registry, POOLED_SUMS)

    def admit(self, count: int) -> SyntheticRequest:
        """Admit one request. `count`: tokens that the step computes for it, for runners without a
        fixed row width."""
        of_kind = {VERIFY: self._verifies, EXTEND: self._extends, DRAFT: self._drafts}
        index, admit = len(self._dummies.requests), of_kind.get(kind_of(self._runner))
        synthetic = self._computes(count) if admit is None else admit(index)
        if index % 2:
            self._constrain(synthetic.request.slot)
        return synthetic

    def _computes(self, count: int) -> SyntheticRequest:
        """Admit a row of a decode or prefill step. One in three rows with several tokens has one
        more prompt token left, so it does not sample."""
        start = self._start(count)
        more = self._rng.choice((0, 0, 1)) if count > 1 else 0
        tokens = self._random(start + count + more)
        resumes = self._may_resume(start)
        request = self._dummies.admit(tokens, self._params(), start, resumes=resumes)
        self._leave(request)
        accesses = {"tokens": Access.over(len(tokens), len(tokens) + 1 - more)}
        accesses |= self._states_from(start, resumes)
        if self._sums and POOLED in self._runner.spec.writes:
            accesses[POOLED_SUMS] = WRITTEN if start == 0 else CHANGED
        kv_accesses: KvAccesses = dict.fromkeys(self._kv, (Access.over(start, start + count),))
        if self._engine.worker.cycles and self._runner.spec.rows is not None:
            accesses |= self._passes_on(start)
            accesses[DRAFTER_LEN] = WRITTEN if self._num_turns == 1 else CHANGED
            kv_accesses |= self._follows(start, start + count)
        elif self._engine.worker.cycles:
            behind = self._rng.randrange(min(MOST_PENDING, start + 1))
            self._tables.stage(DRAFTER_LEN, request.slot, [start - behind])
            accesses |= {DRAFTER_LEN: READ, FEATURES: Access(0, [behind])}
        return SyntheticRequest(
            request, accesses, kv_accesses, self._snapshots(start, start + count)
        )

    def _verifies(self, index: int) -> SyntheticRequest:
        most, widest = self._width - 1, self._engine.limits.max_width - 1
        cases = (
            VerifyCase(widest, widest),
            VerifyCase(most, most, room=0),
            VerifyCase(most, most // 2),
            VerifyCase(0, 0, speculates=False),
            VerifyCase(most, most, is_stale=True),
            VerifyCase(most, most, room=2),
            VerifyCase(most, 0),
        )
        return self._verifying(cases[index % len(cases)])

    def _verifying(self, case: VerifyCase) -> SyntheticRequest:
        """Admit a row with drafts. A logit bias decides which drafts are right."""
        length = self._start(self._engine.limits.max_width, least=1)
        resumes = self._may_resume(length)
        right, *wrong = (self._token(first) for first in (2, 3, 5, 7))
        request = self._answering(
            self._random(length + 1), length, room=case.room, resumes=resumes,
            speculative=case.speculates,
            logit_bias=dict.fromkeys(wrong, -SURE) | ({right: SURE} if case.num_right else {}),
        )  # fmt: skip
        tree = _chain(case) if self._goes_one_way(request) else _branching(case)
        self._leave(request, num_drafts=case.num_drafts)
        self._tables.stage(DRAFTED_AT, request.slot, [length - case.is_stale])
        drafts = [right if i is None else wrong[i] for i in tree.which]
        self._tables.stage("tokens", request.slot, drafts, first=length + 1)
        room = self._width if case.room is None else case.room
        count = min(1 if case.is_stale else len(drafts) + 1, room, self._width)
        num = min(1 + sum(i is None for i in tree.which[: max(count - 1, 0)]), count)
        accesses = {LIMIT: READ, DRAFTED_AT: READ, FEATURES: Access.over(0, num)}
        kv_accesses = KvAccesses()
        if not case.is_stale:
            accesses[NUM_DRAFTS] = READ
        if count:
            kv_accesses = dict.fromkeys(self._kv, (Access.over(length, length + count),))
            accesses["tokens"] = Access(length + count, range(length + 1, length + 1 + num))
            accesses |= self._states_from(length, resumes)
        if self._shape is not None:
            self._tables.stage(PARENTS, request.slot, tree.parents, first=1)
            accesses[PARENTS] = Access(count)
        snapshots = self._snapshots(length, length + num) if count else Snapshots()
        return SyntheticRequest(request, accesses, kv_accesses, snapshots)

    def _extends(self, index: int) -> SyntheticRequest:
        """Admit a row for the drafter to catch up on. One in five has no tokens before those."""
        num = (self._width, 0, 1, self._width // 2 + 1, 1)[index % 5]
        begins = index % 5 == 4
        length = num if begins else self._length(self._width, least=max(num, 1))
        request = self._answering(self._random(length + 1), length, num_stored=length - num)
        self._leave(request)
        self._tables.stage("length", request.slot, [length])
        self._tables.stage(DRAFTER_LEN, request.slot, [length - num])
        accesses, kv_accesses = {DRAFTER_LEN: CHANGED}, KvAccesses()
        if num:
            accesses |= {"tokens": Access(length + 1), FEATURES: Access(num)}
            accesses |= self._passes_on(length - num)
            kv_accesses = self._follows(length - num, length)
        return SyntheticRequest(request, accesses, kv_accesses)

    def _drafts(self, index: int) -> SyntheticRequest:
        """Admit a row to draft for. Its parameters, pages, length limit or an unfinished prompt may
        prevent drafting."""
        case = ("all", "wish", "pages", "limit", "prompt", "unlike")[index % 6]
        length = self._length(self._width, least=LEAST_DRAFTED)
        if case == "pages":
            length += -(length + 2) % self._engine.limits.page_size  # leaves one position
        num_known = length + (2 if case == "prompt" else 1)
        tokens = self._unlike(num_known) if case == "unlike" else self._random(PERIOD) * num_known
        request = self._answering(
            tokens[:num_known], length, room=2 if case == "limit" else None,
            num_mtp_layers=0 if case == "pages" else self._most, speculative=case != "wish",
        )  # fmt: skip
        self._leave(request)
        accesses = {NUM_DRAFTS: WRITTEN, DRAFTED_AT: WRITTEN}
        accesses |= dict.fromkeys((LIMIT, PAGED, SPECULATES), READ)
        room, kv_accesses = self._room(request, length), KvAccesses()
        if room:
            drafted = self._drafted(request, room)
            if case == "unlike" and not self._drafter_kv and not self._reads_target:
                drafted = DraftPlaces([], [], 0)  # no n-gram repeats
            accesses |= {"tokens": _behind(length + 1, drafted.tokens)}
            accesses |= dict.fromkeys(self._states[: max(1, room - 1)], READ)
            if self._reads_target:
                kv_accesses |= dict.fromkeys(self._kv, (Access(length),))
            kv_accesses |= dict.fromkeys(self._drafter_kv, self._computed(length, room, drafted))
            if self._shape is not None:
                accesses[PARENTS] = Access(0, range(1, 1 + drafted.num))
        return SyntheticRequest(request, accesses, kv_accesses)

    def _room(self, request: Request, length: int) -> int:
        """Return the number of places that drafts may take."""
        if not request.speculates or request.target > length:
            return 0
        paged = min(map(len, request.pages)) * self._engine.limits.page_size
        most = self._runner.spec.ahead
        return max(0, min(most, request.max_len - length - 2, paged - length - 1))

    def _drafted(self, request: Request, room: int) -> DraftPlaces:
        if self._shape is None:
            return DraftPlaces(range(room), range(room - 1), room)
        steps, topk = self._shape.steps, self._shape.topk
        per_step = 1 if self._goes_one_way(request) else topk
        fronts = [
            [place for place in range(step * topk, step * topk + per_step) if place < room]
            for step in range(steps)
        ]
        num_candidates = per_step * (1 + sum(len(front) for front in fronts[:-1]))
        num = min(room, self._shape.num_nodes - 1, num_candidates)
        places = {place for front in fronts for place in front}
        return DraftPlaces(places | {*range(num)}, [p for f in fronts[:-1] for p in f], num)

    def _computed(self, length: int, room: int, drafted: DraftPlaces) -> tuple[Access, ...]:
        """Return the drafter's KV accesses, one per layer that takes turns, or one for all.

        A drafter with states stores (state, next token) pairs one place earlier, and has already
        computed the newest one. With layers that take turns, each layer computes what the layers
        before it have drafted, if its turn comes.
        """
        if self._num_turns > 1:
            turns = range(min(self._num_turns, room))
            accesses = [Access.over(length - turn, length) if turn else Access(0) for turn in turns]
            return *accesses, *[Access(0)] * (self._num_turns - len(accesses))
        is_pair = bool(self._states)
        places = [*drafted.computed] if is_pair else [-1, *drafted.computed]
        return (Access(length, _behind(length + 1 - is_pair, places).written),)

    def _follows(self, start: int, end: int) -> KvAccesses:
        """Return the drafter's KV accesses where it catches up on positions [start, end)."""
        turns = range(self._num_turns)
        accesses = tuple(Access.over(max(0, start - turn), max(0, end - turn)) for turn in turns)
        return dict.fromkeys(self._drafter_kv, accesses)

    def _passes_on(self, start: int) -> dict[str, Access]:
        """Return the accesses to the drafter's states where it catches up from `start` on. Each
        layer continues from the state of the layer before, if that one has a state yet."""
        turns = range(1, 1 + len(self._states))
        is_read = [turn < self._num_turns and start >= turn for turn in turns]
        accesses = [CHANGED if read else WRITTEN for read in is_read]
        return dict(zip(self._states, accesses, strict=True))

    def _goes_one_way(self, request: Request) -> bool:
        params = request.params
        has_penalty = params.frequency_penalty or params.presence_penalty
        return self._shape is None or bool(has_penalty) or params.repetition_penalty != 1

    def _answering(
        self,
        tokens: Sequence[int],
        length: int,
        *,
        room: int | None = None,
        num_stored: int | None = None,
        num_mtp_layers: int | None = None,
        resumes: bool = False,
        **sampling: Any,
    ) -> Request:
        """Admit a request whose tokens after the first `length` are its answer. If two tokens
        follow, they still belong to the prompt."""
        if length + self._most >= self._engine.limits.max_model_len:
            raise RequestError(
                f"the context has no room for {self._most} tokens after {length}: "
                "raise --max-model-len"
            )
        prompt_len = len(tokens)
        if prompt_len == length + 1:
            prompt_len = self._rng.randint(max(1, length - 1), length)
        sampling["max_tokens"] = None
        if room is not None:
            sampling |= {"max_tokens": length + 1 + room - prompt_len, "min_tokens": 0}
        return self._dummies.admit(
            tokens[:prompt_len],
            self._params(**sampling),
            length if num_stored is None else num_stored,
            answer=tokens[prompt_len:],
            num_mtp_layers=self._most if num_mtp_layers is None else num_mtp_layers,
            resumes=resumes,
        )

    def _leave(self, request: Request, num_drafts: int | None = None) -> None:
        """Fill in what earlier steps, or the slot's previous owner, left in columns that the host
        does not write."""
        if self._engine.worker.cycles:
            left = self._rng.randint(1, self._width) if num_drafts is None else num_drafts
            self._tables.stage(NUM_DRAFTS, request.slot, [left])
        if self._shape is not None:
            parents = [self._rng.randrange(node) for node in range(1, self._shape.num_nodes)]
            self._tables.stage(PARENTS, request.slot, parents, first=1)

    def _constrain(self, slot: int) -> None:
        """Mask logits like a grammar: one that allows every fourth token and is another in other
        slots, or where drafts must stay right, every other token."""
        allowed = 0x11111111 << slot % 3
        if self._runner.spec.width > 1:
            allowed = 0x55555555
        self._tables.stage("is_masked", slot, [1])
        self._tables.stage("allowed", slot, [allowed] * self._tables["allowed"].shape[1])

    def _params(self, **more: Any) -> SamplingParams:
        sampling = _SAMPLING[len(self._dummies.requests) % len(_SAMPLING)]
        return SamplingParams(**{**sampling, **more, "detokenize": False})

    def _length(self, reach: int, least: int = 0) -> int:
        """Return a random length; the first request gets the largest."""
        room = self._engine.limits.max_model_len - reach - 2
        most = max(least, min(self._most_stored(), room))
        return self._rng.randint(least, most) if self._dummies.requests else most

    def _start(self, reach: int, least: int = 0) -> int:
        """Return the position at which a computed row starts. With snapshots, every other row
        starts at one, or one or two tokens before it; some start at 0."""
        length, interval = self._length(reach, least), self._engine.limits.snapshot_interval
        room = self._engine.limits.max_model_len - reach - 2
        if self._recurrent is None or len(self._dummies.requests) % 2 == 0:
            return length
        starts = [0, interval, interval - 1, interval - 2] if interval else [0]
        fitting = [start for start in starts if least <= start <= room]
        return fitting[len(self._dummies.requests) // 2 % len(fitting)] if fitting else length

    def _may_resume(self, start: int) -> bool:
        """Return whether the row resumes from a snapshot: most rows that start at one do."""
        interval, (*_, last) = self._engine.limits.snapshot_interval, self._groups
        is_there = bool(interval) and start > 0 and start % interval == 0
        return is_there and last.pool.num_free > 0 and self._rng.random() < 0.7

    def _states_from(self, start: int, resumes: bool) -> dict[str, Access]:
        """Return the accesses to recurrent states. A row that starts at 0, or resumes from a
        snapshot, does not read the slot's own state."""
        if self._recurrent is None:
            return {}
        names = stored(STATES, self._recurrent)
        return dict.fromkeys(names, WRITTEN if resumes or start == 0 else CHANGED)

    def _snapshots(self, start: int, end: int) -> Snapshots | None:
        interval = self._engine.limits.snapshot_interval
        if not interval:
            return None
        reads = [start // interval - 1] if start and start % interval == 0 else []
        return Snapshots(reads, range(start // interval, end // interval))

    @property
    def _groups(self) -> Sequence[KvPool]:
        return self._engine.schedulers[0].ledger.groups

    def _most_stored(self) -> int:
        """Return a number of tokens large enough for pages to leave a sliding window, unless the
        window is wide."""
        limits = self._engine.limits
        narrow = [w for w in limits.windows.values() if w is not None and w <= WIDE_WINDOW]
        return max([MOST_STORED, *(window + 2 * limits.page_size for window in narrow)])

    def _token(self, first: int) -> int:
        """Return the first token in first, first + 2, ... that is not an end-of-sequence token."""
        ids = range(first, self._vocab, 2)
        return next(i for i in ids if i not in self._engine.eos_token_ids)

    def _random(self, num: int) -> list[int]:
        return [self._rng.randrange(self._vocab) for _ in range(num)]

    def _unlike(self, num: int) -> list[int]:
        """Return distinct tokens."""
        return self._rng.sample(range(self._vocab), num)
