"""The scheduler: it chooses the requests of the next step, and takes their new tokens afterwards.

It knows requests, slots and pages, but neither tensors nor text. `choose` and `advance` plan its
part of a step, which dp_schedulers.py joins with those of the other DP ranks. Requests advance as
if the step had run, because the engine launches every step it plans, in order, on one stream.
`commit` may come one or more steps later. Until then a sampled token is in flight: it has a
position, but no id yet. A launched step may still use what `commit` frees; that is safe, because
the write that gives the slot or page to another request is applied after it.

A prompt that exceeds the token budget of a step is computed over several (chunked prefill).

The rules it keeps:

- Requests are served by priority, then by arrival (request_queue.py). Without priorities that is
  first come, first served: every running request arrived before every waiting one, and the oldest
  always advances, unless it waits for the commit of its own sample. A waiting request takes nothing
  from a running one, whatever its priority.
- Pages for a whole prompt are taken at admission, so only decoding takes more later. When none are
  left, the last running request in that order is preempted: it waits again and is recomputed.
- A prompt is chunked only when it exhausts the step's tokens, and no request is admitted before it
  is complete. So at most one running request is short of its target. A step has decodes first, then
  that chunk, then new requests.
- In a KV group with a window, pages are taken chunk by chunk. If there are too few, the chunk skips
  the step rather than being preempted, which would waste its work. The other running requests free
  pages when they end, and if it is the only one, the chunk always fits.
- The tokens that a grammar allows depend on the last token, so a request with a grammar skips steps
  while its sample is in flight and until its mask has arrived. Other requests continue. If it was
  preempted meanwhile, no request behind it in the queue is admitted first.
- A step that verifies drafts contains decodes only. How many tokens each row gains is known late,
  so pages are taken for the maximum: later tokens use them if these do not.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slotzero.engine.request_queue import RequestQueue
from slotzero.errors import CapacityError, ConfigError, PoolError, RequestError
from slotzero.pools.ledger import PageLedger
from slotzero.pools.pages import KvPool, reach
from slotzero.pools.slots import SlotPool
from slotzero.request import FinishReason, Request, RequestStatus
from slotzero.step import Row


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    """Maximum number of running requests."""
    max_num_batched_tokens: int
    """Maximum number of tokens in one step; at least max_num_seqs."""
    max_model_len: int
    """Maximum length of prompt plus output of one request."""
    page_size: int
    """Tokens per page of the KV cache."""
    ahead: int = 0
    """Maximum number of positions after the newest token that drafts of a request occupy."""
    depth: int | None = None
    """Depth of the draft tree: the maximum number of drafts that can be accepted together. None:
    drafts are a chain, and it is `ahead`."""
    most_behind: int | None = None
    """Maximum number of decoded tokens that the drafter has not processed; None: no drafter."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:  # decodes could starve a chunk
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running request advances"
            )


class SlotWriter(Protocol):
    """Writer of table rows. Calls come in the order in which the device must see the writes. Writes
    from before a step was planned must be applied before that step runs."""

    def admitted(
        self, request: Request, tokens: list[int], num_computed: int, pages: list[list[int]]
    ) -> None:
        """Write tokens, length, `request.target` and the pages of each KV group to the row of
        `request.slot`."""

    def pages_changed(
        self, request: Request, group: int, first_index: int, pages: list[int]
    ) -> None:
        """Write these pages to the page table of the group, from this index on: new pages, or
        zeros where pages were released and may soon belong to another request."""

    def constrained(self, request: Request) -> None:
        """Restrict the next sample to the tokens that `request.grammar` allows now, without
        `request.banned_ids`."""

    def released(self, slot: int) -> None:
        """Reset the row of a slot that has no owner any more."""


