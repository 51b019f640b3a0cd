"""Tests of weight updates: a running engine with new weights equals a fresh engine with them."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import answer_all, answer_alone, check_nothing_leaked, drain, greedy, make, prompt_of
from safetensors.torch import save_file
from torch import Tensor

from slotzero import LLM, SamplingParams
from slotzero.checkpoint import source
from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.checkpoint.tiny import tiny_checkpoint, tiny_names
from slotzero.engine.engine import Engine
from slotzero.errors import ConfigError, ModelNotFoundError, WeightUpdateError
from slotzero.quantization.method import CACHE_SCALES
from slotzero.text.tokenizer import Tokenizer

LLAMA = "tiny:llama"
ASKS = [(prompt_of(length, length), greedy(8, logprobs=3)) for length in (3, 17, 40)]


def other(model: str, seed: int = 1) -> DummyCheckpoint:
    """Return the checkpoint of a tiny model with other random weights."""
    first = tiny_checkpoint(model)
    return DummyCheckpoint(
        first.config,
        model,
        eos_token_ids=first.eos_token_ids,
        make_tokenizer=Tokenizer.bytes_tokenizer,
        seed=seed,
    )


def tensors_of(model: str, seed: int = 1) -> dict[str, Tensor]:
    checkpoint = other(model, seed)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Return a function that makes an engine with the weights of `other`."""

    def start(model: str, **settings: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr(source, "tiny_checkpoint", lambda name: other(name))
            return make(model=model, **settings)

    return start


def constants(engine: Engine) -> dict[str, Tensor]:
    kept = ("weight.", "kv_scales")
    entries = engine.worker.registry.entries()
    return {e.name: e.tensor for e in entries if e.name.startswith(kept)}


def answers(engine: Engine) -> list[Any]:
    handles = [engine.add(f"{i}", *asked) for i, asked in enumerate(ASKS)]
    while engine.has_work:
        engine.step()
    engine.check()
    return [(handle.token_ids, handle.logprobs) for handle in handles]


def assert_equal_weights(engine: Engine, wanted: Engine) -> None:
    found, right = constants(engine), constants(wanted)
    assert found.keys() == right.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.parametrize("model", tiny_names())
def test_every_family_takes_new_weights(model: str, fresh: Callable[..., Engine]) -> None:
    engine, wanted = (start(model=model, lazy_recording=True) for start in (make, fresh))
    before = {name: tensor.data_ptr() for name, tensor in constants(engine).items()}
    assert engine.update_weights(tensors_of(model)) == "1"
    assert {name: tensor.data_ptr() for name, tensor in constants(engine).items()} == before
    assert_equal_weights(engine, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "cpu"},
        {"backend": "cpu", "model": "tiny:qwen3-next"},
        {"backend": "cpu", "model": "tiny:deepseek-v3", "speculative": "mtp"},
        {"quantization": "int4"},
        {"quantization": "fp8", "model": "tiny:qwen3-moe"},
        {"kv_cache_dtype": "fp8"},
        {"load_format": "dummy"},
        {"speculative": "ngram", "deterministic": True},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_answers_are_those_of_a_fresh_engine(
    settings: dict[str, Any], fresh: Callable[..., Engine]
) -> None:
    """Recordings that were made with the old weights compute with the new ones."""
    settings = {"model": LLAMA} | settings
    engine, wanted = make(**settings), fresh(**settings | {"load_format": "auto"})
    old = answers(engine)
    engine.update_weights(tensors_of(settings["model"]))
    right = answers(wanted)
    assert answers(engine) == right != old
    assert_equal_weights(engine, wanted)


def test_scales_of_the_kv_cache_that_are_not_given_stay() -> None:
    engine = make(model=LLAMA, kv_cache_dtype="fp8")
    before = {n: t.clone() for n, t in constants(engine).items() if n.startswith("kv_scales")}
    given = tensors_of(LLAMA)
    engine.update_weights({n: t for n, t in given.items() if not n.endswith(CACHE_SCALES)})
    now = constants(engine)
    assert before
    assert all(torch.equal(tensor, now[name]) for name, tensor in before.items())


def test_drafters_of_the_model_may_be_left_out(fresh: Callable[..., Engine]) -> None:
    """Trainers hold no MTP layers: the old ones go on drafting."""
    settings = {"model": "tiny:deepseek-v3", "speculative": "mtp"}
    engine = make(**settings)
    num_layers = tiny_checkpoint(settings["model"]).config["num_hidden_layers"]
    mtp, given = f"model.layers.{num_layers}.", tensors_of(settings["model"])
    engine.update_weights({n: t for n, t in given.items() if not n.startswith(mtp)})
    assert answers(engine) == answers(fresh(**settings))


def _damaged() -> list[Any]:
    name = "model.layers.1.mlp.down_proj.weight"

    def without(given: dict[str, Tensor]) -> None:
        del given[name]

    def misshapen(given: dict[str, Tensor]) -> None:
        given[name] = given[name][:, 1:]

    def unknown(given: dict[str, Tensor]) -> None:
        given["model.layers.1.mlp.adapter"] = given[name]

    def of_bytes(given: dict[str, Tensor]) -> None:
        given[name] = given[name].to(torch.float8_e4m3fn)

    def with_bad_scale(given: dict[str, Tensor]) -> None:
        given["model.layers.1.self_attn.k_scale"] = torch.tensor(-1.0)

    reasons = {
        without: f"{name} is missing",
        misshapen: f"{name} has shape",
        unknown: "adapter is unknown",
        of_bytes: f"{name} is torch.float8_e4m3fn",
        with_bad_scale: "must be positive",
    }
    return [pytest.param(damage, why, id=damage.__name__) for damage, why in reasons.items()]


@pytest.mark.parametrize(("damage", "reason"), _damaged())
def test_a_damaged_update_changes_nothing(damage: Callable[..., None], reason: str) -> None:
    engine = make(model=LLAMA)
    handle = engine.add("running", prompt_of(20), greedy(40))
    engine.step()
    before = {name: tensor.clone() for name, tensor in constants(engine).items()}
    given = tensors_of(LLAMA)
    damage(given)
    with pytest.raises(WeightUpdateError, match=reason):
        engine.update_weights(given, running="abort")
    assert all(torch.equal(tensor, before[name]) for name, tensor in constants(engine).items())
    assert engine.weight_version == "0"
    drain(engine)
    assert handle.finish_reason == "length"
    assert handle.weight_version == "0"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "a is given twice"),
        ([("a", [1.0])], "'a' is given with a list"),
        ([(1, torch.zeros(1))], "1 is given with a Tensor"),
    ],
)
def test_what_is_not_a_tensor_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(WeightUpdateError, match=reason):
        make(model=LLAMA, lazy_recording=True).update_weights(given)


