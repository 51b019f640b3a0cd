"""The first key that a token sees in layers with a window, shared by the attention kernels."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first key in the window, or in the chunk, of the token at this position."""
    return position // WINDOW * WINDOW if CHUNKED else tl.maximum(position + 1 - WINDOW, 0)
