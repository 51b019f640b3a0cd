"""Whole models with a KV cache in FP8.

Every token attends to what is stored, so how a text is cut, cached or drafted changes nothing: the
answers are compared exactly. They differ from those with a plain cache.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PAGE, answer_all, greedy, make, prompt_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from traced import Traced, prompts_of

from slotzero import LLM, SamplingParams
from slotzero.config import EngineConfig
from slotzero.errors import (
    ConfigError,
    CorruptCheckpointError,
    SlotzeroError,
    UnsupportedModelError,
)
from slotzero.executor import build
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.float8_kv import CODES, from_codes
from slotzero.kernels.reference import ReferenceKernels

pytestmark = pytest.mark.slow

FEW = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "max_model_len": 128}
FAMILIES = (
    "llama",
    "gemma3",  # sliding windows
    "gemma4",  # layers that read another layer's KV, values under norms
    "gpt-oss",  # sinks
    "mimo-v2",  # values of another size
    "deepseek-v3",  # MLA
    "falcon-h1",  # recurrent layers beside attention
    "qwen3-next",
)
RECORDED = ("gemma3", "deepseek-v3")
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def answers(model: str | Path, **settings: Any) -> tuple[list[list[int]], list[Tensor]]:
    traced = Traced(str(model), **{"backend": "eager", "max_num_seqs": 2, **FP8, **settings})
    vocab = traced.engine.worker.vocab_size
    tokens = traced.generate(prompts_of([50, 5, 17], vocab), FEW)
    return tokens, [torch.stack(rows) for rows in traced.logits.values()]


def same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_how_a_prompt_is_cut_changes_nothing(family: str) -> None:
    whole = answers(f"tiny:{family}", max_num_batched_tokens=128)
    same(answers(f"tiny:{family}", max_num_batched_tokens=16), whole)
    if family in RECORDED:
        same(answers(f"tiny:{family}", max_num_batched_tokens=16, backend="cpu"), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_change_a_little(family: str) -> None:
    rounded = answers(f"tiny:{family}")[1]
    plain = answers(f"tiny:{family}", kv_cache_dtype="auto")[1]
    errors = [
        float((one[0] - other[0]).norm() / other[0].norm())
        for one, other in zip(rounded, plain, strict=True)
    ]
    assert min(errors) > 1e-5
    assert sorted(errors)[1] < 0.4  # one prompt may choose other experts


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "falcon-h1"])
def test_a_plain_torch_reference_gives_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = answers(f"tiny:{family}")
    monkeypatch.setattr(build, "kernels_for", lambda *_: ReferenceKernels())
    slow = answers(f"tiny:{family}")
    assert slow[0] == fast[0]
    for one, other in zip(slow[1], fast[1], strict=True):
        assert torch.allclose(one, other, atol=1e-2 * float(other.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "falcon-h1"])
def test_a_prefix_that_is_found_is_one_that_is_computed(family: str) -> None:
    prompt = prompts_of([70], 200)[0]
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "snapshot_interval": 16}
    traced = Traced(f"tiny:{family}", backend="eager", **FP8, **settings)
    first = traced.generate([prompt], FEW), [*traced.logits.values()]
    again = traced.generate([prompt], FEW), [*traced.logits.values()]
    assert traced.engine.schedulers[0].ledger.cache.stats.num_hit_tokens >= 64
    assert first[0] == again[0]
    assert all(map(torch.equal, first[1][0], again[1][0]))


def test_a_preempted_request_gets_the_same_answer() -> None:
    settings = {"max_num_seqs": 2, "max_model_len": 80, "kv_cache_dtype": "fp8"}
    asks = [(prompt_of(30 + i), greedy(40)) for i in range(4)]
    tight = make(kv_cache_memory=7 * PAGE // 4, **settings)
    answered = [handle.token_ids for handle in answer_all(tight, asks)]
    assert tight.schedulers.num_preemptions > 0
    roomy = make(kv_cache_memory=100 * PAGE, **settings)
    assert [handle.token_ids for handle in answer_all(roomy, asks)] == answered


SPECULATION = [
    ("llama", {"speculative": "ngram"}),
    ("llama", {"speculative": "eagle3"}),
    ("llama", {"speculative": "eagle", "speculative_topk": 2}),
    ("gemma3", {"speculative": "draft", "speculative_model": "tiny:gemma3"}),
    ("deepseek-v3", {"speculative": "mtp", "speculative_steps": 1}),
    ("deepseek-v3", {"speculative": "eagle3", "speculative_topk": 2}),
    ("falcon-h1", {"speculative": "eagle"}),
]


@pytest.mark.parametrize(("family", "more"), SPECULATION)
def test_drafts_change_nothing(family: str, more: dict[str, Any]) -> None:
    plain = answers(f"tiny:{family}")[0]
    assert answers(f"tiny:{family}", speculative_adaptive=False, **more)[0] == plain


@pytest.mark.parametrize(
    ("model", "group", "more"),
    [
        ("tiny:llama", "full", {}),
        ("tiny:gemma3", "sliding", {}),
        ("tiny:deepseek-v3", "latent", {}),
        ("tiny:deepseek-v3", "draft", {"speculative": "mtp", "speculative_steps": 1}),
        ("tiny:llama", "full", {"load_format": "dummy"}),
    ],
)
def test_every_layer_of_a_random_model_has_its_own_scales(
    model: str, group: str, more: dict[str, Any]
) -> None:
    """Else no test and no mutant would notice the scales of another layer."""
    scales = scales_of(model, group, **more)
    num_kinds = 1 if "deepseek" in model else 2
    assert len(scales.unique()) == num_kinds * len(scales)
    assert ((scales >= 0.02) & (scales <= 0.06)).all()


def test_drafters_keep_their_kv_in_fp8_too() -> None:
    worker = Traced("tiny:llama", backend="eager", speculative="eagle3", **FP8).engine.worker
    names = [e.name for e in worker.registry.entries() if e.name.startswith("kv_")]
    assert names == ["kv_scales_full", "kv_scales_draft", "kv_full", "kv_draft"]
    for group in ("full", "draft"):
        assert worker.registry.entry(f"kv_{group}").is_float8
        assert worker.registry[f"kv_{group}"].dtype is CODES


def test_a_cache_has_room_for_four_times_as_many_tokens_as_in_float32() -> None:
    plain = make(kv_cache_memory=40 * PAGE, max_num_seqs=64, max_model_len=512)
    float8 = make(
        kv_cache_memory=40 * PAGE, max_num_seqs=64, max_model_len=512, kv_cache_dtype="fp8"
    )
    assert float8.limits.num_pages["full"] == 4 * plain.limits.num_pages["full"]
    assert plain.limits.num_kv_tokens == (plain.limits.num_pages["full"] - 1) * 16
    assert (plain.limits.kv_cache_dtype, float8.limits.kv_cache_dtype) == ("float32", "fp8")


def test_the_sanitizer_accepts_all_of_it() -> None:
    """It overwrites pages that a step does not own with NaN, and recomputes every answer."""
    settings = {"sanitize": "full", "sanitize_action": "raise", "max_num_seqs": 3}
    prompts = [*prompts_of([40, 9], 200), *prompts_of([40], 200)]
    llm = LLM(
        "tiny:gemma3", backend="cpu", skip_tokenizer_init=True, show_progress=False,
        lazy_recording=True, **settings, **FP8,
    )  # fmt: skip
    for _ in range(2):
        llm.generate(prompts, FEW, use_tqdm=False)
    sanitizer = llm.engine.sanitizer
    assert sanitizer is not None and sanitizer.steps_watched > 20
    assert sanitizer.violations == 0 and sanitizer.answers.num_recomputed == 6


# Checkpoints


ATTENTION = "model.layers.{layer}.self_attn."


def with_scales(
    folder: Path, oracle: Any, scales: Mapping[str, Tensor], config: Mapping[str, Any] | None = None
) -> Path:
    """Write the oracle's model with more tensors, and a quantization_config."""
    shutil.copytree(oracle.folder, folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | dict(scales), file, {"format": "pt"})
    if config is not None:
        settings = json.loads((folder / "config.json").read_text())
        settings["quantization_config"] = config
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def named(k: str, v: str | None = None, layers: int = 2) -> dict[str, Tensor]:
    """Scales of every layer, each another one, by the end of their names."""
    made = {}
    for layer in range(layers):
        prefix = ATTENTION.format(layer=layer)
        made[prefix + k] = torch.tensor(0.02 * (layer + 1))
        if v is not None:
            made[prefix + v] = torch.tensor([0.05 * (layer + 1)])
    return made


