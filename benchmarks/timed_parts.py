"""Run the parts of a measurement in order of importance, each within its time, and keep how each one ended.

A part that fails or takes longer is reported, and the next one begins. How each part ended is written when it ends, so
a measurement that is stopped loses nothing, and a second start runs only the other parts.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import orjson

from benchmarks.gpu_sizes import SIZES, Sizes
from benchmarks.measure import ROOT, Command, CommandError, CommandTimeoutError, run
from benchmarks.report import RESULTS, Machine, Report, write_report
from fabric_train.cli.errors import InputError, RunError
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.typed_json import read_json

Status = Literal["done", "failed", "stopped", "left out", "skipped"]


@dataclass
class Outcome:
    """What a part has found so far: its figures, a line about them, and faults, which make the part fail."""

    figures: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    faults: list[str] = field(default_factory=list)


class MissingPackageError(Exception):
    """A package that a part needs, such as a peer, is not installed and cannot be installed here."""


class Countdown:
    """A clock that starts now, for something that may take a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._started = time.monotonic()
        self._allowed = seconds

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        """Return the seconds that are left, 0 if the time is over."""
        return max(0.0, self._allowed - self.seconds)


class Attempt(Countdown):
    """A part while it runs. It starts commands, which are killed when the part's time is over.

    Args:
        work: folder for the files, relative to the project's root.
        sizes: of the models.
        seconds: that the part may take.
    """

    def __init__(self, work: Path, sizes: Sizes, seconds: float) -> None:
        super().__init__(seconds)
        self.work = work
        self.sizes = sizes
        self.outcome = Outcome()
        self.commands: dict[str, str] = {}

    def run(self, name: str, words: str, environment: dict[str, str] | None = None) -> str:
        """Run a command to its end and return its output.

        Raises:
            CommandError: its exit code is not 0.
            CommandTimeoutError: the part's time is over.
        """
        command = Command(tuple(words.split()), environment or {})
        self.commands[name] = str(command)
        print(f"  {name}", flush=True)
        return run(command, self.seconds_left).output

    def folder(self, name: str) -> Path:
        """Return the path of a folder that does not exist; an earlier one is removed."""
        shutil.rmtree(ROOT / self.work / name, ignore_errors=True)
        return self.work / name


Measure = Callable[[Attempt], None]


@dataclass(frozen=True)
class Part:
    """A part of a measurement.

    Attributes:
        minutes: how long it may take.
        expected_seconds: about how long it takes; if less is left of the time for all parts, it is skipped.
    """

    name: str
    minutes: float
    measure: Measure
    expected_seconds: float = 0


@dataclass(frozen=True)
class Record:
    """How a part ended.

    Attributes:
        status: "stopped" if it took too long, "left out" if what it needs is not installed, "skipped" if too little
            time was left for it.
        line: what it found, or why it has found nothing.
        last_lines: of what failed.
        figures: all that it found.
        commands: that it ran.
        commit: that was checked out.
    """

    status: Status
    line: str
    seconds: float
    last_lines: list[str]
    figures: dict[str, Any]
    commands: dict[str, str]
    commit: str | None
    date: str


@dataclass(frozen=True)
class Conclusion:
    """What all parts together say: figures, and lines in Markdown that show them."""

    figures: dict[str, Any]
    lines: list[str]


def conclude_nothing(records: Mapping[str, Record], gpu: str) -> Conclusion:
    """Return an empty conclusion, of parts that each say everything."""
    return Conclusion({}, [])


