"""Memory on the CPU that is freed is kept for the next tensor, instead of being given back and faulted in again."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST = 2**31 - 1  # bytes, an int's
_GROWTH = 64 * 2**20


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees; other C libraries are left alone.

    By default each tensor above 32 MB, and often smaller ones, is a mapping of its own, given back to the kernel when
    it is freed. The next micro-batch's then cost a page fault for every 4 KiB, in which the kernel clears the page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_TOP_PAD, _GROWTH)
