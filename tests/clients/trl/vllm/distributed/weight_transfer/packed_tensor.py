"""Tensors packed in chunks of bytes, as vLLM packs them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: Any,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
) -> None:
    parts: list[Tensor] = []
    for item in iterator:
        parts.append(post_iter_func(item).detach().contiguous().view(-1).view(torch.uint8))
        if sum(map(len, parts)) > CHUNK_BYTES:
            group.broadcast(torch.cat(parts))
            parts = []
    if parts:
        group.broadcast(torch.cat(parts))
