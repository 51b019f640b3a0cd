"""Tile shapes of products with weights in fragments."""

import functools
from dataclasses import dataclass

from slotzero.kernels.triton.launch import num_processors
from slotzero.kernels.triton.linear.fragments import DEPTH
from slotzero.kernels.triton.linear.tiles import SLICED_ROWS, STAGED_ROWS

FEW_ROWS = 8
MOST_SHARES = 8
MANY = 6  # blocks per multiprocessor from which features alone make enough programs


@dataclass(frozen=True)
class FragmentTile:
    """How a product is cut: `blocks` of 16 features for `rows` rows.

    With several `slices`, each warp multiplies blocks at other depths, and the sums are added up at
    the end; with one, each warp has its own features. The weight is loaded `ahead` steps ahead of
    its use. With several `shares`, the inner dimension is split over programs, the last of which
    adds the shares up.
    """

    rows: int
    blocks: int
    slices: int
    ahead: int
    num_warps: int
    shares: int = 1
    stages: int = 1  # in which rows are copied to shared memory, if warps share them

    def __str__(self) -> str:
        shares = f", {self.shares} shares" if self.shares > 1 else ""
        if self.stages > 1:
            shares += f", {self.stages} stages"
        how = f"{self.ahead} of {self.slices} slices, {self.num_warps} warps"
        return f"{self.blocks} blocks for {self.rows}, {how}{shares}"


@functools.cache
def tile_for(rows: int, features: int, in_features: int, is_gated: bool = False) -> FragmentTile:
    """Return the tile for a weight [features, in_features]; a gated tile has as many gates as
    values.

    Up to 16 rows, the weight's loads in flight decide. A weight of many blocks has enough programs
    to keep the memory busy; one of few blocks is cut into more slices, loaded further ahead. More
    rows are multiplied by warps that share them, in about one program per multiprocessor.
    """
    depths, blocks = -(-in_features // DEPTH), -(-features // 16)
    if rows <= SLICED_ROWS:
        size = FEW_ROWS if rows <= FEW_ROWS else SLICED_ROWS
        if blocks >= MANY * num_processors():
            return _sliced(size, 2, 4, 1 if size == FEW_ROWS else 2, depths)
        return _sliced(size, 2 if is_gated else 1, 8, 4 if size == FEW_ROWS else 2, depths)
    size = 32 if rows <= 32 else STAGED_ROWS
    each = 8
    programs = -(-rows // size) * -(-blocks // each)
    if programs >= num_processors():  # two at once on each
        return FragmentTile(size, each, 1, 1, 8)
    shares = max(1, min(num_processors() // programs, MOST_SHARES, depths // 4))
    share = -(-depths // shares)
    return FragmentTile(size, each, 1, min(2, share), 8, -(-depths // share), stages=2)


@functools.cache
def expert_tile(rows: int, in_features: int) -> FragmentTile:
    """Return the tile for blocks of at most `rows` rows of an expert."""
    depths = -(-in_features // DEPTH)
    if rows <= SLICED_ROWS:
        size, slices = (FEW_ROWS, 4) if rows <= FEW_ROWS else (SLICED_ROWS, 2)
        return _sliced(size, 2, slices, 2, depths)
    return FragmentTile(32 if rows <= 32 else STAGED_ROWS, 8, 1, 1, 8, stages=2)


def _sliced(rows: int, blocks: int, slices: int, ahead: int, depths: int) -> FragmentTile:
    """Return a tile of `slices` slices, or of fewer if some would have nothing to multiply."""
    while slices > 2 and depths % slices and depths < 4 * slices:
        slices //= 2
    return FragmentTile(rows, blocks, slices, max(1, min(ahead, depths // slices)), slices)
