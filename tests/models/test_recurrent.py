"""Tests of recurrent layers against transformers: chunks, snapshots, preemption and drafts."""

import random

import pytest
import torch
from oracle import RECURRENT
from traced import Traced, prompts_of
from traffic import draw_batch, send, settings_of

from slotzero import LLM, SamplingParams
from slotzero.certify import mutants
from slotzero.certify.faults import FAULTS
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.cli.main import main
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import CapacityError, ConfigError, UnsupportedModelError
from slotzero.models.families.family import parse_config
from slotzero.speculative.model import ModelDrafter

pytestmark = pytest.mark.slow

LIKE_OTHERS = "qwen3.5", "qwen3.5-moe", "lfm2-moe", "bamba"
"""Families whose mixers others have, too."""
MIXERS = [family for family in RECURRENT if family not in LIKE_OTHERS]
TINY = [f"tiny:{family}" for family in MIXERS]
DRAFTERS = {"tiny:qwen3-next": "mtp", "tiny:granite-hybrid": "eagle"}
PROMPTS = [1, 2, 3, 5, 31, 64, 97, 400]
CUT = {"max_num_batched_tokens": 37, "snapshot_interval": 32, "max_num_seqs": 4}


def answer(traced: Traced, prompts, num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return traced.generate(prompts, params)


def expect_equal(traced: Traced, oracle, texts: list[list[int]], num_tokens: int) -> None:
    prompts = [{"prompt_token_ids": text} for text in texts]
    tokens = answer(traced, prompts, num_tokens)
    for text, got, request_id in zip(texts, tokens, traced.request_ids, strict=True):
        right, logits = oracle.generate(text, num_tokens, guess=got)
        assert got == right
        rows = torch.stack(traced.logits[request_id][:num_tokens])
        assert (rows - logits).abs().max() < 1e-4


def texts_of(oracle) -> list[list[int]]:
    """Return prompts, some with common prefixes."""
    texts = [p["prompt_token_ids"] for p in prompts_of(PROMPTS, oracle.vocab_size)]
    return texts + [texts[-1][:350] + texts[-2][:n] for n in (1, 20)] + [[7, 8, 9] * 12]


@pytest.mark.parametrize(  # two have both kinds of recurrence, which recordings repeat
    ("family", "backend"),
    [*((family, "eager") for family in RECURRENT), *((f, "cpu") for f in RECURRENT[:2])],
)
def test_chunks_and_snapshots(oracles, family, backend):
    """The second run finds most of the prompts by snapshots."""
    few = {"max_num_seqs": 1} if backend == "cpu" else {}  # sizes to record
    traced = Traced(oracles(family).path, backend=backend, **{**CUT, **few})
    oracle, stats = oracles(family), traced.engine.schedulers[0].ledger.cache.stats
    expect_equal(traced, oracle, texts_of(oracle), 24)
    before = stats.num_hit_tokens
    assert before >= 320  # tokens of prompts with common prefixes
    replays = traced.engine.worker.decode.counts.replays
    assert (replays > 0) == (backend == "cpu")
    expect_equal(traced, oracle, texts_of(oracle), 24)
    assert stats.num_hit_tokens - before > 500


def state_bytes(path: str, **settings) -> tuple[int, int]:
    """Return the bytes of a row of states, and of a page of the KV cache."""
    worker = Traced(path, backend="eager", **settings).engine.worker
    assert worker.states is not None
    row = sum(part[:, 0].nbytes for part in worker.states[:2] if part is not None)
    (group,) = worker.decoder.config.groups
    return row, worker.registry[f"kv_{group.name}"][:, 0].nbytes


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("family", MIXERS)
def test_preemption(oracles, family):
    """There are pages for half of the running requests, and few snapshots, some of which are
    lost."""
    oracle = oracles(family)
    row, page = state_bytes(oracle.path, max_num_seqs=1, max_model_len=64)
    traced = Traced(
        oracle.path, backend="eager", max_model_len=128, **CUT,
        kv_cache_memory=row * (5 + 3) + page * 11,
    )  # fmt: skip
    texts = [p["prompt_token_ids"] for p in prompts_of([20, 30, 12, 25], oracle.vocab_size)]
    expect_equal(traced, oracle, texts, 45)
    scheduler = traced.engine.schedulers[0]
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("family", MIXERS)
def test_drafts(oracles, family):
    """The n-gram drafter rarely finds a match, so that rows of one token are verified, too."""
    traced = Traced(
        oracles(family).path, backend="eager", **CUT, speculative="ngram", speculative_steps=3,
        speculative_adaptive=False,
    )  # fmt: skip
    expect_equal(traced, oracles(family), texts_of(oracles(family)), 24)
    assert traced.engine.speculation.num_steps_by_width[4] > 0


def make(model: str, **settings) -> LLM:
    defaults = {"skip_tokenizer_init": True, "show_progress": False, "lazy_recording": True}
    return LLM(model, **{**defaults, "backend": "eager", **CUT, **settings})


def tokens_of(llm: LLM, texts, num_tokens: int, **params) -> list[list[int]]:
    asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
    prompts = [{"prompt_token_ids": list(text)} for text in texts]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    llm.engine.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("model", "backend"), [*((model, "eager") for model in TINY), ("tiny:falcon-h1", "cpu")]
)
def test_drafts_that_are_right_for_a_while(model, backend, monkeypatch):
    """Some of three drafts are wrong, at every position. The states go back to the last accepted
    one, and snapshots are taken meanwhile, from which other requests continue."""
    prompt = list(range(20))
    (right,) = tokens_of(make(model), [prompt], 100, temperature=0)
    text = torch.tensor(prompt + right + [0] * 20, dtype=torch.int32)

    def write(self, slots, positions, ids):
        guessed = text[positions.long()]
        wrong = (positions % 5 == 0) | (positions % 7 == 0)
        self.kernels.store_drafts(slots, positions, guessed + wrong.int(), self.tables.tokens)

    monkeypatch.setattr(ModelDrafter, "write", write)
    llm = make(
        model, backend=backend, speculative="draft", speculative_model="tiny:llama",
        speculative_steps=3, speculative_adaptive=False, max_num_seqs=1,
    )  # fmt: skip
    assert tokens_of(llm, [prompt], 100, temperature=0) == [right]
    stats = llm.engine.speculation
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8
    longer = prompt + right[:90]
    assert tokens_of(llm, [longer], 10, temperature=0) == [right[90:]]
    assert llm.engine.schedulers[0].ledger.cache.stats.num_hit_tokens == 96  # found by its snapshot


