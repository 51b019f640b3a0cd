"""Pages of memory that a process gives back to the operating system, while it keeps its addresses.

The rule: only whole pages inside of a range are given back. They read as zeros (or, where a file is
mapped, as the file) until they are written again.
"""

import ctypes
import os

_PAGE = os.sysconf("SC_PAGE_SIZE")
_DONTNEED = 4  # MADV_DONTNEED, on Linux


def give_back(address: int, num_bytes: int) -> int:
    """Give back the pages of a range, and return the bytes of those that were in memory."""
    begin = -(-address // _PAGE) * _PAGE
    size = (address + num_bytes) // _PAGE * _PAGE - begin
    if size <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    pages, place = (ctypes.c_ubyte * (size // _PAGE))(), ctypes.c_void_p(begin)
    if libc.mincore(place, ctypes.c_size_t(size), pages) or libc.madvise(
        place, ctypes.c_size_t(size), _DONTNEED
    ):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return sum(page & 1 for page in bytes(pages)) * _PAGE
