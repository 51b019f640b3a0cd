"""The decoder skeleton: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are this, told apart by data.

It maps tokens that carry (slot, position) to hidden states. It does not know requests, batches or
sampling, and allocates nothing that outlives a step.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.models.config import ModelConfig
from slotzero.models.rope import angles, rotate
from slotzero.models.weights import DecoderWeights


class Tokens(NamedTuple):
    """The tokens of a step, [T] each; padding is slot 0 at position 0."""

    ids: Tensor
    slots: Tensor
    positions: Tensor
    prompt_len: Tensor


class KvPages(NamedTuple):
    pages: Tensor  # [layers, 2, pages, page_size, kv_heads, head_dim]
    page_table: Tensor  # [slots + 1, pages_per_slot]


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, frequency: Tensor, kernels: Kernels
    ) -> None:
        self.config = config
        self._weights = weights
        self._frequency = frequency
        self._kernels = kernels
        self._layers = [[getattr(w, f) for f in w.__dataclass_fields__] for w in weights.layers]

    def forward(self, tokens: Tokens, kv: KvPages, pieces: Pieces) -> Tensor:
        """-> [T, hidden], before the final norm; KV of every real token is stored on the way."""
        hidden = self._kernels.embed(tokens.ids, self._weights.embedding)
        cos, sin = angles(self.config.rope, self._frequency, tokens.positions, tokens.prompt_len)
        for pages, weights in zip(kv.pages.unbind(0), self._layers, strict=True):
            hidden = pieces(
                self._layer,
                hidden, cos, sin, tokens.slots, tokens.positions, kv.page_table, pages,
                *weights,
            )  # fmt: skip
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] in float32"""
        normed = rms_norm(hidden, self._weights.final_norm, self.config.norm_eps)
        vocab = self.config.vocab_size
        return self._kernels.linear(normed, self._weights.head, None, vocab).float()

    def _layer(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        positions: Tensor,
        page_table: Tensor,
        kv_pages: Tensor,
        input_norm: Tensor,
        qkv: Tensor,
        qkv_bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        out: Tensor,
        out_bias: Tensor | None,
        post_norm: Tensor,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
    ) -> Tensor:
        c, linear = self.config, self._kernels.linear
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        x = rms_norm(hidden, input_norm, c.norm_eps)
        joined = linear(x, qkv, qkv_bias, q_size + 2 * kv_size)
        q = joined[:, :q_size].view(-1, c.num_heads, c.head_dim)
        k = joined[:, q_size : q_size + kv_size].view(-1, c.num_kv_heads, c.head_dim)
        v = joined[:, q_size + kv_size :].view(-1, c.num_kv_heads, c.head_dim)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, c.norm_eps), rms_norm(k, k_norm, c.norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self._kernels.store_kv(k, v.contiguous(), kv_pages, page_table, slots, positions)
        attended = self._kernels.attend(q, kv_pages, page_table, slots, positions, c.head_dim**-0.5)
        hidden = hidden + linear(attended.view(-1, q_size), out, out_bias, c.hidden_size)

        x = rms_norm(hidden, post_norm, c.norm_eps)
        gate, up = linear(x, gate_up, gate_up_bias, 2 * c.intermediate_size).chunk(2, -1)
        return hidden + linear(F.silu(gate) * up, down, down_bias, c.hidden_size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, rounded before the weight is applied, as the checkpoints were trained."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