@dataclass(frozen=True)
class Measurement:
    """A measurement in parts.

    Attributes:
        name: of its result files.
        title: of its table, before the name of the device.
        parts: the most important first.
        settings: recorded with the figures, in addition to those of all measurements.
        minutes: for all parts together; None for as long as they take.
        conclude: returns the conclusion from the records of parts, and the name of the device.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    settings: Mapping[str, Any]
    minutes: float | None = None
    conclude: Callable[[Mapping[str, Record], str], Conclusion] = conclude_nothing


@dataclass(frozen=True)
class _State:
    """The state that is kept between starts: the records by the name of their part."""

    records: dict[str, Record]


@dataclass(frozen=True)
class _Summary:
    """One line for each part, and the figures of the conclusion."""

    parts: dict[str, str]
    conclusion: dict[str, Any]


def run_parts(measurement: Measurement, sizes: str, work: Path, machine: Machine, commit: str | None) -> Path:
    """Run the parts that are not done, print how each one ends, and write the result after each.

    Args:
        measurement: what to run.
        sizes: a name in ``SIZES``.
        work: folder for the files.
        machine: what this runs on.
        commit: the one that is checked out.

    Returns:
        The path of the table, Markdown; the figures are beside it. They are in benchmarks/results; figures of other
        sizes than "full" are in ``work``, because they say nothing about the device.

    Raises:
        InputError: there is no GPU, or the file with the finished parts cannot be read.
        RunError: a part has failed or taken too long.
    """
    import torch

    if not torch.cuda.is_available():
        raise InputError("torch finds no GPU; run this on a machine with one")
    folder = work.absolute() / f"{machine.kind}-{sizes}"
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder  # results have no absolute paths
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "done.json"
    records = read_json(state, _State, "delete it to begin again").records if state.exists() else {}
    patience = SIZES[sizes].patience
    countdown = Countdown(60 * patience * (measurement.minutes or float("inf")))
    path = None
    for number, part in enumerate(measurement.parts, 1):
        title = f"{number}/{len(measurement.parts)} {part.name}"
        if part.name in records and records[part.name].status == "done":
            print(f"{title}: is done", flush=True)
        elif countdown.seconds_left < part.expected_seconds:
            records[part.name] = _skipped(part, countdown.seconds_left, commit)
            print(f"{title}: {records[part.name].line}", flush=True)
        else:
            allowed = min(60 * part.minutes * patience, countdown.seconds_left)
            print(f"{title}: at most {allowed / 60:.3g} minutes", flush=True)
            records[part.name] = ended = _run(part, Attempt(shown, SIZES[sizes], allowed), commit)
            print(f"  {ended.status} after {ended.seconds:.0f} s: {ended.line}", flush=True)
        write_atomically(state, orjson.dumps(asdict(_State(records))).decode())
        path = _write_result(measurement, sizes, records, machine, commit, RESULTS if sizes == "full" else folder)
    assert path is not None  # there are parts
    print(path.read_text(encoding="utf-8"))
    wrong = [part.name for part in measurement.parts if records[part.name].status in ("failed", "stopped")]
    if wrong:
        num_parts = len(measurement.parts)
        raise RunError(f"of {num_parts} parts, {len(wrong)} did not pass: {'; '.join(wrong)}; {path} says why")
    return path


def _run(part: Part, attempt: Attempt, commit: str | None) -> Record:
    """Run a part and return how it ended."""
    status: Status
    last_lines: list[str] = []
    try:
        part.measure(attempt)
        status = "done"
        line = attempt.outcome.line
        last_lines = attempt.outcome.faults
        if last_lines:
            status = "failed"
            line = last_lines[0]
    except MissingPackageError as error:
        status = "left out"
        line = str(error)
    except CommandTimeoutError as error:
        status = "stopped"
        line = str(error)
        last_lines = [*attempt.outcome.faults, *error.last_lines]
    except CommandError as error:
        status = "failed"
        line = str(error)
        last_lines = [*attempt.outcome.faults, *error.last_lines]
    except (OSError, LookupError, ValueError) as error:  # a file or an output is not as expected; the next part may be
        status = "failed"
        line = repr(error)
        last_lines = [*attempt.outcome.faults, line]
    return Record(
        status=status,
        line=line,
        seconds=round(attempt.seconds, 1),
        last_lines=last_lines,
        figures=attempt.outcome.figures,
        commands=attempt.commands,
        commit=commit,
        date=_now(),
    )


def _skipped(part: Part, seconds_left: float, commit: str | None) -> Record:
    line = f"skipped, since it takes about {part.expected_seconds:.0f} s and {seconds_left:.0f} s are left"
    return Record("skipped", line, 0.0, [], {}, {}, commit, _now())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _write_result(
    measurement: Measurement,
    sizes: str,
    records: Mapping[str, Record],
    machine: Machine,
    commit: str | None,
    folder: Path,
) -> Path:
    """Write figures and table of the parts that have a record; return the path of the table."""
    ordered = {part.name: records[part.name] for part in measurement.parts if part.name in records}
    conclusion = measurement.conclude(ordered, machine.gpu or "")
    report = _report(measurement, sizes, ordered, conclusion)
    path = write_report(report, machine, commit, folder).with_suffix(".md")
    path.write_text(_table(measurement.title, ordered, conclusion, machine), encoding="utf-8")
    return path


def _report(measurement: Measurement, sizes: str, records: Mapping[str, Record], conclusion: Conclusion) -> Report:
    settings = {
        "sizes": sizes,
        "minutes": {part.name: part.minutes for part in measurement.parts},
        "minutes of all parts": measurement.minutes,
        "length": SIZES[sizes].length,
        **measurement.settings,
    }
    commands: dict[str, str] = {}
    for part, record in records.items():
        commands |= {f"{part}: {name}": command for name, command in record.commands.items()}
    lines = {name: f"{record.status}: {record.line}" for name, record in records.items()}
    runs = {name: [record] for name, record in records.items()}
    return Report(measurement.name, settings, commands, runs, _Summary(lines, conclusion.figures))


def _table(title: str, records: Mapping[str, Record], conclusion: Conclusion, machine: Machine) -> str:
    """Return a table in Markdown: a row for each part, then the conclusion and the last lines of what failed."""
    lines = [f"{title} with {machine.gpu}", "", "| part | | found | s |", "|---|---|---|---:|"]
    lines += [
        f"| {name} | {record.status} | {record.line.replace('|', '/')} | {record.seconds:.0f} |"
        for name, record in records.items()
    ]
    lines += conclusion.lines
    for name, record in records.items():
        if record.last_lines:
            lines += ["", f"{name}, {record.status}:", "", *(f"    {line}" for line in record.last_lines)]
    return "\n".join([*lines, ""])
