"""Configure malloc to reuse freed memory, and copy tensors to a device without waiting."""

import ctypes
import sys

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MAX_INT = 2**31 - 1  # bytes
_GROWTH = 64 * 2**20  # bytes


def reuse_freed_memory() -> None:
    """Configure glibc's malloc to keep freed memory for later tensors; do nothing with other C libraries.

    By default each tensor above 32 MB, and often smaller ones, is a separate mapping that returns to the kernel when it
    is freed. The next micro-batch's tensors then cost a page fault per 4 KiB, in which the kernel clears the page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_INT)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_TOP_PAD, _GROWTH)


def to_device_async(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a small tensor on a device; the host does not wait for the device's pending work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # the host would wait for a copy from unpinned memory
    return tensor.to(device, non_blocking=True)