@pytest.mark.parametrize("model", TINY)
def test_every_drafter_changes_nothing(model):
    drafter = DRAFTERS.get(model, "eagle3")
    texts = [p["prompt_token_ids"] for p in prompts_of([5, 70, 17, 33, 1], 256)]
    noise = {"temperature": 0.9, "seed": 3, "top_k": 50}
    expected = tokens_of(make(model), texts, 40, **noise)
    llm = make(model, speculative=drafter, speculative_steps=3)
    assert tokens_of(llm, texts, 40, **noise) == expected
    assert llm.engine.speculation.num_drafts > 0


@pytest.mark.parametrize("speculative", [None, "ngram"])
def test_random_traffic(speculative):
    """With arrivals, cancellations, preemption, few pages and fewer snapshots, every answer is what
    it would be with room for all, and nothing is lost or owned twice."""
    tight = settings_of("granite-hybrid", "tight")
    more = {"backend": "eager", "snapshot_interval": 8, "speculative": speculative}
    roomy = Engine(
        EngineConfig(**{**tight, "kv_cache_memory": 1 << 24}, backend="eager",
                     enable_prefix_caching=False)
    )  # fmt: skip
    row = sum(part[:, 0].nbytes for part in roomy.worker.states[:2])
    drafts = 5 * (1 + EngineConfig.speculative_steps) + 2 if speculative else 0
    tight["kv_cache_memory"] += row * (6 + drafts + 4)
    engine = Engine(EngineConfig(**tight, **more))
    assert engine.limits.num_snapshots < 8
    for seed in range(12):
        batch = draw_batch(random.Random(seed), 64)
        for visit, got, right in zip(
            batch, send(engine, batch, f"{seed}."), send(roomy, batch, f"{seed}."), strict=True
        ):
            assert visit.patience is not None or got.token_ids == right.token_ids
    scheduler = engine.schedulers[0]
    assert scheduler.ledger.cache.stats.num_hit_tokens > 0
    assert scheduler.num_preemptions > 0 or speculative  # speculation leaves more room


def test_live_traffic_is_watched():
    """Every step runs twice, once over poisoned memory, while snapshots are taken and found."""
    settings = {"sanitize": "full", "sanitize_action": "raise", "max_model_len": 160}
    llm = make("tiny:falcon-h1", kv_cache_memory=1 << 23, **settings)
    texts = [list(range(n)) for n in (1, 70, 100, 33)]
    for _ in range(2):
        watched = tokens_of(llm, texts, 6, temperature=0)
    assert watched == tokens_of(make("tiny:falcon-h1"), texts, 6, temperature=0)
    assert llm.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 0


NAMED = {  # requested faults, by fault and tensor
    "stale snapshot mask": ("scan_snapshots", "stale snapshot mask"),
    "stale snapshot row": ("snapshot_rows", "stale row"),
    "state of slot 0 written": ("scan_state", "kernel writes slot 0"),
    "track rows of padded requests": ("conv_snapshots", "kernel writes slot 0"),
    "rollback to the wrong token": ("scan_state", "rollback to the wrong token"),
    "state not zeroed for a new request": ("conv_state", "state not zeroed for a new request"),
    "tail of a larger batch read": ("slots", "pad to bucket only"),
}


