"""How products of one order of summation are cut: what is fixed per weight, and what is free.

Fixed are the shares of the inner dimension, and the depth at which sums of codes in float8 are
rounded to float32. The rest of a tile may be whatever is fastest for a number of rows.
"""

import functools
from dataclasses import dataclass

import torch

from slotzero.kernels.triton.launch import num_processors
from slotzero.kernels.triton.linear.tiles import MAX_ROWS, STAGED_ROWS, float8_step, padded_rows

SQUARED = 64  # features whose squares are one sum
LEAST = 64  # features of a matrix instruction
SHARE_STEP = 256  # a share is a multiple of this, and this one of every depth
FLOAT8_DEPTH = 128  # products of codes in float8 whose sum is rounded to float32
LEAST_SHARE, LONG_SHARE = 256, 2048  # values of the inner dimension
FEWEST_PROGRAMS, ENOUGH_PROGRAMS = 64, 96  # for one row, if shares are not long; if they are


@dataclass(frozen=True)
class FixedTile:
    """`features` by `rows`, whose products are added up `depth` input features at a time, loaded
    `stages` ahead; and the `shares` of the weight, which are not the tile's to choose."""

    features: int
    rows: int
    depth: int
    stages: int
    num_warps: int
    shares: int = 1

    def __str__(self) -> str:
        size = f"{self.features}x{self.rows}x{self.depth}"
        shares = f", {self.shares} shares" if self.shares > 1 else ""
        return f"fixed {size}, {self.stages} stages, {self.num_warps} warps{shares}"


@functools.cache
def shares_of(out_features: int, in_features: int) -> int:
    """Return into how many shares the inner dimension of a weight is cut: enough for one row to
    occupy the card. It follows from the weight alone."""
    tiles, shares = -(-out_features // LEAST), 1
    while in_features >= 2 * shares * LEAST_SHARE:
        is_long = in_features >= shares * LONG_SHARE
        if tiles * shares >= (ENOUGH_PROGRAMS if is_long else FEWEST_PROGRAMS):
            break
        shares *= 2
    return -(-in_features // share_depth(in_features, shares))


def share_depth(in_features: int, shares: int) -> int:
    return -(-in_features // (shares * SHARE_STEP)) * SHARE_STEP


def is_apart(tiles: int) -> bool:
    """Return whether shares are computed side by side: if tiles alone do not occupy the card."""
    return tiles <= num_processors()


def looked_up(rows: int) -> int:
    """Return the row count for which a tile is chosen."""
    return padded_rows(rows) if rows <= MAX_ROWS else 1 << (rows - 1).bit_length()


@functools.cache
def fixed_tiles_for(
    rows: int, dtype: torch.dtype, shares: int, group: int | None = None
) -> tuple[FixedTile, ...]:
    """Return the tiles worth timing for that many rows; all of them give the same bits."""
    if dtype.itemsize > 2:  # scalar multiply-adds
        return (FixedTile(LEAST, 16, 32, 2, 4, shares),)
    if dtype.itemsize == 1:
        return tuple(FixedTile(*cut, shares) for cut in _float8_cuts(rows, group))
    if rows <= 16:
        cuts = [(64, 16, 128, 5, 4), (64, 16, 256, 3, 4), (128, 16, 128, 4, 4)]
    elif rows <= STAGED_ROWS:
        cuts = [(64, 64, 128, 4, 4), (64, 32, 128, 5, 4), (128, 64, 64, 4, 4)]
    elif rows <= MAX_ROWS:
        cuts = [(128, 128, 64, 4, 8), (64, 64, 128, 3, 4), (64, 128, 64, 4, 4)]
        cuts += [(256, 128, 64, 4, 8)] if shares == 1 else []
    elif shares == 1:
        cuts = [(256, 128, 64, 4, 8), (128, 256, 64, 4, 8)]
    else:  # sums of a share and those of all shares are twice as many registers
        cuts = [(128, 128, 64, 4, 8), (128, 64, 64, 4, 4)]
    return tuple(FixedTile(*cut, shares) for cut in cuts)


def _float8_cuts(rows: int, group: int | None) -> list[tuple[int, int, int, int, int]]:
    """The depth is fixed: sums of so many products are rounded to float32."""
    depth = min(float8_step(group), FLOAT8_DEPTH)
    if rows <= 16:
        return [(64, 16, depth, 6, 4), (128, 16, depth, 5, 4)]
    if rows <= STAGED_ROWS:
        return [(64, 64, depth, 6, 4), (128, 64, depth, 4, 4)]
    return [(128, 128, depth, 4, 8)]
