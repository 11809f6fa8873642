"""Up to a thousand ranks on one machine that only watch each other: the watchdog is real, the training is not.

Each rank is a process with a watchdog. Its main thread goes through the positions of steps of a second. The processes
are forks of a process that has imported the watchdog and not torch, so that a rank takes a few megabytes.
"""

import ctypes
import gc
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from fabric_train.cli.errors import run_program
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.distributed.watchdog import watch_ranks
from tests.support.process_counters import (
    cpu_seconds,
    loopback_traffic,
    num_open_files,
    num_wakeups,
    only_other_thread,
    private_bytes,
)
from tests.support.programs import ROOT

RANKS_OF_MACHINE = 8
FAULTS = ("killed", "hung", "machine", "rank 0")
"""A rank dies; its main thread stands still; a machine of eight ranks is silent; rank 0 dies."""

_OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
_PR_SET_PDEATHSIG = 1  # prctl(2): the kernel sends this process a signal when its parent ends
_NEVER = 2**62
_LONGEST_END = 300.0
_READ_BYTES = 1 << 12
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Observed:
    """The counts and times of a run.

    Attributes:
        num_ranks: of the run.
        connect_cpu_seconds: CPU seconds of rank 0 until all ranks are connected.
        cpu_share: CPU seconds of rank 0's watchdog per second while all ranks are well, as are the next three.
        wakeups_per_second: of rank 0's watchdog.
        bytes_per_second: on the loopback in both directions, with the headers.
        packets_per_second: the same.
        memory_bytes: private memory of rank 0.
        open_files: of rank 0.
        seconds_to_end: from the fault until the last other rank has ended.
        num_ended: other ranks that have ended.
        lines: what all ranks have printed.
    """

    num_ranks: int
    connect_cpu_seconds: float
    cpu_share: float
    wakeups_per_second: float
    bytes_per_second: float
    packets_per_second: float
    memory_bytes: int
    open_files: int
    seconds_to_end: float
    num_ended: int
    lines: list[str]


