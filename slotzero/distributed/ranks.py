"""The ranks that compute one model together, and their collectives inside a step.

A collective is captured and replayed with the step, like any other operation. All ranks replay the
same steps in the same order, so all take part in every collective.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """One rank of a group: its index, the size of the group, and how the model is split."""

    rank: int = 0
    size: int = 1
    group: str = ""  # name of the process group in torch.distributed
    expert_parallel: bool = False
    """Expert parallelism: each rank holds whole experts instead of a slice of every expert."""
    dp_attention: bool = False
    """DP attention: each rank has its own requests and computes their attention alone; MLPs process
    the tokens of all ranks."""
    in_order: bool = False
    """Sums over ranks are added in the order of ranks, at every place of a tensor. A collective may
    add in another order at another place."""

    @property
    def is_distributed(self) -> bool:
        return self.size > 1

    @property
    def attention(self) -> "Ranks":
        """The ranks that share attention heads and the vocabulary."""
        return ALONE if self.dp_attention else self

    @property
    def num_dp_ranks(self) -> int:
        """Number of ranks that have their own requests."""
        return self.size if self.dp_attention else 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        if not self.is_distributed:
            return x
        if self.in_order:
            return _added(self.gather(x[None]))
        ops = torch.ops._c10d_functional
        total = ops.all_reduce(x.contiguous(), "sum", self.group)
        return cast("Tensor", ops.wait_tensor(total))

    def join(self, x: Tensor) -> Tensor:
        """Concatenate [rows, part] of every rank to [rows, size * part]."""
        parts = self.gather(x).view(self.size, len(x), -1)
        return parts.transpose(0, 1).flatten(1)

    def gather(self, x: Tensor) -> Tensor:
        """Gather [rows, ...] of every rank to [size * rows, ...]."""
        ops = torch.ops._c10d_functional
        gathered = ops.all_gather_into_tensor(x.contiguous(), self.size, self.group)
        return cast("Tensor", ops.wait_tensor(gathered))

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Sum [size * rows, ...] over all ranks, and return this rank's rows, [rows, ...]."""
        if self.in_order:
            return _added(self.exchange(x.view(self.size, -1, *x.shape[1:])))
        ops = torch.ops._c10d_functional
        part = ops.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.group)
        return cast("Tensor", ops.wait_tensor(part))

    def exchange(self, x: Tensor) -> Tensor:
        """Send x[i] to rank i, and return what each rank sent to this one: [size, ...]."""
        ops, even = torch.ops._c10d_functional, [1] * self.size
        exchanged = ops.all_to_all_single(x.contiguous(), even, even, self.group)
        return cast("Tensor", ops.wait_tensor(exchanged))

    def broadcast(self, x: Tensor) -> None:
        """Replace `x` on every rank by that of rank 0. Cannot be called inside a step."""
        if self.is_distributed:
            from torch import distributed

            distributed.broadcast(x.view(-1).view(torch.uint8), 0)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank. Cannot be called inside a step."""
        return not self.least(int(not flag))

    def least(self, number: int) -> int:
        """Return the minimum over all ranks. Cannot be called inside a step."""
        if not self.is_distributed:
            return number
        from torch import distributed

        minimum = torch.tensor(number)
        distributed.all_reduce(minimum, distributed.ReduceOp.MIN)
        return int(minimum)


ALONE = Ranks()


def _added(parts: Tensor) -> Tensor:
    """Add up parts [ranks, ...] in order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def norm_over(ranks: Ranks, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to rows that are split over all ranks; `x` [rows, part] is this rank's part."""
    wide = x.float()
    squares = ranks.sum(wide.square().sum(-1, keepdim=True))
    normed = wide * torch.rsqrt(squares / (ranks.size * x.shape[-1]) + eps)
    return normed.to(x.dtype) * weight
