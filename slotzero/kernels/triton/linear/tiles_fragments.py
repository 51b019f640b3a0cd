"""Tile shapes of products with weights in fragments."""

import functools
from dataclasses import dataclass

from slotzero.kernels.triton.launch import num_processors
from slotzero.kernels.triton.linear.fragments import DEPTH
from slotzero.kernels.triton.linear.tiles import SLICED_ROWS, STAGED_ROWS

FEW_ROWS = 8
MOST_SHARES = 8


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
    registers: int | None = None  # of a thread at most, so that more programs run at once

    def __str__(self) -> str:
        shares = f", {self.shares} shares" if self.shares > 1 else ""
        if self.stages > 1:
            shares += f", {self.stages} stages"
        if self.registers is not None:
            shares += f", {self.registers} registers"
        how = f"{self.ahead} of {self.slices} slices, {self.num_warps} warps"
        return f"{self.blocks} blocks for {self.rows}, {how}{shares}"


@functools.cache
def tile_for(rows: int, features: int, in_features: int) -> FragmentTile:
    """Return the tile for a weight [features, in_features]; a tile with an activation has as many
    gates as values."""
    depths, blocks = -(-in_features // DEPTH), -(-features // 16)
    if rows <= SLICED_ROWS:
        size = FEW_ROWS if rows <= FEW_ROWS else SLICED_ROWS
        slices = 4 if depths % 4 == 0 or depths >= 16 else 2
        return FragmentTile(size, 2, slices, max(1, min(2, depths // slices)), slices)
    size = 32 if rows <= 32 else STAGED_ROWS
    each = 8
    programs = -(-rows // size) * -(-blocks // each)
    shares = max(1, min(num_processors() // programs, MOST_SHARES, depths // 4))
    share = -(-depths // shares)
    return FragmentTile(size, each, 1, 1, 8, -(-depths // share), stages=2)


@functools.cache
def expert_tile(rows: int, in_features: int) -> FragmentTile:
    """Return the tile for a block of so many rows of an expert."""
    if rows <= SLICED_ROWS:
        slices = 4 if -(-in_features // DEPTH) >= 16 else 2
        return FragmentTile(rows, 2, slices, 2, slices)
    return FragmentTile(rows, 8, 1, 1, 8, stages=2)
