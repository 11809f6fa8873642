"""Find the limits that a container or a job sets with Linux control groups."""

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, of version 1 or 2, the innermost first.

    Args:
        controller: Such as "memory" or "pids"; of version 2, where a folder is for all controllers, any.
    """
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
