"""Run a command and measure it: wall-clock seconds, and the memory of its whole process tree while it ran."""

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent
_SHORTEST_INTERVAL = 0.05
_LARGEST_SHARE = 0.01  # of one core, that either kind of sample may take from what is measured

T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """``words`` run in the project's root, ``python`` and ``fabric`` being those of this environment; ``environment``
    is set beside what there is.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.words])


@dataclass(frozen=True)
class Measurement:
    """What one command took, from before its start to its end.

    Memory is sampled, so a peak of a few milliseconds may be missed. ``peak_rss_bytes`` is the largest sum over the
    tree of what each process has resident: a page that processes share counts once for each. ``peak_pss_bytes``
    divides such a page among them and is None where the system does not tell (only Linux does).
    ``child_peak_rss_bytes`` are the peaks of the command's direct children, the largest first.
    """

    seconds: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    child_peak_rss_bytes: tuple[int, ...]
    output: str


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of several values."""

    median: float
    lowest: float
    highest: float


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def run(command: Command) -> Measurement:
    """Run the command to its end and measure it; whatever it has started is gone afterwards.

    Raises:
        ChildProcessError: it ended with another exit code than 0.
    """
    words = [str(Path(sys.executable).parent / command.words[0]), *command.words[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **command.environment}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=errors)
        sampler = _MemorySampler(process.pid)
        sampler.start()
        try:
            process.wait()
            seconds = time.perf_counter() - started
        finally:
            sampler.stop()
            _kill_tree(process)
        if process.returncode:
            errors.seek(0)
            reason = (errors.read().strip() or "it says nothing").splitlines()[-1]
            raise ChildProcessError(f"{command} failed with exit code {process.returncode}: {reason}")
        output.seek(0)
        return Measurement(seconds, sampler.rss, sampler.pss or None, sampler.child_peaks(), output.read())


def interleave(
    systems: Mapping[str, Callable[[], T]],
    repetitions: Mapping[str, int],
    name: str,
    left_out: dict[str, str] | None = None,
) -> dict[str, list[T]]:
    """Run the systems in turn, every second round in reverse order, each as often as it is to be; return their results.

    A machine that slows down meanwhile so slows all of them. Where ``left_out`` is given, a system that fails is put
    into it, with the reason, instead of ending it all.
    """
    results: dict[str, list[T]] = {system: [] for system in systems}
    for repetition in range(max(repetitions.values())):
        order = list(systems) if repetition % 2 == 0 else list(systems)[::-1]
        for system in order:
            if repetition >= repetitions[system] or system in (left_out or {}):
                continue
            print(f"{name} {repetition + 1}/{repetitions[system]}: {system}", flush=True)
            started = time.perf_counter()
            try:
                results[system].append(systems[system]())
            except ChildProcessError as error:
                if left_out is None:
                    raise
                left_out[system] = str(error)
                del results[system]
                print(f"  {error}: measured without it", flush=True)
                continue
            print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    return results


class _MemorySampler(threading.Thread):
    """Samples a process tree until it is stopped, as often as its share of a core allows."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.rss = self.pss = 0
        self._pid = pid
        self._peaks: dict[int, int] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        pause, pss_due = 0.0, 0.0
        while not self._stopped.wait(pause):
            started = time.perf_counter()
            tree = _tree(self._pid)
            self._sample_rss(tree)
            sampled = time.perf_counter()
            pause = max(_SHORTEST_INTERVAL, (sampled - started) / _LARGEST_SHARE)
            if sampled >= pss_due:  # the kernel walks every page for it
                self.pss = max(self.pss, sum(map(_pss, tree)))
                pss_due = sampled + (time.perf_counter() - sampled) / _LARGEST_SHARE

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self.join()

    def child_peaks(self) -> tuple[int, ...]:
        """Peaks of the direct children, the largest first."""
        return tuple(sorted(self._peaks.values(), reverse=True))

    def _sample_rss(self, tree: list[psutil.Process]) -> None:
        total = 0
        for process in tree:
            try:
                rss, parent = process.memory_info().rss, process.ppid()
            except psutil.Error:  # it has just ended
                continue
            total += rss
            if parent == self._pid:
                self._peaks[process.pid] = max(rss, self._peaks.get(process.pid, 0))
        self.rss = max(self.rss, total)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _pss(process: psutil.Process) -> int:
    try:
        return getattr(process.memory_full_info(), "pss", 0)
    except psutil.Error:
        return 0


def _kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command that was not waited for, with the ranks and workers it has started."""
    if process.poll() is None:
        for victim in reversed(_tree(process.pid)):
            victim.kill()
        process.wait()
