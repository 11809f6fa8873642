# PYTHON_ARGCOMPLETE_OK
"""Check this machine for what usually stops or slows a run: ``python -m fabric_train.doctor [--json]``.

It checks the driver, GPUs, limits, network, folders and disk, in a container too. Each check looks at the machine as a
run would meet it, and none imports torch or transformers, so all of them together take about a second.
"""

import ctypes
import json
import os
import re
import resource
import runpy
import shutil
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from rich import box
from rich.table import Table
from rich.text import Text

from fabric_train.cli.argument_types import counted, show_size
from fabric_train.cli.errors import FAILURE, run_program
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.distributed.memory import control_groups

_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}
_MIN_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver for each major version of CUDA (CUDA Toolkit release notes, minor version compatibility)."""

# Below the first number a run may be slow or stop, below the second it does not work.
_USUAL_SHARED_MEMORY = 2**30
_MIN_SHARED_MEMORY = 2**27  # with several GPUs, NCCL needs more than the 64 MB that a container has by default
_USUAL_OPEN_FILES = 1024
_MIN_OPEN_FILES = 256
_USUAL_PROCESSES_PER_GPU = 256  # threads also count
_MIN_PROCESSES = 128  # as many threads as one rank starts
_USUAL_MODEL_BYTES = 20e9  # a Llama-3-8B takes 16 GB
_USUAL_RUN_BYTES = 50e9  # one of its checkpoints in bf16, with the optimizer's state, takes 48 GB
_USUAL_CACHE_BYTES = 1e9
_MIN_FREE_BYTES = 100e6
_RESOLVE_SECONDS = 2.0
_CAP_IPC_LOCK = 14  # linux/capability.h: locks memory beyond the limit
_CUDA_ERROR_NO_DEVICE = 100
_CUDA_FIXES = {
    _CUDA_ERROR_NO_DEVICE: "check that /dev/nvidia* exist and that this user can open them",
    802: "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",  # CUDA_ERROR_SYSTEM_NOT_READY
    803: "reboot if the driver was updated, or remove another libcuda.so.1 from LD_LIBRARY_PATH",  # …_DRIVER_MISMATCH
    804: "install a newer driver; this GPU cannot use CUDA's compatibility package",
    999: "load the rest of the driver (nvidia-modprobe -u -c 0), or reboot",  # CUDA_ERROR_UNKNOWN
}
_CONTAINER_FIX = "in a container, start it with the GPUs (docker --gpus all, podman --device nvidia.com/gpu=all, --nv)"


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine for problems that stop or slow runs; exit with code 0, or 1 if a run would stop

    PROGRAM
    PROGRAM --output_dir /scratch/runs
    PROGRAM --json
    """

    output_dir: str | None = None
    """Also check this folder, which runs will write into; it does not need to exist yet."""
    json: bool = False
    """Print the results as JSON."""


Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    level: Level
    """A "fault" stops a run or leaves its GPUs unused, a "warning" slows it down or stops some runs, or "ok"."""
    observation: str
    fix: str = ""
    """How to repair it."""


@dataclass(frozen=True)
class _FolderNeed:
    """A folder that runs write into."""

    folder: str | Path | None
    """None if no variable or option names the folder."""
    usual_bytes: float
    """The bytes that runs usually need in the folder."""
    level: Level
    """The level of the finding if the folder cannot be written to."""


def main(argv: list[str] | None = None) -> None:
    """Print one line for each check, or all results as JSON; exit with 1 if a fault would stop a run."""
    arguments = parse_arguments(DoctorArguments, argv)
    findings = dict(check_node(arguments.output_dir))
    counts = Counter[str](finding.level for finding in findings.values())
    if counts["fault"] or counts["warning"]:
        stops = f"{counts['fault']} would stop a run"
        slows = f"{counts['warning']} might slow or stop one"
        summary = f"{len(findings)} checks: {stops}, {slows}"
    else:
        summary = f"{len(findings)} checks, no problems"

    console = open_console()
    if arguments.json:
        checks = [_to_json(name, finding) for name, finding in findings.items()]
        print(json.dumps({"faults": counts["fault"], "warnings": counts["warning"], "checks": checks}, indent=2))
    elif console.is_terminal:
        console.print(_to_table(findings))
        console.print(summary, soft_wrap=True, highlight=False)
    else:  # for logs and grep: every line begins with its level and is whole
        for name, finding in findings.items():
            fix = f"; {finding.fix}" if finding.fix else ""
            print(f"{finding.level:<8} {name}: {finding.observation}{fix}")
        worst_level = next(level for level in ("fault", "warning", "ok") if counts[level])
        print(f"{worst_level:<8} {summary}")
    if counts["fault"]:
        sys.exit(FAILURE)


