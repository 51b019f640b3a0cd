"""How kernels of this set are launched: compiled ahead in parallel, and overlapping one another.

A kernel launched with `**overlap()` starts while the one before it still runs (programmatic
dependent launch, where the card has it). Two rules make that safe, and every kernel that takes PDL
keeps both: call `may_follow` first, so that the next one can start in turn; call `wait_for_writer`
in every program before touching anything that an earlier kernel writes. Before it, only constants
may be read, and what was written before the last kernel that took no part in this. To ask for
something to be near (`bring_near`) is no reading.
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
NEAR_BYTES = tl.constexpr(64)  # that one request brings into a card's cache

_UNWRITTEN = {
    torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided
}  # fmt: skip
# While compiling ahead: what was asked for. Other threads launch as ever.
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
def bring_near(
    weight, n, num_out, begin, INNER: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Asks for WHOLE weights of each feature n, from `begin` on, to be in the card's cache soon, so
    that the memory is busy while a writer is waited for. Of bfloat16, [features, INNER]."""
    if PDL:
        whole: tl.constexpr = min(WHOLE, INNER)
        step: tl.constexpr = NEAR_BYTES // 2
        k = tl.arange(0, triton.next_power_of_2(triton.cdiv(whole, step))) * step
        k = tl.minimum(begin, INNER - whole) + tl.minimum(k, whole - 1)
        at = weight + tl.minimum(n, num_out - 1)[:, None].to(tl.int64) * INNER + k[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1
        )


@functools.cache
def overlap() -> dict[str, Any]:
    """Keywords of a launch: the kernel's PDL flag, and the launch attribute that goes with it."""
    if INTERPRETED or torch.cuda.get_device_capability() < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def shared_memory() -> int:
    """Bytes that one program may have on this card."""
    if INTERPRETED:
        return 227 << 10
    device = triton.runtime.driver.active
    return int(device.utils.get_device_properties(device.get_current_device())["max_shared_mem"])


@functools.cache
def card_name() -> str:
    return torch.cuda.get_device_name()


@functools.cache
def num_processors() -> int:
    """Of this card."""
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
    """What a kernel is compiled for"""
    if isinstance(argument, Tensor):
        return argument.dtype
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    return type(argument)


def is_compiling() -> bool:
    return _ahead.get() is not None


class _Zeroed(TorchFunctionMode):
    """Memory that nobody has written yet is zeros. Of the calls that our code makes: a mode of the
    dispatcher would see more, and imports a compiler, which takes seconds."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in _UNWRITTEN else made


class _Compilers(ThreadPoolExecutor):
    def submit(self, compile_kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
        """With what launches the kernel, which some versions of Triton compile too, and would one
        by one, each at a first launch."""

        def compile_both() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(compile_both)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, launches only ask for their kernel; all are compiled, side by side, at the end.

    What no kernel has written is zeros: a place that other calls, which do run, can look up. A
    kernel that does not compile is left for its first launch, where its error is expected.
    """
    with _Compilers() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        before = _ahead.set(set())
        try:
            with _Zeroed():
                yield
        finally:
            _ahead.reset(before)
