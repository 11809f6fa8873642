"""Read the files of a run for its report: metrics, checkpoints, log, samples. Each is read when it is first used."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import run_of, saved_checkpoints
from fabric_train.checkpoint.trainer_json import TrainerJson, find_unreadable
from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.cli.output import redact
from fabric_train.export.card_facts import ModelRecord, read_record
from fabric_train.pages.charts import Mark
from fabric_train.pages.markdown import SHOWN_DIGITS
from fabric_train.training.logger import Sample
from fabric_train.training.metrics_table import MetricsTable, read_lineage
from fabric_train.training.run_times import RunTimes, read_times
from fabric_train.training.sample_file import read_samples

# numbers of at most 18 digits, as steps and ranks have: a damaged line may have thousands, which ``int`` refuses
_LOG_LINE = re.compile(r"([0-9]{4}-[0-9-]{5} [0-9:]{8}[+-][0-9]{4}) (.*) rank ([0-9]{1,18}): (.*)")
_STEP = re.compile(r"\bstep[ -]0*([0-9]{1,18})\b")
_PROBLEM = re.compile(
    r"warning:|error:|signal|SIG[A-Z0-9]+|stopped|stopping|lost|left out|skipped|early stopping|Traceback"
)
_SHORT_NAME = re.compile(r"best|latest|step-[0-9]{1,18}")


@dataclass(frozen=True)
class LogLine:
    """A line of run.log."""

    time: str
    machine: str
    rank: int
    text: str
    step: int
    """The step that the line names, else the last step named before it."""


@dataclass(frozen=True)
class RunFiles:
    """A run folder. Reading a property raises an InputError or an OSError if its file is damaged or missing."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def metrics(self) -> MetricsTable:
        """The rows of metrics.csv, after those of the runs that this run branched off, as far as these still exist."""
        try:
            lineage = self.saved.lineage
        except InputError:  # no readable checkpoint: then only this run's rows
            lineage = ()
        return read_lineage(self.folder, lineage)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.yaml."""
        content = yaml_core.load_file(str(self.folder / "config.yaml"), "config.yaml")
        if not isinstance(content, dict):
            raise InputError(f"{self.folder / 'config.yaml'}: not a configuration")
        return content

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints by step; also those whose description is damaged."""
        return saved_checkpoints(self.folder)

    @cached_property
    def record(self) -> ModelRecord:
        """The description of the run in its newest readable checkpoint."""
        faults = []
        for checkpoint in reversed(self.checkpoints.values()):  # the newest first
            fault = find_unreadable(checkpoint)
            if not fault:
                return read_record(checkpoint)
            faults.append(f"{checkpoint.name}: {fault}")
        raise InputError("; ".join(faults) or f"{self.folder}: no checkpoint yet")

    @property
    def saved(self) -> TrainerJson:
        return self.record.saved

    @cached_property
    def log(self) -> list[LogLine]:
        """The lines of run.log that begin with a time, without the rows of tables."""
        lines: list[LogLine] = []
        step = 0
        with (self.folder / "run.log").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                match = _LOG_LINE.match(redact(line))
                if match is None:
                    continue
                time, machine, rank, text = match.groups()
                named_steps = _STEP.findall(text)
                if named_steps:
                    step = int(named_steps[0])
                lines.append(LogLine(time, machine, int(rank), text, step))
        return lines

    @cached_property
    def problems(self) -> list[LogLine]:
        """The lines of run.log about faults and stops."""
        return [line for line in self.log if _PROBLEM.search(line.text)]

    @cached_property
    def samples(self) -> list[Sample]:
        return read_samples(self.folder / "samples.jsonl")

    @cached_property
    def times(self) -> RunTimes | None:
        """How the time of the run was used; None if an earlier version trained it."""
        return read_times(self.folder)

    @cached_property
    def marks(self) -> list[Mark]:
        """The events on the axis of steps: sessions, branches, phases, skipped steps, signals, the best step."""
        try:
            trainer = self.saved
        except InputError:
            return []
        marks = [*self._marks_of_checkpoint(trainer), *self._marks_of_skipped_steps(trainer), *self._marks_of_log()]
        return sorted(marks, key=lambda mark: mark.x)

    def _marks_of_checkpoint(self, trainer: TrainerJson) -> Iterator[Mark]:
        """Yield the sessions, branches and phases, and the best step."""
        for session in trainer.sessions:
            if session.after_step:  # the first session begins at step 0, which is no event
                devices = f"{session.num_devices} × {session.device}"
                yield Mark(session.after_step, "resume", f"after step {session.after_step:,} on {devices}")
        for branch in trainer.lineage:
            if branch.is_border_of(self.folder):
                first_step = branch.step + 1
                yield Mark(first_step, "phase", f"a phase with other token datasets begins with step {first_step:,}")
            else:
                yield Mark(branch.step, "branch", f"from {Path(branch.run).name} after step {branch.step:,}")
        for phase in trainer.phase_rows:
            yield Mark(phase.first_step, "phase", f"a phase begins with step {phase.first_step:,}")
        step = best_step(self)
        if step:
            yield Mark(step, "best", f"best validation loss after step {step:,}")

    def _marks_of_skipped_steps(self, trainer: TrainerJson) -> Iterator[Mark]:
        """Yield the logged rows at which the number of skipped steps grew."""
        table = self.metrics
        row_indices = table.measured_rows("skipped_steps")
        if not len(row_indices):
            return
        # the column counts from the first step; a branch begins with the count of the run that it continues
        num_skipped = table.columns["skipped_steps"][row_indices[0]] if trainer.lineage else 0
        for row_index in row_indices:
            if table.columns["skipped_steps"][row_index] > num_skipped:
                step = int(table.steps[row_index])
                yield Mark(step, "skipped", f"step {step:,} was left out, not finite")
            num_skipped = table.columns["skipped_steps"][row_index]

    def _marks_of_log(self) -> Iterator[Mark]:
        """Yield the signals and lost ranks in run.log; none without the file."""
        try:
            problems = self.problems
        except OSError:
            return
        for line in problems:
            if "stopped by" in line.text:
                yield Mark(line.step, "signal", line.text)
            elif "lost" in line.text:
                yield Mark(line.step, "lost rank", line.text)