def _to_json(name: str, finding: Finding) -> dict[str, str]:
    return {"name": name, "level": finding.level, "found": finding.observation, "fix": finding.fix}


def _to_table(findings: Mapping[str, Finding]) -> Table:
    table = Table(box=box.SIMPLE)
    for header in ("", "check"):
        table.add_column(header, no_wrap=True, header_style="dim")
    for header in ("found", "how to fix it"):
        table.add_column(header, overflow="fold", header_style="dim")
    for name, finding in findings.items():
        level = Text(finding.level, _STYLES[finding.level])
        table.add_row(level, Text(name), Text(finding.observation), Text(finding.fix))
    return table


def check_node(output_dir: str | None) -> Iterator[tuple[str, Finding]]:
    """Yield the name and the finding of every check, in a fixed order; ``output_dir`` need not exist yet."""
    num_gpus = _count_gpus()
    cuda = None  # the library of the driver
    with suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
    infiniband = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    yield "driver", _check_driver(cuda, num_gpus)
    yield "GPUs", _check_visible_gpus(cuda, num_gpus)
    yield "/dev/shm", _check_shared_memory(num_gpus)
    yield "locked memory", _check_locked_memory(infiniband)
    yield "open files", _check_open_files()
    yield "processes", _check_processes(max(num_gpus, 1))
    yield "network", _check_interfaces()
    yield "host name", _check_host_name()
    yield "InfiniBand", _check_infiniband(infiniband)
    for name, need in _list_folders(output_dir).items():
        if need.folder:
            yield name, _check_folder(Path(need.folder), need.usual_bytes, need.level)


def _list_folders(output_dir: str | None) -> dict[str, _FolderNeed]:
    """Return the folders that runs write into, by the variable or option that sets them."""
    environment = os.environ
    home = Path(os.path.expanduser("~"))  # Path.home fails for a user without a home
    cache_dir = environment.get("XDG_CACHE_HOME") or home / ".cache"
    hugging_face_dir = environment.get("HF_HOME") or f"{cache_dir}/huggingface"
    triton_dir = environment.get("TRITON_CACHE_DIR") or home / ".triton/cache"
    inductor_dir = environment.get("TORCHINDUCTOR_CACHE_DIR")  # by default it is in TMPDIR
    temporary_dir = environment.get("TMPDIR") or "/tmp"
    return {
        "working folder": _FolderNeed(Path.cwd(), _USUAL_CACHE_BYTES, "warning"),
        "HF_HOME": _FolderNeed(hugging_face_dir, _USUAL_MODEL_BYTES, "warning"),
        "TRITON_CACHE_DIR": _FolderNeed(triton_dir, _USUAL_CACHE_BYTES, "warning"),
        "TORCHINDUCTOR_CACHE_DIR": _FolderNeed(inductor_dir, _USUAL_CACHE_BYTES, "warning"),
        # if it cannot be written to, Python takes /tmp in its place, and other programs fail
        "TMPDIR": _FolderNeed(temporary_dir, _USUAL_CACHE_BYTES, "fault"),
        "--output_dir": _FolderNeed(output_dir, _USUAL_RUN_BYTES, "fault"),
    }


