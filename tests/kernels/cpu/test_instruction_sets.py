"""Tests of the primitives that differ between instruction sets: dot products of bytes, sums of
lanes, and numbers in half precision. Sets of another architecture are compiled and emulated where a
cross compiler and qemu are installed; what cannot run here is skipped by name."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from slotzero.kernels.cpu import build

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).with_name("instruction_set.cpp")
NEEDS = {  # CPU features of each instruction set
    "x86_64": {
        "avx2": {"avx2", "fma", "f16c"},
        "avx_vnni": {"avx2", "fma", "f16c", "avx_vnni"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
        "avx512_vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512_vnni"},
    },
    "aarch64": {"neon": {"asimd"}, "dotprod": {"asimddp"}, "i8mm": {"asimddp", "i8mm"}},
}
EVERY = [(machine, isa) for machine, sets in NEEDS.items() for isa in sets]
HERE = platform.machine()


def tools_for(machine: str, isa: str) -> tuple[str, list[str]]:
    """Return the compiler, and the command that runs its programs; skip if there is none."""
    if machine == HERE:
        if not NEEDS[machine][isa] <= set(build.cpu_features().split()):
            pytest.skip(f"{isa}: this CPU does not have it")
        cxx, emulator = build.compiler(), []
    else:
        cxx, qemu = shutil.which(f"{machine}-linux-gnu-g++"), shutil.which(f"qemu-{machine}")
        emulator = [qemu or "", "-cpu", "max"]
        if cxx is None or qemu is None:
            pytest.skip(f"{isa}: needs {machine}, or its cross compiler and qemu")
    if cxx is None:
        pytest.skip(f"{isa}: there is no C++ compiler")
    return cxx, emulator


@pytest.mark.parametrize(("machine", "isa"), [(HERE, "plain"), (HERE, "native"), *EVERY])
def test_primitives_are_exact(machine: str, isa: str, tmp_path: Path) -> None:
    named = isa in NEEDS.get(machine, {})
    cxx, emulator = tools_for(machine, isa) if named else (build.compiler() or "g++", [])
    program, flags = tmp_path / "check", (*build._FLAGS, *build._ISAS[isa])
    include = f"-I{Path(build.__file__).parent}"
    subprocess.run([cxx, *flags, include, "-static", str(SOURCE), "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("lanes, 0 wrong\n")


@pytest.mark.skipif("amx_int8" not in build.cpu_features(), reason="amx: this CPU does not have it")
def test_matrix_tiles_are_granted(tmp_path: Path) -> None:
    """So the products of test_quantized_kernels.py with 16 rows and more use them."""
    source, program = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text('#include "matrix_tiles.h"\nint main() { return has_tiles() ? 0 : 1; }\n')
    flags = (*build._FLAGS, *build._ISAS["native"], f"-I{Path(build.__file__).parent}")
    cxx = build.compiler() or "g++"
    subprocess.run([cxx, *flags, str(source), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
