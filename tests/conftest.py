"""Shared pieces of the tests: tiny models with transformers as the oracle, traced runs."""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from oracle import FAMILIES, Oracle, build

from slotzero import LLM, SamplingParams
from slotzero.step import Step
from slotzero.worker import Results


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Oracles by family name, each built once a session."""
    built: dict[str, Oracle] = {}

    def get(family: str) -> Oracle:
        if family not in built:
            folder: Path = tmp_path_factory.mktemp(family)
            built[family] = build(FAMILIES[family], folder)
        return built[family]

    return get


_sees_gpu = torch.cuda.is_available


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests without the gpu marker see a machine without a GPU, whatever this one has."""
    is_gpu_test = item.get_closest_marker("gpu") is not None
    torch.cuda.is_available = _sees_gpu if is_gpu_test else lambda: False


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A process started in the background ignores Ctrl-C; the tests are about one that does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


def prompts_of(lengths: list[int], vocab: int, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(vocab) for _ in range(n)]} for n in lengths]


GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


class Traced:
    """An LLM whose logits are kept: `logits[request id]` is one row per sampled token."""

    def __init__(self, model: str, **settings: object) -> None:
        settings = {"skip_tokenizer_init": True, "show_progress": False, **settings}
        self.llm = LLM(model, lazy_recording=True, **settings)
        self.engine = self.llm.engine
        self.logits: dict[str, list[torch.Tensor]] = {}
        worker = self.engine.worker
        run = worker.run

        def traced(step: Step) -> Results:
            results = run(step)
            logits = worker.registry["logits"][: step.num_rows].cpu()
            for row, values in zip(step.rows, logits, strict=True):
                if row.samples:
                    self.logits.setdefault(row.request.id, []).append(values.clone())
            return results

        worker.run = traced  # type: ignore[method-assign]

    def generate(self, prompts: list, params: SamplingParams = GREEDY) -> list[list[int]]:
        """-> token ids by prompt; `self.logits` then holds this batch's rows, by request id."""
        self.logits.clear()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        self.request_ids = [output.request_id for output in outputs]
        self.engine.check()
        return [output.outputs[0].token_ids for output in outputs]
