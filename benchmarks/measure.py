"""Run a command and measure its wall-clock time and the memory of its whole process tree."""

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
from typing import IO, TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent
_SHORTEST_INTERVAL = 0.05
_LARGEST_SHARE = 0.01  # of one core, for each of the two kinds of sample
_NUM_LAST_LINES = 20  # that are kept of a command that fails

T = TypeVar("T")


@dataclass(frozen=True)
class Command:
    """A command that runs in the project's root, with ``environment`` added to the environment variables.

    Its first word is a program of this virtual environment, such as ``python``, ``fabric`` or ``torchrun``.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.words])


@dataclass(frozen=True)
class Measurement:
    """What one command took. Memory is sampled, so a peak of a few milliseconds may be missed.

    Attributes:
        seconds: from before its start to its end.
        peak_rss_bytes: peak of the resident memory summed over its process tree; a shared page counts in each process.
        peak_pss_bytes: the same with shared pages divided among their processes; None where the system does not report
            it (only Linux does).
        peak_anonymous_bytes: the peak of the resident memory without pages of files and shared memory, summed over its
            process tree; None where the system does not report it (only Linux does).
        child_peak_rss_bytes: the peaks of its direct children, the largest first.
        cpu_seconds: user and system time of its process tree, as last seen of each process.
        output: its standard output.
    """

    seconds: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    peak_anonymous_bytes: int | None
    child_peak_rss_bytes: tuple[int, ...]
    cpu_seconds: float
    output: str


@dataclass(frozen=True)
class Spread:
    """The median, lowest and highest of several values."""

    median: float
    lowest: float
    highest: float


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


class CommandError(ChildProcessError):
    """A command whose exit code is not 0; ``output`` and ``errors`` are what it printed."""

    def __init__(self, message: str, output: str = "", errors: str = "") -> None:
        super().__init__(message)
        self.output = output
        self.errors = errors

    @property
    def last_lines(self) -> list[str]:
        """Return the last lines of its errors, or of its output if it printed no errors."""
        return (self.errors.strip() or self.output.strip()).splitlines()[-_NUM_LAST_LINES:]


class CommandTimeoutError(CommandError):
    """A command that was killed because it took longer than it may."""


def run(command: Command, seconds: float | None = None) -> Measurement:
    """Run the command to its end and measure it. If this is interrupted, end all its processes.

    Args:
        command: what to run.
        seconds: how long it may take; None for any time.

    Raises:
        CommandError: its exit code is not 0.
        CommandTimeoutError: it took longer than it may.
    """
    words = [str(Path(sys.executable).parent / command.words[0]), *command.words[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **command.environment}
    if "PYTHONPATH" in command.environment and "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.pathsep.join(each["PYTHONPATH"] for each in (command.environment, os.environ))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=errors)
        sampler = _MemorySampler(process.pid)
        sampler.start()
        try:
            process.wait(seconds)
            taken = time.perf_counter() - started
        except subprocess.TimeoutExpired:
            _kill_tree(process)
            raise CommandTimeoutError(
                f"{command} took more than {seconds:.0f} s", _read(output), _read(errors)
            ) from None
        finally:
            sampler.stop()
            _kill_tree(process)
        if process.returncode:
            reason = (_read(errors).strip() or "no error message").splitlines()[-1]
            message = f"{command} failed with exit code {process.returncode}: {reason}"
            raise CommandError(message, _read(output), _read(errors))
        return Measurement(
            seconds=taken,
            peak_rss_bytes=sampler.rss,
            peak_pss_bytes=sampler.pss or None,
            peak_anonymous_bytes=sampler.anonymous or None,
            child_peak_rss_bytes=sampler.child_peaks(),
            cpu_seconds=sampler.cpu_seconds(),
            output=_read(output),
        )


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def interleave(
    systems: Mapping[str, Callable[[], T]],
    repetitions: Mapping[str, int],
    name: str,
    left_out: dict[str, str] | None = None,
) -> dict[str, list[T]]:
    """Run the systems in turn, in reverse order every second round, so that a machine that slows down slows all.

    Args:
        systems: name → function that runs the system once.
        repetitions: name → how often to run it.
        name: the benchmark's name, for the progress lines.
        left_out: where given, a system that fails is recorded here with the reason instead of raising.

    Returns:
        The results of each system that did not fail.

    Raises:
        ChildProcessError: a system failed, and ``left_out`` is None.
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
                print(f"  left out: {error}", flush=True)
                continue
            print(f"  {time.perf_counter() - started:.1f} s", flush=True)
    return results


class _MemorySampler(threading.Thread):
    """A thread that samples the memory of a process tree, as often as its share of a core allows."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.rss = self.pss = self.anonymous = 0
        self._pid = pid
        self._peaks: dict[int, int] = {}
        self._cpu_seconds: dict[int, float] = {}
        self._stopped = threading.Event()

    def run(self) -> None:
        pause = 0.0
        pss_due = 0.0
        while not self._stopped.wait(pause):
            started = time.perf_counter()
            tree = _tree(self._pid)
            self._sample_rss(tree)
            sampled = time.perf_counter()
            pause = max(_SHORTEST_INTERVAL, (sampled - started) / _LARGEST_SHARE)
            if sampled >= pss_due:  # slow: the kernel walks every page
                self.pss = max(self.pss, sum(map(_pss, tree)))
                pss_due = sampled + (time.perf_counter() - sampled) / _LARGEST_SHARE

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self.join()

    def child_peaks(self) -> tuple[int, ...]:
        """Return the peaks of the direct children in bytes, the largest first."""
        return tuple(sorted(self._peaks.values(), reverse=True))

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes."""
        return sum(self._cpu_seconds.values())

    def _sample_rss(self, tree: list[psutil.Process]) -> None:
        total = anonymous = 0
        for process in tree:
            try:
                memory = process.memory_info()
                parent = process.ppid()
                times = process.cpu_times()
            except psutil.Error:  # the process has just ended
                continue
            total += memory.rss
            self._cpu_seconds[process.pid] = times.user + times.system
            anonymous += memory.rss - getattr(memory, "shared", memory.rss)
            if parent == self._pid:
                self._peaks[process.pid] = max(memory.rss, self._peaks.get(process.pid, 0))
        self.rss = max(self.rss, total)
        self.anonymous = max(self.anonymous, anonymous)


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
    """Kill a command that still runs, together with its ranks and workers."""
    if process.poll() is None:
        for victim in reversed(_tree(process.pid)):
            victim.kill()
        process.wait()
