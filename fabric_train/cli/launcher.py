"""Read the variables of a run's launcher (``fabric run``, torchrun, srun or mpiexec), and watch its processes.

A rank ends when its launcher ends, and the ranks that a rank has started end with that rank.

``fabric run`` passes ``--accelerator --strategy --devices --num-nodes --precision`` on as ``LT_*`` variables, which
Fabric would read by itself. This module turns them into ordinary arguments, and removes them before Fabric is built.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
_LAUNCHER = "FABRIC_TRAIN_LAUNCHER"  # the process id of ``fabric run``, or of the rank that has started the others
_GRACE_SECONDS = 3.0  # for the watchdog to report a rank that has failed, and for ranks to end


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the names of its environment variables."""

    name: str
    recognised_by: tuple[str, ...]
    """The variables that are all set if this launcher started the process."""
    rank: str
    """The variable with the global rank."""
    size: str
    """The variable with the number of processes of the run."""
    local_rank: str = ""
    """The variable with the rank on its machine; empty if there is none."""
    local_size: str = ""
    """The variable with the number of processes on the machine; empty if there is none."""
    options: tuple[str, str] = ("processes per machine", "machines")
    """The options for the number of processes on each machine and the number of machines, for messages."""

    @property
    def evidence(self) -> str:
        return " and ".join(self.recognised_by)


# the fields rank, size, local_rank and local_size of a Launcher
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WORLD = "OMPI_COMM_WORLD_"
_OF_OPEN_MPI = (f"{_WORLD}RANK", f"{_WORLD}SIZE", f"{_WORLD}LOCAL_RANK", f"{_WORLD}LOCAL_SIZE")
_OF_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OF_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
TORCHRUN = Launcher("torchrun", ("TORCHELASTIC_RUN_ID",), *_OF_TORCHRUN, options=("--nproc-per-node", "--nnodes"))
OPEN_MPI = Launcher("mpiexec (Open MPI)", ("OMPI_COMM_WORLD_SIZE",), *_OF_OPEN_MPI)
MPICH = Launcher("mpiexec (MPICH)", ("PMI_SIZE", "MPI_LOCALNRANKS"), *_OF_MPICH)
SRUN = Launcher("srun", ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"), *_OF_SRUN, options=("--ntasks-per-node", "--nodes"))
# A script that starts each process itself, or Fabric's own launcher. Such a process only needs LOCAL_RANK: Fabric takes
# the number of processes from --devices and --num_nodes.
BY_HAND = Launcher("the program that set LOCAL_RANK", ("LOCAL_RANK",), rank="LOCAL_RANK", size="WORLD_SIZE")
MPI = (OPEN_MPI, MPICH)
# the innermost first: torchrun and mpiexec can run inside a Slurm job
_LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SRUN, BY_HAND)
_SIZES_OF_UNKNOWN_LAUNCHERS = ("PMI_SIZE", "JSM_NAMESPACE_SIZE")  # of other mpiexec, and of jsrun
_SHELL_JOBS = ("bash", "interactive")  # names of Slurm's jobs for a shell
_HIGHEST_STEP = 10**9  # beyond it are the numbers of Slurm's steps that no srun has started
_LOWEST_VALUES = {
    "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0, "NODE_RANK": 0,
    "TORCHELASTIC_RESTART_COUNT": 0, "MASTER_PORT": 1, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0,
    "SLURM_NTASKS": 1, "SLURM_STEP_NUM_TASKS": 1, "OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1,
    "OMPI_COMM_WORLD_LOCAL_RANK": 0, "OMPI_COMM_WORLD_LOCAL_SIZE": 1, "PMI_RANK": 0, "PMI_SIZE": 1,
    "MPI_LOCALRANKID": 0, "MPI_LOCALNRANKS": 1,
}  # fmt: skip
"""The lowest values of the variables that must be whole numbers."""

_HIGHEST_PORT = 65535
_HIGHEST = 10**6
_RANK_BELOW_SIZE = (_OF_TORCHRUN[:2], _OF_TORCHRUN[2:], _OF_OPEN_MPI[:2], _OF_MPICH[:2], _OF_SRUN[:2])
_FABRIC_OPTIONS = ("accelerator", "strategy", "devices", "num_nodes", "precision")
_STRATEGIES = ("auto", "ddp", "fsdp")  # of fabric run, with names that --parallelism has too
_PRECISION_ALIASES = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true"}


