"""Tests of the tables against a plain dict: staged words are written only where they belong."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotzero.errors import CapacityError, ConfigError, ContractError
from slotzero.graph import Registry
from slotzero.pools import budget
from slotzero.pools.tables import MAX_WORDS, SlotTables, Staging
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, TableSpec, encode, mask_tables
from slotzero.system.memory import SystemMemory

NUM_SLOTS, MAX_LEN, PAGES, VOCAB = 3, 7, 4, 65
SPECS = (*SAMPLING_TABLES, *mask_tables(VOCAB))
WIDTHS = {"tokens": MAX_LEN + 1, "length": 1, "target": 1, "page_table": PAGES} | {
    spec.name: spec.width for spec in SPECS
}
NEUTRAL = dict.fromkeys(WIDTHS, 0) | {spec.name: spec.neutral for spec in SPECS}
FLOATS = {spec.name for spec in SPECS if spec.dtype == "float32"}


def make() -> SlotTables:
    return SlotTables(
        Registry(torch.device("cpu")), NUM_SLOTS, MAX_LEN, PAGES, VOCAB, ["page_table"]
    )


def rows_of(tables: SlotTables, name: str) -> list[list[int | float]]:
    return tables[name].reshape(NUM_SLOTS + 1, WIDTHS[name]).tolist()


def neutral_rows(name: str) -> list[list[int | float]]:
    return [[NEUTRAL[name]] * WIDTHS[name] for _ in range(NUM_SLOTS + 1)]


def test_every_row_starts_neutral() -> None:
    tables = make()
    for name in WIDTHS:
        assert rows_of(tables, name) == neutral_rows(name), name
        assert tables[name].dtype == (torch.float32 if name in FLOATS else torch.int32)
        assert tables[name].dim() == (1 if WIDTHS[name] == 1 else 2)


def test_the_last_word_of_the_largest_tables_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has the most columns that are accepted for 65,535 slots."""
    num_slots, width = 2**16 - 1, 2**15 - 1
    with monkeypatch.context() as patch:  # a sparse file instead of 8 GiB of memory

        def sparse(shape: int, dtype: type[np.generic]) -> np.ndarray:
            return np.memmap(tmp_path / "words", dtype, "w+", shape=shape)

        patch.setattr(np, "zeros", sparse)
        staging = Staging(num_slots, [TableSpec("tokens", width, "int32", 0)])
    assert MAX_WORDS - num_slots <= staging.num_words <= MAX_WORDS
    staging.stage("tokens", num_slots, [7, 8], width - 2)
    writes = staging.take()
    assert writes is not None
    assert writes.tolist() == [[staging.num_words - 2, staging.num_words - 1], [7, 8]]
    assert staging.place_of(staging.num_words - 1) == ("tokens", num_slots, width - 1)


@pytest.mark.parametrize(("num_slots", "max_len"), [(2**16 - 1, 2**15 - 1), (1, 2**31)])
def test_tables_that_cannot_be_addressed_are_refused(num_slots: int, max_len: int) -> None:
    """None of their memory is allocated."""
    remedy = "lower --max-num-seqs or --max-model-len"
    with pytest.raises(ConfigError, match=rf"^max_num_seqs={num_slots}: .*: {remedy}$"):
        SlotTables(Registry(torch.device("cpu")), num_slots, max_len, 1, VOCAB, ["page_table"])
    with pytest.raises(ConfigError, match=remedy):
        Staging(num_slots, [TableSpec("tokens", max_len + 1, "int32", 0)])


def test_taken_writes_can_be_staged_again() -> None:
    tables = make()
    tables.stage("length", 1, [5])
    tables.stage("top_k", 2, [7])
    lost = tables.take()
    assert lost is not None and rows_of(tables, "length") == neutral_rows("length")
    tables.stage("length", 3, [9])
    tables.stage("length", 1, [6])
    tables.take_back()
    tables.apply()
    assert rows_of(tables, "length") == [[0], [6], [0], [9]]
    assert rows_of(tables, "top_k")[2] == [7]
    tables.take_back()  # the next upload writes it again
    tables.apply()
    assert rows_of(tables, "length") == [[0], [6], [0], [9]]


