"""Kimi Delta Attention (KDA): a gated delta rule in which each dimension of a key decays by itself.

Decays and output gates are projected from the hidden state through a small size.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import BlockContext, split_evenly
from slotzero.models.blocks.recurrent import RecurrentBlock
from slotzero.models.param import Param, Params, Source, linear, norm


class KdaWeights(NamedTuple):
    in_proj: LinearWeight  # [channels + heads + 2 * head_dim, hidden]: q, k, v, b and what follows
    decay: LinearWeight  # [heads * state_size, head_dim]
    gate: LinearWeight  # [inner, head_dim]
    conv: Tensor  # [channels, conv_width]
    scan: ScanWeights
    gate_norm: Tensor  # [head_dim]
    out: LinearWeight  # [hidden, inner]


@dataclass(frozen=True)
class KdaMixer(RecurrentBlock):
    scan: Scan
    hidden_size: int
    prefix: str
    norm_eps: float
    state_dtype: str = "float32"

    name = "kda"
    weights_type = KdaWeights

    def shard(self, ranks: Ranks) -> Self:
        num = split_evenly(self.scan.num_heads, "linear_num_heads", ranks.attention.size)
        return replace(self, scan=replace(self.scan, num_heads=num, num_groups=num))

    def params(self) -> Params:
        prefix, scan, small = self.prefix, self.scan, self.scan.head_dim
        names = [f"{prefix}.{part}" for part in "qkv"]
        parts = list(zip(names, scan.sizes, strict=True))
        inputs = [Source(f"{name}_proj", size) for name, size in parts]
        inputs += [Source(f"{prefix}.b_proj", scan.num_heads)]
        inputs += [Source(f"{prefix}.{name}_a_proj", small) for name in "fg"]
        conv = [Source(f"{name}_conv1d", size) for name, size in parts]
        a_log = Source(f"{prefix}.A_log", scan.num_heads, ones=(2, 1))
        out = Source(f"{prefix}.o_proj", self.hidden_size)
        return {
            "in_proj": linear(self.hidden_size, *inputs),
            "decay": linear(small, Source(f"{prefix}.f_b_proj", scan.num_gates)),
            "gate": linear(small, Source(f"{prefix}.g_b_proj", scan.inner_size)),
            "conv": replace(
                linear(scan.conv_width, *conv).weight, is_packed=False, is_conv=True
            ),
            "scan": {
                "a_log": Param((a_log,), is_float32=True),
                "dt_bias": Param((Source(f"{prefix}.dt_bias", scan.num_gates),), is_float32=True),
                "d": None,
            },
            "gate_norm": norm(f"{prefix}.o_norm", scan.head_dim),
            "out": linear(scan.inner_size, out, summed_over="attention"),
        }  # fmt: skip

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: RecurrentStep,
        weights: KdaWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        kernels, scan = context.kernels, self.scan_of(inputs.states)
        sizes = [scan.channels, scan.num_heads, scan.head_dim, scan.head_dim]
        mixed, beta, decay, gate = torch.split(kernels.linear(x, weights.in_proj), sizes, dim=-1)
        decays = kernels.linear(Normed(decay.contiguous()), weights.decay)
        gates = kernels.linear(Normed(gate.contiguous()), weights.gate)
        mixed = kernels.convolve(mixed, weights.conv, None, inputs, scan)
        scanned = kernels.scan(mixed, decays, beta, weights.scan, inputs, scan)
        gated = kernels.gate_norm(
            scanned, gates, weights.gate_norm, self.norm_eps, scan.head_dim, False, "sigmoid"
        )
        ranks = context.ranks.attention
        return context.linear_add_norm(ranks, Normed(gated), weights.out, residual, norms)
