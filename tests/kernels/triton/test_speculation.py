"""Tests that every speculation kernel is bitwise equal to torch_speculation.py.

The tables have the same values for slot 0 as in an engine, and arbitrary ones for every other slot,
used or not.
"""

from typing import NamedTuple

import pytest
import torch
from agreement import NAN, agree, draft_tables, ints, slots_for, spoilt, table_of
from torch import Tensor

from slotzero import LLM, SamplingParams
from slotzero.kernels.contract import Kernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.speculation.speculation import SEARCHED_BLOCK
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_speculation import DraftRows

MAX_LEN, SPARE = 60, 3
SIZES = [(1, 5), (7, 2), (33, 16), (150, 3)]  # rows, width


def places(rows: int, width: int) -> Tokens:
    return Tokens(*(spoilt(rows * width + SPARE) for _ in range(2)))


def head(tokens: Tokens, rows: int, width: int) -> Tokens:
    return Tokens(*(tensor[: rows * width] for tensor in tokens))


class World(NamedTuple):
    slots: Tensor
    length: Tensor
    limit: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, rows: int, width: int) -> "World":
        torch.manual_seed(rows * 100 + width)
        length = table_of(ints(1, MAX_LEN - width - 3, rows + 2))
        limit = table_of(length + ints(-1, width + 4, rows + 2))
        return cls(slots_for(rows), length, limit, table_of(ints(0, 3, rows + 2, MAX_LEN)))


# Locations of tokens


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_drafts_are_located(device, rows, width):
    slots, length, limit, _ = World.of(rows, width)
    num_drafts = table_of(ints(0, width + 3, rows + 2))
    stale = torch.rand(rows + 2) < 0.3
    drafted_at = table_of(length - stale.int(), -1)

    def call(kernels: Kernels, slots, tables, tokens, tried):
        return kernels.locate_drafts(slots, tables, head(tokens, rows, width), tried[:rows])

    tables = draft_tables(
        length, length=length, limit=limit, num_drafts=num_drafts, drafted_at=drafted_at
    )
    given = (slots, tables, places(rows, width), spoilt(rows + 2))
    *_, tried = agree(device, call, *given)
    assert tried[:rows][slots == 0].count_nonzero() == 0
    if rows > 30:
        assert {0, 1, width} <= set(tried[:rows][slots > 0].tolist())


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_new_tokens_are_located(device, rows, width):
    slots, length, _, _ = World.of(rows, width)
    drafter_len = table_of(length - torch.minimum(ints(0, width + 3, rows + 2), length))

    def call(kernels: Kernels, slots, length, drafter_len, tokens):
        return kernels.locate_confirmed(slots, length, drafter_len, head(tokens, rows, width))

    agree(device, call, slots, length, drafter_len, places(rows, width))


# Acceptance, and the tokens that are kept


@pytest.mark.parametrize("right", ["all", "none", "some"])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_drafts_are_accepted_up_to_the_first_wrong_one(device, rows, width, right):
    """After it, some drafts equal the sampled token by chance."""
    slots, length, _, tokens = World.of(rows, width)
    tried = ints(0, width + 1, rows) * (slots > 0)
    sampled = ints(0, 3, rows, width)
    for row, slot in enumerate(slots.tolist()):
        begin, num = int(length[slot]) + 1, int(tried[row])
        if slot and right != "some":
            change = 0 if right == "all" else 1
            tokens[slot, begin : begin + num] = (sampled[row, :num] + change) % 3
        sampled[row, num:] = -7

    def call(kernels: Kernels, slots, tried, sampled, tables, verified):
        kernels.accept(slots, tried, sampled, tables, verified[:rows])

    tables = draft_tables(length, tokens=tokens, length=length)
    given = (slots, tried, sampled, tables, spoilt(rows + 2))
    *_, verified = agree(device, call, *given)
    wanted = {"all": tried, "none": tried.clamp_max(1)}.get(right, verified[:rows])
    assert torch.equal(verified[:rows], wanted)
    assert (verified[:rows] <= tried).all()


@pytest.mark.parametrize("size", [0, 1, 33, 1100])
@pytest.mark.parametrize("is_half", [True, False])
def test_new_tokens_are_kept(device, half, is_half, size):
    rows, width, dtype = 7, 3, half if is_half else torch.float32
    slots, *_ = World.of(rows, width)
    counts = ints(0, width + 1, rows) * (slots > 0)
    x = torch.randn(rows, width, size)
    x[torch.arange(width) >= counts[:, None]] = NAN
    table = torch.randn(rows + 2, width + 1, size)
    table[:, width] = NAN
    given = (slots, counts, x.to(dtype).flatten(0, 1), table.to(dtype))
    agree(device, lambda kernels, *given: kernels.store_features(*given), *given)


