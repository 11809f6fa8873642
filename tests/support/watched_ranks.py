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
from pathlib import Path
from typing import Any, NoReturn

from fabric_train.cli.errors import run_program
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.distributed.watchdog import watch_ranks

ROOT = Path(__file__).resolve().parents[2]
RANKS_OF_MACHINE = 8
FAULTS = ("killed", "hung", "machine", "rank 0")
"""A rank dies; its main thread stands still; a machine of eight ranks is silent; rank 0 dies."""

_OWN_NETWORK = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
_PR_SET_PDEATHSIG = 1
_NEVER = 2**62
_LONGEST_START = 300.0
_LONGEST_END = 300.0
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
    command = [sys.executable, "-m", "tests.support.watched_ranks", str(num_ranks), fault, str(timeout), str(seconds)]
    if os.geteuid() == 0 and shutil.which("ip") and not subprocess.run([*_OWN_NETWORK, "true"], check=False).returncode:
        command = [*_OWN_NETWORK, *command]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return Observed(**json.loads(done.stdout))


class _Run(ctypes.Structure):
    """What all processes share: the time of the first step, and where one rank's main thread stops."""

    began_at: float
    hanging_rank: int
    last_step: int
    _fields_ = [("began_at", ctypes.c_double), ("hanging_rank", ctypes.c_int64), ("last_step", ctypes.c_int64)]


@dataclass(frozen=True)
class _Rank:
    """What the watchdog needs of Fabric. Rank 0 tells its address over a pipe; then the other ranks are forked."""

    global_rank: int
    world_size: int
    address_pipe: tuple[int, int]
    address: Any = None

    def broadcast(self, address: Any) -> Any:
        if self.address is not None:
            return self.address
        os.write(self.address_pipe[1], json.dumps(address).encode())
        return address


def _main() -> None:
    num_ranks, fault, timeout, seconds = int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
    print(json.dumps(asdict(_observe(num_ranks, fault, timeout, seconds))))


def _observe(num_ranks: int, fault: str, timeout: float, seconds: float) -> Observed:
    run = _Run.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Run)))
    run.last_step = _NEVER
    with tempfile.TemporaryFile() as output:
        pids = _start(num_ranks, timeout, run, output.fileno())
        connect_cpu_seconds = _cpu_seconds(pids[0], pids[0])
        before = _counters(pids[0])
        began_at = time.monotonic()
        time.sleep(seconds)
        after = _counters(pids[0])
        passed = time.monotonic() - began_at
        cpu, wakeups, num_bytes, packets = ((last - first) / passed for first, last in zip(before, after, strict=True))
        memory = _private_bytes(pids[0])
        open_files = len(os.listdir(f"/proc/{pids[0]}/fd"))
        happened_at, lost = _let_happen(fault, pids, run)
        num_ended = _wait_for(set(pids) - lost)
        seconds_to_end = time.monotonic() - happened_at
        for pid in lost:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        output.seek(0)
        lines = output.read().decode().splitlines()
    return Observed(
        num_ranks=num_ranks,
        connect_cpu_seconds=connect_cpu_seconds,
        cpu_share=cpu,
        wakeups_per_second=wakeups,
        bytes_per_second=num_bytes,
        packets_per_second=packets,
        memory_bytes=memory,
        open_files=open_files,
        seconds_to_end=seconds_to_end,
        num_ended=num_ended,
        lines=lines,
    )


def _start(num_ranks: int, timeout: float, run: _Run, output: int) -> list[int]:
    """Start the ranks, which connect all at once; return their process ids when all are connected."""
    gc.freeze()  # the ranks share the pages of the imports
    address_pipe = os.pipe()
    gate = os.pipe()
    ready = os.pipe()
    streams = gate, ready[1], output
    pids = [_fork(_Rank(0, num_ranks, address_pipe), timeout, run, streams)]
    address = json.loads(os.read(address_pipe[0], 1 << 12))
    others = [_Rank(rank, num_ranks, address_pipe, address) for rank in range(1, num_ranks)]
    pids += [_fork(rank, timeout, run, streams) for rank in others]
    run.began_at = time.monotonic()
    for end in (*gate, ready[1]):
        os.close(end)
    num_ready = 0
    while num_ready < num_ranks:
        received = os.read(ready[0], 1 << 12)
        if not received:
            raise ChildProcessError("the ranks have ended while they were starting")
        num_ready += len(received)
    return pids


def _fork(rank: _Rank, timeout: float, run: _Run, streams: tuple[tuple[int, int], int, int]) -> int:
    starter, (gate, ready, output) = os.getpid(), streams
    if pid := os.fork():
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter:
            os._exit(1)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(gate[1])
        if rank.global_rank:
            os.read(gate[0], 1)
        _train(rank, timeout, run, ready)
    except Exception as error:  # noqa: BLE001  the fork must not continue as its parent
        print(f"rank {rank.global_rank}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _train(rank: _Rank, timeout: float, run: _Run, ready: int) -> NoReturn:
    heartbeat = Heartbeat()
    with watch_ranks(rank, heartbeat, timeout, num_nodes=1):
        os.write(ready, b".")
        os.close(ready)
        while True:
            since_start = time.monotonic() - run.began_at
            step = int(since_start) + 1
            heartbeat.enter(StepPhase.COMPUTING, step=step)
            if step >= run.last_step and rank.global_rank == run.hanging_rank:
                time.sleep(_LONGEST_END)
            heartbeat.enter(StepPhase.OPTIMIZER)
            if step >= run.last_step:  # where it waits for the one that hangs
                time.sleep(_LONGEST_END)
            time.sleep(step - since_start)


def _let_happen(fault: str, pids: list[int], run: _Run) -> tuple[float, set[int]]:
    """Let a fault happen; return when it does, and the process ids of the ranks that do not end by themselves."""
    chosen = len(pids) // 2
    if fault == "hung":
        run.hanging_rank = chosen
        run.last_step = int(time.monotonic() - run.began_at) + 2
        return run.began_at + run.last_step - 1, set()
    first = chosen // RANKS_OF_MACHINE * RANKS_OF_MACHINE
    lost, number = {
        "killed": ([pids[chosen]], signal.SIGKILL),
        "machine": (pids[first : first + RANKS_OF_MACHINE], signal.SIGSTOP),
        "rank 0": ([pids[0]], signal.SIGKILL),
    }[fault]
    happened_at = time.monotonic()
    for pid in lost:
        os.kill(pid, number)
    return happened_at, set(lost)


def _wait_for(pids: set[int]) -> int:
    """Wait until processes have ended, and return how many have."""
    ended = set[int]()
    deadline = time.monotonic() + _LONGEST_END
    while not pids <= ended and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended.add(pid)
        else:
            time.sleep(_POLL_SECONDS)
    return len(ended & pids)


def _counters(pid: int) -> tuple[float, int, int, int]:
    """Return CPU seconds and wake-ups of a rank's watchdog so far, and bytes and packets on the loopback."""
    (watchdog,) = (int(name) for name in os.listdir(f"/proc/{pid}/task") if name != str(pid))
    status = Path(f"/proc/{pid}/task/{watchdog}/status").read_text()
    wakeups = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    (loopback,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    num_bytes, num_packets = map(int, loopback.split(":")[1].split()[:2])
    return _cpu_seconds(pid, watchdog), wakeups, num_bytes, num_packets


def _cpu_seconds(pid: int, thread: int) -> float:
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


if __name__ == "__main__":
    run_program(_main)
