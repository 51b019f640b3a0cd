"""The prefix cache: pages of KV that outlive their request and are found by their tokens.

It is a tree in which every edge is exactly one page of tokens. The path from the root to a node is
a prefix, and the node has, for each KV group, the page with the KV of its last edge, or 0. The
cache does not know requests, steps or what KV is. An owner that matched or offered pages returns
its references through `release` or `let_go`, so that the cache can count the idle pages: those that
no one else owns.

A hit of n nodes needs all their pages of whole groups, and in a windowed group the pages that the
next token reads. So a node has a page of every whole group, and may lack a page of a windowed
group; it stays as long as it, or a node below it, has a page. Snapshots of recurrent states are a
windowed group too: a hit needs the snapshot that was taken at its end.

The rule, if there is a whole group: the owner of any page of a node also owns the whole pages of
that node and of all nodes above it, so

    references(whole page of parent) >= references(whole page of child) >= 1
    references(whole page of node)   >= references(windowed page of node) >= 1, or there is none

including the cache's own reference. If only the cache owns the whole pages of a node, this is also
true for all nodes below it. So the number of pages that eviction can free is the number of idle
pages: removing leaves frees all whole pages, and a windowed page can be taken from any node. For
the same reason `insert` stops at a node with a page of another request, while `release`, after
which the caller owns nothing, may continue. If the node is idle and there are windows, `insert`
replaces its pages by the caller's. Otherwise a prefix that has lost the pages of its window would
be recomputed, and marked as recently used, by every request, but never found.

The prefix of a request that waits for memory is searched repeatedly. Its `Lookup` keeps the path
that was found, so the cost of a search depends on the changes since the last one, not on the length
of the prompt.

If all groups are windowed, an owner need not own a whole path, because a page can be freed before
the pages below it. Every page has its own owners, and any request adds pages that a node lacks.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from slotzero.errors import PoolError
from slotzero.pools.pages import KvPool

Key = tuple[int, ...]


@dataclass(slots=True)
class PrefixStats:
    num_asked_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_pages: int = 0


@dataclass(slots=True, eq=False)
class _Node:
    key: Key
    parent: "_Node | None"
    pages: list[int]
    """By group; 0: no page."""
    children: dict[Key, "_Node"] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Lookup:
    """A search for the longest hit of some tokens, and how far it has come."""

    token_ids: Sequence[int]
    max_pages: int
    num_idled: list[int]
    """By group: value of the cache's counter when the hit was last marked as recently used."""
    num_pages: int = 0
    """Number of pages of the longest hit at the last search."""
    path: list[_Node] = field(default_factory=list)
    """path[: num_pages] is the hit; further nodes exist, but lack pages of a windowed group."""
    root: _Node | None = None
    num_fills: int = -1
    """Value of the cache's counter at the last search."""


