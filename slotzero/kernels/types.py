"""Types shared by all kernels: the tokens and rows of a step, weights, shapes, and draft trees."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slotzero.errors import ContractError
from slotzero.kernels.weights import LinearWeight


class Tokens(NamedTuple):
    """The tokens of a step, [T] each; padding is slot 0 at position 0."""

    slots: Tensor
    positions: Tensor


class Rows(NamedTuple):
    """The rows of a step, [R] each: row r is tokens [ends[r] - counts[r], ends[r])."""

    slots: Tensor
    starts: Tensor  # position of the row's first token
    counts: Tensor  # 0 for padding
    ends: Tensor
    span: int = 0  # tokens of every row, padding included; 0: rows are ragged and packed


class Float8Rows(NamedTuple):
    """Rows rounded to float8, each with one scale."""

    codes: Tensor  # [rows, size] float8
    scales: Tensor  # [1, rows] float32


class Normed(NamedTuple):
    """The input of a linear layer, after its RMSNorm if it has one. The norm's weight is applied;
    its scale may be deferred."""

    x: Tensor  # [rows, size]
    squares: Tensor | None = None
    """None: the scale is applied. Otherwise it is deferred: [parts, rows] sums of squares, and each
    row is still to be divided by sqrt(sum of its parts / size + eps)."""
    eps: float = 0.0
    float8: Float8Rows | None = None
    """The same rows in float8, if the previous kernel has rounded them, for linear layers whose
    format rounds its input by row; others use x."""

    def select(self, rows: Tensor) -> "Normed":
        squares = None if self.squares is None else self.squares[:, rows]
        return Normed(self.x[rows], squares, self.eps)


class ResidualNorms(NamedTuple):
    """RMSNorm weights around the addition to a residual; None: no norm there."""

    post: Tensor | None  # applied to the addend
    next: Tensor | None  # applied to the sum
    eps: float
    is_centred: bool = False
    """Subtract each row's mean first: LayerNorm without a bias."""


class PairNorms(NamedTuple):
    """RMSNorm weights of an embedding and of a hidden state; None: no norm."""

    embed: Tensor | None
    hidden: Tensor | None
    eps: float


class Angles(NamedTuple):
    """RoPE angles of each token."""

    cos: Tensor  # [T, 1, head_dim / 2] float32
    sin: Tensor


@dataclass(frozen=True)
class IndexShape:
    """The shape of an indexer (DeepSeek-V3.2): a token attends to the `top_k` keys that it scores
    best. The score of a key is the weighted sum over heads of relu(q k)."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True)
class MlaShape:
    """The shape of multi-head latent attention (MLA), in which all heads share one row per token.

    The row is stored as one KV head: `rope_dim` values under RoPE, then the latent. It is the key
    of every head once the head's query has been multiplied by up_k, and the latent is the value;
    each head's output is multiplied by up_v.
    """

    nope_dim: int  # part of each query head that is not rotated
    rope_dim: int
    v_head_dim: int  # output size of each head
    index: IndexShape | None = None
    """Sparse attention: the indexer that selects keys. Rows begin with the key of the indexer."""

    @property
    def index_dim(self) -> int:
        """Return the size of the indexer's part of a row."""
        return 0 if self.index is None else self.index.head_dim


@dataclass(frozen=True)
class Heads:
    """The shape of attention in one group of layers."""

    num_heads: int
    num_kv_heads: int  # fewer than num_heads: grouped-query attention (GQA)
    head_dim: int  # size of queries and keys; with MLA, of a stored row
    value_dim: int
    norm_eps: float
    scale: float
    window: int | None = None
    """Number of keys that a token sees, its own included; None: all of them."""
    is_chunked: bool = False
    """Chunked attention: the window begins at the last multiple of its length, so a token sees the
    keys of its chunk up to its own."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    norms_whole: bool = False
    """The norms of queries and keys cover all heads of a token at once, not each head."""
    norms_values: bool = False
    """Apply an RMSNorm without a weight to the values of each head too."""
    stores: bool = True
    """If False, the layer computes queries only and attends to KV that another layer has stored."""
    mla: MlaShape | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the sizes of q, k and v in a qkv row; with MLA, k is the stored row (without an
        index key) and v is 0."""
        if not self.stores:
            return self.num_heads * self.head_dim, 0, 0
        if self.mla is not None:
            q = self.num_heads * (self.mla.nope_dim + self.mla.rope_dim)
            return q, self.head_dim - self.mla.index_dim, 0
        kv = self.num_kv_heads
        return self.num_heads * self.head_dim, kv * self.head_dim, kv * self.value_dim

    @property
    def out_size(self) -> int:
        each = self.value_dim if self.mla is None else self.mla.v_head_dim
        return self.num_heads * each

    def first_key(self, position: int) -> int:
        """Return the first position that the token at this position sees."""
        if self.window is None:
            return 0
        if self.is_chunked:
            return position - position % self.window
        return max(0, position + 1 - self.window)

    @property
    def row_size(self) -> int:
        """Return the size that one KV head stores per token: a key, and the value at its end."""
        return self.head_dim if self.mla is not None else self.head_dim + self.value_dim


