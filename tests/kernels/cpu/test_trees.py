"""Tests of draft trees against explicit code, operation by operation: masks, acceptance, growth."""

import math
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.types import PagedKv, Rows, Tokens
from slotzero.kernels.types_speculation import (
    Candidates,
    DraftRows,
    DraftTables,
    TreeFront,
    TreeStep,
)
from slotzero.sampling.params import MAX_LOGPROBS, SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, Sampled, SamplingTables, encode
from slotzero.tree_shape import TreeShape

KERNELS = ReferenceKernels()
NUM_SLOTS, PAGE, LAYERS = 5, 4, 2


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def grown(num_nodes: int, rng: Random) -> list[int]:
    """Return the parent of each node; that of the root is arbitrary."""
    return [99, *(rng.randrange(node) for node in range(1, num_nodes))]


def branch(parents: list[int], node: int) -> list[int]:
    """Return the nodes from the root to this node."""
    return [*(branch(parents, parents[node]) if node else ()), node]


def laid_out(slots: list[int], starts: list[int], counts: list[int], width: int):
    tokens = Tokens(torch.zeros(len(slots) * width).int(), torch.zeros(len(slots) * width).int())
    for row, (slot, start, count) in enumerate(zip(slots, starts, counts, strict=True)):
        for i in range(count):
            tokens.slots[row * width + i], tokens.positions[row * width + i] = slot, start + i
    ends = torch.arange(1, len(slots) + 1).int() * width
    rows = Rows(ints(*slots), ints(*starts), ints(*[width] * len(slots)), ends, span=width)
    return rows, tokens


rows_of = st.lists(st.integers(1, NUM_SLOTS), unique=True, min_size=1, max_size=NUM_SLOTS)


@settings(max_examples=50, deadline=None)
@given(slots=rows_of, width=st.integers(2, 63), random=st.randoms(use_true_random=False))
def test_a_node_sees_its_ancestors(slots, width, random):
    slots.insert(random.randint(0, len(slots)), 0)
    starts = [slot and random.randint(1, 40) for slot in slots]
    counts = [slot and random.randint(1, width) for slot in slots]
    trees = [grown(count, random) if count else [] for count in counts]
    parents = torch.full((NUM_SLOTS + 1, width + 2), 77, dtype=torch.int32)
    parents[0] = 0
    for slot, tree in zip(slots, trees, strict=True):
        parents[slot, : len(tree)] = ints(*tree)
    rows, tokens = laid_out(slots, starts, counts, width)
    branches = KERNELS.tree_branches(rows, tokens, parents)
    branches.check(tokens, rows)
    for row, (start, tree) in enumerate(zip(starts, trees, strict=True)):
        for node in range(len(tree)):
            i, way = row * width + node, branch(tree, node)
            assert branches.bases[i] == start
            assert branches.seen[i] == sum(1 << n for n in way)
            assert branches.positions[i] == start + len(way) - 1


