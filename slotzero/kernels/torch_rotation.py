"""RoPE in plain torch: of queries and keys, and of both sides of an indexer."""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.types import Angles, IndexInputs, IndexShape

INDEX_EPS = 1e-6  # of the LayerNorm of an indexer's keys


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [T, heads, head_dim]: pairs are (i, i + head_dim / 2); float32 arithmetic."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def index_sides(
    index: IndexInputs, shape: IndexShape, angles: Angles, rope_dim: int
) -> tuple[Tensor, Tensor]:
    """Return the rotated queries [T, heads, head_dim] and key [T, 1, head_dim] of an indexer."""
    size = (shape.head_dim,)
    key = F.layer_norm(index.k.float(), size, index.norm.float(), index.bias.float(), INDEX_EPS)
    q, k = index.q.view(len(key), -1, shape.head_dim), key.to(index.k.dtype)[:, None]
    q, k = (
        torch.cat((rotate(x[..., :rope_dim], *angles), x[..., rope_dim:]), dim=-1) for x in (q, k)
    )
    return q, k
