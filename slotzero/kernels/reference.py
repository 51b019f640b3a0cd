"""The slow reference of every kernel, in plain torch: what the fast ones are tested against.

It serves too, where a machine has no C++ compiler. It gathers a slot's whole page row, so its
cost grows with the context limit rather than with the context.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.contract import Kernels
from slotzero.sampling import reference
from slotzero.sampling.tables import Sampled, SamplingTables


class ReferenceKernels(Kernels):
    name = "reference"

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features, in_features)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
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
        group = q.shape[1] // kv_pages.shape[3]
        rows = page_table[slots]  # [T, pages_per_slot]
        k = (
            kv_pages[0, rows].flatten(1, 2).repeat_interleave(group, dim=2)
        )  # [T, context, heads, D]
        v = kv_pages[1, rows].flatten(1, 2).repeat_interleave(group, dim=2)
        future = torch.arange(k.shape[1], device=q.device) > positions[:, None]
        scores = torch.einsum("thd,tchd->thc", q, k).float() * scale
        weights = scores.masked_fill(future[:, None], -torch.inf).softmax(-1).to(v.dtype)
        v = v.masked_fill(future[:, :, None, None], 0)  # 0 * NaN of an unwritten page is NaN
        out = torch.einsum("thc,tchd->thd", weights, v)
        return out.masked_fill((slots == 0)[:, None, None], 0)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables
    ) -> Sampled:
        return reference.sample(logits, slots, positions, tables)
