"""The nodes of a captured CUDA graph: every kernel, every copy, every pointer.

It reads them from the driver through ctypes, so that two captures of one function can be compared
and each address in them looked up. It does not know which addresses are right, nor the dependencies
of nodes. Every handle, address and size_t is passed as a 64-bit value, as a plain int would be
truncated.
"""

import ctypes
import struct
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch

from slotzero.errors import RecordingError

KINDS = (  # by CUgraphNodeType
    "kernel", "memcpy", "memset", "host", "graph", "empty", "event", "event",
    "semaphore", "semaphore", "alloc", "free", "batch", "conditional",
)  # fmt: skip
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4  # CUmemorytype
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*
ADDRESSES = range(1 << 32, 1 << 57)


class Node(NamedTuple):
    kind: str  # one of KINDS; the nodes of a child graph stand in its place
    name: str  # the kernel's, mangled; else empty
    dims: tuple[int, ...]
    """kernel: grid x3, block x3, dynamic shared bytes; memcpy: width, height, depth;
    memset: value, element size, width, height."""
    params: tuple[bytes, ...]
    """kernel: each parameter, in order; memcpy: source and target address; memset: its address."""
    reads_host: bool  # a memcpy whose source is host memory, or a host node


class _KernelParams(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_ = [
        ("func", c_uint64),
        ("dims", c_uint * 7),
        *((name, c_uint64) for name in ("kernel_params", "extra", "kern", "ctx")),
    ]


class _CopyEnd(ctypes.Structure):  # either half of CUDA_MEMCPY3D_v2
    _fields_ = [
        *((name, c_uint64) for name in ("x", "y", "z", "lod")),
        ("memory_type", c_uint),
        *((name, c_uint64) for name in ("host", "device", "array", "reserved", "pitch", "height")),
    ]

    @property
    def address(self) -> int:
        if self.memory_type == ARRAY:
            raise RecordingError("a memcpy node has a CUDA array, which has no address")
        base: int = self.host if self.memory_type == HOST else self.device
        return base + int((self.z * self.height + self.y) * self.pitch + self.x)


class _Memcpy(ctypes.Structure):  # CUDA_MEMCPY3D_v2
    _fields_ = [("source", _CopyEnd), ("target", _CopyEnd), ("dims", c_uint64 * 3)]


class _Memset(ctypes.Structure):  # CUDA_MEMSET_NODE_PARAMS_v1
    _fields_ = [("target", c_uint64 * 2), ("value", c_uint * 2), ("extent", c_uint64 * 2)]
    # address and pitch; value and element size; width and height


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[Node]:
    """Return the nodes of a graph captured with keep_graph=True, in cuGraphGetNodes' order."""
    try:
        raw = graph.raw_cuda_graph()
    except RuntimeError as error:
        raise RecordingError(
            "the nodes of a graph can be read only if it was captured with "
            "torch.cuda.CUDAGraph(keep_graph=True)"
        ) from error
    return list(_walk(raw))


def pointers_of(node: Node) -> Iterator[int]:
    """Yield every 8-byte aligned word of a node's parameters that could be a device address."""
    for param in node.params:
        for (word,) in struct.iter_unpack("<Q", param[: len(param) // 8 * 8]):
            if word in ADDRESSES:
                yield word


def _walk(graph: int) -> Iterator[Node]:
    number = c_uint64()
    _call("cuGraphGetNodes", c_uint64(graph), None, byref(number))
    handles = (c_uint64 * number.value)()
    if handles:
        _call("cuGraphGetNodes", c_uint64(graph), handles, byref(number))
    for handle in handles:
        code = _filled("cuGraphNodeGetType", handle, c_int()).value
        kind = KINDS[code] if code < len(KINDS) else f"type {code}"
        if kind == "graph":
            yield from _walk(_filled("cuGraphChildGraphNodeGetGraph", handle, c_uint64()).value)
        elif kind in _READERS:
            yield _READERS[kind](handle)
        else:
            yield Node(kind, "", (), (), reads_host=kind == "host")


def _kernel(handle: int) -> Node:
    got = _filled("cuGraphKernelNodeGetParams_v2", handle, _KernelParams())
    family, function = ("cuFunc", got.func) if got.func else ("cuKernel", got.kern)
    text = c_char_p()
    _call(f"{family}GetName", byref(text), c_uint64(function))
    name = (text.value or b"").decode()
    layout = list(_layout_of(family, function))
    starts = _starts_of(got, layout)
    if not all(starts):
        raise RecordingError(f"the driver does not give every parameter of kernel {name}")
    params = (ctypes.string_at(at, size) for at, (_, size) in zip(starts, layout, strict=True))
    return Node("kernel", name, tuple(got.dims), tuple(params), reads_host=False)


def _layout_of(family: str, function: int) -> Iterator[tuple[int, int]]:
    """Yield offset and size of each parameter; the driver refuses an index past the last."""
    offset, size = c_uint64(), c_uint64()
    for index in count():
        asked = (c_uint64(function), c_uint64(index), byref(offset), byref(size))
        if _call(f"{family}GetParamInfo", *asked, also=INVALID_VALUE) == INVALID_VALUE:
            return
        yield offset.value, size.value


def _starts_of(got: _KernelParams, layout: list[tuple[int, int]]) -> list[int]:
    """Return the host address of each parameter, 0 if it is missing."""
    if got.kernel_params:
        return [_word_at(got.kernel_params + 8 * index) for index in range(len(layout))]
    settings: dict[int, int] = {}
    entry = got.extra
    while entry and (key := _word_at(entry)):
        settings[key] = _word_at(entry + 8)
        entry += 16
    buffer, size_at = settings.get(BUFFER_POINTER, 0), settings.get(BUFFER_SIZE, 0)
    end = buffer + _word_at(size_at) if buffer and size_at else 0
    return [buffer + at if buffer + at + size <= end else 0 for at, size in layout]


def _word_at(address: int) -> int:
    return c_uint64.from_address(address).value


def _memcpy(handle: int) -> Node:
    got = _filled("cuGraphMemcpyNodeGetParams", handle, _Memcpy())
    params = tuple(end.address.to_bytes(8, "little") for end in (got.source, got.target))
    return Node("memcpy", "", tuple(got.dims), params, reads_host=_is_host(got.source))


def _is_host(end: _CopyEnd) -> bool:
    """Return whether a copy's end is host memory. Its type alone is not enough, as pinned and
    device memory share one address space."""
    if end.memory_type == HOST:
        return True
    memory = c_uint()
    asked = (byref(memory), c_int(MEMORY_TYPE), c_uint64(end.address))
    if _call("cuPointerGetAttribute", *asked, also=INVALID_VALUE) == INVALID_VALUE:
        return bool(end.memory_type == UNIFIED)  # pageable memory is unknown to the driver
    return memory.value != DEVICE


def _memset(handle: int) -> Node:
    got = _filled("cuGraphMemsetNodeGetParams", handle, _Memset())
    address = got.target[0].to_bytes(8, "little")
    return Node("memset", "", (*got.value, *got.extent), (address,), reads_host=False)


_READERS = {"kernel": _kernel, "memcpy": _memcpy, "memset": _memset}


def _filled(name: str, handle: int, out: Any) -> Any:
    _call(name, c_uint64(handle), byref(out))
    return out


def _call(name: str, *arguments: Any, also: int = 0) -> int:
    """Call the driver and return its result, which is 0 or `also`."""
    function = getattr(_libcuda(), name, None)
    if function is None:
        raise RecordingError(f"libcuda has no {name}: a driver of CUDA 12.4 or newer is needed")
    code: int = function(*arguments)
    if code not in (0, also):
        text = c_char_p()
        _libcuda().cuGetErrorName(c_int(code), byref(text))
        raise RecordingError(f"{name}: {(text.value or b'error %d' % code).decode()}")
    return code


@cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")