def test_a_partial_update_needs_whole_weights(fresh: Callable[..., Engine]) -> None:
    engine, given = make(model=LLAMA, lazy_recording=True), tensors_of(LLAMA)
    attention = "model.layers.0.self_attn."
    with pytest.raises(WeightUpdateError, match=r"k_proj.weight is missing: it is stored with"):
        engine.update_weights({(n := f"{attention}q_proj.weight"): given[n]}, partial=True)
    for prefix in ("model.layers.", "model.embed_tokens", "model.norm", "lm_head"):
        part = {name: tensor for name, tensor in given.items() if name.startswith(prefix)}
        engine.update_weights(iter(part.items()), partial=True)
    assert engine.weight_version == "4"
    assert_equal_weights(engine, fresh(LLAMA, lazy_recording=True))


def test_running_requests_are_held(fresh: Callable[..., Engine], overlaps: bool) -> None:
    """They keep their tokens, and go on as a fresh engine does after them."""
    engine, prompt = make(model=LLAMA), prompt_of(20)
    handles = [engine.add(f"{i}", [*prompt, i], greedy(30)) for i in range(3)]
    for _ in range(6):
        engine.step()
    engine.update_weights(tensors_of(LLAMA), version="step-7")
    kept = [list(handle.token_ids) for handle in handles]
    assert all(kept)
    drain(engine)
    right = fresh(LLAMA)
    for i, handle in enumerate(handles):
        asked = [*prompt, i, *kept[i]], greedy(30 - len(kept[i]))
        (answer,) = answer_all(right, [asked])
        assert handle.token_ids == kept[i] + answer.token_ids
        assert handle.weight_version == "step-7"
    check_nothing_leaked(engine)


def test_running_requests_are_finished(overlaps: bool) -> None:
    """They end with the old weights; those that have not begun use the new ones."""
    engine = make(model=LLAMA, max_num_seqs=2)
    wanted = [answer_alone(engine, prompt_of(9, i), greedy(12)) for i in range(2)]
    handles = [engine.add(f"r{i}", prompt_of(9, i), greedy(12)) for i in range(3)]
    engine.step()
    engine.step()
    engine.update_weights(tensors_of(LLAMA), running="finish")
    assert [h.token_ids for h in handles[:2]] == wanted
    assert [h.weight_version for h in handles[:2]] == ["0", "0"]
    assert not handles[2].token_ids
    drain(engine)
    assert handles[2].finished
    assert handles[2].weight_version == "1"
    check_nothing_leaked(engine)


def test_running_requests_are_aborted(overlaps: bool) -> None:
    engine = make(model=LLAMA, max_num_seqs=2)
    handles = [engine.add(f"r{i}", prompt_of(9, i), greedy(12)) for i in range(3)]
    for _ in range(4):
        engine.step()
    engine.update_weights(tensors_of(LLAMA), running="abort")
    assert [handle.finish_reason for handle in handles] == ["abort", "abort", None]
    drain(engine)
    assert handles[2].finish_reason == "length"
    check_nothing_leaked(engine)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigError, match="running=wait: use one of hold, finish, abort"):
        make(model=LLAMA, lazy_recording=True).update_weights([], running="wait")


