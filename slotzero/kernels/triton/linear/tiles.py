"""How a product over few rows may be cut, and which cuts are worth trying."""

import functools
from dataclasses import dataclass

MAX_ROWS = 256
PLAIN_ROWS = 8  # up to here a product may do without matrix units
SLICED_ROWS = 16  # up to here a product may be sliced along the inner dimension
STAGED_ROWS = 64  # up to here a tile has all the rows
BULK_ROWS = 128  # that a large tile has
PADDED_ROWS = (1, 8, 16, 64, 104, 128, 232, MAX_ROWS)
SHARES, WHOLE = 2, 8  # of a product of the library; numbers that are read at once
WHOLE_RUN = 384  # weights of a feature, at most, that one warp asks for at once


@dataclass(frozen=True)
class Tile:
    """How a product is cut: `features` by `depth` weights at a time. Either `slices` of them lie
    side by side along the inner dimension, summed at the end, or loads run `stages` ahead. With
    several `shares`, the inner dimension is split over programs; another kernel adds them up. Of
    slices, several lots may be requested `ahead`, before the first is used. One slice is plain
    multiply-adds; over several rows each warp has features of its own, and where a program has
    fewer of them than warps, these split its depth. A tile with `rows` is copied in bulk, and has
    that many; other tiles have all."""

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
    """A product that is left to the library: at once, or as several `shares` of the inner
    dimension, in float32; another kernel adds them up."""

    shares: int = 1

    def __str__(self) -> str:
        return f"cublas, {self.shares} shares" if self.shares > 1 else "cublas"


Way = Cublas | Tile
LIBRARY = Cublas()


def padded_rows(rows: int) -> int:
    """The rows that a choice is made for, and up to 64 those that a kernel is compiled for; few
    sizes, because each is timed, or compiled, at the start."""
    return next(size for size in PADDED_ROWS if rows <= size)


@functools.cache
def ways_for(rows: int, inner: int, kind: str) -> tuple[Way, ...]:
    """What is worth trying: what the library can do, and tiles. It would share out many a product
    over more than 64 rows itself, but then adds the shares up in a kernel of its own, before ours
    that adds them to the residual."""
    shared = kind == "add" and rows > STAGED_ROWS and inner % (SHARES * WHOLE) == 0
    library = (LIBRARY, Cublas(SHARES)) if shared else (LIBRARY,)
    return *library, *tiles_for(rows, inner, kind)


@functools.cache
def tiles_for(rows: int, inner: int, kind: str) -> tuple[Tile, ...]:
    """What is worth trying for that many rows, found on an H200, see benchmarks/h200. A product
    that is added to the residual ("add") has few features, so its inner dimension may be shared
    out; a stage of a "gated" one holds twice the weights. All rows of one padded size have the
    same: a choice is made once for them."""
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


def _bulk(rows: int, adds: bool) -> tuple[Tile, ...]:
    """Few, because each is compiled where a model's shapes are not known. Over more than 16 rows,
    none that adds to the residual was ever the fastest. Those of 128 rows are for rows that all but
    fill them: 80 took a third longer than 128 (H200)."""
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
    """All weights of 16 features at once, in as few tiles as fit, where registers hold them."""
    tiles = []
    for slices in (4, 8):
        run = -(-inner // (16 * slices)) * 16  # of one slice, in matrix units
        depth = next(depth for depth in (64, 32, 16) if run % depth == 0)
        if run <= WHOLE_RUN:
            tiles.append(Tile(16, depth, slices, 0, num_warps=slices, ahead=run // depth))
    return tiles
