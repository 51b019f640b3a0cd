"""The contract of a kernel set, continued: what only recurrent layers need done.

A recurrent mixer is four calls: linear, convolve, scan, gate_norm. Where a row begins and whether
it leaves snapshots is derived from its position and the table of snapshot rows, see
types_recurrent.py. What each call means is written down in torch_recurrent.py.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States, Trail


class RecurrentKernels(ABC):
    """Without rows every token is a row of its own. With a trail, states and snapshots are left
    alone: the rows have W tokens each, and what is to become of them is said to `commit_trail`.
    Tokens of slot 0 get zeros and change nothing; behind one, a row has no others. What a token
    brings may lie among other things: rows are contiguous, what is [T, ...] need not be."""

    @abstractmethod
    def convolve(
        self,
        x: Tensor,  # [T, channels]
        weight: Tensor,  # [channels, conv_width], of the newest input last
        bias: Tensor | None,  # [channels]
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        """Each channel over a token's input and those before it in its text, and silu of that ->
        [T, channels]. Writes `conv` of the states, their snapshots, or of the trail."""

    @abstractmethod
    def scan(
        self,
        mixed: Tensor,  # [T, channels], after `convolve`
        gates: Tensor,  # [T, heads]: dt of mamba, a of a delta rule, before dt_bias and softplus
        beta: Tensor | None,  # [T, heads], of a delta rule, before its sigmoid
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        """Each token changes its head's state h [head_dim, state_size] and reads it ->
        [T, heads * head_dim]. Arithmetic is in float32, of states of any dtype.

        mamba: dt = clamp(softplus(gates + dt_bias), dt_limit);
               h <- exp(-exp(a_log) dt) h + dt x B^T; y = h C + d x
        delta: g = exp(-exp(a_log) softplus(gates + dt_bias)); q and k of length 1, q / sqrt(size);
               h <- g h; h <- h + sigmoid(beta) (v - h k) k^T; y = h q
        """

    @abstractmethod
    def gate_norm(
        self,
        x: Tensor,  # [T, size]
        gates: Tensor,  # [T, size]
        weight: Tensor | None,  # [size], or [group_size], of every group; None: gates alone
        eps: float,
        group_size: int,
        gates_first: bool,
    ) -> Tensor:
        """x under an RMSNorm of each group, times silu(gates), which comes before the norm or
        after it."""

    @abstractmethod
    def commit_trail(
        self,
        trail: Trail,  # stacked
        slots: Tensor,  # [R]
        length: Tensor,  # [slots + 1], with what was right
        num_right: Tensor,  # [R]: the first so many tokens of each row are right
        states: States,  # stacked
        shape: Scan,
    ) -> None:
        """What stands after the last token that is right becomes the slot's, and snapshots are
        taken where right tokens ask for them. A slot without right ones stays as it is."""
