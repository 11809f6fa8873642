"""The memory of this machine, its devices and this process, in bytes."""

import os
from pathlib import Path

import torch

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory() -> int:
    """Return the memory that all processes of this machine, or container, may use together."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in map(Path, _CGROUP_LIMITS):
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def process_memory() -> int:
    """Return the resident memory of this process; 0 if the system is not Linux."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.is_file() else 0


def device_memory() -> int | None:
    """Return the memory of the smallest GPU; None if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return min((torch.cuda.get_device_properties(index).total_memory for index in range(count)), default=None)
