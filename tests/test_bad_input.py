"""Tests of bad input: the right error, in one line that names the cause, and no other effect."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.cli import main as cli
from slotzero.errors import (
    CapacityError,
    ConfigError,
    CorruptCheckpointError,
    ModelNotFoundError,
    RequestError,
    SlotzeroError,
    TokenizerMissingError,
    UnsupportedModelError,
    outcome_of,
)
from slotzero.models.families.family import parse_config
from slotzero.models.rope import refuse_two_ropes
from slotzero.models.tensors import expected_tensors
from slotzero.pools import budget
from slotzero.system.memory import SystemMemory
from slotzero.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CONFIG = dict(tiny_configs()["llama"])
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
NO_GPU = not torch.cuda.is_available()


def make(model: str = "tiny:llama", **settings: Any) -> LLM:
    return LLM(model, **{"backend": "eager", "show_progress": False, **settings})


def drain(llm: LLM) -> None:
    for _ in range(1000):  # a request that never ends must not hang the tests
        llm.engine.step()
        if not llm.engine.has_work:
            break
    assert not llm.engine.has_work
    llm.engine.check()


def refuse(error: type[SlotzeroError], names: list[str], call: Callable[[], object]) -> str:
    """Check that the call fails with exactly this class, in one line with these names."""
    with pytest.raises(error) as info:
        call()
    message = str(info.value)
    assert info.type is error
    assert message.strip()
    assert len(message.splitlines()) == 1
    assert len(message) < 400
    for name in names:
        assert name in message
    return message


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that calls the command and returns exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        try:
            code = cli.main(words)
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def refused_by_command(run: Run, code: int, names: list[str], *words: str) -> None:
    got, out, err = run("generate", *words, "--backend", "eager")
    assert got == code != 0
    assert out == ""
    assert err.startswith("slotzero: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    for name in names:
        assert name in err


# Sampling parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("top_p", 0.0),
        ("top_p", 2.0),
        ("top_p", math.nan),
        ("min_p", 3.0),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("n", 0),
        ("n", -1),
        ("top_k", -2),
        ("min_tokens", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 9.0),
        ("frequency_penalty", -9.0),
        ("logprobs", -1),
        ("logprobs", 21),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("stop", ""),
    ],
)
def test_a_sampling_parameter(run: Run, field: str, value: Any) -> None:
    message = refuse(RequestError, [field], lambda: SamplingParams(**{field: value}))
    assert "must" in message  # the message has a remedy
    flag = "--" + field.replace("_", "-")
    words = ["tiny:llama", "--prompt", "x", "--json", f"{flag}={value}"]
    refused_by_command(run, 2, [field], *words)


@pytest.mark.parametrize(
    "wanted",
    [
        {"stop": ["x", ""]},
        {"stop": "x", "detokenize": False},
        {"stop_token_ids": list(range(17))},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {"one": 1.0}},
        {"min_tokens": 5, "max_tokens": 4},
    ],
)
def test_a_sampling_parameter_that_has_no_flag(wanted: dict[str, Any]) -> None:
    refuse(RequestError, [next(iter(wanted))], lambda: SamplingParams(**wanted))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("max_tokens", "many"),
        ("max_tokens", 2.5),
        ("n", 1.5),
        ("top_k", "40"),
        ("seed", "7"),
        ("seed", 1.5),
        ("stop", 3),
        ("stop", [3]),
        ("stop_token_ids", 3),
        ("stop_token_ids", ["a"]),
        ("logprobs", 1.5),
    ],
)
def test_a_sampling_parameter_of_another_type(field: str, value: Any) -> None:
    refuse(RequestError, [field], lambda: SamplingParams(**{field: value}))


# Prompts, and requests that do not fit the model


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make(max_num_seqs=2, max_model_len=64)


BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "longer than the context": ([5] * 65, {}, ["65 tokens", "64", "shorten"]),
    "no room for an answer": ([5] * 64, {}, ["64 tokens", "shorten", "--max-model-len"]),
    "empty": ([], {}, ["the prompt is empty", "at least one token"]),
    "token id too large": ([1, 259], {}, ["prompt", "259"]),
    "token id negative": ([1, -1], {}, ["prompt", "-1", "259"]),
    "bias too large": ([1], {"logit_bias": {259: 1.0}}, ["logit_bias", "259"]),
    "bias negative": ([1], {"logit_bias": {-4: 1.0}}, ["logit_bias", "-4", "259"]),
    "stop id too large": ([1], {"stop_token_ids": [3, 999]}, ["stop_token_ids", "999", "259"]),
    "stop id negative": ([1], {"stop_token_ids": [-7]}, ["stop_token_ids", "-7", "259"]),
}


@pytest.mark.parametrize("how", ["engine", "generate", "stream"])
@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_bad_request_affects_no_other(llm: LLM, what: str, how: str) -> None:
    """It arrives in a batch with good requests while two run and two wait; none of its batch is
    added."""
    tokens, wanted, names = BAD_REQUESTS[what]
    prompts = [[7 + i] * (5 + i) for i in range(4)]
    good = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [o.outputs[0].token_ids for o in llm.generate(good, GREEDY, use_tqdm=False)]

    engine = llm.engine
    answers = [engine.add(f"good {i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    for _ in range(3):
        engine.step()
    params = SamplingParams(**wanted)
    bad = {"prompt_token_ids": tokens}
    if how == "engine":
        refuse(RequestError, names, lambda: engine.add("bad", tokens, params))
    elif how == "generate":
        names = ["prompt 1: ", *names]
        both = [GREEDY, params]
        refuse(RequestError, names, lambda: llm.generate([good[0], bad], both, use_tqdm=False))
    else:
        refuse(RequestError, names, lambda: next(llm.stream(bad, params)))
    assert len(engine._handles) == 4
    engine.check()
    drain(llm)
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.finish_reason for answer in answers} == {"length"}


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        {"prompt": 5},
        {"prompt": None},
        {"text": "x"},
        {"prompt_token_ids": "text"},
        {"prompt_token_ids": 5},
        {"prompt_token_ids": [1.5]},
        {"prompt_token_ids": ["a"]},
        {"prompt_token_ids": [None]},
        {"prompt_token_ids": [[1]]},
    ],
)
def test_a_prompt_of_another_type(llm: LLM, prompt: Any) -> None:
    refuse(RequestError, ["prompt"], lambda: llm.generate(prompt, GREEDY, use_tqdm=False))
    assert llm.engine._handles == {}


def test_a_command_answers_the_good_prompts_beside_a_bad_one(run: Run) -> None:
    words = ["--backend", "eager", "--max-tokens", "4", "--max-model-len", "64"]
    code, out, err = run(
        "generate", "tiny:llama", *words, "--prompt", "a", "--prompt", "x" * 80, "--prompt", ""
    )
    alone = run("generate", "tiny:llama", *words, "--prompt", "a")
    assert code == 2
    assert (alone[0], alone[1]) == (0, out)
    lines = err.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["prompt 2", "prompt 3"]
    assert "shorten" in lines[0]


def test_stop_strings_need_a_tokenizer() -> None:
    llm = make(skip_tokenizer_init=True, max_num_seqs=1)
    prompt = {"prompt_token_ids": [1, 2]}
    names = ["stop strings", "tokenizer", "stop_token_ids"]
    stop = SamplingParams(stop="x")
    refuse(TokenizerMissingError, names, lambda: llm.generate(prompt, stop))
    names = ["tokenizer", "prompt_token_ids"]
    refuse(TokenizerMissingError, names, lambda: llm.generate("text", GREEDY))
    assert len(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 10


# Settings


@pytest.mark.parametrize(
    ("settings", "error", "names"),
    [
        ({"kv_cache_memory": 1000}, CapacityError, ["KV", "--kv-cache-memory"]),
        (
            {"kv_cache_memory": 40000, "max_model_len": 100},
            CapacityError,
            ["100 tokens", "--kv-cache-memory", "--max-model-len", "at most 48"],
        ),
        ({"max_model_len": 513}, ConfigError, ["max_model_len=513", "512"]),
        (
            {"max_num_batched_tokens": 7, "max_num_seqs": 8},
            ConfigError,
            ["max_num_batched_tokens=7", "at least max_num_seqs=8"],
        ),
        ({"max_num_seqs": 0}, ConfigError, ["max_num_seqs", "at least 1"]),
        ({"max_model_len": 0}, ConfigError, ["max_model_len", "at least 1"]),
        ({"max_num_batched_tokens": -1}, ConfigError, ["max_num_batched_tokens", "at least 1"]),
        ({"page_size": 3}, ConfigError, ["page_size", "power of two"]),
        ({"page_size": 0}, ConfigError, ["page_size", "power of two"]),
        ({"gpu_memory_utilization": 1.5}, ConfigError, ["gpu_memory_utilization", "(0, 1]"]),
        ({"gpu_memory_utilization": math.nan}, ConfigError, ["gpu_memory_utilization"]),
        ({"sanitize_action": "raise"}, ConfigError, ["sanitize_action='raise' has no effect"]),
        ({"sanitize_every": 5}, ConfigError, ["sanitize_every=5 has no effect without sanitize"]),
        pytest.param(
            {"dtype": "float16"}, ConfigError, ["float16", "float32"],
            marks=pytest.mark.skipif(not NO_GPU, reason="the setting is allowed on a GPU"),
        ),
    ],
)  # fmt: skip
def test_a_setting(
    run: Run, settings: dict[str, Any], error: type[SlotzeroError], names: list[str]
) -> None:
    refuse(error, names, lambda: make(**settings))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    refused_by_command(
        run, outcome_of(error).exit_code, names, "tiny:llama", "--prompt", "x", *words
    )


@pytest.mark.skipif(not NO_GPU, reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there(run: Run) -> None:
    names = ["backend=cuda", "--backend cpu"]
    refuse(ConfigError, names, lambda: make(backend="cuda"))
    code, out, err = run("generate", "tiny:llama", "--prompt", "x", "--backend", "cuda")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("setting", ["backend", "dtype", "load_format"])
def test_a_choice_that_does_not_exist(run: Run, setting: str) -> None:
    refuse(ConfigError, [setting, "auto", "'fast'"], lambda: make(**{setting: "fast"}))
    code, _, err = run("generate", "--prompt", "x", f"--{setting.replace('_', '-')}", "fast")
    assert code == 2
    assert "fast" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("setting", "value", "kind"),
    [
        ("enforce_eager", "no", "true or false"),
        ("enable_prefix_caching", "false", "true or false"),
        ("seed", "x", "an integer"),
        ("max_num_seqs", True, "an integer"),
        ("max_num_seqs", 2.5, "an integer"),
        ("max_model_len", "x", "an integer"),
        ("gpu_memory_utilization", "x", "a number"),
        ("speculative", 3, "a string"),
        ("model", 5, "a string"),
    ],
)
def test_a_setting_of_another_kind(setting: str, value: object, kind: str) -> None:
    refuse(
        ConfigError, [f"{setting} must be {kind}, got {value!r}"], lambda: make(**{setting: value})
    )


def test_weights_that_exceed_memory_are_refused_before_any_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "memory", lambda: SystemMemory(1 << 16, 1 << 16))
    refuse(CapacityError, ["weights need", "64.0 KiB", "a smaller model"], make)


def test_a_prompt_without_its_flag(run: Run) -> None:
    refused_by_command(run, 2, ["'hi'", "--prompt TEXT"], "tiny:llama", "hi")


def test_settings_that_contradict_or_do_not_exist() -> None:
    refuse(ConfigError, ["enforce_eager", "cpu"], lambda: make(backend="cpu", enforce_eager=True))
    refuse(ConfigError, ["'max_len'", "max_model_len"], lambda: make(max_len=3))


# Models


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in expected_tensors(CONFIG).items()}
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer.bytes_tokenizer()
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": tokenizer.chat_template, "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_folder_works_before_it_is_damaged(run: Run, folder: Path) -> None:
    assert make(str(folder)).generate("x", GREEDY, use_tqdm=False)[0].finished
    words = ["--prompt", "x", "--backend", "eager", "--max-tokens", "3", "--no-show-progress"]
    assert run("generate", str(folder), *words)[0] == 0


def cut(kept: int | float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])

    return damage


def config(**fields: Any) -> Callable[[Path], None]:
    """Return a function that changes config.json; None removes a field."""

    def damage(folder: Path) -> None:
        changed = {k: v for k, v in (CONFIG | fields).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(changed))

    return damage


def mistral(**fields: Any) -> Callable[[Path], None]:
    return config(model_type="mistral", architectures=["MistralForCausalLM"], **fields)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors")

    return damage


def without(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def text(file: str, content: str) -> Callable[[Path], int]:
    return lambda folder: (folder / file).write_text(content)


def rope(**fields: Any) -> Callable[[Path], None]:
    return config(rope_scaling=fields)


EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"
K_BIAS = "model.layers.0.self_attn.k_proj.bias"
Corrupt, Unsupported = CorruptCheckpointError, UnsupportedModelError
DAMAGES: dict[str, tuple[Callable[[Path], object], type[SlotzeroError], list[str]]] = {
    "weights cut in half": (cut(0.5), Corrupt, ["model.safetensors", "truncated", "again"]),
    "weights cut at the end": (cut(-1), Corrupt, ["model.safetensors", "truncated", "again"]),
    "weights cut in the header": (cut(100), Corrupt, ["model.safetensors", "truncated", "again"]),
    "weights empty": (cut(0), Corrupt, ["model.safetensors", "truncated", "again"]),
    "weights missing": (without("model.safetensors"), Corrupt, ["model.safetensors", "download"]),
    "config missing": (without("config.json"), ModelNotFoundError, ["config.json", "pass"]),
    "config broken": (text("config.json", '{"a"\n:'), Corrupt, ["config.json"]),
    "tokenizer missing": (
        without("tokenizer.json"),
        TokenizerMissingError,
        ["tokenizer.json is missing", "download"],
    ),
    "tokenizer broken": (text("tokenizer.json", '{"a"\n:'), Corrupt, ["tokenizer.json", "again"]),
    "architecture": (
        config(architectures=["MambaForCausalLM"]),
        Unsupported,
        ["MambaForCausalLM", "not supported: ", "slotzero models"],
    ),
    "no architecture": (
        config(architectures=None, model_type="mamba"),
        Unsupported,
        ["architecture 'mamba'", "supported"],
    ),
    "no window": (mistral(sliding_window=0), Unsupported, ["sliding_window=0"]),
    "window": (mistral(sliding_window=513), Unsupported, ["sliding_window=513", "1 to"]),
    "longrope": (rope(rope_type="longrope"), Unsupported, ["'longrope'", "short_factor"]),
    "longrope, old name": (rope(type="su"), Unsupported, ["'longrope'", "short_factor"]),
    "an unknown rope": (rope(type="longer"), Unsupported, ["'longer'", "implemented: default"]),
    "a rope of text": (config(rope_scaling="x"), Unsupported, ["rope_scaling='x'"]),
    "quantised by text": (config(quantization_config="fp8"), Unsupported, ["='fp8'", "mapping"]),
    "KV heads of text": (config(num_key_value_heads="2"), Unsupported, ["num_key_value_heads='2'"]),
    "an architecture of text": (
        config(architectures="LlamaForCausalLM"),
        Unsupported,
        ["architectures='LlamaForCausalLM': must be a list of names"],
    ),
    "another head than the embedding": (
        lambda folder: (
            config(tie_word_embeddings=True)(folder),
            tensors(lambda t: t.update({"lm_head.weight": t[EMBEDDING] + 1}))(folder),
        ),
        Unsupported,
        ["lm_head.weight differs from the embedding", "tie_word_embeddings", "config.json"],
    ),
    "two ropes": (
        config(
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            rope_scaling={"type": "yarn", "factor": 8.0},
        ),
        Unsupported,
        ["rope_parameters and rope_scaling contradict each other", "remove rope_scaling"],
    ),
    "rope field": (
        rope(rope_type="linear", factor=2.0, mystery=1),
        Unsupported,
        ["linear", "mystery"],
    ),
    "activation": (config(hidden_act="gelu"), Unsupported, ["hidden_act='gelu'"]),
    "quantised, but its tensors are not": (
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        CorruptCheckpointError,
        ["weight_scale_inv is missing"],
    ),
    "quantised by an unknown method": (
        config(quantization_config={"quant_method": "hqq"}),
        Unsupported,
        ["quant_method='hqq'", "gptq"],
    ),
    "quantised to another number of bits": (
        config(quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 128}),
        Unsupported,
        ["bits=3", "4 or 8"],
    ),
    "experts": (config(num_experts=8), Unsupported, ["num_experts=8"]),
    "local experts": (config(num_local_experts=8), Unsupported, ["num_local_experts=8"]),
    "layer types": (
        config(layer_types=["full_attention", "chunked_attention"]),
        Unsupported,
        ["layer_types", "chunked_attention"],
    ),
    "soft cap": (config(final_logit_softcapping=30.0), Unsupported, ["final_logit_softcapping"]),
    "a size missing": (config(hidden_size=None), Unsupported, ["hidden_size", "positive"]),
    "a size negative": (config(num_hidden_layers=-1), Unsupported, ["num_hidden_layers=-1"]),
    "a size of text": (config(vocab_size="259"), Unsupported, ["vocab_size='259'"]),
    "heads": (config(num_key_value_heads=3), Unsupported, ["num_key_value_heads=3"]),
    "a tensor missing": (tensors(lambda t: t.pop(UP)), Corrupt, [UP, "missing", "again"]),
    "a layer missing": (
        config(num_hidden_layers=3),
        Corrupt,
        ["model.layers.2.", "is missing (9 in total)"],
    ),
    "a tensor of another shape": (
        tensors(lambda t: t.update({UP: torch.zeros(176, 63)})),
        Corrupt,
        [UP, "[176, 63]", "[176, 64]"],
    ),
    "a tensor transposed": (
        tensors(lambda t: t.update({UP: t[UP].t().contiguous()})),
        Corrupt,
        [UP, "[64, 176]", "[176, 64]"],
    ),
    "a config of another size": (
        config(intermediate_size=160),
        Corrupt,
        ["mlp.gate_proj.weight", "[176, 64]", "[160, 64]"],
    ),
    "an unknown tensor": (
        tensors(lambda t: t.update({K_BIAS: torch.ones(32)})),
        Unsupported,
        [K_BIAS],
    ),
    "one layer too many": (
        config(num_hidden_layers=1),
        Unsupported,
        ["model.layers.1.", "(9 in total)"],
    ),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_or_foreign_folder(run: Run, folder: Path, what: str) -> None:
    damage, error, names = DAMAGES[what]
    damage(folder)
    refuse(error, names, lambda: make(str(folder)))
    refused_by_command(run, 3, names, str(folder), "--prompt", "x", "--no-show-progress")


def test_a_window_as_long_as_the_context(folder: Path) -> None:
    """The test above refuses the value, not the field."""
    mistral(sliding_window=512)(folder)
    assert make(str(folder)).generate("x", GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    "model", ["no-such-model", "tiny:nothing", "no/such/folder", "missing.gguf"]
)
def test_a_missing_model(run: Run, model: str) -> None:
    refuse(ModelNotFoundError, [model, "tiny:llama"], lambda: make(model))
    refused_by_command(run, 3, [model, "tiny:llama"], "--prompt", "x", "--model", model)


def write_gguf(path: Path, arch: str = "llama") -> bytes:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {
        "token_embd": (40, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_norm": (32,), "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_gguf_file_cut_anywhere(run: Run, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "whole.gguf")
    bare = make(str(tmp_path / "whole.gguf"), skip_tokenizer_init=True)
    assert bare.generate({"prompt_token_ids": [1]}, GREEDY, use_tqdm=False)[0].finished
    file = tmp_path / "cut.gguf"
    for kept in (0, 3, 4, 20, 100, 400, 900, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:kept])
        names = ["cut.gguf", "again"]
        refuse(Corrupt, names, lambda: make(str(file), skip_tokenizer_init=True))
    refused_by_command(run, 3, ["cut.gguf", "truncated", "again"], str(file), "--prompt", "x")


def test_other_gguf_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "other.gguf"
    write_gguf(file, arch="mamba")
    refuse(Unsupported, ["mamba"], lambda: make(str(file), skip_tokenizer_init=True))
    write_gguf(file)
    refuse(TokenizerMissingError, ["tokenizer"], lambda: make(str(file)))
    refused_by_command(run, 3, ["tokenizer"], str(file), "--prompt", "x")
    file.write_bytes(b"PK\x03\x04" + bytes(1000))
    refuse(Corrupt, ["other.gguf"], lambda: make(str(file)))


def test_too_many_end_tokens_are_refused_before_anything_runs(folder: Path) -> None:
    """A row of the table holds 32: sixteen for the request, and sixteen for the model."""
    ends = list(range(20))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    def ask() -> None:
        llm = make(str(folder), max_num_seqs=2)
        good = llm.engine.add("good", [60], GREEDY)
        try:
            params = SamplingParams(stop_token_ids=list(range(30, 46)), max_tokens=4)
            llm.generate({"prompt_token_ids": [1]}, params, use_tqdm=False)
        finally:
            drain(llm)
            assert good.finish_reason == "length"

    refuse(RequestError, ["36 stop ids", "32"], ask)


# In a process


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["no-such-model", "--prompt", "x"], 3),
        (["tiny:llama", "--prompt", "x", "--temperature", "nan"], 2),
        (["tiny:llama", "--prompt", "x" * 600], 2),
        (["tiny:llama", "--prompt", "x", "--kv-cache-memory", "1K"], 4),
    ],
)
def test_a_process_ends_with_its_code_and_no_traceback(words: list[str], code: int) -> None:
    command = [sys.executable, "-m", "slotzero", "generate", *words, "--backend", "eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("slotzero: error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("family", tiny_configs())
def test_a_scaled_rope_is_used_or_refused(family: str) -> None:
    """No family ignores it."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    plain = dict(tiny_configs()[family])
    try:
        scaled = parse_config(plain | {"rope_scaling": scaling})
    except UnsupportedModelError as error:
        assert "rope" in str(error)
        return
    assert any(group.rope.kind == "yarn" for group in scaled.groups)


def test_two_ropes_that_agree() -> None:
    plain = {k: v for k, v in tiny_configs()["llama"].items() if not k.startswith("rope")}
    linear = {"rope_type": "linear", "factor": 8.0}
    for newer in (linear, {"full_attention": linear}):
        refuse_two_ropes(plain | {"rope_parameters": newer, "rope_scaling": linear})
        with pytest.raises(UnsupportedModelError, match="contradict each other"):
            other = linear | {"factor": 4.0}
            refuse_two_ropes(plain | {"rope_parameters": newer, "rope_scaling": other})
