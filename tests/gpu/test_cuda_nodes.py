"""Tests on a GPU that read captured CUDA graphs node by node."""

import ctypes
from collections.abc import Callable
from ctypes import c_uint, c_uint64

import pytest
import torch

from slotzero.graph.nodes import Node, nodes_of, pointers_of

triton = pytest.importorskip("triton", reason="triton has no wheel for this platform")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SIZE = 1024


@triton.jit
def _double_kernel(source, target, number, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < number)
    tl.store(target + at, values * 2, mask=at < number)


def capture(function: Callable[[], object]) -> list[Node]:
    function()  # a first call outside the capture builds and loads what it needs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        function()
    return nodes_of(graph)


def current_stream() -> c_uint64:
    return c_uint64(torch.cuda.current_stream().cuda_stream)


def copies_in(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.kind == "memcpy"]


def shape_of(nodes: list[Node]) -> list[tuple[str, str, tuple[int, ...], list[int]]]:
    return [(n.kind, n.name, n.dims, [len(param) for param in n.params]) for n in nodes]


def addresses_in(nodes: list[Node]) -> set[int]:
    return {pointer for node in nodes for pointer in pointers_of(node)}


def tensors(number: int) -> list[torch.Tensor]:
    return [torch.ones(SIZE, device="cuda") for _ in range(number)]


def test_two_captures_of_one_function_are_equal():
    x, y, z = tensors(3)

    def function() -> None:
        y.add_(x)
        y.copy_(z)

    first, second = capture(function), capture(function)
    assert len(first) == 2 and shape_of(first) == shape_of(second)
    assert "elementwise" in next(node.name for node in first if node.kind == "kernel")
    for nodes in (first, second):
        assert {t.data_ptr() for t in (x, y, z)} <= addresses_in(nodes)
        assert not any(node.reads_host for node in nodes)


def test_a_triton_kernel_shows_its_parameters():
    x, y = tensors(2)

    def function() -> None:
        _double_kernel[(8,)](x, y, SIZE - 3, BLOCK=128, num_warps=2)

    (first,), (second,) = capture(function), capture(function)
    assert shape_of([first]) == shape_of([second])
    assert first.kind == "kernel" and "_double_kernel" in first.name
    assert first.dims[:6] == (8, 1, 1, 64, 1, 1)
    values = [int.from_bytes(param, "little") for param in first.params]
    assert values[:3] == [x.data_ptr(), y.data_ptr(), SIZE - 3]
    assert {x.data_ptr(), y.data_ptr()} <= set(pointers_of(first))


def test_a_product_is_read():
    """cuBLAS launches kernels of its own, with structs for parameters."""
    a, b, out = (torch.ones(256, 256, device="cuda") for _ in range(3))
    first, second = (capture(lambda: torch.mm(a, b, out=out)) for _ in range(2))
    assert shape_of(first) == shape_of(second)
    kernels = [node for node in first if node.kind == "kernel"]
    assert kernels and all(node.name and node.params for node in kernels)


def test_another_address_is_seen():
    x, y, other = tensors(3)
    first, second = capture(lambda: y.add_(x)), capture(lambda: y.add_(other))
    assert shape_of(first) == shape_of(second)
    assert x.data_ptr() in addresses_in(first) and x.data_ptr() not in addresses_in(second)
    assert other.data_ptr() in addresses_in(second)


def test_a_memset_shows_its_address():
    (x,) = tensors(1)

    def function() -> None:
        where = (c_uint64(x.data_ptr()), c_uint(7), c_uint64(SIZE), current_stream())
        assert ctypes.CDLL("libcuda.so.1").cuMemsetD32Async(*where) == 0

    (node,) = capture(function)
    value, element_size, width, height = node.dims
    assert node.kind == "memset" and value == 7
    assert element_size * width * height == 4 * SIZE
    assert list(pointers_of(node)) == [x.data_ptr()] and not node.reads_host


def test_a_copy_from_pinned_memory_reads_the_host():
    x, y = torch.ones(SIZE).pin_memory(), torch.zeros(SIZE, device="cuda")
    (node,) = copies_in(capture(lambda: y.copy_(x, non_blocking=True)))
    assert node.reads_host and node.dims == (4 * SIZE, 1, 1)
    assert list(pointers_of(node)) == [x.data_ptr(), y.data_ptr()]


def test_a_copy_from_pageable_memory_reads_the_host():
    """torch refuses to capture such a copy, but other libraries do not."""
    x, y = torch.ones(SIZE), torch.zeros(SIZE, device="cuda")

    def function() -> None:
        where = (c_uint64(y.data_ptr()), c_uint64(x.data_ptr()), c_uint64(4 * SIZE))
        assert ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2(*where, current_stream()) == 0

    (node,) = copies_in(capture(function))
    assert node.reads_host and node.dims == (4 * SIZE, 1, 1)
    assert int.from_bytes(node.params[1], "little") == y.data_ptr()


def test_a_copy_to_the_host_does_not_read_it():
    x, y = torch.zeros(SIZE).pin_memory(), torch.ones(SIZE, device="cuda")
    (node,) = copies_in(capture(lambda: x.copy_(y, non_blocking=True)))
    assert not node.reads_host
    assert list(pointers_of(node)) == [y.data_ptr(), x.data_ptr()]
