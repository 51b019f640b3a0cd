"""Builds the C++ kernels at first use and loads them as `torch.ops.slotzero.*`.

They bind through torch's stable ABI, which compiles in seconds. The library is named by a hash of
its sources, its flags, the compiler and torch, so a stale one is never loaded; it is renamed into
place, so two processes may build at once.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from slotzero.cache import cache_dir
from slotzero.errors import CapacityError

_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fopenmp",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=off",
)
_HERE = Path(__file__).parent


def compiler() -> str | None:
    """The C++ compiler that would be used: $CXX, else g++, c++ or clang++."""
    wanted = os.environ.get("CXX")
    return next((c for c in (wanted, "g++", "c++", "clang++") if c and shutil.which(c)), None)


@functools.cache
def load() -> None:
    """Builds (once per machine) and loads the kernels; raises CapacityError without a compiler."""
    library = _library_path()
    if not library.exists():
        _build(library)
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def _library_path() -> Path:
    digest = hashlib.sha256(repr((torch.__version__, _FLAGS, _machine())).encode())
    for source in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / f"slotzero-cpu-{digest.hexdigest()[:16]}.so"


def _machine() -> tuple[str, str | None, str]:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return platform.machine(), compiler(), features


def _build(library: Path) -> None:
    cxx = compiler()
    if cxx is None:
        raise CapacityError(
            "the CPU kernels need a C++ compiler and none was found: install g++ (or set CXX)"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    torch_dir = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        sources = sorted(_HERE.glob("*.cpp"))
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        include = f"-I{torch_dir / 'include'}"
        with ThreadPoolExecutor() as pool:
            commands = [
                (cxx, *_FLAGS, include, "-c", str(source), "-o", str(target))
                for source, target in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        linked = Path(scratch) / "linked.so"
        libraries = (f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-ltorch")
        _run((cxx, "-shared", "-fopenmp", *map(str, objects), "-o", str(linked), *libraries))
        linked.replace(library)


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CapacityError(
            f"building the CPU kernels failed; the command was: {' '.join(command)}\n{done.stderr}"
        )