def _check_driver(cuda: ctypes.CDLL | None, num_gpus: int) -> Finding:
    """Check that the driver is loaded and new enough for the CUDA version of torch."""
    # The version of torch alone: importing torch takes seconds.
    torch_spec = find_spec("torch")
    if torch_spec is None or torch_spec.origin is None:
        return Finding("fault", "torch is not installed in this Python", "pip install -r requirements.txt")
    torch_version = runpy.run_path(str(Path(torch_spec.origin).with_name("version.py")))
    version = torch_version["__version__"]
    cuda_version = torch_version["cuda"]  # None without CUDA
    built = f"torch {version} is built for CUDA {cuda_version}"
    if not cuda_version:
        built = f"torch {version} is built without CUDA"
    if not num_gpus:
        return Finding("ok", f"no NVIDIA GPU here, runs use the CPU; {built}")
    if not cuda_version:
        observation = f"{built}, so {counted(num_gpus, 'GPU')} would not be used"
        return Finding("fault", observation, f"pip install torch=={version.split('+')[0]} from PyPI")

    # The kernel's part of the driver.
    torch_cuda_major = int(cuda_version.split(".")[0])
    min_driver = _MIN_DRIVER.get(torch_cuda_major, f"of CUDA {cuda_version}")
    newer_driver = f"driver {min_driver} or newer"
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return Finding("fault", f"{counted(num_gpus, 'GPU')}, but no driver is loaded", f"install {newer_driver}")
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    driver_version = match[0] if match else "of an unknown version"

    # Its library, which says up to which CUDA version it works.
    if cuda is None:
        observation = f"driver {driver_version} is loaded, but its libcuda.so.1 is not found here"
        return Finding("fault", observation, _CONTAINER_FIX)
    driver_cuda = ctypes.c_int()  # 1000 * major + 10 * minor
    error = cuda.cuDriverGetVersion(ctypes.byref(driver_cuda))
    if error:
        observation = f"driver {driver_version} is loaded but does not respond (CUDA error {error})"
        return Finding("fault", observation, f"install {newer_driver}")
    driver_cuda_major, remainder = divmod(driver_cuda.value, 1000)
    observation = f"driver {driver_version} is for CUDA {driver_cuda_major}.{remainder // 10}, {built}"
    if driver_cuda_major < torch_cuda_major:
        fix = f"install {newer_driver} on the host, or a torch for CUDA {driver_cuda_major}"
        return Finding("fault", observation, fix)
    return Finding("ok", observation)


def _check_visible_gpus(cuda: ctypes.CDLL | None, num_gpus: int) -> Finding:
    """Check that CUDA starts, and that it sees the GPUs that CUDA_VISIBLE_DEVICES names."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if visible_devices is None else f"CUDA_VISIBLE_DEVICES is {visible_devices!r}"
    if not num_gpus:
        if visible_devices:
            return Finding("warning", f"{setting}, but there is no GPU", "runs use the CPU; unset it")
        return Finding("ok", "none")
    machine = f"this machine has {counted(num_gpus, 'GPU')}"
    if visible_devices is not None and visible_devices.strip() in ("", "-1", "NoDevFiles"):
        observation = f"{setting}, so runs use the CPU; {machine}"
        return Finding("warning", observation, "unset it, or ask the scheduler for GPUs (Slurm: --gpus-per-node)")
    if cuda is None:
        return Finding("fault", f"{machine}, but none can be used without libcuda.so.1", _CONTAINER_FIX)

    num_visible = ctypes.c_int()
    error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(num_visible))
    if error:
        if visible_devices and error == _CUDA_ERROR_NO_DEVICE:
            return Finding("fault", f"{setting}, but none of these exist; {machine}", "correct or unset it")
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(error, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        observation = f"CUDA does not start: {reason} ({error}); {machine}"
        return Finding("fault", observation, _CUDA_FIXES.get(error, "see dmesg for lines with NVRM"))

    # CUDA ends the list at the first device that does not exist.
    names = [name.strip() for name in visible_devices.split(",")] if visible_devices else []
    if num_visible.value < len(names):
        missing = names[num_visible.value]
        observation = f"{setting}, but {missing} does not exist, so only {num_visible.value} can be used; {machine}"
        return Finding("fault", observation, "correct or unset it")
    observation = f"{num_visible.value} of {num_gpus} visible"
    if setting:
        observation += f"; {setting}"
    return Finding("ok", observation)


def _count_gpus() -> int:
    """Return the number of this machine's NVIDIA GPUs, with or without a driver, visible or not."""
    num_on_bus = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):  # a device may disappear
            vendor = (device / "vendor").read_text().strip()
            device_class = (device / "class").read_text()
            if vendor == "0x10de" and device_class.startswith("0x03"):  # NVIDIA, display controller
                num_on_bus += 1
    if num_on_bus:
        return num_on_bus
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _check_shared_memory(num_gpus: int) -> Finding:
    """Check /dev/shm, through which data workers and NCCL share memory: if it is full, they die of a bus error."""
    fix = "docker run --ipc=host or --shm-size=8g; otherwise: mount -o remount,size=8g /dev/shm"
    try:
        disk = os.statvfs("/dev/shm")
        with tempfile.TemporaryFile(dir="/dev/shm"):
            pass
    except OSError as error:
        return Finding("fault", f"cannot be written to: {error.strerror}", fix)
    size = disk.f_blocks * disk.f_frsize
    free = disk.f_bavail * disk.f_frsize
    observation = f"{show_size(free)} of {show_size(size)} free"
    if free < _MIN_SHARED_MEMORY and num_gpus > 1:
        return Finding("fault", f"{observation}, not enough for NCCL on {num_gpus} GPUs", fix)
    if free < _USUAL_SHARED_MEMORY:
        return Finding("warning", f"{observation}, not much for data workers and NCCL", fix)
    return Finding("ok", observation)