def observe_ranks(num_ranks: int, fault: str, timeout: float, seconds: float = 0.0) -> Observed:
    """Start ranks, observe them for ``seconds``, let a fault happen, and wait until all others have ended.

    As root, the ranks have a network of their own, so that other programs' bytes are not counted.

    Args:
        num_ranks: all on this machine.
        fault: one of ``FAULTS``. A rank can only hang after its first step, of a second.
        timeout: of a rank that is silent or hangs, in seconds.
        seconds: of observation before the fault; the rates are of no use if that is 0.
    """
    # a process of its own, because this one may have imported torch, and each rank is a fork
    command = [sys.executable, "-m", "tests.support.watched_ranks", str(num_ranks), fault, str(timeout), str(seconds)]
    if _can_have_own_network():
        command = [*_OWN_NETWORK, *command]
    import_path = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        import_path.append(os.environ["PYTHONPATH"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(import_path)}
    completed = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return Observed(**json.loads(completed.stdout))


def _can_have_own_network() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    return subprocess.run([*_OWN_NETWORK, "true"], check=False).returncode == 0


# ------------------------------------------------------------------------------------- in the process that forks


class _SharedState(ctypes.Structure):
    """The memory that all ranks share with the process that forks them."""

    began_at: float
    """When the first step began, by ``time.monotonic``."""
    hanging_rank: int
    """The rank whose main thread stops in ``last_step``."""
    last_step: int
    _fields_ = [("began_at", ctypes.c_double), ("hanging_rank", ctypes.c_int64), ("last_step", ctypes.c_int64)]


@dataclass(frozen=True)
class _Streams:
    """The pipes and the file that all ranks inherit, as file descriptors."""

    gate: tuple[int, int]
    """Nobody writes into this pipe. Ranks wait for its end: when all are forked, its writing end is closed."""
    ready: int
    """The writing end of a pipe into which each rank writes a byte when it is connected."""
    output: int
    """The file for standard output and error."""


@dataclass(frozen=True)
class _Rank:
    """What the watchdog needs of Fabric.

    Rank 0 broadcasts its address through a pipe to the process that forks. The other ranks are forked when that knows
    the address, and have it from their beginning.
    """

    global_rank: int
    world_size: int
    address_pipe: tuple[int, int]
    address: Any = None

    def broadcast(self, address: Any) -> Any:
        if self.address is not None:
            return self.address
        os.write(self.address_pipe[1], json.dumps(address).encode())
        return address


@dataclass(frozen=True)
class _Fault:
    """A fault that has happened."""

    happened_at: float
    """By ``time.monotonic``."""
    lost_pids: set[int]
    """The ranks that do not end by themselves."""


def _main() -> None:
    num_ranks, fault, timeout, seconds = sys.argv[1:]
    print(json.dumps(asdict(_observe(int(num_ranks), fault, float(timeout), float(seconds)))))


def _observe(num_ranks: int, fault_name: str, timeout: float, seconds: float) -> Observed:
    state = _SharedState.from_buffer(mmap.mmap(-1, ctypes.sizeof(_SharedState)))
    state.last_step = _NEVER
    with tempfile.TemporaryFile() as output:
        pids = _start(num_ranks, timeout, state, output.fileno())
        rank_0 = pids[0]
        connect_cpu_seconds = cpu_seconds(rank_0, rank_0)

        # rates while all ranks are well
        watchdog = only_other_thread(rank_0)
        cpu_before = cpu_seconds(rank_0, watchdog)
        wakeups_before = num_wakeups(rank_0, watchdog)
        traffic_before = loopback_traffic()
        began_at = time.monotonic()
        time.sleep(seconds)
        cpu_after = cpu_seconds(rank_0, watchdog)
        wakeups_after = num_wakeups(rank_0, watchdog)
        traffic_after = loopback_traffic()
        observed_seconds = time.monotonic() - began_at
        memory_bytes = private_bytes(rank_0)
        open_files = num_open_files(rank_0)

        # the fault, and how long the others take to end
        fault = _let_happen(fault_name, pids, state)
        num_ended = _wait_for(set(pids) - fault.lost_pids)
        seconds_to_end = time.monotonic() - fault.happened_at
        for pid in fault.lost_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output.seek(0)
        lines = output.read().decode().splitlines()
    return Observed(
        num_ranks=num_ranks,
        connect_cpu_seconds=connect_cpu_seconds,
        cpu_share=(cpu_after - cpu_before) / observed_seconds,
        wakeups_per_second=(wakeups_after - wakeups_before) / observed_seconds,
        bytes_per_second=(traffic_after.num_bytes - traffic_before.num_bytes) / observed_seconds,
        packets_per_second=(traffic_after.num_packets - traffic_before.num_packets) / observed_seconds,
        memory_bytes=memory_bytes,
        open_files=open_files,
        seconds_to_end=seconds_to_end,
        num_ended=num_ended,
        lines=lines,
    )


def _start(num_ranks: int, timeout: float, state: _SharedState, output: int) -> list[int]:
    """Start the ranks, which connect all at once; return their process ids when all are connected."""
    gc.freeze()  # garbage collections of the ranks do not touch, and so copy, the pages of the imports
    address_pipe = os.pipe()
    gate = os.pipe()
    ready_reader, ready_writer = os.pipe()
    streams = _Streams(gate, ready_writer, output)
    pids = [_fork(_Rank(0, num_ranks, address_pipe), timeout, state, streams)]
    address = json.loads(os.read(address_pipe[0], _READ_BYTES))
    for rank in range(1, num_ranks):
        pids.append(_fork(_Rank(rank, num_ranks, address_pipe, address), timeout, state, streams))
    state.began_at = time.monotonic()
    for descriptor in (*gate, ready_writer):
        os.close(descriptor)
    num_ready = 0
    while num_ready < num_ranks:
        received = os.read(ready_reader, _READ_BYTES)
        if not received:
            raise ChildProcessError("the ranks have ended while they were starting")
        num_ready += len(received)
    return pids


def _fork(rank: _Rank, timeout: float, state: _SharedState, streams: _Streams) -> int:
    """Fork a rank and return its process id."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    # whatever happens below, the fork must not return from here: it would go on as its parent
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent ended before this rank had asked to end with it
            os._exit(1)
        os.dup2(streams.output, 1)
        os.dup2(streams.output, 2)
        gate_reader, gate_writer = streams.gate
        os.close(gate_writer)  # otherwise this rank would hold its own gate shut
        if rank.global_rank:
            os.read(gate_reader, 1)
        _train(rank, timeout, state, streams.ready)
    except Exception as error:  # noqa: BLE001
        print(f"rank {rank.global_rank}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _train(rank: _Rank, timeout: float, state: _SharedState, ready: int) -> NoReturn:
    """Go through the phases of steps of one second, as the main thread of a rank does, with a real watchdog."""
    heartbeat = Heartbeat()
    with watch_ranks(rank, heartbeat, timeout, num_nodes=1):
        os.write(ready, b".")
        os.close(ready)
        while True:
            seconds_since_start = time.monotonic() - state.began_at
            step = int(seconds_since_start) + 1
            heartbeat.enter(StepPhase.COMPUTING, step=step)
            if step >= state.last_step and rank.global_rank == state.hanging_rank:
                time.sleep(_LONGEST_END)
            heartbeat.enter(StepPhase.OPTIMIZER)
            if step >= state.last_step:  # a real rank would wait in a collective for the one that hangs
                time.sleep(_LONGEST_END)
            time.sleep(step - seconds_since_start)


def _let_happen(fault_name: str, pids: list[int], state: _SharedState) -> _Fault:
    """Let one of ``FAULTS`` happen to ranks in the middle, or to rank 0."""
    middle_rank = len(pids) // 2
    if fault_name == "hung":
        state.hanging_rank = middle_rank
        # the step after the next one: every rank reads it before it gets there
        state.last_step = int(time.monotonic() - state.began_at) + 2
        return _Fault(state.began_at + state.last_step - 1, set())
    if fault_name == "machine":
        first_rank = middle_rank // RANKS_OF_MACHINE * RANKS_OF_MACHINE
        lost_pids = pids[first_rank : first_rank + RANKS_OF_MACHINE]
        return _send_signal(lost_pids, signal.SIGSTOP)
    if fault_name == "rank 0":
        return _send_signal(pids[:1], signal.SIGKILL)
    assert fault_name == "killed"
    return _send_signal([pids[middle_rank]], signal.SIGKILL)


def _send_signal(pids: list[int], signal_number: int) -> _Fault:
    happened_at = time.monotonic()
    for pid in pids:
        os.kill(pid, signal_number)
    return _Fault(happened_at, set(pids))


def _wait_for(pids: set[int]) -> int:
    """Wait until processes have ended, and return how many have."""
    ended_pids: set[int] = set()
    deadline = time.monotonic() + _LONGEST_END
    while not pids <= ended_pids and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended_pids.add(pid)
        else:
            time.sleep(_POLL_SECONDS)
    return len(ended_pids & pids)


if __name__ == "__main__":
    run_program(_main)
