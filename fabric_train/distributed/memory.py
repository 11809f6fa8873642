"""Memory in bytes: of this process, this machine, its container or job, and its GPUs; and how tensors reuse it.

torch is imported only for GPUs: the processes that encode documents need only their own memory.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")
_CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_MAX_INT = 2**31 - 1  # bytes
_GROWTH = 64 * 2**20  # bytes


def process_memory() -> int:
    """Return the resident memory of this process in bytes; 0 if the system is not Linux."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, the innermost first, of a ``controller`` such as "memory"."""
    if not _MEMBERSHIP.is_file():  # not Linux
        return
    for line in _MEMBERSHIP.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", controller):
            continue
        root = _MOUNTED / controllers
        group = root / path.lstrip("/")  # inside a container it may not exist: the container's own group is the root
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and folder.is_dir():
                yield folder


def machine_memory() -> int:
    """Return the memory that all processes of this machine, or of its container or job, may use together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _group_limits())])


def available_memory() -> int:
    """Return how much more memory processes can take here, with pages of files that the kernel can drop."""
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _group_limits())])


def device_memory() -> int | None:
    """Return the memory of the smallest GPU; None if there is none."""
    import torch

    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return min((gpu.total_memory for gpu in gpus), default=None)


def _group_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that has one, and the memory used of it, without pages of files."""
    for folder in control_groups("memory"):
        for limit_file, used_file in _CGROUP_FILES:
            limit = (folder / limit_file).read_text().strip() if (folder / limit_file).is_file() else ""
            if limit.isdigit():
                lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                counted = {name: int(value) for name, value in lines}
                prefix = "" if used_file == "memory.current" else "total_"  # with the groups inside of it
                of_files = counted[f"{prefix}active_file"] + counted[f"{prefix}inactive_file"]
                yield int(limit), int((folder / used_file).read_text()) - of_files


def reuse_freed_memory() -> None:
    """Configure glibc's malloc to keep freed memory for later tensors; do nothing with other C libraries.

    By default each tensor above 32 MB, and often smaller ones, is a mapping that returns to the kernel when it is
    freed. The next one then costs a page fault per 4 KiB, in which the kernel clears the page.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAX_INT)
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_TOP_PAD, _GROWTH)
