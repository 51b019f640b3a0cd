"""Cases of attention for kernels on the CPU: tokens of several slots, or draft trees behind them.

Memory that no token may see is NaN.
"""

import dataclasses
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from slotzero.kernels.types import Branches, Heads, Tokens
from slotzero.tree_shape import MAX_PLACES

EPS = 1e-5

Span = tuple[int, int]  # the positions [begin, end) of a slot


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Attending(NamedTuple):
    """Tokens at `spans` of slots 1, 2, ..., and all other inputs of `attend`."""

    heads: Heads
    page: int
    spans: list[Span]
    sinks: Tensor | None

    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the KV cache and the page table.

        Pages are scattered over a pool in which everything that no token may see is NaN. Positions
        before a window have no page: their entry in the page table is 0.
        """
        seen = [(self.heads.first_key(begin), end) for begin, end in self.spans]
        most = max((end - 1) // self.page for _, end in seen) + 1
        table = torch.zeros(len(seen) + 1, most, dtype=torch.int32)
        pool = iter((torch.randperm(len(seen) * most + 3) + 1).tolist())
        pair = self.heads.head_dim + self.heads.value_dim
        size = (len(seen) * most + 4, self.page, self.heads.num_kv_heads, pair)
        kv = torch.full(size, torch.nan)
        for slot, (first, end) in enumerate(seen, start=1):
            for i in range(first // self.page, (end - 1) // self.page + 1):
                table[slot, i] = next(pool)
            for position in range(first, end):
                stored = kv[table[slot, position // self.page], position % self.page]
                stored.copy_(torch.randn_like(stored))
        return kv, table

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Return slots and positions, with padding before, between and after the slots."""
        rows = [(0, 0)]
        for slot, span in enumerate(self.spans, start=1):
            rows += [(slot, position) for position in range(*span)] + [(0, 0)] * (slot % 3)
        return ints([slot for slot, _ in rows]), ints([position for _, position in rows])

    def queries(self, count: int) -> Tensor:
        return torch.randn(count, self.heads.num_heads, self.heads.head_dim)


def heads_of(num_heads: int, num_kv_heads: int, dim: int, **more: object) -> Heads:
    plain = Heads(num_heads, num_kv_heads, dim, dim, norm_eps=EPS, scale=dim**-0.5)
    return dataclasses.replace(plain, **more)


@st.composite
def attendings(draw: Callable) -> Attending:
    torch.manual_seed(draw(st.integers(0, 999)))
    spans = draw(
        st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), min_size=1, max_size=3)
    )
    spans = [(begin, begin + count) for begin, count in spans]
    kv_heads, dims = draw(st.integers(1, 3)), st.sampled_from([1, 2, 6, 16, 24, 33, 64])
    heads = heads_of(
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        draw(dims),
        value_dim=draw(dims),
        window=draw(st.sampled_from([None, 1, spans[0][1], 100]) | st.integers(1, 60)),
        is_chunked=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, 0.5, 20.0])),
    )
    sinks = torch.randn(heads.num_heads) * 3 if draw(st.booleans()) else None
    return Attending(heads, draw(st.sampled_from([1, 4, 16, 32])), spans, sinks)


class Tree(NamedTuple):
    """A draft tree of one slot at places base, base + 1, ...; parents are counted from base."""

    base: int
    parents: list[int | None]  # ROOT: child of the last stored token; None: the place is empty

    def branch(self, i: int) -> list[int]:
        """Return token i and its ancestors, from the root down."""
        return [] if i == ROOT else [*self.branch(self.parents[i]), i]

    def bits(self, i: int) -> int:
        """Return the branch bits of token i; bits past its own are set, and must be ignored."""
        return sum(1 << j for j in self.branch(i)) | (2**MAX_PLACES - (2 << i))


ROOT = -1


def grown(base: int, size: int, random: Random, gaps: float = 0.2) -> Tree:
    tree = Tree(base, [])
    for _ in range(size):
        standing = [i for i, parent in enumerate(tree.parents) if parent is not None]
        parent = random.choice([ROOT, *standing, *standing])
        tree.parents.append(None if random.random() < gaps else parent)
    return tree


class Branching(NamedTuple):
    """Draft trees after the stored tokens of slots 1, 2, ..."""

    attending: Attending
    trees: list[Tree]

    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the KV cache and the page table; empty places hold NaN too."""
        kv, table = self.attending.pages()
        for slot, tree in enumerate(self.trees, start=1):
            for place, parent in enumerate(tree.parents, start=tree.base):
                if parent is None:
                    page = self.attending.page
                    kv[table[slot, place // page], place % page] = torch.nan
        return kv, table

    def tokens(self) -> tuple[Tokens, Branches]:
        """Return the tokens, with padding between slots and at empty places, and the branches,
        which are invalid for padding."""
        padding = (0, 0, -(2**31), -1, -(2**31))
        rows = [padding]
        for slot, tree in enumerate(self.trees, start=1):
            for i, parent in enumerate(tree.parents):
                if parent is None:
                    rows.append(padding)
                    continue
                stands = tree.base + len(tree.branch(i)) - 1
                rows.append((slot, tree.base + i, tree.base, tree.bits(i), stands))
            rows += [padding] * (slot % 3)
        slots, places, bases, seen, stand = zip(*rows, strict=True)
        branches = Branches(ints(bases), torch.tensor(seen), ints(stand))
        return Tokens(ints(slots), ints(places)), branches

    def by_the_book(self, q: Tensor, kv: Tensor, table: Tensor) -> Tensor:
        """Compute attention by its definition, in double precision: [tokens, heads, value_dim]."""
        heads, page = self.attending.heads, self.attending.page
        tokens, _ = self.tokens()
        out = torch.zeros(len(q), heads.num_heads, heads.value_dim, dtype=torch.float64)
        for t, (slot, place) in enumerate(zip(*(x.tolist() for x in tokens), strict=True)):
            if slot == 0:
                continue
            tree = self.trees[slot - 1]
            branch = tree.branch(place - tree.base)
            first = heads.first_key(tree.base + len(branch) - 1)
            seen = [*range(first, tree.base), *(tree.base + i for i in branch)]
            stored = torch.stack([kv[table[slot, at // page], at % page] for at in seen]).double()
            for head in range(heads.num_heads):
                pair = stored[:, head // (heads.num_heads // heads.num_kv_heads)]
                scores = pair[:, : heads.head_dim] @ q[t, head].double() * heads.scale
                if heads.softcap is not None:
                    scores = heads.softcap * (scores / heads.softcap).tanh()
                shares = scores.exp()
                sinks = self.attending.sinks
                sink = 0 if sinks is None else sinks[head].double().exp()
                out[t, head] = shares / (shares.sum() + sink) @ pair[:, heads.head_dim :]
        return out


@st.composite
def branchings(draw: Callable) -> Branching:
    attending = draw(attendings())
    random, sizes = draw(st.randoms(use_true_random=False)), st.integers(1, 20) | st.just(63)
    trees = [grown(base, draw(sizes), random) for base, _ in attending.spans]
    spans = [(tree.base, tree.base + len(tree.parents)) for tree in trees]
    heads = attending.heads
    if heads.window is not None:  # the window is longer than a branch
        heads = dataclasses.replace(heads, window=heads.window + 63, is_chunked=False)
    return Branching(attending._replace(heads=heads, spans=spans), trees)
