"""Host memory: what is freed is kept for the next tensor, and what goes to a device goes without waiting for it."""

import ctypes
import sys

import torch

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


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device, without the host's waiting for what the device still has to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # out of other memory the copy would be waited for
    return tensor.to(device, non_blocking=True)
