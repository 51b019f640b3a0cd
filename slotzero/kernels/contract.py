"""The contract of a kernel set: what a step needs done, by whichever kernels the device has.

A layer is five calls: linear, attention, linear_add_norm, linear_gated, linear_add_norm. All are
functions of their arguments. A token is (slot, position); kernels read pages through the slot's
row of the page table, drop every write of slot 0 and give slot 0 zeros. What each call means is
written down in composed.py, in plain torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.sampling.tables import Sampled, SamplingTables


class Tokens(NamedTuple):
    """The tokens of a step, [T] each; padding is slot 0 at position 0."""

    slots: Tensor
    positions: Tensor


class Rows(NamedTuple):
    """The rows of a step, [R] each: row r is tokens [ends[r] - counts[r], ends[r])."""

    slots: Tensor
    starts: Tensor  # the position of its first token
    counts: Tensor  # 0 for padding
    ends: Tensor


class Normed(NamedTuple):
    """Rows under RMSNorm: with the norm's weight applied, and the scale too unless it is late."""

    x: Tensor  # [rows, size]
    squares: Tensor | None
    """Late: [parts, rows]; the row is still to be divided by the root of their sum / size + eps."""

    def select(self, rows: Tensor) -> "Normed":
        return Normed(self.x[rows], None if self.squares is None else self.squares[:, rows])


class Opened(NamedTuple):
    """What the first layer begins with, for each token."""

    residual: Tensor
    normed: Normed
    cos: Tensor  # [T, 1, head_dim / 2] float32
    sin: Tensor


Plan = tuple[Tensor, ...]


@dataclass(frozen=True)
class Heads:
    """The shape of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    scale: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class Kernels(ABC):
    name: str

    @abstractmethod
    def prepare(self, rehearse: Callable[[], None]) -> None:
        """What `rehearse` runs will run again, and should not wait for a compiler then. It may be
        run now, over empty steps, and compute nonsense."""

    @abstractmethod
    def refuse(self, heads: Heads) -> None:
        """Raises UnsupportedModelError where no kernel of this set can attend in this shape."""

    @abstractmethod
    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape in which a weight [out_features, in_features] is stored."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """[..., out_features, in_features] -> [..., *packed_shape]"""

    @abstractmethod
    def locate(
        self, slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
    ) -> None:
        """Of a step with one token a row: each token's slot, its position, which is the length of
        its slot, and the length after it."""

    @abstractmethod
    def plan(self, tokens: Tokens, rows: Rows | None, heads: Heads) -> Plan:
        """What `attention` needs to know of a step, once for all layers.

        Without rows, every token is a row of its own: a decode step.
        """

    @abstractmethod
    def open(
        self,
        tokens: Tokens,
        table: Tensor,  # [slots + 1, max_len] token ids by position
        embedding: Tensor,  # packed [vocab, hidden]
        norm: Tensor,
        eps: float,
        frequency: Tensor,  # [head_dim / 2], or [T, head_dim / 2] where tokens differ
        factor: float,  # of cos and sin
    ) -> Opened:
        """Looks up and embeds every token, norms it, and finds its rotary angles."""

    @abstractmethod
    def linear(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
    ) -> Tensor:
        """x [rows, in_features] times a packed weight -> [rows, out_features]"""

    @abstractmethod
    def logits(self, x: Normed, eps: float, weight: Tensor, slots: Tensor, out: Tensor) -> None:
        """x [rows, in_features] times a packed weight, into out; zeros for rows of slot 0"""

    @abstractmethod
    def linear_gated(
        self, x: Normed, eps: float, weight: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        """x times a packed weight of gates and then values -> silu(gate) * value"""

    @abstractmethod
    def linear_add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        """residual + x times a packed weight, which may be written over `residual`, and its
        RMSNorm."""

    @abstractmethod
    def attention(
        self,
        joined: Tensor,  # [T, (heads + 2 kv_heads) * head_dim]: q, k and v of each token
        q_norm: Tensor | None,  # [head_dim]
        k_norm: Tensor | None,
        cos: Tensor,  # [T, 1, head_dim / 2] float32
        sin: Tensor,
        kv_pages: Tensor,  # [2, pages, page_size, kv_heads, head_dim], keys then values
        page_table: Tensor,  # [slots + 1, pages_per_slot]
        plan: Plan,
        heads: Heads,
    ) -> Tensor:
        """Norms and rotates q and k, stores k and v at each token's position, and attends to
        positions [0, its own] of its slot -> [T, heads * head_dim]. Slot 0 stores nothing and
        gets zeros."""

    @abstractmethod
    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        """The next token of each row; see sampling/reference.py for its meaning."""

    @abstractmethod
    def advance(
        self,
        slots: Tensor,
        new_length: Tensor,
        target: Tensor,
        length: Tensor,
        tokens: Tensor,
        sampled: Tensor,
    ) -> None:
        """Closes the loop: each slot's length becomes new_length, and where that has reached the
        target, the sampled token is written there; elsewhere it becomes 0."""


def kernels_for(device: torch.device) -> Kernels:
    """The fastest set that this device can run; the reference where there is no other."""
    if device.type == "cuda":
        from slotzero.kernels.triton.kernels import TritonKernels

        return TritonKernels()
    from slotzero.kernels.cpu import build

    if build.compiler() is None:
        from slotzero.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    from slotzero.kernels.cpu.kernels import CpuKernels

    return CpuKernels()