class PagedKv(NamedTuple):
    """The KV cache of one layer, or, with an axis of layers first, of all layers of a group."""

    pages: Tensor  # [pages, page_size, kv_heads, row_size]: each key followed by its value
    page_table: Tensor  # [slots + 1, pages_per_slot]
    scales: Tensor | None = None  # [2] float32, of keys and of values
    """None: pages hold numbers. Otherwise they hold codes of e4m3 as uint8; see float8_kv.py."""

    def of_layer(self, index: int) -> "PagedKv":
        scales = None if self.scales is None else self.scales[index]
        return PagedKv(self.pages[index], self.page_table, scales)


class QkNorms(NamedTuple):
    """RMSNorm weights of queries and keys, [head_dim] or [heads * head_dim]; None: no norm."""

    q: Tensor | None
    k: Tensor | None


class IndexInputs(NamedTuple):
    """Inputs of an indexer."""

    q: Tensor  # [T, heads * head_dim], before RoPE
    k: Tensor  # [T, head_dim], before norm and RoPE
    weights: Tensor  # [T, heads]
    norm: Tensor  # [head_dim], of the LayerNorm of k
    bias: Tensor  # [head_dim]


class MlaWeights(NamedTuple):
    k_norm: Tensor  # [latent]
    up_k: Tensor  # [heads, nope_dim, latent]
    up_v: Tensor  # [heads, v_head_dim, latent]


class Branches(NamedTuple):
    """Tokens that are nodes of draft trees behind the stored context of their slots, [T] each.

    `Tokens.positions` of such tokens are places: where a node is stored, one after another
    whatever its branch. A token at place p sees all keys before its base, and in [base, p] those
    whose bit is set in `seen`. A window reaches back from the token's position in its branch; it is
    longer than any branch. The values for slot 0 are arbitrary.
    """

    bases: Tensor  # int32: the place where the token's tree begins
    seen: Tensor  # int64: bit i: the key at place base + i is seen; the token's own bit is set
    positions: Tensor  # int32: the token's position in the text of its branch

    def check(self, tokens: Tokens, rows: Rows | None) -> None:
        if rows is None:
            raise ContractError("branches: a step without rows takes none; give its rows")
        dtypes = torch.int32, torch.int64, torch.int32
        for name, tensor, dtype in zip(self._fields, self, dtypes, strict=True):
            if tensor.dtype is not dtype or tensor.shape != tokens.slots.shape:
                raise ContractError(f"branches: {name} must be {dtype}, one of each token")


NO_BRANCHES = (None, None, None)


def standing(tokens: Tokens, branches: Branches | None) -> Tokens:
    """Return the tokens at their positions in the text, rather than where they are stored."""
    return tokens if branches is None else Tokens(tokens.slots, branches.positions)


Activation = Literal["silu", "gelu_tanh", "clamped_silu", "sigmoid", "relu"]
"""Activation of the gates. clamped_silu is gpt-oss's: (v + 1) g sigmoid(1.702 g), with g <= 7 and
|v| <= 7. An MLP without gates gates itself by relu, which squares positive values."""


@dataclass(frozen=True)
class Experts:
    """The shape of a mixture of experts (MoE), and how the router selects from it."""

    num_experts: int
    top_k: int
    inner_size: int
    activation: Activation
    scores: Literal["sigmoid", "softmax", "softmax_of_chosen"]
    """How router logits become scores."""
    is_corrected: bool = False
    """Add a learned correction per expert to the scores, for the selection only."""
    is_normed: bool = False
    """Divide the weights of the selected experts by their sum."""
    norm_eps: float = 1e-20  # added to the sum
    scales_input: bool = False
    """Multiply the input of a token's only expert by its weight, instead of the result."""
    factor: float = 1.0
    num_groups: int = 1
    """Number of expert groups. Experts are selected from the best `top_groups` groups only; a group
    is judged by the sum of its `scores_per_group` best scores."""
    top_groups: int = 1
    scores_per_group: int = 2
    num_shared: int = 0
    """Number of shared experts, after the routed ones: every token uses them with weight 1."""
    num_ranks: int = 1
    """Number of ranks; each holds an equal part of the routed experts, and all shared ones."""

    @property
    def num_all(self) -> int:
        return self.num_experts + self.num_shared

    @property
    def num_held(self) -> int:
        """Return the number of experts that each rank holds."""
        return self.num_experts // self.num_ranks + self.num_shared

    @property
    def num_chosen(self) -> int:
        return self.top_k + self.num_shared


class ExpertWeights(NamedTuple):
    router: LinearWeight  # [experts, hidden]
    correction: Tensor | None  # [experts] float32
    gate_up: LinearWeight  # [all, 2 * inner, hidden]: gates and then values
    down: LinearWeight  # [all, hidden, inner]
    factors: Tensor | None = None  # [experts]: scales the result of each expert


class Routed(NamedTuple):
    """Tokens and the experts that the router assigns to each."""

    rows: Tensor  # [T, hidden]
    weights: Tensor  # [T, num_chosen]: the routing weight of each chosen expert
    experts: Tensor  # [T, num_chosen] int32 or int64: its index; one past the last for none

    def scaled(self) -> "Routed":
        """Multiply each row, instead of its result, by the weight of its only expert."""
        rows = (self.rows * self.weights).to(self.rows.dtype)
        return self._replace(rows=rows, weights=torch.ones_like(self.weights))
