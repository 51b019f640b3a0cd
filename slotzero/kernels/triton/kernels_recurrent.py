"""The calls of recurrent layers: a few tokens a row in turn, ragged rows in chunks."""

from torch import Tensor

from slotzero.kernels.contract_recurrent import RecurrentKernels
from slotzero.kernels.triton.recurrent import chunks as recurrent_chunks
from slotzero.kernels.triton.recurrent import convolution as recurrent_convolution
from slotzero.kernels.triton.recurrent import delta as recurrent_delta
from slotzero.kernels.triton.recurrent import gate as recurrent_gate
from slotzero.kernels.triton.recurrent import mamba as recurrent_mamba
from slotzero.kernels.triton.recurrent import step as recurrent_step
from slotzero.kernels.triton.recurrent import trail as recurrent_trail
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import Scan, States, Trail


class TritonRecurrent(RecurrentKernels):
    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tokens,
        rows: Rows | None,
        states: States,
        trail: Trail | None,
        shape: Scan,
    ) -> Tensor:
        return recurrent_convolution.convolve(x, weight, bias, tokens, rows, states, trail, shape)

    def scan(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta: Tensor | None,
        a_log: Tensor,
        dt_bias: Tensor,
        d: Tensor | None,
        tokens: Tokens,
        rows: Rows | None,
        states: States,
        trail: Trail | None,
        shape: Scan,
    ) -> Tensor:
        out = mixed.new_empty(len(mixed), shape.inner_size)
        recurrent_step.scan(
            mixed, gates, beta, a_log, dt_bias, d, tokens, rows, states, trail, shape, out
        )
        if rows is None or trail is not None or rows.span == 1:
            return out
        if beta is None:
            chunks = recurrent_mamba.relate(mixed, gates, a_log, dt_bias, tokens, rows, shape)
        else:
            chunks = recurrent_delta.relate(mixed, gates, beta, a_log, dt_bias, tokens, rows, shape)
        recurrent_chunks.scan(mixed, d, chunks, tokens, rows, states, shape, out)
        return out

    def gate_norm(
        self,
        x: Tensor,
        gates: Tensor,
        weight: Tensor | None,
        eps: float,
        group_size: int,
        gates_first: bool,
    ) -> Tensor:
        return recurrent_gate.gate_norm(x, gates, weight, eps, group_size, gates_first)

    def commit_trail(
        self,
        trail: Trail,
        slots: Tensor,
        length: Tensor,
        num_right: Tensor,
        states: States,
        shape: Scan,
    ) -> None:
        recurrent_trail.commit_trail(trail, slots, length, num_right, states, shape)