@pytest.mark.parametrize("size", [0, 33, 1100])
def test_the_nodes_of_a_path_are_kept(device, half, size):
    rows, width = 7, 5
    slots, *_ = World.of(rows, width)
    counts = ints(0, width + 1, rows) * (slots > 0)
    x = torch.full((rows, width, size), NAN, dtype=half)
    path = torch.zeros(rows, width, dtype=torch.int32)
    for row, num in enumerate(counts.tolist()):
        path[row, :num] = torch.randperm(width)[:num].sort().values.int()
        x[row, path[row, :num].long()] = torch.randn(num, size, dtype=half)
    table = torch.randn(rows + 2, width + 1, size, dtype=half)

    def call(kernels: Kernels, slots, counts, x, table, path):
        kernels.store_features(slots, counts, x, table, path)

    *_, kept, _ = agree(device, call, slots, counts, x.flatten(0, 1), table, path)
    assert not kept.isnan().any()


@pytest.mark.parametrize("size", [1, 33, 1100])
@pytest.mark.parametrize("is_half", [True, False])
def test_the_last_token_is_kept_and_fetched(device, half, is_half, size):
    """x and the table are slices of wider tensors."""
    rows, dtype = 7, half if is_half else torch.float32
    slots, *_ = World.of(rows, 2)
    last = torch.randperm(20)[:rows].int()
    x, table = (torch.randn(n, size + 8).to(dtype) for n in (20, rows + 2))
    x[last[slots == 0]] = NAN

    def call(kernels: Kernels, slots, last, x, table):
        kernels.store_last(slots, last, x[:, :size], table[:, :size])
        return kernels.load_features(slots, table[:, None, :size])

    *_, kept = agree(device, call, slots, last, x, table)
    assert not kept.isnan().any()


@pytest.mark.parametrize("size", [0, 1, 33, 1100])
def test_decoded_tokens_are_kept_after_the_others(device, half, size):
    rows, most = 40, 5
    slots, length, *_ = World.of(rows, most)
    behind = ints(-1, most + 2, rows + 2)  # some have no room, and some are invalid
    positions = torch.where(slots > 0, length[slots], 0)
    x, table = torch.randn(rows, size).to(half), torch.randn(rows + 2, most, size).to(half)

    def call(kernels: Kernels, slots, positions, drafter_len, x, table):
        kernels.store_next(Tokens(slots, positions), drafter_len, x, table)

    *_, kept = agree(device, call, slots, positions, table_of(length - behind, -1), x, table)
    written = (kept != table).any(-1).sum(-1)
    has_room = (behind >= 0) & (behind < most)
    expected = torch.zeros(rows + 2, dtype=torch.bool).index_fill(0, slots[slots > 0].long(), True)
    assert size == 0 or torch.equal(written > 0, expected & has_room)
    assert written.max() <= 1


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_a_slot_is_followed_to_the_end_of_its_row(device, rows, width):
    slots, *_ = World.of(rows, width)
    counts = ints(0, 2, rows)
    last = torch.where(slots > 0, ints(0, width, rows) + torch.arange(rows).int() * width, 0)

    def call(kernels: Kernels, slots, counts, positions, last, drafter_len):
        places = Rows(slots, slots, counts, slots)
        kernels.set_drafter_len(places, Tokens(slots, positions), last, drafter_len)

    positions, before = ints(100, 199, rows * width), table_of(ints(0, 99, rows + 2), -1)
    *_, after = agree(device, call, slots, counts, positions, last, before)
    moved = torch.zeros_like(before, dtype=torch.bool)
    moved[slots[(slots > 0) & (counts > 0)].long()] = True
    assert torch.equal(after > 99, moved)


@pytest.mark.parametrize("size", [0, 33, 1100])
def test_places_are_fetched(device, half, size):
    slots, *_ = World.of(7, 3)
    table = torch.randn(9, 5, size, dtype=half)
    table[:, 3:] = NAN
    agree(
        device,
        lambda kernels, slots, table: kernels.load_features(slots, table[:, :3]),
        slots,
        table,
    )


# Drafting


@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_drafts_are_allotted(device, rows, width):
    slots, length, limit, _ = World.of(rows, width)
    paged = table_of(length + ints(0, width + 3, rows + 2))
    speculates, target = ints(0, 2, rows + 2), table_of(length + ints(-2, 2, rows + 2))

    def call(kernels: Kernels, *given):
        return kernels.draft_budget(*given, width - 1)

    tables = draft_tables(
        length,
        length=length,
        limit=limit + 2,
        paged=paged,
        speculates=table_of(speculates),
        target=target,
    )
    agree(device, call, slots, tables)


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize(("rows", "width"), SIZES)
def test_draft_passes_are_located(device, rows, width, behind):
    slots, length, _, _ = World.of(rows, width)
    num = ints(0, width, rows) * (slots > 0)

    def call(kernels: Kernels, *given):
        return kernels.draft_targets(DraftRows(*given), width - 1, behind)

    agree(device, call, slots, length[slots], num)


