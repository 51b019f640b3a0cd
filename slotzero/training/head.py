"""The EAGLE-3 draft head as a module whose state_dict has the layout of heads on the hub.

One decoder layer reads the target's hidden states of three layers (`features`) and the token that
follows, and predicts the token after that one. The embedding and the output table are the target's;
the head contains neither, and does not know how it is trained.

The rule: `unroll` computes for every place what a chain of drafts begun there would compute, from
the same keys. Rows are named by where their chain began, so what a chain has in its KV is

    row p of pass s    position p + s, fed token p + s + 1, predicts token p + s + 2
    it sees            pass 0 at rows [0 : p + 1), and passes [1 : s + 1) at its own row p
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slotzero.errors import ConfigError

NUM_FEATURE_LAYERS = 3
Keys = list[tuple[Tensor, Tensor]]
"""Keys and values by pass, each [batch, heads, rows, head_dim]."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Configuration of a head, with the names of the hub's config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    draft_vocab_size: int
    """If equal to vocab_size, the head drafts every token."""
    max_position_embeddings: int
    feature_layers: tuple[int, int, int]
    """Layers of the target whose hidden states are concatenated in this order."""


@final
class EagleHead(nn.Module):
    d2t: Tensor | None

    def __init__(self, config: HeadConfig, d2t: Tensor | None = None) -> None:
        """`d2t`: by draft index, the target's token id minus the index; None: all tokens."""
        super().__init__()
        _check_draft_vocab(config, d2t)
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(NUM_FEATURE_LAYERS * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = _Norm(hidden, config.rms_norm_eps)
        self.register_buffer("d2t", d2t)

    @property
    def draft_ids(self) -> Tensor | None:
        """The target's token id by draft index; None if they are the same."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def unroll(
        self, embedding: Tensor, tokens: Tensor, features: Tensor, num_passes: int
    ) -> Iterator[Tensor]:
        """Return, for each pass, the input of the output table: [batch, rows, hidden].

        tokens are [batch, rows], features [batch, rows, 3 * hidden]. A row whose chain leaves the
        sequence gets an arbitrary token, and its output must not be used.
        """
        keys: Keys = []
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.fc(features.to(self.fc.weight.dtype))
        for s in range(num_passes):
            fed = F.embedding(tokens.roll(-s - 1, dims=1), embedding)
            hidden = self.midlayer(fed, hidden, positions + s, keys)
            yield self.norm(hidden)


def _check_draft_vocab(config: HeadConfig, d2t: Tensor | None) -> None:
    size = config.draft_vocab_size
    if d2t is None:
        if size != config.vocab_size:
            raise ConfigError(f"draft_vocab_size {size} needs d2t: give it, or all of vocab_size")
        return
    if d2t.dtype != torch.int64 or d2t.shape != (size,):
        raise ConfigError(f"d2t is int64 [{size}], got {d2t.dtype} {list(d2t.shape)}")
    ids = (d2t.cpu() + torch.arange(size)).tolist()
    bad = next((t for t in ids if not 0 <= t < config.vocab_size), None)
    if bad is not None:
        raise ConfigError(f"d2t: token id {bad} is not in the vocabulary of {config.vocab_size}")
    if len(set(ids)) != size:
        raise ConfigError("d2t maps two draft indices to one token id: make them distinct")


@final
class _Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = _Norm(hidden, eps)
        self.hidden_norm = _Norm(hidden, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(hidden, eps)
        self.mlp = _Mlp(hidden, config.intermediate_size)

    def forward(self, fed: Tensor, hidden: Tensor, positions: Tensor, keys: Keys) -> Tensor:
        both = torch.cat((self.input_layernorm(fed), self.hidden_norm(hidden)), dim=-1)
        hidden = hidden + self.self_attn(both, positions, keys)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


@final
class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self._head_dim = dim = config.head_dim
        self._group_size = config.num_attention_heads // config.num_key_value_heads
        self._theta = config.rope_theta
        out = config.num_attention_heads * dim
        self.q_proj = nn.Linear(2 * config.hidden_size, out, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, out // self._group_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, out // self._group_size, bias=False)
        self.o_proj = nn.Linear(out, config.hidden_size, bias=False)

    def forward(self, both: Tensor, positions: Tensor, keys: Keys) -> Tensor:
        """`keys`: keys and values of earlier passes, to which those of this pass are added."""
        query = self._rotated(self._by_head(self.q_proj(both)), positions)
        key = self._rotated(self._by_head(self.k_proj(both)), positions)
        value = self._by_head(self.v_proj(both))
        keys.append((self._for_groups(key), self._for_groups(value)))
        (first_key, first_value), *own = keys
        rows = both.shape[1]
        later = torch.ones(rows, rows, dtype=torch.bool, device=both.device).triu(1)
        scores = (query @ first_key.transpose(-1, -2)).masked_fill(later, float("-inf"))
        own_scores = [(query * key).sum(-1, keepdim=True) for key, _ in own]
        scores = torch.cat((scores, *own_scores), dim=-1) * self._head_dim**-0.5
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)  # [.., rows, rows + s]
        attended = weights[..., :rows] @ first_value
        for s, (_, value) in enumerate(own):
            attended = attended + weights[..., rows + s, None] * value
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        # -> [batch, heads, rows, head_dim]
        return x.view(*x.shape[:2], -1, self._head_dim).transpose(1, 2)

    def _for_groups(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self._group_size, dim=1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        exponent = torch.arange(0, self._head_dim, 2, device=x.device).float() / self._head_dim
        angle = positions[:, None] * self._theta**-exponent  # [rows, dim / 2]
        low, high = x.float().chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


@final
class _Mlp(nn.Module):
    def __init__(self, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner_size, bias=False)
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


@final
class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        return wide.to(x.dtype) * self.weight
