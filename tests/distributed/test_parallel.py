"""Tests of tensor parallelism: several ranks give the answers of one rank and of transformers."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle import FAMILIES, VARIANTS, build
from safetensors.torch import load_file, save_file
from served import RANK_TIMEOUT
from traced import prompts_of

from slotzero import LLM, SamplingParams
from slotzero.cli.main import main
from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import CapacityError, ConfigError, RankLostError
from slotzero.graph import GraphKey
from slotzero.models.families.family import parse_config
from slotzero.models.stacks import model_params
from slotzero.models.tensors import expected_tensors
from slotzero.sampling.params import MAX_LOGPROBS

pytestmark = pytest.mark.slow

SIZE = 2
EVEN = {  # changes to families whose heads two ranks cannot share
    "smollm2": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "deepseek-v3": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen3-next": {"linear_num_key_heads": 2},
    "qwen3.5": {"linear_num_key_heads": 2},
    "kimi-linear": {"linear_num_heads": 4},
    "granite-hybrid": {"mamba_n_groups": 1},  # each rank has a copy
    "nemotron-h": {"n_groups": 2},
}
LENGTHS = [1, 19, 40, 44]
SETTINGS = {"backend": "eager", "max_num_seqs": 4, "max_num_batched_tokens": 33}
PAGE = 2 * 16 * 2 * 16 * 4  # layers, page size, k and v, head size, float32
SPREAD = "gpt-oss", "deepseek-v2", "deepseek-v3", "llama4"
ATTENDING = (
    "llama", "gemma2", "gemma3", "gemma4", "gpt-oss", "deepseek-v2", "deepseek-v3", "llama4",
    "qwen3-next", "falcon-h1", "granite-hybrid", "nemotron-h", "kimi-linear", "lfm2",
)  # fmt: skip
"""Families of every kind of attention, mixer and experts."""
AHEAD = {"speculative": "mtp", "speculative_steps": 2}
TREE = {"speculative_topk": 2, "speculative_num_draft_tokens": 4}
JOBS = {
    **{
        name: (name, SETTINGS)
        for name in FAMILIES
        if not name.startswith("rope") and name not in VARIANTS
    },
    **{f"{name}-spread": (name, SETTINGS) for name in SPREAD},
    "llama-graphs": ("llama", {**SETTINGS, "backend": "cpu", "max_num_seqs": 2}),
    "llama-preempted": (
        "llama", {**SETTINGS, "max_model_len": 80, "kv_cache_memory": 8 * PAGE}
    ),
    "qwen3-next-ngram": (
        "qwen3-next", {**SETTINGS, "speculative": "ngram", "snapshot_interval": 16}
    ),
    "llama-ngram": ("llama", {**SETTINGS, "speculative": "ngram"}),
    "deepseek-v3-mtp": ("deepseek-v3", {**SETTINGS, **AHEAD}),
    "deepseek-v3-tree": ("deepseek-v3", {**SETTINGS, **AHEAD, **TREE}),
}  # fmt: skip
APART = {
    **{f"{name}-apart": (name, SETTINGS) for name in ATTENDING},
    **{f"{name}-spread-apart": (name, SETTINGS) for name in SPREAD},
    **{f"{name}-apart": JOBS[name] for name in ("deepseek-v3-mtp", "deepseek-v3-tree")},
    "gpt-oss-spread-graphs-apart": (
        "gpt-oss", {**SETTINGS, "backend": "cpu", "max_num_seqs": 1}  # one size to record
    ),
    "llama-preempted-apart": (
        "llama", {**SETTINGS, "max_model_len": 80, "kv_cache_memory": 7 * 2 * PAGE}
    ),
    "deepseek-v3-spread-mtp-apart": JOBS["deepseek-v3-mtp"],
}  # fmt: skip
OF_FOUR = {
    "llama": JOBS["llama"],
    "deepseek-v3-spread-mtp": JOBS["deepseek-v3-mtp"],
    "llama-apart": JOBS["llama"],
    "deepseek-v3-spread-mtp-apart": JOBS["deepseek-v3-mtp"],
}
TINY = {"backend": "eager", "max_num_seqs": 2, "max_model_len": 128, "show_progress": False}
OF_SIZES = "ranks that replay different sizes"
OF_RANKS = [
    OF_SIZES,
    "global count of real tokens instead of the rank's",
    "expert routing that counts padded rows",
]
OF_SCALES = "scale of another rank"


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """Build the models that can be split; return them by name, and their folder."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        name: build(even(FAMILIES[name], EVEN.get(name, {})), folder / name)
        for name in dict.fromkeys(model for model, _ in JOBS.values())
    }
    add_layer_ahead(folder / "deepseek-v3")
    return made


