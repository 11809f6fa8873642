"""The first hour with a GPU: environment, tests, parity, resume, then speed and memory beside the plan and two peers.

Each part has minutes that it may take. One that fails or takes longer is reported, and the next one begins. How each
part ended is kept in a file, so that a second start runs only the other parts.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import orjson

from benchmarks.first_hour_parts import (
    SIZES,
    TOLERANCES,
    Attempt,
    Measure,
    MissingPeerError,
    compare_resumed,
    compare_strategies,
    measure_environment,
    run_tests,
    train_ours,
    train_peer,
)
from benchmarks.gpu import ACCUMULATION, MIDDLE, ROWS, SMALL, STEPS, WARM_UP_STEPS
from benchmarks.measure import ROOT, CommandError, CommandTimeoutError
from benchmarks.report import RESULTS, Machine, Report, write_report
from fabric_train.cli.errors import InputError, RunError
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.typed_json import read_json
from fabric_train.sample_data import real_data

NAME = "gpu-first-hour"
WORK = real_data.CACHE / "first_hour"
Status = Literal["done", "failed", "stopped", "left out"]


@dataclass(frozen=True)
class Part:
    """A part of the hour, and how long it may take."""

    name: str
    minutes: float
    measure: Measure


PARTS = (
    Part("environment", 2, measure_environment),
    Part("tests", 8, run_tests),
    Part("parity", 10, compare_strategies),
    Part("resume", 8, compare_resumed),
    Part(f"{SMALL}, fabric_train", 5, train_ours(SMALL)),
    Part(f"{SMALL}, transformers", 3, train_peer(SMALL, "transformers")),
    Part(f"{SMALL}, trl", 3, train_peer(SMALL, "trl")),
    Part(f"{MIDDLE}, fabric_train", 8, train_ours(MIDDLE)),
    Part(f"{MIDDLE}, transformers", 6, train_peer(MIDDLE, "transformers")),
    Part(f"{MIDDLE}, trl", 6, train_peer(MIDDLE, "trl")),
)


@dataclass(frozen=True)
class Record:
    """How a part ended.

    Attributes:
        status: "stopped" if it took too long, "left out" if what it needs is not installed.
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
class _State:
    """The state that is kept between starts: the records by the name of their part."""

    records: dict[str, Record]


@dataclass(frozen=True)
class _Summary:
    """One line for each part."""

    parts: dict[str, str]


def run_first_hour(sizes: str, work: Path, machine: Machine, commit: str | None) -> Path:
    """Run the parts that are not done, print how each one ends, and write the result after each.

    Args:
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
        raise InputError("torch finds no GPU; run the first hour on a machine with one")
    folder = work.absolute() / f"{machine.kind}-{sizes}"
    shown = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder  # results have no absolute paths
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "done.json"
    records = read_json(state, _State, "delete it to begin again").records if state.exists() else {}
    for number, part in enumerate(PARTS, 1):
        title = f"{number}/{len(PARTS)} {part.name}"
        if part.name in records and records[part.name].status == "done":
            print(f"{title}: is done", flush=True)
            continue
        allowed = 60 * part.minutes * SIZES[sizes].patience
        print(f"{title}: at most {allowed / 60:g} minutes", flush=True)
        records[part.name] = ended = _run(part, Attempt(shown, SIZES[sizes], allowed), commit)
        print(f"  {ended.status} after {ended.seconds:.0f} s: {ended.line}", flush=True)
        write_atomically(state, orjson.dumps(asdict(_State(records))).decode())
    ordered = {part.name: records[part.name] for part in PARTS}
    path = write_report(_report(sizes, ordered), machine, commit, RESULTS if sizes == "full" else folder)
    path = path.with_suffix(".md")
    path.write_text(table(ordered, machine), encoding="utf-8")
    print(path.read_text(encoding="utf-8"))
    wrong = [name for name, record in ordered.items() if record.status in ("failed", "stopped")]
    if wrong:
        raise RunError(f"of {len(PARTS)} parts, {len(wrong)} did not pass: {'; '.join(wrong)}; {path} says why")
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
    except MissingPeerError as error:
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
    return Record(
        status=status,
        line=line,
        seconds=round(attempt.seconds, 1),
        last_lines=last_lines,
        figures=attempt.outcome.figures,
        commands=attempt.commands,
        commit=commit,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _report(sizes: str, records: Mapping[str, Record]) -> Report:
    settings = {
        "sizes": sizes,
        "minutes": {part.name: part.minutes for part in PARTS},
        "tolerances of the losses": TOLERANCES,
        "length": SIZES[sizes].length,
        "rows of a micro-batch": ROWS,
        "accumulation": ACCUMULATION,
        "steps": STEPS,
        "warm_up_steps": WARM_UP_STEPS,
    }
    commands = {
        f"{part}: {name}": command for part, record in records.items() for name, command in record.commands.items()
    }
    summary = _Summary({name: f"{record.status}: {record.line}" for name, record in records.items()})
    return Report(NAME, settings, commands, {name: [record] for name, record in records.items()}, summary)


def table(records: Mapping[str, Record], machine: Machine) -> str:
    """Return a table in Markdown: a row for each part, and below it the last lines of what failed."""
    lines = [f"First hour with {machine.gpu}", "", "| part | | found | s |", "|---|---|---|---:|"]
    lines += [
        f"| {name} | {record.status} | {record.line.replace('|', '/')} | {record.seconds:.0f} |"
        for name, record in records.items()
    ]
    for name, record in records.items():
        if record.last_lines:
            lines += ["", f"{name}, {record.status}:", "", *(f"    {line}" for line in record.last_lines)]
    return "\n".join([*lines, ""])
