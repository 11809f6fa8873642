"""``python -m fabric_train.doctor`` under real limits, mounts and namespaces that lack what it looks for.

What only a GPU node has (a driver, its files, InfiniBand) is laid out as there in a mount namespace, with a libcuda
that is compiled for the test. The test marked ``cuda`` runs on a real one.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.programs import ROOT
from tests.support.terminal import run_in_terminal

DOCTOR = [sys.executable, "-m", "fabric_train.doctor"]
JSON = shlex.join([*DOCTOR, "--json"])
NAMES = ["driver", "GPUs", "/dev/shm", "locked memory", "open files", "processes", "network", "host name", "InfiniBand"]
NAMES += ["working folder", "HF_HOME", "TRITON_CACHE_DIR", "TMPDIR"]
LIBCUDA = """
#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = atoi(getenv("DRIVER_CUDA")); return atoi(getenv("DRIVER_ERROR")); }
int cuInit(unsigned flags) { return atoi(getenv("CUINIT")); }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "system not yet initialized"; return 0; }
"""


def run_doctor(*command: str, **environment: object) -> "subprocess.CompletedProcess[str]":
    """Run a command that starts the doctor, without this machine's settings of devices and network."""
    unset = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    given = {"PYTHONPATH": ROOT, **environment}
    env |= {key: str(value) for key, value in given.items()}
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=60, check=False)


def results(finished: "subprocess.CompletedProcess[str]") -> dict[str, tuple[str, str]]:
    """Return level and text of each check, by its name; the exit code says whether there is a fault."""
    assert finished.stderr == ""
    content = json.loads(finished.stdout)
    assert finished.returncode == bool(content["faults"])
    assert content["faults"] == sum(check["level"] == "fault" for check in content["checks"])
    assert all(bool(check["fix"]) == (check["level"] != "ok") for check in content["checks"])
    return {check["name"]: (check["level"], f"{check['found']}; {check['fix']}") for check in content["checks"]}