@dataclass(frozen=True)
class GivenValue:
    """A value and its origin: ``--lr`` on the command line, ``run.yaml: lr`` in a file.

    ``is_default`` marks a launcher's own default, which never overrides a value that the user gave. ``in_python`` marks
    a Python value, which is not a word of a command line.
    """

    value: Any
    where: str
    is_default: bool = False
    in_python: bool = False


GivenValues: TypeAlias = dict[str, GivenValue]
"""Values by the names of their arguments."""


def find_launcher(environment: Mapping[str, str] = os.environ) -> Launcher | None:
    """Return the launcher that has started this process; None if this process starts the ranks of its machine."""
    for launcher in _LAUNCHERS:
        if all(name in environment for name in launcher.recognised_by):
            if launcher == SRUN and _is_slurm_shell(environment):
                continue
            return launcher
    return None


def _is_slurm_shell(environment: Mapping[str, str]) -> bool:
    """Return whether this process was started by hand in a shell that Slurm started.

    Such a shell comes from ``srun --pty bash`` or ``salloc``, and its variables look like those of srun.
    """
    step_id = environment["SLURM_STEP_ID"]
    if step_id.isdecimal() and int(step_id) > _HIGHEST_STEP:
        return True
    is_shell = "SLURM_PTY_PORT" in environment or environment.get("SLURM_JOB_NAME") in _SHELL_JOBS
    return is_shell and environment["SLURM_STEP_NUM_TASKS"] == "1"


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's global rank; 0 if no launcher has set one."""
    launcher = find_launcher(environment)
    rank = environment.get(launcher.rank if launcher else "RANK", "")
    return int(rank) if re.fullmatch("[0-9]{1,6}", rank) else 0


def is_first_on_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is the first rank on its machine, as is any process that no launcher started."""
    launcher = find_launcher(environment)
    name = launcher.local_rank if launcher else ""
    return environment.get(name or "LOCAL_RANK", "0") == "0"


def machine_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name for this machine, which its commands accept, or else the host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def check_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable of a launcher that is not a number, or that contradicts another."""
    faults = []
    for name, lowest in _LOWEST_VALUES.items():
        value = environment.get(name)
        if value is None:
            continue
        highest = _HIGHEST_PORT if name == "MASTER_PORT" else _HIGHEST
        is_number = re.fullmatch("[0-9]{1,7}", value) is not None
        if not is_number or not lowest <= int(value) <= highest:
            faults.append(
                f"{name}={value!r} in the environment: expected a whole number from {lowest} to {highest}; unset it, "
                "or start with fabric run, torchrun, srun or mpiexec, which set it"
            )
    if faults:
        return faults
    for rank, size in _RANK_BELOW_SIZE:
        if rank in environment and size in environment and int(environment[rank]) >= int(environment[size]):
            faults.append(
                f"{rank}={environment[rank]} in the environment is not below {size}={environment[size]}, but ranks "
                "count from 0; unset both, or start with a launcher that sets them"
            )
    if faults:
        return faults
    fault = _find_incomplete_launch(environment)
    return [fault] if fault else []


def _find_incomplete_launch(environment: Mapping[str, str]) -> str | None:
    """Return a fault if something is missing, so that the processes would train alone or wait forever."""
    launcher = find_launcher(environment)
    if launcher is None:  # no variables of a launcher that this module knows
        return _find_unrecognised_launch(environment)

    if launcher != BY_HAND:  # which need not set WORLD_SIZE
        variables = (launcher.rank, launcher.size, launcher.local_rank)
        missing = [name for name in variables if name and name not in environment]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            return (
                f"{launcher.name} has started this process ({launcher.evidence} in the environment), but "
                f"{', '.join(missing)} {verb} not set; pass on all of the launcher's variables, or unset all of them"
            )
    if launcher in MPI and int(environment[launcher.size]) > 1 and importlib.util.find_spec("mpi4py") is None:
        return (
            f"{launcher.name} has started {environment[launcher.size]} processes ({launcher.size}), which need "
            "mpi4py to find each other, but it is not installed; run pip install mpi4py, or start one process with "
            "python -m fabric_train --devices N"
        )
    if launcher == SRUN and not _num_processes_per_machine(launcher, environment):
        return (
            f"srun has not started the same number of tasks on every node ({SRUN.local_size}="
            f"{environment.get(SRUN.local_size)!r}); give srun --ntasks-per-node"
        )
    return None