@settings(max_examples=80, deadline=None)
@given(slots=rows_of, width=st.integers(2, 20), random=st.randoms(use_true_random=False))
def test_accepted_nodes_are_kept_in_order(slots, width, random):
    """This covers tokens, features and KV cache; nothing else changes."""
    slots.insert(random.randint(0, len(slots)), 0)
    starts = [slot and random.randint(1, 20) for slot in slots]
    counts = [slot and random.randint(0, width) for slot in slots]
    trees = [grown(count, random) if count else [] for count in counts]
    rows, located = laid_out(slots, starts, counts, width)
    parents = torch.full((NUM_SLOTS + 1, width), 77, dtype=torch.int32)
    parents[0] = 0
    length = torch.zeros(NUM_SLOTS + 1).int()
    tokens = torch.randint(100, 200, (NUM_SLOTS + 1, 60), dtype=torch.int32)
    num_pages = 60 // PAGE
    table = torch.zeros(NUM_SLOTS + 1, num_pages, dtype=torch.int32)
    table[1:] = 1 + torch.randperm(NUM_SLOTS * num_pages).view(NUM_SLOTS, -1)
    kv = torch.randn(LAYERS, 1 + NUM_SLOTS * num_pages, PAGE, 2, 3)
    features = torch.randn(len(slots) * width, 4)
    kept = torch.randn(NUM_SLOTS + 1, width, 4)
    sampled = torch.randint(0, 4, (len(slots), width), dtype=torch.int32)
    for slot, start, tree in zip(slots, starts, trees, strict=True):
        length[slot] = start
        parents[slot, : len(tree)] = ints(*tree)
        for node in range(1, len(tree)):
            brothers = [n for n in range(1, node) if tree[n] == tree[node]]
            taken = [int(tokens[slot, start + n]) for n in brothers]
            free = [token for token in range(64) if token not in taken]
            tokens[slot, start + node] = random.choice(free[:4])
    before = [x.clone() for x in (tokens, length, kv, kept)]
    num_confirmed = torch.full((len(slots),), 7).int()
    path = torch.full((len(slots), width), 7).int()
    tree = KERNELS.tree_branches(rows, located, parents)
    KERNELS.accept_tree(
        ints(*slots), ints(*counts), sampled, parents, tree,
        DraftTables(tokens, length, *[torch.zeros_like(length)] * 6), num_confirmed, path,
    )  # fmt: skip
    KERNELS.move_kv(ints(*slots), length, num_confirmed, path, PagedKv(kv, table))
    KERNELS.store_features(ints(*slots), num_confirmed, features, kept, path)

    old_tokens, old_length, old_kv, old_kept = before
    for row, (slot, start, nodes) in enumerate(zip(slots, starts, trees, strict=True)):
        way = [0] if nodes else []
        while way:
            wanted = sampled[row, way[-1]]
            children = [n for n in range(1, len(nodes)) if nodes[n] == way[-1]]
            right = [n for n in children if old_tokens[slot, start + n] == wanted]
            if not right:
                break
            way += right
        assert path[row].tolist() == way + [0] * (width - len(way))
        assert num_confirmed[row] == len(way)
        if slot == 0:
            continue
        old_length[slot] = start + len(way)
        for depth, node in enumerate(way):
            old_tokens[slot, start + 1 + depth] = sampled[row, node]
            old_kept[slot, depth] = features[row * width + node]
            to, source = (table[slot, at // PAGE] for at in (start + depth, start + node))
            moved = before[2][:, source, (start + node) % PAGE].clone()
            old_kv[:, to, (start + depth) % PAGE] = moved
    for got, expected in zip((tokens, length, kv, kept), before, strict=True):
        assert torch.equal(got, expected)


def sampling_tables(params: list[SamplingParams]) -> SamplingTables:
    """Return tables for slots 1 and up."""
    rows = [encode(p, 0, 3, frozenset()) for p in params]
    parts = {"tokens": torch.zeros(len(rows) + 1, 90, dtype=torch.int32)}
    for spec in SAMPLING_TABLES:
        dtype = torch.int32 if spec.dtype == "int32" else torch.float32
        table = torch.full(spec.shape(len(rows)), spec.neutral, dtype=dtype)
        for slot, row in enumerate(rows, start=1):
            values = torch.tensor(row[spec.name], dtype=dtype)
            table[slot] = values if table.dim() == 2 else values[0]
        parts[spec.name] = table
    parts |= {"is_masked": torch.zeros(len(rows) + 1).int(), "allowed": torch.zeros(1, 1).int()}
    return SamplingTables(**{name: parts[name] for name in SamplingTables._fields})


def drawn_for(num: int, topk: int, random: Random) -> Sampled:
    """Return samples with few distinct tokens and scores, so that there are ties, and some broken
    rows."""
    ids, scores = [], []
    for _ in range(num):
        ids.append(random.sample(range(topk + 2), topk) + [0] * (MAX_LOGPROBS - topk))
        row = sorted((random.choice([-0.5, -1.0, -2.0]) for _ in range(topk)), reverse=True)
        if random.random() < 0.1:
            row = [math.nan] * topk
        scores.append(row + [0.0] * (MAX_LOGPROBS - topk))
    tokens = [random.randrange(topk + 2) for _ in range(num)]
    return Sampled(ints(*tokens), torch.zeros(num), torch.tensor(ids).int(), torch.tensor(scores))


Node = tuple[tuple[int, ...], float]  # tokens from the first draft on, and their total score


@settings(max_examples=80, deadline=None)
@given(
    steps=st.integers(1, 4), topk=st.integers(2, 4), most=st.integers(1, 30),
    room=st.integers(0, 20), behind=st.integers(0, 1), is_penalised=st.booleans(),
    random=st.randoms(use_true_random=False),
)  # fmt: skip
def test_a_tree_has_the_best_of_all_drafts(steps, topk, most, room, behind, is_penalised, random):
    """One row stands between two of padding; the reference lists all possible drafts."""
    shape = TreeShape(steps, topk, min(1 + most, 1 + topk + (steps - 1) * topk**2))
    tables = sampling_tables([SamplingParams(presence_penalty=0.5 * is_penalised)])
    slot, start = 1, 40
    slots = ints(0, slot if room else 0, 0)
    draft_rows = DraftRows(slots, ints(0, start, 0), ints(0, room, 0))
    size = 3, shape.num_candidates
    candidates = Candidates(torch.zeros(size).int(), torch.zeros(size), torch.zeros(size).int())
    front: TreeFront | None = None
    book: list[list[Node]] = []  # by step
    frontier: list[Node] = [((), 0.0)] if room else []
    for step in range(steps):
        width = 1 if front is None else topk
        drawn = drawn_for(3 * width, topk, random)
        new: list[Node] = []
        for j, (way, score) in enumerate(frontier):
            row = width + j
            first = int(drawn.tokens[row])
            others = [int(i) for i in drawn.top_ids[row, :topk] if i != first][: topk - 1]
            scores = {
                int(i): float(s)
                for i, s in zip(
                    drawn.top_ids[row, :topk], drawn.top_logprobs[row, :topk], strict=True
                )
            }
            best = float(drawn.top_logprobs[row, 0])
            for token in [first] if is_penalised else [first, *others]:
                gain = best if token == first else scores[token]
                if not math.isnan(gain):
                    new.append(((*way, token), score + gain))
        book.append(new)
        front = KERNELS.grow_tree(
            draft_rows, drawn, front, candidates, TreeStep(step, topk, behind), tables
        )
        places = room - step * topk
        frontier = sorted(new, key=lambda node: -node[1])[: max(0, min(topk, places))]
        real = front.tokens.slots == slot
        assert real.tolist() == [False] * topk + [
            j < len(frontier) for j in range(topk)
        ] + [False] * topk  # fmt: skip
        assert not front.tokens.slots[~real].any()
        for j, (way, score) in enumerate(frontier):
            at, place = topk + j, step * topk + j
            assert tables.tokens[slot, start + 1 + place] == way[-1]
            assert front.tokens.positions[at] == start + 1 - behind + place
            assert front.branches.positions[at] == start + 1 - behind + step
            assert front.branches.seen[at].item().bit_count() == step + 1
            assert front.after[at] == start + 2 + step
            assert front.scores[at] == torch.tensor(score)
    parents = torch.full((2, shape.num_nodes), 55, dtype=torch.int32)
    num = KERNELS.select_nodes(draft_rows, candidates, shape.num_nodes - 1, tables.tokens, parents)
    every = [node for new in book for node in new]
    chosen = sorted(every, key=lambda node: -node[1])[: min(room, shape.num_nodes - 1)]
    assert num.tolist() == [0, len(chosen), 0]
    ways = [()]
    for node in range(1, 1 + len(chosen)):
        ways.append((*ways[parents[slot, node]], int(tables.tokens[slot, start + node])))
    assert sorted(ways[1:]) == sorted(way for way, _ in chosen)
    assert parents[slot, 1 + len(chosen) :].tolist() == [55] * (shape.num_nodes - 1 - len(chosen))
    assert parents[0].tolist() == [55] * shape.num_nodes and parents[slot, 0] == 55
