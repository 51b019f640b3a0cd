"""Kernel launches: compiled ahead in parallel, and overlapping by programmatic dependent launch.

A kernel launched with `**overlap()` starts while the previous one still runs (programmatic
dependent launch, PDL, on cards that support it). Every kernel with a PDL argument keeps two rules
that make this safe: call `may_follow` first, so that the next kernel can start; and in every
program call `wait_for_writer` before accessing anything that an earlier kernel writes. Before the
wait, a kernel may read only constants, and data written before the last kernel that was launched
without overlap. A prefetch into the L2 cache (`prefetch_weights`) is not a read.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PREFETCH_BYTES = tl.constexpr(64)  # per prefetch instruction

_UNWRITTEN = {
    torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided
}  # fmt: skip
# While compiling ahead: the kernels requested so far. Other threads launch as usual.
_ahead: ContextVar[set[tuple[Any, ...]] | None] = ContextVar("_ahead", default=None)


@triton.jit
def may_follow(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_writer(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def prefetch_weights(
    weight, n, num_out, begin, INNER: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Prefetch WHOLE weights of each feature n, from `begin` on, into the L2 cache, so that the
    memory is busy during the wait for the writer. The weight is [features, INNER]."""
    if PDL:
        whole: tl.constexpr = min(WHOLE, INNER)
        step: tl.constexpr = PREFETCH_BYTES * 8 // weight.dtype.element_ty.primitive_bitwidth
        k = tl.arange(0, triton.next_power_of_2(triton.cdiv(whole, step))) * step
        k = tl.minimum(begin, INNER - whole) + tl.minimum(k, whole - 1)
        at = weight + tl.minimum(n, num_out - 1)[:, None].to(tl.int64) * INNER + k[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1
        )


@functools.cache
def overlap() -> dict[str, Any]:
    """Return launch keywords: the kernel's PDL flag, and the matching launch attribute."""
    if INTERPRETED or torch.cuda.get_device_capability() < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def shared_memory() -> int:
    """Return the bytes of shared memory that one program may use on this card."""
    if INTERPRETED:
        return 227 << 10
    device = triton.runtime.driver.active
    return int(device.utils.get_device_properties(device.get_current_device())["max_shared_mem"])


def num_warps(block: int, most: int = 8) -> int:
    """Return the warps of an elementwise kernel whose programs have so many values."""
    return min(most, max(1, block // 512))


@functools.cache
def card_name() -> str:
    return torch.cuda.get_device_name()


@functools.cache
def num_processors() -> int:
    """Return the number of multiprocessors of this card."""
    if INTERPRETED:
        return 132
    return torch.cuda.get_device_properties().multi_processor_count


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    asked = _ahead.get()
    if asked is None:
        kernel[grid](*args, **kwargs)
        return
    wanted = (kernel, *map(_kind, args), *kwargs.items())
    if wanted not in asked:
        asked.add(wanted)
        kernel.warmup(*args, grid=grid, **kwargs)


def _kind(argument: Any) -> object:
    """Return the properties of an argument that a kernel is specialized for."""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    return type(argument)


def is_compiling() -> bool:
    return _ahead.get() is not None


class _Zeroed(TorchFunctionMode):
    """Zeroes newly allocated memory.

    It sees the calls that our code makes. A dispatch mode would see more, but importing it imports
    a compiler, which takes seconds.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in _UNWRITTEN else made


class _Compilers(ThreadPoolExecutor):
    def submit(self, compile_kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compile the kernel together with its launcher.

        Some versions of Triton compile launchers too, one by one, each at its first launch.
        """

        def compile_both() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compile_both)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels launched inside, all in parallel at the end, instead of running them.

    Memory that no kernel has written is zeros, so that other calls, which do run, can use it as
    indices. A kernel that does not compile raises at its first launch instead, where callers expect
    the error.
    """
    with _Compilers() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        before = _ahead.set(set())
        try:
            with _Zeroed():
                yield
        finally:
            _ahead.reset(before)
