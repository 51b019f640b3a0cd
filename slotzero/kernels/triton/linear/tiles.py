"""Tile shapes of products over few rows, and the candidates worth timing."""

import functools
from dataclasses import dataclass

MAX_ROWS = 256
PLAIN_ROWS = 8  # up to here a product may be computed without matrix units
SLICED_ROWS = 16  # up to here a product may be sliced along the inner dimension
STAGED_ROWS = 64  # up to here a tile has all the rows
BULK_ROWS = 128  # rows of a large TMA tile
PADDED_ROWS = (1, 8, 16, 64, 104, 128, 232, MAX_ROWS)
SHARES, WHOLE = 2, 8  # of a cuBLAS product; values that are read at once
LONGEST_ROW = 32768  # that a program gates and rounds to float8
MOST_FLOAT8 = 256  # depth of a tile of codes in float8
WHOLE_RUN = 384  # weights of a feature that one warp loads at once, at most


@dataclass(frozen=True)
class Tile:
    """How a product is cut: `features` by `depth` weights at a time.

    Either `slices` of them lie side by side along the inner dimension and are summed at the end, or
    loads run `stages` ahead. With several `shares`, the inner dimension is split over programs
    (split-K), and another kernel adds the shares up. With slices, `ahead` sets of them are loaded
    before the first is used. One slice does not use matrix units; over several rows each warp then
    has its own features, and if a program has fewer features than warps, the warps split its depth.
    A tile with `rows` is copied by TMA and has that many rows; other tiles have all rows.
    """

    features: int
    depth: int
    slices: int
    stages: int
    num_warps: int
    shares: int = 1
    ahead: int = 1
    rows: int = 0

    def __str__(self) -> str:
        how = f"{self.slices} slices" if self.slices else f"{self.stages} stages"
        if self.ahead > 1:
            how = f"{self.ahead} of {how}"
        shares = f", {self.shares} shares" if self.shares > 1 else ""
        rows = f"bulk of {self.rows}, " if self.rows else ""
        return f"{rows}{self.features}x{self.depth}, {how}, {self.num_warps} warps{shares}"


@dataclass(frozen=True)
class Cublas:
    """A product computed by cuBLAS: at once, or in float32 as several `shares` of the inner
    dimension, which another kernel adds up."""

    shares: int = 1

    def __str__(self) -> str:
        return f"cublas, {self.shares} shares" if self.shares > 1 else "cublas"


Way = Cublas | Tile
LIBRARY = Cublas()


def padded_rows(rows: int) -> int:
    """Return the row count that a tile is chosen for and, up to 64, a kernel is compiled for.

    There are few sizes, because each is timed, or compiled, at startup.
    """
    return next(size for size in PADDED_ROWS if rows <= size)


@functools.cache
def ways_for(rows: int, inner: int, kind: str) -> tuple[Way, ...]:
    """Return the candidates worth timing: cuBLAS, and tiles.

    cuBLAS would split many products over more than 64 rows itself, but it adds the shares up in a
    separate kernel, before ours that adds them to the residual.
    """
    shared = kind == "add" and rows > STAGED_ROWS and inner % (SHARES * WHOLE) == 0
    library = (LIBRARY, Cublas(SHARES)) if shared else (LIBRARY,)
    return *library, *tiles_for(rows, inner, kind)


@functools.cache
def tiles_for(rows: int, inner: int, kind: str) -> tuple[Tile, ...]:
    """Return the tiles worth timing for that many rows, found on an H200, see benchmarks/h200.

    A product that is added to the residual ("add") has few features, so its inner dimension may be
    split; a stage of a "gated" product holds twice the weights. All row counts of one padded size
    have the same tiles: the choice is made once for them.
    """
    if rows == 1:
        shapes = ((8, 1024, 4), (8, 512, 4), (2, 2048, 4), (4, 2048, 8), (2, 4096, 8), (1, 4096, 4))
        return tuple(Tile(f, depth, 1, 0, warps) for f, depth, warps in shapes)
    adds = kind == "add"
    bulk = _bulk(rows, adds)
    if rows > STAGED_ROWS:
        return bulk
    plain = [(4, 512, 4), (4, 640, 4), (2, 768, 4)] if rows <= PLAIN_ROWS else []
    if rows <= SLICED_ROWS:
        sliced = [(8, 128, 8, 8), (8, 256, 8, 8), (16, 64, 8, 4), (16, 128, 4, 4), (16, 256, 4, 4)]
        staged = [(16, 256, 4, 2), (32, 256, 3, 4), (32, 256, 4, 4), (32, 128, 5, 4)]
        shared = [(32, 256, 3, 4, 4), (64, 128, 4, 4, 4)]
        whole = _whole(inner)
    else:
        sliced, whole = [], []
        staged = [
            (16, 128, 6, 4),
            (32, 128, 5, 4),
            (64, 64, 4, 4),
            (64, 128, 4, 4),
            (128, 64, 4, 8),
        ]
        if kind != "gated":
            staged += [(64, 128, 5, 4), (64, 128, 6, 4)]
        shared = [(64, 128, 4, 4, 2), (64, 128, 4, 4, 4)]
    return (
        *(Tile(f, depth, slices, 0, warps) for f, depth, slices, warps in sliced),
        *whole,
        *(Tile(f, depth, 1, 0, warps) for f, depth, warps in plain),
        *(Tile(f, depth, 0, stages, warps) for f, depth, stages, warps in staged),
        *(Tile(f, depth, 0, n, warps, shares) for f, depth, n, warps, shares in shared if adds),
        *bulk,
    )


