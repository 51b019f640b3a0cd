"""Mixture of experts (MoE): a router sends each token to a few of many small MLPs."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Experts, ExpertWeights, Normed, ResidualNorms
from slotzero.models.blocks.block import Block, BlockContext, split_evenly, sum_over
from slotzero.models.blocks.expert_parallel import run_expert_parallel
from slotzero.models.param import (
    LinearParam,
    Param,
    Params,
    SharedExperts,
    Source,
    linear,
    side_by_side,
)


class MoeNames(NamedTuple):
    """Names of the tensors in a checkpoint's layer.

    Experts are stored in one tensor each (`{expert}` in the name) or all in one (`is_joint`).
    """

    router: str = "mlp.gate"
    gate: str | None = "mlp.experts.{expert}.gate_proj"
    """None: `up` holds both gates and values."""
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    shared: str | None = "mlp.shared_experts"
    """Prefix of the shared experts, which every token uses. They are stored as one wide MLP."""
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_is_one_row: bool = False
    """Whether the correction is stored as a matrix with one row."""
    factors: str | None = None
    """Factors on the experts' results, one per expert."""
    is_joint: bool = False
    is_transposed: bool = False
    """Whether joint tensors have input features before output features."""
    alternates: bool = False
    """Whether rows of gates and rows of values alternate."""


MOE_NAMES = MoeNames()


class ChosenExperts(NamedTuple):
    """Where a layer stores which experts it chooses for each token: beside the token's KV."""

    pages: Tensor  # [pages, page_size, 1, top_k] int16
    page: Tensor  # [T]
    place: Tensor  # [T]: in the page

    def store(self, experts: Tensor, slots: Tensor) -> None:
        """Store experts [T, num_chosen], of which shared ones are last; tokens of slot 0 write
        back what is there."""
        stored = self.pages[self.page, self.place]
        chosen = experts[:, None, : self.pages.shape[-1]].to(self.pages.dtype)
        chosen = torch.where((slots != 0)[:, None, None], chosen, stored)
        self.pages.index_put_((self.page, self.place), chosen)


class MoeInputs(NamedTuple):
    """Inputs of the experts in a step."""

    slots: Tensor  # [T]
    starts: Tensor  # [experts + 1]
    chosen: ChosenExperts | None = None  # None: they are not stored


@dataclass(frozen=True)
class MoeMlp(Block):
    hidden_size: int
    experts: Experts
    names: MoeNames = MOE_NAMES
    has_bias: bool = False
    down_scale: float = 1.0
    """A constant that multiplies the down projection when it is loaded, if it is joint."""

    name = "moe"
    weights_type = ExpertWeights

    def __post_init__(self) -> None:
        assert self.names.is_joint or self.down_scale == 1

    def shard(self, ranks: Ranks) -> Self:
        """Split every expert over the ranks; with expert parallelism, distribute whole experts."""
        experts, size = self.experts, ranks.size
        if ranks.expert_parallel:
            split_evenly(experts.num_experts, "num_experts", size)
            return replace(self, experts=replace(experts, num_ranks=size))
        inner = split_evenly(experts.inner_size, "moe_intermediate_size", size)
        return replace(self, experts=replace(experts, inner_size=inner))

    def params(self) -> Params:
        names, experts = self.names, self.experts
        num = experts.num_experts
        router = Source(names.router, num)
        correction = Source(names.correction, num, ones=(int(names.correction_is_one_row), 0))
        factors = names.factors and Param((Source(names.factors, num),), starts_at_one=True)
        return {
            "router": linear(
                self.hidden_size,
                router,
                biases=[router] if self.has_bias else (),
                is_sensitive=True,
            ),
            "correction": Param((correction,), is_float32=True) if experts.is_corrected else None,
            "gate_up": self._gate_up(),
            "down": self._down(),
            "factors": factors or None,
        }

    def _gate_up(self) -> LinearParam:
        names, inner, hidden = self.names, self.experts.inner_size, self.hidden_size
        if not names.is_joint:
            sources = [self._source(names.gate or names.up, "gate"), self._source(names.up, "up")]
            return LinearParam(self._param(sources, hidden), None)
        if names.alternates:
            order = [*range(0, 2 * inner, 2), *range(1, 2 * inner, 2)]
            sources = [Source(names.up, 2 * inner, order)]
        else:
            sources = side_by_side(names.up, (inner, inner))
        return self._with_bias(sources, hidden)

    def _down(self) -> LinearParam:
        names, inner = self.names, self.experts.inner_size
        if not names.is_joint:
            sources = [self._source(names.down, "down")]
            return LinearParam(self._param(sources, inner), None)
        source = Source(names.down, self.hidden_size, scale=self.down_scale)
        down = self._with_bias([source], inner)
        return down._replace(bias=down.bias and replace(down.bias, summed_over="mlp"))

    def _source(self, name: str, kind: str) -> Source:
        """Return the source of a projection that is stored in one tensor per expert."""
        rows = self.hidden_size if kind == "down" else self.experts.inner_size
        shared = self.names.shared and SharedExperts(
            f"{self.names.shared}.{kind}_proj", in_columns=kind == "down"
        )
        return Source(name, rows, shared=shared or None).ending(".weight")

    def _param(self, sources: list[Source], columns: int | None) -> Param:
        more: dict[str, Any] = {"experts": self.experts.num_held}
        if self.names.is_joint:
            more |= {"is_joint": True, "is_transposed": self.names.is_transposed}
        else:
            more |= {"num_shared": self.experts.num_shared}
        return Param(tuple(sources), columns, **more)

    def _with_bias(self, sources: list[Source], columns: int) -> LinearParam:
        weight = self._param(sources, columns)
        if not self.has_bias:
            return LinearParam(weight, None)
        return LinearParam(weight, self._param([s.ending("_bias") for s in sources], None))

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: MoeInputs,
        weights: ExpertWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        change = self.apply(context, x, inputs, weights)
        return context.kernels.add_norm(change, residual, norms)

    def apply(
        self,
        context: BlockContext,
        x: Normed,
        inputs: MoeInputs,
        weights: ExpertWeights,
        router_input: Normed | None = None,  # None: x
    ) -> Tensor:
        """Return the experts' result, [T, hidden], without adding it to the residual."""
        kernels, ranks, (slots, starts, chosen) = context.kernels, context.ranks, inputs
        if ranks.expert_parallel:
            return run_expert_parallel(
                ranks, kernels, x, router_input or x, slots, weights, self.experts, starts
            )
        if ranks.dp_attention:
            x, router_input, slots = (
                context.gather_rows(x),
                router_input and context.gather_rows(router_input),
                ranks.gather(slots),
            )
        routed = kernels.route(x, slots, weights, self.experts, router_input)
        if chosen is not None:
            chosen.store(routed.experts, slots)
        routed = routed.scaled() if self.experts.scales_input else routed
        return sum_over(ranks, kernels.experts(routed, weights, self.experts, starts))