def test_tables_that_exceed_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "memory", lambda: SystemMemory(1 << 10, 1 << 10))
    with pytest.raises(CapacityError, match=r"tables of 3 requests need .* lower --max-num-seqs"):
        make()


@pytest.mark.parametrize("name", WIDTHS)
def test_a_value_is_written_only_to_its_slot_and_column(name: str) -> None:
    for slot in range(1, NUM_SLOTS + 1):
        for column in {0, WIDTHS[name] // 2, WIDTHS[name] - 1}:
            tables = make()
            tables.stage(name, slot, [5], column)
            assert rows_of(tables, name) == neutral_rows(name)  # not before it is applied
            tables.apply()
            expected = {other: neutral_rows(other) for other in WIDTHS}
            expected[name][slot][column] = 5
            assert {other: rows_of(tables, other) for other in WIDTHS} == expected


def test_the_later_value_wins() -> None:
    tables = make()
    tables.stage("page_table", 2, [1, 2, 3])
    tables.stage("page_table", 2, [9, 8], first=1)
    tables.stage("page_table", 2, [7], first=1)
    tables.apply()
    assert rows_of(tables, "page_table")[2] == [1, 7, 8, 0]


@pytest.mark.parametrize(("vocab", "words"), [(1, 1), (32, 1), (33, 2), (151_936, 4748)])
def test_a_mask_has_a_bit_for_every_token(vocab: int, words: int) -> None:
    tables = SlotTables(Registry(torch.device("cpu")), 2, 1, 1, vocab, ["page_table"])
    assert tables["allowed"].shape == (3, words)
    assert (tables["allowed"] == -1).all() and not tables["is_masked"].any()


def test_staging_copies_the_values() -> None:
    tables = make()
    mask = np.array([5, 6, 7], dtype=np.int32)
    tables.stage("allowed", 1, mask)
    mask[:] = 9  # the caller reuses its array
    tables.apply()
    assert rows_of(tables, "allowed")[1] == [5, 6, 7]


def test_apply_is_done_once() -> None:
    tables = make()
    tables.stage("length", 1, [4])
    tables.apply()
    tables.length[1] = 5  # as a step does
    tables.apply()
    assert tables.length[1] == 5


def test_floats_keep_every_bit_and_the_sign_of_zero() -> None:
    values = np.array([-0.0, 1e-45, 3.4028235e38, -1 / 3], dtype=np.float32)
    tables = make()
    tables.stage("bias_values", 2, values.tolist())
    tables.apply()
    stored = tables["bias_values"][2, :4].numpy()
    assert stored.tobytes() == values.tobytes()


def test_a_row_of_a_request_arrives_whole() -> None:
    tables = make()
    params = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.5, min_p=0.25, repetition_penalty=1.5, seed=-1,
        presence_penalty=-1, frequency_penalty=2, logit_bias={3: -2.5, 7: 1}, min_tokens=2,
        stop_token_ids=[9], logprobs=4,
    )  # fmt: skip
    row = encode(params, -1, 3, [9, 2])
    for name, values in row.items():
        tables.stage(name, 2, values)
    tables.apply()
    for name, values in row.items():
        assert rows_of(tables, name)[2] == np.float32(values).tolist(), name
        assert rows_of(tables, name)[1] == neutral_rows(name)[1], name


def test_reset_returns_everything_but_tokens() -> None:
    tables = make()
    for slot in (1, 2):
        for name, width in WIDTHS.items():
            tables.stage(name, slot, [3] * width)
    tables.apply()
    tables.reset(2)
    tables.apply()
    for name, width in WIDTHS.items():
        assert rows_of(tables, name)[1] == [3] * width
        expected = 3 if name == "tokens" else NEUTRAL[name]
        assert rows_of(tables, name)[2] == [expected] * width


