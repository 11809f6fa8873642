"""The ranks' start: those that no launcher has started, and how all of them find each other."""

import errno
import os
import socket
import subprocess
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.strategies.launchers import subprocess_script

from fabric_train.cli.errors import FAILURE, InputError, end_run, exit_process
from fabric_train.cli.launcher import as_launcher, global_rank, num_restarts, watch_children
from fabric_train.distributed.signals import STOPPED, outside_of_training


def meet(fabric: Fabric, accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Launch Fabric: start the other ranks where no launcher has, and connect them.

    Raises:
        InputError: the port on which they are to meet is taken.
    """
    _refuse_taken_port(fabric)
    # Fabric's own would kill this process without a word, and also where the ranks end together
    subprocess_script._launch_process_observer = _mind_children
    if num_restarts() and num_processes > 1:
        _join_anew(accelerator, num_processes, timeout)
    with as_launcher():
        fabric.launch()


def _refuse_taken_port(fabric: Fabric) -> None:
    """Refuse a port that this rank is to listen on, so that the ranks find each other, and somebody else does."""
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if environment is None or fabric.global_rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", environment.main_port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            port = f"port {environment.main_port}, on which the ranks are to meet, is in use on this machine"
            raise InputError(f"{port}: set MASTER_PORT to a free one, or stop what uses it") from None


def _join_anew(accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Set up the process group, which Fabric then takes as it is, where torchrun has started the ranks again.

    Unless it is told another rendezvous, torchrun keeps one store over all restarts, and torch would find in it the
    addresses of ranks that are dead.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    dist.init_process_group(
        dist.get_default_backend_for_device(accelerator),
        store=dist.PrefixStore(f"restart-{num_restarts()}", store),
        rank=global_rank(),
        world_size=num_processes,
        timeout=timeout,
    )


def _mind_children(child_processes: list["subprocess.Popen[Any]"]) -> None:
    """Take the ranks that this process has started under its care."""
    watch_children(child_processes, _child_failed)


def _child_failed(rank: int, code: int) -> None:
    """End with a rank that this process has started and that has come to a bad end before anybody watched it."""
    if code == STOPPED:
        end_run(code, outside_of_training(f"a signal to rank {rank}"))
    if code < 0:
        end_run(FAILURE, f"error: rank {rank} was killed by signal {-code} while it was starting: start again")
    exit_process(code)  # it has said why


def leave_process_group(fabric: Fabric) -> None:
    """Wait until every rank has come to its end and take down what connects them."""
    fabric.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
