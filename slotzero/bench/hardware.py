"""This machine's hardware and software, and its memory bandwidth.

This module does not know models. Unknown facts are None, never guessed.
"""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from slotzero.bench.clock import wait

# Vector extensions that determine the speed of the CPU kernels.
CPU_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "asimddp",
    "bf16",
    "sve",
    "sve2",
)
_GPU_READ_BYTES = 1 << 30
_GPU_READS = 20  # in a row: a single one is shorter than its launch and the wait for it
_CPU_READ_BYTES = 512 << 20  # larger than any cache
_ROUNDS = 5


def cpu_name() -> str:
    name = _first(_cpuinfo(), "model name") or _first(_output_of("lscpu"), "Model name")
    return name or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    text = _cpuinfo()
    there = set((_first(text, "flags") or _first(text, "Features") or "").split())
    return [feature for feature in CPU_FEATURES if feature in there]


def gpus() -> list[str]:
    shown = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        shown.append(
            f"{card.name}, {card.total_memory / 2**30:.0f} GiB, sm{card.major}{card.minor}"
        )
    return shown


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of reading one large tensor, the upper limit of decoding."""
    is_gpu = device.type == "cuda"
    num_bytes = _GPU_READ_BYTES if is_gpu else _CPU_READ_BYTES
    num_reads = _GPU_READS if is_gpu else 1
    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best = min(_seconds(partial(_read, data, num_reads), device) for _ in range(_ROUNDS))
    del data
    if is_gpu:
        torch.cuda.empty_cache()
    return num_reads * num_bytes / best


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    packages = ("slotzero", "torch", "triton")
    return {"python": platform.python_version()} | {p: package_version(p) for p in packages}


def compiler_version(compiler: str) -> str:
    return next(iter(_output_of(compiler, "--version").splitlines()), compiler)


def _read(data: torch.Tensor, times: int) -> None:
    for _ in range(times):
        data.sum()


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    wait(device)
    start = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - start


def _cpuinfo() -> str:
    if not sys.platform.startswith("linux"):
        return ""
    return Path("/proc/cpuinfo").read_text(errors="replace")


def _first(text: str, field: str) -> str | None:
    """Return the value of the first line `field : value`."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
