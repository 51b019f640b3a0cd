"""Tests of the performance model behind benchmarks/scaling.py against the code it describes."""

import importlib
import json
import math
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from slotzero.checkpoint.source import open_checkpoint
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.config import EngineConfig
from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.executor.build import build_worker
from slotzero.executor.rank_group import RankGroup
from slotzero.executor.step_message import StepMessage
from slotzero.graph import GraphKey
from slotzero.models.families.family import parse_config
from slotzero.models.tensors import expected_tensors

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
scaling = importlib.import_module("scaling")
step_model = importlib.import_module("step_model")

FLOAT32 = step_model.Numbers(weight=4, kv=4, state=4, sent=(4, 4))


class Counted(Ranks):
    """Fake second rank of several, alone in its process: it counts collectives and returns its
    input."""

    heard: ClassVar[list[tuple[str, int]]] = []

    def _hear(self, kind: str, x: Tensor) -> None:
        self.heard.append((kind, x.numel() * x.itemsize))

    def sum(self, x: Tensor) -> Tensor:
        self._hear("all_reduce", x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        self._hear("all_gather", x)
        return x.repeat(self.size, *(1 for _ in x.shape[1:]))

    def scatter_sum(self, x: Tensor) -> Tensor:
        self._hear("reduce_scatter", x)
        return x[: len(x) // self.size]

    def exchange(self, x: Tensor) -> Tensor:
        self._hear("all_to_all", x)
        return x

    def least(self, number: int) -> int:
        return number


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-0.6B", "gpt-oss-120b", "DeepSeek-V2"])
def test_weights_are_those_of_a_checkpoint(model):
    stored = expected_tensors(step_model.DATA["models"][model]).values()
    counted = step_model.weight_bytes(step_model.MODELS[model], ALONE)
    assert counted == 2 * sum(map(math.prod, stored))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("model", "spread"),
    [("llama", False), ("olmo3", False), ("deepseek-v3", False), ("deepseek-v3", True)],
)
def test_collectives_are_those_of_a_step(tmp_path, model, spread, apart):
    ranks, rows = Counted(1, 2, "", spread, apart), 4
    even = {"num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**tiny_configs()[model], **even}))
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", backend="eager", max_num_seqs=rows,
        max_model_len=64, show_progress=False, kv_cache_memory=1 << 22,
    )  # fmt: skip
    checkpoint = open_checkpoint(config.model, config.load_format)
    worker = build_worker(config, checkpoint, lambda *_: None, RankGroup(ranks))
    own = rows // ranks.num_dp_ranks
    slots, key = list(range(1, own + 1)), GraphKey("decode", own, own)
    ranks.heard.clear()
    worker.run_message(StepMessage(None, slots, [1] * own, own, own, [key], 1, False))
    load = step_model.Load(rows, 1)
    counted = list(step_model.calls(parse_config(checkpoint.config), ranks, load, FLOAT32))
    assert sorted(ranks.heard) == sorted(counted)


def test_more_ranks_read_less_and_communicate_more():
    model, machine = step_model.MODELS["Llama-3.1-70B"], step_model.machines()["H200"]
    load = step_model.Load(64, 2048)
    took = [step_model.spent(model, machine, Ranks(0, size), load) for size in (1, 2, 8)]
    assert [part.products for part in took] == sorted((p.products for p in took), reverse=True)
    assert took[0].exchange == 0 < took[1].exchange < took[2].exchange
    assert torch.tensor([p.total for p in took]).isfinite().all()


def test_the_model_stays_near_what_was_measured():
    lines = scaling.check_ours(step_model.machines()["H200"])
    off = [abs(math.log(line["predicted"] / line["measured"])) for line in lines]
    assert sum(off) / len(off) < 0.12
    assert max(off) < 0.3
