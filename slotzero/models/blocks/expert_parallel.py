"""Expert parallelism: each rank holds whole experts, and tokens travel to their experts.

Every rank routes its share of the tokens and sends each rank, in one all-to-all of fixed size, the
rows that need an expert there and zeros for the others; the results come back the same way. Every
rank holds the shared experts, so for them tokens stay. Where all ranks have the same tokens, a
rank's share is a contiguous part of them; with DP attention it is all the tokens it has.

Which of its tokens are real, every rank derives inside the graph from the padded size (`share_of`):
a row that is padding on one rank may be real on another.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Experts, ExpertWeights, Normed, Routed


def share_of(slots: Tensor, share: int, rank: int) -> Tensor:
    """Return the slots of the `rank`th part of `share` tokens out of [T], padding included; tokens
    behind the last real one have slot 0."""
    place = torch.arange(1, len(slots) + 1, device=slots.device)
    real = ((slots > 0) * place).amax()
    count = (real - share * rank).clamp(0, share)
    return slots[rank * share : (rank + 1) * share] * (place[:share] <= count)


def run_expert_parallel(
    ranks: Ranks,
    kernels: Kernels,
    x: Normed,
    by: Normed,  # what the router reads
    slots: Tensor,
    weights: ExpertWeights,
    shape: Experts,
    starts: Tensor,
) -> Tensor:
    """Send tokens [T, hidden] through the experts of all ranks."""
    num, among = len(slots), ranks.attention  # ranks that have the same tokens
    share = -(-num // among.size)
    pad, first = share * among.size - num, among.rank * share
    rows = torch.stack((kernels.apply_norm(x), kernels.apply_norm(by)))
    rows = F.pad(rows, (0, 0, 0, pad))[:, first : first + share]
    mine, by_mine = (Normed(part) for part in rows)
    slots = share_of(F.pad(slots, (0, pad)), share, among.rank)
    routed = kernels.route(mine, slots, weights, shape, by_mine)
    wanted, weight, local = _address(routed, shape, ranks)
    sent = ranks.exchange(torch.cat((weight, local.to(weight.dtype)), dim=-1)).flatten(0, 1)
    weight, local = sent.chunk(2, dim=-1)
    received = Routed(ranks.exchange(wanted).flatten(0, 1), weight, local.long())
    results = kernels.experts(received, weights, shape, starts)
    back = ranks.exchange(results.view(ranks.size, share, -1)).sum(0)
    return among.gather(back)[:num] if among.is_distributed else back


def _address(routed: Routed, shape: Experts, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """Return by rank: the rows for it, their routing weights, and which of its experts they take;
    one past the last for none."""
    rows, share, which = routed
    each, none = shape.num_experts // ranks.size, shape.num_held
    rank = torch.arange(ranks.size, device=which.device)[:, None, None]
    local = which - rank * each
    is_shared = (which >= shape.num_experts) & (which < shape.num_all) & (rank == ranks.rank)
    local = torch.where((local >= 0) & (local < each) & (which < shape.num_experts), local, none)
    local = torch.where(is_shared, which - shape.num_experts + each, local)
    goes = (local < none).any(-1, keepdim=True)
    weight = share.float().expand(ranks.size, -1, -1)
    return rows * goes, weight, local
