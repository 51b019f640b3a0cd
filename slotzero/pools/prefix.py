"""The prefix cache: pages of KV that outlive their request, found again by their tokens.

A tree in which every edge is exactly one page of tokens: the path from the root spells a prefix,
and the node at its end names, for each KV group, the page that holds the KV of its last edge, or 0.
It does not know requests, steps or what KV is. An owner that matched or offered pages hands its
references back through `release` or `let_go`, so that the cache can count which pages only it
still owns: the idle ones.

A hit of n nodes needs all their pages of whole groups, and of a windowed group those that the
token after them reads. So a node has a page of every whole group, and may lack one of a windowed
group; it stands as long as it, or a node below it, has a page. Snapshots of recurrent states are a
windowed group too, of which a hit needs the one that was taken where it ends.

The rule it keeps where there is a whole group: whoever owns a page of a node owns the whole pages
of that node and of all nodes above it, so

    references(whole page of parent) >= references(whole page of child) >= 1
    references(whole page of node)   >= references(windowed page of node) >= 1, or there is none

the cache's own being one of them. A node whose whole pages only the cache owns has nothing but
such nodes below it. So what eviction can free is the plain count of idle pages: taking leaves
frees all whole ones, and a windowed one can be taken from any node. This is why `insert` stops
where a node holds a page that is another request's, while `release`, after which the caller owns
nothing, may go on. Where the node is idle and there are windows, `insert` puts the caller's pages
in its place: else a prefix that lost the pages of its window would be computed anew by everyone,
and kept young, without ever being found again.

Where all groups are windowed, nobody needs to own a path, because no page waits for the ones below
it to go: every page has its own owners, and whoever comes by fills what a node lacks.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
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
    """By group. 0: none."""
    children: dict[Key, "_Node"] = field(default_factory=dict)


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
        """Of all groups together."""
        return sum(map(len, self._nodes))

    def num_evictable(self, group: int) -> int:
        """How many pages evict() could free."""
        return len(self._idle[group])

    def pages(self, group: int) -> list[int]:
        return list(self._nodes[group])

    def companions(self, group: int, page: int) -> Sequence[int]:
        """The pages, by group, of the node that holds this one; none if no node does."""
        node = self._nodes[group].get(page)
        return () if node is None else tuple(node.pages)

    def is_last_owner(self, group: int, page: int) -> bool:
        """Whether nobody, or only the cache, has the page when its caller lets go of it."""
        return self.groups[group].pool.references(page) - (page in self._nodes[group]) == 1

    def match(self, token_ids: Sequence[int], limit: int) -> list[list[int]]:
        """The pages, by group, of the longest hit of at most `limit` tokens, one reference each.
        A windowed group has 0 before the window."""
        path = self._walk(token_ids, limit // self.page_size)
        n = self._hit_len(path)
        pages: list[list[int]] = []
        for g, group in enumerate(self.groups):
            first = group.first_read(n * self.page_size, self.page_size)
            found = [node.pages[g] for node in path[first:n]]
            for page in found:
                group.pool.share(page)
                self._idle[g].pop(page, None)
            pages.append([0] * first + found)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Offer the full pages of a request that goes on; it stays an owner of all of them."""
        self._adopt(token_ids, pages, is_leaving=False)

    def release(self, token_ids: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """Offer the full pages of `token_ids`, then drop the caller's reference to every page."""
        path = self._adopt(token_ids, pages, is_leaving=True)
        for g, of_group in enumerate(pages):
            indices = range(len(of_group))
            # the oldest goes first: of a whole group the end of the prefix, which must; of a
            # windowed one its beginning, so that what is left ends in a whole window
            for i in reversed(indices) if self.groups[g].is_whole else indices:
                page = of_group[i]
                if page:
                    self._drop(g, page)
                    if i < len(path) and path[i].pages[g] != page:
                        self._make_young(g, path[i].pages[g])

    def let_go(self, group: int, pages: Iterable[int]) -> None:
        """Drop the caller's reference to these; what was offered before stays to be found."""
        for page in pages:
            self._drop(group, page)

    def evict(self, group: int, n: int) -> int:
        """Free up to n pages of the group, the ones unused for longest first; says how many."""
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
        """Forget every prefix. Pages that requests own stay theirs."""
        for group, nodes in zip(self.groups, self._nodes, strict=True):
            for page in nodes:
                group.pool.release(page)
        self._forget()

    def check(self) -> None:
        nodes = self._recount()
        for g, group in enumerate(self.groups):
            found = {node.pages[g]: node for node in nodes if node.pages[g]}
            if found != self._nodes[g]:
                raise PoolError(f"{len(self._nodes[g])} cached pages, the tree has {len(found)}")
            idle = {page for page in found if group.pool.references(page) == 1}
            if idle != self._idle[g].keys():
                raise PoolError(f"idle pages are {set(self._idle[g])}, a recount finds {idle}")
        for node in nodes:
            self._check_node(node)
        for g in self._whole:
            self._check_order(g)

    def _forget(self) -> None:
        num_groups = len(self.groups)
        self._root = _Node(key=(), parent=None, pages=[0] * num_groups)
        self._nodes: list[dict[int, _Node]] = [{} for _ in range(num_groups)]
        # _idle[group] holds each page that only the cache owns, the one unused for longest first;
        # of a whole group every node before its parent, so that the first is a leaf
        self._idle: list[OrderedDict[int, _Node]] = [OrderedDict() for _ in range(num_groups)]

    def _keys(self, token_ids: Sequence[int], max_pages: int) -> list[Key]:
        size = self.page_size
        num_pages = min(len(token_ids) // size, max_pages)
        return [tuple(token_ids[i * size : (i + 1) * size]) for i in range(num_pages)]

    def _walk(self, token_ids: Sequence[int], max_pages: int) -> list[_Node]:
        path: list[_Node] = []
        node = self._root
        for key in self._keys(token_ids, max_pages):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            path.append(node)
        return path

    def _hit_len(self, path: list[_Node]) -> int:
        n = len(path)
        while (hole := self._last_hole(path, n)) is not None:
            n = hole  # every hit that is shorter, yet longer than this, needs the same page
        return n

    def _last_hole(self, path: list[_Node], n: int) -> int | None:
        """Index of a node that lacks a page which a hit of n nodes needs."""
        for g in self._windowed:
            first = self.groups[g].first_read(n * self.page_size, self.page_size)
            for i in reversed(range(first, n)):
                if not path[i].pages[g]:
                    return i
        return None

    def _adopt(
        self, token_ids: Sequence[int], pages: Sequence[Sequence[int]], *, is_leaving: bool
    ) -> list[_Node]:
        """-> the nodes of the prefix, as far as the caller may go."""
        path: list[_Node] = []
        node, owns_path = self._root, True
        for key, mine in self._offers(token_ids, pages):
            child = node.children.get(key)
            if child is None:
                # below another's page, only what nobody but the leaving caller owns
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
        """Each full page of tokens and its pages by group, up to the last that has any."""
        keys = self._keys(token_ids, len(token_ids))
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
                    raise PoolError(f"page {page} is offered for a second prefix; it holds another")
                self.groups[g].pool.share(page)  # now the offerer and the cache own it: not idle
                self._nodes[g][page] = node
                node.pages[g] = page

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
            raise PoolError(f"the node of cached pages {pages} hangs off the tree")
        if len(node.key) != self.page_size:
            raise PoolError(f"the node of cached pages {pages} has {len(node.key)} tokens")
        if not any(pages) and not node.children:
            raise PoolError("a node without pages and children was not pruned")
        if not all(pages[g] for g in self._whole):
            raise PoolError(f"the node of cached pages {pages} lacks one of a whole group")
        owners = {self._references(g, pages[g]) for g in self._whole}
        if len(owners) > 1:
            raise PoolError(f"cached pages {pages} are one node's, and have different owners")
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
