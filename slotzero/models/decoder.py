"""The decoder skeleton: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are this, told apart by data.

It maps tokens that carry (slot, position) to hidden states. It does not know requests, batches or
sampling, and allocates nothing that outlives a step.
"""

from typing import NamedTuple

from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Heads, Kernels, Normed, Rows, Tokens
from slotzero.models.config import ModelConfig
from slotzero.models.rope import speeds
from slotzero.models.weights import DecoderWeights, LayerWeights

LAYER_WEIGHTS = [name for name in LayerWeights.__dataclass_fields__ if name != "input_norm"]


class Batch(NamedTuple):
    """What a step computes: its tokens, and where a row may hold many of them, its rows."""

    tokens: Tokens
    ids: Tensor  # [slots + 1, max_len], by position
    prompt_len: Tensor  # [slots + 1]
    rows: Rows | None


class KvPages(NamedTuple):
    pages: Tensor  # [layers, 2, pages, page_size, kv_heads, head_dim]
    page_table: Tensor  # [slots + 1, pages_per_slot]


def heads_of(config: ModelConfig) -> Heads:
    return Heads(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        scale=config.head_dim**-0.5,
    )


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, frequency: Tensor, kernels: Kernels
    ) -> None:
        self.config = config
        self._weights = weights
        self._frequency = frequency
        self._kernels = kernels
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._layers = [
            [*(getattr(layer, name) for name in LAYER_WEIGHTS), next_norm]
            for layer, next_norm in zip(weights.layers, norms, strict=True)
        ]
        self._heads = heads_of(config)

    def forward(self, batch: Batch, kv: KvPages, pieces: Pieces) -> Normed:
        """-> [T, hidden] under the final norm; KV of every real token is stored on the way."""
        kernels, rope, weights = self._kernels, self.config.rope, self._weights
        plan = kernels.plan(batch.tokens, batch.rows, self._heads)
        speed = speeds(rope, self._frequency, *batch.tokens, batch.prompt_len)
        residual, normed, cos, sin = kernels.open(
            batch.tokens, batch.ids, weights.embedding, weights.layers[0].input_norm,
            self.config.norm_eps, speed, rope.attention_factor,
        )  # fmt: skip
        for pages, layer in zip(kv.pages.unbind(0), self._layers, strict=True):
            residual, *parts = pieces(
                self._layer, residual, *normed, cos, sin, pages, kv.page_table, *layer, *plan
            )
            normed = Normed(*parts)
        return normed

    def logits(self, normed: Normed, slots: Tensor, out: Tensor) -> None:
        """[rows, hidden] -> [rows, vocab]; zeros for rows of slot 0"""
        self._kernels.logits(normed, self.config.norm_eps, self._weights.head, slots, out)

    def _layer(
        self,
        residual: Tensor,
        x: Tensor,
        squares: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
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
        next_norm: Tensor,
        *plan: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual, and it under this layer's norm -> the same under the next one's."""
        kernels, heads, eps = self._kernels, self._heads, self.config.norm_eps
        width = heads.q_size + 2 * heads.kv_size
        joined = kernels.linear(Normed(x, squares), eps, qkv, qkv_bias, width)
        attended = kernels.attention(
            joined, q_norm, k_norm, cos, sin, kv_pages, page_table, plan, heads
        )
        residual, normed = kernels.linear_add_norm(
            attended, out, out_bias, residual, post_norm, eps
        )
        gated = kernels.linear_gated(
            normed, eps, gate_up, gate_up_bias, self.config.intermediate_size
        )
        residual, normed = kernels.linear_add_norm(gated, down, down_bias, residual, next_norm, eps)
        return residual, *normed
