"""Simulated device driven by a real scheduler, and checked against runs without any batching.

The device obeys only table writes and steps. Its KV cache is a chain of hashes: the entry of a
position depends on every token up to it, so a page that was shared, freed, reused or recomputed
wrongly never holds the right entries. In every KV group, each row reads everything that its tokens
may read, before and after the rows write. The next token is derived from the last entry. So if each
request gets the tokens that it gets alone, no decision of the scheduler changed an answer.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.engine.scheduler import Scheduler, SchedulerConfig
from slotzero.pools.pages import KvPool, PagePool
from slotzero.pools.slots import SlotPool
from slotzero.request import Request, RequestStatus
from slotzero.sampling.params import SamplingParams
from slotzero.step import Row, Step

VOCAB = 5


def next_token(entry: int) -> int:
    return entry % VOCAB


def tokens_alone(prompt: list[int], max_len: int) -> tuple[list[int], list[int]]:
    """Return all tokens up to max_len, ignoring stop ids, and the KV entry of each position."""
    tokens, entries = list(prompt), []
    while len(entries) < max_len:
        entries.append(hash((entries[-1] if entries else 0, tokens[len(entries)])))
        if len(entries) == len(tokens) < max_len:
            tokens.append(next_token(entries[-1]))
    return tokens, entries


def expected_answer(request: Request) -> tuple[list[int], str]:
    output = tokens_alone(request.prompt_token_ids, request.max_len)[0][
        len(request.prompt_token_ids) :
    ]
    for i, token in enumerate(output, 1):
        if token in request.stop_ids and i >= request.params.min_tokens:
            return output[:i], "stop"
        if request.grammar is not None and i == request.grammar.num_tokens:
            return output[:i], "stop"
    return output, "length"


@dataclass
class Counting:
    """A grammar that allows every token, and ends after a fixed number of them."""

    num_tokens: int
    num_taken: int = 0
    is_ready: bool = True
    failure: str = ""

    def advance(self, token: int) -> bool:
        self.num_taken += 1
        return True

    def can_go_on(self, banned: frozenset[int]) -> bool:
        return self.num_taken < self.num_tokens

    def release(self) -> None: ...


@dataclass
class SlotRow:
    tokens: list[int]
    length: int
    target: int
    pages: list[list[int]]
    drafter_len: int
    """Number of tokens that the drafter has computed, if there is a drafter."""
    num_constrained: int = -1
    """Number of tokens that were known when the grammar mask was last set."""


@dataclass
class Device:
    """Tables and KV cache as the device sees them; writes are staged until the next step."""

    page_size: int
    windows: Sequence[int | None]
    most_behind: int | None = None
    """How far the drafter may lag behind; None: no drafter. With one, the last group is its own."""
    num_caught_up: int = 0
    staged: list[tuple] = field(default_factory=list)
    table: dict[int, SlotRow] = field(default_factory=dict)
    kv: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """KV entries by group, page and offset in the page."""

    def admitted(self, request: Request, tokens, num_computed: int, pages) -> None:
        row = SlotRow(tokens, num_computed, request.target, pages, num_computed)
        self.staged.append(("admitted", request.slot, row))

    def pages_changed(self, request: Request, group: int, first_index: int, pages) -> None:
        assert pages
        self.staged.append(("pages", request.slot, group, first_index, pages))

    def constrained(self, request: Request) -> None:
        assert request.grammar.num_taken == len(request.output_token_ids)
        self.staged.append(("constrained", request.slot, request.num_tokens))

    def released(self, slot: int) -> None:
        self.staged.append(("released", slot))

    def launch(self, step: Step, dp_rank: int = 0) -> list[list[int]]:
        self._apply()
        rows = step.rows_by_dp_rank[dp_rank]
        slots = [row.slot for row in rows]
        assert len(set(slots)) == len(slots)
        assert step.catches_up <= (self.most_behind is not None)
        if step.catches_up:
            self.num_caught_up += 1
            self._follow(rows)
        starts = [self.table[slot].length for slot in slots]
        for row, start in zip(rows, starts, strict=True):
            assert row.start <= start if row.start >= row.request.target else row.start == start
            assert row.request.pages == self.table[row.slot].pages, "a change was not written"
            # every row reads before any row writes: no row may depend on other rows of the step
            self._read(row, start, start)
        sampled = [self._run(row, step.width) for row in rows]
        for row, start in zip(rows, starts, strict=True):  # nor may they overwrite its entries
            self._read(row, start, self.table[row.slot].length)
        if self.most_behind is not None:
            if not step.is_decode:
                assert all(
                    self.table[s].drafter_len == n for s, n in zip(slots, starts, strict=True)
                )
                self._follow(rows)
            behind = [self.table[slot].length - self.table[slot].drafter_len for slot in slots]
            assert max(behind, default=0) <= (self.most_behind if step.is_decode else 0)
        return sampled

    @property
    def _own_groups(self) -> range:
        """Return the indices of the model's own KV groups, without the drafter's."""
        return range(len(self.windows) - (self.most_behind is not None))

    def _follow(self, rows: Sequence[Row]) -> None:
        """Let the drafter compute the new tokens on top of those it has computed before."""
        group = len(self.windows) - 1
        for row in rows:
            own = self.table[row.slot]
            self._read_group(row, group, own.drafter_len, own.drafter_len)
            _, truth = tokens_alone(row.request.prompt_token_ids, row.request.max_len)
            for position in range(own.drafter_len, own.length):
                self.kv[self._place(row.slot, group, position)] = truth[position]
            own.drafter_len = own.length

    def _apply(self) -> None:
        for kind, slot, *rest in self.staged:
            if kind == "admitted":
                assert slot not in self.table, "the slot still belongs to another request"
                self.table[slot] = rest[0]
            elif kind == "pages":
                self._write_pages(self.table[slot].pages[rest[0]], rest[1], rest[2])
            elif kind == "constrained":
                self.table[slot].num_constrained = rest[0]
            else:
                del self.table[slot]
        self.staged.clear()

    def _write_pages(self, table: list[int], first: int, pages: list[int]) -> None:
        if any(pages):
            assert first == len(table) and all(pages)
            table += pages
        else:
            assert all(table[first : first + len(pages)]), "a page was released twice"
            assert not any(table[:first]), "a page was released before an older one"
            table[first : first + len(pages)] = pages

    def _place(self, slot: int, group: int, position: int) -> tuple[int, int, int]:
        page = self.table[slot].pages[group][position // self.page_size]
        assert page != 0
        return group, page, position % self.page_size

    def _read(self, row: Row, start: int, end: int) -> None:
        for group in self._own_groups:
            self._read_group(row, group, start, end)

    def _read_group(self, row: Row, group: int, start: int, end: int) -> None:
        _, truth = tokens_alone(row.request.prompt_token_ids, row.request.max_len)
        window = self.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        places = [self._place(row.slot, group, position) for position in range(first, end)]
        entries = [self.kv.get(place) for place in places]
        assert entries == truth[first:end], f"{row.request.id} reads KV that is not its own"

    def _run(self, row: Row, width: int) -> list[int]:
        """Return the tokens of a row; with a width above 1 it has drafts, some of them right."""
        own = self.table[row.slot]
        if width == 1:
            return self._compute(row, own, row.count)
        room = row.request.max_len - own.length - 1
        verify_len = min(width, room) if row.request.grammar is None else min(1, room)
        sampled: list[int] = []
        for i in range(verify_len):
            for group in range(len(self.windows)):  # wrong drafts are stored too
                self.kv[self._place(row.slot, group, own.length + verify_len - 1 - i)] = -1
        while len(sampled) < verify_len:
            sampled += self._compute(row, own, 1)
            if hash((own.length, sampled[-1])) % 3 == 0:
                break
        return sampled

    def _compute(self, row: Row, own: SlotRow, count: int) -> list[int]:
        _, truth = tokens_alone(row.request.prompt_token_ids, row.request.max_len)
        start = own.length
        entry = truth[start - 1] if start else 0
        for position in range(start, start + count):
            entry = hash((entry, own.tokens[position]))
            for group in self._own_groups:
                self.kv[self._place(row.slot, group, position)] = entry
        own.length += count
        assert row.samples == (own.length >= own.target)
        if row.samples:
            assert len(own.tokens) == own.length
            if row.request.grammar is not None:
                assert own.num_constrained == own.length
            own.tokens.append(next_token(entry))
        return [next_token(entry)] if row.samples else [-1]


class World:
    """An engine without a model: it plans and launches steps, and commits them later."""

    def __init__(
        self, num_pages: int | Sequence[int], windows: Sequence[int | None] = (None,), **config
    ) -> None:
        self.config = SchedulerConfig(**config)
        self.device = Device(self.config.page_size, windows, self.config.most_behind)
        counts = [num_pages] * len(windows) if isinstance(num_pages, int) else num_pages
        pools = zip(counts, windows, strict=True)
        self.groups = [KvPool(PagePool(count), window) for count, window in pools]
        slots = SlotPool(self.config.max_num_seqs)
        self.scheduler = Scheduler(self.config, slots, self.groups, self.device)
        self.schedulers = DpSchedulers([self.scheduler])
        self.pending: deque[tuple[Sequence[Row], list[list[int]]]] = deque()
        self.requests: list[Request] = []
        self.widths = random.Random(len(self.groups))
        self.num_right = 0
        """Number of drafts that were accepted."""
        self.num_sat_out = 0
        """Number of prefill chunks that sat out a step for lack of window pages."""
        self.num_preempted_by_priority = 0
        """Number of steps in which a request was preempted and a younger one was not."""

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 99,
        stop_ids=(),
        min_tokens=0,
        grammar=None,
        priority=0,
    ) -> Request:
        arrival = len(self.requests)
        request = Request(
            id=f"r{arrival}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, priority=priority),
            seed=0,
            arrival=arrival,
            stop_ids=frozenset(stop_ids),
            max_len=min(len(prompt) + max_tokens, self.config.max_model_len),
            grammar=grammar,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    @property
    def alive(self) -> list[Request]:
        return [r for r in self.requests if r.status is not RequestStatus.FINISHED]

    def launch(self) -> Step | None:
        # with priorities, the oldest may have to wait for younger ones
        is_first_come = not any(request.params.priority for request in self.alive)
        oldest = next(iter(self.alive), None) if is_first_come else None
        can_advance = oldest is not None and oldest.num_known < oldest.max_len
        waits = oldest is not None and (oldest.status is RequestStatus.WAITING or oldest.grammar)
        if waits and oldest.num_in_flight:
            can_advance = False  # it waits until its own sample is committed
        if oldest is not None and oldest.most_known >= oldest.max_len:
            can_advance = False  # it may be finished, if all drafts in flight are right
        before = list(self.alive)
        preemptions = {request: request.num_preemptions for request in before}
        was_running = {r for r in before if r.status is RequestStatus.RUNNING}
        step = self.schedulers.plan(self.widths.randint(1, 1 + self.config.ahead))
        self.scheduler.check()
        if can_advance:
            assert step is not None
            assert step.rows[0].request is oldest, "the oldest did not advance"
        self._inspect_order(was_running, preemptions)
        rows = {row.request for row in step.rows} if step else set()
        for request in self.alive:
            is_chunk = (
                request.status is RequestStatus.RUNNING and request.num_computed < request.target
            )
            self.num_sat_out += is_chunk and request not in rows
        if step is not None:
            self._inspect(step)
            for row in step.rows:
                assert row.request.num_preemptions == preemptions[row.request]
            self.pending.append((step.rows, self.device.launch(step)))
        return step

    def _inspect(self, step: Step) -> None:
        assert step.num_tokens <= self.config.max_num_batched_tokens
        num_decoding = sum(row.start >= row.request.target for row in step.rows)
        decoding = [_place(row.request) for row in step.rows[:num_decoding]]
        assert decoding == sorted(set(decoding))
        if not any(row.request.params.priority for row in step.rows):
            arrivals = [row.request.arrival for row in step.rows]
            assert arrivals == sorted(set(arrivals))
        for row in step.rows:
            assert row.request.status is RequestStatus.RUNNING
            assert row.count >= 1
            assert row.slot == row.request.slot != 0
            assert row.start + row.count < row.request.max_len
            self._inspect_pages(row)

    def _inspect_order(self, was_running: set[Request], preemptions: dict[Request, int]) -> None:
        """Check which requests a plan has admitted and preempted: no other came before them."""
        running = {r for r in self.alive if r.status is RequestStatus.RUNNING}
        waiting = [_place(r) for r in self.alive if r.status is RequestStatus.WAITING]
        admitted = [_place(request) for request in running - was_running]
        assert not waiting or not admitted or max(admitted) < min(waiting)
        preempted = [r for r in was_running if r.num_preemptions > preemptions[r]]
        assert not preempted or not admitted
        self.num_preempted_by_priority += any(
            r.arrival < other.arrival for r in preempted for other in running
        )
        for request in preempted:
            assert all(_place(other) < _place(request) for other in running)

    def _inspect_pages(self, row: Row) -> None:
        size = self.config.page_size
        for (_, window, _), pages in zip(self.groups, row.request.pages, strict=True):
            num_held = sum(page != 0 for page in pages)
            if window is None:
                assert num_held == len(pages)
            else:  # a window, a chunk and drafts of several steps, aligned to pages or not
                more = row.count + 5 * self.config.ahead + (self.config.most_behind or 0)
                assert num_held <= (window - 1 + more - 1 + size - 1) // size + 1

    def commit(self) -> None:
        rows, sampled = self.pending.popleft()
        alive = [row.samples and row.request in self.alive for row in rows]
        expected = [row.request for row, is_alive in zip(rows, alive, strict=True) if is_alive]
        tokens = [new for new, is_alive in zip(sampled, alive, strict=True) if is_alive]
        counts = [len(request.output_token_ids) for request in expected]
        received = self.scheduler.commit(rows, sampled)
        assert [request for request, _ in received] == expected
        for (request, num_new), before, new in zip(received, counts, tokens, strict=True):
            assert request.output_token_ids[before:] == new[:num_new]
            assert num_new == len(new) or request.status is RequestStatus.FINISHED
            self.num_right += num_new - 1
        self.scheduler.check()

    def turn(self) -> Step | None:
        """Run one turn of the engine: plan and launch step N + 1, then commit step N."""
        step = self.launch()
        if self.pending and (step is None or len(self.pending) > 1):
            self.commit()
        return step

    def drain(self) -> None:
        self.run_out()
        self.verify()

    def run_out(self) -> None:
        for _ in range(5000):
            if not (self.scheduler.has_work or self.pending):
                return
            could_commit = bool(self.pending)
            assert self.turn() is not None or could_commit, "deadlock: no step runs"
        raise AssertionError("the requests do not finish within 5000 turns")

    def verify(self) -> None:
        for request in self.requests:
            output, reason = expected_answer(request)
            assert request.status is RequestStatus.FINISHED
            assert request.num_in_flight == 0
            if request.finish_reason == "abort":
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (output, reason)
        ledger, cache = self.scheduler.ledger, self.scheduler.ledger.cache
        assert self.scheduler.slots.num_free == self.config.max_num_seqs
        assert ledger.num_used == (0,) * len(self.groups)
        assert ledger.num_cached == tuple(len(cache.pages(g)) for g in range(len(self.groups)))
        assert cache.num_pages == sum(ledger.num_cached)
        assert cache.num_pages == 0 or self.config.enable_prefix_caching
        cache.clear()
        assert ledger.num_pages == tuple(group.pool.num_free for group in self.groups)


def _place(request: Request) -> tuple[int, int]:
    return request.params.priority, request.arrival


def make_world(**changes) -> World:
    config = {
        "num_pages": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 24,
        "page_size": 4,
    }
    return World(**{**config, **changes})


def rows_of(step: Step | None) -> list[tuple[str, int, int, bool]]:
    return [(r.request.id, r.start, r.count, r.samples) for r in step.rows] if step else []
