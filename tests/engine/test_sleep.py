"""Tests of giving memory back: addresses and recordings stay valid."""

import ctypes
import mmap
import os

import pytest
import torch
from engines import greedy, make, prompt_of
from threaded_engine import checkpoint_of, tensors_of

from slotzero.certify.live import LiveSanitizer
from slotzero.certify.start import start_engine
from slotzero.checkpoint import source
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import InvalidInputError
from slotzero.system.pages import give_back

PAGE = os.sysconf("SC_PAGE_SIZE")


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def answers(engine: Engine) -> list[list[int]]:
    handles = [engine.add(f"{i}", prompt_of(20 + i, i), greedy(8)) for i in range(3)]
    finish(engine)
    return [handle.token_ids for handle in handles]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "tiny:llama", "backend": "cpu"},
        {"model": "tiny:qwen3-next"},
        {"model": "tiny:deepseek-v3", "speculative": "mtp"},
        {"model": "tiny:qwen3-moe", "quantization": "int4"},
        {"model": "tiny:llama", "kv_cache_dtype": "fp8"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_an_engine_goes_on(
    settings: dict[str, str], weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = settings["model"]
    engine, wanted = make(**settings), None
    before = {e.name: e.tensor.data_ptr() for e in engine.worker.registry.entries()}
    old = answers(engine)
    handle = engine.add("held", prompt_of(30), greedy(20))
    for _ in range(4):
        engine.step()
    assert engine.give_back_memory(weights=weights) > 0
    if weights:
        engine.update_weights(tensors_of(1, model))
        monkeypatch.setattr(source, "tiny_checkpoint", lambda name: checkpoint_of(1, model))
        wanted = answers(make(**settings))
    finish(engine)
    assert len(handle.token_ids) == 20
    assert answers(engine) == (old if wanted is None else wanted)
    assert {e.name: e.tensor.data_ptr() for e in engine.worker.registry.entries()} == before
    engine.check()


def test_an_answer_around_a_sleep_is_recomputed() -> None:
    config = EngineConfig(
        model="tiny:llama", backend="eager", max_model_len=64, sanitize="full",
        sanitize_action="raise", show_progress=False,
    )  # fmt: skip
    engine = start_engine(config)
    engine.add("held", prompt_of(20), greedy(8))
    for _ in range(4):
        engine.step()
    engine.give_back_memory(weights=False)
    finish(engine)
    assert isinstance(engine.sanitizer, LiveSanitizer)
    assert engine.sanitizer.answers.num_recomputed == 1


def test_weights_are_gone() -> None:
    engine = make(model="tiny:llama", lazy_recording=True)
    weight = engine.worker.registry["weight.mlp.gate_up"]
    before = weight.clone()
    engine.give_back_memory(weights=False)
    assert torch.equal(weight, before)
    engine.give_back_memory(weights=True)
    assert (weight == 0).sum() * weight.element_size() >= weight.nbytes - 2 * PAGE


def test_only_whole_pages_are_given_back() -> None:
    memory = mmap.mmap(-1, 4 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * 4 * PAGE)
    view = (ctypes.c_char * (4 * PAGE)).from_buffer(memory)
    address = ctypes.addressof(view)
    assert give_back(address + 1, PAGE) == 0
    assert give_back(address + 1, 3 * PAGE) == 2 * PAGE
    assert give_back(address + 1, 3 * PAGE) == 0, "they are not in memory any more"
    assert memory[:PAGE] == memory[3 * PAGE :] == b"x" * PAGE
    assert memory[PAGE : 3 * PAGE] == bytes(2 * PAGE)
    del view


def test_memory_of_gpus_and_of_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(model="tiny:llama", lazy_recording=True)
    monkeypatch.setattr(engine.worker.registry, "device", torch.device("cuda"))
    with pytest.raises(InvalidInputError, match="on a CPU with one rank only"):
        engine.worker.give_back_memory(weights=False)
