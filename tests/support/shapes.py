"""Unusual attention shapes: (heads, KV heads, head size, page size)."""

SHAPES = [
    (9, 3, 64, 16),
    (4, 4, 16, 4),
    (6, 1, 80, 32),
    (2, 2, 96, 1),
    (8, 2, 128, 16),
    (5, 5, 6, 8),
]
