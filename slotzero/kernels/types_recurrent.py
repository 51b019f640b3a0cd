"""Types of the recurrent kernels: the shape of a mixer, its states, and their trail.

A request's state row is its slot. State 0 belongs to no request, holds zeros and is never written.
The state from which a row of a step begins follows from the row's start, see `begin` in
torch_recurrent.py: a text begins with zeros, whatever an earlier request has left in the table, and
a row that starts at a snapshot begins from the snapshot. A snapshot that the request took itself
equals its state, so no flag has to say whether it came from the cache.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import Tensor

from slotzero.kernels.types import Rows, Tokens


@dataclass(frozen=True)
class Scan:
    """The shape of a recurrent mixer: a short convolution, and a state that every token updates.

    A mixer of kind `conv` has the convolution only, between gates: its channels are heads of size
    1, and it has no groups.
    """

    kind: Literal["mamba", "delta", "kda", "conv"]
    """kda: a delta rule in which each dimension of a key decays by its own gate."""
    num_heads: int
    head_dim: int  # size of a head's values
    num_groups: int
    """Number of groups of B and C, or of keys and queries. Each group serves num_heads / num_groups
    consecutive heads."""
    state_size: int  # size of B and C, or of a key
    conv_width: int
    dt_limit: tuple[float, float] = (0.0, math.inf)  # mamba only
    interval: int = 0
    """Take a snapshot after every `interval` tokens of a text; 0: take none."""

    @property
    def is_delta(self) -> bool:
        return self.kind in ("delta", "kda")

    @property
    def num_gates(self) -> int:
        """Number of gates of a token, from which its decays are computed."""
        return self.num_heads * (self.state_size if self.kind == "kda" else 1)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of a token's inputs: x, B and C of mamba; q, k and v of a delta rule."""
        keys = self.num_groups * self.state_size
        if self.is_delta:
            return keys, keys, self.inner_size
        return self.inner_size, keys, keys

    @property
    def channels(self) -> int:
        return sum(self.sizes)

    @property
    def conv_shape(self) -> tuple[int, int]:
        return self.channels, self.conv_width - 1

    @property
    def scan_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.state_size

    @property
    def has_scan(self) -> bool:
        return self.kind != "conv"

    def every(self, interval: int) -> "Scan":
        return replace(self, interval=interval)


class States(NamedTuple):
    """States of one layer; stacked, of all layers, with an axis of layers before the others."""

    conv: Tensor  # [slots + 1, channels, conv_width - 1]: the last inputs, the newest last
    scan: Tensor | None  # [slots + 1, heads, head_dim, state_size]; None: the mixer has no scan
    conv_kept: Tensor | None = None  # [snapshots + 1, channels, conv_width - 1]
    scan_kept: Tensor | None = None  # [snapshots + 1, heads, head_dim, state_size]
    rows: Tensor | None = None
    """[slots + 1, max_len / interval] int32, shared by all layers: the row of each snapshot of a
    slot; 0: there is none, and none is taken."""


class Trail(NamedTuple):
    """States after each token of rows of W tokens; one of them will become the state of the slot.

    The shapes are those of one layer; stacked, the axis of layers comes after W. Tokens of slot 0
    leave zeros.
    """

    conv: Tensor  # [R, W, channels, conv_width - 1]
    scan: Tensor | None  # [R, W, heads, head_dim, state_size]


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
    dt_bias: Tensor  # kda: [heads * state_size]
    d: Tensor | None  # mamba only
