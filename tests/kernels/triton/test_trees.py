"""Tests that every kernel for draft trees is bitwise equal to torch_speculation.py.

The tables have the same values for slot 0 as in an engine, and arbitrary ones for every other slot,
used or not. Memory that must not be read holds invalid values.
"""

import pytest
import torch
from agreement import NAN, agree, draft_tables, ints, slots_for, spoilt, table_of
from torch import Tensor

from slotzero.kernels.contract import Kernels
from slotzero.kernels.float8_kv import from_codes, to_codes
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.speculation import trees
from slotzero.kernels.types import PagedKv, Rows, Tokens
from slotzero.kernels.types_speculation import Candidates, DraftRows, TreeFront, TreeStep
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled, SamplingTables

MAX_LEN, VOCAB = 150, 40
SIZES = [(1, 2), (9, 5), (20, 16), (7, 33), (5, 63)]  # rows, nodes
WRONG = 2**30


class Forest:
    """Tables with a draft tree for each row, of which `tried` nodes are real."""

    def __init__(self, rows: int, width: int) -> None:
        torch.manual_seed(rows * 100 + width)
        self.slots = slots_for(rows)
        self.tried = ints(0, width + 1, rows) * (self.slots > 0)
        self.tried[0] = width * int(self.slots[0] > 0)
        self.length = table_of(ints(1, MAX_LEN - width - 3, rows + 2))
        self.tokens = table_of(ints(0, VOCAB, rows + 2, MAX_LEN))
        self.parents = torch.full((rows + 2, width + 1), WRONG, dtype=torch.int32)
        for slot, num in zip(self.slots.tolist(), self.tried.tolist(), strict=True):
            for node in range(1, num):
                self.parents[slot, node] = int(torch.randint(node, ()))

    def rows(self) -> tuple[Rows, Tokens]:
        width = self.parents.shape[1] - 1
        owners = torch.where(self.tried > 0, self.slots, 0)
        is_real = torch.arange(width) < self.tried[:, None]
        slots = (self.slots[:, None] * is_real).int().flatten()
        starts = self.length[owners] * (owners > 0)
        ends = (torch.arange(len(owners)).int() + 1) * width
        rows = Rows(owners, starts, torch.full_like(owners, width), ends)
        return rows, Tokens(slots, spoilt(len(slots)))

    def write(self, sampled: Tensor, right: str) -> None:
        """Write drafts; none, some or as many as possible equal the sample after their parent.

        Siblings differ.
        """
        for row, (slot, num) in enumerate(
            zip(self.slots.tolist(), self.tried.tolist(), strict=True)
        ):
            taken: set[tuple[int, int]] = set()
            for node in range(1, num):
                above = int(self.parents[slot, node])
                id, wanted = VOCAB + node, int(sampled[row, above])
                is_lucky = right == "all" or (right == "some" and torch.rand(()) < 0.6)
                if is_lucky and (above, wanted) not in taken:
                    id = wanted
                taken.add((above, id))
                self.tokens[slot, self.length[slot] + node] = id


