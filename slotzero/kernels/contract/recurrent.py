"""The recurrent part of a kernel set: Mamba-2, the gated delta rule, and short convolutions.

A recurrent mixer is four calls: linear, convolve, scan, gate_norm. A short convolution is the first
two of them. Where a row begins and whether it takes snapshots follows from its position and the
table of snapshot rows, see types_recurrent.py.
"""

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States, Trail


class RecurrentKernels(ABC):
    """Tokens of slot 0 get zeros and change nothing; a row has no other tokens after one.

    A tensor [T, ...] may be a slice of wider rows; each of its rows is contiguous.
    """

    @abstractmethod
    def convolve(
        self,
        x: Tensor,  # [T, channels]; conv: [T, 3 * channels], gates, output gates and values
        weight: Tensor,  # [channels, conv_width], the newest input last
        bias: Tensor | None,  # [channels]
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        """Convolve each channel over the token's inputs so far, apply silu -> [T, channels].

        The inputs of kind `conv` are gates * values in the dtype of x; instead of silu, the result
        is multiplied by the output gates. Writes `conv` of the states and snapshots, or of the
        trail.
        """

    @abstractmethod
    def scan(
        self,
        mixed: Tensor,  # [T, channels], after `convolve`
        gates: Tensor,  # [T, heads]: dt (mamba) or a (delta rule), before dt_bias and softplus;
        # kda: [T, heads * state_size]
        beta: Tensor | None,  # [T, heads], delta rule only, before its sigmoid
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        """Update the state h [head_dim, state_size] of each head by every token and read it ->
        [T, heads * head_dim]. Arithmetic is in float32, whatever the dtype of the states.

        mamba: dt = clamp(softplus(gates + dt_bias), dt_limit);
               h <- exp(-exp(a_log) dt) h + dt x B^T; y = h C + d x
        delta: g = exp(-exp(a_log) softplus(gates + dt_bias)); q and k of length 1, q / sqrt(size);
               h <- g h; h <- h + sigmoid(beta) (v - h k) k^T; y = h q
        kda: as delta, but with a g for each dimension of the keys: h <- h diag(g)
        """

    @abstractmethod
    def gate_norm(
        self,
        x: Tensor,  # [T, size]
        gates: Tensor,  # [T, size]
        weight: Tensor | None,  # [size], or [group_size] for every group; None: no norm
        eps: float,
        group_size: int,
        gates_first: bool,
        activation: Literal["silu", "sigmoid"] = "silu",
    ) -> Tensor:
        """Apply RMSNorm to each group of x; multiply by activation(gates) before or after it."""

    @abstractmethod
    def commit_trail(
        self,
        trail: Trail,  # stacked
        slots: Tensor,  # [R]
        length: Tensor,  # [slots + 1], with the accepted tokens
        num_confirmed: Tensor,  # [R]: accepted tokens of each row, from the first on
        states: States,  # stacked
        shape: Scan,
    ) -> None:
        """Copy the state after the last accepted token to the slot, and take the snapshots that
        fall on accepted tokens. A slot without accepted tokens keeps its state."""