@pytest.fixture(scope="module")
def ran(tmp_path_factory, oracles):
    """Run every job on two ranks, and return the folder of their results."""
    jobs = of_models(oracles, {**JOBS, **APART})
    jobs["faults"] = {
        "model": "tiny:gpt-oss",
        "settings": {"backend": "eager", "max_num_seqs": 4, "max_model_len": 64},
        "ranks": {"expert_parallel": True},
        "faults": OF_RANKS,
    }
    jobs["faults-apart"] = {
        **jobs["faults"],
        "ranks": {"expert_parallel": True, "dp_attention": True},
    }
    for quantization in ("int8", "fp8"):
        jobs[f"faults-{quantization}"] = {
            "model": "tiny:llama",
            "settings": {**jobs["faults"]["settings"], "quantization": quantization},
            "ranks": {},
            "faults": [OF_SCALES],
        }
    return run_ranks(SIZE, jobs, tmp_path_factory.mktemp("ranked"))


@pytest.fixture(scope="module")
def ran_by_four(tmp_path_factory, oracles):
    return run_ranks(4, of_models(oracles, OF_FOUR), tmp_path_factory.mktemp("ranked"))


def of_models(oracles, jobs):
    return {
        name: {
            "model": oracles[model].path,
            "vocab": oracles[model].vocab_size,
            "settings": settings,
            "ranks": {"expert_parallel": "spread" in name, "dp_attention": "apart" in name},
            "lengths": LENGTHS,
            "num_tokens": num_tokens(name),
        }
        for name, (model, settings) in jobs.items()
    }


def run_ranks(size, jobs, folder):
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parents[1] / "support" / "ranked.py"
    words = [sys.executable, str(script), str(size), str(folder / "jobs.json")]
    assert subprocess.run(words).returncode == 0
    return folder


def add_layer_ahead(folder):
    """Add a random MTP layer, whose drafts are hardly ever right and must change nothing."""
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    for name, shape in expected_tensors(config).items():
        if name not in stored:
            stored[name] = torch.randn(shape) * 0.2
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def even(family, more):
    return replace(family, config={**family.config, **more})


@pytest.mark.parametrize("job", JOBS)
def test_two_ranks_equal_transformers(ran, oracles, job):
    check(ran, SIZE, oracles[JOBS[job][0]], job)


@pytest.mark.parametrize("job", APART)
def test_dp_attention_equals_transformers(ran, oracles, job):
    check_apart(ran, SIZE, oracles[APART[job][0]], job)


@pytest.mark.parametrize("job", OF_FOUR)
def test_four_ranks_equal_transformers(ran_by_four, oracles, job):
    how = check_apart if "apart" in job else check
    how(ran_by_four, 4, oracles[OF_FOUR[job][0]], job)


def num_tokens(job):
    """Return the length of answers: 8 tokens cross the end of a page and of every window."""
    if "preempted" in job:
        return 24
    return 12 if any(word in job for word in ("ngram", "mtp", "tree", "graphs")) else 8


def right_answers(oracle, num, guesses):
    prompts = prompts_of(LENGTHS, oracle.vocab_size)
    return [
        oracle.generate(prompt["prompt_token_ids"], num, guess)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]


