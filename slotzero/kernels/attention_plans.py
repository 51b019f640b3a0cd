"""Attention plans: how the attention of a step is split over programs, once for all layers.

Each type of plan belongs to one kernel. Only that kernel and `Kernels.plan`, which creates plans,
read the fields.
"""

from typing import NamedTuple

from torch import Tensor

from slotzero.kernels.types import Branches, Tokens


class TorchPlan(NamedTuple):
    """The plan of the kernel sets that attend token by token."""

    tokens: Tokens
    branches: Branches | None
    taken: Tensor | None = None
    """[T, positions] uint8: the keys that an indexer has selected; None: all."""


class DecodePlan(NamedTuple):
    """Contexts cut into chunks of one common size, [num_chunks] each, and scratch to merge them."""

    row: Tensor  # -1: unused
    slot: Tensor
    begin: Tensor  # its first position
    end: Tensor  # one past its last position
    first: Tensor  # the first chunk of its row
    num: Tensor  # number of chunks of its row
    done: Tensor  # [rows, kv_heads]: programs that have finished; 0 between layers
    partial: Tensor  # [num_chunks, heads, value_dim] float32
    peak: Tensor  # [num_chunks, heads] float32
    total: Tensor


class StreamKPlan(NamedTuple):
    """All contexts end to end, cut into equal shares (stream-K).

    The scratch of part (row, share) is at index row + share.
    """

    row: Tensor  # [shares]: the row of the share's first tile
    begin: Tensor  # [shares]: the first key of that tile
    tile: Tensor  # [shares + 1]: first tile, counted over all rows; last entry: number of tiles
    slot: Tensor  # [rows + 1], like the next three: the loop reads one row ahead
    newest: Tensor  # the newest position; the keys before it are in the pages
    first: Tensor  # the first of the row's parts
    num: Tensor  # number of the row's parts
    done: Tensor  # [rows, kv_heads]: parts that are stored; 0 between layers
    partial: Tensor  # [rows + shares, heads, value_dim] float32
    peak: Tensor  # [rows + shares, heads] float32
    total: Tensor


class VerifyPlan(NamedTuple):
    """Uniform rows, each a few new tokens behind a stored context.

    `chunks` cut the contexts; its scratch is for all (token, head of the group) pairs of a row:
    [num_chunks, kv_heads, pairs, value_dim], and without value_dim for peak and total.
    """

    starts: Tensor  # [rows]
    token_slots: Tensor  # [T]
    chunks: DecodePlan
    branches: Branches | None


class PrefillPlan(NamedTuple):
    """Ragged rows, cut into blocks of tokens."""

    tokens: Tokens
    blocks: Tensor  # [blocks, 5] int32: slot, first token, number of tokens, position, row start
    branches: Branches | None


class KeyRuns(NamedTuple):
    """Runs of chunks of each block's keys, [runs] each, and scratch to merge the chunks."""

    block: Tensor  # -1: unused
    first: Tensor  # its first chunk
    last: Tensor  # one past its last chunk
    num: Tensor  # number of runs of its block
    store: Tensor  # where chunk 0 of the block would be in the scratch
    done: Tensor  # [blocks, programs]: runs that are finished; 0 between layers
    partial: Tensor  # [stored chunks, kv_heads, pairs, value_dim] float32
    peak: Tensor  # [stored chunks, programs, pairs] float32
    total: Tensor


class FixedPlan(NamedTuple):
    """Rows of any kind, cut into blocks of tokens, whose keys are cut into chunks at positions that
    do not depend on the step."""

    tokens: Tokens
    blocks: Tensor  # as in PrefillPlan
    size: int  # most tokens of a block
    branches: Branches | None
    runs: KeyRuns | None  # None: a program takes all keys of its block


class MlaPlan(NamedTuple):
    """MLA rows, or blocks of ragged ones, whose contexts are cut into chunks."""

    slots: Tensor  # [T]
    positions: Tensor
    starts: Tensor  # [rows]: the last position that the first token reads from the pages
    firsts: Tensor | None  # with blocks: the first token; the next: the number of tokens
    sizes: Tensor | None
    row: Tensor  # [num_chunks], like the next five: as in DecodePlan
    slot: Tensor
    begin: Tensor
    end: Tensor  # in a row's last chunk: one past the position of the row's first token
    first: Tensor
    num: Tensor
    partial: Tensor  # [2 * spare, pairs of a row, latent] float32
    peak: Tensor  # [2 * spare, pairs of a row] float32
    total: Tensor
    bases: Tensor | None  # this and the next: as in Branches
    seen: Tensor | None
    own: Tensor | None  # blocks of mla_prefill.py; None: all keys are read from the pages


AttentionPlan = (
    TorchPlan | DecodePlan | StreamKPlan | VerifyPlan | PrefillPlan | FixedPlan | MlaPlan
)