def _find_unrecognised_launch(environment: Mapping[str, str]) -> str | None:
    """Return a fault if variables describe several processes, though no known launcher has started this one."""
    variables = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if variables:
        assignments = " and ".join(f"{name}={environment[name]}" for name in variables)
        return (
            f"{assignments} in the environment without a launcher (no TORCHELASTIC_RUN_ID): this process would train "
            f"alone; unset {' and '.join(variables)}, or start the processes with torchrun or fabric run"
        )
    for size in _SIZES_OF_UNKNOWN_LAUNCHERS:
        if environment.get(size, "1") != "1":
            return (
                f"{size}={environment[size]} in the environment: an unknown launcher has started the processes, and "
                "each would train alone; use torchrun, srun, or mpiexec from MPICH or Open MPI"
            )
    num_tasks = environment.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in environment and int(num_tasks) > 1:
        return (
            f"this Slurm job has {num_tasks} tasks (SLURM_NTASKS), but srun has not started this process (no "
            "SLURM_STEP_ID); put srun before the command, or give the job one task per node"
        )
    return None


def _num_processes_per_machine(launcher: Launcher, environment: Mapping[str, str]) -> int:
    """Return the number of processes on each machine; 0 if it is unknown, or not the same on all machines.

    Slurm writes "4" for one machine, "4(x2)" for two, and "4,3" if they differ.
    """
    match = re.fullmatch(r"([0-9]{1,6})(\(x[0-9]+\))?", environment.get(launcher.local_size, ""))
    return int(match[1]) if match else 0