def check_apart(folder, size, oracle, job):
    """Compare the log probabilities of the best tokens, since logits do not leave the rank."""
    kept = torch.load(folder / f"{job}.0.pt")
    assert "failure" not in kept, kept["failure"]
    assert kept["dp_ranks"] == list(range(size))
    for (expected, logits), tokens, top in zip(
        right_answers(oracle, num_tokens(job), kept["tokens"]),
        kept["tokens"],
        kept["top"],
        strict=True,
    ):
        assert tokens == expected
        right = logits.log_softmax(-1)
        for i, of_token in enumerate(top):
            assert len(of_token) >= MAX_LOGPROBS
            for token, logprob in of_token.items():
                assert abs(right[i, token] - logprob) < 1e-4
    assert (kept["preemptions"] > 0) == ("preempted" in job)
    assert (kept["replays"] > 0) == ("graphs" in job)


def check(folder, size, oracle, job):
    kept, *others = (torch.load(folder / f"{job}.{rank}.pt") for rank in range(size))
    assert "failure" not in kept, kept["failure"]
    assert all(kept["tokens"] == other["tokens"] for other in others)
    for (expected, right), tokens, logits in zip(
        right_answers(oracle, num_tokens(job), kept["tokens"]),
        kept["tokens"],
        kept["logits"],
        strict=True,
    ):
        assert tokens == expected
        assert (logits - right).abs().max() < 1e-4
    assert (kept["preemptions"] > 0) == job.endswith("preempted")
    assert (kept["replays"] > 0) == job.endswith("graphs")


@pytest.mark.parametrize("job", ["faults", "faults-apart"])
def test_faults_of_ranks_are_caught(ran, job):
    kept = torch.load(ran / f"{job}.0.pt")
    assert kept.get("made") == set(OF_RANKS), kept.get("failure")
    assert kept["missed"] == []


@pytest.mark.parametrize("job", ["faults", "faults-apart"])
def test_a_rank_that_picks_another_size_is_named_with_the_size(ran, job):
    found = torch.load(ran / f"{job}.1.pt")["found"]
    assert f"decode: decode[4]: {OF_SIZES}: S0 named decode[4]" in found


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("job", ["faults-int8", "faults-fp8"])
def test_scales_of_another_rank_are_named(ran, job, rank):
    """Some of the weights are column-parallel, and some row-parallel."""
    kept = torch.load(ran / f"{job}.{rank}.pt")
    linears = "attention_full.qkv", "attention_full.out", "mlp.gate_up", "mlp.down"
    scales = [f"weight.{name}.scales" for name in linears]
    said = [f"decode: {name}: {OF_SCALES}: S0 named {name}" for name in scales]
    assert kept.get("found") == said, kept.get("failure")


def test_ranks_that_pick_different_sizes_end(capfd):
    llm = LLM("tiny:llama", tensor_parallel_size=2, rank_timeout=RANK_TIMEOUT, **TINY)
    send = llm.engine.rank_group.send

    def send_another(messages):
        send([replace(message, launches=[GraphKey("prefill", 128, 2)]) for message in messages])

    llm.engine.rank_group.send = send_another
    with pytest.raises(RankLostError, match=r"rank 1 .* ended with exit code 5"):
        generate(llm)
    llm.engine.rank_group.close()
    assert "rank 1 would run prefill[" in capfd.readouterr().err


def test_an_error_on_rank_0_in_a_step_ends_the_others(monkeypatch):
    llm = LLM("tiny:llama", tensor_parallel_size=2, rank_timeout=RANK_TIMEOUT, **TINY)
    generate(llm)
    (pid,) = llm.engine.rank_group.pids

    def fail(*_):
        raise CapacityError("no room")

    monkeypatch.setattr(llm.engine.worker, "_launch", fail)
    with pytest.raises(RankLostError, match="all ranks were ended: no room"):
        generate(llm)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("apart", [[], ["--enable-dp-attention"]])
def test_certification_on_two_ranks(capsys, apart):
    words = ["--max-num-seqs", "2", "--max-model-len", "64", "--max-num-batched-tokens", "32"]
    settings = ["--tensor-parallel-size", "2", "--backend", "eager", "--no-show-progress"]
    how = ["--quick", "--enable-expert-parallel", *apart]
    assert main(["certify", "tiny:gpt-oss", *how, *words, *settings]) == 0
    assert "passed: 5 of " in capsys.readouterr().out


