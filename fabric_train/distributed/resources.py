"""The memory of this machine and its devices, in bytes."""

import os
from collections.abc import Iterator

import psutil
import torch

from fabric_train.distributed.control_groups import control_groups

_CGROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def machine_memory() -> int:
    """Return the memory that all processes of this machine, or of its container or job, may use together."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _group_limits())])


def available_memory() -> int:
    """Return how much more memory processes can take here: of the machine, and of its container or job.

    Pages of files that the kernel can drop count as available.
    """
    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _group_limits())])


def device_memory() -> int | None:
    """Return the memory of the smallest GPU; None if there is none."""
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return min((gpu.total_memory for gpu in gpus), default=None)


def _group_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that has one, and what is used of it without pages of files."""
    for folder in control_groups("memory"):
        for limit_file, used_file in _CGROUP_FILES:
            limit = (folder / limit_file).read_text().strip() if (folder / limit_file).is_file() else ""
            if limit.isdigit():
                lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                counted = {name: int(value) for name, value in lines}
                prefix = "" if used_file == "memory.current" else "total_"  # with the groups inside of it
                of_files = counted[f"{prefix}active_file"] + counted[f"{prefix}inactive_file"]
                yield int(limit), int((folder / used_file).read_text()) - of_files
