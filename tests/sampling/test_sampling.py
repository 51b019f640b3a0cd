"""Tests of sampling: the parameters, the plain definition, and the CPU kernel against it."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_requests import ints, tables_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from slotzero.config import LOGPROBS_MODES
from slotzero.errors import RequestError
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.sampling import noise, reference
from slotzero.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    SamplingParams,
)
from slotzero.sampling.tables import (
    SAMPLING_TABLES,
    Sampled,
    SamplingTables,
    encode,
    mask_tables,
)

INF = math.inf
NAN = math.nan


KERNELS = CpuKernels()


def fused(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables) -> Sampled:
    """Sample with the C++ kernel, into poisoned outputs."""
    rows = len(logits)
    out = Sampled(
        tokens=torch.full((rows,), -7, dtype=torch.int32),
        logprobs=torch.full((rows,), NAN),
        top_ids=torch.full((rows, MAX_LOGPROBS), -7, dtype=torch.int32),
        top_logprobs=torch.full((rows, MAX_LOGPROBS), NAN),
    )
    KERNELS.sample(logits, slots, positions, tables, out)
    return out


SAMPLERS = pytest.mark.parametrize("sample", [reference.sample, fused], ids=["plain", "c++"])
Sampler = Callable[[Tensor, Tensor, Tensor, SamplingTables], Sampled]


@dataclass
class Request:
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    tokens: Sequence[int] = ()
    prompt_len: int = 0
    stop_ids: Sequence[int] = ()
    allowed: Collection[int] | None = None
    logprobs_mode: str = "raw_logprobs"


def run(sample: Sampler, logits: Any, request: Request, position: int | None = None) -> Sampled:
    """Sample one request alone, in slot 1."""
    at = len(request.tokens) if position is None else position
    max_len = max(8, len(request.tokens))
    row = torch.as_tensor(logits, dtype=torch.float32)[None]
    return sample(row, ints(1), ints(at), tables_of([request], max_len))


def draws(
    sample: Sampler, logits: Any, params: SamplingParams, count: int, seed: int = 7
) -> Tensor:
    """Return the tokens that a request gets at `count` positions with the same logits."""
    rows = torch.as_tensor(logits, dtype=torch.float32).repeat(count, 1)
    slots = torch.ones(count, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    return sample(rows, slots, positions, tables_of([Request(params, seed)], 1)).tokens


# ---- parameters ----


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "n": [0, -1, 10**9],
        "temperature": [-0.1, NAN, INF, 10**400],
        "top_k": [-2],
        "top_p": [0.0, -0.5, 2.0, NAN],
        "min_p": [-0.1, 1.1, NAN],
        "repetition_penalty": [0.0, -1.0, INF, NAN, 1e-38, 1e4],
        "presence_penalty": [-2.1, 2.1, NAN],
        "frequency_penalty": [-2.1, 2.1, NAN],
        "logit_bias": [
            {1: INF},
            {1: NAN},
            dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
            {"x": 1.0},
            {1: None},
            {1: 10**400},
            {1.9: 5.0},
            {INF: 1.0},
            [1],
        ],
        "max_tokens": [0, -1],
        "min_tokens": [-1, 17],
        "stop": ["", ["a", ""]],
        "stop_token_ids": [list(range(MAX_STOP_IDS // 2 + 1))],
        "logprobs": [-1, MAX_LOGPROBS + 1],
        "ignore_eos": ["no", 1],
        "detokenize": [None],
    }.items(),
)
def test_a_bad_value_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{name}="):
            SamplingParams(**{name: value})


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        SamplingParams(stop="end", detokenize=False)
    SamplingParams(detokenize=False)


def test_the_limits_of_each_range_are_accepted() -> None:
    params = SamplingParams(
        n=1,
        temperature=0,
        top_k=-1,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=1e-3,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": 1},  # type: ignore[dict-item]
        max_tokens=1,
        min_tokens=1,
        stop="end",
        stop_token_ids=list(range(MAX_STOP_IDS // 2)),
        logprobs=MAX_LOGPROBS,
    )
    assert params.stop == ("end",)
    assert params.logit_bias == {5: 1.0}
    assert SamplingParams(max_tokens=None, min_tokens=10_000).min_tokens == 10_000


def test_the_end_of_the_sequence_ends_an_answer_unless_it_is_ignored() -> None:
    shaped = {"structured_outputs": {"regex": "a+"}}
    assert SamplingParams(stop_token_ids=[5]).ends_at([1, 2]) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=[5], ignore_eos=True).ends_at([1, 2]) == {5}
    # type: ignore[arg-type]
    assert SamplingParams(ignore_eos=True, **shaped).ends_at([1, 2]) == {1, 2}


# ---- tables ----


def test_every_table_has_a_field_and_every_row_is_whole() -> None:
    specs = (*SAMPLING_TABLES, *mask_tables(32))
    assert SamplingTables._fields == ("tokens", *(spec.name for spec in specs))
    row = encode(SamplingParams(logit_bias={3: 1.5}, top_k=-1), 5, 9, [2, 4, 2])
    assert {name: len(values) for name, values in row.items()} == {
        spec.name: spec.width for spec in SAMPLING_TABLES
    }
    assert row["stop_ids"][:3] == [2, 4, -1]
    assert (row["bias_ids"][:2], row["bias_values"][:2]) == ([3, -1], [1.5, 0.0])
    assert (row["top_k"], row["num_logprobs"], row["prompt_len"]) == ([0], [-1], [9])


def test_a_greedy_row_with_default_parameters_is_the_neutral_row() -> None:
    row = encode(SamplingParams(temperature=0), 0, 0, [])
    assert row == {spec.name: [spec.neutral] * spec.width for spec in SAMPLING_TABLES}


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1])
def test_seed_words_fit_int32_and_give_the_seed_back(seed: int) -> None:
    low, high = map(int, encode(SamplingParams(), seed, 0, [])["seed"])
    assert all(-(2**31) <= word < 2**31 for word in (low, high))
    assert (low % 2**32) + (high % 2**32) * 2**32 == seed % 2**64


def test_values_beyond_the_table_types_stay_usable() -> None:
    extreme = SamplingParams(
        temperature=1e300,
        logit_bias={1: -1e300},
        top_k=2**40,
        max_tokens=None,
        min_tokens=2**40,
    )
    tables = tables_of([Request(extreme)])
    assert all(table.isfinite().all() for table in (tables.temperature, tables.bias_values))
    assert tables.top_k[1] == tables.min_tokens[1] == 2**31 - 1


def test_too_many_stop_ids_are_refused() -> None:
    with pytest.raises(RequestError, match="33 stop ids"):
        encode(SamplingParams(), 0, 0, range(MAX_STOP_IDS + 1))


# ---- noise ----


def mix_plainly(word: int) -> int:
    word = (word ^ word >> 16) * 0x7FEB352D % 2**32
    word = (word ^ word >> 15) * 0x846CA68B % 2**32
    return word ^ word >> 16


def test_the_hash_equals_that_of_plain_integers() -> None:
    for low, high, position in [(0, 0, 0), (-1, 5, 1), (2**31 - 1, -(2**31), 40_000)]:
        keys = [0x243F6A88, 0x85A308D3]
        for word in (low, high, position):
            keys = [mix_plainly(((key ^ word % 2**32) + 0x9E3779B9) % 2**32) for key in keys]
        expected = [mix_plainly((i + keys[0]) % 2**32) ^ keys[1] for i in range(50)]
        assert noise.hash_words(ints(low, high)[None], ints(position), 50).tolist() == [expected]


def test_noise_has_a_gumbel_distribution_without_correlation() -> None:
    count = 400
    seeds = torch.zeros(count, 2, dtype=torch.int32)
    values = noise.gumbel(seeds, torch.arange(count, dtype=torch.int32), 1000)
    assert values.isfinite().all()
    assert values.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert values.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    other_seeds = noise.gumbel(seeds + ints(1, 0), torch.arange(count, dtype=torch.int32), 1000)
    high_words = noise.gumbel(seeds + ints(0, 1), torch.arange(count, dtype=torch.int32), 1000)
    pairs = [
        (values[1:], values[:-1]),  # the next position
        (values[:, 1:], values[:, :-1]),  # the next token
        (values, other_seeds),
        (values, high_words),
    ]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.01


def test_the_largest_noise_is_finite_and_below_the_bound_of_the_kernel() -> None:
    uniform = torch.tensor([0.0, 2.0**23 - 1]).add(0.5) * 2.0**-23
    extremes = -torch.log(-torch.log(uniform))
    assert extremes.isfinite().all()
    assert 16.6 < extremes[1] < 16.7


# ---- the kernel against the definition ----


def assert_same(fast: Sampled, slow: Sampled) -> None:
    assert torch.equal(fast.tokens, slow.tokens)
    assert torch.equal(fast.top_ids, slow.top_ids)
    for a, b in ((fast.logprobs, slow.logprobs), (fast.top_logprobs, slow.top_logprobs)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def logits_of(style: str, rows: int, vocab: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    hits = torch.rand(rows, vocab, generator=generator)
    match style:
        case "ties":
            return logits.round() + 0.0
        case "equal":
            return torch.zeros(rows, vocab)
        case "huge":
            return logits * 1e4
        case "masked":
            return logits.masked_fill(hits < 0.5, -INF)
        case "all masked":
            return torch.full((rows, vocab), -INF)
        case "nan":
            return logits.masked_fill(hits < 1.5 / vocab, NAN)
        case "inf":
            return logits.masked_fill(hits < 1.5 / vocab, INF)
        case _:
            return logits


STYLES = ["normal", "ties", "equal", "huge", "masked", "all masked", "nan", "inf"]
VOCABS = [1, 2, 3, 5, 16, 19, 20, 21, 255, 256, 257, 1000]


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> Request:
    # Ids past the vocabulary and below zero must be ignored, so some are.
    ids = st.integers(-2, vocab + 1)
    tokens = draw(st.lists(ids, max_size=12))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 1e-30, 0.3, 1.0, 5.0, 1e30])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 7, 40, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.99])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.37, -1.9])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.13, -0.71])),
        logit_bias=draw(
            st.dictionaries(ids.filter(lambda i: i >= 0), st.sampled_from([-100.0, 0.3, 4.0]))
        ),
        min_tokens=draw(st.integers(0, 8)),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, MAX_LOGPROBS])),
    )
    return Request(
        params,
        seed=draw(st.integers(-(2**63), 2**64 - 1)),
        tokens=tokens,
        prompt_len=draw(st.integers(0, len(tokens))),
        stop_ids=draw(st.lists(ids, max_size=4)),
        allowed=draw(st.none() | st.sets(ids.filter(lambda i: i >= 0))),
        logprobs_mode=draw(st.sampled_from(LOGPROBS_MODES)),
    )


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_kernel_equals_definition(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from(VOCABS))
    batch = data.draw(st.lists(requests(vocab), min_size=1, max_size=4))
    slots = data.draw(st.lists(st.integers(0, len(batch)), min_size=1, max_size=6))
    style, seed = data.draw(st.sampled_from(STYLES)), data.draw(st.integers(0, 1000))
    logits = logits_of(style, len(slots), vocab, seed)
    lengths = [len(batch[slot - 1].tokens) if slot else 3 for slot in slots]
    args = (logits, ints(*slots), ints(*lengths), tables_of(batch, 12))
    assert_same(fused(*args), reference.sample(*args))


@pytest.mark.parametrize("style", ["normal", "ties", "equal", "masked", "nan"])
def test_kernel_equals_definition_at_a_real_vocabulary(style: str) -> None:
    vocab = 50_257
    choices: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 20},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 50, "logprobs": 3},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.999, "top_k": 30_000},
        {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.5},
    ]
    tokens = torch.randint(0, vocab, (300,)).tolist()
    masks = [None, range(0, vocab, 3), [7, 31, 32, 50_256, 50_257]]
    batch = [
        Request(SamplingParams(**choice), seed, tokens, 100, allowed=allowed)
        for seed, choice in enumerate(choices)
        for allowed in masks
    ]
    for i, request in enumerate(batch):
        request.logprobs_mode = LOGPROBS_MODES[i % len(LOGPROBS_MODES)]
    slots = torch.arange(1, len(batch) + 1, dtype=torch.int32)
    positions = torch.full_like(slots, 300)
    args = (logits_of(style, len(batch), vocab, 3), slots, positions, tables_of(batch, 512))
    assert_same(fused(*args), reference.sample(*args))


def test_many_draws_agree_token_by_token() -> None:
    logits = logits_of("normal", 1, 300, 1)[0]
    for choice in ({}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}):
        params = SamplingParams(**choice)  # type: ignore[arg-type]
        fast = draws(fused, logits, params, 3000)
        assert torch.equal(fast, draws(reference.sample, logits, params, 3000))
        assert fast.unique().numel() > 5


# ---- the chosen token ----


@SAMPLERS
def test_greedy_takes_the_first_of_the_best_and_ignores_filters(sample: Sampler) -> None:
    params = SamplingParams(temperature=0, top_p=0.1, top_k=3, min_p=0.9)
    for size in (4, 300, 1000):
        logits = torch.zeros(size)
        logits[[size // 2, size - 1]] = 2.0
        assert run(sample, logits, Request(params)).tokens.item() == size // 2
    assert run(sample, [-0.0, 0.0], Request(params)).tokens.item() == 0


@SAMPLERS
def test_draws_follow_the_softmax(sample: Sampler) -> None:
    count, temperature = 40_000, 0.7
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, 2.0, -INF, 0.3, 0.3, -1.0, 1.5])
    exact = (logits / temperature).softmax(-1)
    for seed in (1, 2**40):
        tokens = draws(sample, logits, SamplingParams(temperature=temperature), count, seed)
        counts = torch.bincount(tokens, minlength=10)
        assert counts[5] == 0
        expected = exact[exact > 0] * count
        chi_square = ((counts[exact > 0] - expected) ** 2 / expected).sum().item()
        assert chi_square < 30  # 8 degrees of freedom: exceeded once in 5,000


def kept_plainly(scaled: list[float], params: SamplingParams) -> set[int]:
    """Apply each filter plainly: a token stays if less than the budget lies strictly above it."""
    kept = set(range(len(scaled)))
    if params.top_k > 0:
        kept = {i for i in kept if sum(scaled[j] > scaled[i] for j in kept) < params.top_k}
    if params.top_p < 1:
        total = sum(math.exp(scaled[j]) for j in kept)
        kept = {
            i
            for i in kept
            if sum(math.exp(scaled[j]) for j in kept if scaled[j] > scaled[i])
            < params.top_p * total
        }
    return {i for i in kept if math.exp(scaled[i]) >= params.min_p * (1 - 1e-6)}


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 999},
    {"top_p": 1e-9},
    {"top_p": 0.4},
    {"top_p": 0.97},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.6},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.4},
]


@pytest.mark.parametrize("style", ["normal", "ties", "equal", "masked"])
@pytest.mark.parametrize("choice", FILTERS, ids=str)
def test_filters_keep_what_a_plain_loop_keeps(choice: dict[str, Any], style: str) -> None:
    params = SamplingParams(**choice)
    logits = logits_of(style, 1, 24, 11)[0] / 4  # flat enough that every kept token turns up
    scaled = logits - logits.max()
    expected = kept_plainly(scaled.tolist(), params)
    possible = {i for i in expected if scaled[i] > -INF}
    tables = tables_of([Request(params)])
    own = SamplingTables(*(table[1:2] for table in tables))
    kept = scaled >= reference.floor(scaled[None], own)
    assert {i for i in kept.nonzero()[:, -1].tolist() if scaled[i] > -INF} == possible
    assert set(draws(fused, logits, params, 4000).tolist()) == possible


def test_ties_at_the_edge_are_kept_together() -> None:
    logits = [3.0, 2.0, 2.0, 2.0, 1.0]
    for choice in ({"top_k": 2}, {"top_p": 0.55}):
        tokens = draws(fused, logits, SamplingParams(**choice), 2000)  # type: ignore[arg-type]
        assert set(tokens.tolist()) == {0, 1, 2, 3}


# ---- grammar masks ----


@SAMPLERS
def test_only_allowed_tokens_are_drawn(sample: Sampler) -> None:
    logits = logits_of("normal", 1, 70, 5)[0]
    params = SamplingParams(temperature=5.0, top_k=1000, top_p=0.9999, min_p=1e-9)
    for allowed in ([0], [31], [32, 63, 64, 69], range(1, 70, 2)):
        request = Request(params, allowed=allowed)
        rows, count = logits.repeat(2000, 1), 2000
        slots, positions = torch.ones(count).int(), torch.arange(count).int()
        tokens = sample(rows, slots, positions, tables_of([request], 1)).tokens
        assert set(tokens.tolist()) == set(allowed)


@SAMPLERS
def test_a_mask_equals_logits_of_minus_infinity(sample: Sampler) -> None:
    """Filters see only the allowed tokens."""
    logits = logits_of("normal", 1, 300, 5)[0]
    allowed = range(2, 300, 7)
    forbidden = torch.ones(300, dtype=torch.bool)
    forbidden[list(allowed)] = False
    for choice in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"repetition_penalty": 3.0}):
        params = SamplingParams(seed=1, **choice)  # type: ignore[arg-type]
        masked = Request(params, 3, (2, 9, 16), 1, allowed=allowed)
        plain = Request(params, 3, (2, 9, 16), 1)
        left = run(sample, logits, masked)
        right = run(sample, logits.masked_fill(forbidden, -INF), plain)
        assert left.tokens.item() == right.tokens.item()


@SAMPLERS
def test_a_mask_comes_before_bias_and_penalties(sample: Sampler) -> None:
    """A bias does not restore a forbidden token, and broken forbidden logits have no effect."""
    params = SamplingParams(
        temperature=0, logit_bias={0: 100.0}, presence_penalty=-2.0, repetition_penalty=0.1
    )
    for first in (9.0, NAN, INF):
        request = Request(params, tokens=[0, 0], prompt_len=1, allowed=[1, 2])
        assert run(sample, [first, 1.0, 2.0], request).tokens.item() == 2


@SAMPLERS
def test_log_probabilities_ignore_the_mask(sample: Sampler) -> None:
    request = Request(SamplingParams(temperature=0, logprobs=2), allowed=[2])
    result = run(sample, [1.0, 3.0, 2.0], request)
    assert result.tokens.item() == 2
    exact = torch.tensor([1.0, 3.0, 2.0]).log_softmax(-1)
    torch.testing.assert_close(result.logprobs, exact[[2]])
    assert result.top_ids[0, :2].tolist() == [1, 2]


@SAMPLERS
def test_an_empty_mask_yields_a_valid_token(sample: Sampler) -> None:
    for temperature in (0, 1.0):
        nothing = Request(SamplingParams(temperature=temperature), allowed=[])
        early = Request(
            SamplingParams(temperature=temperature, min_tokens=1), stop_ids=[1], allowed=[1, 99]
        )
        for request in (nothing, early):
            assert run(sample, [1.0, 2.0, 3.0], request).tokens.item() == 0


@SAMPLERS
def test_a_mask_is_read_only_if_the_row_is_masked(sample: Sampler) -> None:
    tables = tables_of([Request(SamplingParams(temperature=0), allowed=[0])])
    logits = torch.tensor([[0.0, 1.0]])
    assert sample(logits, ints(1), ints(0), tables).tokens.item() == 0
    tables.is_masked[1] = 0
    assert sample(logits, ints(1), ints(0), tables).tokens.item() == 1


def test_a_mask_that_is_too_narrow_is_refused() -> None:
    tables = tables_of([Request()])
    narrow = tables._replace(allowed=tables.allowed[:, :2].contiguous())
    fused(torch.zeros(1, 64), ints(1), ints(0), narrow)
    with pytest.raises(RuntimeError, match="allowed must have a bit for every token"):
        fused(torch.zeros(1, 65), ints(1), ints(0), narrow)


# ---- penalties, bias, early endings ----


def adjusted(logits: Tensor, request: Request) -> Tensor:
    own = SamplingTables(*(table[1:2] for table in tables_of([request], 64)))
    return reference.adjust(logits[None], ints(len(request.tokens)), own)[0]


def test_repetition_penalty_is_that_of_transformers() -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = logits_of("normal", 1, 50, 2)[0]
    tokens = torch.randint(0, 50, (30,)).tolist()
    for penalty in (1.3, 0.6):
        request = Request(SamplingParams(repetition_penalty=penalty), tokens=tokens, prompt_len=20)
        theirs = processors.RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([tokens]), logits[None].clone()
        )[0]
        assert not torch.equal(theirs, logits)
        torch.testing.assert_close(adjusted(logits, request), theirs, rtol=1e-6, atol=0)


def test_penalties_bias_and_ban_equal_a_plain_loop() -> None:
    params = SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={4: 2.5, 9: -1.0},
        min_tokens=5,
    )
    tokens, prompt_len = [1, 2, 2, 3, 2, 3, 3, 9], 4
    request = Request(params, tokens=tokens, prompt_len=prompt_len, stop_ids=[7, 0])
    logits = logits_of("normal", 1, 10, 4)[0]
    expected = []
    for token, logit in enumerate(logits.tolist()):
        uses = tokens[prompt_len:].count(token)
        if token in tokens:
            logit = logit / 1.5 if logit > 0 else logit * 1.5
        logit -= -0.25 * uses + (0.5 if uses else 0.0)
        logit += params.logit_bias.get(token, 0.0)
        expected.append(-INF if token in (7, 0) else logit)
    torch.testing.assert_close(adjusted(logits, request), torch.tensor(expected))


@SAMPLERS
def test_output_penalties_ignore_the_prompt(sample: Sampler) -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits = [1.0, 0.5]
    assert run(sample, logits, Request(params, tokens=[0, 0], prompt_len=2)).tokens.item() == 0
    assert run(sample, logits, Request(params, tokens=[0, 0], prompt_len=1)).tokens.item() == 1


@SAMPLERS
def test_stop_ids_wait_for_min_tokens(sample: Sampler) -> None:
    params = SamplingParams(temperature=0, min_tokens=2)
    for num_new, expected in ((0, 1), (1, 1), (2, 3)):
        request = Request(params, tokens=[5] * (3 + num_new), prompt_len=3, stop_ids=[3, 2])
        assert run(sample, [0.0, 1.0, 2.0, 3.0], request).tokens.item() == expected


@SAMPLERS
def test_bias_can_force_and_forbid(sample: Sampler) -> None:
    force = SamplingParams(logit_bias={2: 100.0})
    forbid = SamplingParams(logit_bias={0: -100.0, 99: 100.0})  # 99 is no token here
    assert set(draws(sample, [0.0] * 4, force, 200).tolist()) == {2}
    assert set(draws(sample, [0.0] * 4, forbid, 200).tolist()) == {1, 2, 3}


# ---- log probabilities ----


@SAMPLERS
def test_logprobs_are_those_of_the_model_before_filters(sample: Sampler) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])
    params = SamplingParams(temperature=0, logit_bias={4: 50.0}, logprobs=3)
    result = run(sample, logits, Request(params))
    exact = logits.log_softmax(-1)
    assert result.tokens.item() == 4
    torch.testing.assert_close(result.logprobs, exact[[4]])
    assert result.top_ids[0].tolist() == [1, 3, 2] + [0] * (MAX_LOGPROBS - 3)
    torch.testing.assert_close(result.top_logprobs[0, :3], exact[[1, 3, 2]])
    assert not result.top_logprobs[0, 3:].any()


@SAMPLERS
def test_logprobs_are_exact_at_a_real_vocabulary(sample: Sampler) -> None:
    logits = logits_of("ties", 1, 50_257, 3)[0]
    params = SamplingParams(temperature=0, logprobs=MAX_LOGPROBS)
    result = run(sample, logits, Request(params))
    exact = logits.double().log_softmax(-1).float()
    torch.testing.assert_close(result.logprobs[0], exact.max(), rtol=0, atol=2e-6)
    torch.testing.assert_close(
        result.top_logprobs[0], exact[result.top_ids[0].long()], rtol=0, atol=2e-6
    )


@SAMPLERS
def test_only_requested_logprobs_are_written(sample: Sampler) -> None:
    logits = [1.0, 2.0, 0.0]
    unwanted = run(sample, logits, Request(SamplingParams(temperature=0)))
    chosen_only = run(sample, logits, Request(SamplingParams(temperature=0, logprobs=0)))
    everything = run(sample, logits, Request(SamplingParams(temperature=0, logprobs=20)))
    assert unwanted.logprobs.item() == 0
    assert chosen_only.logprobs.item() == pytest.approx(-0.40760595)
    for result in (unwanted, chosen_only):
        assert not result.top_ids.any()
        assert not result.top_logprobs.any()
    assert everything.top_ids[0, :4].tolist() == [1, 0, 2, 0]
    assert everything.top_logprobs[0, 2] < 0 == everything.top_logprobs[0, 3]


TOKENS, PROMPT_LEN = [3, 1, 1, 4, 1], 2  # 3 and 1 were asked, then 1, 4 and 1 answered
LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 2.5, -2.0, 1.0])


def repeated(logits: Tensor) -> Tensor:
    return torch.tensor([x if i not in TOKENS else x / 2 for i, x in enumerate(logits.tolist())])


def without(logits: Tensor, *tokens: int) -> Tensor:
    dropped = torch.zeros(len(logits), dtype=torch.bool)
    dropped[list(tokens)] = True
    return logits.masked_fill(dropped, -INF)


PROCESSED: list[tuple[dict[str, Any], Tensor]] = [
    ({"temperature": 0}, LOGITS),
    ({"temperature": 0.5}, LOGITS * 2),
    ({"top_k": 3}, without(LOGITS, 0, 2, 5, 6)),
    ({"top_p": 0.5}, without(LOGITS, 0, 2, 3, 5, 6)),  # tokens 4 and 1 have 0.41 and 0.25
    ({"min_p": 0.3}, without(LOGITS, 0, 2, 5, 6)),  # exp(1.5 - 2.5) = 0.37, exp(1.0 - 2.5) = 0.22
    ({"temperature": 0, "top_k": 1}, LOGITS),  # a greedy row has no filters
    ({"temperature": 0, "repetition_penalty": 2.0}, repeated(LOGITS)),
    ({"presence_penalty": 1.5}, LOGITS - torch.tensor([0, 1.5, 0, 0, 1.5, 0, 0])),
    ({"frequency_penalty": 0.5}, LOGITS - torch.tensor([0, 1.0, 0, 0, 0.5, 0, 0])),
    ({"logit_bias": {5: 9.0, 1: -3.0}}, LOGITS + torch.tensor([0, -3.0, 0, 0, 0, 9.0, 0])),
    ({"min_tokens": 4}, without(LOGITS, 4, 6)),
    ({"allowed": [0, 2, 5]}, without(LOGITS, 1, 3, 4, 6)),
    (
        {"allowed": range(6), "temperature": 2.0, "logit_bias": {6: 99.0, 5: 4.5}, "top_k": 2},
        without(LOGITS + torch.tensor([0, 0, 0, 0, 0, 4.5, 0]), 0, 1, 2, 3, 6) / 2,
    ),
]


@SAMPLERS
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize(("choice", "processed"), PROCESSED, ids=[str(c) for c, _ in PROCESSED])
def test_every_parameter_is_part_of_processed_logprobs(
    choice: dict[str, Any], processed: Tensor, mode: str, sample: Sampler
) -> None:
    choice = dict(choice)
    allowed = choice.pop("allowed", None)
    params = SamplingParams(logprobs=len(LOGITS), **choice)
    request = Request(params, 3, TOKENS, PROMPT_LEN, [4, 6], allowed, mode)
    result = run(sample, LOGITS, request)
    expected = processed if mode.startswith("processed") else LOGITS
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(-1)
    top_ids, top = result.top_ids[0, : len(LOGITS)], result.top_logprobs[0, : len(LOGITS)]
    assert sorted(top_ids.tolist()) == list(range(len(LOGITS)))
    torch.testing.assert_close(top, expected[top_ids.long()])
    assert (top[:-1] >= top[1:]).all(), "not in order"
    torch.testing.assert_close(result.logprobs, expected[result.tokens.long()])
    assert processed[result.tokens.item()] > -INF


@SAMPLERS
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_processed_logprobs_are_flagged_if_no_token_is_allowed(sample: Sampler, mode: str) -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    result = run(sample, [1.0, 2.0], Request(params, allowed=[9], logprobs_mode=mode))
    is_flagged = mode.startswith("processed")
    assert result.logprobs.isnan().item() == is_flagged
    assert result.top_logprobs[0, :2].isnan().tolist() == [is_flagged] * 2


@SAMPLERS
def test_the_mode_does_not_change_the_chosen_token(sample: Sampler) -> None:
    logits = logits_of("normal", 1, 300, 2)[0]
    params = SamplingParams(temperature=0.8, top_k=40, logprobs=5, presence_penalty=1.0)
    for position in range(10, 20):
        tokens = list(range(position))
        made = {
            run(sample, logits, Request(params, 1, tokens, 4, logprobs_mode=m)).tokens.item()
            for m in LOGPROBS_MODES
        }
        assert len(made) == 1


# ---- padding, neighbours, broken rows ----


def mixed_batch() -> tuple[Tensor, Tensor, Tensor, SamplingTables]:
    choices: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "logprobs": 5},
        {"temperature": 1.2, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    ]
    batch = [Request(SamplingParams(**choice), 5, [1, 2, 3, 2], 2) for choice in choices]
    logits = logits_of("normal", len(batch), 700, 9)
    slots = torch.arange(1, len(batch) + 1, dtype=torch.int32)
    return logits, slots, torch.full_like(slots, 4), tables_of(batch)


def assert_equal_bits(a: Sampled, b: Sampled) -> None:
    for name, left, right in zip(Sampled._fields, a, b, strict=True):
        assert torch.equal(left, right), name


@SAMPLERS
def test_rows_of_slot_zero_are_zeros(sample: Sampler) -> None:
    logits, slots, positions, tables = mixed_batch()
    for value in (NAN, INF, -INF, 5.0):
        padded = torch.cat([logits, torch.full((3, 700), value)])
        nobody = torch.zeros(3, dtype=torch.int32)
        hostile = torch.cat([positions, ints(0, 2**31 - 1, -5)])
        result = sample(padded, torch.cat([slots, nobody]), hostile, tables)
        assert all(not part[4:].any() for part in result)
        real = Sampled(*(part[:4] for part in result))
        assert_equal_bits(real, sample(logits, slots, positions, tables))


@SAMPLERS
def test_slot_zero_yields_zeros_even_if_its_row_is_poisoned(sample: Sampler) -> None:
    logits, slots, positions, tables = mixed_batch()
    for table in tables:
        table[0] = 7
    result = sample(logits, torch.zeros_like(slots), positions, tables)
    assert all(not part.any() for part in result)


@SAMPLERS
def test_a_row_depends_on_no_other(sample: Sampler) -> None:
    logits, slots, positions, tables = mixed_batch()
    together = sample(logits, slots, positions, tables)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = sample(logits[order], slots[order], positions[order], tables)
    assert_equal_bits(Sampled(*(part[order] for part in together)), shuffled)
    for row in range(4):
        alone = sample(logits[[row]], slots[[row]], positions[[row]], tables)
        assert_equal_bits(Sampled(*(part[[row]] for part in together)), alone)
    broken = logits.clone()
    broken[1] = NAN
    survivors = [0, 2, 3]
    beside = sample(broken, slots, positions, tables)
    assert_equal_bits(
        Sampled(*(part[survivors] for part in together)), Sampled(*(p[survivors] for p in beside))
    )


@SAMPLERS
def test_only_tokens_before_the_position_and_in_the_vocabulary_count(sample: Sampler) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=1.0)
    logits = [1.0, 0.9, 0.8]
    table = [1, 0, 0, -1, 3, 2**31 - 1]
    for position, expected in ((0, 0), (1, 0), (2, 2)):
        request = Request(params, tokens=table)
        assert run(sample, logits, request, position).tokens.item() == expected
    strangers = Request(params, tokens=[-1, -(2**31), 3, 2**31 - 1])
    assert run(sample, logits, strangers).tokens.item() == 0


@SAMPLERS
def test_nothing_is_remembered_between_calls(sample: Sampler) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    for token, expected in ((0, 1), (1, 0), (0, 1)):
        request = Request(params, tokens=[token], prompt_len=1)
        assert run(sample, [1.0, 0.9], request).tokens.item() == expected


@SAMPLERS
@pytest.mark.parametrize(
    "logits", [[NAN] * 5, [1.0, NAN, 9.0], [-INF] * 4, [0.0, INF, INF], [-INF, NAN]], ids=str
)
def test_a_broken_row_yields_token_zero_and_is_flagged(
    sample: Sampler, logits: list[float]
) -> None:
    for choice in ({"temperature": 0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}, {}):
        params = SamplingParams(logprobs=2, **choice)  # type: ignore[arg-type]
        result = run(sample, logits, Request(params, seed=3))
        assert result.tokens.item() == 0
        assert result.logprobs.isnan().all()
        assert not result.top_ids.any()
        assert result.top_logprobs[0, :2].isnan().all()
        assert not result.top_logprobs[0, 2:].any()


@SAMPLERS
def test_a_ban_on_everything_yields_token_zero(sample: Sampler) -> None:
    request = Request(SamplingParams(min_tokens=1, logprobs=0), stop_ids=[0, 1])
    result = run(sample, [1.0, 1.0], request)
    assert result.tokens.item() == 0
    assert result.logprobs.item() == pytest.approx(-math.log(2))


@SAMPLERS
def test_the_smallest_temperature_does_not_overflow(sample: Sampler) -> None:
    for temperature in (1e-38, 1e-300):
        tokens = draws(sample, [5.0, 9.0, 9.0, -9.0], SamplingParams(temperature=temperature), 50)
        assert set(tokens.tolist()) <= {1, 2}


# ---- seeds ----


@SAMPLERS
def test_only_seed_and_position_decide_the_noise(sample: Sampler) -> None:
    logits = torch.zeros(1, 5000)
    seeds = [11, 11, 12, 11 + 2**32, -11]
    tables = tables_of([Request(seed=seed) for seed in seeds])
    at = [sample(logits, ints(slot), ints(3), tables).tokens.item() for slot in range(1, 6)]
    assert at[0] == at[1]  # another slot, the same seed
    assert len(set(at[1:])) == 4
    positions = [sample(logits, ints(1), ints(p), tables).tokens.item() for p in range(20)]
    assert positions[3] == at[0]
    assert len(set(positions)) > 15


@SAMPLERS
def test_equal_noise_goes_to_the_lower_index(sample: Sampler) -> None:
    position, vocab = 527, 20_000  # found by search: with seed 0 two tokens share the highest cell
    cells = noise.hash_words(ints(0, 0)[None], ints(position), vocab)[0] >> 9
    assert (cells == cells.max()).nonzero()[:, 0].tolist() == [7458, 9449]
    assert run(sample, torch.zeros(vocab), Request(), position).tokens.item() == 7458


# ---- tracing and compiling ----


@SAMPLERS
def test_it_can_be_traced_without_reading_data(sample: Sampler) -> None:
    logits, slots, positions, tables = mixed_batch()

    def step(logits: Tensor, slots: Tensor, positions: Tensor, *columns: Tensor) -> Sampled:
        return sample(logits, slots, positions, SamplingTables(*columns))

    traced = make_fx(step, tracing_mode="fake")(logits, slots, positions, *tables)
    expected = sample(logits, slots, positions, tables)
    assert_equal_bits(Sampled(*traced(logits, slots, positions, *tables)), expected)
    changed = sample(-logits, slots.flip(0), positions, tables)  # the trace holds no values
    assert_equal_bits(Sampled(*traced(-logits, slots.flip(0), positions, *tables)), changed)


@pytest.mark.slow
def test_the_kernel_survives_torch_compile() -> None:
    logits, slots, positions, tables = mixed_batch()
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    expected = fused(logits, slots, positions, tables)
    assert_equal_bits(compiled(logits, slots, positions, tables), expected)


def test_the_kernel_refuses_by_name() -> None:
    logits, slots, positions, tables = mixed_batch()
    with pytest.raises(RuntimeError, match="slots must be int32"):
        fused(logits, slots.long(), positions, tables)
    with pytest.raises(RuntimeError, match="logits must be float32"):
        fused(logits.double(), slots, positions, tables)
    with pytest.raises(RuntimeError, match="logits must be contiguous"):
        fused(logits[:, ::2], slots, positions, tables)
    with pytest.raises(RuntimeError, match="top_p has the wrong shape"):
        fused(logits, slots, positions, tables._replace(top_p=tables.top_p[1:]))
    with pytest.raises(RuntimeError, match=r"slots\[0\] is 9"):
        fused(logits[:1], ints(9), positions[:1], tables)