def test_one_compiled_kernel_locates_every_draft_pass(device):
    ones = torch.ones(3, dtype=torch.int32, device=device)
    aims = TritonKernels().draft_targets(DraftRows(ones, ones, ones), 2, 0)
    assert all(aim.data_ptr() % 16 == 0 for tensor in aims for aim in tensor)


@pytest.mark.parametrize("rows", [1, 7, 150])
def test_a_drafted_token_is_stored(device, rows):
    slots, length, _, tokens = World.of(rows, 3)
    positions = torch.where(slots > 0, length[slots] + 1, 2**30)
    tokens[0] = -7
    given = (slots, positions, ints(5, 99, rows), tokens)
    *_, noted = agree(device, lambda kernels, *given: kernels.store_drafts(*given), *given)
    assert (noted != tokens).sum() == (slots > 0).sum()


@pytest.mark.parametrize("rows", [1, 7, 150])
def test_a_draft_is_closed(device, rows):
    slots, length, _, _ = World.of(rows, 3)
    tables = draft_tables(length, num_drafts=spoilt(rows + 2), drafted_at=length)
    given = (DraftRows(slots, ints(0, 99, rows), ints(0, 5, rows)), tables)
    agree(device, lambda kernels, *given: kernels.set_num_drafts(*given), *given)


@pytest.mark.parametrize("steps", [1, 4, 15])
def test_n_grams_recall_what_followed(device, steps):
    """Some texts have few words, some repeat none, and some are longer than one search block. One
    that repeats itself is continued from its own drafts. Tokens after a text are never matched."""
    torch.manual_seed(steps)
    longest = 2 * SEARCHED_BLOCK + 50
    lengths = [0, 9, 0, 1, 2, 3, 5, 40, SEARCHED_BLOCK, SEARCHED_BLOCK + 1, longest, 700, 700, 700]
    rows = len(lengths) - 1
    tokens = ints(0, 3, rows + 1, longest + 20)
    tokens[11, : longest + 1] = torch.arange(longest + 1).int()
    tokens[11, 100:103] = tokens[11, 698:701]  # far back, and the only match
    tokens[12, :701] = torch.arange(701).int()
    tokens[13, :701] = 7
    for slot, length in enumerate(lengths):
        tokens[slot, length + 1 :] = tokens[slot, max(0, length - 3)]
    slots = torch.cat((torch.tensor([0]), torch.randperm(rows) + 1, torch.tensor([0]))).int()
    length = torch.tensor(lengths).int()[slots]
    num = ints(0, steps + 1, rows + 2)
    num[(slots == 0) | (slots == 1)] = 0
    num[slots > 9] = steps
    tokens[0] = 0

    def call(kernels: Kernels, *given):
        *rows, tokens = given
        return kernels.propose_ngrams(DraftRows(*rows), tokens, steps, 2, 4)

    *_, known = agree(device, call, slots, length, num, tokens)
    assert torch.equal(known[11, 701 : 701 + steps], known[11, 103 : 103 + steps])
    assert torch.equal(known[12], tokens[12])
    assert (known[13, 701 : 701 + steps] == 7).all()


@pytest.mark.parametrize(("drafts", "vocab"), [(1, 3), (37, 101), (600, 5003)])
@pytest.mark.parametrize("is_half", [True, False])
def test_logits_are_spread_over_the_vocabulary(device, half, is_half, drafts, vocab):
    wide = torch.randn(3, drafts + 8).to(half if is_half else torch.float32)
    wide[1, 0] = NAN
    draft_of = torch.full((vocab,), -1, dtype=torch.int32)
    draft_of[torch.randperm(vocab)[:drafts]] = torch.arange(drafts).int()

    def call(kernels: Kernels, wide, draft_of):
        return kernels.expand_draft_vocab(wide[:, :drafts], draft_of)

    agree(device, call, wide, draft_of)


# All kernels together


@pytest.mark.parametrize(("drafter", "topk"), [("eagle3", 1), ("eagle3", 3), ("ngram", 1)])
def test_no_token_changes(device, monkeypatch, few_programs, drafter, topk):
    """The prompt repeats itself, so that n-grams match."""
    settings = {
        "backend": "eager", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 1,
        "show_progress": False, "max_model_len": 64, "kv_cache_memory": 1 << 24,
        "lazy_recording": True,
    }  # fmt: skip
    prompt = {"prompt_token_ids": [3, 4, 5, 6] * 3}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    answers = []
    speculation = {"speculative": drafter, "speculative_steps": 2, "speculative_topk": topk}
    for more in ({}, speculation):
        outputs = LLM("tiny:llama", **settings, **more).generate(prompt, params, use_tqdm=False)
        answers.append(outputs[0].outputs[0].token_ids)
        if device.type == "cpu":  # interpret the kernels from here on
            monkeypatch.setattr("slotzero.executor.build.kernels_for", lambda *_: TritonKernels())
    assert answers[0] == answers[1]