def find_other_world(num_devices: int, num_nodes: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a fault if the launcher has not started ``num_devices`` processes on each of ``num_nodes`` machines."""
    # A launcher has started another number of processes.
    launcher = find_launcher(environment)
    world_size = num_devices * num_nodes
    if launcher:
        num_started = int(environment.get(launcher.size, world_size))
        if num_started != world_size:
            noun = "processes" if num_started > 1 else "process"
            return (
                f"{launcher.name} has started {num_started} {noun} ({launcher.size}), but --devices times --num_nodes "
                f"is {world_size}; make them agree"
            )

    # No launcher has started the other machines.
    if num_nodes == 1 or launcher not in (None, BY_HAND):
        return None
    scheduler_note = ""
    if "PBS_JOBID" in environment:
        scheduler_note = ", which PBS does not do (PBS_JOBID; use launch/pbs.sh, or mpiexec)"
    elif "SLURM_JOB_ID" in environment:
        scheduler_note = ", which Slurm does only with srun (no SLURM_STEP_ID)"
    return (
        f"--num_nodes {num_nodes}: start the run on every machine{scheduler_note}, with torchrun --nnodes "
        f"{num_nodes}, srun, or fabric run --num-nodes {num_nodes} --node-rank 0, 1, ... --main-address HOST"
    )


def under_fabric_run(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``fabric run`` started this process; ``Fabric.launch`` must not be called then."""
    return environment.get("LT_CLI_USED") == "1"


def num_restarts() -> int:
    """Return how often torchrun has restarted this run (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher_arguments(environment: Mapping[str, str] = os.environ) -> GivenValues:
    """Return the arguments of training that the launcher has set, by name.

    Raises:
        ValueError: variables are invalid; it has a line for each fault.
    """
    faults = check_environment(environment)
    if faults:
        raise ValueError(*faults)
    if under_fabric_run(environment):
        return _parse_fabric_options(environment)
    lightning_variables = [_lt(name) for name in _FABRIC_OPTIONS if _lt(name) in environment]
    if lightning_variables:
        names = ", ".join(lightning_variables)
        raise ValueError(f"the environment sets {names}, but fabric run did not start this process; unset {names}")

    # Other launchers set only the numbers of processes and machines.
    launcher = find_launcher(environment)
    if launcher is None:
        return {}
    num_devices = _num_processes_per_machine(launcher, environment)
    if not num_devices:
        return {}
    num_nodes = int(environment[launcher.size]) // num_devices
    devices_option, nodes_option = launcher.options
    return {
        "devices": GivenValue(str(num_devices), f"{launcher.name} {devices_option}", is_default=num_devices == 1),
        "num_nodes": GivenValue(str(num_nodes), f"{launcher.name} {nodes_option}", is_default=num_nodes == 1),
    }


def _parse_fabric_options(environment: Mapping[str, str]) -> GivenValues:
    """Return the options of ``fabric run`` as arguments of training."""
    arguments = {}
    for name in _FABRIC_OPTIONS:
        value = environment.get(_lt(name))
        if value is None:
            continue
        where = f"fabric run --{name.replace('_', '-')}"
        if name == "strategy":
            if value not in _STRATEGIES:
                raise ValueError(
                    f"{where} {value} is not supported; leave out --strategy and give --parallelism auto, fsdp, fsdp2, "
                    "ddp or single"
                )
            if value != "auto":
                arguments["parallelism"] = GivenValue(value, where)
            continue
        if name == "devices" and value == "auto":  # fabric run starts one process then, on any number of GPUs
            value = environment.get("LOCAL_WORLD_SIZE", "1")
        if name == "precision":
            value = _PRECISION_ALIASES.get(value, value)
        is_default = name in ("devices", "num_nodes") and value == "1"
        arguments[name] = GivenValue(value, where, is_default=is_default)
    return arguments


def variables_of_rank_0(options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``fabric run`` with these options sets for rank 0 and that decide arguments."""
    all_options = {"devices": "1", "num_nodes": "1", **options}
    variables = {_lt(name): all_options[name] for name in _FABRIC_OPTIONS if name in all_options}
    variables |= {"LT_CLI_USED": "1", "TORCHELASTIC_RUN_ID": "none"}
    return variables | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def clear_launcher_options() -> None:
    """Remove the ``LT_*`` variables that :func:`launcher_arguments` has turned into arguments."""
    for name in _FABRIC_OPTIONS:
        os.environ.pop(_lt(name), None)


def _lt(option: str) -> str:
    """Return the variable in which ``fabric run`` passes an option on."""
    return f"LT_{option.upper()}"


def launcher_process(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the id of the process that this rank must not outlive; None if the ranks were started by hand.

    The process is the launcher's on this machine, or the rank that has started this one. Call it early: once the
    launcher has ended, the parent is another process.
    """
    if re.fullmatch("[0-9]+", environment.get(_LAUNCHER, "")):
        return int(environment[_LAUNCHER])
    is_launched = find_launcher(environment) not in (None, BY_HAND)
    return os.getppid() if is_launched else None


@contextmanager
def as_launcher() -> Iterator[None]:
    """Make the ranks that this process starts in the block end when this process ends; later ones are not affected."""
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[_LAUNCHER]


def serve_on_loopback(port: int) -> "TCPStore":
    """Serve torch's store only to this machine; torch itself would listen on all network interfaces.

    While the returned store exists, every store that this process opens on its port, as torch and torchrun do, uses
    its server (``multi_tenant``).

    Args:
        port: the port; 0 for a free one.

    Raises:
        OSError: the port is in use.
    """
    from torch.distributed import TCPStore

    server = socket.create_server((LOOPBACK, port))
    port = server.getsockname()[1]
    descriptor = server.detach()  # the store closes it
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor
    )


def watch_started_ranks(ranks: Sequence["subprocess.Popen[Any]"], failed: Callable[[int, int], None]) -> None:
    """Call ``failed`` with rank and exit code when a rank that this process has started fails.

    ``ranks`` are the ranks from 1 on. The call comes some seconds after the failure, and only if this process still
    runs: the run's watchdog, which knows the reason, should report it first.
    """
    if not ranks:
        return

    def watch() -> None:
        failed_rank = None
        while failed_rank is None:
            time.sleep(0.2)
            for rank, process in enumerate(ranks, 1):
                if process.poll():  # an exit code other than 0
                    failed_rank = rank
                    break
        time.sleep(_GRACE_SECONDS)
        failed(failed_rank, ranks[failed_rank - 1].returncode)

    threading.Thread(target=watch, daemon=True, name="started ranks").start()


def report_to_torchrun(lines: Sequence[str]) -> None:
    """Let torchrun show these lines at the end of its own report, instead of "no error file" (torch's ``record``)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or not lines:
        return
    text = "\n".join(lines)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    # Opened with "x": a second report is dropped, because the first fault is the cause.
    with suppress(OSError), Path(file).open("x", encoding="utf-8") as report:
        json.dump({"message": message}, report)


def end_started_ranks(ranks: Sequence["subprocess.Popen[Any]"]) -> None:
    """End the ranks that this process has started and that still run."""
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS  # for all of them together
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
