"""Several machines on one: network namespaces with host names of their own, which reach each other and nothing else.

They need root, and the programs ``ip`` and ``unshare``.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

OFFLINE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Words before a command that let it reach nothing but this machine."""


@dataclass(frozen=True)
class Node:
    """A network namespace with its address, under a host name of its own."""

    namespace: str
    host: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that replaces itself by ``words`` on this node: a signal to it goes to that program."""
        return [
            *("ip", "netns", "exec", self.namespace, "unshare", "--uts"),
            *("sh", "-c", 'hostname "$0" && exec "$@"', self.host, *words),
        ]


def skip_without_namespaces() -> None:
    """Skip the test where no network namespace can be created."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip (iproute2) and unshare")
    if subprocess.run([*OFFLINE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine's kernel or container allows no network namespaces")


@contextmanager
def two_joined_nodes(hosts: tuple[str, str], domain: str) -> Iterator[tuple[Node, Node]]:
    """Create two nodes with these host names, joined by a cable; each knows the other as ``HOST.domain``."""
    names = [f"ft{os.getpid()}-{index}" for index in range(2)]
    nodes = [
        Node(name, host, f"10.231.7.{index}") for index, (name, host) in enumerate(zip(names, hosts, strict=True), 1)
    ]
    known = "127.0.0.1 localhost\n" + "".join(f"{one.address} {one.host}.{domain} {one.host}\n" for one in nodes)
    places = [Path("/etc/netns", name) for name in names]
    try:
        for place in places:  # ip netns exec shows this file as /etc/hosts
            place.mkdir(parents=True)
            (place / "hosts").write_text(known)
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
        for node in nodes:
            inside = ("-netns", node.namespace)
            _ip(*inside, "addr", "add", f"{node.address}/24", "dev", node.namespace)
            _ip(*inside, "link", "set", node.namespace, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield nodes[0], nodes[1]
    finally:
        for name, place in zip(names, places, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(place, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
