"""Tests of reading captured CUDA graphs, with a fake driver written in Python."""

import ctypes
from collections.abc import Callable
from ctypes import c_uint64
from types import SimpleNamespace

import pytest

from slotzero.errors import RecordingError
from slotzero.graph import nodes
from slotzero.graph.nodes import Node, nodes_of, pointers_of

INVALID_VALUE, ILLEGAL_STATE = 1, 401
POINTER = 0x7F12_3456_7000
OTHER = 0x7F12_3457_0000


class Kernel:
    """A kernel node: a function and its parameters as (offset, bytes), laid out as by the
    driver."""

    kind = 0

    def __init__(self, name: str, params: list[tuple[int, bytes]], *, by: str = "array") -> None:
        self.name, self.params, self.by = name.encode(), params, by
        self.held = [ctypes.create_string_buffer(value, len(value)) for _, value in params]
        self.pointers = (c_uint64 * len(params))(*map(ctypes.addressof, self.held))
        size = max((at + len(value) for at, value in params), default=0)
        self.buffer, self.size = ctypes.create_string_buffer(b"\xee" * size, size), c_uint64(size)
        for at, value in params:
            ctypes.memmove(ctypes.addressof(self.buffer) + at, value, len(value))
        setting = (2, ctypes.addressof(self.size), 1, ctypes.addressof(self.buffer), 0)
        self.extra = (c_uint64 * 5)(*setting)


class Copy:
    kind = 1

    def __init__(self, source: tuple[int, int], target: tuple[int, int], **offsets: int) -> None:
        self.source, self.target, self.offsets = source, target, offsets


class Driver:
    """Fake driver with the calls that nodes.py uses; a graph is a list, a handle an index in
    `things`."""

    def __init__(self) -> None:
        self.things: list[object] = [None]
        self.memory: dict[int, int] = {}  # memory types that cuPointerGetAttribute returns
        self.fails: dict[str, int] = {}
        self.asked: list[str] = []

    def add(self, thing: object) -> int:
        self.things.append(thing)
        return 0x7000_0000_0000 + len(self.things) - 1  # a handle that a 32-bit int would truncate

    def __getattribute__(self, name: str) -> object:
        if name.startswith("cu") and name != "cuGetErrorName":
            self.asked.append(name)
            if code := self.fails.get(name):
                return lambda *arguments: code
        return super().__getattribute__(name)

    def of(self, handle: c_uint64) -> object:
        return self.things[handle.value - 0x7000_0000_0000]

    def cuGetErrorName(self, code, text) -> int:  # noqa: N802
        names = {ILLEGAL_STATE: b"CUDA_ERROR_ILLEGAL_STATE"}
        text._obj.value = names.get(code.value)
        return 0 if code.value in names else INVALID_VALUE

    def cuGraphGetNodes(self, graph, handles, number) -> int:  # noqa: N802
        if handles is None:
            number._obj.value = len(self.of(graph))
        else:
            assert number._obj.value == len(handles)
            handles[:] = self.of(graph)
        return 0

    def cuGraphNodeGetType(self, node, kind) -> int:  # noqa: N802
        thing = self.of(node)
        kind._obj.value = thing if isinstance(thing, int) else thing.kind
        return 0

    def cuGraphChildGraphNodeGetGraph(self, node, graph) -> int:  # noqa: N802
        graph._obj.value = self.of(node).graph
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node, out) -> int:  # noqa: N802
        kernel, out = self.of(node), out._obj
        setattr(out, "kern" if kernel.by == "kern" else "func", node.value)
        out.dims[:] = [5, 1, 2, 128, 1, 1, 4096]
        if kernel.by == "extra":
            out.extra = ctypes.addressof(kernel.extra)
        elif kernel.params:
            out.kernel_params = ctypes.addressof(kernel.pointers)
        return 0

    def cuFuncGetName(self, text, function) -> int:  # noqa: N802
        text._obj.value = self.of(function).name
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size) -> int:  # noqa: N802
        params = self.of(function).params
        if index.value >= len(params):
            return INVALID_VALUE
        offset._obj.value, size._obj.value = params[index.value][0], len(params[index.value][1])
        return 0

    cuKernelGetName, cuKernelGetParamInfo = cuFuncGetName, cuFuncGetParamInfo  # noqa: N815

    def cuGraphMemcpyNodeGetParams(self, node, out) -> int:  # noqa: N802
        copy = self.of(node)
        for name in ("source", "target"):
            end, (kind, address) = getattr(out._obj, name), getattr(copy, name)
            end.memory_type = kind
            setattr(end, "host" if kind == nodes.HOST else "device", address)
        for name, value in copy.offsets.items():
            setattr(out._obj.source, name, value)
        out._obj.dims[:] = [64, 1, 1]
        return 0

    def cuPointerGetAttribute(self, data, attribute, address) -> int:  # noqa: N802
        assert attribute.value == 2
        if address.value not in self.memory:
            return INVALID_VALUE
        data._obj.value = self.memory[address.value]
        return 0

    def cuGraphMemsetNodeGetParams(self, node, out) -> int:  # noqa: N802
        out._obj.target[:] = [POINTER, 0]
        out._obj.value[:] = [7, 4]
        out._obj.extent[:] = [100, 1]
        return 0


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(nodes, "_libcuda", lambda: driver)
    return driver


