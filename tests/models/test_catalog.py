"""Tests of the list of models: the page in docs, the command, and forecasts."""

import json
from pathlib import Path

import pytest
from bridged import config_folder
from docs_page import DOCS, page_maker

from slotzero import LLM
from slotzero.cli import main as cli
from slotzero.config import EngineConfig
from slotzero.executor.forecast import forecast
from slotzero.models.bridge.tried import TRIED
from slotzero.models.catalog import bridged_only, family_rows
from slotzero.models.families.family import families

pytestmark = pytest.mark.slow


def test_the_page_is_up_to_date() -> None:
    """If it fails, run `python docs/models.py`."""
    made = page_maker("models")
    assert made.FILE.read_text(encoding="utf-8") == made.page()
    assert (DOCS / "decisions" / made.DECISION).is_file()


def test_every_family_has_a_row_and_no_architecture_two() -> None:
    rows = [row.architecture for row in family_rows()]
    assert set(rows) == set(families())
    assert set(bridged_only()) == set(TRIED) - set(rows)
    by_name = {row.architecture: row.layers for row in family_rows()}
    assert by_name["DeepseekV3ForCausalLM"] == "MLA, experts, MTP layers"


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["slotzero"] == [row._asdict() for row in family_rows()]
    assert shown["transformers"] == bridged_only()
    assert cli.main(["models"]) == 0
    shown_text = capsys.readouterr().out
    assert "LlamaForCausalLM" in shown_text and bridged_only()[0] in shown_text


def test_the_forecast_is_what_the_engine_then_does(tmp_path: Path) -> None:
    bridged = config_folder(tmp_path, "GPTNeoX")
    for model, how in (("tiny:llama", "slotzero"), (bridged, "transformers")):
        settings = {"model_impl": how, "load_format": "dummy", "kv_cache_memory": 4 << 20}
        found = forecast(EngineConfig(model=model, **settings))
        llm = LLM(model, backend="eager", skip_tokenizer_init=True, show_progress=False, **settings)
        worker = llm.engine.worker
        assert found.implementation == how and found.fits
        assert found.weight_bytes == worker.weight_bytes
        kv = worker.registry["kv_full"]  # [layers, pages, page_size, ...]
        assert found.kv_bytes_per_token == kv[:, 0, 0].nbytes
        assert found.context == worker.model.max_position


def test_a_model_that_does_not_run_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = config_folder(tmp_path, "Lfm2", layer_types=["conv", "full_attention"])
    assert cli.main(["models", folder, "--json", "--model-impl", "transformers"]) == 3
    shown = json.loads(capsys.readouterr().out)
    assert not shown["runs"]
    assert "Lfm2ForCausalLM: a token's result depends on the tokens beside it" in shown["why_not"]
    assert cli.main(["models", "tiny:llama", "--kv-cache-memory", "1"]) == 1
    assert "do not fit" in capsys.readouterr().out


def test_several_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "tiny:llama", "--tensor-parallel-size", "2"]) == 2
    assert "models supports one rank only" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--speculative", "ngram"], ["--max-num-seqs", "4"]])
def test_settings_that_are_not_forecast_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "tiny:llama", *words]) == 2
    assert f"{words[0]}: models forecasts" in capsys.readouterr().err


def test_a_shorter_context_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "tiny:llama", "--max-model-len", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 64