class PrefixCache:
    def __init__(self, groups: Sequence[KvPool], page_size: int) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self.stats = PrefixStats()
        self._whole = [g for g, group in enumerate(groups) if group.is_whole]
        self._windowed = [g for g, group in enumerate(groups) if not group.is_whole]
        self._forget()

    @property
    def num_pages(self) -> int:
        """Number of pages of all groups together."""
        return sum(map(len, self._nodes))

    def num_evictable(self, group: int) -> int:
        """Return the number of pages that `evict` can free."""
        return len(self._idle[group])

    def pages(self, group: int) -> list[int]:
        return list(self._nodes[group])

    def companions(self, group: int, page: int) -> Sequence[int]:
        """Return the pages, by group, of the node with this page; empty if no node has it."""
        node = self._nodes[group].get(page)
        return () if node is None else tuple(node.pages)

    def is_last_owner(self, group: int, page: int) -> bool:
        """Return whether the caller is the only owner of the page besides the cache."""
        return self.groups[group].pool.references(page) - (page in self._nodes[group]) == 1

    def look_up(self, token_ids: Sequence[int], limit: int) -> Lookup:
        """Search for the longest hit of at most `limit` tokens."""
        max_pages = min(len(token_ids), limit) // self.page_size
        lookup = Lookup(token_ids, max_pages, num_idled=[-1] * len(self.groups))
        self.search(lookup)
        return lookup

    def search(self, lookup: Lookup) -> None:
        """Bring a lookup up to date."""
        path = lookup.path
        if lookup.root is not self._root:
            lookup.root, lookup.num_fills = self._root, -1
            path.clear()
        while path and not _is_attached(path[-1]):  # a node with children is never pruned
            path.pop()
        n = min(lookup.num_pages, len(path))
        if lookup.num_fills != self._num_fills:  # else nothing can have been added to the path
            lookup.num_fills = self._num_fills
            self._walk(lookup)
            n = len(path)
        while (hole := self._last_hole(path, n)) is not None:
            n = hole  # every hit that is shorter, yet longer than this, needs the same page
        lookup.num_pages = n

    def num_idle(self, lookup: Lookup, group: int) -> int:
        """Return how many pages of the hit are idle: after a match, `evict` cannot free them."""
        n, idle = lookup.num_pages, self._idle[group]
        if self.groups[group].is_whole:  # then all nodes below an idle one are idle
            return n - bisect_left(lookup.path, 1, 0, n, key=lambda node: node.pages[group] in idle)
        return sum(page in idle for page in self._hit(lookup, group))

    def match(self, lookup: Lookup) -> list[list[int]]:
        """Take one reference to each page of the hit, and return the pages by group.

        A windowed group has 0 for pages before the window.
        """
        pages: list[list[int]] = []
        for g, group in enumerate(self.groups):
            found = self._hit(lookup, g)
            for page in found:
                group.pool.share(page)
                self._idle[g].pop(page, None)
            pages.append([0] * (lookup.num_pages - len(found)) + found)
        return pages

    def keep_young(self, lookup: Lookup) -> None:
        """Mark the hit of a waiting request as recently used, so that it is evicted last."""
        for g, num_idled in enumerate(self._num_idled):
            if lookup.num_idled[g] != num_idled:  # else no page has become younger since
                lookup.num_idled[g] = num_idled
                found = self._hit(lookup, g)
                for page in reversed(found) if self.groups[g].is_whole else found:
                    self._make_young(g, page)

    def insert(self, token_ids: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Offer the full pages of a running request, which stays an owner of all of them."""
        self._adopt(token_ids, pages, is_leaving=False)

    def release(self, token_ids: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Offer the full pages of `token_ids`, then drop the caller's reference to every page."""
        path = self._adopt(token_ids, pages, is_leaving=True)
        for g, of_group in enumerate(pages):
            indices = range(len(of_group))
            # The page dropped first is evicted first: in a whole group the end of the prefix, as
            # the tree requires; in a windowed one its beginning, so that the rest ends in a full
            # window.
            for i in reversed(indices) if self.groups[g].is_whole else indices:
                page = of_group[i]
                if page:
                    self._drop(g, page)
                    if i < len(path) and path[i].pages[g] != page:
                        self._make_young(g, path[i].pages[g])

    def let_go(self, group: int, pages: Iterable[int]) -> None:
        """Drop the caller's reference to these pages; pages offered before stay in the cache."""
        for page in pages:
            self._drop(group, page)

    def evict(self, group: int, n: int) -> int:
        """Free up to n pages of the group, least recently used first; return how many."""
        idle, num_freed = self._idle[group], 0
        is_windowed = not self.groups[group].is_whole
        while num_freed < n and idle:
            node = next(iter(idle.values()))
            for g in (group,) if is_windowed else range(len(self.groups)):
                if node.pages[g]:
                    self._give_up(node, g)
                    self.stats.num_evicted_pages += 1
            self._prune(node)
            num_freed += 1
        return num_freed

    def clear(self) -> None:
        """Forget every prefix. Requests keep the pages that they own."""
        for group, nodes in zip(self.groups, self._nodes, strict=True):
            for page in nodes:
                group.pool.release(page)
        self._forget()

    def check(self) -> None:
        nodes = self._recount()
        for g, group in enumerate(self.groups):
            found = {node.pages[g]: node for node in nodes if node.pages[g]}
            if found != self._nodes[g]:
                raise PoolError(f"{len(self._nodes[g])} cached pages; the tree has {len(found)}")
            idle = {page for page in found if group.pool.references(page) == 1}
            if idle != self._idle[g].keys():
                raise PoolError(f"idle pages are {set(self._idle[g])}, but a recount finds {idle}")
        for node in nodes:
            self._check_node(node)
        for g in self._whole:
            self._check_order(g)

    def _forget(self) -> None:
        num_groups = len(self.groups)
        self._root = _Node(key=(), parent=None, pages=[0] * num_groups)
        self._nodes: list[dict[int, _Node]] = [{} for _ in range(num_groups)]
        # _idle[group] has each page that only the cache owns, least recently used first. In a whole
        # group every node comes before its parent, so that the first is a leaf.
        self._idle: list[OrderedDict[int, _Node]] = [OrderedDict() for _ in range(num_groups)]
        self._num_fills = 0  # number of times that a page was added to a node
        self._num_idled = [0] * num_groups  # number of times that a page became idle, by group

    def _keys(self, token_ids: Sequence[int], first: int, stop: int) -> Iterator[Key]:
        """Yield the key of each page in [first, stop) of these tokens."""
        size = self.page_size
        return (tuple(token_ids[i * size : (i + 1) * size]) for i in range(first, stop))

    def _walk(self, lookup: Lookup) -> None:
        """Extend the path by all nodes of the tree that match the tokens."""
        path = lookup.path
        node = path[-1] if path else self._root
        for key in self._keys(lookup.token_ids, len(path), lookup.max_pages):
            child = node.children.get(key)
            if child is None:
                return
            node = child
            path.append(node)

    def _hit(self, lookup: Lookup, group: int) -> list[int]:
        """Return the pages of the group that the token after the hit reads."""
        n = lookup.num_pages
        first = self.groups[group].first_read(n * self.page_size, self.page_size)
        return [node.pages[group] for node in lookup.path[first:n]]

    def _last_hole(self, path: list[_Node], n: int) -> int | None:
        """Return the index of the last node without a page that a hit of n nodes needs, or None."""
        for g in self._windowed:
            first = self.groups[g].first_read(n * self.page_size, self.page_size)
            for i in reversed(range(first, n)):
                if not path[i].pages[g]:
                    return i
        return None

    def _adopt(
        self, token_ids: Sequence[int], pages: Sequence[Sequence[int]], *, is_leaving: bool
    ) -> list[_Node]:
        """Adopt offered pages; return the nodes of the prefix up to where that is allowed."""
        path: list[_Node] = []
        node, owns_path = self._root, True
        for key, mine in self._offers(token_ids, pages):
            child = node.children.get(key)
            if child is None:
                # Below another request's page, only pages that no one but the caller owns.
                if not (owns_path or all(self._references(g, mine[g]) == 1 for g in self._whole)):
                    break
                child = node.children[key] = _Node(key, node, [0] * len(self.groups))
            elif child.pages != mine and self._is_anothers(child, mine):
                if is_leaving:
                    owns_path = False
                elif self._windowed and all(child.pages[g] in self._idle[g] for g in self._whole):
                    self._make_room(child, mine)
                else:
                    break
            if child.pages != mine:
                self._fill(child, mine, owns_path)
            node = child
            path.append(node)
        return path

    def _offers(
        self, token_ids: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> list[tuple[Key, list[int]]]:
        """Return the key and the pages by group of each full page of tokens.

        Those after the last that has a page in any group are left out.
        """
        keys = self._keys(token_ids, 0, len(token_ids) // self.page_size)
        offers = list(zip(keys, map(list, zip(*pages, strict=False)), strict=False))
        while offers and not any(offers[-1][1]):
            offers.pop()
        return offers

    def _is_anothers(self, node: _Node, mine: Sequence[int]) -> bool:
        return any(node.pages[g] != mine[g] for g in self._whole)

    def _fill(self, node: _Node, mine: Sequence[int], owns_path: bool) -> None:
        for g, page in enumerate(mine):
            if page and not node.pages[g] and (owns_path or self._references(g, page) == 1):
                if page in self._nodes[g]:
                    raise PoolError(f"page {page} is offered, but the cache has it elsewhere")
                self.groups[g].pool.share(page)  # the caller owns it too, so it is not idle
                self._nodes[g][page] = node
                node.pages[g] = page
                self._num_fills += 1

    def _make_room(self, node: _Node, mine: Sequence[int]) -> None:
        for g, page in enumerate(mine):
            if page and node.pages[g]:
                self._give_up(node, g)

    def _give_up(self, node: _Node, group: int) -> None:
        page = node.pages[group]
        node.pages[group] = 0
        del self._nodes[group][page], self._idle[group][page]
        self.groups[group].pool.release(page)

    def _prune(self, node: _Node) -> None:
        while node.parent is not None and not node.children and not any(node.pages):
            del node.parent.children[node.key]
            node = node.parent

    def _drop(self, group: int, page: int) -> None:
        num_owners = self.groups[group].pool.release(page)
        if num_owners == 1 and page in self._nodes[group]:
            self._idle[group][page] = self._nodes[group][page]
            self._num_idled[group] += 1

    def _make_young(self, group: int, page: int) -> None:
        if page in self._idle[group]:
            self._idle[group].move_to_end(page)

    def _references(self, group: int, page: int) -> int:
        return self.groups[group].pool.references(page)

    def _recount(self) -> list[_Node]:
        found: list[_Node] = []
        unseen = list(self._root.children.values())
        while unseen:
            node = unseen.pop()
            found.append(node)
            unseen += node.children.values()
        return found

    def _check_node(self, node: _Node) -> None:
        parent, pages = node.parent, node.pages
        if parent is None or parent.children.get(node.key) is not node:
            raise PoolError(f"the node of cached pages {pages} is not attached to the tree")
        if len(node.key) != self.page_size:
            raise PoolError(f"the node of cached pages {pages} has {len(node.key)} tokens")
        if not any(pages) and not node.children:
            raise PoolError("a node without pages and children was not pruned")
        if not all(pages[g] for g in self._whole):
            raise PoolError(f"the node of cached pages {pages} lacks a page of a whole group")
        owners = {self._references(g, pages[g]) for g in self._whole}
        if len(owners) > 1:
            raise PoolError(f"cached pages {pages} of one node have different owners")
        for num_owners in owners:
            self._check_owners(node, num_owners)

    def _check_owners(self, node: _Node, num_owners: int) -> None:
        parent = node.parent
        assert parent is not None
        for g in self._whole:
            if parent is not self._root and self._references(g, parent.pages[g]) < num_owners:
                raise PoolError(
                    f"cached page {node.pages[g]} has an owner that page {parent.pages[g]} lacks"
                )
        for g in self._windowed:
            if node.pages[g] and self._references(g, node.pages[g]) > num_owners:
                raise PoolError(f"cached page {node.pages[g]} has an owner that its node lacks")

    def _check_order(self, group: int) -> None:
        seen: set[int] = set()
        for page, node in self._idle[group].items():
            seen.add(page)
            if node.parent is not None and node.parent.pages[group] in seen:
                raise PoolError(f"cached page {page} would be evicted after the one above it")


def _is_attached(node: _Node) -> bool:
    return node.parent is not None and node.parent.children.get(node.key) is node
