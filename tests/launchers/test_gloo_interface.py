"""gloo listens where other machines reach it, although the machine's name means 127.0.0.1 (in a network namespace)."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.two_machines import ADDRESSES, two_machines

pytestmark = [pytest.mark.slow, pytest.mark.launchers]

CHOOSE = """
import os, socket, subprocess, sys
socket.gethostname = lambda: "localhost"  # as a machine whose name means 127.0.0.1
from fabric_train.cli.errors import InputError
from fabric_train.distributed.cluster_environment import set_gloo_interface

def choose(main_address):
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    try:
        set_gloo_interface(main_address)
    except InputError as error:
        return str(error)
    return os.environ.get("GLOO_SOCKET_IFNAME")

own, other = sys.argv[1:]
print(choose(own))
print(choose(other))
print(choose("127.0.0.1"))
print(choose("localhost.localdomain"))
for words in ("link add va type veth peer name vb", "addr add 10.78.0.1/24 dev va", "link set va up", "link set vb up"):
    subprocess.run(["ip", *words.split()], check=True)
print(choose(other))
print(choose("localhost.localdomain"))
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
set_gloo_interface(other)
print(os.environ["GLOO_SOCKET_IFNAME"])
"""


def test_gloo_listens_on_the_interface_between_the_machines(tmp_path: Path) -> None:
    with two_machines() as (machine, _):
        hosts = tmp_path / "hosts"
        hosts.write_text("127.0.0.1 localhost localhost.localdomain\n")
        in_private = ["unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]
        command = [*machine, *in_private, sys.executable, "-c", CHOOSE, *ADDRESSES]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    here, towards_other, on_one_machine, by_name, with_another, by_name_with_another, given = done.stdout.splitlines()
    assert here == towards_other == by_name == with_another
    assert here.startswith("v")
    assert on_one_machine == "None"
    assert by_name_with_another.startswith("localhost resolves to a loopback address here, which the other machines")
    assert by_name_with_another.endswith(
        f"set GLOO_SOCKET_IFNAME to the interface that connects the machines: va, {here}"
    )
    assert given == "lo"
