"""How large a tree may be. It knows no tensors, so that settings can be checked with it."""

MAX_PLACES = 63
"""Of a tree: the bits of an int64 without its sign."""