def test_faults_are_caught_by_name(monkeypatch):
    engine = Engine(
        EngineConfig(
            model="tiny:falcon-h1", backend="eager", max_num_seqs=5, max_model_len=64,
            snapshot_interval=16, speculative="ngram", speculative_steps=2, show_progress=False,
        )
    )  # fmt: skip
    tensors, faults = map(set, zip(*NAMED.values(), strict=True))
    monkeypatch.setattr(mutants, "FAULTS", tuple(f for f in FAULTS if f.name in faults))
    every = mutants.tensors_of
    monkeypatch.setattr(
        mutants, "tensors_of", lambda runner: [e for e in every(runner) if e.name in tensors]
    )
    runners = [engine.worker.decode, engine.worker.cycles[3].verify]
    found = mutants.mutate(engine, runners=runners)
    assert [str(mutant) for mutant in found if not mutant.is_named] == []
    assert {(mutant.tensor, mutant.fault) for mutant in found} >= set(NAMED.values())


def test_every_mixer_is_certified(capsys):
    """Qwen3-Next has a drafter, so that states after wrong drafts are covered."""
    for model, *more in (
        (TINY[0], "--speculative", "mtp", "--speculative-steps", "2"),
        *((model,) for model in TINY[1:]),
    ):
        words = ["certify", model, "--quick", "--backend", "eager", "--max-num-seqs", "3"]
        assert main([*words, "--snapshot-interval", "16", *more]) == 0, capsys.readouterr().out


def refused(model: str, error: type[Exception], *words: str, **settings) -> None:
    with pytest.raises(error) as raised:
        make(model, **settings)
    for word in words:
        assert word in str(raised.value)


def test_scores_of_granite_have_no_factor_by_default():
    config = {**tiny_configs()["granite-hybrid"]}
    del config["attention_multiplier"]
    (group,) = parse_config(config).groups
    assert group.heads.scale == 1


def test_bad_settings_are_refused_by_name():
    model = TINY[0]
    refused(model, ConfigError, "snapshot_interval=40", "page_size=16", snapshot_interval=40)
    refused(
        model, CapacityError, "recurrent states of 4 requests", "--max-num-seqs",
        kv_cache_memory=1 << 15,
    )  # fmt: skip
    refused(
        model, CapacityError, "33 snapshots", "--snapshot-interval",
        kv_cache_memory=400_000, snapshot_interval=16, max_num_batched_tokens=512,
    )  # fmt: skip
    refused(
        model, UnsupportedModelError, "--speculative-topk 1",
        speculative="eagle", speculative_topk=2,
    )  # fmt: skip
    refused(
        "tiny:llama", UnsupportedModelError, "tiny:falcon-h1 has recurrent layers",
        speculative="draft", speculative_model="tiny:falcon-h1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "field", "value", "words"),
    [
        ("qwen3-next", "layer_types", ["sliding_attention"] * 4, ["sliding_attention"]),
        ("granite-hybrid", "layer_types", ["mlp"] * 4, ["mlp", "linear_attention"]),
        ("granite-hybrid", "layer_types", ["mamba"] * 4, ["0 layers with attention"]),
        ("nemotron-h", "hybrid_override_pattern", "M-M*XM", ["layer_types", "X"]),
        ("nemotron-h", "moe_latent_size", 16, ["moe_latent_size=16"]),
        ("nemotron-h", "mlp_hidden_act", "silu", ["mlp_hidden_act='silu'", "relu2"]),
        ("nemotron-h", "mamba_ssm_cache_dtype", "int8", ["mamba_ssm_cache_dtype='int8'"]),
        ("falcon-h1", "mamba_d_head", 11, ["mamba_d_head=11"]),
        ("falcon-h1", "mamba_n_groups", 4, ["mamba_n_groups=4"]),
        ("falcon-h1", "hidden_act", "gelu_pytorch_tanh", ["hidden_act", "silu"]),
        ("qwen3-next", "linear_conv_kernel_dim", 1, ["linear_conv_kernel_dim=1"]),
        ("lfm2", "layer_types", ["conv", "linear_attention"] * 2, ["linear_attention", "conv"]),
        ("lfm2", "layer_types", None, ["layer_types is missing"]),
        ("lfm2-moe", "use_expert_bias", False, ["use_expert_bias=False"]),
        ("kimi-linear", "mla_use_nope", False, ["mla_use_nope=False"]),
        ("kimi-linear", "moe_router_activation_func", "softmax", ["moe_router_activation_func"]),
        ("kimi-linear", "layer_types", None, ["full_attn_layers is missing"]),
        ("bamba", "attn_layer_indices", None, ["0 layers with attention"]),
    ],
)
def test_configs_are_refused_by_name(model, field, value, words):
    with pytest.raises(UnsupportedModelError) as raised:
        parse_config({**tiny_configs()[model], field: value})
    for word in words:
        assert word in str(raised.value)
