"""Build the C++ kernels at first use and load them as `torch.ops.slotzero.*`.

They bind through torch's stable C ABI (tensor.h). There are two libraries: what every model needs,
or a quantised one, and the rest, which is built when one of its operators is first called. Each
processor compiles one unit of several sources, because parsing the C++ library and the intrinsics
takes longer than most sources. A library is named by a hash of all sources, its flags, the compiler
and torch, so no stale one is loaded; it is renamed into place, so two processes may build at once.
"""

import errno
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from slotzero.errors import CapacityError, ConfigError
from slotzero.system.cache_dir import cache_dir, unwritable, writing
from slotzero.system.processors import num_processors

_log = logging.getLogger("slotzero")

_FLAGS = (
    "-O2",  # loops are vectorised by hand, and -O3 compiles half as fast
    "-ftree-vectorize",
    "-std=c++20",
    "-fPIC",
    "-fno-math-errno",
    "-ffp-contract=off",
)
_ISAS = {
    "native": ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
    "avx_vnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx512_vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "amx": ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8"),
    "neon": ("-march=armv8-a",),
    "dotprod": ("-march=armv8.2-a+dotprod",),
    "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    "plain": ("-DSLOTZERO_PLAIN",),
}
_COMMON = "attention", "linear_integer", "rowwise", "sample", "sample_binding", "threads"
_HERE = Path(__file__).parent

LibraryName = Literal["common", "other"]


def compiler() -> str | None:
    """Return the C++ compiler to use: $CXX, else g++, c++ or clang++; None if there is none."""
    wanted = os.environ.get("CXX")
    return next((c for c in (wanted, "g++", "c++", "clang++") if c and shutil.which(c)), None)


@functools.cache
def load() -> None:
    """Build (once per machine) and load the common library; without a compiler: CapacityError."""
    _load("common")
    torch.ops.slotzero.set_num_threads(num_processors())


@functools.cache
def other_operators() -> Any:
    """Return `torch.ops.slotzero` with the operators of the other library: products in float32,
    indexers and recurrent layers. Build it if needed."""
    load()
    _load("other")
    return torch.ops.slotzero


def _load(name: LibraryName) -> None:
    library = _library_path(name)
    if not library.exists():
        _log.info("building CPU kernels (%s), once for this machine: about 5 seconds", name)
        _build(library, _sources(name), *([_library_path("common")] if name == "other" else ()))
    torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]


def _sources(name: LibraryName) -> list[Path]:
    is_common = name == "common"
    return [path for path in _HERE.glob("*.cpp") if (path.stem in _COMMON) is is_common]


def _library_path(name: LibraryName) -> Path:
    digest = hashlib.sha256(repr((torch.__version__, _flags(), _machine(), _COMMON)).encode())
    for source in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / f"slotzero-cpu-{name}-{digest.hexdigest()[:16]}.so"


def _flags() -> tuple[str, ...]:
    """Return the compiler flags. SLOTZERO_CPU_ISA names the instruction set; default: native."""
    isa = os.environ.get("SLOTZERO_CPU_ISA", "native")
    if isa not in _ISAS:
        raise ConfigError(f"SLOTZERO_CPU_ISA={isa}: must be one of {', '.join(_ISAS)}")
    return *_FLAGS, *_ISAS[isa]


def _machine() -> tuple[str, str | None, str]:
    """Return what the result of `-march=native` depends on."""
    return platform.machine(), compiler(), cpu_features()


def cpu_features() -> str:
    """Return the CPU's instruction set extensions as the kernel lists them; "" if it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _build(library: Path, sources: Sequence[Path], *needed: Path) -> None:
    """Build a library of these sources, which calls functions of the libraries `needed`."""
    cxx = compiler()
    if cxx is None:
        raise CapacityError(
            "the CPU kernels need a C++ compiler and none was found: install g++ (or set CXX)"
        )
    lib_dir = Path(torch.__file__).parent / "lib"
    folder = library.parent
    with writing(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
        units = _units(Path(scratch), sources, num_processors())
        objects = [unit.with_suffix(".o") for unit in units]
        with ThreadPoolExecutor(len(units)) as pool:
            commands = [
                (cxx, *_flags(), f"-I{_HERE}", "-c", str(unit), "-o", str(target))
                for unit, target in zip(units, objects, strict=True)
            ]
            list(pool.map(partial(_run, Path(scratch)), commands))
        linked = Path(scratch) / "linked.so"
        libraries = (f"-L{lib_dir}", "-ltorch_cpu", "-ltorch", *_shared_libstdcxx(cxx))
        # found by this name once it is loaded, wherever the cache has been moved to
        name = f"-Wl,-soname,{library.name}"
        parts = *map(str, objects), *map(str, needed), *libraries
        _run(Path(scratch), (cxx, "-shared", "-pthread", name, "-o", str(linked), *parts))
        linked.replace(library)


def _units(scratch: Path, sources: Sequence[Path], most: int) -> list[Path]:
    """Write at most `most` files that include all sources between them, in about equal parts."""
    parts: list[list[Path]] = [[] for _ in range(min(most, len(sources)))]
    for source in sorted(sources, key=lambda source: (-source.stat().st_size, source.name)):
        min(parts, key=lambda part: sum(each.stat().st_size for each in part)).append(source)
    units = [scratch / f"unit{i}.cpp" for i in range(len(parts))]
    for unit, part in zip(units, parts, strict=True):
        unit.write_text("".join(f'#include "{source}"\n' for source in part))
    return units


def _shared_libstdcxx(cxx: str) -> tuple[str, ...]:
    """Return the path of the shared C++ library. Some toolchains link the static one by default,
    and an exception that a kernel throws from its own copy crashes the process inside torch."""
    command = (cxx, "-print-file-name=libstdc++.so.6")
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return (path,) if Path(path).is_absolute() else ()


def _run(scratch: Path, command: tuple[str, ...]) -> None:
    """Run a compiler, with temporary files in the cache folder and messages in English."""
    env = os.environ | {"TMPDIR": str(scratch), "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode == 0:
        return
    full = os.strerror(errno.ENOSPC)
    if full in done.stderr:
        raise unwritable(scratch.parent, errno.ENOSPC, full)
    lines = done.stderr.splitlines()
    error = next((line for line in lines if "error" in line), (lines or ["it said nothing"])[-1])
    raise CapacityError(
        f"building the CPU kernels failed: {error}\n{' '.join(command)}\n{done.stderr}"
    )
