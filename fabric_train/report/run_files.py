"""The files of a run: metrics, checkpoints, log, samples. Each part is read when it is asked for."""

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
from fabric_train.training.curves import MetricsTable, read_lineage
from fabric_train.training.loggers import Sample, read_samples
from fabric_train.training.run_times import RunTimes, read_times

# numbers of at most 18 digits, as steps and ranks have: a damaged line may have thousands, which ``int`` refuses
_LOG_LINE = re.compile(r"([0-9]{4}-[0-9-]{5} [0-9:]{8}[+-][0-9]{4}) (.*) rank ([0-9]{1,18}): (.*)")
_STEP = re.compile(r"\bstep[ -]0*([0-9]{1,18})\b")
_TOLD = re.compile(
    r"warning:|error:|signal|SIG[A-Z0-9]+|stopped|stopping|lost|left out|skipped|early stopping|Traceback"
)
_SHORT_NAME = re.compile(r"best|latest|step-[0-9]{1,18}")


@dataclass(frozen=True)
class LogLine:
    """A line of run.log; ``step`` is the step that it names, else the last one named before it."""

    when: str
    machine: str
    rank: int
    text: str
    step: int


@dataclass(frozen=True)
class RunFiles:
    """A run folder. Reading a part raises an InputError or an OSError if it is damaged or missing."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def metrics(self) -> MetricsTable:
        """Its rows of metrics.csv, after the rows of the runs that it branched off, as far as they are still there."""
        try:
            lineage = self.saved.lineage
        except InputError:
            lineage = ()
        return read_lineage(self.folder, lineage)

    @cached_property
    def config(self) -> dict[str, Any]:
        content = yaml_core.load_file(str(self.folder / "config.yaml"), "config.yaml")
        if not isinstance(content, dict):
            raise InputError(f"{self.folder / 'config.yaml'}: not a configuration")
        return content

    @cached_property
    def checkpoints(self) -> dict[int, Path]:
        """Its checkpoints by step; also those whose description is damaged."""
        return saved_checkpoints(self.folder)

    @cached_property
    def record(self) -> ModelRecord:
        """What its newest readable checkpoint says."""
        faults = []
        for checkpoint in reversed(self.checkpoints.values()):
            if fault := find_unreadable(checkpoint):
                faults.append(f"{checkpoint.name}: {fault}")
            else:
                return read_record(checkpoint)
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
                if found := _LOG_LINE.match(redact(line)):
                    when, machine, rank, text = found.groups()
                    steps = _STEP.findall(text)
                    step = int(steps[0]) if steps else step
                    lines.append(LogLine(when, machine, int(rank), text, step))
        return lines

    @cached_property
    def told(self) -> list[LogLine]:
        """The lines about what went wrong or was stopped."""
        return [line for line in self.log if _TOLD.search(line.text)]

    @cached_property
    def samples(self) -> list[Sample]:
        return read_samples(self.folder / "samples.jsonl")

    @cached_property
    def times(self) -> RunTimes | None:
        """Where its time went; None if an earlier version trained it."""
        return read_times(self.folder)

    @cached_property
    def marks(self) -> list[Mark]:
        """What happened on the axis of steps: sessions, branches, phases, skipped steps, signals, the best."""
        return sorted(self._marks(), key=lambda mark: mark.x)

    def _marks(self) -> Iterator[Mark]:
        try:
            saved = self.saved
        except InputError:
            return
        for session in saved.sessions:
            if session.after_step:
                devices = f"{session.num_devices} × {session.device}"
                yield Mark(session.after_step, "resume", f"after step {session.after_step:,} on {devices}")
        for branch in saved.lineage:
            if branch.is_border_of(self.folder):
                first = branch.step + 1
                yield Mark(first, "phase", f"a phase with other token datasets begins with step {first:,}")
            else:
                yield Mark(branch.step, "branch", f"from {Path(branch.run).name} after step {branch.step:,}")
        for phase in saved.phase_rows:
            yield Mark(phase.first_step, "phase", f"a phase begins with step {phase.first_step:,}")
        if best := best_step(self):
            yield Mark(best, "best", f"best validation loss after step {best:,}")
        table = self.metrics
        rows = table.known("skipped_steps")
        if len(rows):
            # the column counts from the first step; a branch begins with the count of the run that it continues
            num_skipped = table.columns["skipped_steps"][rows[0]] if saved.lineage else 0
            for row in rows:
                if table.columns["skipped_steps"][row] > num_skipped:
                    step = int(table.steps[row])
                    yield Mark(step, "skipped", f"step {step:,} was left out, not finite")
                num_skipped = table.columns["skipped_steps"][row]
        try:
            told = self.told
        except OSError:
            return
        for line in told:
            if re.search(r"stopped by|lost", line.text):
                yield Mark(line.step, "signal" if "stopped by" in line.text else "lost rank", line.text)


def best_step(run: RunFiles) -> int | None:
    """Return the step with the lowest validation loss in its metrics, None without an evaluation."""
    table = run.metrics
    known = table.known("val_loss")
    return int(table.steps[known[table.columns["val_loss"][known].argmin()]]) if len(known) > 1 else None


def open_runs(given: Sequence[str]) -> list[RunFiles]:
    """Return the run folders; a checkpoint, such as RUN/best, means its run. An InputError names the others."""
    runs: list[RunFiles] = []
    faults: list[str] = []
    for place in given:
        folder = Path(place)
        if _SHORT_NAME.fullmatch(folder.name) and not (folder / "config.yaml").is_file():
            folder = run_of(folder)
        if not folder.is_dir():
            faults.append(f"{place}: {missing_folder(folder)}; give the --output_dir of training")
        elif not any((folder / name).exists() for name in ("config.yaml", "metrics.csv", "checkpoints")):
            faults.append(f"{place}: no run folder, it has no config.yaml, metrics.csv or checkpoints")
        else:
            runs.append(RunFiles(folder))
    if faults:
        raise InputError(*faults)
    return runs


def content_hash(checkpoint: Path) -> str:
    """Return the first digits of the SHA-256 of checksums.json, which has the hashes of all files of a checkpoint."""
    return hashlib.sha256((checkpoint / "checksums.json").read_bytes()).hexdigest()[:SHOWN_DIGITS]
