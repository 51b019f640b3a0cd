"""The declaration of a function that another engine has captured: its buffers, its sizes, its code.

A step of such an engine is: the host writes a batch to static buffers, which may be larger than the
batch, and replays the graph of the next captured size. This module knows tensors and callables, not
how they are checked. The rule: the captured function touches no tensor that is not declared, and
every padding value comes with the reason for which it is harmless.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from slotzero.errors import ContractError
from slotzero.graph.ladder import Ladder

Request = TypeVar("Request")
"""One row of a batch, in whatever form the engine has it; checks only hand it on."""


@dataclass(frozen=True)
class Input:
    """A static buffer that the host writes before every replay, with the rows of a batch first."""

    name: str
    tensor: Tensor
    pad: float | None
    """What entries of padded rows hold, up to the captured size; None: they are not rewritten, and
    keep what an earlier batch left there."""
    reason: str
    """Why that is harmless."""
    width: int = 1
    """Entries of a row on the first axis."""


@dataclass(frozen=True)
class State(Generic[Request]):
    """Memory that outlives a step, such as a KV cache. Its first axis is what requests own: blocks,
    slots or tokens (pass a view: `k_cache.flatten(0, 1)`, `kv.movedim(2, 0)`)."""

    name: str
    tensor: Tensor
    reads: Callable[[Request], Iterable[int]]
    """Indices whose content a step with this request needs; none that it writes first."""
    writes: Callable[[Request], Iterable[int]]
    """Indices that a step with this request may change."""
    null: tuple[int, ...] = ()
    """Indices that no request owns and padded rows may write, such as vLLM's null block."""
    poison: float | None = None
    """What unowned memory is filled with; None: NaN, or for integers what another request holds."""


@dataclass(frozen=True)
class Workspace:
    """Scratch memory, which every replay writes before it reads."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Output:
    """A buffer that a replay writes and the host reads, with the rows of the batch first."""

    name: str
    tensor: Tensor
    width: int = 1
    """Entries of a row on the first axis."""
    chosen_from: str = ""
    """The output that it was chosen from, as a token is from logits: where that differs by
    rounding, this one is not compared."""


@dataclass(frozen=True)
class Constant:
    """Memory that no step changes, such as a weight."""

    name: str
    tensor: Tensor


Declared = Input | State[Any] | Workspace | Output | Constant


def constants_of(module: torch.nn.Module, prefix: str = "") -> list[Constant]:
    """Declare the parameters and buffers of a module."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [Constant(prefix + name, tensor.detach()) for name, tensor in named.items()]


@dataclass(frozen=True)
class CapturedStep(Generic[Request]):
    name: str
    sizes: Sequence[int]
    """The captured batch sizes, ascending."""
    tensors: Sequence[Declared]
    stage: Callable[[Sequence[Request], int], object]
    """The engine's own code that writes a batch to the inputs, for a replay of this size."""
    step: Callable[[int], object]
    """The function that was captured, run eagerly over the first rows of the same buffers."""
    replay: Callable[[int], object] | Mapping[int, "torch.cuda.CUDAGraph"] | None = None
    """Replays what was captured: a callable, or CUDA graphs by size. None: `step` is captured here,
    as CUDA graphs or, on a CPU, as lists of operators."""

    def __post_init__(self) -> None:
        largest = Ladder(tuple(self.sizes)).maximum
        names = [one.name for one in self.tensors]
        outputs = [one.name for one in self.of_kind(Output)]
        for one in self.tensors:
            if names.count(one.name) > 1:
                raise _broken(one, "is declared twice")
            if one.tensor.device.type != self.device.type:
                raise _broken(one, f"is on {one.tensor.device}, others are on {self.device}")
            if isinstance(one, Input) and not one.reason:
                raise _broken(one, "needs the reason why its padding is harmless")
            if isinstance(one, Input | Output) and len(one.tensor) < largest * one.width:
                room = f"{len(one.tensor)} entries, size {largest} needs {largest * one.width}"
                raise _broken(one, f"is too short: {room}")
            if isinstance(one, Output) and one.chosen_from not in ("", *outputs):
                raise _broken(one, f"is chosen from {one.chosen_from!r}, which is no output")
        if not any(isinstance(one, Input) for one in self.tensors):
            raise ContractError(f"captured step {self.name!r} declares no Input")
        if isinstance(self.replay, Mapping):
            missing = [size for size in self.sizes if size not in self.replay]
            if missing:
                raise ContractError(
                    f"captured step {self.name!r} has no graph of size {missing[0]}"
                )

    @property
    def device(self) -> torch.device:
        return self.tensors[0].tensor.device

    def key(self, size: int) -> str:
        return f"{self.name}[{size}]"

    def of_kind(self, *kinds: type) -> list[Any]:
        return [one for one in self.tensors if isinstance(one, kinds)]


def _broken(one: Declared, why: str) -> ContractError:
    kind = type(one).__name__.lower()
    return ContractError(f"{kind} {one.name!r} {why}", tensor=one.name)