class Choice(NamedTuple):
    """The requests of the next step."""

    decoding: list[Request]
    prefilling: list[Row]


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        slots: SlotPool,
        groups: Sequence[KvPool],
        writer: SlotWriter,
    ) -> None:
        self.config = config
        self.slots = slots
        self.ledger = PageLedger(
            groups,
            config.page_size,
            config.enable_prefix_caching,
            config.ahead,
        )
        self.writer = writer
        self.num_preemptions = 0
        self.admits = True
        """Whether waiting requests may begin."""
        self.before_release: Callable[[Request], None] | None = None
        """Called before a request releases its pages, if it is preempted or ends without error."""
        self._running = RequestQueue()
        self._waiting = RequestQueue()
        self._last_arrival: int | None = None
        for group in groups:
            self._require_room_for_one(group)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        prompt_len = len(request.prompt_token_ids)
        longest = self.config.max_model_len + request.params.pooled  # its last token is dropped
        if not 1 <= prompt_len < request.max_len <= longest:
            raise RequestError(
                f"request {request.id}: a prompt of {prompt_len} tokens with max_len="
                f"{request.max_len} does not fit max_model_len={self.config.max_model_len}"
            )
        if request.id in self._running or request.id in self._waiting:
            raise RequestError(f"request {request.id}: this id is in use; choose another")
        if self._last_arrival is not None and request.arrival <= self._last_arrival:
            raise RequestError(
                f"request {request.id}: arrival {request.arrival} is not after {self._last_arrival}"
            )
        self._last_arrival = request.arrival
        self._waiting.add(request)

    def choose(self, width: int) -> Choice:
        """Choose the requests of the next step, and take their pages. `width` applies to a step in
        which every row decodes: above 1, the step verifies drafts."""
        num_preemptions = self.num_preemptions
        decoding, chunked = self._continue_running(self._most_new(width))
        budget = self.config.max_num_batched_tokens - len(decoding)
        prefilling = [] if chunked is None else self._chunk(chunked, budget)
        has_chunk = chunked is not None and chunked.num_computed < chunked.target
        # after a preemption, the freed pages are for the preempted
        if self.admits and not has_chunk and self.num_preemptions == num_preemptions:
            prefilling += self._admit_waiting(budget - sum(row.count for row in prefilling))
        return Choice(decoding, prefilling)

    def advance(self, choice: Choice, width: int) -> tuple[Row, ...]:
        """Advance the chosen requests by a step of this width, which is 1 if any request
        prefills."""
        most_new = self._most_new(width)
        decoding = [r for r in choice.decoding if width > 1 or not _may_be_done(r)]
        rows = (*(_decode(request, most_new) for request in decoding), *choice.prefilling)
        for row in rows:
            if row.samples and row.request.is_masked:
                self.writer.constrained(row.request)
        return rows

    def remember(self, rows: Iterable[Row]) -> None:
        """Put the pages of prompts that these rows compute into the prefix cache, for later steps:
        within a step, no row may read what another writes. Pages that the drafter has not processed
        are left out."""
        for row in rows:
            if row.start < row.request.target:
                self.ledger.remember(row.request)

    def commit(
        self, rows: Sequence[Row], sampled: Sequence[Sequence[int]]
    ) -> list[tuple[Request, int]]:
        """Take the tokens of a step, by row, and return the requests that gained tokens with their
        number. Rows that did not sample, and rows whose request has ended since, are skipped."""
        receivers: list[tuple[Request, int]] = []
        for row, tokens in zip(rows, sampled, strict=True):
            if not row.samples:
                continue
            request = row.request
            request.num_in_flight -= 1
            request.max_tokens_in_flight -= row.most_new
            if request.status is RequestStatus.FINISHED:
                continue
            if (
                request.status is RequestStatus.RUNNING
            ):  # the KV of its last possible token is not computed
                num_computed = request.num_computed + len(tokens) - 1
                request.num_computed = min(num_computed, request.max_len - 1)
            receivers.append((request, self._receive(request, tokens)))
        return receivers

    def _receive(self, request: Request, tokens: Sequence[int]) -> int:
        """Append tokens to a request, and return how many it takes: accepted drafts after its end
        are dropped, and so is the token after a prompt of which a vector is wanted."""
        if request.params.pooled:
            self.finish(request, "stop")
            return 0
        if (
            request.grammar is None
            and request.num_tokens + len(tokens) < request.max_len
            and request.stop_ids.isdisjoint(tokens)
        ):
            request.output_token_ids += tokens  # most of the time
            return len(tokens)
        for num, token in enumerate(tokens, start=1):
            request.output_token_ids.append(token)
            if self._finish_if_done(request, token):
                return num
        return len(tokens)

    def settle(self, request: Request) -> bool:
        """End a request whose grammar has failed or allows no further token, or which has reached
        its maximum length; return whether it has ended."""
        if request.grammar is not None and request.grammar.failure:
            self.finish(request, "abort")
        elif request.grammar is not None and not request.grammar.can_go_on(request.banned_ids):
            self.finish(request, "stop")
        elif request.num_tokens >= request.max_len:
            self.finish(request, "length")
        return request.status is RequestStatus.FINISHED

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End a request in any state. For one that has ended only the reason changes: a stop string
        in the last possible token is a stop, not a length."""
        if request.status is RequestStatus.RUNNING:
            if reason != "abort":  # after a failed step nothing can be read
                self._call_before_release(request)
            self._vacate(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.lookup = None
        if request.grammar is not None:
            request.grammar.release()

    def abandon(self) -> None:
        """End all planned requests after a failed step. How much of it was computed is unknown, so
        the prefix cache is emptied."""
        for request in [*self._running, *self._waiting]:
            if request.status is RequestStatus.RUNNING or request.num_in_flight:
                self.cancel(request)
        self.ledger.cache.clear()

    def cancel(self, request: Request) -> None:
        if request.status is not RequestStatus.FINISHED:
            self.finish(request, "abort")

    def preempt_last(self) -> Request:
        """Take slot and pages from the last running request, which is computed again later: the
        youngest of those with the highest priority value."""
        request = self._running.last
        self._call_before_release(request)
        self._vacate(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(request)
        return request

    def preempt_all(self) -> list[Request]:
        """Preempt every running request, so that it is recomputed; return all preempted ones."""
        while self._running:
            self.preempt_last()
        return [request for request in self._waiting if request.num_preemptions]

    def check(self) -> None:
        """Recount everything that is owned, and the order of the queues."""
        running, waiting = list(self._running), list(self._waiting)
        self.slots.check()
        self.ledger.check(running)
        slots = {request.slot for request in running}
        if len(slots) != len(running) or self.slots.num_free + len(slots) != self.slots.num_slots:
            raise PoolError(
                f"{len(running)} requests run in {len(slots)} of {self.slots.num_slots} slots"
            )
        for priority in {request.params.priority for request in running + waiting}:
            self._check_arrival_order(
                [r for r in running + waiting if r.params.priority == priority]
            )
        num_chunks = sum(request.num_computed < request.target for request in running)
        if num_chunks > 1:
            raise PoolError(f"{num_chunks} requests are short of their targets, at most 1 may be")
        for request in running:
            self._check_running(request)
        for request in waiting:
            holds = request.slot or request.pages or request.num_computed
            if holds or request.status is not RequestStatus.WAITING:
                raise PoolError(f"request {request.id} waits, but holds a slot, pages or KV")

    def _require_room_for_one(self, group: KvPool) -> None:
        config, max_len = self.config, self.config.max_model_len
        batch = reach(config.max_num_batched_tokens, config.ahead, config.most_behind or 0)
        if group.interval:
            asked = f"a step of {batch} tokens with snapshot_interval={group.interval} needs"
            remedy = "raise snapshot_interval or lower max_num_batched_tokens"
            needed = min(batch, max_len) // group.interval + 1
        elif group.window is None:
            asked, remedy = f"max_model_len={max_len} needs", "lower it"
            needed = self.ledger.pages_for(max_len)
        else:  # a window and a chunk, which may begin in the middle of a page
            tokens = config.max_num_batched_tokens
            asked = f"a window of {group.window} with max_num_batched_tokens={tokens} needs"
            remedy = "lower max_num_batched_tokens or max_model_len"
            needed = self.ledger.pages_for(min(max_len, group.window - 1 + batch)) + 1
        if needed > group.pool.max_free:
            what = "snapshots" if group.interval else "pages of KV"
            raise CapacityError(
                f"{asked} {needed} {what}, there are {group.pool.max_free}; "
                f"{remedy} or give more memory"
            )

    def _most_new(self, width: int) -> int:
        """Return the maximum number of tokens that a row of a step of this width gains."""
        depth = self.config.ahead if self.config.depth is None else self.config.depth
        return min(width, depth + 1)

    def _continue_running(self, most_new: int) -> tuple[list[Request], Request | None]:
        """Return the requests that decode, with pages taken, and the one whose prompt is not
        complete, if there is one."""
        decoding: list[Request] = []
        chunked: Request | None = None
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING or request.num_known >= request.max_len:
                continue  # preempted in this loop, or its last token is in flight
            if request.is_masked and (request.num_in_flight or request.awaits_mask):
                continue
            if request.num_computed < request.target:
                chunked = request
            elif self._has_pages(request, most_new):
                decoding.append(request)
        if chunked is not None and chunked.status is not RequestStatus.RUNNING:
            chunked = None  # preempted for one that decodes
        return decoding, chunked

    def _chunk(self, request: Request, budget: int) -> list[Row]:
        count = min(budget, request.target - request.num_computed)
        end = request.num_computed + count
        wanted = min(end + self.ledger.ahead, request.max_len)
        if wanted > request.num_paged and not self._grow(request, wanted):
            return []
        return [_advance(request, count, samples=end == request.target)]

    def _has_pages(self, request: Request, most_new: int) -> bool:
        """Return whether there are pages for the next token, and for the drafts before and after
        it."""
        needed = min(request.most_known + most_new - 1, request.max_len)
        if needed <= request.num_paged - self.ledger.ahead:
            return True
        wanted = min(needed + self.ledger.ahead, request.max_len)
        return self._take_pages(request, wanted) or (
            needed <= request.num_paged or self._grow(request, needed)
        )

    def _admit_waiting(self, budget: int) -> list[Row]:
        rows: list[Row] = []
        while budget and self._waiting and self._has_free_slot():
            request = self._waiting.first
            if not self._admit(request, budget):
                break
            missing = request.target - request.num_computed
            rows.append(_advance(request, min(budget, missing), samples=missing <= budget))
            budget -= rows[-1].count
        return rows

    def _has_free_slot(self) -> bool:
        return self.slots.num_free > 0 and len(self._running) < self.config.max_num_seqs

    def _admit(self, request: Request, budget: int) -> bool:
        # a token, or a mask, that the host cannot write to the new row yet
        if request.num_in_flight or request.awaits_mask:
            return False
        # one page is kept for each running request, or the new one would be preempted for it
        if not self.ledger.admit(request, budget, spare=len(self._running)):
            return False
        self._waiting.remove(request)
        self._running.add(request)
        request.status = RequestStatus.RUNNING
        request.slot = self.slots.take()
        request.target = request.num_tokens
        pages = [list(of_group) for of_group in request.pages]
        self.writer.admitted(request, request.all_token_ids, request.num_computed, pages)
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Take pages up to num_tokens, and preempt the last request if there are too few; return
        False if that is the request itself."""
        while not self._take_pages(request, num_tokens):
            if request.num_computed < request.target:
                return False  # a chunk waits for the others
            if self.preempt_last() is request:
                return False
        return True

    def _take_pages(self, request: Request, num_tokens: int) -> bool:
        changes = self.ledger.grow(request, num_tokens)
        for change in changes or ():
            self.writer.pages_changed(request, *change)
        return changes is not None

    def _call_before_release(self, request: Request) -> None:
        if self.before_release is not None:
            self.before_release(request)

    def _vacate(self, request: Request) -> None:
        self._running.remove(request)
        self.ledger.release(request)
        self.slots.give_back(request.slot)
        self.writer.released(request.slot)
        request.slot = 0

    def _finish_if_done(self, request: Request, token: int) -> bool:
        num_outputs = len(request.output_token_ids)
        if token in request.stop_ids and num_outputs >= request.params.min_tokens:
            asked_for = token in request.params.stop_token_ids
            self.finish(request, "stop", token if asked_for else None)
        elif request.grammar is not None and not request.grammar.advance(token):
            self.finish(request, "abort")  # its grammar says why, or its logits were broken
        elif not request.awaits_mask:
            self.settle(request)
        return request.status is RequestStatus.FINISHED

    def _check_arrival_order(self, requests: Sequence[Request]) -> None:
        """Check the order of requests with one priority: the running ones, then the waiting."""
        arrivals = [request.arrival for request in requests]
        if arrivals != sorted(arrivals):
            raise PoolError("a request is queued before one that arrived earlier")
        running = [request for request in requests if request.id in self._running]
        for request in running[:-1]:
            if request.num_computed < request.target:
                raise PoolError(f"request {request.id} is short of its target, not the youngest")

    def _check_running(self, request: Request) -> None:
        if request.status is not RequestStatus.RUNNING or not self.slots.is_taken(request.slot):
            raise PoolError(f"request {request.id} runs in slot {request.slot} of another request")
        if not request.num_computed < request.num_known <= request.max_len:
            raise PoolError(f"request {request.id} was planned past what is known or allowed")


def _may_be_done(request: Request) -> bool:
    """Return whether the request may have ended on the device: if all its drafts were accepted, it
    must not continue, and only the step that verifies them knows."""
    return request.most_known >= request.max_len


def _decode(request: Request, most_new: int) -> Row:
    return _advance(request, 1, samples=True, most_new=most_new)


def _advance(request: Request, count: int, *, samples: bool, most_new: int = 1) -> Row:
    start = request.num_computed
    request.num_computed = start + count
    if samples:
        request.num_in_flight += 1
        request.max_tokens_in_flight += most_new
    return Row(
        request,
        request.slot,
        start,
        count,
        samples,
        most_new,
        request.is_scored_at(start),
        request.params.pooled,
    )
