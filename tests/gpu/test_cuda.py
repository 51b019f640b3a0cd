"""Tests of CUDA graphs on a GPU: captured, replayed, and bitwise equal to eager."""

import copy
import json

import pytest
import torch
from oracle import FAMILIES, RECURRENT
from shadow import Shadow
from traced import Traced, expect_scored, prompts_of

from slotzero import LLM, SamplingParams
from slotzero.errors import RecordingError, UnsupportedModelError
from slotzero.graph.cuda import CudaBackend
from slotzero.graph.transfer import DEPTH, DownloadRing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SETTINGS = {"backend": "cuda", "dtype": "float32", "kv_cache_memory": 1 << 28}
CPU_ONLY = ("deepseek-v3.2",)
QUIET = {"skip_tokenizer_init": True, "show_progress": False}


def expect_equal(traced: Traced, oracle, prompts) -> None:
    tokens = traced.generate(prompts)
    for prompt, got, request_id in zip(prompts, tokens, traced.request_ids, strict=True):
        expected, logits = oracle.generate(prompt["prompt_token_ids"])
        assert got == expected
        assert (torch.stack(traced.logits[request_id]) - logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in CPU_ONLY])
def test_family_equals_transformers(oracles, family):
    oracle = oracles(family)
    traced = Traced(oracle.path, **SETTINGS, max_num_seqs=4, enable_prefix_caching=False)
    expect_equal(traced, oracle, prompts_of([60, 7, 33, 1], oracle.vocab_size))
    assert traced.engine.worker.decode.counts.replays > 0
    worker = traced.engine.worker
    assert {r.backend for r in worker.decode.records.values()} == {"cuda"}
    if not family.startswith("rope"):  # their angles at a position depend on the whole prompt
        expect_scored(traced, oracle, prompts_of([90, 2], oracle.vocab_size))
        (scored,) = worker.scored_prefills
        assert {r.backend for r in scored.records.values()} == {"cuda"}


@pytest.mark.parametrize("family", CPU_ONLY)
def test_a_family_without_gpu_kernels_is_refused_by_name(oracles, family):
    with pytest.raises(UnsupportedModelError, match="indexer"):
        Traced(oracles(family).path, **SETTINGS)


def test_float16_does_not_round_its_logits(oracles):
    """Weights and hidden states are rounded, as in transformers' float16; logits are not."""
    oracle = oracles("smollm2")
    traced = Traced(oracle.path, **{**SETTINGS, "dtype": "float16"}, max_num_seqs=2)
    (prompt,) = prompts_of([60], oracle.vocab_size)
    (tokens,) = traced.generate([prompt])
    logits = torch.stack(traced.logits[traced.request_ids[0]])
    assert logits.dtype is torch.float32
    assert (logits != logits.half().float()).any()
    ids = torch.tensor([[*prompt["prompt_token_ids"], *tokens]])
    narrow = copy.deepcopy(oracle.model).half().cuda()
    with torch.no_grad():
        right = oracle.model(ids).logits[0, -len(tokens) - 1 : -1]
        theirs = narrow(ids.cuda()).logits[0, -len(tokens) - 1 : -1].float().cpu()
    assert (logits - right).norm() < 1.2 * (theirs - right).norm()


def test_products_allocate_in_the_pool():
    """The workspace that cuBLAS uses for products belongs to the memory of the graph, too."""
    backend = CudaBackend(torch.device("cuda"))
    x, weight = (torch.ones(n, 4096, dtype=torch.bfloat16, device="cuda") for n in (96, 1024))
    out = torch.empty(96, 1024, dtype=torch.bfloat16, device="cuda")
    lines = backend.transcript(lambda _: torch.mm(x, weight.T, out=out))
    ours = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (x, weight, out)]
    spans = [*ours, *backend.memory()]
    addresses = [address for line in lines for address in line.addresses]
    assert out.data_ptr() in addresses
    assert all(any(a <= address < b for a, b in spans) for address in addresses)


def test_all_sizes_are_captured_into_one_pool(oracles):
    oracle = oracles("qwen3")
    llm = LLM(oracle.path, **SETTINGS, max_num_seqs=100, **QUIET)
    records = list(llm.engine.worker.decode.records.values())
    assert [r.key.rows for r in records] == sorted((r.key.rows for r in records), reverse=True)
    assert records[0].key.rows == 100 and records[-1].key.rows == 1
    assert all(r.backend == "cuda" and not r.failure for r in records)
    assert sum(r.num_bytes for r in records[1:]) <= max(records[0].num_bytes, 64 << 20)


def test_a_failed_capture_does_not_affect_others():
    backend = CudaBackend(torch.device("cuda"))
    value = torch.zeros(1, device="cuda")

    def adds(_):
        value.add_(1)

    def asks(_):  # works eagerly, but is refused inside a capture
        value.item()

    backend.record(adds)  # dropped at once, so no captured graph is left
    with pytest.raises(RecordingError):
        backend.record(asks)
    recording = backend.record(adds)
    value.zero_()
    recording.replay()
    recording.replay()
    assert value.item() == 2


