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

    @property
    def settings(self) -> Path:
        """The folder of the namespace's own files of /etc."""
        return Path("/etc/netns", self.namespace)

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that replaces itself by ``words`` on this node: a signal to it goes to that program."""
        in_namespace = ["ip", "netns", "exec", self.namespace, "unshare", "--uts"]
        with_host_name = ["sh", "-c", 'hostname "$0" && exec "$@"', self.host]
        return [*in_namespace, *with_host_name, *words]


def skip_without_namespaces() -> None:
    """Skip the test where no network namespace can be created."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip (iproute2) and unshare")
    if subprocess.run([*OFFLINE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine's kernel or container allows no network namespaces")


@contextmanager
def two_joined_nodes(hosts: tuple[str, str], domain: str) -> Iterator[tuple[Node, Node]]:
    """Create two nodes with these host names, joined by a cable; each knows the other as ``HOST.domain``."""
    # the process id, because tests may run at the same time on one machine
    first = Node(f"ft{os.getpid()}-0", hosts[0], "10.231.7.1")
    second = Node(f"ft{os.getpid()}-1", hosts[1], "10.231.7.2")
    nodes = (first, second)
    hosts_file = "127.0.0.1 localhost\n"
    for node in nodes:
        hosts_file += f"{node.address} {node.host}.{domain} {node.host}\n"
    try:
        for node in nodes:
            # ip netns exec shows the file hosts in this folder as /etc/hosts
            node.settings.mkdir(parents=True)
            (node.settings / "hosts").write_text(hosts_file)
            _ip("netns", "add", node.namespace)
        # the cable: each end is named after its node
        first_end = (first.namespace, "netns", first.namespace)
        second_end = (second.namespace, "netns", second.namespace)
        _ip("link", "add", *first_end, "type", "veth", "peer", "name", *second_end)
        for node in nodes:
            inside = ("-netns", node.namespace)
            _ip(*inside, "addr", "add", f"{node.address}/24", "dev", node.namespace)
            _ip(*inside, "link", "set", node.namespace, "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node.namespace], check=False, capture_output=True)
            shutil.rmtree(node.settings, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
