"""Tests of every family against transformers: logits within 1e-4, greedy tokens identical."""

import pytest
import torch
from oracle import FAMILIES, HYBRIDS, RECURRENT, VARIANTS
from traced import GREEDY, Traced, expect_equal, expect_scored, prompts_of

from slotzero import SamplingParams
from slotzero.kernels.types import Float8Rows, Normed
from slotzero.models.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

LENGTHS = [1, 5, 16, 17, 33, 70, 2, 48, 15, 31, 64, 3, 9, 100, 20, 12, 40]  # 17 rows


RECORDED = {
    "llama-bias": "a bias everywhere",
    "qwen2-window": "layers that differ in their window alone",
    "gemma4": "layers that read another's KV, of two widths, with inputs of their own",
    "gpt-oss": "experts with a bias and a clamp, sinks",
    "deepseek-v2": "latent heads, experts in groups beside a dense part",
    "rope-dynamic": "angles that depend on the context",
}
"""Families that run recorded, each with what no other of them has. Others are elsewhere:
llama and qwen3 below, deepseek-v3 with MTP layers in test_latent.py, gemma2 and gemma3 in
test_windows.py."""


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *((family, "eager") for family in FAMILIES if family not in RECURRENT),
        *((family, "cpu") for family in RECORDED),
    ],
)
def test_family_equals_transformers(oracles, family, backend):
    oracle = oracles(family)
    traced = Traced(oracle.path, backend=backend, max_num_seqs=4, enable_prefix_caching=False)
    # angles that depend on the context change at 64 tokens
    lengths, num = ([60, 7, 33], 64) if family.startswith("rope") else ([1, 19, 40, 64], 32)
    expect_equal(traced, oracle, prompts_of(lengths, oracle.vocab_size), num)
    if not family.startswith("rope"):  # their angles at a position depend on the whole prompt
        expect_scored(traced, oracle, prompts_of([2, 30], oracle.vocab_size))
    assert (traced.engine.worker.decode.counts.replays > 0) == (backend == "cpu")
    assert not any(r.failure for r in traced.engine.worker.decode.records.values())


ARCHITECTURES = [
    family
    for family in FAMILIES
    if not family.startswith("rope") and family not in HYBRIDS + RECURRENT + VARIANTS
]


def expect_every_batch(traced: Traced, oracle, batches=range(1, 18)) -> None:
    """Check answers of 24 tokens, which cross a page's end."""
    prompts = prompts_of(LENGTHS, oracle.vocab_size)
    for rows in batches:
        expect_equal(traced, oracle, prompts[:rows], 24)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_batch_from_1_to_17(oracles, family):
    """llama, which covers what all share, runs every batch size; others run some."""
    oracle = oracles(family)
    traced = Traced(oracle.path, backend="eager", max_num_seqs=17)
    if family == "llama":
        expect_every_batch(traced, oracle)
    else:
        expect_every_batch(traced, oracle, batches=(1, 2, 3, 5, 8, 17))


def test_every_batch_through_recorded_graphs(oracles):
    oracle = oracles("qwen3")
    traced = Traced(oracle.path, backend="cpu", max_num_seqs=17)
    expect_every_batch(traced, oracle)
    records = traced.engine.worker.decode.records
    assert {r.backend for r in records.values()} == {"cpu"}
    assert {key.rows for key in records} == {1, 2, 4, 8, 16, 17}


def test_chunked_prefill(oracles):
    oracle = oracles("qwen2")
    traced = Traced(oracle.path, backend="eager", max_num_seqs=4, max_num_batched_tokens=13)
    expect_equal(traced, oracle, prompts_of([100, 3, 57, 26], oracle.vocab_size))


PAGE = 2 * 2 * 16 * 2 * 16 * 4  # llama: layers, K and V, page size, KV heads, head size, float32


def test_preemption_by_a_tiny_kv_budget(oracles):
    oracle = oracles("llama")
    traced = Traced(
        oracle.path, backend="eager", max_num_seqs=4, max_model_len=120, kv_cache_memory=13 * PAGE
    )
    expect_equal(traced, oracle, prompts_of([40, 30, 20, 50, 10, 44], oracle.vocab_size))
    assert traced.engine.schedulers.num_preemptions > 0


def prompts_that_begin_alike(vocab_size):
    shared = prompts_of([48], vocab_size)[0]["prompt_token_ids"]
    tails = prompts_of([1, 9, 20, 33], vocab_size, seed=5)
    return [{"prompt_token_ids": shared + tail["prompt_token_ids"]} for tail in tails]


