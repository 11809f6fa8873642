"""Connect the ranks of a run, and start those that no launcher started."""

import errno
import os
import socket
import subprocess
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.plugins.environments import XLAEnvironment
from lightning.fabric.strategies.launchers import subprocess_script

from fabric_train.cli.errors import FAILURE, STOPPED, InputError, end_run, exit_process
from fabric_train.cli.launcher import (
    LOOPBACK,
    as_launcher,
    global_rank,
    num_restarts,
    serve_on_loopback,
    watch_children,
)
from fabric_train.distributed.signals import describe_stop_outside_training


def init_process_group(fabric: Fabric, accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Launch Fabric: start the other ranks if no launcher did, and connect all of them.

    Args:
        fabric: not yet launched.
        accelerator: "cuda" or "cpu".
        num_processes: in the run.
        timeout: of a collective.

    Raises:
        InputError: the port that the ranks use to connect is in use.
    """
    store = _serve_store(fabric)
    # Fabric's own observer kills this process without a message, even if all ranks are just ending together
    subprocess_script._launch_process_observer = _watch_children
    if num_restarts() and num_processes > 1 and _torchrun_has_store():
        _init_after_restart(accelerator, num_processes, timeout)
    with as_launcher():
        fabric.launch()  # torch's store on this port is the one that is served already
    del store


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this rank: those of a device mesh are created with torch's default."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def destroy_process_group(fabric: Fabric) -> None:
    """Wait until every rank is done, then destroy the process group."""
    fabric.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _torchrun_has_store() -> bool:
    """Whether torchrun itself listens on the port, in one store for all of its restarts; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serve_store(fabric: Fabric) -> "dist.TCPStore | None":
    """Serve the store by which the ranks connect, if this is the rank that does, and all of them are on this machine.

    On several machines torch serves it later, on all interfaces, and here the port is only checked.

    Raises:
        InputError: another program uses the port.
    """
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, XLAEnvironment):  # neither has a port
        return None
    if fabric.global_rank or _torchrun_has_store():
        return None
    try:
        if environment.main_address == LOOPBACK:
            return serve_on_loopback(environment.main_port)
        socket.create_server(("", environment.main_port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        port = f"port {environment.main_port}, which the ranks use to connect, is in use on this machine"
        raise InputError(f"{port}; set MASTER_PORT to a free one, or stop the program that uses it") from None
    return None


def _init_after_restart(accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Initialize the process group after torchrun has restarted the ranks; Fabric then uses it.

    torchrun's default rendezvous keeps one store over all restarts, which still holds the addresses of dead ranks. A
    prefix separates the restarts.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    dist.init_process_group(
        dist.get_default_backend_for_device(accelerator),
        store=dist.PrefixStore(f"restart-{num_restarts()}", store),
        rank=global_rank(),
        world_size=num_processes,
        timeout=timeout,
    )


def _watch_children(child_processes: list["subprocess.Popen[Any]"]) -> None:
    """Watch the ranks that this process has started, in place of Fabric's observer."""
    watch_children(child_processes, _end_with_child)


def _end_with_child(rank: int, code: int) -> None:
    """End the run because a rank that this process started has failed before the watchdog watched it."""
    if code == STOPPED:
        end_run(code, describe_stop_outside_training(f"a signal to rank {rank}"))
    if code < 0:
        end_run(FAILURE, f"error: rank {rank} was killed by signal {-code} while it was starting; start the run again")
    exit_process(code)  # the rank has reported why
