"""Expert parallelism: each rank holds whole experts, and tokens are sent to their experts.

Every rank routes its share of the tokens. In one all-to-all of fixed size it sends to each rank the
rows that need an expert there, and zeros in place of the other rows; results return the same way.
Shared experts are on every rank, so tokens do not leave their rank for them. If all ranks have the
same tokens, a rank's share is a contiguous part of them; with DP attention, it is all its tokens.

Each rank derives inside the graph which tokens of its share are real (`share_of`): a row that is
padding on one rank may be real on another.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Experts, ExpertWeights, Normed, Routed


def share_of(slots: Tensor, share: int, rank: int) -> Tensor:
    """Return the slots of the `rank`th share of `share` tokens of [T], padding included.

    Tokens after the last real one get slot 0.
    """
    place = torch.arange(1, len(slots) + 1, device=slots.device)
    real = ((slots > 0) * place).amax()
    count = (real - share * rank).clamp(0, share)
    return slots[rank * share : (rank + 1) * share] * (place[:share] <= count)


def run_expert_parallel(
    ranks: Ranks,
    kernels: Kernels,
    x: Normed,
    router_input: Normed,
    slots: Tensor,
    weights: ExpertWeights,
    shape: Experts,
    starts: Tensor,
) -> Tensor:
    """Compute the experts' results for tokens [T, hidden], with experts on all ranks."""
    num, peers = len(slots), ranks.attention  # peers: ranks that have the same tokens
    share = -(-num // peers.size)
    pad, first = share * peers.size - num, peers.rank * share
    rows = torch.stack((kernels.apply_norm(x), kernels.apply_norm(router_input)))
    rows = F.pad(rows, (0, 0, 0, pad))[:, first : first + share]
    x, router_input = (Normed(part) for part in rows)
    slots = share_of(F.pad(slots, (0, pad)), share, peers.rank)
    routed = kernels.route(x, slots, weights, shape, router_input)
    routed = routed.scaled() if shape.scales_input else routed
    sent, weight, local = _dispatch(routed, shape, ranks)
    received = ranks.exchange(torch.cat((weight, local.to(weight.dtype)), dim=-1)).flatten(0, 1)
    weight, local = received.chunk(2, dim=-1)
    routed = Routed(ranks.exchange(sent).flatten(0, 1), weight, local.long())
    results = kernels.experts(routed, weights, shape, starts)
    returned = ranks.exchange(results.view(ranks.size, share, -1)).sum(0)
    return peers.gather(returned)[:num] if peers.is_distributed else returned


def _dispatch(routed: Routed, shape: Experts, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each rank the rows to send, their routing weights and the rank's expert indices.

    An expert on another rank has the index one past the last (`num_held`).
    """
    rows, weight, expert = routed
    num_local, none = shape.num_experts // ranks.size, shape.num_held
    rank = torch.arange(ranks.size, device=expert.device)[:, None, None]
    local = expert - rank * num_local
    is_routed = (local >= 0) & (local < num_local) & (expert < shape.num_experts)
    is_shared = (expert >= shape.num_experts) & (expert < shape.num_all) & (rank == ranks.rank)
    local = torch.where(is_routed, local, none)
    local = torch.where(is_shared, expert - shape.num_experts + num_local, local)
    is_sent = (local < none).any(-1, keepdim=True)
    return rows * is_sent, weight.float().expand(ranks.size, -1, -1), local
