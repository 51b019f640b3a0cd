"""The linear layers of a kernel set, with the embedding, norms and activations around them."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slotzero.kernels.quantized import QuantizedRows, pack_rows
from slotzero.kernels.types import Activation, Normed, PairNorms, ResidualNorms, Tokens
from slotzero.kernels.weights import LinearWeight, WeightFormat


class LinearKernels(ABC):
    @abstractmethod
    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the shape in which a weight [out_features, in_features] is stored."""

    @abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """Pack a weight [..., out_features, in_features] -> [..., *packed_shape]."""

    def quantized_shapes(
        self, out_features: int, in_features: int, format: WeightFormat
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors of a QuantizedWeight, by field."""
        return format.shapes(out_features, in_features)

    def pack_quantized(self, rows: QuantizedRows, format: WeightFormat) -> dict[str, Tensor]:
        """Pack a quantised weight [..., out_features, in_features] into these tensors."""
        return pack_rows(rows, format)

    @abstractmethod
    def embed(
        self,
        tokens: Tokens,
        table: Tensor,  # [slots + 1, max_len]: token ids by position
        embedding: LinearWeight,  # [vocab, hidden]
        scale: float,  # multiplies the embeddings; rounded to their dtype
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        """Look up and embed every token -> the residual [T, hidden], and its RMSNorm."""

    @abstractmethod
    def embed_ids(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        """Return rows of a weight [vocab, hidden]: ids [T] -> [T, hidden]."""

    @abstractmethod
    def embed_pair(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: LinearWeight,
        hidden: Tensor,  # [T, hidden]
        norms: PairNorms,
    ) -> Tensor:
        """Concatenate each token's embedding and hidden state, both normed -> [T, 2 * hidden]."""

    @abstractmethod
    def norm(
        self, x: Tensor, weight: Tensor | None, eps: float, is_centred: bool = False
    ) -> Normed:
        """Apply RMSNorm to x [rows, size], which may be a slice of wider rows; without a weight,
        return x itself. See ResidualNorms.is_centred."""

    @abstractmethod
    def apply_norm(self, x: Normed) -> Tensor:
        """Return the normed rows, with a deferred scale applied."""

    @abstractmethod
    def linear(self, x: Normed, weight: LinearWeight) -> Tensor:
        """Multiply x [rows, in_features] by the weight -> [rows, out_features]."""

    @abstractmethod
    def linear_gated(self, x: Normed, weight: LinearWeight, activation: Activation) -> Normed:
        """Return `gate` of the result of `linear`, not normed; the weight has the features of the
        gates first, then those of the values."""

    @abstractmethod
    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        """Return activation(gates) * values, [rows, size] each; a row may expand one gate."""

    @abstractmethod
    def linear_add_norm(
        self, x: Normed, weight: LinearWeight, residual: Tensor, norms: ResidualNorms
    ) -> tuple[Tensor, Normed]:
        """Return `add_norm` of the result of `linear`."""

    @abstractmethod
    def add_norm(self, x: Tensor, residual: Tensor, norms: ResidualNorms) -> tuple[Tensor, Normed]:
        """Return residual + x, which may be written over `residual`, and its RMSNorm."""

    @abstractmethod
    def logits(
        self, x: Normed, weight: LinearWeight, slots: Tensor, softcap: float | None, out: Tensor
    ) -> None:
        """Write `linear` of x into out; zeros for rows of slot 0. The weight has no bias."""