def width_of(rows: Rows, tokens: Tokens) -> Rows:
    return rows._replace(span=len(tokens.slots) // len(rows.slots))


# Verification


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_a_node_sees_its_ancestors(device, rows, width):
    forest = Forest(rows, width)
    its_rows, tokens = forest.rows()

    def call(kernels: Kernels, tokens, parents, *rows):
        return kernels.tree_branches(width_of(Rows(*rows), tokens), tokens, parents)

    agree(device, call, tokens, forest.parents, *its_rows[:4])


def test_a_branch_of_all_nodes(device):
    """The nodes form a chain, and then are all children of the root."""
    ones, slots = torch.ones(2, dtype=torch.int32), torch.tensor([1, 2]).int()
    parents = torch.zeros(3, 63, dtype=torch.int32)
    parents[1, 1:] = torch.arange(62)
    tokens = Tokens(slots.repeat_interleave(63), spoilt(126))
    moved = [t.to(device) for t in (slots, ones, ones * 63, ones, parents, *tokens)]
    rows = Rows(*moved[:4], span=63)
    bases, seen, stands = TritonKernels().tree_branches(rows, Tokens(*moved[5:]), moved[4])
    assert (bases == 1).all()
    assert seen.tolist() == [(2 << i) - 1 for i in range(63)] + [1 | 1 << i for i in range(63)]
    assert stands.tolist() == [*range(1, 64), 1, *[2] * 62]


@pytest.mark.parametrize("right", ["all", "none", "some"])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_nodes_are_accepted_along_one_path(device, rows, width, right):
    """Elsewhere, some nodes equal the sample after a parent that is itself wrong."""
    forest = Forest(rows, width)
    its_rows, tokens = forest.rows()
    sampled = ints(0, VOCAB, rows, width)
    forest.write(sampled, right)
    sampled[torch.arange(width) >= forest.tried[:, None]] = -7
    branches = ReferenceKernels().tree_branches(width_of(its_rows, tokens), tokens, forest.parents)

    def call(kernels: Kernels, slots, tried, sampled, parents, branches, *rest):
        tables, verified, path = rest
        kernels.accept_tree(
            slots, tried, sampled, parents, branches, tables, verified[:rows], path[:, :width]
        )

    *_, verified, _ = agree(
        device, call, forest.slots, forest.tried, sampled, forest.parents,
        branches, draft_tables(forest.length, tokens=forest.tokens, length=forest.length),
        spoilt(rows + 2), spoilt(rows, width + 2),
    )  # fmt: skip
    assert torch.equal(verified[:rows] > 0, forest.tried > 0)
    if right == "none":
        assert (verified[:rows] <= 1).all()
    if right == "all" and width > 2:
        assert (verified[:rows] > 1).any()


@pytest.mark.parametrize(
    ("shape", "page", "width"), [((2, 2, 24), 4, 5), ((3, 1, 8), 1, 33), ((1, 5, 250), 16, 63)]
)
@pytest.mark.parametrize("kind", ["half", "float32", "codes"])
def test_kv_moves_to_the_positions_of_the_tokens(device, half, kind, shape, page, width):
    """Several entries of a path move by one place, or over each other. Pages are scattered, and
    entries outside paths are NaN, which must not move."""
    torch.manual_seed(width)
    layers, rows = shape[0], 6
    slots = slots_for(rows)
    num = ints(0, width + 1, rows) * (slots > 0)
    per_slot = -(-MAX_LEN // page)
    table = torch.zeros(rows + 2, per_slot, dtype=torch.int32)
    table[1:] = (torch.randperm((rows + 1) * per_slot) + 1).int().view(-1, per_slot)
    pages = torch.full((layers, (rows + 1) * per_slot + 1, page, *shape[1:]), NAN)
    length = table_of(ints(width, MAX_LEN - width, rows + 2))
    path = torch.zeros(rows, width + 1, dtype=torch.int32)
    for row, (slot, count) in enumerate(zip(slots.tolist(), num.tolist(), strict=True)):
        path[row, :count] = torch.randperm(width)[:count].sort().values.int()
        path[row, 0] = 0
        places = int(length[slot]) - count + path[row, :count].long()
        stored = torch.randn(layers, count, *shape[1:])
        pages[:, table[slot, places // page].long(), places % page] = stored

    scales = torch.rand(layers, 2) if kind == "codes" else None

    def call(kernels: Kernels, slots, length, num, path, pages, table):
        kernels.move_kv(slots, length, num, path[:, :width], PagedKv(pages, table, scales))

    pages = to_codes(pages, torch.ones(())) if kind == "codes" else pages
    pages = pages.to(half) if kind == "half" else pages
    *_, moved, _ = agree(device, call, slots, length, num, path, pages, table)
    moved = from_codes(moved, torch.ones(())) if kind == "codes" else moved
    for slot, count in zip(slots.tolist(), num.tolist(), strict=True):
        places = torch.arange(int(length[slot]) - count, int(length[slot]))
        assert not moved[:, table[slot, places // page].long(), places % page].isnan().any()


# Growth


def drawn_of(num: int, topk: int) -> Sampled:
    """Return log probabilities with many ties, some NaN or -inf; the drawn token may or may not be
    among the likeliest."""
    top_ids = torch.rand(num, VOCAB).argsort(1)[:, :MAX_LOGPROBS].int()
    logprobs = (torch.rand(num, MAX_LOGPROBS) * -4).round().sort(descending=True).values / 2
    logprobs[torch.rand(num) < 0.1] = NAN
    logprobs[torch.rand(num) < 0.1, topk // 2 :] = -torch.inf
    which = ints(0, topk + 2, num).long()
    tokens = top_ids.gather(1, which[:, None])[:, 0]
    is_broken = torch.rand(num) < 0.1
    for part in (tokens, top_ids):
        part[is_broken] = 0
    return Sampled(tokens, torch.full((num,), NAN), top_ids, logprobs)


def tables_of(tokens: Tensor) -> SamplingTables:
    """Return sampling tables in which every third request has a penalty."""
    num, nothing = len(tokens), torch.zeros(1)
    named = dict.fromkeys(SamplingTables._fields, nothing)
    for i, name in enumerate(("repetition", "presence", "frequency")):
        neutral = 1.0 if i == 0 else 0.0
        penalty = torch.full((num,), neutral)
        penalty[torch.arange(num) % 9 == 2 + i * 3] = 1.5
        named[f"{name}_penalty"] = penalty
    return SamplingTables(**{**named, "tokens": tokens})


def guesses_of(rows: int, size: int) -> Candidates:
    return Candidates(spoilt(rows, size), torch.full((rows, size), NAN), spoilt(rows, size))


@pytest.mark.parametrize(
    ("rows", "topk", "steps", "behind"),
    [(1, 2, 3, 0), (7, 2, 6, 1), (12, 3, 4, 0), (7, 4, 5, 1), (3, 7, 10, 1), (4, 8, 3, 0)],
)
def test_a_tree_grows(device, rows, topk, steps, behind):
    """It grows step by step, sometimes past the available room; the best nodes become the draft."""
    torch.manual_seed(rows + topk)
    slots, size = slots_for(rows), topk + (steps - 1) * topk**2
    length = ints(1, MAX_LEN - 70, rows)
    room = ints(0, steps * topk + 2, rows).clamp_max(62)
    room[0] = 62
    tokens = table_of(ints(0, 3, rows + 2, MAX_LEN))
    drawn = [drawn_of(rows * (topk if step else 1), topk) for step in range(steps)]
    most = min(62, size)

    def call(kernels: Kernels, slots, length, room, drawn, candidates, tables, parents):
        rows = DraftRows(slots, length, room)
        fronts: list[TreeFront | None] = [None]
        for step, its in enumerate(drawn):
            fronts.append(
                kernels.grow_tree(
                    rows, its, fronts[-1], candidates, TreeStep(step, topk, behind), tables
                )
            )
        num = kernels.select_nodes(rows, candidates, most, tables.tokens, parents)
        return fronts, num

    given = (slots, length, room, drawn, guesses_of(rows, size), tables_of(tokens))
    *_, parents = agree(device, call, *given, spoilt(rows + 2, 64))
    assert rows == 1 or parents[1:].max() > 0


@pytest.mark.parametrize(
    ("rows", "size", "most"), [(1, 2, 1), (20, 37, 9), (9, 128, 62), (5, 392, 62)]
)
def test_the_best_nodes_are_selected(device, rows, size, most):
    """Parents may come anywhere; some scores are NaN, which sort first and do not count."""
    torch.manual_seed(size)
    slots, length = slots_for(rows), ints(1, MAX_LEN - 70, rows)
    scores = (torch.rand(rows, size) * -8).round() / 4
    scores[torch.rand(rows, size) < 0.2] = -torch.inf
    scores[torch.rand(rows, size) < 0.02] = NAN
    scores[:, :2][scores[:, :2] == 0] = -0.0
    parents = (torch.rand(rows, size) * torch.arange(size)).int() - 1
    candidates = Candidates(ints(0, VOCAB, rows, size), scores, parents)
    tokens = table_of(ints(0, 3, rows + 2, MAX_LEN))

    def call(kernels: Kernels, slots, length, room, candidates, tokens, parents):
        return kernels.select_nodes(
            DraftRows(slots, length, room), candidates, most, tokens, parents
        )

    given = (slots, length, ints(0, most + 4, rows), candidates, tokens, spoilt(rows + 2, 64))
    agree(device, call, *given)


def test_one_compiled_kernel_serves_every_tree(device):
    """Each of the tensors that share one allocation is aligned."""
    ones = torch.ones(3, dtype=torch.int32, device=device)
    front = trees._new_front(ones, 3)
    parts = (*front.tokens, *front.rows[:4], *front.branches, *front[3:])
    assert all(part.data_ptr() % 16 == 0 for part in parts)