@pytest.mark.parametrize("size", [2, 4])
def test_the_shards_of_all_ranks_cover_every_weight(oracles, size):
    for name in oracles if size == SIZE else ("llama", "gemma4", "deepseek-v2"):
        config = parse_config(json.loads(Path(oracles[name].path, "config.json").read_text()))
        whole = model_params(config, ALONE)
        parts = [model_params(config, Ranks(rank, size)) for rank in range(size)]
        for every, *of_ranks in zip(whole, *parts, strict=True):
            for stored, *read in zip(every.stored(), *(p.stored() for p in of_ranks), strict=True):
                seen = torch.zeros(stored.shape, dtype=torch.int32)
                for part in read:
                    assert (part.name, part.shape) == (stored.name, stored.shape)
                    seen[tuple(span.slice for span in part.spans)] += 1
                wanted = seen[tuple(span.slice for span in stored.spans)]
                assert wanted.min() >= 1, (name, every.name)


def generate(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(["Hello", "a" * 40], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def prompt_scores(llm: LLM) -> list[float]:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    scores = []
    for output in llm.generate(["Hello", "a" * 40, "b"], params, use_tqdm=False):
        for by_id in output.prompt_logprobs[1:]:
            scores += sorted(entry.logprob for entry in by_id.values())
    return scores


def vectors(llm: LLM) -> list[list[float]]:
    outputs = llm.embed(["Hello", "a" * 40, "b", "a" * 100], use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_rank_that_is_killed_is_named(is_apart):
    one_rank = LLM("tiny:llama", pooling="mean", **TINY)
    alone, scores = generate(one_rank), prompt_scores(one_rank)
    llm = LLM(
        "tiny:llama", tensor_parallel_size=2, enable_dp_attention=is_apart,
        rank_timeout=RANK_TIMEOUT, speculative="eagle3", pooling="mean", **TINY,
    )  # fmt: skip
    assert generate(llm) == alone and llm.engine.speculation.num_drafts > 0
    assert prompt_scores(llm) == pytest.approx(scores, abs=1e-4)
    for found, wanted in zip(vectors(llm), vectors(one_rank), strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    (pid,) = llm.engine.rank_group.pids
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RankLostError, match=rf"rank 1 \(process {pid}\) was killed by signal 9"):
        generate(llm)
    assert time.monotonic() - start < RANK_TIMEOUT
    llm.engine.rank_group.close()


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("tiny:smollm2", {"tensor_parallel_size": 2}, "3 KV heads"),
        ("tiny:smollm2", {"tensor_parallel_size": 3}, "intermediate_size=200"),
        ("tiny:llama", {"tensor_parallel_size": 8}, "num_attention_heads=4"),
        ("tiny:llama", {"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ("tiny:llama", {"tensor_parallel_size": 2, "sanitize": "full"}, "sanitize=full"),
        ("tiny:llama", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, "with experts"),
        ("tiny:gpt-oss", {"enable_expert_parallel": True}, "tensor_parallel_size above 1"),
        ("tiny:llama", {"enable_dp_attention": True}, "tensor_parallel_size above 1"),
        (
            "tiny:gpt-oss",
            {"tensor_parallel_size": 4, "enable_expert_parallel": True},
            "num_experts=6",
        ),
        ("tiny:llama", {"tensor_parallel_size": 2, "rank_timeout": -1.0}, "rank_timeout"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model, settings, named):
    with pytest.raises(ConfigError, match=named):
        LLM(model, **TINY, **settings)


@pytest.mark.parametrize("words", [["bench", "graphs"], ["bench", "cost"], ["train-eagle"]])
def test_commands_that_replay_steps_themselves_need_one_rank(words, tmp_path, capsys):
    more = ["--steps", "1", "--out", str(tmp_path / "head")] if words == ["train-eagle"] else []
    assert main([*words, "tiny:llama", "--tensor-parallel-size", "2", *more]) == 2
    assert "tensor_parallel_size=2" in capsys.readouterr().err
