"""Define the metrics of a step, with names and units, and read and write their columns in metrics.csv."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import Evaluation, TrainerState
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link


@dataclass(frozen=True)
class Metrics:
    """One row of metrics.csv. None is an empty cell: not measured at this step.

    The text below a field is its unit and meaning, which docs/reference/metrics.md shows.
    """

    step: int
    """Number: optimizer steps of the run so far; 0 for the evaluation before training."""
    epoch: int
    """Number: pass over the training rows, starting at 0."""
    train_loss: float | None = None
    """Nats per token: mean over the step's supervised tokens in all rows on all ranks. For preference pairs, the mean
    per pair; for unpaired answers, per answer. With a teacher, the divergence per distilled token, plus the weighted
    cross entropy. With --objective rl, the loss of the policy gradient per completion token, whose value does not show
    progress. Empty if the step has no supervised tokens, in which case the optimizer skips the step.
    """
    val_loss: float | None = None
    """Nats per token: the same mean over the validation split, after the step; empty with --validation_prompts, whose
    rewards are in val_reward.
    """
    perplexity: float | None = None
    """Number: e to the power of val_loss; empty for distillation, preference pairs and unpaired answers."""
    val_bits_per_byte: float | None = None
    """Bits per byte: nats / (ln 2 × UTF-8 bytes of the text), which is comparable between tokenizers; empty if there is
    no perplexity, or if the token dataset has no document index.
    """
    learning_rate: float | None = None
    """Number: learning rate of the step."""
    grad_norm: float | None = None
    """Number: 2-norm of the gradient before clipping, summed in fp64; empty if train_loss is empty."""
    num_tokens: int | None = None
    """Tokens: document tokens since the first step of the run, without padding. If a row ends in two or more copies of
    the same unsupervised token, they count as padding.
    """
    tokens_per_second: float | None = None
    """Tokens per second: document tokens on all ranks, without padding; excludes the time of evaluation and saves."""
    samples_per_second: float | None = None
    """Rows per second: rows on all ranks."""
    step_time: float | None = None
    """Seconds: mean step time since the previous row, without evaluation and saves."""
    data_wait: float | None = None
    """Share from 0 to 1: share of step_time spent waiting for batches, without the time of sampling completions."""
    weights_time: float | None = None
    """Seconds: part of step_time until the sampler of completions has the weights; empty without --prompts. This and
    the next two columns are 0 for completions that were stored before a run was resumed. With several ranks, they are
    those of the slowest one.
    """
    sampling_time: float | None = None
    """Seconds: part of step_time in which completions were sampled; empty without --prompts."""
    rewards_time: float | None = None
    """Seconds: part of step_time in which completions were rewarded; empty without --prompts."""
    slowest_rank: int | None = None
    """Rank: the rank that the others wait for; empty with a single rank. With sharded weights, ranks also wait for each
    other in each layer, so a slow device appears to cost less than it does.
    """
    rank_lag: float | None = None
    """Seconds per step: how much the slowest rank's own time exceeds the median. A rank's own time is what it spends
    on data, the optimizer, logging, and the passes up to the last backward pass, without waiting for other ranks.
    """
    mfu: float | None = None
    """Share from 0 to 1: model FLOPs utilization; empty if the device's peak FLOP/s is unknown."""
    peak_memory_gb: float | None = None
    """1e9 bytes: peak memory on rank 0 so far, allocated on a GPU, resident on a CPU."""
    skipped_steps: int | None = None
    """Steps: steps skipped so far because the loss or the gradient was not finite."""
    rows_hash: str | None = None
    """Text: hash of the rows of all steps so far, which is the same in a replay or a resumed run."""
    extra: dict[str, float] = field(default_factory=dict)
    """As named: metrics of the objective and of evaluations, in columns train_NAME and val_NAME, such as the
    divergence, cross_entropy and agreement of a distillation, or the reward of reinforcement learning.
    """
    by_source: dict[str, float] = field(default_factory=dict)
    """As without /SOURCE: losses of individual sources, such as val_loss/es, if a run has several; empty if the step
    has no tokens from that source.
    """

    @property
    def has_evaluation(self) -> bool:
        """Whether the step was evaluated: its tokens have a loss, and completions a reward."""
        return self.val_loss is not None or self.val_reward is not None

    @property
    def val_reward(self) -> float | None:
        """The mean reward of the completions of held-out prompts; None if none were sampled after the step."""
        return self.extra.get("val_reward")


