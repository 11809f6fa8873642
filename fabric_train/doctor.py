# PYTHON_ARGCOMPLETE_OK
"""Check this machine for what usually stops or slows a run: ``python -m fabric_train.doctor [--json]``.

Driver, GPUs, limits, network, folders and disk, in a container or not. Each check looks at the machine as a run would
meet it and imports neither torch nor transformers, so all of them together take about a second.
"""

import ctypes
import dataclasses
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
from collections.abc import Iterator
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
"""NVIDIA's oldest driver by CUDA's major version (CUDA Toolkit release notes, minor version compatibility)."""

_SHARED_MEMORY = 2**30
_LEAST_SHARED_MEMORY = 2**27  # with several GPUs, NCCL needs more than the 64 MB that a container has by default
_OPEN_FILES = 1024
_LEAST_OPEN_FILES = 256
# threads count; half of it is what one process starts on its own
_PROCESSES_PER_GPU = 256
_LEAST_PROCESSES = 128
_FREE_FOR_MODELS = 20e9  # a Llama-3-8B takes 16 GB
_FREE_FOR_RUNS = 50e9  # one of its checkpoints in bf16, with the optimizer's state, takes 48 GB
_FREE_FOR_CACHES = 1e9
_LEAST_FREE = 100e6
_RESOLVE_SECONDS = 2.0
_CAP_IPC_LOCK = 14  # linux/capability.h: locks memory beyond the limit
_CUDA_FIXES = {
    100: "check that /dev/nvidia* exist and that this user may open them",  # CUDA_ERROR_NO_DEVICE
    802: "start NVIDIA's fabric manager: systemctl start nvidia-fabricmanager",  # CUDA_ERROR_SYSTEM_NOT_READY
    803: "reboot if the driver was updated, or remove another libcuda.so.1 from LD_LIBRARY_PATH",  # …_DRIVER_MISMATCH
    804: "install a newer driver; this GPU cannot use CUDA's compatibility package",
    999: "load the rest of the driver (nvidia-modprobe -u -c 0), or reboot",  # CUDA_ERROR_UNKNOWN
}
_IN_A_CONTAINER = "in a container, start it with the GPUs (docker --gpus all, podman --device nvidia.com/gpu=all, --nv)"


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine for what stops or slows runs; the exit code is 0, or 1 if something would stop one

    PROGRAM
    PROGRAM --output_dir /scratch/runs
    PROGRAM --json
    """

    output_dir: str | None = None
    """Folder that runs will write into, to be checked as well; it need not exist yet."""
    json: bool = False
    """Print the results as JSON."""


Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class NodeCheck:
    """A finding: a "fault" stops a run or leaves its GPUs unused, a "warning" slows it down or stops some, or "ok"."""

    name: str
    level: Level
    found: str
    fix: str = ""


Finding = tuple[Level, str] | tuple[Level, str, str]
"""What a :class:`NodeCheck` has after its name."""


def main(argv: list[str] | None = None) -> None:
    """Print one line for each check, or all of them as JSON; exit with 1 if a fault would stop a run."""
    arguments = parse_arguments(DoctorArguments, argv)
    checks = [NodeCheck(name, *finding) for name, finding in check_node(arguments.output_dir)]
    counts = Counter[str](check.level for check in checks)
    console = open_console()
    summary = f"{len(checks)} checks, nothing wrong"
    if counts["fault"] or counts["warning"]:
        stops = f"{counts['fault']} would stop a run"
        slows = f"{counts['warning']} might slow or stop one"
        summary = f"{len(checks)} checks: {stops}, {slows}"
    if arguments.json:
        content = {"faults": counts["fault"], "warnings": counts["warning"]}
        print(json.dumps({**content, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    elif console.is_terminal:
        table = Table(box=box.SIMPLE)
        for header in ("", "check"):
            table.add_column(header, no_wrap=True, header_style="dim")
        for header in ("found", "how to fix it"):
            table.add_column(header, overflow="fold", header_style="dim")
        for check in checks:
            table.add_row(Text(check.level, _STYLES[check.level]), *map(Text, (check.name, check.found, check.fix)))
        console.print(table)
        console.print(summary, soft_wrap=True, highlight=False)
    else:  # for logs and grep: every line begins with its level and is whole
        for check in checks:
            print(f"{check.level:<8} {check.name}: {check.found}" + (f"; {check.fix}" if check.fix else ""))
        print(f"{next(level for level in ('fault', 'warning', 'ok') if counts[level]):<8} {summary}")
    if counts["fault"]:
        sys.exit(FAILURE)


def check_node(output_dir: str | None) -> Iterator[tuple[str, Finding]]:
    """Yield the name and the finding of every check, in a fixed order; ``output_dir`` need not exist yet."""
    num_gpus = _count_gpus()
    cuda = None
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
    home = Path(os.path.expanduser("~"))  # Path.home fails for a user without a home
    caches = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    folders: dict[str, tuple[str | Path | None, float, Level]] = {
        "working folder": (Path.cwd(), _FREE_FOR_CACHES, "warning"),
        "HF_HOME": (os.environ.get("HF_HOME") or f"{caches}/huggingface", _FREE_FOR_MODELS, "warning"),
        "TRITON_CACHE_DIR": (os.environ.get("TRITON_CACHE_DIR") or home / ".triton/cache", _FREE_FOR_CACHES, "warning"),
        # by default it is in TMPDIR
        "TORCHINDUCTOR_CACHE_DIR": (os.environ.get("TORCHINDUCTOR_CACHE_DIR"), _FREE_FOR_CACHES, "warning"),
        # if it cannot be written to, Python takes /tmp in its place, and other programs fail
        "TMPDIR": (os.environ.get("TMPDIR") or "/tmp", _FREE_FOR_CACHES, "fault"),
        "--output_dir": (output_dir, _FREE_FOR_RUNS, "fault"),
    }
    for name, (folder, wanted, level) in folders.items():
        if folder:
            yield name, _check_folder(Path(folder), wanted, level)


def _check_driver(cuda: ctypes.CDLL | None, num_gpus: int) -> Finding:
    found_torch = find_spec("torch")
    if found_torch is None or found_torch.origin is None:
        return "fault", "torch is not installed in this Python", "pip install -r requirements.txt"
    # its version alone: importing torch takes seconds
    torch = runpy.run_path(str(Path(found_torch.origin).with_name("version.py")))
    built_for = torch["cuda"]
    built = f"torch {torch['__version__']} is built "
    wanted = built_for and f"for CUDA {built_for}"
    if not num_gpus:
        return "ok", f"no NVIDIA GPU here, runs use the CPU; {built}{wanted or 'without CUDA'}"
    if wanted is None:
        kind = f"without CUDA, and {counted(num_gpus, 'GPU')} would not be used"
        return "fault", built + kind, f"pip install torch=={torch['__version__'].split('+')[0]} from PyPI"
    major = int(built_for.split(".")[0])
    newer = f"driver {_MIN_DRIVER.get(major, 'of CUDA ' + built_for)} or newer"
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "fault", f"{counted(num_gpus, 'GPU')}, and no driver is loaded", f"install {newer}"
    numbers = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    loaded = numbers[0] if numbers else "of an unknown version"
    if cuda is None:
        return "fault", f"driver {loaded} is loaded, but its libcuda.so.1 is not found here", _IN_A_CONTAINER
    version = ctypes.c_int()
    error = cuda.cuDriverGetVersion(ctypes.byref(version))
    if error:
        return "fault", f"driver {loaded} is loaded and does not answer (CUDA error {error})", f"install {newer}"
    driver_major, rest = divmod(version.value, 1000)
    found = f"driver {loaded} is for CUDA {driver_major}.{rest // 10}, {built}{wanted}"
    if driver_major < major:
        return "fault", found, f"install {newer} on the host, or a torch for CUDA {driver_major}"
    return "ok", found


def _check_visible_gpus(cuda: ctypes.CDLL | None, num_gpus: int) -> Finding:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "" if listed is None else f"CUDA_VISIBLE_DEVICES is {listed!r}"
    if not num_gpus:
        if listed:
            return "warning", f"{setting}, and there is no GPU", "runs use the CPU; unset it"
        return "ok", "none"
    here = f"this machine has {counted(num_gpus, 'GPU')}"
    if listed is not None and listed.strip() in ("", "-1", "NoDevFiles"):
        found = f"{setting}, so runs use the CPU; {here}"
        return "warning", found, "unset it, or ask the scheduler for GPUs (Slurm: --gpus-per-node)"
    if cuda is None:
        return "fault", f"{here}, none can be used without libcuda.so.1", _IN_A_CONTAINER
    count = ctypes.c_int()
    if error := cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(error, ctypes.byref(text))
        if listed and error == 100:  # no device
            return "fault", f"{setting}, and none of these exists; {here}", "correct or unset it"
        found = f"CUDA does not start: {(text.value or b'unknown error').decode()} ({error}); {here}"
        return "fault", found, _CUDA_FIXES.get(error, "see dmesg for lines with NVRM")
    visible = f"{count.value} of {num_gpus} visible"
    names = [item.strip() for item in listed.split(",")] if listed else []
    if count.value < len(names):
        found = f"{setting}, but {names[count.value]} does not exist, so only {count.value} can be used; {here}"
        return "fault", found, "correct or unset it"
    return "ok", f"{visible}; {setting}" if setting else visible


def _count_gpus() -> int:
    """Return the number of this machine's NVIDIA GPUs, with or without a driver, visible or not."""
    on_bus = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):  # a device may go away
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text()
            on_bus += vendor == "0x10de" and kind.startswith("0x03")  # NVIDIA, display controller
    return on_bus or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _check_shared_memory(num_gpus: int) -> Finding:
    """Data workers and NCCL share memory through /dev/shm; with too little of it they die of a bus error."""
    fix = "docker run --ipc=host or --shm-size=8g; otherwise: mount -o remount,size=8g /dev/shm"
    try:
        disk = os.statvfs("/dev/shm")
        with tempfile.TemporaryFile(dir="/dev/shm"):
            pass
    except OSError as error:
        return "fault", f"cannot be written to: {error.strerror}", fix
    size = disk.f_blocks * disk.f_frsize
    free = disk.f_bavail * disk.f_frsize
    found = f"{show_size(free)} of {show_size(size)} free"
    if free < _LEAST_SHARED_MEMORY and num_gpus > 1:
        return "fault", f"{found}, too little for NCCL on {num_gpus} GPUs", fix
    if free < _SHARED_MEMORY:
        return "warning", f"{found}, little for data workers and NCCL", fix
    return "ok", found


