"""RUN/times.jsonl: where the time of a run went, over all of its starts, and the goodput that follows from it.

Goodput is the share of the time in which steps were trained that count: the definition of "effective training time" in
the Llama 3 paper (arXiv:2407.21783, section 3.3.4).

metrics.csv loses the rows after the checkpoint that a run resumes from. This file loses nothing: it is only appended
to, except that a line of the kind ``step`` is replaced by the line after it. So it has a few lines for each save.
"""

import errno
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fabric_train.cli.errors import InputError
from fabric_train.distributed.signals import Heartbeat, StepPhase
from fabric_train.files.regular_file import open_to_write, read_json_lines
from fabric_train.training.loggers import Logger
from fabric_train.training.metrics import Metrics

TIMES = "times.jsonl"
_PARTS = {
    StepPhase.LOADING: "starting",
    StepPhase.DATA: "data",
    StepPhase.VALIDATION: "evaluation",
    StepPhase.SAMPLING: "evaluation",
    StepPhase.SAVING: "saving",
    StepPhase.ENDING: "ending",
}
"""What the seconds of a phase are counted as; all other phases are of training."""
_TRAINED = ("training", "data", "evaluation")
"""The parts that a start from an earlier step repeats."""

_MOST_SECONDS = 1e15
_ADVICE = "move the file away"

Event = Literal["start", "step", "save", "saved", "end"]


@dataclass(frozen=True)
class TimesLine:
    """A line of times.jsonl: an event of rank 0, and where the time since its start went until then.

    ``event`` is ``start`` of the program, ``step`` for a logged step, ``save`` before a save begins, ``saved`` when
    that checkpoint is complete, or ``end``. ``time`` is in seconds since 1970. ``step`` is the last completed one, for
    ``start`` the one that the run starts from. ``seconds`` are starting, training, data (waiting for it), evaluation,
    saving and ending; their sum is the time since the start.
    """

    event: Event
    time: float
    step: int
    num_devices: int
    seconds: dict[str, float]


class TimesFile(Logger):
    """Writes ``RUN/times.jsonl`` on rank 0."""

    def __init__(self, path: Path, heartbeat: Heartbeat, after_step: int, num_devices: int) -> None:
        """Append a start. ``after_step`` is the step of the checkpoint that the run starts from, or 0."""
        self._heartbeat = heartbeat
        self._num_devices = num_devices
        self._after_step = after_step
        self._epoch = time.time() - time.monotonic()
        open_to_write(path, "a").close()
        self._file = open_to_write(path, "r+", newline="")
        content = path.read_bytes()
        self._end = content.rfind(b"\n") + 1  # a crash may have cut the last line off
        self._size = len(content)
        self._write(TimesLine("start", self._epoch + heartbeat.started, after_step, num_devices, {}))
        self._add("step")

    def log(self, metrics: Metrics) -> None:
        self._add("step")

    def flush(self) -> None:
        self._add("save")

    def log_save(self, checkpoint: Path) -> None:
        self._add("saved")

    def close(self) -> None:
        self._add("end")
        self._file.close()

    def abandon(self) -> None:
        self._file.close()

    def _add(self, event: Event) -> None:
        spent = seconds_by_part(self._heartbeat.seconds)
        step = self._heartbeat.last_completed or self._after_step
        now = self._epoch + self._heartbeat.started + sum(spent.values())
        self._write(TimesLine(event, now, step, self._num_devices, spent))

    def _write(self, line: TimesLine) -> None:
        """Write a line over the last one of the kind ``step``, in one call: a kill leaves one of the two."""
        spent = {name: round(seconds, 3) for name, seconds in line.seconds.items()}
        text = json.dumps({**vars(line), "time": round(line.time, 3), "seconds": spent}).encode() + b"\n"
        end = self._end + len(text)
        if os.pwrite(self._file.fileno(), text, self._end) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if end < self._size:
            os.ftruncate(self._file.fileno(), end)
        self._size = end
        if line.event != "step":
            self._end = end


def seconds_by_part(seconds: Mapping[StepPhase, float]) -> dict[str, float]:
    """Return the seconds of phases as ``TimesLine.seconds`` names them."""
    parts = dict.fromkeys(("starting", "training", "data", "evaluation", "saving", "ending"), 0.0)
    for phase, spent in seconds.items():
        parts[_PARTS.get(phase, "training")] += spent
    return parts


