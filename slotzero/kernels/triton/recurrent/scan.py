"""The scan of recurrent layers: short rows token by token, long ragged rows in chunks.

Long rows of kda are scanned token by token, too: in a chunk, every dimension of a key would decay
by itself. In deterministic mode all rows are, since chunks have other bits than single tokens.
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
    in_turn: bool = False,
) -> Tensor:
    """See RecurrentKernels.scan. In turn: in deterministic mode."""
    is_long = in_turn or shape.kind == "kda"  # long rows, too, token by token; padding gets zeros
    new = mixed.new_zeros if is_long else mixed.new_empty
    out = new(len(mixed), shape.inner_size)
    scan_in_turn(mixed, gates, beta, weights, step, shape, out, in_turn)
    tokens, rows, states, trail = step
    if rows is None or trail is not None or rows.span == 1 or is_long:
        return out
    if beta is None:
        cut = mamba.relate(mixed, gates, weights, tokens, rows, shape)
    else:
        cut = delta.relate(mixed, gates, beta, weights, tokens, rows, shape)
    chunks.scan_chunks(mixed, weights.d, cut, tokens, rows, states, shape, out)
    return out
