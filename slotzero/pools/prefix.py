"""The prefix cache: pages of KV that outlive their request, found again by their tokens.

A tree in which every edge is exactly one page of tokens: the path from the root spells a prefix,
and the node at its end names the page that holds the KV of its last edge. It does not know
requests, steps or what KV is. An owner that matched or offered pages hands its references back
through `release`, so that the cache can count which pages only it still owns.

The rule it keeps: whoever owns the page of a node owns the pages of all nodes above it, so

    references(parent) >= references(child) >= 1, the cache's own being one of them

and a page that only the cache owns has nothing but such pages below it. So what eviction can free
is their plain count, and taking leaves frees all of them. This is why `insert` stops where a node
holds another's page, while `release`, after which the caller owns nothing, may go on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from slotzero.errors import PoolError
from slotzero.pools.pages import PagePool

Key = tuple[int, ...]


@dataclass(slots=True)
class PrefixStats:
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    key: Key
    page: int
    parent: "_Node | None"
    children: dict[Key, "_Node"] = field(default_factory=dict)
    last_used: int = 0
    """When someone last offered or released it; while someone owns it, it is in use anyway."""
    is_queued: bool = False


class PrefixCache:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.stats = PrefixStats()
        self._clock = 0
        self._forget()

    @property
    def num_pages(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """How many pages evict() could free."""
        return self._num_evictable

    def pages(self) -> list[int]:
        return list(self._nodes)

    def match(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """The pages of the longest cached prefix of at most `limit` tokens, one reference each."""
        pages: list[int] = []
        node = self._root
        for key in self._keys(token_ids, limit // self.page_size):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            self._num_evictable -= self._is_idle(node)
            self.pool.share(node.page)
            pages.append(node.page)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Offer the full pages of a request that goes on; it stays an owner of all of them."""
        self._adopt(token_ids, pages, is_leaving=False)

    def release(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Offer the full pages of `token_ids`, then drop the caller's reference to every page."""
        self._adopt(token_ids, pages, is_leaving=True)
        for page in reversed(pages):
            self.pool.release(page)
            node = self._nodes.get(page)
            if node is not None:
                node.last_used = self._clock
                self._num_evictable += self._is_idle(node)
                self._enqueue(node)

    def evict(self, n: int) -> int:
        """Free up to n pages, the ones unused for longest first; says how many."""
        num_freed = 0
        while num_freed < n and self._queue:
            last_used, page = heappop(self._queue)
            node = self._nodes[page]
            node.is_queued = False
            if node.last_used == last_used and self._is_idle_leaf(node):
                self._remove(node)
                num_freed += 1
            else:  # used since it was queued: back to its new place, if it is still idle
                self._enqueue(node)
        self.stats.num_evicted_pages += num_freed
        return num_freed

    def clear(self) -> None:
        """Forget every prefix. Pages that requests own stay theirs."""
        for page in self._nodes:
            self.pool.release(page)
        self._forget()

    def check(self) -> None:
        found = self._recount(self._root)
        if found != self._nodes:
            raise PoolError(f"{len(self._nodes)} cached pages, the tree holds {len(found)}")
        num_idle = sum(self._is_idle(node) for node in found.values())
        if num_idle != self._num_evictable:
            raise PoolError(f"{self._num_evictable} evictable pages, a recount finds {num_idle}")
        queued = sorted(page for _, page in self._queue)
        if queued != sorted(page for page, node in found.items() if node.is_queued):
            raise PoolError("the eviction queue does not hold each queued page once")
        for node in found.values():
            self._check_node(node)

    def _forget(self) -> None:
        self._root = _Node(key=(), page=0, parent=None)
        self._nodes: dict[int, _Node] = {}
        # _num_evictable counts the nodes whose page only the cache owns: the idle ones
        self._num_evictable = 0
        # _queue holds (stamp, page) at most once per node, and for every idle leaf, with
        # stamp <= last_used: the smallest stamp that is up to date is the oldest idle leaf
        self._queue: list[tuple[int, int]] = []

    def _keys(self, token_ids: Sequence[int], max_pages: int) -> list[Key]:
        size = self.page_size
        num_pages = min(len(token_ids) // size, max_pages)
        return [tuple(token_ids[i * size : (i + 1) * size]) for i in range(num_pages)]

    def _adopt(self, token_ids: Sequence[int], pages: Sequence[int], *, is_leaving: bool) -> None:
        self._clock += 1
        node, owns_path = self._root, True
        for i, key in enumerate(self._keys(token_ids, len(pages))):
            child = node.children.get(key)
            if child is None:
                # below another's page, only what nobody but the leaving caller owns
                if not (owns_path or self.pool.references(pages[i]) == 1):
                    return
                child = self._attach(node, key, pages[i])
            elif child.page != pages[i]:
                if not is_leaving:
                    return
                owns_path = False
            node = child
            node.last_used = self._clock

    def _attach(self, parent: _Node, key: Key, page: int) -> _Node:
        if page in self._nodes:
            raise PoolError(f"page {page} is offered for a second prefix; it holds another")
        self.pool.share(page)  # now the offerer and the cache own it: not idle
        node = _Node(key=key, page=page, parent=parent)
        parent.children[key] = self._nodes[page] = node
        return node

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None  # the root is never queued
        del node.parent.children[node.key]
        del self._nodes[node.page]
        self._num_evictable -= 1
        self.pool.release(node.page)
        self._enqueue(node.parent)

    def _enqueue(self, node: _Node) -> None:
        if not node.is_queued and self._is_idle_leaf(node):
            node.is_queued = True
            heappush(self._queue, (node.last_used, node.page))

    def _is_idle(self, node: _Node) -> bool:
        return self.pool.references(node.page) == 1

    def _is_idle_leaf(self, node: _Node) -> bool:
        return node is not self._root and not node.children and self._is_idle(node)

    def _recount(self, node: _Node) -> dict[int, _Node]:
        found: dict[int, _Node] = {}
        unseen = list(node.children.values())
        while unseen:
            node = unseen.pop()
            found[node.page] = node
            unseen += node.children.values()
        return found

    def _check_node(self, node: _Node) -> None:
        parent, owners = node.parent, self.pool.references(node.page)
        if parent is None or parent.children.get(node.key) is not node:
            raise PoolError(f"cached page {node.page} hangs off the tree")
        if len(node.key) != self.page_size:
            raise PoolError(f"cached page {node.page} has a key of {len(node.key)} tokens")
        if owners < 1:
            raise PoolError(f"cached page {node.page} has no owner")
        if parent is not self._root and self.pool.references(parent.page) < owners:
            raise PoolError(f"cached page {node.page} has an owner that page {parent.page} lacks")
        if self._is_idle_leaf(node) and not node.is_queued:
            raise PoolError(f"cached page {node.page} is idle and can never be evicted")
