"""Experts that ranks have shared out: each token goes to the ranks that have those it chooses.

Every rank routes its share of the tokens and sends each rank, in one exchange of fixed size, those
rows that want an expert there, and zeros for the others; the results come back the same way. Shared
experts are everybody's, so their tokens stay. Where all ranks have the same tokens, a rank's share
is a stretch of them; where each has its own, it is all it has.

Which of its tokens are real every rank derives inside the graph, by `share_of`, from the padded
size: what is padding here may be real elsewhere.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Experts, ExpertWeights, Normed, Routed


def share_of(slots: Tensor, share: int, rank: int) -> Tensor:
    """The slots of the `rank`th stretch of `share` tokens, of all that are padded to [T]; behind
    the last real token nothing is anybody's."""
    place = torch.arange(1, len(slots) + 1, device=slots.device)
    real = ((slots > 0) * place).amax()
    count = (real - share * rank).clamp(0, share)
    return slots[rank * share : (rank + 1) * share] * (place[:share] <= count)


def experts_over(
    ranks: Ranks,
    kernels: Kernels,
    x: Normed,
    by: Normed,  # what a token chooses by
    slots: Tensor,
    weights: ExpertWeights,
    shape: Experts,
    starts: Tensor,
) -> Tensor:
    """Tokens [T, hidden] through what they choose among the experts of all ranks."""
    num, among = len(slots), ranks.attention  # that have the same tokens
    share = -(-num // among.size)
    pad, first = share * among.size - num, among.rank * share
    rows = torch.stack((kernels.apply_norm(x), kernels.apply_norm(by)))
    rows = F.pad(rows, (0, 0, 0, pad))[:, first : first + share]
    mine, theirs = (Normed(part) for part in rows)
    slots = share_of(F.pad(slots, (0, pad)), share, among.rank)
    chosen = kernels.route(mine, slots, weights, shape, theirs)
    wanted, weight, local = _addressed(chosen, shape, ranks)
    told = ranks.exchange(torch.cat((weight, local.to(weight.dtype)), dim=-1)).flatten(0, 1)
    weight, local = told.chunk(2, dim=-1)
    sent = Routed(ranks.exchange(wanted).flatten(0, 1), weight, local.long())
    results = kernels.experts(sent, weights, shape, starts)
    back = ranks.exchange(results.view(ranks.size, share, -1)).sum(0)
    return among.gather(back)[:num] if among.is_distributed else back


def _addressed(chosen: Routed, shape: Experts, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor]:
    """By rank: the rows for it, the weight of their choices, and which of its experts; one past its
    last for none."""
    rows, share, which = chosen
    each, none = shape.num_experts // ranks.size, shape.num_held
    rank = torch.arange(ranks.size, device=which.device)[:, None, None]
    local = which - rank * each
    is_shared = (which >= shape.num_experts) & (which < shape.num_all) & (rank == ranks.rank)
    local = torch.where((local >= 0) & (local < each) & (which < shape.num_experts), local, none)
    local = torch.where(is_shared, which - shape.num_experts + each, local)
    goes = (local < none).any(-1, keepdim=True)
    weight = share.float().expand(ranks.size, -1, -1)
    return rows * goes, weight, local
