"""What kernels speak of in recurrent layers: the shape of a mixer, its states, and their trail.

A request's state row is its slot; state 0 is nobody's, holds zeros and is never written. Where a
row of a step begins is derived from its start, see `begin` in torch_recurrent.py: a text begins
with zeros, whatever the table holds of an earlier owner, and a row that starts where a snapshot
stands begins from the snapshot. One that the request took itself holds what its state does, so
nothing has to say whether it came from the cache.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor

from slotzero.kernels.types import Rows, Tokens


@dataclass(frozen=True)
class Scan:
    """The shape of a recurrent mixer: a short convolution, and a state that every token changes."""

    kind: Literal["mamba", "delta"]
    num_heads: int
    head_dim: int  # of values
    num_groups: int
    """Of B and C, or of keys and queries; each is for as many heads, one after another."""
    state_size: int  # of B and C, or of a key
    conv_width: int
    dt_limit: tuple[float, float] = (0.0, math.inf)  # of mamba
    interval: int = 0
    """A snapshot is taken after every so many tokens of a text; 0: none is."""

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of what a token brings, in order: x, B and C of mamba; q, k and v of a delta rule."""
        keys = self.num_groups * self.state_size
        if self.kind == "mamba":
            return self.inner_size, keys, keys
        return keys, keys, self.inner_size

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.channels, self.conv_width - 1

    @property
    def scan_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.state_size

    def every(self, interval: int) -> "Scan":
        return replace(self, interval=interval)


class States(NamedTuple):
    """Of one layer, or stacked: of all of them, with an axis of layers before the others."""

    conv: Tensor  # [slots + 1, channels, conv_width - 1]: the last inputs, the newest last
    scan: Tensor  # [slots + 1, heads, head_dim, state_size]
    conv_kept: Tensor | None = None  # [snapshots + 1, channels, conv_width - 1]
    scan_kept: Tensor | None = None  # [snapshots + 1, heads, head_dim, state_size]
    rows: Tensor | None = None
    """[slots + 1, max_len / interval] int32, of all layers: where each snapshot of a slot stands;
    0: it has none, and takes none."""


class Trail(NamedTuple):
    """States after each token of rows of W tokens: one of them is to become the slot's.

    Of one layer; stacked, layers come after W. Tokens of slot 0 leave zeros.
    """

    conv: Tensor  # [R, W, channels, conv_width - 1]
    scan: Tensor  # [R, W, heads, head_dim, state_size]


class RecurrentStep(NamedTuple):
    """The tokens of a step and the states that they read and write.

    Without rows every token is a row of its own. With a trail, the rows have W tokens each, states
    and snapshots are left alone, and `commit_trail` updates them afterwards.
    """

    tokens: Tokens
    rows: Rows | None
    states: States
    trail: Trail | None = None


class ScanWeights(NamedTuple):
    """Weights of a scan, [heads] float32 each."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor | None  # of mamba