def test_cached_prefixes_are_dropped(fresh: Callable[..., Engine]) -> None:
    engine, ask = make(model=LLAMA), [(prompt_of(64), greedy(4))]
    answer_all(engine, ask)
    assert answer_all(engine, ask)[0].request.num_found
    engine.update_weights(tensors_of(LLAMA))
    (again,) = answer_all(engine, ask)
    assert again.request.num_found == 0
    assert again.token_ids == answer_all(fresh(LLAMA), ask)[0].token_ids


def test_a_hundred_updates_under_load() -> None:
    engine = make(model=LLAMA, max_num_seqs=4)
    weights = [tensors_of(LLAMA, seed) for seed in (1, 2)]
    handles = []
    memory = []
    for i in range(100):
        handles += [engine.add(f"{i}.{j}", prompt_of(5 + j, i), greedy(6)) for j in range(2)]
        for _ in range(3):
            engine.step()
        engine.update_weights(weights[i % 2])
        if i in (49, 99):
            gc.collect()
            memory.append(_resident())
    drain(engine)
    assert [len(handle.token_ids) for handle in handles] == [6] * 200
    assert {handle.error for handle in handles} == {None}
    assert engine.weight_version == "100"
    assert memory[1] - memory[0] < 8 << 20
    check_nothing_leaked(engine)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "fp8"}, {"speculative": "ngram"}])
def test_live_checks_go_on(settings: dict[str, Any]) -> None:
    """Answers are recomputed with the weights that gave them, or not at all."""
    llm = LLM(LLAMA, sanitize="full", sanitize_action="raise", max_model_len=96, **settings)
    engine = llm.engine
    for i in range(3):
        handles = [engine.add(f"{i}.{j}", prompt_of(9, j), greedy(10)) for j in range(3)]
        for _ in range(4):
            engine.step()
        engine.update_weights(tensors_of(LLAMA, seed=i + 1))
        handles += [engine.add(f"{i}.new", prompt_of(9, 4), greedy(10))]
        drain(engine)
    assert engine.sanitizer is not None
    assert engine.sanitizer.violations == 0
    assert engine.sanitizer.answers.num_recomputed == 3  # those that saw one model only


def write_folder(folder: Path, seed: int, **changed: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_checkpoint(LLAMA).config | changed))
    save_file(tensors_of(LLAMA, seed), folder / "model.safetensors")
    return folder


def test_weights_come_from_a_folder(tmp_path: Path) -> None:
    """It holds other weights of the same model, and not another model."""
    first, second = (write_folder(tmp_path / f"{seed}", seed) for seed in (1, 2))
    foreign = write_folder(tmp_path / "foreign", 1, rms_norm_eps=0.5)
    engine = make(model=str(first), lazy_recording=True)
    with pytest.raises(WeightUpdateError, match="its config describes another model"):
        engine.update_weights(foreign)
    with pytest.raises(ModelNotFoundError, match="no model"):
        engine.update_weights(tmp_path / "nowhere")
    assert engine.update_weights(str(second), version="step 9") == "step 9"
    assert_equal_weights(engine, make(model=str(second), lazy_recording=True))


def test_answers_name_the_version_of_their_weights() -> None:
    llm = LLM(LLAMA, max_model_len=64, backend="eager")
    params = SamplingParams(temperature=0, max_tokens=4)
    versions = [llm.generate("a", params, use_tqdm=False)[0].weight_version]
    assert llm.update_weights(tensors_of(LLAMA).items(), version="b") == "b"
    versions += [llm.generate("a", params, use_tqdm=False)[0].weight_version]
    assert versions == ["0", "b"]


def test_packed_gguf_weights_are_refused(tmp_path: Path) -> None:
    engine = LLM("smollm2", max_model_len=64, lazy_recording=True).engine
    with pytest.raises(WeightUpdateError, match=r"packed as in their \.gguf file"):
        engine.update_weights({})


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"model": LLAMA, "kv_cache_dtype": "fp8"},
        {"model": "tiny:qwen3-moe", "enable_expert_parallel": True, "enable_dp_attention": True},
    ],
    ids=["tensor", "experts"],
)
def test_all_ranks_are_updated(settings: dict[str, Any], fresh: Callable[..., Engine]) -> None:
    engine = make(tensor_parallel_size=2, max_model_len=64, **settings)
    try:
        old = tokens_of(engine)
        with pytest.raises(WeightUpdateError, match="is missing"):
            engine.update_weights({})
        engine.update_weights(tensors_of(settings["model"]))
        new = tokens_of(engine)
    finally:
        engine.rank_group.close()
    alone = {name: settings[name] for name in ("model", "kv_cache_dtype") if name in settings}
    assert new == tokens_of(fresh(**alone)) != old


def tokens_of(engine: Engine) -> list[list[int]]:
    return [token_ids for token_ids, _ in answers(engine)]
