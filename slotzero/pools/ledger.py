"""The ledger: which pages each request holds, and when a page may be shared.

It updates `pages`, `num_paged`, `num_computed` and `num_cached` of a request, using the pools that
count owners and the cache that finds prefixes. It does not know slots, steps, or which request
should run. Its rule, in each KV group, with `first` the first page that the token at num_computed
reads, `full = num_computed // page_size` and `cached = num_cached // page_size`:

    pages[0 : first)      windowed groups only (else first is 0): 0 where the page was released
    pages[first : cached) from the cache: shared with other requests, never written again
    pages[cached : full)  written by this request; the cache may have adopted them
    pages[full : ]        still to be written: this request is the only owner

A page enters the cache only when all its positions are both computed (by a step that is already
planned; later steps run after it on the same stream) and committed (the host knows the tokens).

Windowed pages are released when the next ones are taken, so a decoding request holds at most the
pages of its window. By then, the pages of its prompt have been offered to the cache. The pages of
its answer have not: few requests would continue from the middle of an answer.

Snapshots of recurrent states are the last group. They have a row for each page at whose end a
snapshot is taken, and 0 for other pages. A row is assigned before the step that takes the snapshot;
if no row is free, the request continues without this snapshot. A request holds the last snapshot
that it has passed, which a release offers to the cache, and the later ones.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from slotzero.errors import PoolError
from slotzero.pools.pages import KvPool
from slotzero.pools.prefix import Lookup, PrefixCache


class PageHolder(Protocol):
    """The fields of a request that the ledger reads and writes; request.py defines them."""

    pages: list[list[int]]
    lookup: Lookup | None
    num_paged: int
    num_computed: int
    num_cached: int
    num_found: int
    num_behind: int

    @property
    def id(self) -> str: ...
    @property
    def max_len(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def prefix_ids(self) -> list[int]: ...
    @property
    def reads_cache(self) -> bool: ...


class PageChange(NamedTuple):
    """A change of a group's page table: the new pages from an index on, 0 for released ones."""

    group: int
    first_index: int
    pages: list[int]