def scales_of(model: str | Path, group: str = "full", **settings: Any) -> Tensor:
    worker = Traced(str(model), backend="eager", **{**FP8, **settings}).engine.worker
    return worker.registry[f"kv_scales_{group}"]


@pytest.mark.parametrize(
    "names",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_the_checkpoint_are_used(
    names: tuple[str, str], oracles: Any, tmp_path: Path
) -> None:
    folder = with_scales(tmp_path / "model", oracles("llama"), named(*names))
    expected = torch.tensor([[0.02, 0.05], [0.04, 0.1]])
    assert torch.equal(scales_of(folder), expected)
    traced = Traced(str(folder), backend="eager", **FP8)
    plain = Traced(oracles("llama").path, backend="eager", max_model_len=128)
    prompt = prompts_of([20], traced.engine.worker.vocab_size)
    for one in (traced, plain):
        one.generate(prompt, FEW)
    pages, kv = traced.engine.worker.registry["kv_full"], plain.engine.worker.registry["kv_full"]
    size = kv.shape[-1] // 2
    k, v = pages.split(size, dim=-1)
    numbers = torch.cat(
        [from_codes(part, expected[:, i, None, None, None, None]) for i, part in enumerate((k, v))],
        dim=-1,
    )
    assert torch.allclose(numbers[0], kv[0], rtol=2**-4, atol=0.05 * 2**-10)


def test_one_scale_may_be_for_keys_and_values(oracles: Any, tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "model", oracles("llama"), named("kv_scale"))
    assert torch.equal(scales_of(folder), torch.tensor([[0.02, 0.02], [0.04, 0.04]]))


def test_with_mla_the_scale_of_keys_is_that_of_values(oracles: Any, tmp_path: Path) -> None:
    layers = json.loads((oracles("deepseek-v3").folder / "config.json").read_text())
    scales = named("k_scale", layers=layers["num_hidden_layers"])
    folder = with_scales(tmp_path / "model", oracles("deepseek-v3"), scales)
    found = scales_of(folder, "latent")
    assert torch.equal(found[:, 0], found[:, 1]) and found[1, 0] == 0.04


@pytest.mark.parametrize("more", [{}, {"enable_dp_attention": True}])
def test_two_ranks_give_the_answers_of_one(
    more: dict[str, Any], oracles: Any, tmp_path: Path
) -> None:
    folder = with_scales(tmp_path / "model", oracles("llama"), named("k_scale", "v_scale"))
    settings = {"backend": "eager", "skip_tokenizer_init": True, "show_progress": False}
    llm = LLM(str(folder), tensor_parallel_size=2, max_num_seqs=2, **settings, **FP8, **more)
    try:
        prompts = prompts_of([50, 5, 17], llm.engine.worker.vocab_size)
        outputs = llm.generate(prompts, FEW, use_tqdm=False)
    finally:
        llm.engine.rank_group.close()
    assert [output.outputs[0].token_ids for output in outputs] == answers(folder)[0]


def test_scales_change_answers(oracles: Any, tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "model", oracles("llama"), named("k_scale", "v_scale"))
    one, other = answers(folder)[1], answers(oracles("llama").path)[1]
    assert not torch.equal(one[0], other[0])


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_auto_asks_the_checkpoint(config: dict[str, Any], oracles: Any, tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "model", oracles("llama"), named("k_scale", "v_scale"), config)
    auto = answers(folder, kv_cache_dtype="auto")
    same(auto, answers(folder, kv_cache_dtype="fp8"))
    engine = Traced(str(folder), backend="eager").engine
    assert engine.limits.kv_cache_dtype == "fp8"
    unquantized = Traced(str(folder), backend="eager", kv_cache_dtype="none").engine
    assert unquantized.limits.kv_cache_dtype == "float32"
    plain = Traced(oracles("llama").path, backend="eager").engine
    assert plain.limits.kv_cache_dtype == "float32"


def test_auto_without_fp8_on_the_card_keeps_the_models_type(
    oracles: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    folder = with_scales(tmp_path / "model", oracles("llama"), named("k_scale", "v_scale"), config)
    monkeypatch.setattr(CpuKernels, "has_float8_kv", False)
    assert Traced(str(folder), backend="eager").engine.limits.kv_cache_dtype == "float32"
    assert "the KV cache is float32" in caplog.text
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8: .*8\.9"):
        Traced(str(folder), backend="eager", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("scales", "error", "words"),
    [
        (named("k_scale"), CorruptCheckpointError, "layers.0.self_attn has a scale for its keys"),
        (named("k_scale", "v_scale", 1) | {ATTENTION.format(layer=1) + "k_scale": torch.zeros(1)},
         CorruptCheckpointError, "layers.1.self_attn.k_scale must be positive"),
        ({ATTENTION.format(layer=1) + "v_scale": torch.tensor(torch.nan)},
         CorruptCheckpointError, "layers.1.self_attn.v_scale holds a number that is not finite"),
        ({ATTENTION.format(layer=0) + "k_scale": torch.ones(2)},
         CorruptCheckpointError, "layers.0.self_attn.k_scale has shape"),
        ({ATTENTION.format(layer=0) + "k_scale": torch.ones(1, dtype=torch.int32)},
         CorruptCheckpointError, "layers.0.self_attn.k_scale is torch.int32"),
        (named("k_scale", "v_scale") | {ATTENTION.format(layer=0) + "odd.k_scale": torch.ones(1)},
         UnsupportedModelError, "layers.0.self_attn.odd.k_scale"),
    ],
)  # fmt: skip
def test_scales_that_cannot_be_used_are_refused_by_name(
    scales: dict[str, Tensor], error: type[SlotzeroError], words: str, oracles: Any, tmp_path: Path
) -> None:
    folder = with_scales(tmp_path / "model", oracles("llama"), scales)
    with pytest.raises(error, match=words):
        Traced(str(folder), backend="eager", **FP8)
    Traced(str(folder), backend="eager")  # a plain cache does not use them


def test_different_scales_with_mla_are_refused(oracles: Any, tmp_path: Path) -> None:
    scales = named("k_scale", "v_scale", 1)
    folder = with_scales(tmp_path / "model", oracles("deepseek-v3"), scales)
    with pytest.raises(UnsupportedModelError, match="the same stored row"):
        Traced(str(folder), backend="eager", **FP8)


def test_other_values_of_the_setting_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of auto, none, fp8, got 'int8'"):
        EngineConfig(kv_cache_dtype="int8")