def test_prefix_cache_hits_change_nothing(oracles):
    oracle = oracles("mistral")
    traced = Traced(oracle.path, backend="eager", max_num_seqs=4, max_num_batched_tokens=64)
    prompts = prompts_that_begin_alike(oracle.vocab_size)
    for _ in range(2):
        expect_equal(traced, oracle, prompts)
    stats = traced.engine.schedulers[0].ledger.cache.stats
    assert stats.num_hit_tokens > 48 * len(prompts)


def test_chunks_prefixes_and_preemption_through_recorded_graphs(oracles):
    """All run in one engine, whose recordings must serve every kind of step."""
    oracle = oracles("llama")
    traced = Traced(
        oracle.path, backend="cpu", max_num_seqs=4, max_num_batched_tokens=13, max_model_len=160,
        kv_cache_memory=16 * PAGE,
    )  # fmt: skip
    prompts = prompts_that_begin_alike(oracle.vocab_size)
    for _ in range(2):
        expect_equal(traced, oracle, prompts)
    scheduler = traced.engine.schedulers[0]
    assert scheduler.num_preemptions > 0 and scheduler.ledger.cache.stats.num_hit_tokens > 48
    assert traced.engine.worker.decode.counts.replays > 0


@pytest.mark.parametrize("rope", ["rope-dynamic", "rope-longrope"])
def test_dynamic_rope_does_not_share_prefixes(oracles, rope):
    """Its keys depend on the prompt's length, so equal prefixes do not have equal keys."""
    oracle = oracles(rope)
    traced = Traced(oracle.path, backend="eager", max_num_seqs=2)
    assert not traced.engine.limits.enable_prefix_caching
    shared = prompts_of([90], oracle.vocab_size)[0]["prompt_token_ids"]
    for length in (50, 90, 70):
        expect_equal(traced, oracle, [{"prompt_token_ids": shared[:length]}], num_tokens=20)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_history_leaves_no_trace(oracles, backend):
    """A batch has bitwise identical logits after a larger, hostile batch."""
    oracle = oracles("llama")
    traced = Traced(
        oracle.path, backend=backend, max_num_seqs=8, enable_prefix_caching=False,
        max_num_batched_tokens=64,
    )  # fmt: skip
    batch = prompts_of([5, 30, 17], oracle.vocab_size, seed=3)
    traced.generate(batch)
    before = [torch.stack(traced.logits[i]) for i in traced.request_ids]
    hostile = SamplingParams(
        temperature=1.5, top_p=0.9, presence_penalty=2.0, frequency_penalty=2.0, seed=9,
        logit_bias={3: 50.0, 4: -50.0}, max_tokens=90, ignore_eos=True, logprobs=20,
        stop_token_ids=[5], min_tokens=80, repetition_penalty=1.7,
    )  # fmt: skip
    traced.generate(prompts_of([120] * 8, oracle.vocab_size, seed=4), hostile)
    traced.generate(batch)
    after = [torch.stack(traced.logits[i]) for i in traced.request_ids]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


def test_a_row_does_not_depend_on_its_neighbours(oracles):
    """Eager CPU kernels compute each row by itself, so it has the same bits alone and in a
    batch."""
    oracle = oracles("smollm2")
    traced = Traced(oracle.path, backend="eager", max_num_seqs=8, enable_prefix_caching=False)
    batch = prompts_of([5, 30, 17, 64, 2], oracle.vocab_size, seed=3)
    traced.generate(batch, GREEDY)
    together = [torch.stack(traced.logits[i]) for i in traced.request_ids]
    for prompt, rows in zip(batch, together, strict=True):
        traced.generate([prompt], GREEDY)
        assert torch.equal(torch.stack(traced.logits[traced.request_ids[0]]), rows)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_a_context_of_one_page(oracles, backend):
    oracle = oracles("llama")
    traced = Traced(oracle.path, backend=backend, max_num_seqs=2, max_model_len=16)
    assert traced.engine.worker.tables["page_table"].shape == (3, 1)
    expect_equal(traced, oracle, prompts_of([5, 3], oracle.vocab_size), num_tokens=11)


def test_scaled_hidden_states_have_no_rows_in_float8(monkeypatch):
    """Those that a kernel rounded before are without the factor."""
    decoder, taken = Traced("tiny:granite", backend="eager").engine.worker.decoder, []
    monkeypatch.setattr(Vocabulary, "logits", lambda _, x, *others: taken.append(x))
    x, slots = torch.randn(2, 64), torch.ones(2, dtype=torch.int32)
    decoder.logits(Normed(x, float8=Float8Rows(x, torch.ones(1, 2))), slots, x)
    (scaled,) = taken
    assert scaled.float8 is None and torch.allclose(scaled.x, x / 1.7)
