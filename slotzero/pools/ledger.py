"""The ledger: which pages each request holds, and when a page may be shared.

It keeps `pages`, `num_computed` and `num_cached` of a request, between the pool that counts owners
and the cache that finds prefixes. It does not know slots, steps, or who should run. The rule it
keeps, with `full = num_computed // page_size` and `cached = num_cached // page_size`:

    pages[0 : cached)     came from the cache: others own them too, nobody writes them again
    pages[cached : full)  written by this request; the cache may have adopted them
    pages[full : ]        still to be written: this request is the one owner

A page enters the cache only when it is full of positions that are both computed (by a step already
planned; later steps run after it on the one stream) and committed (the host knows the tokens).
"""

from collections import Counter
from collections.abc import Iterable

from slotzero.errors import PoolError
from slotzero.pools.pages import PagePool
from slotzero.pools.prefix import PrefixCache
from slotzero.request import Request


class PageLedger:
    def __init__(self, pool: PagePool, page_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self.page_size = page_size
        self.cache = PrefixCache(pool, page_size)
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def num_available(self) -> int:
        """Pages that nobody owns, or only the cache."""
        return self.pool.num_free + self.cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def admit(self, request: Request, spare: int = 0) -> bool:
        """Pages for every known token, found or fresh, if `spare` pages then remain for others."""
        tokens = request.all_token_ids
        found = self._match(tokens)
        num_fresh = self.pages_for(len(tokens)) - len(found)
        if num_fresh + spare > self.num_available:
            self.cache.release((), found)
            return False
        request.pages = found + self._take(num_fresh)
        request.num_computed = request.num_cached = len(found) * self.page_size
        self.cache.stats.num_asked_tokens += len(tokens)
        self.cache.stats.num_hit_tokens += request.num_cached
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Pages for the first `num_tokens` positions; False, and nothing changed, if too few."""
        num_fresh = self.pages_for(num_tokens) - len(request.pages)
        if num_fresh <= 0:
            return True
        if num_fresh > self.num_available:
            return False
        request.pages += self._take(num_fresh)
        return True

    def remember(self, request: Request) -> None:
        """Let later requests find what this one has computed while it goes on."""
        if self.enable_prefix_caching:
            self.cache.insert(self._cacheable(request), request.pages)

    def release(self, request: Request) -> None:
        """The request lets go of all its pages; the full ones stay findable until evicted."""
        tokens = self._cacheable(request) if self.enable_prefix_caching else []
        self.cache.release(tokens, request.pages)
        request.pages = []
        request.num_computed = 0

    def check(self, requests: Iterable[Request]) -> None:
        """Recount, given everyone who holds pages."""
        self.pool.check()
        self.cache.check()
        holders = list(requests)
        owners = Counter(page for request in holders for page in request.pages)
        owners.update(self.cache.pages())
        for page in range(1, self.pool.num_pages):
            if owners[page] != self.pool.references(page):
                counted = self.pool.references(page)
                raise PoolError(f"page {page} counts {counted} owners, a recount {owners[page]}")
        for request in holders:
            self._check_intervals(request)

    def _match(self, tokens: list[int]) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        # one token at least is computed: its logits are what the first sample needs
        return self.cache.match(tokens, limit=len(tokens) - 1)

    def _take(self, n: int) -> list[int]:
        self.cache.evict(n - self.pool.num_free)
        return self.pool.take(n)

    def _cacheable(self, request: Request) -> list[int]:
        return request.all_token_ids[: request.num_computed]

    def _check_intervals(self, request: Request) -> None:
        if len(request.pages) < self.pages_for(request.num_computed):
            raise PoolError(f"request {request.id} computed past its {len(request.pages)} pages")
        for page in request.pages[request.num_computed // self.page_size :]:
            if self.pool.references(page) != 1:
                raise PoolError(f"page {page} is shared, and request {request.id} will write it")