def test_results_belong_to_their_own_step():
    """The source is overwritten at once, by a device that is far behind the host."""
    source = torch.zeros(256, 64, device="cuda")
    ring, downloads = DownloadRing([source]), []
    torch.cuda._sleep(100_000_000)
    for step in range(DEPTH):
        source.fill_(step)
        downloads.append(ring.download([200]))
    source.fill_(-1)
    for step, download in enumerate(downloads):
        (values,) = download.wait()
        assert values.shape == (200, 64) and (values == step).all()


KINDS = [
    "smollm2", "qwen3", "gemma3", "gemma4", "gpt-oss", "mimo-v2", "deepseek-v2", "deepseek-v3",
    *RECURRENT,
]  # fmt: skip


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_equals_eager_to_the_bit(oracles, family, dtype):
    oracle = oracles(family)
    settings = {**SETTINGS, "dtype": dtype}
    traced = Traced(oracle.path, **settings, max_num_seqs=5)
    shadow = Shadow(traced.engine)
    sampled = SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, seed=7, logprobs=5, max_tokens=64, ignore_eos=True,
        frequency_penalty=0.5,
    )  # fmt: skip
    traced.generate(prompts_of([5, 30, 17], oracle.vocab_size))
    traced.generate(prompts_of([9, 21, 40, 2, 2], oracle.vocab_size), sampled)
    assert shadow.num_compared >= 126
    assert {name: d for name, d in shadow.differences.items() if d} == {}


def test_an_unknown_shape_is_timed(oracles, monkeypatch, tmp_path):
    """The choice is remembered, and the answers with the remembered choice are the same."""
    monkeypatch.undo()  # undo the fixture any_tile
    monkeypatch.setenv("SLOTZERO_CACHE", str(tmp_path))
    oracle = oracles("qwen3")
    prompts, answers = prompts_of([5, 30, 17], oracle.vocab_size), []
    for _ in range(2):
        traced = Traced(oracle.path, **{**SETTINGS, "dtype": "bfloat16"}, max_num_seqs=3)
        answers.append(traced.generate(prompts))
    (file,) = tmp_path.glob("tuned-*.json")
    assert {key.split("/")[1] for key in json.loads(file.read_text())} >= {"linear", "add", "gated"}
    assert answers[0] == answers[1]


def test_history_leaves_no_trace(oracles):
    oracle = oracles("llama")
    traced = Traced(oracle.path, **SETTINGS, max_num_seqs=16, enable_prefix_caching=False)
    batch = prompts_of([5, 30, 17], oracle.vocab_size, seed=3)
    traced.generate(batch)
    before = [torch.stack(traced.logits[i]) for i in traced.request_ids]
    hostile = SamplingParams(temperature=1.5, max_tokens=90, ignore_eos=True, logit_bias={3: 9.0})
    traced.generate(prompts_of([120] * 16, oracle.vocab_size, seed=4), hostile)
    traced.generate(batch)
    for request_id, rows in zip(traced.request_ids, before, strict=True):
        assert torch.equal(torch.stack(traced.logits[request_id]), rows)


def test_prefix_cache_hits_change_nothing(oracles):
    oracle = oracles("mistral")
    traced = Traced(oracle.path, **SETTINGS, max_num_seqs=4, max_num_batched_tokens=64)
    shared = prompts_of([48], oracle.vocab_size)[0]["prompt_token_ids"]
    tails = prompts_of([1, 9, 20, 33], oracle.vocab_size, seed=5)
    prompts = [{"prompt_token_ids": shared + tail["prompt_token_ids"]} for tail in tails]
    for _ in range(2):
        expect_equal(traced, oracle, prompts)
    assert traced.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 48 * len(prompts)


def test_preemption_and_chunked_prefill(oracles):
    oracle = oracles("llama")
    page = 2 * 2 * 16 * 2 * 16 * 4
    settings = {**SETTINGS, "kv_cache_memory": 13 * page}
    traced = Traced(
        oracle.path, **settings, max_num_seqs=4, max_model_len=120, max_num_batched_tokens=24
    )
    expect_equal(traced, oracle, prompts_of([40, 30, 20, 50, 10, 44], oracle.vocab_size))
    assert traced.engine.schedulers.num_preemptions > 0


def test_a_seed_gives_the_same_tokens_beside_any_neighbours(oracles):
    oracle = oracles("qwen2")
    llm = LLM(oracle.path, **SETTINGS, max_num_seqs=8, **QUIET)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    prompt, *others = prompts_of([12, 30, 7, 55, 20], oracle.vocab_size)
    alone = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    batch = llm.generate([*others, prompt], params, use_tqdm=False)[-1].outputs[0].token_ids
    assert alone == batch


def test_many_requests_leave_nothing_behind(oracles):
    oracle = oracles("smollm2")
    llm = LLM(oracle.path, **SETTINGS, max_num_seqs=32, **QUIET)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for round_ in range(5):
        prompts = prompts_of([3 + i % 20 for i in range(100)], oracle.vocab_size, seed=round_)
        llm.generate(prompts, params, use_tqdm=False)
        if round_ == 1:
            before = torch.cuda.memory_allocated()
    llm.engine.check()
    assert llm.engine.schedulers[0].slots.num_free == 32
    assert torch.cuda.memory_allocated() <= before
