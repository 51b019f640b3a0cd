"""The scan of recurrent layers: short rows token by token, long ragged rows in chunks.

Long rows of kda are scanned token by token, too: in a chunk, every dimension of a key would decay
by itself.
"""

from torch import Tensor

from slotzero.kernels.triton.recurrent import chunks, delta, mamba
from slotzero.kernels.triton.recurrent.step import scan_in_turn
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights


def scan(
    mixed: Tensor,
    gates: Tensor,
    beta: Tensor | None,
    weights: ScanWeights,
    step: RecurrentStep,
    shape: Scan,
) -> Tensor:
    is_kda = shape.kind == "kda"  # long rows, too, token by token; padding gets zeros
    new = mixed.new_zeros if is_kda else mixed.new_empty
    out = new(len(mixed), shape.inner_size)
    scan_in_turn(mixed, gates, beta, weights, step, shape, out)
    tokens, rows, states, trail = step
    if rows is None or trail is not None or rows.span == 1 or is_kda:
        return out
    if beta is None:
        cut = mamba.relate(mixed, gates, weights, tokens, rows, shape)
    else:
        cut = delta.relate(mixed, gates, beta, weights, tokens, rows, shape)
    chunks.scan_chunks(mixed, weights.d, cut, tokens, rows, states, shape, out)
    return out