@dataclass(frozen=True)
class RunTimes:
    """Where the time of a run went, from the start of its first process to its last line, in seconds.

    ``training`` is of steps that count. ``repeated`` is the training, the waiting for data and the evaluation after
    the step that a later start began with: that was done again. ``starting`` is the first start, from the start of the
    program until its first step is completed, and ``restarting`` all later ones. ``idle`` is between two starts, and
    includes what a killed run did after its last line. ``ending`` has uploads and the report. ``stalls`` are the
    seconds of each save in which steps waited, and ``saves`` those until each checkpoint was complete. ``step`` is the
    mean of a step with its wait for data, None before the second step of a start.
    """

    training: float
    data: float
    evaluation: float
    saving: float
    starting: float
    restarting: float
    repeated: float
    idle: float
    ending: float
    starts: tuple[float, ...]
    stalls: tuple[float, ...]
    saves: tuple[float, ...]
    step: float | None
    num_devices: int

    @property
    def parts(self) -> dict[str, float]:
        """Return seconds by what they were spent on, in words."""
        return {
            "training": self.training,
            "evaluation": self.evaluation,
            "waiting for data": self.data,
            "saving": self.saving,
            "starting": self.starting,
            "restarting": self.restarting,
            "repeated steps": self.repeated,
            "between two starts": self.idle,
            "ending": self.ending,
        }

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were trained that count."""
        return self.share(self.training)

    def share(self, seconds: float) -> float:
        """Return seconds as a share of all, 0 for a run without time: a start that was killed at once."""
        return seconds / self.total if self.total > 0 else 0.0

    @property
    def stall(self) -> float | None:
        """The median of ``stalls``, None without a save."""
        return statistics.median(self.stalls) if self.stalls else None

    @property
    def save(self) -> float | None:
        """The median of ``saves``, None without a complete one."""
        return statistics.median(self.saves) if self.saves else None

    @property
    def start(self) -> float | None:
        """The median of ``starts``, None without a completed step."""
        return statistics.median(self.starts) if self.starts else None

    def describe(self) -> str:
        """Return the goodput, the time, and the shares of at least 0.1 %, the largest first."""
        least = self.total / 1000
        others = {name: spent for name, spent in self.parts.items() if name != "training" and spent >= least}
        shares = (f"{name} {self.share(spent):.1%}" for name, spent in sorted(others.items(), key=lambda one: -one[1]))
        starts = f", {len(self.starts)} starts" if len(self.starts) > 1 else ""
        return f"{self.goodput:.1%} of {describe_seconds(self.total)}{starts}; {', '.join(shares)}"


def describe_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit: ms, s, min or h."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def read_times(run: Path) -> RunTimes | None:
    """Return where the time of a run went; None if an earlier version trained it, or it has not started.

    Raises:
        InputError: the file is damaged.
    """
    file = run / TIMES
    attempts: list[list[TimesLine]] = []
    for number, line in enumerate(read_json_lines(file, TimesLine, _ADVICE), 1):
        if not _is_possible(line):
            raise InputError(f"{file}, line {number}: damaged (a number that no run has); {_ADVICE}")
        if line.event == "start":
            attempts.append([])
        elif not attempts:
            raise InputError(f"{file}: damaged (its first line is no start); {_ADVICE}")
        attempts[-1].append(line)
    return _sum_up(attempts) if attempts else None


def _is_possible(line: TimesLine) -> bool:
    """Return whether the numbers of a line can be added up: finite, and none below 0."""
    numbers = (line.time, line.step, *line.seconds.values())
    return line.num_devices > 0 and all(0 <= number < _MOST_SECONDS for number in numbers)


def _sum_up(attempts: Sequence[Sequence[TimesLine]]) -> RunTimes:
    """Add up the attempts; each is the lines of one start."""
    names = ("training", "data", "evaluation", "saving", "restarting", "repeated", "idle", "ending")
    totals = dict.fromkeys(names, 0.0)
    first_steps = [lines[0].step for lines in attempts]
    for number, lines in enumerate(attempts):
        spent = lines[-1].seconds
        later = attempts[number + 1 : number + 2]
        kept_until = min(first_steps[number + 1 :], default=math.inf)
        kept = [line.seconds for line in lines if line.step <= kept_until][-1:]
        for name in _TRAINED:
            counts = kept[0].get(name, 0.0) if kept else 0.0
            totals[name] += counts
            totals["repeated"] += spent.get(name, 0.0) - counts
        for name in ("saving", "ending"):
            totals[name] += spent.get(name, 0.0)
        totals["restarting"] += spent.get("starting", 0.0) if number else 0.0
        totals["idle"] += sum(max(following[0].time - lines[-1].time, 0.0) for following in later)
    num_steps = sum(max(lines[-1].step - lines[0].step - 1, 0) for lines in attempts)
    in_steps = sum(lines[-1].seconds.get(name, 0.0) for lines in attempts for name in ("training", "data"))
    stepped = [lines[-1] for lines in attempts if any(line.seconds.get("training") for line in lines)]
    return RunTimes(
        **totals,
        starting=attempts[0][-1].seconds.get("starting", 0.0),
        starts=tuple(line.seconds.get("starting", 0.0) for line in stepped),
        stalls=tuple(stall for lines in attempts for stall in _stalls(lines)),
        saves=tuple(seconds for lines in attempts for seconds in _saves(lines)),
        step=in_steps / num_steps if num_steps else None,
        num_devices=attempts[-1][0].num_devices,
    )


def _stalls(lines: Sequence[TimesLine]) -> list[float]:
    """Return the seconds for which each save of an attempt held up the steps."""
    begun = [line.seconds.get("saving", 0.0) for line in lines if line.event == "save"]
    return [after - before for before, after in itertools.pairwise([*begun, lines[-1].seconds.get("saving", 0.0)])]


def _saves(lines: Sequence[TimesLine]) -> list[float]:
    """Return the seconds from the beginning of each save to its complete checkpoint; they end in their order."""
    begun, completed = ([line.time for line in lines if line.event == event] for event in ("save", "saved"))
    return [after - before for before, after in zip(begun, completed, strict=False)]
