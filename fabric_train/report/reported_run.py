"""Derive from a run folder what its report shows: the model's record, problems in the log, events, the best step."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fabric_train.checkpoint import TrainerJson, name_loss
from fabric_train.cli.errors import InputError
from fabric_train.export.card_facts import ModelRecord, read_record
from fabric_train.pages.charts import Mark
from fabric_train.run_folder.log_lines import LogLine
from fabric_train.run_folder.run_folder import RunFolder, find_run_folders
from fabric_train.training.metrics_table import MetricsTable

_PROBLEM = re.compile(
    r"warning:|error:|signal|SIG[A-Z0-9]+|stopped|stopping|lost|left out|skipped|early stopping|Traceback"
)


@dataclass(frozen=True)
class ReportedRun(RunFolder):
    """A run folder and what its report derives from it; errors are as in :class:`RunFolder`."""

    @cached_property
    def record(self) -> ModelRecord:
        """The description of the model in the newest readable checkpoint."""
        return read_record(self.newest)

    @cached_property
    def problems(self) -> list[LogLine]:
        """The lines of run.log about errors, warnings and stops."""
        return [line for line in self.log if _PROBLEM.search(line.text)]

    @property
    def lost_ranks(self) -> list[LogLine]:
        """The lines of run.log with which the watchdog ended a session that had lost a rank.

        A report writes what it finds in the log into the same log, so only lines that begin with "error: " are events.
        """
        return [line for line in self.problems if line.text.startswith("error: ") and "lost" in line.text]

    @cached_property
    def marks(self) -> list[Mark]:
        """The events along the axis of steps: resumed sessions, branches, phases, skipped steps, signals, lost ranks
        and the best step. None without a readable checkpoint."""
        try:
            saved = self.newest
        except InputError:
            return []
        marks = list(self._marks_of_checkpoint(saved))
        if self.best_step:
            name = name_loss(saved.best_by, saved.state.evaluation)
            marks.append(Mark(self.best_step, "best", f"the {name} is the best after step {self.best_step:,}"))
        marks += self._marks_of_skipped_steps(saved)
        marks += self._marks_of_log()
        return sorted(marks, key=lambda mark: mark.x)

    def _marks_of_checkpoint(self, saved: TrainerJson) -> Iterator[Mark]:
        """Yield a mark for each resumed session, branch and phase that a checkpoint records."""
        for session in saved.sessions:
            if session.after_step == 0:  # the start of the run; only later sessions resumed it
                continue
            devices = f"{session.num_devices} × {session.device}"
            yield Mark(session.after_step, "resume", f"after step {session.after_step:,} on {devices}")
        for branch in saved.lineage:
            if branch.is_border_of(self.folder):  # the run continued in its own folder, with other token datasets
                first_step = branch.step + 1
                yield Mark(
                    first_step, "phase", f"a phase with different token datasets begins with step {first_step:,}"
                )
            else:
                yield Mark(branch.step, "branch", f"from {Path(branch.run).name} after step {branch.step:,}")
        for phase in saved.phase_rows:  # the same token datasets in other shares
            yield Mark(phase.first_step, "phase", f"a phase begins with step {phase.first_step:,}")

    def _marks_of_skipped_steps(self, saved: TrainerJson) -> Iterator[Mark]:
        """Yield a mark for each row of metrics.csv at which the number of skipped steps grew."""
        table = self.metrics
        row_indices = table.measured_rows("skipped_steps")
        if not len(row_indices):
            return
        # the column counts from the first step; a branch begins with the count of the run that it continues
        num_skipped = table.columns["skipped_steps"][row_indices[0]] if saved.lineage else 0
        for row_index in row_indices:
            if table.columns["skipped_steps"][row_index] > num_skipped:
                step = int(table.steps[row_index])
                yield Mark(step, "skipped", f"step {step:,} was skipped (not finite)")
            num_skipped = table.columns["skipped_steps"][row_index]

    def _marks_of_log(self) -> Iterator[Mark]:
        """Yield a mark for each signal and lost rank in run.log; none without the file."""
        try:
            problems = self.problems
        except OSError:
            return
        for line in problems:
            if "stopped by" in line.text:
                yield Mark(line.step, "signal", line.text)
        for line in self.lost_ranks:
            yield Mark(line.step, "lost rank", line.text)

    @property
    def metrics_since_other_rows(self) -> MetricsTable:
        """The rows of metrics.csv whose evaluations can be compared with the newest one.

        Rows before a change of the validation rows or the held-out prompts are left out.
        """
        try:
            first_evaluation = self.newest.state.first_evaluation
        except InputError:  # no readable checkpoint
            return self.metrics
        if first_evaluation is None or not first_evaluation.follows_other_rows:
            return self.metrics
        return self.metrics.between(first_evaluation.step - 1, math.inf)

    @property
    def best_step(self) -> int | None:
        """The step with the best value of ``--best_by`` in metrics.csv; None with fewer than two evaluations."""
        table = self.metrics_since_other_rows
        column, sign = self._find_deciding_column(table)
        row_indices = table.measured_rows(column)
        if len(row_indices) < 2:
            return None
        costs = sign * table.columns[column][row_indices]
        return int(table.steps[row_indices[costs.argmin()]])

    def _find_deciding_column(self, table: MetricsTable) -> tuple[str, int]:
        """Return the column of ``--best_by``, and -1 if its highest value is the best, otherwise 1."""
        column = table.deciding_column
        sign = -1 if column == "val_reward" else 1
        try:
            saved = self.newest
        except InputError:  # no readable checkpoint
            return column, sign
        # a source, or a figure as FIGURE or FIGURE/SOURCE; a single source has no columns of its own
        for named_column in (f"{column}/{saved.best_by}", f"val_{saved.best_by}"):
            if len(table.measured_rows(named_column)) and saved.state.evaluation is not None:
                return named_column, saved.state.evaluation.sign_of(saved.best_by)
        return column, sign


def open_runs(names: Sequence[str]) -> list[ReportedRun]:
    """Open the run folders that paths mean; errors are as in :func:`find_run_folders`."""
    return [ReportedRun(folder) for folder in find_run_folders(names)]
