"""The slow reference of every kernel, in plain torch: what the fast ones are tested against.

It serves too, slowly, where a machine has no C++ compiler.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.composed import ComposedKernels
from slotzero.sampling import reference
from slotzero.sampling.tables import Sampled, SamplingTables


class ReferenceKernels(ComposedKernels):
    name = "reference"

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features, in_features)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        return F.linear(x, weight, bias)

    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(tokens, weight)

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
    ) -> None:
        page_size = kv_pages.shape[2]
        pages = page_table[slots, positions // page_size]
        offsets = positions % page_size
        real = slots > 0  # a data-dependent shape: this reference is for eager use only
        kv_pages[0, pages[real], offsets[real]] = k[real]
        kv_pages[1, pages[real], offsets[real]] = v[real]

    def attend(
        self,
        q: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        # One token at a time keeps memory small; the host read is why this is for eager use only.
        parts = [
            self._attend_one(q[t], kv_pages, page_table[slots[t]], int(positions[t]), scale)
            if slots[t] > 0
            else torch.zeros_like(q[t])
            for t in range(len(q))
        ]
        return torch.stack(parts)

    def _attend_one(
        self, q: Tensor, kv_pages: Tensor, pages: Tensor, position: int, scale: float
    ) -> Tensor:
        """q [heads, head_dim] over positions [0, position] of the slot with these pages"""
        used = pages[: position // kv_pages.shape[2] + 1]
        group = q.shape[0] // kv_pages.shape[3]
        k, v = (
            part[used].flatten(0, 1)[: position + 1].repeat_interleave(group, dim=1)
            for part in kv_pages.unbind(0)
        )  # [context, heads, head_dim]
        weights = (torch.einsum("hd,chd->hc", q, k).float() * scale).softmax(-1).to(v.dtype)
        return torch.einsum("hc,chd->hd", weights, v)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        chosen = reference.sample(logits.float(), slots, positions, tables)
        for target, values in zip(out, chosen, strict=True):
            target.copy_(values)
