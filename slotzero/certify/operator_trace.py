"""S5: which memory a recording reads and which host values it has baked in.

A step function is observed operator by operator in two different steps of one size. It must do the
same to the same tensors both times: a difference means that a host value was used. It may use only
registered memory and tensors that it made itself, and no value may reach the host, even if it is
the same in both steps: not from an operator that returns a number or a shape that depends on
values, and not past operators (`tolist`, or places at which torch splits a tensor). What an
operator reads for its own result stays inside, since a replay calls it again.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slotzero.graph import Registry
from slotzero.graph.backend import TraceLine
from slotzero.graph.refusals import (
    HOST_VALUE,
    HostReads,
    host_value,
    leaves,
    tensors_of,
    varying_shape,
)

Finding = tuple[str, str]  # tensor, what is wrong with it


def span_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first address and one past the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.itemsize


class Addresses:
    """Lookup of the registered tensor that an address belongs to."""

    def __init__(self, registry: Registry) -> None:
        entries = [e for e in registry.entries() if e.tensor.numel()]
        self._spans = sorted((*span_of(e.tensor), e.name) for e in entries)
        self._starts = [start for start, _, _ in self._spans]

    def name(self, address: int) -> str:
        """Return the tensor's name, or an empty string if no registered tensor has the address."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return ""
        _, end, name = self._spans[at]
        return name if address < end else ""


class OperatorTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator: names of registered tensors, shapes of others, and all numbers."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[TraceLine] = []
        self.findings: list[Finding] = []
        self._device = registry.device
        self._addresses = Addresses(registry)
        self._made: dict[int, Tensor] = {}  # kept alive, so that no address is reused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch._dynamo, which takes seconds

    def watch(self, function: Callable[[], None]) -> None:
        with HostReads(self._read), self:
            function()

    def _read(self, name: str, tensor: Tensor, reason: str) -> None:
        if reason == HOST_VALUE:  # kernels on a device are given addresses
            self.findings.append((self._name(tensor), f"{name}: the host reads its value"))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():  # what an operator reads inside, a replay reads too
            return self._observe(func, args, kwargs or {})

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = leaves((args, *kwargs.values()))
        words = [self._word(func, value) for value in given]
        self.lines.append(TraceLine(f"{func} {' '.join(words)}"))
        made = func(*args, **kwargs)
        if host_value(func, made):
            self._found(given, f"{func}: the host waits for its value")
        if varying_shape(func, args):
            self._found(given, f"{func}: the shape of its result depends on values")
        for tensor in tensors_of(made):
            self._made[tensor.untyped_storage().data_ptr()] = tensor
        return made

    def _found(self, given: Iterable[Any], what: str) -> None:
        """Note what a call with these arguments does; the first tensor among them is named."""
        names = (self._name(value) for value in given if isinstance(value, Tensor))
        self.findings.append((next(names, ""), what))

    def _name(self, tensor: Tensor) -> str:
        """Return the registered name; "made" if the step made it, "empty", or an empty string."""
        name = self._addresses.name(tensor.data_ptr()) if tensor.numel() else "empty"
        if name:
            return name
        return "made" if tensor.untyped_storage().data_ptr() in self._made else ""

    def _word(self, func: Any, value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        name = self._name(value)
        if not name:
            name = "unregistered"
            self.findings.append((name, f"{func} reads memory that is not registered"))
        if value.device.type != self._device.type and value.dim():
            self.findings.append((name, f"{func} reads host memory"))
        return f"{name}[{tuple(value.shape)}, {value.stride()}, {value.dtype}]"


def first_divergence(first: Iterable[TraceLine], second: Iterable[TraceLine]) -> Iterator[Finding]:
    """Yield the first line in which two recordings differ."""
    for one, other in zip(
        [*first, TraceLine("the end")], [*second, TraceLine("the end")], strict=False
    ):
        if one.text != other.text:
            yield _name_in(one), f"{one.text[:160]} in one step, {other.text[:160]} in another"
            return


def stray_addresses(
    lines: Iterable[TraceLine], registry: Registry, memory: Iterable[tuple[int, int]]
) -> Iterator[Finding]:
    """Yield addresses that are neither registered nor a graph's own, and reads of host memory."""
    addresses, spans = Addresses(registry), list(memory)
    for line in lines:
        if line.reads_host:
            yield "unregistered", f"{line.text[:160]} reads host memory"
        for address in line.addresses:
            if not addresses.name(address) and not any(a <= address < b for a, b in spans):
                yield "unregistered", f"{line.text[:160]} uses unregistered address {address:#x}"


def _name_in(line: TraceLine) -> str:
    """Return the first registered tensor among an operator's arguments."""
    for word in line.text.split(" ")[1:]:
        name = word.split("[")[0]
        if "[" in word and name not in ("made", "empty", "unregistered"):
            return name
    return ""
