"""Tests of the kernels' threads: any number of them, several callers at once, and a fork."""

import ctypes
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from slotzero.kernels.cpu import build
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.weights import DenseWeight

CALLERS = 3
FAILING = """
#include <stdexcept>
#include "threads.h"
extern "C" int64_t caught(int64_t items, int64_t bad) {
  try {
    slotzero::parallel_for(items, true, [&](int64_t i) {
      if (i == bad) throw std::runtime_error("no");
    });
  } catch (const std::runtime_error&) {
    return 1;
  }
  return 0;
}
"""


@pytest.fixture
def kernels() -> Iterator[CpuKernels]:
    made = CpuKernels()
    before = torch.ops.slotzero.num_threads()
    yield made
    torch.ops.slotzero.set_num_threads(before)


def test_threads_change_no_result(kernels: CpuKernels) -> None:
    draw = torch.Generator().manual_seed(0)
    data = kernels.pack(torch.randn(700, 128, generator=draw))
    weight, x = DenseWeight(data, None, 700), torch.randn(9, 128, generator=draw)
    torch.ops.slotzero.set_num_threads(1)
    expected = kernels.product(x, weight)

    def repeat(_: int) -> bool:
        return all(torch.equal(kernels.product(x, weight), expected) for _ in range(50))

    for num in (2, 4, 3):
        torch.ops.slotzero.set_num_threads(num)
        with ThreadPoolExecutor(CALLERS) as callers:
            assert all(callers.map(repeat, range(CALLERS)))
    child = os.fork()  # the threads stay in the parent
    if child == 0:
        os._exit(0 if repeat(0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert repeat(0)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 3])
def test_an_exception_reaches_the_caller(num: int, kernels: CpuKernels, tmp_path: Path) -> None:
    """Whichever thread computes the item, and the threads serve the next job as before."""
    source, library = tmp_path / "failing.cpp", tmp_path / "failing.so"
    source.write_text(FAILING)
    include, loaded = f"-I{Path(build.__file__).parent}", str(build._library_path("common"))
    flags = "-std=c++20", "-shared", "-fPIC", include
    cxx = build.compiler() or "g++"
    subprocess.run([cxx, *flags, str(source), loaded, "-o", str(library)], check=True)
    caught = ctypes.CDLL(str(library)).caught
    torch.ops.slotzero.set_num_threads(num)
    items = 500
    for bad in range(items):
        assert caught(ctypes.c_int64(items), ctypes.c_int64(bad)) == 1
        assert caught(ctypes.c_int64(items), ctypes.c_int64(items)) == 0
