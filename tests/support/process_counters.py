"""Read what Linux counts of a process, of one of its threads, and of the loopback, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoopbackTraffic:
    """What the loopback has received, and so sent, since the network exists; packets with their headers."""

    num_bytes: int
    num_packets: int


def cpu_seconds(pid: int, thread: int) -> float:
    """Return the seconds that a thread has run on a CPU; the main thread has the number of its process."""
    nanoseconds = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]
    return int(nanoseconds) / 1e9


def num_wakeups(pid: int, thread: int) -> int:
    """Return how often a thread has waited, and so been woken up."""
    status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def only_other_thread(pid: int) -> int:
    """Return the number of the only thread of a process besides the main thread."""
    (thread,) = (int(name) for name in os.listdir(f"/proc/{pid}/task") if name != str(pid))
    return thread


def num_open_files(pid: int) -> int:
    """Return the number of open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def private_bytes(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other."""
    num_bytes = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_"):
            num_bytes += int(line.split()[1]) * 1024
    return num_bytes


def loopback_traffic() -> LoopbackTraffic:
    """Return the traffic on the loopback of this process's network."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    num_bytes, num_packets, *_ = loopback.split(":")[1].split()
    return LoopbackTraffic(int(num_bytes), int(num_packets))