def _check_locked_memory(infiniband: list[str]) -> Finding:
    """InfiniBand registers memory, which counts as locked; CUDA's pinned memory does not."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if limit == resource.RLIM_INFINITY else f"limit of {show_size(limit)}"
    effective = re.search(r"^CapEff:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    may_lock = effective is not None and bool(int(effective[1], 16) >> _CAP_IPC_LOCK & 1)
    if limit == resource.RLIM_INFINITY or not infiniband or may_lock:
        return "ok", found
    fix = "docker run --ulimit memlock=-1; otherwise ulimit -l unlimited, or memlock in /etc/security/limits.conf"
    return "fault", f"{found}, too little for InfiniBand ({', '.join(infiniband)})", fix


def _check_open_files() -> Finding:
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit of {limit:,} for each process"
    if limit >= _OPEN_FILES:
        return "ok", found
    fix = f"docker run --ulimit nofile=65536; otherwise ulimit -n {max(min(highest, 65536), _OPEN_FILES)}"
    return "fault" if limit < _LEAST_OPEN_FILES else "warning", found, fix


def _check_processes(num_ranks: int) -> Finding:
    files = [folder / "pids.max" for folder in control_groups("pids")]
    texts = [file.read_text().strip() for file in files if file.is_file()]
    limits = [(int(text), "for this container or job") for text in texts if text.isdigit()]
    of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and of_user != resource.RLIM_INFINITY:  # root has no limit of its own
        limits.append((of_user, "for this user"))
    if not limits:
        return "ok", "unlimited"
    limit, of = min(limits)
    found = f"limit of {limit:,} processes and threads {of}"
    if limit >= num_ranks * _PROCESSES_PER_GPU:
        return "ok", found
    fix = "docker run --pids-limit=-1; for a user: ulimit -u unlimited"
    return "fault" if limit < _LEAST_PROCESSES else "warning", found, fix


def _check_interfaces() -> Finding:
    addresses = _interfaces()
    here = ", ".join(f"{interface} {address}" for interface, address in addresses.items())
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(variable)
        if wanted and not _matches(wanted, [*addresses, "lo"], is_prefix=variable.startswith("NCCL")):
            found = f"{variable}={wanted}: no such interface is up"
            return "fault", found, f"set it to one of: {', '.join([*addresses, 'lo'])}; or unset it"
    if not addresses:
        return "ok", "no interface except loopback: runs on this machine alone"
    candidates = [interface for interface in addresses if not interface.startswith("docker")]
    if len(candidates) > 1 and "NCCL_SOCKET_IFNAME" not in os.environ:
        found = f"{len(candidates)} interfaces: {here}; NCCL takes the first that it finds"
        fix = f"for runs on several machines set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, e.g. to {candidates[0]}"
        return "warning", found, fix
    return "ok", here


def _check_host_name() -> Finding:
    """gloo listens on the address of the host's name, so other machines must be able to reach that."""
    host = socket.gethostname()
    others = list(_interfaces())
    if not others:
        return "ok", f"{host}; not needed without a network"
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return "ok", f"{host}; not needed with GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']}"
    fix = f"for runs on several machines set GLOO_SOCKET_IFNAME={others[0]}, or correct /etc/hosts"
    found: list[str] = []

    def resolve() -> None:
        with suppress(OSError):
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=resolve, daemon=True)  # a name server that does not answer takes half a minute
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    addresses = ", ".join(dict.fromkeys(found))
    if not addresses:
        return "warning", f"{host} has no address (or none within {_RESOLVE_SECONDS:g} s)", fix
    if all(address.startswith("127.") or address == "::1" for address in found):
        return "warning", f"{host} is {addresses}, which other machines cannot reach", fix
    return "ok", f"{host} is {addresses}"


