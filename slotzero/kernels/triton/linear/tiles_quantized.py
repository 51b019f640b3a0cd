"""Tile shapes of products with quantised weights: a function of the shape, not tuned."""

import functools
from dataclasses import dataclass, replace

import torch

from slotzero.kernels.triton.launch import num_processors, shared_memory
from slotzero.kernels.triton.linear.tiles import MAX_ROWS, SLICED_ROWS, STAGED_ROWS
from slotzero.kernels.weights import WeightFormat

DEPTH, LEAST_DEPTH, LEAST_FLOAT8 = 128, 64, 32  # float8 products have steps of 32
STAGES = 4
MOST_SHARES, LEAST_SHARE = 8, 512  # values of the inner dimension
# Numbers whose scales are applied before the product: features of a tile at most, and bytes of
# shared memory for each number.
MOST_MIXED, MIXED_BYTES = 64, 14
AT_ONCE = 2  # programs per multiprocessor whose loads together keep the memory busy


@dataclass(frozen=True)
class CodesTile:
    """How a product is cut: `features` by `depth` numbers of the weight at a time, for `rows` rows.

    Scales are applied to the sums of a step, or to numbers (`codes.py`). With several `shares`, the
    inner dimension is split over programs, and another kernel adds the shares up.
    """

    rows: int
    features: int
    depth: int
    by_sums: bool
    stages: int
    num_warps: int
    shares: int = 1
    share: int = 1 << 30  # values of the inner dimension in each


def multiplies_float8(format: WeightFormat, in_features: int) -> bool:
    """Return whether float8 codes of rows and weight are multiplied as they are: if each step of a
    product has one scale. Otherwise rows are rounded, and then as those of any other format."""
    return (
        format.activations != "plain"
        and format.codes == "float8"
        and not format.is_scattered
        and not format.has_offsets
        and _step(format, in_features) >= LEAST_FLOAT8
    )


@functools.cache
def tile_for(
    rows: int, features: int, format: WeightFormat, in_features: int, dtype: torch.dtype
) -> CodesTile:
    """Return the tile for a product of rows of this type, or of their codes in float8.

    Up to 64 rows are bound by the time to read the weight: one tile has all rows, and the features
    and the shares of the inner dimension make enough programs to keep the memory busy. More rows
    are bound by matrix units, which are fastest on large tiles, as long as these fill the card.
    """
    size = SLICED_ROWS if rows <= SLICED_ROWS else STAGED_ROWS if rows <= STAGED_ROWS else 128
    cuts = -(-rows // size)
    each = 64  # the fewest that Hopper's matrix units take
    if size == 128 and cuts * -(-features // 128) >= num_processors():
        each = 128
    tile = cut(size, each, format, in_features, dtype)
    if rows > MAX_ROWS:
        return tile
    programs = cuts * -(-features // tile.features)
    wanted = AT_ONCE * num_processors() // programs
    shares = max(1, min(wanted, MOST_SHARES, in_features // LEAST_SHARE))
    steps = -(-in_features // tile.depth)
    share = -(-steps // shares) * tile.depth
    return replace(tile, shares=-(-in_features // share), share=share)  # none of them is empty


@functools.cache
def cut(
    rows: int, features: int, format: WeightFormat, in_features: int, dtype: torch.dtype
) -> CodesTile:
    """Return the tile of this size, or of fewer features, with the depth and the stages that format
    and card allow."""
    float8 = multiplies_float8(format, in_features)
    step = _step(format, in_features)
    by_sums = float8 or step >= LEAST_DEPTH
    depth = min(step, DEPTH) if by_sums else DEPTH
    if not float8 and dtype.itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        return CodesTile(rows, 32, min(depth, 32), by_sums, 2, 4)
    if not by_sums:
        features = min(features, MOST_MIXED)
    staged = rows * (1 if float8 else dtype.itemsize) + features * format.bits / 8
    decoded = 0 if float8 else features * depth * (dtype.itemsize if by_sums else MIXED_BYTES)
    stages = min(STAGES, int((shared_memory() - decoded) / (staged * depth)))
    warps = 8 if rows * features > 64 * 64 else 4
    return CodesTile(rows, features, depth, by_sums, max(2, stages), warps)


@functools.cache
def fixed_tile(rows: int, format: WeightFormat, in_features: int, dtype: torch.dtype) -> CodesTile:
    """Return the tile of deterministic mode: only its rows depend on those of the product.

    Offsets are applied to numbers: applied to sums, they would need the sum of a row, whose order
    depends on the tile.
    """
    tile = cut(STAGED_ROWS, 64, format, in_features, dtype)
    if format.has_offsets and tile.by_sums:
        tile = replace(tile, by_sums=False, depth=min(DEPTH, tile.depth))
    return replace(tile, rows=SLICED_ROWS if rows <= SLICED_ROWS else STAGED_ROWS)


def _step(format: WeightFormat, in_features: int) -> int:
    """Return the largest power of two that divides the groups: the most that has one scale."""
    if format.is_scattered:
        return 1
    if format.num_groups(in_features) == 1:
        return DEPTH
    assert format.group is not None
    return format.group & -format.group
