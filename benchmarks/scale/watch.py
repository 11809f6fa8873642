"""Measure how fast all ranks know that some are lost, and what the watch costs rank 0, at up to 1,024 ranks."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.scale.series import Point, Series
from tests.support.watched_ranks import RANKS_OF_MACHINE, Observed, observe_ranks

_SIZES = (16, 64, 256, 1024)
_FEWER_SIZES = (16, 256, 1024)  # where each point takes the timeout
_TIMEOUT = 8.0  # seconds, of a rank that is silent or hangs
_USUAL_TIMEOUT = 120.0  # the default of --rank_timeout
_OBSERVED_SECONDS = 10.0
_SIMULATED = (
    "all ranks are processes on one machine that share its cores and its loopback; their main threads sleep instead of "
    "training, and no other connection of a run is there"
)
_REAL = "rank_connections.py and watchdog.py of each rank, their TCP connections, the signals that kill or stop ranks"
_FAULTS = {
    "killed": "until all ranks have ended after one was killed",
    "rank 0": "until all ranks have ended after rank 0 was killed",
    "hung": f"until all ranks have ended after one began to hang, with --rank_timeout {_TIMEOUT:g}",
    "machine": f"until all ranks have ended after {RANKS_OF_MACHINE} went silent, with --rank_timeout {_TIMEOUT:g}",
}
_OF_RANK_0: dict[tuple[str, str], tuple[Callable[[Observed], float], float | None]] = {
    ("CPU of rank 0's watch while all is well", "% of a core"): (lambda seen: 100 * seen.cpu_share, 2.0),
    ("CPU of rank 0 until all are connected", "s"): (lambda seen: seen.connect_cpu_seconds, None),
    ("wake-ups of rank 0's watch", "1/s"): (lambda seen: seen.wakeups_per_second, None),
    ("packets of all ranks", "1/s"): (lambda seen: seen.packets_per_second, None),
    ("bytes of all ranks, with TCP's headers", "kB/s"): (lambda seen: seen.bytes_per_second / 1e3, None),
    ("private memory of rank 0", "MB"): (lambda seen: seen.memory_bytes / 1e6, None),
    ("open files of rank 0", "files"): (lambda seen: seen.open_files, None),
}


def measure(work: Path) -> list[Series]:
    """Return the watch's figures. A RuntimeError if some rank has not ended, or not for the fault."""
    usual = [_observe(size, "killed", _USUAL_TIMEOUT, _OBSERVED_SECONDS) for size in _SIZES]
    of_fault = {"killed": usual}
    for fault, sizes in (("rank 0", _SIZES), ("hung", _FEWER_SIZES), ("machine", _FEWER_SIZES)):
        of_fault[fault] = [_observe(size, fault, _TIMEOUT, 0) for size in sizes]
    series = partial(Series, part="watch", sizes_of="ranks", simulated=_SIMULATED, real=_REAL)
    ends = [
        series(
            quantity=quantity,
            unit="s",
            points=tuple(Point(seen.num_ranks, seen.seconds_to_end) for seen in of_fault[fault]),
        )
        for fault, quantity in _FAULTS.items()
    ]
    costs = [
        series(
            quantity=quantity,
            unit=unit,
            points=tuple(Point(seen.num_ranks, value(seen)) for seen in usual),
            limit=limit,
        )
        for (quantity, unit), (value, limit) in _OF_RANK_0.items()
    ]
    return [*ends, *costs]


def _observe(num_ranks: int, fault: str, timeout: float, seconds: float) -> Observed:
    said = {"killed": "died", "rank 0": "died", "hung": "hung", "machine": "sent no heartbeat"}[fault]
    num_others = num_ranks - {"hung": 0, "machine": RANKS_OF_MACHINE}.get(fault, 1)
    seen = observe_ranks(num_ranks, fault, timeout, seconds)
    if seen.num_ended < num_others or len(seen.lines) != 1 or said not in seen.lines[0]:
        raise RuntimeError(f"{fault}: {seen.num_ended} of {num_others} ranks have ended, saying {seen.lines}")
    return seen