class PageLedger:
    def __init__(
        self,
        groups: Sequence[KvPool],
        page_size: int,
        enable_prefix_caching: bool = True,
        ahead: int = 0,
    ) -> None:
        """Create a ledger without requests.

        `ahead` is the number of positions after the last known one that need pages, for drafts.
        """
        self.groups = tuple(groups)
        self.ahead = ahead
        self.page_size = page_size
        self.cache = PrefixCache(self.groups, page_size)
        self.enable_prefix_caching = enable_prefix_caching
        self._has_window = any(not group.is_whole for group in self.groups)
        self._paged = [g for g, group in enumerate(self.groups) if not group.interval]

    # by group; num_pages == num_used + num_cached + free

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Number of pages that can be given out."""
        return tuple(self.groups[g].pool.max_free for g in self._paged)

    @property
    def num_used(self) -> tuple[int, ...]:
        """Number of pages that requests own."""
        return tuple(
            total - left for total, left in zip(self.num_pages, self.num_available, strict=True)
        )

    @property
    def num_cached(self) -> tuple[int, ...]:
        """Number of pages that only the cache owns."""
        return tuple(self.cache.num_evictable(g) for g in self._paged)

    @property
    def num_available(self) -> tuple[int, ...]:
        """Number of pages that no request owns: free ones, and those of the cache alone."""
        return tuple(map(self._num_available, self._paged))

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def admit(self, request: PageHolder, budget: int, spare: int = 0) -> bool:
        """Take cached and new pages, if `spare` pages of each group remain for other requests.

        Return whether that was possible. Whole groups get pages for every known token, windowed
        groups for the first chunk of at most `budget` tokens.
        """
        lookup = self._look_up(request)
        num_tokens, num_cached = request.num_tokens, lookup.num_pages * self.page_size
        chunk_end = min(num_cached + budget, num_tokens)
        num_fresh = [
            self.pages_for(
                min(
                    (num_tokens if group.is_whole else chunk_end) + self.ahead,
                    request.max_len,
                )
            )
            - lookup.num_pages
            for group in self.groups
        ]
        for g in self._paged:
            if num_fresh[g] + spare > self._num_available(g) - self.cache.num_idle(lookup, g):
                self.cache.keep_young(lookup)
                return False
        request.pages = [
            pages + self._take(g, len(pages), num_fresh[g], num_cached)
            for g, pages in enumerate(self.cache.match(lookup))
        ]
        request.lookup = None
        request.num_computed = request.num_cached = num_cached
        self._set_num_paged(request, num_cached, chunk_end)
        if not request.num_preemptions:  # a preempted request finds pages that it stored itself
            request.num_found = num_cached
            self.cache.stats.num_asked_tokens += num_tokens
            self.cache.stats.num_hit_tokens += num_cached
        return True

    def grow(
        self, request: PageHolder, num_tokens: int, num_stored: int | None = None
    ) -> list[PageChange] | None:
        """Take pages to compute positions [num_stored, num_tokens), and release those before the
        window.

        `num_stored` is num_computed by default. Return the changes, or, if there are too few pages,
        change nothing and return None.
        """
        start = request.num_computed if num_stored is None else num_stored
        num_pages = self.pages_for(num_tokens)
        read_from = start - request.num_behind  # the drafter reads from here when it catches up
        firsts = [group.first_read(read_from, self.page_size) for group in self.groups]
        by_group = request.pages or [[0] * first for first in firsts]
        passed = [self._passed(g, first, by_group[g]) for g, first in enumerate(firsts)]
        for g in self._paged:
            pages = by_group[g]
            num_short = num_pages - len(pages) - self._num_available(g)
            if num_short > 0 and num_short > self._num_freed(g, [pages[i] for i in passed[g]]):
                return None
        changes: list[PageChange] = []
        for g, pages in enumerate(by_group):
            if passed[g]:
                changes.append(self._let_go(g, pages, passed[g]))
            if num_pages > len(pages):
                fresh = self._take(g, len(pages), num_pages - len(pages), start)
                changes.append(PageChange(g, len(pages), fresh))
                pages += fresh
        request.pages = by_group
        self._set_num_paged(request, start, num_tokens)
        return changes

    def remember(self, request: PageHolder) -> None:
        """Offer the full pages of a running request to the cache."""
        if self.enable_prefix_caching:
            self.cache.insert(self._cacheable(request), request.pages)

    def release(self, request: PageHolder) -> None:
        """Release all pages of a request; the full ones stay in the cache until evicted."""
        tokens = self._cacheable(request) if self.enable_prefix_caching else []
        self.cache.release(tokens, request.pages)
        request.pages = []
        request.num_paged = request.num_computed = request.num_behind = 0

    def check(self, requests: Iterable[PageHolder]) -> None:
        """Recount all owners, given every request that holds pages."""
        holders = list(requests)
        self.cache.check()
        for g, group in enumerate(self.groups):
            group.pool.check()
            owners = Counter(page for request in holders for page in request.pages[g] if page)
            owners.update(self.cache.pages(g))
            for page in range(1, group.pool.num_pages):
                counted = group.pool.references(page)
                if owners[page] != counted:
                    raise PoolError(
                        f"page {page} of group {g} counts {counted} owners, but a recount finds "
                        f"{owners[page]}"
                    )
        for request in holders:
            self._check_pages(request)

    def _num_available(self, group: int) -> int:
        return self.groups[group].pool.num_free + self.cache.num_evictable(group)

    def _look_up(self, request: PageHolder) -> Lookup:
        """Search the cache for a waiting request, whose tokens do not change while it waits."""
        if request.lookup is not None:
            self.cache.search(request.lookup)
        elif self.enable_prefix_caching and request.reads_cache:
            # At least one token must be computed: the first sample needs its logits.
            limit = request.num_tokens - 1
            request.lookup = self.cache.look_up(request.prefix_ids, limit)
        else:
            request.lookup = self.cache.look_up((), 0)
        return request.lookup

    def _take(self, group: int, first_index: int, n: int, start: int) -> list[int]:
        """Take n pages, from `first_index` on, for a request that continues from `start`."""
        if self.groups[group].interval:
            ends = range(first_index + 1, first_index + n + 1)
            return [self._take_row(group, end * self.page_size, start) for end in ends]
        pool = self.groups[group].pool
        if n > pool.num_free:
            self.cache.evict(group, n - pool.num_free)
        return pool.take(n)

    def _take_row(self, group: int, end: int, start: int) -> int:
        """Take a row for the snapshot after `end` tokens; return 0 if none is due or free."""
        pool, _, interval = self.groups[group]
        if end % interval or end <= start or not self._num_available(group):
            return 0
        if not pool.num_free:
            self.cache.evict(group, 1)
        return pool.take(1)[0]

    def _num_freed(self, group: int, pages: list[int]) -> int:
        """Return how many pages become available when a request releases these."""
        return sum(self.cache.is_last_owner(group, page) for page in pages)

    def _passed(self, group: int, first: int, pages: list[int]) -> range:
        """Return the indices that a request may release if it reads pages from `first` on."""
        interval = self.groups[group].interval
        if interval:
            return _taken_before(first, pages, interval // self.page_size)
        return _held_before(first, pages)

    def _let_go(self, group: int, pages: list[int], passed: range) -> PageChange:
        zeros = [0] * len(passed)
        self.cache.let_go(group, filter(None, pages[passed.start : passed.stop]))
        pages[passed.start : passed.stop] = zeros
        return PageChange(group, passed.start, zeros)

    def _set_num_paged(self, request: PageHolder, num_stored: int, num_tokens: int) -> None:
        """Set num_paged.

        After a chunk of several tokens a windowed group has pages to release, so num_paged makes
        sure that `grow` is called for the next token.
        """
        if self._has_window and num_tokens > num_stored + 1:
            request.num_paged = num_tokens
        else:
            request.num_paged = min(map(len, request.pages)) * self.page_size

    def _cacheable(self, request: PageHolder) -> list[int]:
        return request.prefix_ids[: request.num_computed - request.num_behind]

    def _check_pages(self, request: PageHolder) -> None:
        if not request.num_computed <= request.num_paged:
            raise PoolError(
                f"request {request.id} computed more than the {request.num_paged} tokens that "
                "have pages"
            )
        for g, group in enumerate(self.groups):
            pages = request.pages[g]
            if len(pages) * self.page_size < request.num_paged:
                raise PoolError(f"request {request.id} has {len(pages)} pages of group {g}")
            if group.interval:
                self._check_snapshots(request, pages, group)
                continue
            first = group.first_read(request.num_computed, self.page_size)
            held = [page for page in pages if page]
            if 0 in pages[first:] or pages[len(pages) - len(held) :] != held:
                raise PoolError(f"request {request.id} released a page of group {g} that it reads")
            for page in pages[request.num_computed // self.page_size :]:
                if group.pool.references(page) != 1:
                    raise PoolError(
                        f"page {page} of group {g} is shared, but request {request.id} will write "
                        "to it"
                    )
        for g, pages in enumerate(request.pages):
            self._check_companions(request, g, pages)

    def _check_snapshots(self, request: PageHolder, rows: list[int], group: KvPool) -> None:
        for i, row in enumerate(rows):
            end = (i + 1) * self.page_size
            if row and end % group.interval:
                raise PoolError(
                    f"request {request.id} has a snapshot after {end} tokens, where none is due"
                )
            if row and end > request.num_computed and group.pool.references(row) != 1:
                raise PoolError(
                    f"snapshot {row} is shared, but request {request.id} will write to it"
                )

    def _check_companions(self, request: PageHolder, group: int, pages: list[int]) -> None:
        """Check that the owner of any page of a node also owns the node's pages of whole groups."""
        for i, page in enumerate(pages):
            for g, companion in enumerate(self.cache.companions(group, page)):
                if self.groups[g].is_whole and companion != request.pages[g][i]:
                    raise PoolError(
                        f"request {request.id} owns page {page} of group {group}, but not page "
                        f"{companion} of group {g}, which the cache keeps in the same node"
                    )


def _held_before(stop: int, pages: list[int]) -> range:
    """Return the indices of the pages held before `stop`: one range, after the released pages."""
    start = stop
    while start and pages[start - 1]:
        start -= 1
    return range(start, stop)


def _taken_before(stop: int, rows: list[int], step: int) -> range:
    """Return the same range for snapshots.

    A snapshot is due every `step` pages, but may not have been taken.
    """
    taken = rows[step - 1 : stop : step]
    if not any(taken):
        return range(stop, stop)
    first = next(i for i, row in enumerate(taken) if row)
    return range((first + 1) * step - 1, stop)