def best_step(run: RunFiles) -> int | None:
    """Return the step with the lowest validation loss in a run's metrics; None with fewer than two evaluations."""
    table = run.metrics
    row_indices = table.measured_rows("val_loss")
    if len(row_indices) < 2:
        return None
    best_index = table.columns["val_loss"][row_indices].argmin()
    return int(table.steps[row_indices[best_index]])


def open_runs(names: Sequence[str]) -> list[RunFiles]:
    """Return run folders; a checkpoint, such as RUN/best, means its run.

    Raises:
        InputError: some are not run folders; a line for each.
    """
    runs: list[RunFiles] = []
    faults: list[str] = []
    for name in names:
        # RUN/best and RUN/step-500 mean the run
        folder = Path(name)
        if _SHORT_NAME.fullmatch(folder.name) and not (folder / "config.yaml").is_file():
            folder = run_of(folder)
        is_run = any((folder / file).exists() for file in ("config.yaml", "metrics.csv", "checkpoints"))
        if not folder.is_dir():
            faults.append(f"{name}: {missing_folder(folder)}; give the --output_dir of training")
        elif not is_run:
            faults.append(f"{name}: no run folder, it has no config.yaml, metrics.csv or checkpoints")
        else:
            runs.append(RunFiles(folder))
    if faults:
        raise InputError(*faults)
    return runs


def content_hash(checkpoint: Path) -> str:
    """Return the first digits of the SHA-256 of checksums.json, which has the hashes of all files of a checkpoint."""
    checksums = (checkpoint / "checksums.json").read_bytes()
    return hashlib.sha256(checksums).hexdigest()[:SHOWN_DIGITS]
