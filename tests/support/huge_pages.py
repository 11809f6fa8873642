"""Gather a process's memory in huge pages, so that its forks take a fraction of the time.

A fork copies the entry of each page in the tables. The tests fork processes of half a gigabyte thousands of times.
"""

import ctypes
import sys

_MADV_COLLAPSE = 25  # Linux 6.1
_SIZE = 1 << 21


def gather_in_huge_pages() -> None:
    """Replace the pages that this process has written by huge ones; where the kernel cannot, they stay as they are.

    What is allocated later gets pages of the usual size, so the memory that a run needs stays what it would be.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        areas = [line.split() for line in maps]
    for addresses, access, _, _, file, *_ in areas:
        if access == "rw-p" and file == "0":
            first, last = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-first // _SIZE) * _SIZE, last // _SIZE * _SIZE
            if begin < end:
                advise(begin, end - begin, _MADV_COLLAPSE)
