"""A process group over which a trainer broadcasts new weights.

The trainer is rank 0 and hosts the store; engines are the ranks after it. The group is the one that
`torch.distributed` makes for a name beside the default group, which trainers build for SGLang:
gloo on a CPU, NCCL on GPUs. This module does not know what tensors mean.

The rule: both sides broadcast the same tensors in the same order, or, packed, chunks of bytes that
each end with the tensor that fills them.

On a GPU a group has a stream of its own. All threads share the default stream, on which steps run:
if it waited for a broadcast, so would they.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store

from slotzero.errors import WeightUpdateError

TIMEOUT = timedelta(seconds=300)


class Announced(NamedTuple):
    """A tensor that the trainer will send."""

    name: str
    dtype: str
    """Such as "bfloat16" or "torch.bfloat16"."""
    shape: Sequence[int]


@final
class UpdateGroup:
    def __init__(
        self, name: str, address: tuple[str, int], rank: int, size: int, device: torch.device
    ) -> None:
        """Join the group, and wait for its other ranks."""
        self._name, self._device = name, device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        host, port = address
        try:
            store = distributed.TCPStore(  # type: ignore[attr-defined]
                host, port, size, is_master=False, timeout=TIMEOUT
            )
            self._backend = _backend(name, store, rank, size, device)
        except (RuntimeError, ValueError) as error:
            raise WeightUpdateError(
                f"group {name!r} at {host}:{port}: rank {rank} of {size} cannot join it: {error}"
            ) from error

    def receive(
        self, announced: Sequence[Announced], chunk_bytes: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive tensors one by one, or, with `chunk_bytes`, packed in chunks of this size."""
        empty = [
            torch.empty(tuple(one.shape), dtype=_dtype(one), device=self._device)
            for one in announced
        ]
        with self._beside_steps():
            for chunk in (
                [[tensor] for tensor in empty]
                if chunk_bytes is None
                else chunks(empty, chunk_bytes)
            ):
                self._receive_chunk(chunk)
        yield from zip((one.name for one in announced), empty, strict=True)

    @contextmanager
    def _beside_steps(self) -> Iterator[None]:
        """Use the group's stream, and wait for it at the end."""
        if self._stream is None:
            yield
            return
        # earlier steps may still use the memory into which tensors are received
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _receive_chunk(self, tensors: Sequence[Tensor]) -> None:
        try:
            if len(tensors) == 1:
                self._broadcast(tensors[0])
                return
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            packed = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._broadcast(packed)
        except RuntimeError as error:
            raise WeightUpdateError(
                f"group {self._name!r}: a broadcast failed: {error}; make a new group"
            ) from error
        start = 0
        for tensor in tensors:
            tensor.view(-1).view(torch.uint8).copy_(packed[start : start + tensor.nbytes])
            start += tensor.nbytes

    def _broadcast(self, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._backend.broadcast([tensor], options).wait()


def chunks(tensors: Sequence[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """Cut a sequence of tensors into chunks, each of which ends with the tensor that exceeds the
    size."""
    chunk: list[Tensor] = []
    for tensor in tensors:
        chunk.append(tensor)
        if sum(one.nbytes for one in chunk) > num_bytes:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _backend(name: str, store: Store, rank: int, size: int, device: torch.device) -> Any:
    """Build a backend by itself, not within this process's default group. The prefixes are those of
    a group that `torch.distributed` builds."""
    prefixed = PrefixStore(f"{name}/", PrefixStore(name, store))
    prefixed = PrefixStore(f"{device.type}/", prefixed)
    if device.type == "cpu":
        return distributed.ProcessGroupGloo(prefixed, rank, size, TIMEOUT)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return distributed.ProcessGroupNCCL(prefixed, rank, size, options)


def _dtype(announced: Announced) -> torch.dtype:
    dtype = getattr(torch, announced.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WeightUpdateError(f"tensor {announced.name}: {announced.dtype!r} is not a dtype")
    return dtype
