"""`slotzero models`: the supported models, or what an engine would do with one of them.

A model's config alone decides; no weights are read or downloaded.
"""

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.config import EngineConfig, refuse_ranks
from slotzero.errors import ConfigError, ModelError, SlotzeroError

if TYPE_CHECKING:
    from slotzero.executor.forecast import Forecast

_NOT_FORECAST = ("speculative", "max_num_seqs")
DESCRIPTION = """\
Without MODEL, list the supported architectures: families with layers of Slotzero, and others that
are known to run with the layers of transformers (--model-impl). With MODEL, say from its config
alone whether it runs here, on what, and with how much memory, or why not. The exit code is 0 if it
runs.

  slotzero models
  slotzero models path/to/model
  slotzero models org/name --json"""


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("models", "[MODEL] [flags]", DESCRIPTION)
    flags.add_model(made)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    flags.add_engine_flags(made)
    return made


def run(args: argparse.Namespace) -> int:
    if args.model is None and args.model_flag is None:
        _list(args.json)
        return 0
    from slotzero.executor.forecast import forecast

    settings = flags.engine_settings(args)
    refuse_ranks(settings, "models")
    for name in _NOT_FORECAST:
        if name in settings:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: models forecasts a model and one request; drop it")
    config = EngineConfig(model=flags.chosen_model(args), skip_tokenizer_init=True, **settings)
    try:
        found = forecast(config)
    except SlotzeroError as error:
        if not isinstance(error, ModelError):
            raise
        _print(args.json, {"model": config.model, "runs": False, "why_not": str(error)})
        return error.exit_code
    shown = _answer(found)
    _print(args.json, shown)
    return 0 if found.fits else 1


def _answer(found: "Forecast") -> dict[str, Any]:
    answer = {"model": found.model, "runs": found.fits}
    if not found.fits:
        answer["why_not"] = "its weights and the KV of one token do not fit into the free memory"
    return answer | {**asdict(found), "num_kv_tokens": max(0, found.num_kv_tokens)}


def _print(as_json: bool, answer: dict[str, Any]) -> None:
    if as_json:
        print(json.dumps(answer, ensure_ascii=False, indent=2))
        return
    from slotzero.pools.budget import show

    for name, value in answer.items():
        if name.startswith("num_"):
            shown = f"{value:,}"
        elif "bytes" in name:
            shown = show(value)
        else:
            shown = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
        print(f"{name.replace('_bytes', '').replace('_', ' '):<20} {shown}")


def _list(as_json: bool) -> None:
    from slotzero.models.catalog import bridged_only, family_rows

    rows, bridged = family_rows(), bridged_only()
    if as_json:
        families = [row._asdict() for row in rows]
        print(json.dumps({"slotzero": families, "transformers": bridged}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="families with layers of Slotzero", title_justify="left")
    for heading in ("architecture", "model_type", "layers"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(row.architecture, row.model_type, row.layers)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(
        "with the layers of transformers (pip install 'slotzero[transformers]'), known to run: "
        + ", ".join(bridged)
    )
    console.print("others: slotzero models MODEL")
