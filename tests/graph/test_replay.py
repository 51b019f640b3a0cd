"""Tests of replay and rehearsal against eager, over the same padded buffers, on the CPU backend."""

import pytest
import torch
from shadow import Shadow
from torch.utils import _pytree
from traced import GREEDY, Traced, prompts_of

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.graph.backend import OncePieces, PlainPieces
from slotzero.kernels.contract import Kernels

pytestmark = pytest.mark.slow


def test_replay_equals_eager_on_the_same_padded_buffers(oracles):
    oracle = oracles("qwen3")
    traced = Traced(oracle.path, backend="cpu", max_num_seqs=5)
    shadow = Shadow(traced.engine)
    prompts = prompts_of([5, 30, 17], oracle.vocab_size)  # 3 rows in size 4
    tokens = traced.generate(prompts)
    assert shadow.num_compared >= 63
    assert {name: d for name, d in shadow.differences.items() if d} == {}
    assert {"tokens", "length", "page_table", "sampled"} <= shadow.differences.keys()
    for prompt, got in zip(prompts, tokens, strict=True):
        assert got == oracle.generate(prompt["prompt_token_ids"], guess=got)[0]


def test_lazy_recording_records_what_is_used_and_eager_start_records_all(oracles):
    oracle = oracles("llama")
    traced = Traced(oracle.path, backend="cpu", max_num_seqs=9)
    traced.generate(prompts_of([4], oracle.vocab_size), GREEDY)
    assert [key.rows for key in traced.engine.worker.decode.records] == [1]


DRAFTED = {"speculative": "draft", "speculative_model": "tiny:smollm2"}


@pytest.mark.parametrize(
    ("kind", "settings"), [*((kind, {}) for kind in tiny_configs()), ("smollm2", DRAFTED)]
)
def test_a_rehearsal_calls_the_kernels_that_a_step_calls(kind, settings, monkeypatch):
    """The shapes are the same, but equal layers call them once."""
    worker = Traced(f"tiny:{kind}", backend="eager", max_num_seqs=4, **settings).engine.worker
    asked = []

    def note(name, call):
        def noted(*args, **kwargs):
            leaves = _pytree.tree_leaves((args, kwargs))
            asked.append((name, *(t.shape if isinstance(t, torch.Tensor) else t for t in leaves)))
            return call(*args, **kwargs)

        return noted

    for name in Kernels.__abstractmethods__:
        if callable(call := getattr(worker.kernels, name)):
            monkeypatch.setattr(worker.kernels, name, note(name, call))
    with torch.inference_mode():
        for runner in worker.runners:
            *_, key = runner.all_keys()
            runner.rehearse(key)
            rehearsed = asked[:]
            asked.clear()
            runner.eager(key)
            assert set(rehearsed) == set(asked)
            assert len(rehearsed) <= len(asked)
            if kind == "smollm2":  # it has three equal layers
                assert len(rehearsed) < len(asked)
            asked.clear()


def test_equal_pieces_run_once():
    ran = []

    def piece(x, y):
        ran.append(None if y is None else tuple(y.shape))
        return x + 1, y

    once, plain, x = OncePieces(), PlainPieces(), torch.zeros(2)
    first = once(piece, x, x)
    assert once(piece, x + 5, x)[0] is first[0] and len(ran) == 1
    assert once(torch.add, x, x + 2).tolist() == [2, 2]
    assert once(torch.sub, x, x + 2).tolist() == [-2, -2]
    once(piece, x, None)
    once(piece, x, torch.zeros(3))
    once(piece, x.int(), x)
    assert ran == [(2,), None, (3,), (2,)]
    assert plain(piece, x + 5, x)[0].tolist() == [6, 6]
