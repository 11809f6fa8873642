"""Environment variables of the launcher (``fabric run``, torchrun, srun, mpiexec), and child ranks without one.

``fabric run`` removes ``--accelerator --strategy --devices --num-nodes --precision`` from anywhere on the command line
and passes them on as ``LT_*`` variables; torchrun sets the number of processes. Fabric would read the ``LT_*``
variables on its own. So this module turns them into arguments like any other, and clears them before Fabric is built.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
_FABRIC_OPTIONS = ("accelerator", "strategy", "devices", "num_nodes", "precision")
_PARALLELISM_OF_STRATEGY = {"auto": "auto", "ddp": "ddp", "fsdp": "fsdp"}
_PRECISION_ALIASES = {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true"}
_LAUNCHER = "FABRIC_TRAIN_LAUNCHER"  # the process id of the rank that has started the others
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
    ranks = [environment[name] for name in _RANK_VARIABLES if environment.get(name, "").isdigit()]
    return int(ranks[0]) if ranks else 0


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher of any kind has set this process's rank."""
    return any(name in environment for name in _RANK_VARIABLES)


def under_fabric_run(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``fabric run`` started this process; ``Fabric.launch`` must not be called then."""
    return environment.get("LT_CLI_USED") == "1"


def num_restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started this run again (``--max-restarts``)."""
    return int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)


def launcher_process(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the id of the process that this rank must not outlive: torchrun, ``fabric run``, or the rank that started
    it; None if the ranks were started by hand, or by Slurm, which ends them itself.

    Call it early: the id is not known any more once the launcher has ended.
    """
    if _LAUNCHER in environment:
        return int(environment[_LAUNCHER])
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None


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
        ValueError: ``fabric run`` has an unknown strategy, or ``LT_*`` variables are set without ``fabric run``.
    """
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
