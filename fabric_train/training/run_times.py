"""Read and write RUN/times.jsonl: how a run's time was used, over all of its starts, and the resulting goodput.

Goodput is the share of the time that was spent on steps that were not lost: the definition of "effective training time"
in the Llama 3 paper (arXiv:2407.21783, section 3.3.4).

metrics.csv loses the rows after the checkpoint that a run resumes from. This file loses nothing, because lines are only
appended to it, except that a line of the kind ``step`` is replaced by the line after it. So it has a few lines for each
save.
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
from fabric_train.files.regular_file import open_to_write
from fabric_train.files.typed_json import read_json_lines
from fabric_train.training.logger import Logger
from fabric_train.training.metrics import Metrics

TIMES = "times.jsonl"
_PART_OF_PHASE = {
    StepPhase.LOADING: "starting",
    StepPhase.DATA: "data",
    StepPhase.ROLLOUT: "rollouts",
    StepPhase.VALIDATION: "evaluation",
    StepPhase.SAMPLING: "evaluation",
    StepPhase.SAVING: "saving",
    StepPhase.ENDING: "ending",
}
"""The part to which the seconds of a phase count; all other phases count as training."""
_PART_NAMES = ("starting", "training", "rollouts", "data", "evaluation", "saving", "ending")
_REPEATED_PARTS = ("training", "rollouts", "data", "evaluation")
"""The parts that a restart from an earlier step repeats."""

_MAX_NUMBER = 1e15  # a damaged file may have any
_ADVICE = "move the file away"

Event = Literal["start", "step", "save", "saved", "end"]


@dataclass(frozen=True)
class TimesLine:
    """A line of times.jsonl: an event on rank 0, and how the time from its start to the event was used."""

    event: Event
    """``start`` of the program, ``step`` for a logged step, ``save`` before a save begins, ``saved`` when that
    checkpoint is complete, or ``end``.
    """
    time: float
    """The time in seconds since 1970."""
    step: int
    """The last completed step; for ``start``, the step that the run starts from."""
    num_devices: int
    seconds: dict[str, float]
    """The seconds of each part in ``_PART_NAMES``; "data" is the wait for data. Their sum is the time since the
    start."""


class TimesFile(Logger):
    """Writes ``RUN/times.jsonl`` on rank 0."""

    def __init__(self, path: Path, heartbeat: Heartbeat, after_step: int, num_devices: int) -> None:
        """Append a start. ``after_step`` is the step of the checkpoint that the run starts from, or 0."""
        self._heartbeat = heartbeat
        self._num_devices = num_devices
        self._after_step = after_step
        self._clock_offset = time.time() - time.monotonic()  # from the monotonic clock to seconds since 1970
        open_to_write(path, "a").close()
        self._file = open_to_write(path, "r+", newline="")
        content = path.read_bytes()
        self._end = content.rfind(b"\n") + 1  # a crash may have cut the last line off
        self._size = len(content)
        self._write(TimesLine("start", self._clock_offset + heartbeat.started, after_step, num_devices, {}))
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
        """Write a line for an event that happens now."""
        seconds = seconds_by_part(self._heartbeat.seconds)
        step = self._heartbeat.last_completed or self._after_step
        now = self._clock_offset + self._heartbeat.started + sum(seconds.values())
        self._write(TimesLine(event, now, step, self._num_devices, seconds))

    def _write(self, line: TimesLine) -> None:
        """Write a line over the last one of the kind ``step``, in one call: a kill leaves one of the two."""
        seconds = {name: round(value, 3) for name, value in line.seconds.items()}
        record = {**vars(line), "time": round(line.time, 3), "seconds": seconds}
        text = json.dumps(record).encode() + b"\n"
        end = self._end + len(text)
        if os.pwrite(self._file.fileno(), text, self._end) < len(text):  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if end < self._size:
            os.ftruncate(self._file.fileno(), end)
        self._size = end
        if line.event != "step":
            self._end = end


def seconds_by_part(seconds: Mapping[StepPhase, float]) -> dict[str, float]:
    """Return the seconds of phases by their names in ``TimesLine.seconds``."""
    totals = dict.fromkeys(_PART_NAMES, 0.0)
    for phase, phase_seconds in seconds.items():
        totals[_PART_OF_PHASE.get(phase, "training")] += phase_seconds
    return totals


@dataclass(frozen=True)
class RunTimes:
    """How the time of a run was used, from the start of its first process to its last line, in seconds."""

    training: float
    """Training steps that were not lost."""
    rollouts: float
    """Sampling and rewarding completions, for steps that were not lost."""
    data: float
    """Waiting for data."""
    evaluation: float
    saving: float
    starting: float
    """The first start, from the start of the program until its first step is completed."""
    restarting: float
    """All later starts, each until its first step is completed."""
    repeated: float
    """What was repeated after the step from which a later start began: training, rollouts, waiting, evaluation."""
    idle: float
    """The time between two starts, including what a killed run did after its last line."""
    ending: float
    """Uploads and the report."""
    starts: tuple[float, ...]
    """The duration of each start that trained."""
    stalls: tuple[float, ...]
    """The time for which steps waited, for each save."""
    saves: tuple[float, ...]
    """The time until the checkpoint was complete, for each save."""
    step: float | None
    """The mean time of a step with its completions and its wait for data; None before the second step of a start."""
    num_devices: int

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds by what they were spent on, in words."""
        return {
            "training": self.training,
            "sampling completions": self.rollouts,
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
        """The share of the time that was spent on training steps that were not lost."""
        return self.share(self.training)

    def share(self, seconds: float) -> float:
        """Return seconds as a share of the total; 0 for a run without time, whose start was killed immediately."""
        return seconds / self.total if self.total > 0 else 0.0

    @property
    def stall(self) -> float | None:
        """The median of ``stalls``; None without a save."""
        return statistics.median(self.stalls) if self.stalls else None

    @property
    def save(self) -> float | None:
        """The median of ``saves``; None without a complete checkpoint."""
        return statistics.median(self.saves) if self.saves else None

    @property
    def start(self) -> float | None:
        """The median of ``starts``; None without a completed step."""
        return statistics.median(self.starts) if self.starts else None

    def describe(self) -> str:
        """Return the goodput, the time, and the shares of at least 0.1 %, the largest first."""
        smallest_shown = self.total / 1000
        largest_first = sorted(self.parts.items(), key=lambda item: item[1], reverse=True)
        shares = []
        for name, seconds in largest_first:
            if name != "training" and seconds >= smallest_shown:
                shares.append(f"{name} {self.share(seconds):.1%}")
        starts = f", {len(self.starts)} starts" if len(self.starts) > 1 else ""
        return f"{self.goodput:.1%} of {describe_seconds(self.total)}{starts}; {', '.join(shares)}"


def describe_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit: ms, s, min or h."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:,.1f} h"


def read_times(run_dir: Path) -> RunTimes | None:
    """Return how a run's time was used; None if an earlier version trained it, or if it has not started.

    Raises:
        InputError: The file is damaged.
    """
    file = run_dir / TIMES
    attempts: list[list[TimesLine]] = []  # the lines of each start
    for line_number, line in enumerate(read_json_lines(file, TimesLine, _ADVICE), 1):
        if not _is_possible(line):
            raise InputError(f"{file}, line {line_number}: damaged (impossible number); {_ADVICE}")
        if line.event == "start":
            attempts.append([])
        elif not attempts:
            raise InputError(f"{file}: damaged (its first line is not a start); {_ADVICE}")
        attempts[-1].append(line)
    return _sum_attempts(attempts) if attempts else None


def _is_possible(line: TimesLine) -> bool:
    """Return whether the numbers in a line can be added up, because they are finite and not below 0."""
    values = (line.time, line.step, *line.seconds.values())
    return line.num_devices > 0 and all(0 <= value < _MAX_NUMBER for value in values)


def _sum_attempts(attempts: Sequence[Sequence[TimesLine]]) -> RunTimes:
    """Add up the attempts, each given by the lines of one start."""
    counted = dict.fromkeys(_REPEATED_PARTS, 0.0)  # seconds of steps that count
    repeated = 0.0
    saving = 0.0
    ending = 0.0
    restarting = 0.0
    idle = 0.0
    for index, lines in enumerate(attempts):
        seconds = lines[-1].seconds
        later_attempts = attempts[index + 1 :]

        # Steps count up to the first step from which a later attempt starts.
        counts_until = min((later_lines[0].step for later_lines in later_attempts), default=math.inf)
        counted_lines = [line for line in lines if line.step <= counts_until]
        for name in _REPEATED_PARTS:
            counted_seconds = counted_lines[-1].seconds.get(name, 0.0) if counted_lines else 0.0
            counted[name] += counted_seconds
            repeated += seconds.get(name, 0.0) - counted_seconds

        # The other parts are never repeated.
        saving += seconds.get("saving", 0.0)
        ending += seconds.get("ending", 0.0)
        if index > 0:
            restarting += seconds.get("starting", 0.0)
        if later_attempts:
            next_start = later_attempts[0][0].time
            idle += max(next_start - lines[-1].time, 0.0)

    # Medians of single starts and saves.
    starts: list[float] = []
    stalls: list[float] = []
    saves: list[float] = []
    for lines in attempts:
        stalls += _find_stalls(lines)
        saves += _find_save_seconds(lines)
        if any(line.seconds.get("training") for line in lines):
            starts.append(lines[-1].seconds.get("starting", 0.0))
    return RunTimes(
        **counted,
        saving=saving,
        starting=attempts[0][-1].seconds.get("starting", 0.0),
        restarting=restarting,
        repeated=repeated,
        idle=idle,
        ending=ending,
        starts=tuple(starts),
        stalls=tuple(stalls),
        saves=tuple(saves),
        step=_mean_step_seconds(attempts),
        num_devices=attempts[-1][0].num_devices,
    )


def _mean_step_seconds(attempts: Sequence[Sequence[TimesLine]]) -> float | None:
    """Return the mean time of a step with its data; each attempt's first step counts as starting."""
    num_steps = 0
    seconds = 0.0
    for lines in attempts:
        num_steps += max(lines[-1].step - lines[0].step - 1, 0)
        seconds += lines[-1].seconds.get("training", 0.0)
        seconds += lines[-1].seconds.get("rollouts", 0.0)
        seconds += lines[-1].seconds.get("data", 0.0)
    return seconds / num_steps if num_steps else None


def _find_stalls(lines: Sequence[TimesLine]) -> list[float]:
    """Return the seconds for which each save of an attempt made the steps wait."""
    saving_seconds = [line.seconds.get("saving", 0.0) for line in lines if line.event == "save"]  # at their beginning
    saving_seconds.append(lines[-1].seconds.get("saving", 0.0))
    return [end - begin for begin, end in itertools.pairwise(saving_seconds)]


def _find_save_seconds(lines: Sequence[TimesLine]) -> list[float]:
    """Return the seconds from the beginning of each save to its complete checkpoint; saves end in order."""
    begins = [line.time for line in lines if line.event == "save"]
    ends = [line.time for line in lines if line.event == "saved"]
    return [end - begin for begin, end in zip(begins, ends, strict=False)]  # the last save may be incomplete
