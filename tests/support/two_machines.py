"""Two machines on one: network namespaces joined by a cable, which nothing else leads into. Needs root and iproute2."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@contextmanager
def two_machines() -> Iterator[tuple[list[str], list[str]]]:
    """Yield for each machine the start of a command line that runs the rest of it there.

    Both have this machine's name and files; on both the name means 127.0.0.1, as in many installations.
    """
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and ip (apt-get install iproute2)")
    names = [f"ft{os.getpid()}-{number}" for number in (1, 2)]
    cable = [f"v{name}"[:15] for name in names]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")