@pytest.fixture
def read(driver) -> Callable[..., list[Node]]:
    def read(*things: object) -> list[Node]:
        graph = driver.add([driver.add(thing) for thing in things])
        return nodes_of(SimpleNamespace(raw_cuda_graph=lambda: graph))

    return read


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


PARAMS = [(0, b"\x01\x02\x03\x04"), (8, word(POINTER) + word(3) + word(OTHER)), (32, b"\x09")]


def test_layouts_are_those_of_the_header():
    """The expected sizes and offsets come from a C compiler and cuda.h of CUDA 13.0."""
    kernel, copy, memset = nodes._KernelParams, nodes._Memcpy, nodes._Memset
    assert [ctypes.sizeof(s) for s in (kernel, copy, memset)] == [72, 200, 40]
    names = ("func", "dims", "kernel_params", "extra", "kern", "ctx")
    assert [getattr(kernel, name).offset for name in names] == [0, 8, 40, 48, 56, 64]
    assert [getattr(copy, name).offset for name in ("source", "target", "dims")] == [0, 88, 176]
    names = ("memory_type", "host", "device", "array", "pitch", "height")
    offsets = [32, 40, 48, 56, 72, 80]
    assert [getattr(nodes._CopyEnd, name).offset for name in names] == offsets
    assert [getattr(memset, name).offset for name in ("target", "value", "extent")] == [0, 16, 24]


@pytest.mark.parametrize("by", ["array", "extra", "kern"])
def test_kernel_parameters_are_split_at_the_offsets_of_the_driver(read, driver, by):
    (node,) = read(Kernel("_Z3addPf", PARAMS, by=by))
    values = tuple(value for _, value in PARAMS)
    assert node == Node("kernel", "_Z3addPf", (5, 1, 2, 128, 1, 1, 4096), values, False)
    assert ("cuFuncGetName" in driver.asked) == (by != "kern")
    assert ("cuKernelGetParamInfo" in driver.asked) == (by == "kern")


def test_a_kernel_may_have_no_parameters(read):
    (node,) = read(Kernel("spin", []))
    assert node.params == () and list(pointers_of(node)) == []


def test_a_parameter_that_is_not_there_is_refused(read):
    short = Kernel("short", PARAMS, by="extra")
    short.size.value -= 1
    missing = Kernel("missing", PARAMS)
    missing.pointers[1] = 0
    for kernel in (short, missing):
        with pytest.raises(RecordingError, match=f"kernel {kernel.name.decode()}"):
            read(kernel)


def test_pointers_are_aligned_words_in_the_range_of_addresses():
    params = (
        b"\x01\x02\x03\x04",
        word(POINTER) + word(3) + word(OTHER),
        b"\x00" * 4 + word(POINTER),  # not aligned
        word((1 << 32) - 1) + word(1 << 32) + word((1 << 57) - 1) + word(1 << 57),
        word(OTHER) + b"\x01",
    )
    node = Node("kernel", "add", (), params, reads_host=False)
    assert list(pointers_of(node)) == [POINTER, OTHER, 1 << 32, (1 << 57) - 1, OTHER]


