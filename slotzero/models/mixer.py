"""The recurrent mixer of a layer: one product in, a convolution, the scan, and its gated norm.

The product that brings the result back to the residual is the layer's.
"""

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks, norm_over
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import LinearWeight, Normed
from slotzero.kernels.types_recurrent import RecurrentStep, ScanWeights
from slotzero.models.given import Given
from slotzero.models.recurrent import Recurrent
from slotzero.models.weights import LayerWeights


def mix(
    kernels: Kernels,
    ranks: Ranks,
    normed: Normed,
    given: Given,
    layer: LayerWeights,
    recurrent: Recurrent,
) -> Tensor:
    """-> [T, inner]"""
    shape = recurrent.scan
    is_delta = shape.kind == "delta"
    assert layer.in_proj is not None and layer.conv is not None
    assert layer.a_log is not None and layer.dt_bias is not None
    sizes = [shape.inner_size, shape.channels, *[shape.num_heads] * (2 if is_delta else 1)]
    joined = kernels.linear(normed, LinearWeight(layer.in_proj, layer.in_bias, sum(sizes)))
    gates, mixed, *steps = torch.split(joined, sizes, dim=-1)
    step = RecurrentStep(given.tokens, given.rows, given.states, given.trail)
    if given.kept_rows is None:
        shape = shape.every(0)
    mixed = kernels.convolve(mixed, layer.conv, layer.conv_bias, step, shape)
    weights = ScanWeights(layer.a_log, layer.dt_bias, layer.d)
    beta = steps[1] if is_delta else None
    out = kernels.scan(mixed, steps[0], beta, weights, step, shape)
    return _gated(kernels, ranks, out, gates, layer.gate_norm, recurrent)


def _gated(
    kernels: Kernels,
    ranks: Ranks,
    x: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    recurrent: Recurrent,
) -> Tensor:
    eps, size, is_first = recurrent.norm_eps, recurrent.norm_size, recurrent.gates_first
    if weight is None or size <= x.shape[1]:
        return kernels.gate_norm(x, gates, weight, eps, size, is_first)
    if is_first:  # one norm, of which each rank has a part
        return norm_over(ranks, kernels.gate_norm(x, gates, None, eps, size, True), weight, eps)
    return kernels.gate_norm(norm_over(ranks, x, weight, eps), gates, None, eps, size, False)
