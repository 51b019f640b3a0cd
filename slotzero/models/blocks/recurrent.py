"""Recurrent mixers: Mamba-2 and the gated delta rule.

Both consist of an input projection, a short convolution, a scan over the tokens, a gated norm and
an output projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks, norm_over
from slotzero.errors import ConfigError
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import FLAG, Block, BlockContext, split_evenly
from slotzero.models.param import LinearParam, Param, Params, Source, linear, norm, side_by_side


class RecurrentScales(NamedTuple):
    """Constants that multiply the weights when they are loaded."""

    parts: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)  # gates, x, B, C and dt
    input: float = 1.0  # the whole input projection, but not its bias
    out: float = 1.0


NO_SCALES = RecurrentScales()


class RecurrentWeights(NamedTuple):
    in_proj: LinearWeight  # [gates + channels + (dt, or a and b), hidden]
    conv: Tensor  # [channels, conv_width]
    conv_bias: Tensor | None
    scan: ScanWeights
    gate_norm: Tensor | None
    out: LinearWeight  # [hidden, inner]


class RecurrentBlock(Block):
    """A mixer that keeps a state from token to token: a frozen dataclass with these fields."""

    scan: Scan
    state_dtype: str

    def with_snapshots(self, interval: int) -> Self:
        """Return the mixer with a state snapshot after every `interval` tokens."""
        return replace(self, scan=self.scan.every(interval))  # type: ignore[type-var]

    def scan_of(self, states: States) -> Scan:
        """Return the scan, without snapshots if the states keep none."""
        return self.scan if states.rows is not None else self.scan.every(0)


@dataclass(frozen=True)
class RecurrentMixer(RecurrentBlock):
    scan: Scan
    hidden_size: int
    prefix: str  # of the mixer's tensors in a checkpoint's layer
    norm_eps: float
    norm_size: int
    """Number of channels that are normed together after the scan; 0: gates without a norm."""
    gates_first: bool
    """Whether the gates are applied before the norm."""
    state_dtype: str
    in_bias: bool = False
    conv_bias: bool = False
    out_bias: bool = False
    scales: RecurrentScales = NO_SCALES
    is_by_head: bool = True
    """Delta rule: whether a checkpoint stores q, k, v and gates head by head in one tensor (and so
    b and a), instead of q, k and v in one tensor, and gates, b and a in one each."""

    name = "recurrent"
    weights_type = RecurrentWeights

    @property
    def is_delta(self) -> bool:
        return self.scan.is_delta

    def shard(self, ranks: Ranks) -> Self:
        """Split the heads, their channels and their groups over the ranks.

        A norm over all heads is computed across ranks. A norm that spans the heads of several, but
        not of all ranks is not implemented.
        """
        size, scan, groups = ranks.attention.size, self.scan, self.scan.num_groups
        if groups % size and size % groups:
            raise ConfigError(
                f"{FLAG}={size}: {groups} groups of recurrent heads can be neither split evenly "
                "over the ranks nor each shared by the same number of ranks; choose a divisor or a "
                f"multiple of {groups}"
            )
        num_heads = split_evenly(scan.num_heads, "recurrent heads", size)
        part = replace(scan, num_heads=num_heads, num_groups=max(1, groups // size))
        if part.inner_size < self.norm_size < scan.inner_size:
            raise ConfigError(
                f"{FLAG}={size}: a norm over {self.norm_size} channels of recurrent heads would be "
                f"split over ranks, which is not implemented; choose a divisor of {groups}"
            )
        return replace(self, scan=part)

    def params(self) -> Params:
        prefix, scan, hidden = self.prefix, self.scan, self.hidden_size
        conv = side_by_side(f"{prefix}.conv1d", scan.sizes)
        out = Source(f"{prefix}.out_proj", hidden, scale=self.scales.out)
        norm_size = self.norm_size if self.is_delta else scan.inner_size
        return {
            "in_proj": self._in_param(),
            "conv": replace(
                linear(scan.conv_width, *conv).weight, is_packed=False, is_conv=True
            ),
            "conv_bias": Param(tuple(source.ending(".bias") for source in conv))
            if self.conv_bias
            else None,
            "scan": {
                "a_log": self._per_head("A_log"),
                "dt_bias": self._per_head("dt_bias"),
                "d": None if self.is_delta else self._per_head("D"),
            },
            "gate_norm": norm(f"{prefix}.norm", norm_size) if self.norm_size else None,
            "out": linear(
                scan.inner_size, out, biases=[out] if self.out_bias else (),
                summed_over="attention",
            ),
        }  # fmt: skip

    def _per_head(self, name: str) -> Param:
        source = Source(f"{self.prefix}.{name}", self.scan.num_heads)
        return Param((source,), is_float32=True)

    def _in_param(self) -> LinearParam:
        scan = self.scan
        if self.is_delta:
            sources = _by_head_sources if self.is_by_head else _delta_sources
            return linear(self.hidden_size, *sources(self.prefix, scan))
        sizes = scan.inner_size, *scan.sizes, scan.num_heads
        parts = side_by_side(f"{self.prefix}.in_proj", sizes)
        parts = [part.scaled(x) for part, x in zip(parts, self.scales.parts, strict=True)]
        biases = parts if self.in_bias else ()
        weights = [part.scaled(self.scales.input) for part in parts]
        return linear(self.hidden_size, *weights, biases=biases)

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: RecurrentStep,
        weights: RecurrentWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        kernels, scan = context.kernels, self.scan_of(inputs.states)
        num_gates = 2 if self.is_delta else 1
        sizes = [scan.inner_size, scan.channels, *[scan.num_heads] * num_gates]
        gates, mixed, *steps = torch.split(kernels.linear(x, weights.in_proj), sizes, dim=-1)
        beta = steps[1] if self.is_delta else None
        mixed = kernels.convolve(mixed, weights.conv, weights.conv_bias, inputs, scan)
        scanned = kernels.scan(mixed, steps[0], beta, weights.scan, inputs, scan)
        gated = self._gate(context, scanned, gates, weights.gate_norm)
        ranks = context.ranks.attention
        return context.linear_add_norm(ranks, Normed(gated), weights.out, residual, norms)

    def _gate(
        self, context: BlockContext, x: Tensor, gates: Tensor, weight: Tensor | None
    ) -> Tensor:
        kernels, ranks = context.kernels, context.ranks.attention
        eps, size, is_first = self.norm_eps, self.norm_size, self.gates_first
        if weight is None or size <= x.shape[1]:
            return kernels.gate_norm(x, gates, weight, eps, size, is_first)
        if is_first:  # one norm over the channels of all ranks
            return norm_over(ranks, kernels.gate_norm(x, gates, None, eps, size, True), weight, eps)
        return kernels.gate_norm(norm_over(ranks, x, weight, eps), gates, None, eps, size, False)


def _delta_sources(prefix: str, scan: Scan) -> Sequence[Source]:
    """Return the parts of the input projection: gates, q, k, v, a and b."""
    gates = Source(f"{prefix}.in_proj_z", scan.inner_size)
    steps = [Source(f"{prefix}.in_proj_{name}", scan.num_heads) for name in "ab"]
    return [gates, *side_by_side(f"{prefix}.in_proj_qkv", scan.sizes), *steps]


def _by_head_sources(prefix: str, scan: Scan) -> Sequence[Source]:
    """Return the parts of the input projection: gates, q, k, v, a and b.

    A checkpoint stores two tensors, both head by head: q, k, v and gates (z) of each key head in
    one, and b and a of each key head in the other.
    """
    keys, values = scan.state_size, scan.inner_size // scan.num_groups
    num, num_groups = scan.num_heads // scan.num_groups, scan.num_groups  # value heads per key head
    spans = {"q": (0, keys), "k": (keys, keys), "v": (2 * keys, values)}
    spans["z"] = (2 * keys + values, values)

    def rows(first: int, size: int, stride: int) -> list[int]:
        return [g * stride + row for g in range(num_groups) for row in range(first, first + size)]

    stride = 2 * (keys + values)
    whole = num_groups * stride
    joined = [Source(f"{prefix}.in_proj_qkvz", whole, rows(*spans[n], stride)) for n in "zqkv"]
    ba = f"{prefix}.in_proj_ba", 2 * num_groups * num
    return [*joined, *(Source(*ba, rows(first, num, 2 * num)) for first in (num, 0))]
