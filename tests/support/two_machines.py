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
    # the process id, because tests may run at the same time on one machine
    namespaces = [f"ft{os.getpid()}-1", f"ft{os.getpid()}-2"]
    cable_ends = [f"v{namespace}"[:15] for namespace in namespaces]  # Linux takes names of up to 15 characters
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("link", "add", cable_ends[0], "type", "veth", "peer", "name", cable_ends[1])
        for namespace, cable_end, address in zip(namespaces, cable_ends, ADDRESSES, strict=True):
            _ip("link", "set", cable_end, "netns", namespace)
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", cable_end)
            _ip("-n", namespace, "link", "set", cable_end, "up")
        yield ["ip", "netns", "exec", namespaces[0]], ["ip", "netns", "exec", namespaces[1]]
    finally:
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _ip(*words: str) -> None:
    completed = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if completed.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {completed.stderr.strip()}")