def _check_locked_memory(infiniband: list[str]) -> Finding:
    """Check the limit of locked memory, which counts InfiniBand's registered memory, but not CUDA's pinned memory."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    observation = "unlimited" if limit == resource.RLIM_INFINITY else f"limit of {show_size(limit)}"
    status = Path("/proc/self/status").read_text()
    capabilities = re.search(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)
    may_lock = False
    if capabilities is not None:
        capability_bits = int(capabilities[1], 16)
        may_lock = bool(capability_bits & (1 << _CAP_IPC_LOCK))
    if limit == resource.RLIM_INFINITY or not infiniband or may_lock:
        return Finding("ok", observation)
    fix = "docker run --ulimit memlock=-1; otherwise ulimit -l unlimited, or memlock in /etc/security/limits.conf"
    return Finding("fault", f"{observation}, not enough for InfiniBand ({', '.join(infiniband)})", fix)


def _check_open_files() -> Finding:
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    observation = f"limit of {limit:,} for each process"
    if limit >= _USUAL_OPEN_FILES:
        return Finding("ok", observation)
    higher_limit = max(min(highest, 65536), _USUAL_OPEN_FILES)
    fix = f"docker run --ulimit nofile=65536; otherwise ulimit -n {higher_limit}"
    level: Level = "fault" if limit < _MIN_OPEN_FILES else "warning"
    return Finding(level, observation, fix)


def _check_processes(num_ranks: int) -> Finding:
    """Check the limit of processes and threads: the lower one of the control group's and the user's."""
    limits: list[tuple[int, str]] = []  # with what they are for
    for group_dir in control_groups("pids"):
        file = group_dir / "pids.max"
        if file.is_file():
            text = file.read_text().strip()
            if text.isdigit():  # not "max"
                limits.append((int(text), "for this container or job"))
    user_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    is_root = os.geteuid() == 0  # root has no limit of its own
    if not is_root and user_limit != resource.RLIM_INFINITY:
        limits.append((user_limit, "for this user"))
    if not limits:
        return Finding("ok", "unlimited")
    limit, scope = min(limits)
    observation = f"limit of {limit:,} processes and threads {scope}"
    if limit >= num_ranks * _USUAL_PROCESSES_PER_GPU:
        return Finding("ok", observation)
    fix = "docker run --pids-limit=-1; for a user: ulimit -u unlimited"
    level: Level = "fault" if limit < _MIN_PROCESSES else "warning"
    return Finding(level, observation, fix)


def _check_interfaces() -> Finding:
    """Check that the network interfaces in variables are up, and that NCCL does not have to choose among several."""
    addresses = _list_interfaces()
    description = ", ".join(f"{interface} {address}" for interface, address in addresses.items())
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        patterns = os.environ.get(variable)
        has_prefixes = variable.startswith("NCCL")
        if patterns and not _matches_interface(patterns, [*addresses, "lo"], has_prefixes=has_prefixes):
            observation = f"{variable}={patterns}: no such interface is up"
            return Finding("fault", observation, f"set it to one of: {', '.join([*addresses, 'lo'])}; or unset it")
    if not addresses:
        return Finding("ok", "no interface except loopback, so runs can only use this machine")
    # Docker's bridges lead to no other machine.
    candidates = [interface for interface in addresses if not interface.startswith("docker")]
    if len(candidates) > 1 and "NCCL_SOCKET_IFNAME" not in os.environ:
        observation = f"{len(candidates)} interfaces: {description}; NCCL uses the first one it finds"
        fix = f"for runs on several machines set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, e.g. to {candidates[0]}"
        return Finding("warning", observation, fix)
    return Finding("ok", description)


def _check_host_name() -> Finding:
    """Check that other machines can reach the address of the host's name, on which gloo listens."""
    host = socket.gethostname()
    interfaces = list(_list_interfaces())
    if not interfaces:
        return Finding("ok", f"{host}; not needed without a network")
    gloo_interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if gloo_interface is not None:
        return Finding("ok", f"{host}; not needed with GLOO_SOCKET_IFNAME={gloo_interface}")
    fix = f"for runs on several machines set GLOO_SOCKET_IFNAME={interfaces[0]}, or correct /etc/hosts"
    addresses = _resolve(host)
    description = ", ".join(addresses)
    if not addresses:
        return Finding("warning", f"{host} has no address (or none within {_RESOLVE_SECONDS:g} s)", fix)
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        return Finding("warning", f"{host} is {description}, which other machines cannot reach", fix)
    return Finding("ok", f"{host} is {description}")


