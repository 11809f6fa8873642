"""Describe in tables what a run reads: the sources of a mixture or a stream, and the phases."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fabric_train.checkpoint.stream_cursors import read_cursors
from fabric_train.data.streaming import Stream
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.optim.learning_rate import Schedules
from fabric_train.training.prepared_run import PreparedRun, TrainingData
from fabric_train.training.tables import figures_table


def describe_mixture(run: PreparedRun, rows_seen: Sequence[int] | None = None) -> list[Table]:
    """Return the table of a mixture's sources, or nothing without a mixture.

    ``rows_seen`` are the numbers of rows that were read of each source, at the end of a run.
    """
    plan = run.plan
    if plan.mixture is None or not isinstance(run.data, TokenMixture):
        return []

    planned_rows = plan.mixture.rows_until(plan.last_step - plan.data_starts_after)
    columns = ["tokens", "share", "epochs", "tokens in the run"]
    if rows_seen:
        columns.append("tokens seen")
    read_rows = rows_seen or planned_rows  # the rows whose shares and epochs are shown
    total_read = max(sum(read_rows), 1)

    def format_tokens(num_rows: int) -> str:
        return f"{num_rows * plan.tokens_per_row:,}"

    table = figures_table(f"Mixture{run.steps_suffix}", columns)
    for index, source in enumerate(run.data.sources):
        num_rows = plan.mixture.num_rows[index]
        cells = [
            format_tokens(num_rows),
            f"{read_rows[index] / total_read:.2%}",
            f"{read_rows[index] / num_rows:.2f}",
            format_tokens(planned_rows[index]),
        ]
        if rows_seen:
            cells.append(format_tokens(rows_seen[index]))
        table.add_row(source.name, *cells)

    total_cells = [format_tokens(sum(plan.mixture.num_rows)), "", "", format_tokens(sum(planned_rows))]
    if rows_seen:
        total_cells.append(format_tokens(sum(rows_seen)))
    table.add_row("all", *total_cells)
    return [table]


def describe_phases(run: PreparedRun) -> list[Table]:
    """Return the table of a run's phases: steps, learning rate, and share and tokens of each source."""
    plan = run.plan
    if plan.mixture is None or not isinstance(run.data, TokenMixture) or not plan.phases:
        return []

    text_columns = ["steps", "learning rate"]
    if run.models.change:
        text_columns.append("train")
    table = figures_table(f"Phases{run.steps_suffix}", ["share", "tokens"], [*text_columns, "source"])

    # A phase is a row for each source that it reads.
    starts = [plan.data_starts_after + start for start in plan.mixture.phases_start_after]
    ends = [*starts[1:], plan.last_step]
    for start, end in zip(starts, ends, strict=True):
        phase_cells = [f"{start + 1:,}–{end:,}", _describe_rates(run.schedules, start + 1, end)]
        if run.models.change:
            phase_cells.append(run.models.at(start + 1).describe_trained())
        rows_at_start = plan.mixture.rows_until(start - plan.data_starts_after)
        rows_at_end = plan.mixture.rows_until(end - plan.data_starts_after)
        num_phase_rows = sum(rows_at_end) - sum(rows_at_start)
        for index, source in enumerate(run.data.sources):
            num_rows = rows_at_end[index] - rows_at_start[index]
            if num_rows:
                share = f"{num_rows / num_phase_rows:.2%}"
                table.add_row(*phase_cells, source.name, share, f"{num_rows * plan.tokens_per_row:,}")
                phase_cells = [""] * len(phase_cells)  # the phase is named once
    return [table]


def _describe_rates(schedules: Schedules, first_step: int, last_step: int) -> str:
    """Return the schedule of a phase, and its learning rates at both ends."""
    schedule = schedules.at(first_step)
    name = schedule.arguments.lr_schedule if schedule.arguments.lr_decay else "constant"
    first_rate = f"{schedule.rate(first_step):.3g}"
    last_rate = f"{schedule.rate(last_step):.3g}"
    if last_rate == first_rate:
        return f"{name}, {first_rate}"
    return f"{name}, {first_rate} to {last_rate}"


def describe_stream(data: TrainingData, checkpoint: Path | None = None) -> list[Table]:
    """Return the table of a stream's sources, with the tokens read up to a checkpoint; none without shares."""
    if not isinstance(data, Stream):
        return []
    if len(data.source_names) == 1 and data.documents.shares is None:
        return []
    tokens_read = _count_stream_tokens(checkpoint) if checkpoint else []  # of each source
    columns = ["size", "share"]
    if tokens_read:
        columns += ["tokens read", "of all"]
    table = figures_table("Stream", columns)
    for index, name in enumerate(data.source_names):
        size, shares = data.documents.describe_source(name)
        cells = [size, shares]
        if tokens_read:
            cells += [f"{tokens_read[index]:,}", f"{tokens_read[index] / sum(tokens_read):.2%}"]
        table.add_row(name, *cells)
    return [table]


def _count_stream_tokens(checkpoint: Path) -> list[int]:
    """Return the tokens that all lanes of a checkpoint's stream have read of each source; empty if not counted."""
    tokens_by_lane = [cursor.tokens_read for cursor in read_cursors(checkpoint)]
    return [sum(source_tokens) for source_tokens in zip(*tokens_by_lane, strict=True)]
