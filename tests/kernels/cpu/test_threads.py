"""Tests of the kernels' threads: any number of them, several callers at once, and a fork."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.weights import DenseWeight

CALLERS = 3


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