def _resolve(host: str) -> list[str]:
    """Return the addresses that a host name resolves to within two seconds."""
    addresses: list[str] = []

    def resolve() -> None:
        with suppress(OSError):
            entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses.extend(str(socket_address[0]) for *_, socket_address in entries)

    thread = threading.Thread(target=resolve, daemon=True)  # a name server that does not answer takes half a minute
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    return list(dict.fromkeys(addresses))


def _check_infiniband(devices: list[str]) -> Finding:
    """Check for libibverbs and the device files; without them, NCCL falls back to TCP, several times slower."""
    if not devices:
        return Finding("ok", "none")
    names = ", ".join(devices)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return Finding("warning", f"{names}, but no libibverbs: NCCL would use TCP", "apt install libibverbs1")
    if not any(os.access(file, os.R_OK | os.W_OK) for file in Path("/dev/infiniband").glob("uverbs*")):
        observation = f"{names}, but no /dev/infiniband/uverbs* that this user can open: NCCL would use TCP"
        return Finding("warning", observation, "docker run --device /dev/infiniband; or add the user to its group")
    return Finding("ok", names)


def _list_interfaces() -> dict[str, str]:
    """Return an address of each network interface that is up, except loopback: an IPv4 address if it has one."""
    interfaces = {}
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup or "loopback" in state.flags:
            continue
        ipv4 = []
        ipv6 = []
        for entry in addresses:
            if entry.family == socket.AF_INET:
                ipv4.append(entry.address)
            elif entry.family == socket.AF_INET6 and not entry.address.startswith("fe80:"):  # link-local
                ipv6.append(entry.address)
        usable = ipv4 + ipv6
        if usable:
            interfaces[name] = usable[0]
    return interfaces


def _matches_interface(patterns: str, interfaces: list[str], *, has_prefixes: bool) -> bool:
    """Return whether the value of a variable chooses one of the interfaces.

    In gloo's variable, ``eth0,ib0`` names two interfaces. In NCCL's variable (``has_prefixes``), ``eth,ib`` chooses all
    interfaces whose names begin with one of these words, and ``=eth0,ib0`` those with exactly these names. With a ``^``
    before it, as in ``^docker`` or ``^=docker0``, either form chooses all other interfaces.
    """
    is_exclusion = patterns.startswith("^")
    has_equals_sign = patterns.startswith(("=", "^="))
    has_whole_names = has_equals_sign or not has_prefixes
    names = [name.lstrip("=") for name in patterns.lstrip("^").split(",") if name]
    for interface in interfaces:
        is_listed = interface in names
        if not has_whole_names:
            is_listed = interface.startswith(tuple(names))
        is_chosen = not is_listed if is_exclusion else is_listed
        if is_chosen:
            return True
    return False


def _check_folder(folder: Path, usual_bytes: float, level: Level) -> Finding:
    """Write a file to a folder, or to its nearest existing parent, and check the free space on that disk.

    For ``usual_bytes`` and ``level`` see ``_FolderNeed``.
    """
    folder = folder.expanduser().absolute()
    # A folder that does not exist yet is made later, on the disk of the nearest one above it.
    existing = next(ancestor for ancestor in (folder, *folder.parents) if os.path.exists(ancestor))
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
        disk = shutil.disk_usage(existing)
    except OSError as error:
        fix = "choose another folder"
        if isinstance(error, PermissionError):
            fix += f", or give it to this user: chown {os.geteuid()} {existing}"
        return Finding(level, f"{existing} cannot be written to: {error.strerror}", fix)
    observation = f"{folder}, {show_size(disk.free)} free"
    if disk.free < _MIN_FREE_BYTES:
        return Finding(level, observation, "free some space there, or choose a folder on another disk")
    if disk.free < usual_bytes:
        fix = f"free some space there, since less than {show_size(usual_bytes)} is often not enough"
        return Finding("warning", observation, fix)
    return Finding("ok", observation)


if __name__ == "__main__":
    run_program(main)
