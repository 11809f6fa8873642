"""Environment variables of the launcher (``fabric run``, torchrun, srun, mpiexec), and child ranks without one.

:func:`check_environment` is the one place that decides whether they make sense; everything else reads them as checked.

``fabric run`` removes ``--accelerator --strategy --devices --num-nodes --precision`` from anywhere on the command line
and passes them on as ``LT_*`` variables; torchrun sets the number of processes. Fabric would read the ``LT_*``
variables on its own. So this module turns them into arguments like any other, and clears them before Fabric is built.
"""

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Launcher:
    """A launcher, and its variables with the rank and the number of the processes that it has started."""

    name: str
    rank: str
    size: str


_TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE")
_MPI = (
    Launcher("mpiexec (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE"),
)
_BY_HAND = Launcher("whoever set LOCAL_RANK", "LOCAL_RANK", "WORLD_SIZE")  # Fabric's own launcher too
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
_LEAST = {
    "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0, "NODE_RANK": 0,
    "TORCHELASTIC_RESTART_COUNT": 0, "MASTER_PORT": 1, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NODEID": 0,
    "SLURM_NTASKS": 1, "SLURM_STEP_NUM_TASKS": 1, "OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1,
    "OMPI_COMM_WORLD_LOCAL_RANK": 0, "PMI_RANK": 0, "PMI_SIZE": 1,
}  # fmt: skip
"""Variables that have to be whole numbers, and their least values."""

_HIGHEST_PORT = 65535
_HIGHEST = 10**6
_RANK_BELOW_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_FABRIC_OPTIONS = ("accelerator", "strategy", "devices", "num_nodes", "precision")
_PARALLELISM_OF_STRATEGY = {"auto": "auto", "ddp": "ddp", "fsdp": "fsdp"}
_PRECISION_ALIASES = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true"}
_LAUNCHER = "FABRIC_TRAIN_LAUNCHER"  # the process id of ``fabric run``, or of the rank that has started the others
_GRACE_SECONDS = 3.0  # for the watchdog to report a rank that has failed, and for ranks to end
_children: list["subprocess.Popen[Any]"] = []


@dataclass(frozen=True)
class GivenValue:
    """A value and where it was given: ``--lr`` on the command line, ``run.yaml: lr`` in a file.

    ``is_default`` marks a launcher's own default, which never overrides a value that the user gave.
    """

    value: Any
    where: str
    is_default: bool = False


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's global rank; 0 if no launcher has set one."""
    ranks = [environment[name] for name in _RANK_VARIABLES if re.fullmatch("[0-9]{1,6}", environment.get(name, ""))]
    return int(ranks[0]) if ranks else 0


def machine_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return Slurm's name of this machine, which its commands take, else the host name."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def check_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable of a launcher that is no number, or that contradicts another."""
    faults = []
    for name, least in _LEAST.items():
        value, highest = environment.get(name), _HIGHEST_PORT if name == "MASTER_PORT" else _HIGHEST
        if value is not None and not (re.fullmatch("[0-9]{1,7}", value) and least <= int(value) <= highest):
            faults.append(
                f"{name}={value!r} in the environment: expected a whole number from {least} to {highest}; unset it, or "
                "start with fabric run, torchrun, srun or mpiexec, which set it"
            )
    if faults:
        return faults
    for rank, size in _RANK_BELOW_SIZE:
        if rank in environment and size in environment and int(environment[rank]) >= int(environment[size]):
            faults.append(
                f"{rank}={environment[rank]} in the environment is not below {size}={environment[size]}: ranks count "
                "from 0; unset both, or start with a launcher that sets them"
            )
    return faults or _incomplete(environment)


def _incomplete(environment: Mapping[str, str]) -> list[str]:
    """Return a line if variables of a launcher are there that would leave every process training alone."""
    if is_torchrun(environment):
        return []
    mpi = next((mpi for mpi in _MPI if int(environment.get(mpi.size, "1")) > 1), None)
    if mpi and importlib.util.find_spec("mpi4py") is None:
        return [
            f"{mpi.name} has started {environment[mpi.size]} processes ({mpi.size}), which find each other by mpi4py, "
            "and it is not installed: pip install mpi4py, or start one process with python -m fabric_train --devices N"
        ]
    given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    if given and not mpi and "SLURM_PROCID" not in environment and "LOCAL_RANK" not in environment:
        shown = " and ".join(f"{name}={environment[name]}" for name in given)
        return [
            f"{shown} in the environment without a launcher (no TORCHELASTIC_RUN_ID): this process would train alone; "
            f"unset {' and '.join(given)}, or start the processes with torchrun or fabric run"
        ]
    return []