def test_reset_before_apply_and_a_new_owner_after_it() -> None:
    """Within one step, writes of the last owner are dropped, and those of the next one are kept."""
    tables = make()
    tables.stage("stop_ids", 1, [5, 6, 7])
    tables.stage("top_p", 1, [0.5])
    tables.reset(1)
    tables.stage("stop_ids", 1, [8])
    tables.apply()
    assert rows_of(tables, "stop_ids")[1][:4] == [8, -1, -1, -1]
    assert rows_of(tables, "top_p")[1] == [1]
    tables.reset(1)
    tables.apply()
    assert rows_of(tables, "stop_ids") == neutral_rows("stop_ids")


def test_reset_returns_what_a_step_wrote_in_a_staged_column() -> None:
    tables = make()
    tables.stage("length", 3, [2])
    tables.apply()
    tables.length[3] += 4
    tables.reset(3)
    tables.apply()
    assert tables.length.tolist() == [0] * (NUM_SLOTS + 1)


@pytest.mark.parametrize("slot", [0, -1, NUM_SLOTS + 1])
def test_slot_zero_and_foreign_slots_are_refused(slot: int) -> None:
    tables = make()
    with pytest.raises(ContractError, match=rf"table 'target': slot {slot} is not one of 1 to 3"):
        tables.stage("target", slot, [1])
    tables.reset(slot)  # nothing was written there, so there is nothing to undo
    tables.apply()
    assert all(rows_of(tables, name) == neutral_rows(name) for name in WIDTHS)


@pytest.mark.parametrize(
    ("name", "num_values", "first"),
    [("length", 2, 0), ("page_table", PAGES + 1, 0), ("page_table", 1, PAGES), ("tokens", 8, 1)],
)
def test_too_many_columns_are_refused(name: str, num_values: int, first: int) -> None:
    tables = make()
    message = rf"table '{name}': {num_values} values from column {first} on do not fit"
    with pytest.raises(ContractError, match=message):
        tables.stage(name, 1, [1] * num_values, first)
    tables.apply()
    assert all(rows_of(tables, name) == neutral_rows(name) for name in WIDTHS)


def test_a_column_before_the_first_is_refused() -> None:
    """For slot 1 it would be the last column of slot 0."""
    tables = make()
    with pytest.raises(ContractError, match="'page_table'"):
        tables.stage("page_table", 1, [5], first=-1)
    tables.apply()
    assert rows_of(tables, "page_table") == neutral_rows("page_table")


MOVES = st.lists(
    st.one_of(
        st.tuples(
            st.just("stage"),
            st.sampled_from(sorted(WIDTHS)),
            st.integers(-1, NUM_SLOTS + 1),
            st.integers(0, 9),
            st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
        ),
        st.tuples(st.just("reset"), st.integers(1, NUM_SLOTS)),
        st.tuples(st.just("apply")),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(moves=MOVES)
def test_it_behaves_like_a_dict(moves: list[tuple]) -> None:
    tables = make()
    staged = {name: neutral_rows(name) for name in WIDTHS}
    applied = copy.deepcopy(staged)
    for move in [*moves, ("apply",)]:
        match move:
            case ("stage", name, slot, first, values):
                if name in FLOATS:
                    values = [float(np.float32(value / 7)) for value in values]
                if 1 <= slot <= NUM_SLOTS and first + len(values) <= WIDTHS[name]:
                    tables.stage(name, slot, values, first)
                    staged[name][slot][first : first + len(values)] = values
                else:
                    with pytest.raises(ContractError):
                        tables.stage(name, slot, values, first)
            case ("reset", slot):
                tables.reset(slot)
                for name, width in WIDTHS.items():
                    if name != "tokens":
                        staged[name][slot] = [NEUTRAL[name]] * width
            case ("apply",):
                tables.apply()
                applied = copy.deepcopy(staged)
        for name in WIDTHS:
            assert rows_of(tables, name) == applied[name]
            assert rows_of(tables, name)[0] == neutral_rows(name)[0]
