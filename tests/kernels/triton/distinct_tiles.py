"""Tiles whose products differ for the device of the tests.

The interpreter loads nothing ahead and has no warps: it runs the same operations for any number of
stages, and for any number of warps unless a plain tile divides its lanes among them.
"""

from collections.abc import Iterable
from dataclasses import replace

from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear.tiles import Tile


def distinct(tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """Return the tiles to test: all of them on a GPU."""
    if not INTERPRETED:
        return tuple(tiles)
    by_operations = {
        replace(
            tile, stages=min(1, tile.stages), num_warps=tile.num_warps * (tile.slices == 1)
        ): tile
        for tile in tiles
    }
    return tuple(by_operations.values())