def find_other_world_size(asked: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a line if a launcher has started another number of processes than the run has.

    Args:
        asked: processes of the run: --devices times --num_nodes.
        environment: with the launcher's variables.
    """
    launchers = (_TORCHRUN,) if is_torchrun(environment) else (*_MPI, _BY_HAND)
    launcher = next((launcher for launcher in launchers if launcher.rank in environment), None)
    started = int(environment.get(launcher.size, asked)) if launcher else asked
    if launcher is None or started == asked:
        return None
    return (
        f"{launcher.name} has started {started} processes ({launcher.size}), but --devices times --num_nodes is "
        f"{asked}; make them agree"
    )


def is_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process, or ``fabric run``, which is torchrun with other options."""
    return "TORCHELASTIC_RUN_ID" in environment


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher of any kind has set this process's rank."""
    return any(name in environment for name in _RANK_VARIABLES)


def under_fabric_run(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``fabric run`` started this process; ``Fabric.launch`` must not be called then."""
    return environment.get("LT_CLI_USED") == "1"


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started this run again (``--max-restarts``)."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launcher_process(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the id of the process that this rank must not outlive: torchrun, ``fabric run``, or the rank that started
    it; None if the ranks were started by hand, or by Slurm, which ends them itself.

    Call it early: the id is not known any more once the launcher has ended.
    """
    if environment.get(_LAUNCHER, "").isascii() and environment.get(_LAUNCHER, "").isdigit():
        return int(environment[_LAUNCHER])
    return os.getppid() if is_torchrun(environment) else None


@contextmanager
def as_launcher(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Make the ranks that this process starts in the block end with it; later processes are not affected."""
    environment[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        del environment[_LAUNCHER]


def watch_children(children: Sequence["subprocess.Popen[Any]"], failed: Callable[[int, int], None]) -> None:
    """Call ``failed`` with rank and exit code when a rank that this process has started fails.

    The call comes some seconds later, and only if this process still runs: the watchdog has a better report.
    """
    _children.extend(children)

    def watch() -> None:
        while all(child.poll() == 0 or child.returncode is None for child in children):
            time.sleep(0.2)
        rank, code = next((rank, child.returncode) for rank, child in enumerate(children, 1) if child.returncode)
        time.sleep(_GRACE_SECONDS)
        failed(rank, code)

    threading.Thread(target=watch, daemon=True, name="children").start()


def report_to_torchrun(lines: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Let torchrun show these lines at the end of its own report, instead of "no error file" (torch's ``record``)."""
    file = environment.get("TORCHELASTIC_ERROR_FILE")
    if not file or not lines:
        return
    text = "\n".join(lines)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError), Path(file).open("x", encoding="utf-8") as report:  # the first fault is the cause
        json.dump({"message": message}, report)


def end_mpi(code: int, *, all_end: bool) -> None:
    """Finalize MPI if this process uses it: mpiexec takes a process that ends without that for a crash.

    Finalizing waits for the other ranks. Unless ``all_end``, some may never do it, so MPI ends them all with ``code``.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if all_end:
        mpi.Finalize()
    else:
        mpi.COMM_WORLD.Abort(code)


def end_children() -> None:
    """End the ranks that this process has started and that still run."""
    for child in _children:
        child.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in _children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()


def launcher_arguments(environment: Mapping[str, str] = os.environ) -> dict[str, GivenValue]:
    """Return the arguments that the launcher has set, by their name in ``arguments.py``.

    Raises:
        ValueError: variables are wrong or contradict each other, ``fabric run`` has an unknown strategy, or ``LT_*``
            variables are set without ``fabric run``. Its arguments are a line for each fault.
    """
    faults = check_environment(environment)
    if faults:
        raise ValueError(*faults)
    options = {
        name: environment[f"LT_{name.upper()}"] for name in _FABRIC_OPTIONS if f"LT_{name.upper()}" in environment
    }
    if options and not under_fabric_run(environment):
        names = ", ".join(f"LT_{name.upper()}" for name in options)
        raise ValueError(f"{names} set in the environment, but this was not started by fabric run: unset it")
    given = {}
    if "LOCAL_WORLD_SIZE" in environment and not under_fabric_run(environment):
        processes = int(environment["LOCAL_WORLD_SIZE"])
        nodes = int(environment.get("WORLD_SIZE", processes)) // processes
        given["devices"] = GivenValue(str(processes), "torchrun --nproc-per-node", is_default=processes == 1)
        given["num_nodes"] = GivenValue(str(nodes), "torchrun --nnodes", is_default=nodes == 1)
    for name, value in options.items():
        where = f"fabric run --{name.replace('_', '-')}"
        if name == "strategy":
            if value not in _PARALLELISM_OF_STRATEGY:
                raise ValueError(
                    f"{where} {value}: leave it out and give --parallelism auto, fsdp, fsdp2, ddp or single"
                )
            if value != "auto":
                given["parallelism"] = GivenValue(_PARALLELISM_OF_STRATEGY[value], where)
            continue
        if name == "devices" and value == "auto":  # fabric run starts one process then, on any number of GPUs
            value = environment.get("LOCAL_WORLD_SIZE", "1")
        value = _PRECISION_ALIASES.get(value, value) if name == "precision" else value
        given[name] = GivenValue(value, where, is_default=name in ("devices", "num_nodes") and value == "1")
    return given


def clear_launcher_options(environment: MutableMapping[str, str] = os.environ) -> None:
    """Remove the ``LT_*`` variables that :func:`launcher_arguments` has turned into arguments."""
    for name in _FABRIC_OPTIONS:
        environment.pop(f"LT_{name.upper()}", None)