@pytest.mark.parametrize(
    ("memory_type", "known_as", "reads_host"),
    [
        (nodes.HOST, None, True),
        (nodes.DEVICE, nodes.DEVICE, False),
        (nodes.DEVICE, nodes.HOST, True),  # pinned memory, by its address on the device
        (nodes.DEVICE, None, False),
        (nodes.UNIFIED, nodes.DEVICE, False),
        (nodes.UNIFIED, nodes.HOST, True),
        (nodes.UNIFIED, None, True),  # pageable
    ],
)
def test_a_copy_from_host_memory_is_detected(read, driver, memory_type, known_as, reads_host):
    if known_as:
        driver.memory[POINTER] = known_as
    (node,) = read(Copy((memory_type, POINTER), (nodes.DEVICE, OTHER)))
    assert node == Node("memcpy", "", (64, 1, 1), (word(POINTER), word(OTHER)), reads_host)
    assert list(pointers_of(node)) == [POINTER, OTHER]


def test_a_copy_begins_at_its_offsets(read):
    copy = Copy((nodes.DEVICE, POINTER), (nodes.DEVICE, OTHER), x=4, y=3, z=2, pitch=100, height=10)
    (node,) = read(copy)
    assert node.params == (word(POINTER + 4 + (2 * 10 + 3) * 100), word(OTHER))


def test_a_copy_of_an_array_is_refused(read):
    with pytest.raises(RecordingError, match="array"):
        read(Copy((nodes.ARRAY, 0), (nodes.DEVICE, OTHER)))


def test_other_kinds_of_nodes(read):
    memset, *others = read(2, 3, 5, 6, 7, 99)
    assert memset == Node("memset", "", (7, 4, 100, 1), (word(POINTER),), reads_host=False)
    assert [n.kind for n in others] == ["host", "empty", "event", "event", "type 99"]
    assert [n.reads_host for n in others] == [True, False, False, False, False]


def test_child_graphs_are_inlined(read, driver):
    inner = driver.add([driver.add(Kernel("deep", PARAMS))])
    child = driver.add(SimpleNamespace(kind=4, graph=inner))
    outer = driver.add([driver.add(Kernel("b", [])), child, driver.add(Kernel("c", []))])
    found = read(Kernel("a", []), SimpleNamespace(kind=4, graph=outer), Kernel("d", []))
    assert [node.name for node in found] == ["a", "b", "deep", "c", "d"]


def test_an_empty_graph_has_no_nodes(read):
    assert read() == []


@pytest.mark.parametrize(
    "call",
    [
        "cuGraphGetNodes",
        "cuGraphNodeGetType",
        "cuGraphChildGraphNodeGetGraph",
        "cuGraphKernelNodeGetParams_v2",
        "cuFuncGetName",
        "cuFuncGetParamInfo",
        "cuGraphMemcpyNodeGetParams",
        "cuPointerGetAttribute",
        "cuGraphMemsetNodeGetParams",
    ],
)
def test_an_error_names_the_call(read, driver, call):
    child = SimpleNamespace(kind=4, graph=driver.add([]))
    things = [Kernel("a", PARAMS), Copy((nodes.DEVICE, POINTER), (nodes.DEVICE, OTHER)), 2, child]
    driver.fails[call] = ILLEGAL_STATE
    with pytest.raises(RecordingError, match=f"^{call}: CUDA_ERROR_ILLEGAL_STATE$"):
        read(*things)


def test_an_error_without_a_name_has_its_number(read, driver):
    driver.fails["cuGraphNodeGetType"] = 12345
    with pytest.raises(RecordingError, match=r"^cuGraphNodeGetType: error 12345$"):
        read(2)


def test_a_driver_without_the_call_is_reported(monkeypatch):
    monkeypatch.setattr(nodes, "_libcuda", SimpleNamespace)
    with pytest.raises(RecordingError, match="no cuGraphGetNodes"):
        nodes_of(SimpleNamespace(raw_cuda_graph=lambda: 1))
