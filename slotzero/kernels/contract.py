"""The contract of a kernel set: what a step needs done, by whichever kernels the device has.

Everything here is a function of its arguments. A token is (slot, position); kernels read pages
through the slot's row of the page table, drop every write of slot 0 and give slot 0 zeros.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slotzero.sampling.tables import Sampled, SamplingTables


class Kernels(ABC):
    name: str

    @abstractmethod
    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape in which `linear` wants a weight [out_features, in_features]."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """[..., out_features, in_features] -> [..., *packed_shape]"""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x [rows, in_features], a packed weight -> [rows, out_features]"""

    @abstractmethod
    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of a packed weight [vocab, hidden]: tokens [T] -> [T, hidden]"""

    @abstractmethod
    def store_kv(
        self,
        k: Tensor,  # [T, kv_heads, head_dim]
        v: Tensor,
        kv_pages: Tensor,  # [2, pages, page_size, kv_heads, head_dim], keys then values
        page_table: Tensor,  # [slots + 1, pages_per_slot]
        slots: Tensor,  # [T]
        positions: Tensor,  # [T]
    ) -> None:
        """Writes k and v of every token at its position; tokens of slot 0 write nothing."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, head_dim]
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        """Each token attends to positions [0, its own] of its slot; slot 0 gets zeros."""

    @abstractmethod
    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables
    ) -> Sampled:
        """The next token of each row; see sampling/reference.py for its meaning."""


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