COLUMNS = tuple(column.name for column in fields(Metrics) if column.name not in ("extra", "by_source"))
_INTEGERS = {column.name for column in fields(Metrics) if column.type in (int, int | None)}
_TEXTS = {"rows_hash"}
_REQUIRED = ["step", "epoch"]
_GROUPS = {
    **dict.fromkeys(("epoch", "learning_rate", "grad_norm", "num_tokens", "skipped_steps"), "train"),
    "perplexity": "val",
    **dict.fromkeys(("tokens_per_second", "samples_per_second", "step_time", "data_wait", "mfu"), "speed"),
    **dict.fromkeys(("weights_time", "sampling_time", "rewards_time", "slowest_rank", "rank_lag"), "speed"),
    "peak_memory_gb": "system",
}
"""The group of each column whose name does not begin with it."""
_USUAL_FIGURES = ("loss", "perplexity", "bits_per_byte")


def columns_of(metrics: Metrics) -> dict[str, Any]:
    """Return the value of every column of metrics.csv, None for an empty cell."""
    columns = asdict(metrics)
    extra = columns.pop("extra")
    by_source = columns.pop("by_source")
    return columns | extra | by_source


def read_columns(columns: Mapping[str, Any]) -> Metrics:
    """Return the metrics from the result of :func:`columns_of`."""
    fields_of_metrics: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    by_source: dict[str, Any] = {}
    for name, value in columns.items():
        if name in COLUMNS:
            fields_of_metrics[name] = value
        elif value is None:
            continue
        elif "/" in name:
            by_source[name] = value
        else:
            extra[name] = value
    return Metrics(**fields_of_metrics, extra=extra, by_source=by_source)


def are_columns(names: Sequence[str]) -> bool:
    """Return whether these can be the columns of a metrics.csv."""
    if not set(_REQUIRED) <= set(names):
        return False
    extra_names = set(names) - set(COLUMNS)
    return all(name.startswith(("train_", "val_")) for name in extra_names)


def extra_columns(
    objective_metrics: Sequence[str],
    evaluation_metrics: Sequence[str],
    sources: Sequence[str],
    *,
    metrics_by_source: Sequence[str] = (),
    counts_pieces: bool = False,
) -> list[str]:
    """Return the columns in addition to ``COLUMNS``: metrics of the objective, of evaluations and of each source.

    ``metrics_by_source`` are the objective's metrics that have a column for each source. With ``counts_pieces`` the
    objective sums over pieces of documents, so that an evaluation has no figures of tokens.
    """
    train_columns = [f"train_{name}" for name in objective_metrics]
    val_columns = [f"val_{name}" for name in objective_metrics]
    evaluation_columns = [f"val_{name}" for name in evaluation_metrics]
    figures = ("loss",) if counts_pieces else (*_USUAL_FIGURES, *evaluation_metrics)
    columns_of_source = ["train_loss"]
    columns_of_source += [f"val_{figure}" for figure in figures]
    columns_of_source += [f"train_{name}" for name in metrics_by_source]
    columns_of_source += [f"val_{name}" for name in metrics_by_source]
    # first the columns of all sources together
    columns = [*train_columns, *evaluation_columns, *val_columns]
    for source in sources:
        columns.extend(f"{column}/{source}" for column in columns_of_source)
    return columns


def with_objective(
    metrics: Metrics,
    means: Mapping[str, float | None],
    losses_by_source: Mapping[str, float],
    metrics_by_source: Mapping[str, Mapping[str, float | None]],
) -> Metrics:
    """Add the means of the objective's metrics, and the mean training loss and metrics of each source in the window."""
    extra = {f"train_{name}": mean for name, mean in means.items() if mean is not None}
    by_source = {f"train_loss/{source}": loss for source, loss in losses_by_source.items()}
    for source, source_metrics in metrics_by_source.items():
        for name, mean in source_metrics.items():
            if mean is not None:
                by_source[f"train_{name}/{source}"] = mean
    return replace(metrics, extra=metrics.extra | extra, by_source=metrics.by_source | by_source)


