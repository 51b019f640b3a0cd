"""Tests of the bridge to transformers: equal tokens, what is refused, what certification finds."""

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bridged import BRIDGED, config_folder, config_of
from oracle import BASE, Oracle, build
from traced import Traced, expect_equal, prompts_of

from slotzero import LLM, SamplingParams
from slotzero.certify.session import CertifySession
from slotzero.checkpoint.source import open_checkpoint
from slotzero.errors import ConfigError, CorruptCheckpointError, UnsupportedModelError
from slotzero.models.bridge import library, load
from slotzero.models.bridge.attention import window_of
from slotzero.models.bridge.probe import examine
from slotzero.models.bridge.tried import TRIED
from slotzero.models.families.family import families
from slotzero.models.implementation import implementation_of, parse_model

pytestmark = pytest.mark.slow

BRIDGE = {"model_impl": "transformers", "kv_cache_memory": 8 << 20}
LENGTHS = [1, 19, 40]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Return a function that gets the oracle of a model, and builds each once."""
    built: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in built:
            built[name] = build(BRIDGED[name], tmp_path_factory.mktemp(name))
        return built[name]

    return get


def test_every_known_architecture_is_tested() -> None:
    assert {f"{name}ForCausalLM" for name in BRIDGED} == set(TRIED)


@pytest.mark.parametrize("name", BRIDGED)
def test_tokens_of_transformers(bridged, name: str) -> None:
    oracle = bridged(name)
    traced = Traced(oracle.path, backend="eager", max_num_seqs=4, **BRIDGE)
    expect_equal(traced, oracle, prompts_of(LENGTHS, oracle.vocab_size), 24)


@pytest.mark.parametrize("name", ["GPTNeoX", "Cohere2"])
def test_tokens_of_recorded_layers(bridged, name: str) -> None:
    """Cohere2's two layers differ in window and rotation, GPTNeoX's do not differ."""
    oracle = bridged(name)
    traced = Traced(oracle.path, backend="cpu", max_num_seqs=2, **BRIDGE)
    expect_equal(traced, oracle, prompts_of([5, 30], oracle.vocab_size), 16)
    decode = traced.engine.worker.decode
    assert decode.counts.replays > 0
    assert {record.backend for record in decode.records.values()} == {"cpu"}


def test_chunks_and_shared_prefixes(bridged) -> None:
    oracle = bridged("GPTNeoX")
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 13}
    traced = Traced(oracle.path, backend="eager", **limits, **BRIDGE)
    prompts = prompts_of([40, 7, 33, 20, 1], oracle.vocab_size)
    for _ in range(2):
        expect_equal(traced, oracle, prompts, 16)
    assert traced.engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 0


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_drafts_change_no_token(bridged, oracles, drafter: str) -> None:
    oracle = bridged("GPTNeoX")
    settings = {"speculative": drafter}
    if drafter == "draft":
        settings["speculative_model"] = oracles("llama").path  # has as many tokens
    traced = Traced(oracle.path, backend="eager", max_num_seqs=3, **settings, **BRIDGE)
    expect_equal(traced, oracle, prompts_of(LENGTHS, oracle.vocab_size), 24)
    assert traced.engine.speculation.num_draft_tokens > 0


def test_layers_that_do_the_same_share_their_code() -> None:
    assert [layer.first_equal for layer in examine(config_of("GPTNeoX")).layers] == [0, 0]
    mixed = BRIDGED["Cohere2"].config
    assert [layer.first_equal for layer in examine(config_of("Cohere2", **mixed)).layers] == [0, 1]


def test_windows_come_from_masks() -> None:
    groups = examine(config_of("Cohere2", **BRIDGED["Cohere2"].config)).groups
    assert {group.name: group.heads.window for group in groups} == {"full": None, "sliding": 20}
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 9), 64) == 9
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        window_of(lambda b, h, q, k: (k <= q) & (k // 8 == q // 8), 64)


def test_auto_takes_the_family_where_there_is_one(tmp_path: Path, caplog) -> None:
    assert implementation_of({"architectures": ["LlamaForCausalLM"]}, "auto") == "slotzero"
    name = next(name for name in BRIDGED if f"{name}ForCausalLM" not in families())
    folder = config_folder(tmp_path, name, **BRIDGED[name].config)
    with caplog.at_level(logging.WARNING, "slotzero"):
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, backend="eager",
                  kv_cache_memory=8 << 20, show_progress=False)  # fmt: skip
    assert f"{name}ForCausalLM has no family in Slotzero" in caplog.text
    assert len(llm.generate([{"prompt_token_ids": [5]}], GREEDY)[0].outputs[0].token_ids) == 8


def test_an_fp8_kv_cache(bridged) -> None:
    oracle = bridged("GPTNeoX")
    traced = Traced(oracle.path, backend="eager", kv_cache_dtype="fp8", **BRIDGE)
    prompts = prompts_of([30], oracle.vocab_size)
    (tokens,) = traced.generate(prompts, GREEDY)
    expected, logits = oracle.generate(prompts[0]["prompt_token_ids"], 8, guess=tokens)
    assert traced.engine.worker.registry["kv_full"].dtype is torch.uint8
    assert (traced.logits[traced.request_ids[0]][0] - logits[0]).abs().max() < 0.3
    assert tokens[0] == expected[0]


REFUSED = {
    "own attention": ("GPTJ", {}, "does not go through the attention interface"),
    "own mask": ("Doge", {}, r"layers\.0\.self_attn is given a mask or bias of its own"),
    "two attentions": ("DiffLlama", {}, "attends twice"),
    "a read on the host": (
        "GPTNeoX",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        r"rotary_emb \(GPTNeoXRotaryEmbedding\) does what no recorded graph can repeat",
    ),
    "a quantised checkpoint": (
        "GPTNeoX",
        {"quantization_config": {"quant_method": "fp8"}},
        "field quantization_config",
    ),
}


@pytest.mark.parametrize(("name", "fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_by_its_config(name: str, fields: dict[str, Any], reason: str) -> None:
    quantised = {k: fields[k] for k in fields if k == "quantization_config"}
    config = config_of(name, **{k: v for k, v in fields.items() if k not in quantised})
    with pytest.raises(UnsupportedModelError, match=reason):
        examine({**config, **quantised})


def with_host_numbers(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([0.5])


def with_kept_tensor(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    mlp.kept = x
    return x


def with_a_branch(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


BAD_CODE = {
    with_host_numbers: r"layers\.0\.mlp \(GPTNeoXMLP\) makes a tensor from numbers of the host",
    with_kept_tensor: "holds the tensor kept",
    with_a_branch: r"layers\.0\.mlp \(GPTNeoXMLP\) does what no recorded graph can repeat",
}


@pytest.mark.parametrize(("code", "reason"), BAD_CODE.items())
def test_code_that_no_graph_can_repeat_is_named(monkeypatch, code: Any, reason: str) -> None:
    mlp = "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXMLP"
    monkeypatch.setattr(f"{mlp}.forward", code)
    with pytest.raises(UnsupportedModelError, match=reason):
        examine(config_of("GPTNeoX"))


SETTINGS = {
    "several devices": ({"tensor_parallel_size": 2}, ConfigError, "tensor_parallel_size=2"),
    "online quantisation": ({"quantization": "int8"}, ConfigError, "quantization=int8"),
    "a head": (
        {"speculative": "eagle3", "speculative_model": "smollm2"},
        ConfigError,
        "speculative=eagle3: this drafter needs",
    ),
    "its family only": (
        {"model_impl": "slotzero"},
        UnsupportedModelError,
        "'HeliumForCausalLM' is not supported",
    ),
}


@pytest.mark.parametrize(("settings", "error", "reason"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_the_bridge_lacks(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], reason: str
) -> None:
    folder = config_folder(tmp_path, "Helium", **BRIDGED["Helium"].config)
    with pytest.raises(error, match=reason):
        LLM(folder, load_format="dummy", skip_tokenizer_init=True, show_progress=False,
            **{"backend": "eager", **BRIDGE, **settings})  # fmt: skip


def certificate_of(model: str) -> Any:
    llm = LLM(model, backend="eager", lazy_recording=True, max_num_seqs=4, show_progress=False,
              skip_tokenizer_init=True, **BRIDGE)  # fmt: skip
    return CertifySession(llm.engine, model, is_quick=True).certify()


def test_a_bridged_model_is_certified(bridged) -> None:
    certificate = certificate_of(bridged("GPTNeoX").path)
    assert certificate.passed, [*certificate.violations]


def test_mixing_outside_of_attention_is_refused_and_certification_finds_it_too(
    tmp_path: Path, monkeypatch
) -> None:
    folder = config_folder(tmp_path, "Lfm2", layer_types=["conv", "full_attention"])
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "show_progress": False}
    with pytest.raises(UnsupportedModelError, match="Lfm2ForCausalLM: a token's result depends"):
        LLM(folder, backend="eager", **settings, **BRIDGE)
    monkeypatch.setattr(load, "refuse_mixing", lambda config, parts: None)
    kind = transformers.Lfm2Config(**BASE, layer_types=["conv", "full_attention"])
    transformers.Lfm2ForCausalLM(kind).save_pretrained(tmp_path)
    assert "S3" in {violation.check for violation in certificate_of(folder).violations}


NORM = "gpt_neox.final_layer_norm.weight"


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        (lambda t: t.pop(NORM), CorruptCheckpointError, f"{NORM} is missing"),
        (
            lambda t: t.update({NORM: torch.ones(2)}),
            CorruptCheckpointError,
            f"{NORM} is of another",
        ),
        (lambda t: t.update(more=torch.ones(2)), UnsupportedModelError, "tensor more is unknown"),
    ],
)
def test_tensors_that_do_not_fit(
    bridged, monkeypatch, change: Any, error: Any, reason: str
) -> None:
    checkpoint = open_checkpoint(bridged("GPTNeoX").path, model_impl="transformers")
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    change(tensors)
    monkeypatch.setattr(type(checkpoint), "names", lambda _: tensors.keys())
    monkeypatch.setattr(type(checkpoint), "read", lambda _, name: tensors[name])
    with pytest.raises(error, match=reason):
        Traced(bridged("GPTNeoX").path, backend="eager", **BRIDGE)


def test_without_transformers_the_remedy_is_named(monkeypatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(library.importlib, "import_module", missing)
    library.transformers.cache_clear()
    try:
        with pytest.raises(UnsupportedModelError, match=r"pip install 'slotzero\[transformers\]'"):
            parse_model({"architectures": ["NewForCausalLM"]}, "auto")
    finally:
        library.transformers.cache_clear()
        importlib.invalidate_caches()
