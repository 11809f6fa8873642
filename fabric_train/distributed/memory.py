"""Memory in bytes: of this process, this machine, its container or job, and its GPUs; and how tensors reuse it.

torch is imported only for GPUs: the processes that encode documents need only their own memory.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")
# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MAX_INT = 2**31 - 1  # bytes
_HEAP_GROWTH = 64 * 2**20  # bytes


def process_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system is not Linux."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0
    num_resident_pages = int(statm.read_text().split()[1])
    return num_resident_pages * os.sysconf("SC_PAGE_SIZE")


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, the innermost first, of a ``controller`` such as "memory"."""
    if not _CGROUP_MEMBERSHIP.is_file():  # not Linux
        return
    for line in _CGROUP_MEMBERSHIP.read_text(encoding="utf-8").splitlines():
        # "5:memory:/docker/…" in version 1, "0::/docker/…" in version 2, which has one tree for all controllers
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", controller):
            continue
        root = _CGROUP_MOUNT / controllers
        group = root / path.lstrip("/")
        # inside a container the path may not exist: the container's own group is the root
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and folder.is_dir():
                yield folder


def machine_memory() -> int:
    """Return the bytes that all processes of this machine, or of its container or job, may use together."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _memory_groups():
        memory = min(memory, group.limit)
    return memory


def available_memory() -> int:
    """Return how many bytes more processes can take here, with pages of files that the kernel can drop."""
    memory = psutil.virtual_memory().available
    for group in _memory_groups():
        memory = min(memory, group.limit - group.used)
    return memory


def device_memory() -> int | None:
    """Return the bytes of the smallest GPU; None if there is none."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return min((gpu.total_memory for gpu in gpus), default=None)


@dataclass(frozen=True)
class _MemoryGroup:
    """A control group with a memory limit."""

    limit: int
    """Bytes."""
    used: int
    """Bytes, without pages of files, which the kernel drops when it needs memory."""


def _memory_groups() -> Iterator[_MemoryGroup]:
    """Yield those control groups of this process that limit its memory, the innermost first."""
    for folder in control_groups("memory"):
        if (folder / "memory.max").is_file():  # cgroup version 2
            limit = (folder / "memory.max").read_text().strip()  # a number or "max"
            usage_path = folder / "memory.current"
            prefix = ""
        elif (folder / "memory.limit_in_bytes").is_file():  # version 1
            limit = (folder / "memory.limit_in_bytes").read_text().strip()
            usage_path = folder / "memory.usage_in_bytes"
            prefix = "total_"  # these statistics include the inner groups, as the usage does
        else:
            continue
        if not limit.isdigit():
            continue
        statistics = {}
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            statistics[name] = int(value)
        file_pages = statistics[f"{prefix}active_file"] + statistics[f"{prefix}inactive_file"]
        usage = int(usage_path.read_text())
        yield _MemoryGroup(int(limit), usage - file_pages)


def reuse_freed_memory() -> None:
    """Configure glibc's malloc to keep freed memory for later tensors; do nothing with other C libraries.

    By default each tensor above 32 MB, and often smaller ones, is a mapping that returns to the kernel when it is
    freed. The next tensor then costs a page fault per 4 KiB, in which the kernel clears the page.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_INT)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_TOP_PAD, _HEAP_GROWTH)
