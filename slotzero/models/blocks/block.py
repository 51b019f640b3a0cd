"""The contract of a block, and functions that blocks share when a model is split over ranks.

A block is a frozen dataclass, which is its config. It knows its parameters in a checkpoint, how it
is split over ranks, and how to compute its result. Equal blocks are compiled once, and their
weights are stacked.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import ConfigError
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.weights import LinearWeight
from slotzero.models.param import Params

FLAG = "tensor_parallel_size"


class Block(ABC):
    """A mixer, an MLP or another part of a decoder layer."""

    name: str
    """Prefix of its weights in the registry."""
    weights_type: type[Any]
    """NamedTuple whose fields are the keys of `params`."""

    @abstractmethod
    def params(self) -> Params:
        """Return the parameters by field of the weights; names omit the layer's prefix."""

    def unread(self) -> tuple[str, ...]:
        """Return the tensors of a layer that some exporters store although nothing reads them."""
        return ()

    @abstractmethod
    def shard(self, ranks: Ranks) -> Self:
        """Return one rank's part of the block: a smaller block of the same kind."""


@dataclass(frozen=True)
class BlockContext:
    """The kernels and ranks that a block computes with."""

    kernels: Kernels
    ranks: Ranks = ALONE

    def linear_add_norm(
        self,
        ranks: Ranks,  # the ranks over which the input features of `weight` and `x` are split
        x: Normed,
        weight: LinearWeight,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        """Add the product of `x` and a row-parallel weight to the residual."""
        if not ranks.is_distributed:
            return self.kernels.linear_add_norm(x, weight, residual, norms)
        part = self.kernels.linear(x, weight)
        return self.kernels.add_norm(sum_over(ranks, part), residual, norms)

    def gather_rows(self, x: Normed) -> Normed:
        """Return the rows of all ranks. They differ between ranks only with DP attention."""
        if not self.ranks.dp_attention:
            return x
        return Normed(self.ranks.gather(self.kernels.apply_norm(x)))


def sum_over(ranks: Ranks, part: Tensor) -> Tensor:
    """Sum over ranks. With DP attention, sum the rows of all ranks and return this rank's rows."""
    return ranks.scatter_sum(part) if ranks.dp_attention else ranks.sum(part)


def split_evenly(number: int, field: str, size: int) -> int:
    """Return number / size; raise if it is not a whole number."""
    if number % size:
        raise ConfigError(
            f"{FLAG}={size}: {field}={number} cannot be split evenly; choose a divisor of {number}"
        )
    return number // size
