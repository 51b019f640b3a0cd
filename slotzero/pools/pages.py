"""The pool of KV pages: it counts the owners of each page.

It does not know the contents of a page or its owners (requests and the prefix cache). The rule:
padded rows read page 0, so it is never given out; every other page is free exactly when its count
is 0.

The page that was freed last is given out first. That keeps the touched memory small, and code that
still reads a freed page sees foreign data at once, in the first test, instead of only after the
pool has run out of other pages.

Layers that need the same pages of a request form a KV group with its own pool (`KvPool`). Snapshots
of recurrent states are given out like pages: each belongs to the page at whose end it was taken.
"""

from typing import NamedTuple

from slotzero.errors import CapacityError, PoolError


class PagePool:
    """Pages 1 to num_pages - 1."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise CapacityError(f"{num_pages} KV pages: at least 1 is needed in addition to page 0")
        self.num_pages = num_pages
        # _free holds each page >= 1 with _references[page] == 0, once
        self._free = list(range(num_pages - 1, 0, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def max_free(self) -> int:
        """Value of num_free when no page is owned."""
        return self.num_pages - 1

    def take(self, n: int) -> list[int]:
        """Take n free pages; the caller is the only owner of each."""
        if n > len(self._free):
            raise PoolError(f"{n} pages requested, {len(self._free)} are free: evict pages first")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a page that has one."""
        self._require_owned(page, "shared")
        self._references[page] += 1

    def release(self, page: int) -> int:
        """Remove one owner, and return how many are left. Without owners the page is free."""
        self._require_owned(page, "released")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)
        return self._references[page]

    def references(self, page: int) -> int:
        """Return the number of owners of a page."""
        self._require_in_pool(page)
        return self._references[page]

    def check(self) -> None:
        if self._references[0] or 0 in self._free:
            raise PoolError("page 0, which is reserved for padding, was given out")
        unowned = [page for page in range(1, self.num_pages) if self._references[page] == 0]
        if sorted(self._free) != unowned:
            raise PoolError(f"free pages are {sorted(self._free)}, but a recount finds {unowned}")
        if min(self._references) < 0:
            page = self._references.index(min(self._references))
            raise PoolError(f"page {page} has a negative number of owners")

    def _require_in_pool(self, page: int) -> None:
        if not 1 <= page < self.num_pages:
            raise PoolError(f"page {page} is not in this pool of pages 1 to {self.num_pages - 1}")

    def _require_owned(self, page: int, verb: str) -> None:
        self._require_in_pool(page)
        if self._references[page] == 0:
            raise PoolError(f"page {page} was {verb}, but it is free")


class KvPool(NamedTuple):
    """The pool of a KV group, and the positions that its layers read: all, or a window."""

    pool: PagePool
    window: int | None = None
    """The token at position p reads the keys of positions p - window + 1 to p. None: 0 to p."""
    interval: int = 0
    """Tokens between two snapshots; 0 for a group of KV. A request that continues from a snapshot
    reads the last one. If no row is free, no snapshot is taken."""

    @property
    def is_whole(self) -> bool:
        """Whether every position keeps its page as long as the request runs."""
        return self.window is None and not self.interval

    def first_read(self, position: int, page_size: int) -> int:
        """Return the index of the first page that the token at this position reads."""
        if self.interval:
            return max(0, position // self.interval * self.interval // page_size - 1)
        return 0 if self.window is None else max(0, position - self.window + 1) // page_size


def reach(batch: int, ahead: int, behind: int) -> int:
    """Return the number of tokens for which a request needs windowed pages beyond its window.

    These are the tokens of a chunk and the drafts after it, or the drafts of a step, of the
    uncommitted steps before it and of the next step.
    """
    return max(batch + ahead, 4 * ahead + behind)
