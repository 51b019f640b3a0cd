"""The contract of a block, and what blocks share when a model is split over ranks.

A block is a frozen dataclass: its config. It knows the parameters that it reads from a checkpoint,
how a rank's part of it looks, and how it computes. Blocks that compare equal are compiled once and
their weights are stacked.
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
    name: str
    """Prefix of its weights in the registry."""
    weights_type: type[Any]
    """NamedTuple whose fields are the keys of `params`."""

    @abstractmethod
    def params(self) -> Params:
        """Return the parameters by field of the weights; names are below the layer's prefix."""

    def unread(self) -> tuple[str, ...]:
        """Return tensors of a layer that some exporters store although nothing reads them."""
        return ()

    @abstractmethod
    def shard(self, ranks: Ranks) -> Self:
        """Return one rank's part: a smaller block of the same kind."""


@dataclass(frozen=True)
class BlockContext:
    """The kernels and ranks that a block computes with."""

    kernels: Kernels
    ranks: Ranks = ALONE

    def linear_add_norm(
        self,
        ranks: Ranks,  # each holds some input features of the weight, and of x
        x: Tensor,
        weight: LinearWeight,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        """Add x times a row-parallel weight to the residual."""
        if not ranks.is_distributed:
            return self.kernels.linear_add_norm(x, weight, residual, norms)
        part = self.kernels.linear(Normed(x), weight)
        return self.kernels.add_norm(sum_over(ranks, part), residual, norms)

    def gather_rows(self, x: Normed) -> Normed:
        """With DP attention each rank has its own rows: return those of all ranks."""
        if not self.ranks.dp_attention:
            return x
        return Normed(self.ranks.gather(self.kernels.apply_norm(x)))


def sum_over(ranks: Ranks, part: Tensor) -> Tensor:
    """Sum over ranks. With DP attention `part` has the rows of all ranks; return this rank's."""
    return ranks.scatter_sum(part) if ranks.dp_attention else ranks.sum(part)


def split_evenly(number: int, field: str, size: int) -> int:
    if number % size:
        raise ConfigError(
            f"{FLAG}={size}: {field}={number} cannot be split evenly; choose a divisor of it"
        )
    return number // size