def in_namespace(script: str, *kinds: str, **environment: object) -> dict[str, tuple[str, str]]:
    """Run a script in namespaces of its own, as root there, which prints the doctor's results."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("mounts, interfaces and host names need root and unshare")
    return results(run_doctor("unshare", *kinds, "bash", "-ec", script, **environment))


def test_a_log_has_one_line_for_each_check(tmp_path: Path) -> None:
    finished = run_doctor(*DOCTOR, "--output_dir", str(tmp_path))
    *lines, summary = finished.stdout.splitlines()
    assert [line[9:].split(": ")[0] for line in lines] == [*NAMES, "--output_dir"]
    assert {line.split()[0] for line in lines} <= {"ok", "warning", "fault"}
    assert summary[9:].startswith(f"{len(lines)} checks")
    assert finished.returncode == ("fault" in {line.split()[0] for line in lines})
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_a_table() -> None:
    code, shown = run_in_terminal(DOCTOR, ROOT, columns=120, env={"PYTHONPATH": str(ROOT)})
    assert code in (0, 1)
    assert "how to fix it" in shown
    assert all(name in shown for name in NAMES)


def test_limits_of_the_shell_are_faults_and_warnings() -> None:
    few = results(run_doctor("bash", "-c", f"ulimit -n 200; {JSON}"))
    assert few["open files"] == (
        "fault", "limit of 200 for each process; docker run --ulimit nofile=65536; otherwise ulimit -n 1024"
    )  # fmt: skip
    fewer = results(run_doctor("bash", "-c", f"ulimit -Sn 1000; {JSON}"))
    assert fewer["open files"][0] == "warning"


def test_a_plain_user_has_a_limit_of_processes() -> None:
    checks = in_namespace(f"ulimit -u 100; {JSON}", "--user")  # a user without a name
    assert checks["processes"][0] == "fault"
    assert "limit of 100 processes and threads for this user" in checks["processes"][1]
    assert in_namespace(f"ulimit -u 200; {JSON}", "--user")["processes"][0] == "warning"


def test_small_full_and_read_only_folders_are_found(tmp_path: Path) -> None:
    script = f"""
        mount -t tmpfs -o size=64m tmpfs /dev/shm
        cd {tmp_path}; mkdir read-only full small
        mount --bind read-only read-only; mount -o remount,bind,ro read-only
        mount -t tmpfs -o size=1m tmpfs full; mount -t tmpfs -o size=200m tmpfs small
        {JSON} --output_dir full/runs/1
    """
    folders = {"HF_HOME": tmp_path / "read-only", "TRITON_CACHE_DIR": tmp_path / "small"}
    checks = in_namespace(script, "--mount", **folders, TMPDIR=tmp_path / "read-only" / "tmp")
    assert checks["/dev/shm"][0] == "warning"
    assert "67.1 MB of 67.1 MB free" in checks["/dev/shm"][1]
    assert checks["HF_HOME"][0] == "warning"
    assert checks["HF_HOME"][1].endswith("cannot be written to: Read-only file system; choose another folder")
    assert checks["TRITON_CACHE_DIR"][0] == "warning"
    assert "209.7 MB free; free some space there" in checks["TRITON_CACHE_DIR"][1]
    assert checks["TMPDIR"][0] == "fault"
    assert checks["--output_dir"] == (
        "fault", f"{tmp_path}/full/runs/1, 1.0 MB free; free some space there, or choose a folder on another disk"
    )  # fmt: skip
    assert checks["working folder"][0] in ("ok", "warning")


def test_infiniband_needs_locked_memory_and_its_library_or_device(tmp_path: Path) -> None:
    script = f"""
        mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0
        ulimit -l 64
        exec setpriv --inh-caps=-ipc_lock --bounding-set=-ipc_lock {JSON}
    """
    checks = in_namespace(script, "--mount")
    assert checks["locked memory"][0] == "fault"
    assert "limit of 0.1 MB, not enough for InfiniBand (mlx5_0)" in checks["locked memory"][1]
    assert checks["InfiniBand"][0] == "warning"
    assert "NCCL would use TCP" in checks["InfiniBand"][1]
    assert results(run_doctor("bash", "-c", f"ulimit -l 64; {JSON}"))["locked memory"][0] == "ok"


INTERFACES = "; ".join(
    f"ip link add {name} type veth peer name {name}peer; ip addr add {address}/24 dev {name}; "
    f"ip link set {name} up; ip link set {name}peer up"
    for name, address in (("net0", "192.0.2.1"), ("net1", "198.51.100.1"))
)


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of the package iproute2")
def test_the_interfaces_that_ranks_would_use_are_named(tmp_path: Path) -> None:
    alone = in_namespace(JSON, "--net")
    assert alone["network"][1].startswith("no interface except loopback")
    assert alone["host name"][0] == "ok"
    several = in_namespace(f"{INTERFACES}; {JSON}", "--net")
    assert several["network"][0] == "warning"
    assert "2 interfaces: net0 192.0.2.1, net1 198.51.100.1" in several["network"][1]
    named = in_namespace(f"{INTERFACES}; {JSON}", "--net", NCCL_SOCKET_IFNAME="=net1", GLOO_SOCKET_IFNAME="net1")
    assert (named["network"][0], named["host name"][0]) == ("ok", "ok")
    wrong = in_namespace(f"{INTERFACES}; {JSON}", "--net", NCCL_SOCKET_IFNAME="ib")
    assert wrong["network"] == (
        "fault", "NCCL_SOCKET_IFNAME=ib: no such interface is up; set it to one of: net0, net1, lo; or unset it"
    )  # fmt: skip
    assert in_namespace(f"{INTERFACES}; {JSON}", "--net", GLOO_SOCKET_IFNAME="net")["network"][0] == "fault"


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of the package iproute2")
@pytest.mark.parametrize("address, level", [("127.0.1.1", "warning"), ("192.0.2.1", "ok")])
def test_a_host_name_that_is_loopback_is_found(tmp_path: Path, address: str, level: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{address} node1\n")
    script = f"{INTERFACES}; mount --bind {hosts} /etc/hosts; hostname node1; {JSON}"
    checks = in_namespace(script, "--net", "--uts", "--mount")
    assert checks["host name"][0] == level
    assert checks["host name"][1].startswith(f"node1 is {address}")


@dataclass(frozen=True)
class GpuNode:
    """A fault of a machine that has two GPUs, and what the doctor says about it."""

    check: str
    says: str
    lacks: str = ""
    variables: dict[str, object] = field(default_factory=dict)
    level: str = "fault"


GPU_NODES = {
    "driver": GpuNode("driver", "2 GPUs, but no driver is loaded; install driver 580 or newer", "driver"),
    "old": GpuNode("driver", "for CUDA 12.4, torch 2.13.0 is built for CUDA 13.0; install", "", {"DRIVER_CUDA": 12040}),
    "silent": GpuNode("driver", "is loaded but does not respond (CUDA error 3); install", "", {"DRIVER_ERROR": 3}),
    "libcuda": GpuNode("driver", "driver 550.54.15 is loaded, but its libcuda.so.1 is not found here; in a", "libcuda"),
    "wheel": GpuNode("driver", "built without CUDA, so 2 GPUs would not be used; pip install torch==2.13.0", "cuda"),
    "fabric": GpuNode(
        "GPUs", "not yet initialized (802); this machine has 2 GPUs; start NVIDIA's", "", {"CUINIT": 802}
    ),
    "list": GpuNode("GPUs", "but 2 does not exist, so only 2 can be used", "", {"CUDA_VISIBLE_DEVICES": "0,1,2"}),
    "hidden": GpuNode("GPUs", "so runs use the CPU; this machine", "", {"CUDA_VISIBLE_DEVICES": ""}, "warning"),
}


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that answers what variables say."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.c").write_text(LIBCUDA)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


def on_gpu_node(folder: Path, libcuda: Path, lacks: str, variables: dict[str, object]) -> dict[str, tuple[str, str]]:
    """Return the results on a machine with two GPUs, their driver 550.54.15 and a torch for CUDA 13."""
    if not Path("/proc/driver").is_dir() or not Path("/sys/bus/pci").is_dir():
        pytest.skip("this kernel has no /proc/driver or /sys/bus/pci to mount over")
    torch = folder / "torch"
    torch.mkdir()
    (torch / "__init__.py").touch()
    cuda = None if lacks == "cuda" else "13.0"
    (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda = {cuda!r}\n")
    script = """
        mount -t tmpfs tmpfs /proc/driver; mount -t tmpfs tmpfs /sys/bus/pci
        for gpu in 0 1; do
          mkdir -p /sys/bus/pci/devices/$gpu; echo 0x10de > /sys/bus/pci/devices/$gpu/vendor
          echo 0x030200 > /sys/bus/pci/devices/$gpu/class
        done
    """
    if lacks != "driver":
        version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (x@)"
        script += f"mkdir /proc/driver/nvidia; echo '{version}' > /proc/driver/nvidia/version\n"
    library = folder if lacks == "libcuda" else libcuda
    given = {
        "DRIVER_CUDA": 13000,
        "DRIVER_ERROR": 0,
        "CUINIT": 0,
        "LD_LIBRARY_PATH": library,
        "PYTHONPATH": f"{folder}:{ROOT}",
    }
    return in_namespace(script + JSON, "--mount", **{**given, **variables})


@pytest.mark.parametrize("node", GPU_NODES.values(), ids=GPU_NODES)
def test_what_is_wrong_with_a_gpu_node_is_named(tmp_path: Path, libcuda: Path, node: GpuNode) -> None:
    level, found = on_gpu_node(tmp_path, libcuda, node.lacks, node.variables)[node.check]
    assert level == node.level
    assert node.says in found


def test_nothing_is_wrong_with_a_good_gpu_node(tmp_path: Path, libcuda: Path) -> None:
    checks = on_gpu_node(tmp_path, libcuda, "", {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert checks["driver"] == (
        "ok", "driver 550.54.15 is for CUDA 13.0, torch 2.13.0 is built for CUDA 13.0; "
    )  # fmt: skip
    assert checks["GPUs"] == ("ok", "2 of 2 visible; CUDA_VISIBLE_DEVICES is '1,0'; ")


@pytest.mark.cuda
def test_a_real_gpu_is_found_and_an_absent_one_is_named() -> None:
    checks = results(run_doctor(*DOCTOR, "--json"))
    assert (checks["driver"][0], checks["GPUs"][0]) == ("ok", "ok")
    checks = results(run_doctor(*DOCTOR, "--json", CUDA_VISIBLE_DEVICES="0,99"))
    assert checks["GPUs"][0] == "fault"
    assert "but 99 does not exist, so only 1 can be used" in checks["GPUs"][1]