def with_evaluation(metrics: Metrics, evaluation: Evaluation, source_names: Sequence[str]) -> Metrics:
    """Add the figures of an evaluation, and of each source in ``source_names``."""
    whole = evaluation.whole
    extra = {f"val_{name}": value for name, value in whole.further.items() if value is not None}
    by_source = {}
    for source in source_names:
        if source not in evaluation.sources:
            continue
        for figure, value in evaluation.sources[source].figures().items():
            if value is not None:
                by_source[f"val_{figure}/{source}"] = value
    return replace(
        metrics,
        val_loss=None if whole.of_completions else whole.loss,
        perplexity=whole.perplexity if whole.is_likelihood else None,
        val_bits_per_byte=whole.bits_per_byte,
        extra=metrics.extra | extra,
        by_source=metrics.by_source | by_source,
    )


def read_metrics(path: Path, last_step: int) -> list[Metrics]:
    """Return the rows of metrics.csv up to ``last_step``, without a row that a crash cut off; none without the file."""
    return read_table(path, last_step)[1]


def read_table(path: Path, last_step: int) -> tuple[list[str], list[Metrics]]:
    """Return the columns of metrics.csv and its rows up to ``last_step``; see :func:`read_metrics`."""
    if not path.exists():
        return [], []
    fix = "restore this run's file, or move this file away to continue without its rows"
    if not path.is_file():
        raise InputError(f"{path}: not a file; {fix}")

    # A crash may have cut off the last line. A file without any complete line is read as it is, and is no header.
    text = path.read_text(encoding="utf-8", errors="replace")
    complete_lines = text[: text.rfind("\n") + 1]
    table = csv.reader(io.StringIO(complete_lines or text))

    # The header.
    names = _next_row(table) or []
    if not are_columns(names) or len(set(names)) < len(names):
        raise InputError(f"{path}: its first line is not the metrics.csv header {','.join(COLUMNS)}; {fix}")

    # The rows, whose steps must rise.
    rows: list[Metrics] = []
    previous_step = -1
    while True:
        cells = _next_row(table)
        if cells is None:
            break
        row = _parse_row(names, cells)
        if row is None or row.step <= previous_step:
            raise InputError(
                f"{path}, line {table.line_num}: not a row with a later step than the row before it; {fix}"
            )
        if row.step > last_step:
            break
        rows.append(row)
        previous_step = row.step
    return names, rows


def _next_row(table: Iterator[list[str]]) -> list[str] | None:
    """Return the cells of the next row: an empty list if it is damaged, None at the end."""
    try:
        return next(table, None)
    except csv.Error:
        return []


def find_lost_rows(path: Path, state: TrainerState, log_step_interval: int) -> str | None:
    """Return a warning if metrics.csv has rows but lacks some before the checkpoint that a run resumes from."""
    check_no_link(path)
    rows = read_metrics(path, state.step)
    if not rows or state.unlogged:
        return None
    last_step = rows[-1].step
    if state.step - last_step < log_step_interval:
        return None
    return (
        f"{path}: rows are lost: it ends at step {last_step}, but the run resumes after step {state.step}; the steps "
        "in between will be missing from all loggers that are restored from it"
    )


def _parse_row(names: Sequence[str], cells: Sequence[str]) -> Metrics | None:
    """Return the metrics of a row, or None if it is damaged."""
    if len(cells) != len(names):
        return None
    columns: dict[str, int | float | str] = {}
    try:
        for name, cell in zip(names, cells, strict=True):
            if cell or name in _REQUIRED:
                columns[name] = _parse_cell(name, cell)
    except ValueError:
        return None
    return read_columns(columns)


def _parse_cell(column: str, cell: str) -> int | float | str:
    if column in _INTEGERS:
        return int(cell)
    if column in _TEXTS:
        return cell
    return float(cell)


def measured_values(metrics: Metrics) -> dict[str, float]:
    """Return the measured values by :func:`grouped_name`, without the step and the hash of rows."""
    values = {}
    for column, value in columns_of(metrics).items():
        if value is not None and column != "step" and column not in _TEXTS:
            values[grouped_name(column)] = value
    return values


def grouped_name(column: str) -> str:
    """Return the name of a column of metrics.csv in loggers: ``val_loss/es`` is ``val/es/loss``.

    The name begins with the group: train, val, speed or system.
    """
    if column in _GROUPS:
        return f"{_GROUPS[column]}/{column}"
    figure, _, source = column.partition("/")
    group, _, name = figure.partition("_")
    return "/".join(part for part in (group, source, name) if part)