def _check_infiniband(devices: list[str]) -> Finding:
    """NCCL needs libibverbs and the device files; without them it falls back to TCP, several times slower."""
    if not devices:
        return "ok", "none"
    here = ", ".join(devices)
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return "warning", f"{here}, but no libibverbs: NCCL would use TCP", "apt install libibverbs1"
    if not any(os.access(file, os.R_OK | os.W_OK) for file in Path("/dev/infiniband").glob("uverbs*")):
        found = f"{here}, but no /dev/infiniband/uverbs* that this user can open: NCCL would use TCP"
        return "warning", found, "docker run --device /dev/infiniband; or add the user to its group"
    return "ok", here


def _interfaces() -> dict[str, str]:
    """Return an address of each network interface that is up, except loopback; IPv4 if it has one."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup and "loopback" not in state.flags}
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        usable = [item for item in addresses if item.family in (socket.AF_INET, socket.AF_INET6)]
        usable = [item for item in usable if not item.address.startswith("fe80:")]  # reaches the same wire only
        usable.sort(key=lambda item: item.family != socket.AF_INET)
        if name in up and usable:
            found[name] = usable[0].address
    return found


def _matches(wanted: str, interfaces: list[str], is_prefix: bool) -> bool:
    """Whether a variable's list names an interface: NCCL's has prefixes, ``=`` for whole names, ``^`` for others."""
    excluded = wanted.startswith("^")
    words = [word for word in wanted.lstrip("^").split(",") if word]
    is_exact = words[0].startswith("=") if words else True
    words = [word.lstrip("=") for word in words]
    named = [
        any(interface.startswith(word) if is_prefix and not is_exact else interface == word for word in words)
        for interface in interfaces
    ]
    return any(one != excluded for one in named)


def _check_folder(folder: Path, wanted: float, level: Level) -> Finding:
    """Write a file into a folder, or into the nearest one above it that exists, and look at the free disk there.

    Runs usually need ``wanted`` bytes. ``level`` is the level of a folder that cannot be written to.
    """
    folder = folder.expanduser().absolute()
    existing = next(above for above in (folder, *folder.parents) if os.path.exists(above))
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
            file.flush()
        disk = shutil.disk_usage(existing)
    except OSError as error:
        fix = "choose another folder"
        if isinstance(error, PermissionError):
            fix += f", or give it to this user: chown {os.geteuid()} {existing}"
        return level, f"{existing} cannot be written to: {error.strerror}", fix
    found = f"{folder}, {show_size(disk.free)} free"
    if disk.free < _LEAST_FREE:
        return level, found, "free some space there, or choose a folder on another disk"
    if disk.free < wanted:
        fix = f"free some space there: less than {show_size(wanted)} is often too little"
        return "warning", found, fix
    return "ok", found


if __name__ == "__main__":
    run_program(main)