def float8_step(group: int | None) -> int:
    """Return the most inputs of a float8 product that have one scale, and whose sum matrix units
    compute exactly enough: a power of two."""
    return MOST_FLOAT8 if group is None else min(group & -group, MOST_FLOAT8)


@functools.cache
def float8_tiles_for(rows: int, kind: str, group: int | None = None) -> tuple[Tile, ...]:
    """Return the tiles worth timing for codes in float8, of which a feature or a group of its
    inputs shares a scale.

    With groups only TMA tiles are possible, see linear_tma.py. Of few rows, matrix units take at
    least 64 features: 64 gates and 64 values.
    """
    if rows <= SLICED_ROWS:
        size, cuts = 16, [(64, 256, 4, 4), (64, 256, 5, 4), (64, 128, 8, 4)]
        if kind == "gated":
            cuts = [(128, 128, 4, 4), (128, 128, 5, 4), (256, 128, 3, 8)]
    elif rows <= STAGED_ROWS:
        size, cuts = 64, [(64, 128, 8, 4), (64, 256, 4, 4), (128, 128, 4, 4), (128, 128, 5, 8)]
        if kind == "gated":
            cuts += [(256, 128, 4, 8)]
    elif rows <= MAX_ROWS and padded_rows(rows) % BULK_ROWS:
        size, cuts = 64, [(128, 128, 4, 8)]
    else:
        size, cuts = BULK_ROWS, [(128, 128, 5, 8), (128, 128, 3, 8)]
    depth_of_scale = float8_step(group)
    bulk = dict.fromkeys(
        Tile(features, min(depth, depth_of_scale), 0, stages, warps, rows=size)
        for features, depth, stages, warps in cuts
    )
    plain = [(2, 4096, 4), (8, 4096, 8), (4, 2048, 4), (8, 1024, 4), (8, 512, 4)]
    sliced = [Tile(16, 128, 8, 0, 8, ahead=4)]
    if group is not None or rows > SLICED_ROWS:
        return tuple(bulk)
    if rows > 1:
        return *bulk, *sliced
    return *bulk, *sliced, *(Tile(f, depth, 1, 0, warps) for f, depth, warps in plain)


def _bulk(rows: int, adds: bool) -> tuple[Tile, ...]:
    """Return the TMA tiles: few, because each is compiled for shapes that have not been tuned.

    Above 16 rows, no TMA tile that adds to the residual was ever the fastest. Tiles of 128 rows are
    only for row counts that almost fill them: 80 rows took a third longer than 128 (H200).
    """
    if rows <= SLICED_ROWS:
        size, cuts = 16, [(64, 128, 5, 4), (64, 256, 3, 4)]
    elif adds:
        size, cuts = 0, []
    elif rows <= STAGED_ROWS:
        size, cuts = 64, [(64, 128, 4, 4), (64, 128, 3, 4), (128, 64, 4, 4)]
    elif padded_rows(rows) % BULK_ROWS:
        size, cuts = 64, [(64, 128, 3, 4)]
    else:
        size, cuts = BULK_ROWS, [(64, 64, 6, 4), (128, 64, 3, 8), (256, 64, 4, 8)]
    return tuple(
        Tile(features, depth, 0, stages, warps, rows=size)
        for features, depth, stages, warps in cuts
    )


def _whole(inner: int) -> list[Tile]:
    """Return tiles that load all weights of 16 features at once, if registers hold them."""
    tiles = []
    for slices in (4, 8):
        run = -(-inner // (16 * slices)) * 16  # per slice, for matrix units
        depth = next(depth for depth in (64, 32, 16) if run % depth == 0)
        if run <= WHOLE_RUN:
            tiles.append(Tile(16, depth, slices, 0, num_warps=slices, ahead=run // depth))
    return tiles
