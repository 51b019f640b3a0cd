"""CUDA's kernel set: Triton where pages are involved, torch's own kernels for the rest.

Nothing here reads device memory from the host, so a whole step can be captured.
"""

from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.contract import Kernels
from slotzero.kernels.triton import paged
from slotzero.sampling import reference
from slotzero.sampling.tables import Sampled, SamplingTables


class TritonKernels(Kernels):
    name = "triton"

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
        paged.store_kv(k.contiguous(), v, kv_pages, page_table, slots, positions)

    def attend(
        self,
        q: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        return paged.attend(q.contiguous(), kv_pages, page_table, slots, positions, scale)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables
    ) -> Sampled:
        return reference.sample(logits, slots, positions, tables)
