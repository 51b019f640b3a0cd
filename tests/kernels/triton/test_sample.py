"""Tests of fused sampling against the reference: all parameters, over poisoned memory."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_requests import ints, tables_of
from torch import Tensor

from slotzero.config import LOGPROBS_MODES
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.sampling import sample
from slotzero.kernels.triton.write_back import advance
from slotzero.sampling import reference
from slotzero.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams
from slotzero.sampling.tables import Sampled, SamplingTables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter
INF, NAN = math.inf, math.nan
CHUNK = sample.CHUNK.value


@dataclass
class Request:
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    seed: int = 5
    tokens: Sequence[int] = ()
    prompt_len: int = 0
    stop_ids: Sequence[int] = ()
    allowed: Collection[int] | None = None
    logprobs_mode: str = "raw_logprobs"


def asks(tokens: Sequence[int] = (), prompt_len: int = 0, **choice: Any) -> Request:
    return Request(SamplingParams(**choice), 5, tokens, prompt_len)


def run(
    logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, device: torch.device
) -> Sampled:
    """Run the kernels into poisoned outputs, which are slices of larger tensors."""
    rows = logits.shape[0]
    out = Sampled(
        tokens=torch.full((rows + 2,), -7, dtype=torch.int32, device=device),
        logprobs=torch.full((rows + 2,), NAN, device=device),
        top_ids=torch.full((rows + 2, MAX_LOGPROBS), -7, dtype=torch.int32, device=device),
        top_logprobs=torch.full((rows + 2, MAX_LOGPROBS), NAN, device=device),
    )
    there = SamplingTables(*(table.to(device) for table in tables))
    head = Sampled(*(part[:rows] for part in out))
    sample.sample(logits.to(device), slots.to(device), positions.to(device), there, head)
    for part in out:  # nothing past the rows was written
        assert (part[rows:] == -7).all() or part[rows:].isnan().all()
    return Sampled(*(part.cpu() for part in head))


def run_all(logits: Tensor, requests: Sequence[Request], device: torch.device) -> Sampled:
    """Sample with row i for request i, and compare with the reference."""
    max_len = max(8, *(len(request.tokens) for request in requests))
    tables = tables_of(requests, max_len)
    slots = torch.arange(1, len(requests) + 1, dtype=torch.int32)
    positions = ints(*(len(request.tokens) for request in requests))
    result = run(logits, slots, positions, tables, device)
    assert_same(result, reference.sample(logits.float(), slots, positions, tables))
    return result


def run_one(logits: Any, request: Request, device: torch.device) -> Sampled:
    return run_all(torch.as_tensor(logits, dtype=torch.float32)[None], [request], device)


def assert_same(fast: Sampled, slow: Sampled) -> None:
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert torch.equal(fast.top_ids, slow.top_ids)
    for a, b in ((fast.logprobs, slow.logprobs), (fast.top_logprobs, slow.top_logprobs)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=2e-6, equal_nan=True)


def assert_equal_bits(a: Sampled, b: Sampled) -> None:
    for name, left, right in zip(Sampled._fields, a, b, strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32)), name


def logits_of(style: str, rows: int, vocab: int, seed: int = 0) -> Tensor:
    normal = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return {
        "normal": normal,
        "flat": normal / 30,
        "ties": normal.round(),  # with zeros of both signs
        "equal": torch.full_like(normal, -0.25),
        "masked": normal.masked_fill(normal < 4, -INF),
        "far": normal * 1e4,
        "huge": normal.sign() * 3e38,
    }[style]


STYLES = ["normal", "flat", "ties", "equal", "masked", "far", "huge"]
HISTORY = (3, 1, 1, 6, 1, 3, 3)
CHOICES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 1},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0, "repetition_penalty": 1.7, "logprobs": 0},
    {"temperature": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.7, "top_k": 9},
    {"temperature": 0, "logit_bias": {0: 30.0, 2: -3.0}, "logprobs": MAX_LOGPROBS},
    {"temperature": 2.0, "min_tokens": 9, "max_tokens": 9, "top_p": 0.5, "min_p": 0.01},
]


def everyone() -> list[Request]:
    return [
        Request(SamplingParams(**choice), seed, HISTORY, 3, [5, 2])
        for seed, choice in enumerate(CHOICES, start=2**31 - 3)
    ]


# ---- every parameter ----


@pytest.mark.parametrize("vocab", [7, CHUNK, CHUNK + 1])
def test_every_parameter(vocab: int, device: torch.device) -> None:
    requests = everyone()
    run_all(logits_of("normal", len(requests), vocab), requests, device)


@pytest.mark.parametrize("mode", LOGPROBS_MODES[1:])
@pytest.mark.parametrize(("style", "vocab"), [("normal", CHUNK + 70), ("ties", 300)])
def test_log_probabilities_in_every_mode(mode, style, vocab, device) -> None:
    requests = [
        replace(
            request,
            params=replace(request.params, logprobs=(0, 4, MAX_LOGPROBS)[i % 3]),
            allowed=range(0, vocab, 3) if i % 4 == 3 else None,
            logprobs_mode=mode,
        )
        for i, request in enumerate(everyone())
    ]
    run_all(logits_of(style, len(requests), vocab), requests, device)


@pytest.mark.parametrize("style", STYLES[1:])
def test_every_kind_of_logits(style: str, device: torch.device) -> None:
    requests = everyone()
    run_all(logits_of(style, len(requests), 300), requests, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_padded_rows(dtype: torch.dtype, device: torch.device) -> None:
    requests, vocab = everyone(), 130
    wide = torch.full((len(requests), vocab + 30), NAN).to(dtype)
    wide[:, :vocab] = logits_of("normal", len(requests), vocab)
    tables = tables_of(requests)
    slots = torch.arange(1, len(requests) + 1, dtype=torch.int32)
    positions = torch.full_like(slots, len(HISTORY))
    logits = wide.to(device)[:, :vocab]
    assert logits.stride(0) == vocab + 30
    expected = reference.sample(logits.cpu().float(), slots, positions, tables)
    assert_same(run(logits, slots, positions, tables, device), expected)


@pytest.mark.parametrize(("style", "first"), [("normal", 0), ("ties", 2)])
def test_only_what_a_grammar_allows(style: str, first: int, device: torch.device) -> None:
    """Other rows have no grammar, and all parameters are used."""
    vocab = CHUNK + 70
    masks = ([5, 31, 32, CHUNK - 1, CHUNK, vocab - 1], range(0, vocab, 3), [vocab], None)
    requests = [
        replace(request, allowed=masks[i % len(masks)])
        for i, request in enumerate(everyone(), start=first)
    ]
    result = run_all(logits_of(style, len(requests), vocab), requests, device)
    for request, token in zip(requests, result.tokens.tolist(), strict=True):
        assert request.allowed is None or token in request.allowed or token == 0


def test_a_mask_comes_first_and_hides_broken_logits(device: torch.device) -> None:
    for first in (9.0, NAN, INF):
        request = replace(asks([0, 0], 1, logit_bias={0: 90.0}, temperature=0), allowed=[1, 2])
        assert run_one([first, 1.0, 2.0], request, device).tokens.item() == 2


numbers = st.sampled_from
PARAMS = st.fixed_dictionaries(
    {
        "temperature": numbers([0.0, 1e-38, 0.5, 1.0, 30.0]),
        "top_k": numbers([0, 1, 3, 64, 10_000]),
        "top_p": numbers([1.0, 1e-6, 0.3, 0.99]),
        "min_p": numbers([0.0, 0.05, 1.0]),
        "repetition_penalty": numbers([1.0, 0.5, 3.0]),
        "presence_penalty": numbers([0.0, -1.0, 2.0]),
        "frequency_penalty": numbers([0.0, 0.3]),
        "logit_bias": numbers([{}, {0: 1.5, 6: -2.0}, {99_999: 3.0}]),
        "min_tokens": numbers([0, 3]),
        "logprobs": numbers([None, 0, 20]),
    }
)
REQUESTS = st.builds(
    Request,
    PARAMS.map(lambda choice: SamplingParams(**choice)),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(-1, 9), min_size=1, max_size=9),
    st.integers(0, 9),
    st.lists(st.integers(0, 9), max_size=3, unique=True),
    st.none() | st.sets(st.integers(0, 220), max_size=60),
    st.sampled_from(LOGPROBS_MODES),
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,  # a boundary decided by rounding may come up once in a million
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=4),
    style=st.sampled_from(STYLES),
    vocab=st.sampled_from([1, 7, 65, 200]),
    seed=st.integers(0, 2**31),
)
def test_any_parameters(requests, style, vocab, seed, device) -> None:
    run_all(logits_of(style, len(requests), vocab, seed), requests, device)


def test_plain_sampling_equals_the_reference_at_many_positions(device: torch.device) -> None:
    count = 12
    tables = tables_of([asks(temperature=1.0)], 1)
    slots, positions = torch.ones(count).int(), torch.arange(count).int() * 977
    logits = logits_of("flat", 1, 2 * CHUNK + 5).expand(count, -1)
    result = run(logits, slots, positions, tables, device)
    assert_same(result, reference.sample(logits, slots, positions, tables))
    assert len(set(result.tokens.tolist())) > count // 2


def test_equal_noise_goes_to_the_lower_index(device: torch.device) -> None:
    request = Request(SamplingParams(), seed=0, tokens=[0] * 527)  # found by search, see
    assert run_one(torch.zeros(20_000), request, device).tokens.item() == 7458  # test_sampling.py


# ---- the highest logit ----


def test_ties_go_to_the_lowest_index(device: torch.device) -> None:
    for first, *later in ([5, 6], [70, 129], [CHUNK - 1, CHUNK], [3, CHUNK + 9], [CHUNK + 9]):
        logits = torch.full((CHUNK + 10,), -1.0)
        logits[[first, *later]] = 0.0
        logits[first] = -0.0  # the zeros are equal
        assert run_one(logits, asks(temperature=0), device).tokens.item() == first


# broken values near the highest logit, and far from it
@pytest.mark.parametrize("vocab", [6, CHUNK + 200])
@pytest.mark.parametrize(
    "bad", [[NAN], [-NAN], [INF], [NAN, INF], [INF, -INF], [-INF, NAN]], ids=str
)
def test_a_broken_row_yields_token_zero_and_is_flagged(vocab, bad, device) -> None:
    logits = torch.zeros(3, vocab)
    logits[:, vocab - len(bad) :] = torch.tensor(bad)
    choices = ({"temperature": 0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}, {})
    result = run_all(logits, [asks(logprobs=2, **choice) for choice in choices], device)
    assert not result.tokens.any()
    assert result.logprobs.isnan().all()
    assert result.top_logprobs[:, :2].isnan().all()


def test_a_row_without_finite_logits_yields_token_zero(device: torch.device) -> None:
    for temperature in (0, 1):
        result = run_one([-INF] * 9, asks(temperature=temperature, logprobs=1), device)
        assert result.tokens.item() == 0
        assert result.logprobs.isnan().all()
    banned = Request(SamplingParams(min_tokens=1, logprobs=0), stop_ids=[0, 1])
    result = run_one([1.0, 1.0], banned, device)
    assert result.tokens.item() == 0
    assert result.logprobs.item() == pytest.approx(-math.log(2))


# ---- floors ----


def kept_by_kernel(logits, params, device, monkeypatch) -> Tensor:
    """Return which tokens are on or above the floor that the kernels find: [vocab]."""
    made = []
    scratch_of = sample._scratch
    monkeypatch.setattr(
        sample, "_scratch", lambda *args: made.append(scratch_of(*args)) or made[-1]
    )
    run_one(logits, Request(params), device)
    scaled = (logits - logits.max()) / params.temperature
    return scaled >= made[0].floor.cpu()


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 150},
    {"top_p": 1e-9},
    {"top_p": 0.4},
    {"top_p": 0.97},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.6},
    {"top_k": 90, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("style", ["flat", "ties", "masked"])
@pytest.mark.parametrize("choice", FILTERS, ids=str)
def test_the_floor_equals_that_of_a_plain_loop(choice, style, device, monkeypatch) -> None:
    params = SamplingParams(temperature=0.7, **choice)
    logits = logits_of(style, 1, 200, 11)[0]
    scaled = (logits - logits.max()) / params.temperature
    own = SamplingTables(*(table[1:] for table in tables_of([Request(params)])))
    expected = scaled >= reference.floor(scaled[None], own)
    assert torch.equal(kept_by_kernel(logits, params, device, monkeypatch), expected)


@pytest.mark.parametrize("style", ["normal", "flat", "ties", "equal"])
@pytest.mark.parametrize("choice", [{"top_k": 3}, {"top_k": 70}, {"top_p": 0.8}], ids=str)
def test_the_floor_of_a_long_row(choice, style, device, monkeypatch) -> None:
    """The row is so long that not all groups are listed, and too few of them if it is flat."""
    params = SamplingParams(temperature=1.0, **choice)
    logits = logits_of(style, 1, 3 * CHUNK - 70, 12)[0]
    scaled = logits - logits.max()
    own = SamplingTables(*(table[1:] for table in tables_of([Request(params)])))
    expected = scaled >= reference.floor(scaled[None], own)
    assert torch.equal(kept_by_kernel(logits, params, device, monkeypatch), expected)


def test_a_token_just_below_the_floor_is_never_chosen(device: torch.device) -> None:
    """The cheap bound cannot distinguish it from the floor; the exact value must."""
    row = torch.full((40,), -1.0).nextafter(torch.tensor(-2.0))
    row[3], row[7] = 0.0, -1.0
    slots, positions = torch.ones(4).int(), torch.arange(4).int()
    tables = tables_of([asks(top_k=2)], 1)
    result = run(row.expand(4, -1), slots, positions, tables, device)
    assert set(result.tokens.tolist()) <= {3, 7}


def test_the_smallest_temperature_does_not_overflow(device: torch.device) -> None:
    for temperature in (1e-38, 1e-42):
        request = asks(temperature=temperature, top_p=0.9)
        assert run_one([5.0, 9.0, 9.0, -9.0, -INF], request, device).tokens.item() in (1, 2)


# ---- penalties, bias, early endings ----


def test_a_long_history_is_counted_once_per_token(device: torch.device) -> None:
    vocab, length = CHUNK + 50, 2 * sample.HISTORY.value + 30
    tokens = torch.randint(-3, vocab + 3, (length,), generator=torch.Generator().manual_seed(1))
    tokens[::3] = CHUNK + 7  # thousands of one token, and ids outside the vocabulary
    choices = (
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.01},
        {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": -0.001},
    )
    requests = [
        asks(tokens.tolist(), length // 3, temperature=temperature, logprobs=1, **choice)
        for choice in choices
        for temperature in (0, 1.0)
    ]
    run_all(logits_of("normal", len(requests), vocab), requests, device)


def test_adjusted_logits_equal_the_reference(device: torch.device, monkeypatch) -> None:
    made = []
    scratch_of = sample._scratch
    monkeypatch.setattr(
        sample, "_scratch", lambda *args: made.append(scratch_of(*args)) or made[-1]
    )
    bias = {i * 5: i / 7 - 9 for i in range(MAX_LOGIT_BIAS)}
    params = SamplingParams(
        temperature=0, repetition_penalty=1.37, presence_penalty=0.31, frequency_penalty=0.77,
        logit_bias=bias, min_tokens=16,
    )  # fmt: skip
    vocab, tokens = CHUNK + 300, [*range(0, 4000, 37), 5, 5, 5, CHUNK + 5, CHUNK + 5]
    request = Request(params, 0, tokens, 100, [*range(60, 60 + MAX_STOP_IDS)])
    logits = logits_of("normal", 1, vocab)
    run_all(logits, [request], device)
    own = SamplingTables(*(table[1:] for table in tables_of([request], len(tokens))))
    expected = reference.adjust(logits, ints(len(tokens)), own)
    assert torch.equal(made[0].adjusted[:, :vocab].cpu(), expected)


def test_only_tokens_before_the_position_count(device: torch.device) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    tables = tables_of([Request(params, tokens=[1, 0, 0, -1, 3, 2**31 - 1])])
    logits = torch.tensor([[1.0, 0.9, 0.8]])
    for position, expected in ((0, 0), (1, 0), (2, 2), (6, 2), (2**31 - 1, 2)):
        result = run(logits, ints(1), ints(position), tables, device)
        assert result.tokens.item() == expected


def test_stop_ids_wait_for_min_tokens(device: torch.device) -> None:
    params = SamplingParams(temperature=0, min_tokens=2)
    for num_new, expected in ((0, 1), (1, 1), (2, 3)):
        request = Request(params, 0, [5] * (3 + num_new), 3, [3, 2])
        assert run_one([0.0, 1.0, 2.0, 3.0], request, device).tokens.item() == expected


def test_nothing_is_remembered_between_calls(device: torch.device) -> None:
    for token, expected in ((0, 1), (1, 0), (0, 1)):
        request = asks([token], 1, temperature=0, repetition_penalty=2.0)
        assert run_one([1.0, 0.9], request, device).tokens.item() == expected


# ---- log probabilities ----


@pytest.mark.parametrize("style", ["normal", "ties", "masked", "far"])
def test_log_probabilities_across_chunks(style: str, device: torch.device) -> None:
    requests = [asks(temperature=0, logprobs=n) for n in (0, 1, MAX_LOGPROBS)]
    run_all(logits_of(style, len(requests), 2 * CHUNK + 3), requests, device)


def test_only_requested_log_probabilities_are_written(device: torch.device) -> None:
    logits = torch.tensor([1.0, 2.0, 0.0])
    unwanted, chosen_only, everything = (
        run_one(logits, asks(temperature=0, logprobs=n), device) for n in (None, 0, 20)
    )
    assert unwanted.logprobs.item() == 0
    assert chosen_only.logprobs.item() == pytest.approx(-0.40760595)
    for result in (unwanted, chosen_only):
        assert not result.top_ids.any()
        assert not result.top_logprobs.any()
    assert everything.top_ids[0, :4].tolist() == [1, 0, 2, 0]
    assert everything.top_logprobs[0, 2] < 0 == everything.top_logprobs[0, 3]


# ---- padding and neighbours ----


def mixed_batch() -> tuple[Tensor, Tensor, Tensor, SamplingTables]:
    requests = [request for i, request in enumerate(everyone()) if i in (0, 1, 3, 4, 7, 8)]
    slots = torch.arange(1, len(requests) + 1, dtype=torch.int32)
    logits = logits_of("normal", len(requests), CHUNK + 200, 9)
    return logits, slots, torch.full_like(slots, len(HISTORY)), tables_of(requests)


def test_rows_of_slot_zero_are_zeros(device: torch.device) -> None:
    logits, slots, positions, tables = mixed_batch()
    alone = run(logits, slots, positions, tables, device)
    for table in tables:
        table[0] = 7
    hostile = torch.tensor([NAN, INF, 5.0])[:, None].expand(3, logits.shape[1])
    padded = torch.cat([hostile[:1], logits, hostile[1:]])
    padding = ints(0)
    result = run(
        padded,
        torch.cat([padding, slots, padding, padding]),
        torch.cat([ints(2**31 - 1), positions, ints(-5, 3)]),
        tables,
        device,
    )
    for part in result:
        assert not part[[0, -2, -1]].any()
    assert_equal_bits(Sampled(*(part[1:-2] for part in result)), alone)


def test_a_row_depends_on_no_other(device: torch.device, monkeypatch) -> None:
    logits, slots, positions, tables = mixed_batch()
    together = run(logits, slots, positions, tables, device)
    order = torch.randperm(len(slots))
    shuffled = run(logits[order], slots[order], positions[order], tables, device)
    assert_equal_bits(Sampled(*(part[order] for part in together)), shuffled)
    broken = logits.clone()
    broken[1:] = NAN
    beside = run(broken, slots, positions, tables, device)
    assert_equal_bits(Sampled(*(part[:1] for part in together)), Sampled(*(p[:1] for p in beside)))
    monkeypatch.setattr(sample, "CHOOSERS", 1)  # one program for all chunks, as in a big batch
    assert_equal_bits(together, run(logits, slots, positions, tables, device))
    for row in (1, 2):
        part = [row]
        alone = run(logits[part], slots[part], positions[part], tables, device)
        assert_equal_bits(Sampled(*(column[part] for column in together)), alone)


@pytest.mark.skipif(INTERPRETED, reason="too much for the interpreter")
def test_a_real_vocabulary(device: torch.device) -> None:
    requests = everyone() * 4
    logits = logits_of("normal", len(requests), 151_936).to(torch.bfloat16)
    run_all(logits, requests, device)


@pytest.mark.skipif(INTERPRETED, reason="records a CUDA graph")
def test_a_captured_graph_keeps_no_values_of_its_capture(device: torch.device) -> None:
    logits, slots, positions, tables = (
        part.to(device) if isinstance(part, Tensor) else part for part in mixed_batch()
    )
    tables = SamplingTables(*(table.to(device) for table in tables))
    rows = len(slots)
    out = Sampled(
        tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        logprobs=torch.zeros(rows, device=device),
        top_ids=torch.zeros(rows, MAX_LOGPROBS, dtype=torch.int32, device=device),
        top_logprobs=torch.zeros(rows, MAX_LOGPROBS, device=device),
    )
    row_slots = slots.clone().zero_()
    sample.sample(logits, row_slots, positions, tables, out)  # compile the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample.sample(logits, row_slots, positions, tables, out)
    row_slots.copy_(slots)
    for sign in (1, -1):
        expected = run(logits * sign, slots, positions, tables, device)
        saved = logits.clone()
        logits.mul_(sign)
        for part in out:
            part.fill_(9)
        graph.replay()
        assert_equal_bits(Sampled(*(part.cpu() for part in out)), expected)
        logits.copy_(saved)


# ---- advancing the tables ----


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_advance(rows: int, device: torch.device) -> None:
    width = 12
    slots = torch.randperm(rows + 3)[:rows].int() + 1
    slots[2::4] = 0
    new_length, sampled = torch.randint(0, width, (2, rows)).int()
    target = torch.randint(0, width, (rows + 4,)).int()
    length = torch.full((rows + 4,), -1).int()
    tokens = torch.full((rows + 4, width), -1).int()
    expected = sampled.clone(), length.clone(), tokens.clone()
    for r in range(rows):
        slot, new = int(slots[r]), int(new_length[r])
        samples = slot > 0 and new >= target[slot]
        if samples:
            expected[2][slot, new] = sampled[r]
        else:
            expected[0][r] = 0
        if slot > 0:
            expected[1][slot] = new
    there = [t.to(device) for t in (slots, new_length, target, length, tokens, sampled)]
    advance(*there)
    for name, result, plain in zip(
        ("sampled", "length", "tokens"), (there[5], there[3], there[4]), expected, strict=True
    ):
        assert torch.equal(result.cpu(), plain), name
