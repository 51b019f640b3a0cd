"""The MoE router: `route` of torch_ops.py, with one program per token.

Experts are in groups; a model without groups has one. The best experts are taken one after another,
the first of equal ones first. Rows of slot 0 get no expert, whatever their scores are.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear.activation import LOG2E
from slotzero.kernels.types import Experts, ExpertWeights


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _route_kernel(
    scores, correction, factors, slots, routing_weights, experts, factor, norm_eps,
    scores_stride,
    GROUPS: tl.constexpr, EACH: tl.constexpr, TOP_GROUPS: tl.constexpr, JUDGED_BY: tl.constexpr,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, KIND: tl.constexpr, IS_NORMED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores are [groups, experts of each], padded to ROWS x COLUMNS."""
    tl.static_assert(KIND != "softmax_of_chosen" or GROUPS == 1)
    may_follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    group, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)[None, :]
    expert = group[:, None] * EACH + column
    inside = (group < GROUPS)[:, None] & (column < EACH)
    added = 0.0
    if correction is not None:
        added = tl.load(correction + expert, mask=inside, other=0.0)
    wait_for_writer(PDL)
    is_real = tl.load(slots + token) > 0
    score = tl.load(scores + token * scores_stride + expert, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    is_broken = tl.max(tl.max((score != score).to(tl.int32), axis=1), axis=0) > 0
    if KIND == "sigmoid":
        score = 1.0 / (1.0 + _exp(-score))
    elif KIND == "softmax":
        score = _exp(score - tl.max(tl.max(score, axis=1), axis=0))
        score /= tl.sum(tl.sum(score, axis=1), axis=0)
    wanted = tl.where(inside, score + added, float("-inf"))
    if GROUPS > 1:
        judged, rest = tl.zeros([ROWS], tl.float32), wanted
        for _ in tl.static_range(JUDGED_BY):
            best = tl.max(rest, axis=1)
            judged += best
            its = tl.min(tl.where(rest == best[:, None], column, COLUMNS), axis=1)
            rest = tl.where(column == its[:, None], float("-inf"), rest)
        judged = tl.where(group < GROUPS, judged, float("-inf"))
        is_open = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            its = tl.min(tl.where(judged == tl.max(judged, axis=0), group, ROWS), axis=0)
            is_open |= group == its
            judged = tl.where(group == its, float("-inf"), judged)
        wanted = tl.where(is_open[:, None], wanted, float("-inf"))

    choice, last, is_free = tl.arange(0, CHOICES), GROUPS * EACH - 1, inside
    chosen = GROUPS * EACH + choice - TOP_K  # shared experts, after the routed ones
    its_weight = tl.zeros([CHOICES], tl.float32)
    for i in tl.static_range(TOP_K):
        best = tl.max(tl.max(wanted, axis=1), axis=0)
        its = tl.where((wanted == best) & is_free, expert, last)
        its = tl.min(tl.min(its, axis=1), axis=0)
        is_free &= expert != its
        mine = tl.sum(tl.sum(tl.where((expert == its) & inside, score, 0.0), axis=1), axis=0)
        chosen = tl.where(choice == i, its, chosen)
        its_weight = tl.where(choice == i, mine, its_weight)
        wanted = tl.where(expert == its, float("-inf"), wanted)
    is_chosen = choice < TOP_K
    if KIND == "softmax_of_chosen":
        its_weight = tl.where(is_chosen, its_weight, float("-inf"))
        its_weight = _exp(its_weight - tl.max(its_weight, axis=0))
        its_weight /= tl.sum(its_weight, axis=0)
        its_weight = its_weight.to(scores.dtype.element_ty).to(tl.float32)  # as in training
    else:
        if IS_NORMED:
            its_weight /= tl.sum(tl.where(is_chosen, its_weight, 0.0), axis=0) + norm_eps
        its_weight *= factor
    if factors is not None:
        its_weight *= tl.load(factors + chosen, mask=is_chosen, other=1.0).to(tl.float32)
    its_weight = tl.where(is_chosen, its_weight, 1.0)
    its_weight = tl.where(is_broken, float("nan"), its_weight)  # NaN stays NaN
    chosen = tl.where(is_real, chosen, GROUPS * EACH + SHARED)
    at, is_kept = token * (TOP_K + SHARED) + choice, choice < TOP_K + SHARED
    tl.store(routing_weights + at, its_weight, mask=is_kept)
    tl.store(experts + at, chosen, mask=is_kept)


def route(
    scores: Tensor, slots: Tensor, weights: ExpertWeights, shape: Experts
) -> tuple[Tensor, Tensor]:
    """Select experts by scores [T, experts] -> routing weight and index of each token's experts,
    [T, num_chosen] each; the index for none is one past the last expert."""
    each = shape.num_experts // shape.num_groups
    routing_weights = torch.empty(len(scores), shape.num_chosen, device=scores.device)
    experts = torch.empty(routing_weights.shape, dtype=torch.int32, device=scores.device)
    launch(
        _route_kernel, (len(scores),),
        scores, weights.correction, weights.factors, slots, routing_weights, experts, shape.factor,
        shape.norm_eps, scores.stride(0),
        GROUPS=shape.num_groups, EACH=each, TOP_GROUPS=shape.top_groups,
        JUDGED_BY=shape.scores_per_group, TOP_K=shape.top_k, SHARED=shape.num_shared,
        KIND=shape.scores,
        IS_NORMED=shape.is_normed, ROWS=triton.next_power_of_2(shape.num_groups),
        COLUMNS=triton.next_power_of_2(each), CHOICES=triton.next_power_of_2(shape.num_chosen),
        num_warps=1, **overlap(),
    )  # fmt: skip
    return routing_weights, experts
