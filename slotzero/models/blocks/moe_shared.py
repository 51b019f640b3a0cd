"""Experts beside a dense MLP that every token uses (a shared expert)."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import ExpertWeights, Normed, ResidualNorms
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import Block, BlockContext
from slotzero.models.blocks.dense_mlp import DenseMlp, DenseMlpWeights
from slotzero.models.blocks.moe import MoeInputs, MoeMlp
from slotzero.models.param import Param, Params, Source, linear, norm


class MoeWithSharedWeights(NamedTuple):
    moe: ExpertWeights
    shared: DenseMlpWeights
    shared_gate: LinearWeight | None  # [1, hidden]


@dataclass(frozen=True)
class MoeWithSharedMlp(Block):
    """Experts and a shared MLP on the same input; their results are added."""

    moe: MoeMlp
    shared: DenseMlp
    shared_gate: str | None = None
    """Name of the linear layer whose sigmoid gates the shared MLP's result, once per token."""

    name = "moe"
    weights_type = MoeWithSharedWeights

    def shard(self, ranks: Ranks) -> Self:
        return replace(self, moe=self.moe.shard(ranks), shared=self.shared.shard(ranks))

    def params(self) -> Params:
        gate = self.shared_gate and linear(
            self.moe.hidden_size, Source(self.shared_gate, 1), is_sensitive=True
        )
        return {
            "moe": self.moe.params(),
            "shared": self.shared.params(),
            "shared_gate": gate or None,
        }

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: MoeInputs,
        weights: MoeWithSharedWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        kernels = context.kernels
        x = Normed(kernels.apply_norm(x))  # apply the norm once for all readers of x
        shared = self.shared.apply(context, x, weights.shared)
        if weights.shared_gate is not None:
            gate = kernels.linear(x, weights.shared_gate)
            shared = kernels.gate(gate.expand_as(shared), shared, "sigmoid")
        routed = self.moe.apply(context, x, inputs, weights.moe)
        return kernels.add_norm(shared + routed, residual, norms)


class MoeBesideMlpWeights(NamedTuple):
    moe: ExpertWeights
    mlp: DenseMlpWeights
    router_norm: Tensor
    expert_norm: Tensor
    post_mlp_norm: Tensor
    post_expert_norm: Tensor


@dataclass(frozen=True)
class MoeBesideMlp(Block):
    """Experts beside an MLP, each between its own norms, as in Gemma 4."""

    moe: MoeMlp
    mlp: DenseMlp
    norm_eps: float
    router_scale: str = "router.scale"
    expert_norm: str = "pre_feedforward_layernorm_2"
    post_mlp_norm: str = "post_feedforward_layernorm_1"
    post_expert_norm: str = "post_feedforward_layernorm_2"

    name = "moe"
    weights_type = MoeBesideMlpWeights

    def shard(self, ranks: Ranks) -> Self:
        return replace(self, moe=self.moe.shard(ranks), mlp=self.mlp.shard(ranks))

    def params(self) -> Params:
        hidden = self.moe.hidden_size
        scale = Source(self.router_scale, hidden, scale=hidden**-0.5)
        return {
            "moe": self.moe.params(),
            "mlp": self.mlp.params(),
            "router_norm": Param((scale,), starts_at_one=True),
            "expert_norm": norm(self.expert_norm, hidden),
            "post_mlp_norm": norm(self.post_mlp_norm, hidden),
            "post_expert_norm": norm(self.post_expert_norm, hidden),
        }

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: MoeInputs,
        weights: MoeBesideMlpWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        kernels, eps = context.kernels, self.norm_eps
        expert_input = kernels.norm(residual, weights.expert_norm, eps)
        router_input = kernels.norm(residual, weights.router_norm, eps)
        dense = self.mlp.apply(context, x, weights.mlp)
        routed = self.moe.apply(context, expert_input, inputs, weights.moe, router_input)
        change = kernels.apply_norm(kernels.norm(dense, weights.post_mlp_norm, eps))
        change = change + kernels.apply_norm(kernels.norm(routed, weights.post_expert_norm, eps))
        return kernels.add_norm(change, residual, norms)
