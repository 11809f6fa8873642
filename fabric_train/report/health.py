"""Compare a run with usual values, and describe each unusual value in one sentence."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.cli.argument_types import counted
from fabric_train.cli.errors import InputError
from fabric_train.pages.markdown import Section, code, escaped
from fabric_train.report.reported_run import ReportedRun
from fabric_train.training.metrics_table import MetricsTable

_MAX_WAIT = 0.05  # for data, of a step's time
_MAX_LAG = 0.1  # of a rank, of a step's time
_SPIKE_FACTOR = 8.0  # a spike is this many times the median of its block
_SPIKE_BLOCK = 50  # logged steps
_RISE = 0.01  # of a source's lowest validation loss
_STANDARD_ERRORS = 2.0  # by which two validation rewards differ
_NEAR_UNIFORM = 0.97  # of ln V, the loss of a model that guesses
_LEARNING_STEPS = 100  # after this many the loss should be lower than that
_MIN_SPEED = 0.8  # of the speed at the beginning
_MIN_ROWS = 20
_MAX_LOST_TIME = 0.05  # of the time between the starts and the ends of a run
_MIN_JUDGED_SECONDS = 600.0  # of that time


@dataclass(frozen=True)
class Finding:
    """A sentence about an unusual value, and the page of the documentation that says what to do."""

    text: str
    page: str


def health_section(runs: Sequence[tuple[str, ReportedRun]]) -> Section:
    """Return the section on unusual values; ``runs`` have the name that their sentences begin with, which may be ""."""
    markdown_lines = []
    terminal_lines = []
    for name, run in runs:
        prefix = f"{name}: " if name else ""
        for finding in find_unusual(run):
            text = f"{prefix}{finding.text}"
            markdown_lines.append(f"- {escaped(text)} See {code(finding.page)}.")
            terminal_lines.append(f"{text} See {finding.page}.")
    body = "\n".join(markdown_lines) or "Nothing unusual was found."
    return Section("health", "Health", body, terminal_lines=tuple(terminal_lines))


def find_unusual(run: ReportedRun) -> list[Finding]:
    """Return a run's unusual values; a file that cannot be read is skipped."""
    table = run.metrics
    findings: list[Finding] = []
    for check in _CHECKS_OF_METRICS:
        findings += check(table)
    for check in _CHECKS_OF_EVALUATIONS:
        findings += check(run.metrics_since_other_rows)
    findings += _check_near_uniform(run, table)
    findings += _check_lost_time(run)
    findings += _check_log(run)
    return findings


def _check_data_wait(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if steps wait for data for much of their time."""
    row_indices = table.measured_rows("data_wait")[1:]  # the first step starts the workers
    if len(row_indices) < _MIN_ROWS:
        return
    mean_wait = float(table.columns["data_wait"][row_indices].mean())
    if mean_wait > _MAX_WAIT:
        yield Finding(
            f"Steps wait for data {mean_wait:.1%} of the time, more than {_MAX_WAIT:.0%}: increase --num_workers, or "
            "put the token dataset on a faster disk.",
            "docs/how-to/slow.md",
        )


def _check_norm_spikes(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if gradient norms are far above those of the steps around them."""
    row_indices = table.measured_rows("grad_norm")
    if len(row_indices) < _MIN_ROWS:
        return
    norms = table.columns["grad_norm"][row_indices]  # [N]

    # compare each norm with the median of its block of about 50 steps
    num_blocks = max(len(norms) // _SPIKE_BLOCK, 1)
    blocks = np.array_split(norms, num_blocks)
    medians = np.concatenate([np.full(len(block), np.median(block)) for block in blocks])  # [N]
    spikes = np.flatnonzero(norms > _SPIKE_FACTOR * medians)
    if len(spikes):
        highest_spike = spikes[norms[spikes].argmax()]
        step = int(table.steps[row_indices[highest_spike]])
        yield Finding(
            f"The gradient norm has {counted(len(spikes), 'spike')} above {_SPIKE_FACTOR:.0f} times its median; the "
            f"highest, {norms[highest_spike]:.3g}, is at step {step:,}. To see the documents of this step, run "
            f"fabric-train trace RUN --step {step}.",
            "docs/how-to/loss_nan_or_flat.md",
        )


def _check_rising_sources(table: MetricsTable) -> Iterator[Finding]:
    """Yield the sources whose validation loss rises, or is higher than before training."""
    columns = {source: f"val_loss/{source}" for source in table.sources_of("val_loss")}
    if not columns:
        columns = {"all": "val_loss"}
    for source, column in columns.items():
        row_indices = table.measured_rows(column)
        if len(row_indices) < 4:
            continue
        losses = table.columns[column][row_indices]
        steps = table.steps[row_indices]
        lowest_index = int(losses.argmin())
        num_since_lowest = len(losses) - 1 - lowest_index
        if num_since_lowest > 1 and losses[-1] > losses[lowest_index] * (1 + _RISE):
            yield Finding(
                f"The validation loss of {source} rises, from {losses[lowest_index]:.4f} at step "
                f"{steps[lowest_index]:,} to {losses[-1]:.4f} at step {steps[-1]:,}: give it a larger share, or use "
                "a lower --lr.",
                "docs/mixture.md",
            )
        has_loss_before_training = steps[0] == 0
        if has_loss_before_training and losses[-1] > losses[0]:
            yield Finding(
                f"The model forgets {source}: its validation loss is {losses[-1]:.4f}, up from {losses[0]:.4f} "
                "before training.",
                "docs/mixture.md",
            )


def _check_falling_reward(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if the reward of held-out prompts is lower than before training, by more than their noise."""
    row_indices = table.measured_rows("val_reward")
    error_rows = table.measured_rows("val_stderr_reward")
    if len(row_indices) < 2 or len(error_rows) == 0:
        return
    rewards = table.columns["val_reward"][row_indices]
    steps = table.steps[row_indices]
    standard_error = float(table.columns["val_stderr_reward"][error_rows[-1]])
    # of the difference of two independent means
    noise = math.sqrt(2) * standard_error
    if rewards[-1] < rewards[0] - _STANDARD_ERRORS * noise:
        yield Finding(
            f"The validation reward has fallen from {rewards[0]:.4f} at step {steps[0]:,} to {rewards[-1]:.4f} at step "
            f"{steps[-1]:,}: use a lower --lr, or keep the model close to the initial one with --kl_weight.",
            "docs/rl.md#validation",
        )


def _check_slow_rank(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if one rank is the slowest in most steps, and by a large part of the step's time."""
    row_indices = table.measured_rows("rank_lag")[1:]
    if len(row_indices) < _MIN_ROWS:
        return
    slowest_ranks = table.columns["slowest_rank"][row_indices]
    ranks, counts = np.unique(slowest_ranks, return_counts=True)
    rank = ranks[counts.argmax()]
    rank_rows = row_indices[slowest_ranks == rank]
    mean_lag = float(np.mean(table.columns["rank_lag"][rank_rows] / table.columns["step_time"][rank_rows]))
    is_slowest_of_most = counts.max() > len(row_indices) / 2
    if is_slowest_of_most and mean_lag > _MAX_LAG:
        yield Finding(
            f"The other ranks wait for rank {rank:.0f}, whose steps take {mean_lag:.1%} longer than the median: "
            "check its machine's temperature, its GPU's clock, and other programs there.",
            "docs/how-to/slow.md",
        )


def _check_speed(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if the run is slower at its end than at its beginning."""
    row_indices = table.measured_rows("tokens_per_second")[1:]
    if len(row_indices) < 4 * _MIN_ROWS:
        return
    speeds = table.columns["tokens_per_second"][row_indices]
    quarter = len(speeds) // 4
    first_speed = float(np.median(speeds[:quarter]))
    last_speed = float(np.median(speeds[-quarter:]))
    if last_speed < _MIN_SPEED * first_speed:
        yield Finding(
            f"The run became slower: {first_speed:,.0f} tokens/s in its first quarter, {last_speed:,.0f} in its "
            "last: look for another program on the machine, a hot GPU or a slow disk.",
            "docs/how-to/slow.md",
        )


def _check_skipped_steps(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if steps were left out."""
    num_skipped = table.last_value("skipped_steps") or 0
    if num_skipped:
        yield Finding(
            f"{num_skipped:,.0f} steps were skipped because their loss or gradient was not finite.",
            "docs/how-to/loss_nan_or_flat.md",
        )


def _check_has_evaluation(table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if a run of some length was never evaluated."""
    if len(table.steps) >= _LEARNING_STEPS and not len(table.measured_rows(table.deciding_column)):
        yield Finding("The run has no evaluation, so overfitting would go unnoticed.", "docs/training.md#evaluation")


_CHECKS_OF_METRICS: tuple[Callable[[MetricsTable], Iterator[Finding]], ...] = (
    _check_skipped_steps,
    _check_norm_spikes,
    _check_data_wait,
    _check_slow_rank,
    _check_speed,
    _check_has_evaluation,
)
"""The checks that read metrics.csv, in the order of the report."""

_CHECKS_OF_EVALUATIONS: tuple[Callable[[MetricsTable], Iterator[Finding]], ...] = (
    _check_rising_sources,
    _check_falling_reward,
)
"""The checks that compare evaluations of the same rows or prompts, see ``ReportedRun.metrics_since_other_rows``."""


def _check_near_uniform(run: ReportedRun, table: MetricsTable) -> Iterator[Finding]:
    """Yield a finding if the training loss is about that of a model that guesses: ln of the vocabulary size."""
    try:
        checkpoint = run.record.checkpoint
        vocab_size = json.loads((checkpoint / "config.json").read_bytes())["vocab_size"]
    except (InputError, OSError, ValueError, KeyError, TypeError):  # then the loss is not judged
        return
    row_indices = table.measured_rows("train_loss")
    if len(row_indices) < _MIN_ROWS or table.steps[-1] < _LEARNING_STEPS or not isinstance(vocab_size, int):
        return
    mean_loss = table.columns["train_loss"][row_indices[-_MIN_ROWS:]].mean()
    guessing_loss = math.log(max(vocab_size, 2))
    if float(mean_loss) > _NEAR_UNIFORM * guessing_loss:
        yield Finding(
            f"The training loss is {mean_loss:.2f}; random guessing gives {guessing_loss:.2f}, ln {vocab_size:,}: "
            "check the tokens with fabric-train inspect, and check --lr.",
            "docs/how-to/loss_nan_or_flat.md",
        )


def _check_lost_time(run: ReportedRun) -> Iterator[Finding]:
    """Judge saves and failures; the first start, evaluations and the time between two starts are not judged."""
    try:
        times = run.times
    except (InputError, OSError):  # a damaged file is a fault of its section
        return
    if times is None:
        return
    running_seconds = times.total - times.idle
    if running_seconds < _MIN_JUDGED_SECONDS:
        return
    lost_shares = {name: times.parts[name] / running_seconds for name in ("saving", "restarting", "repeated steps")}
    lost_share = sum(lost_shares.values())
    if lost_share > _MAX_LOST_TIME:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in lost_shares.items() if share >= 0.001)
        yield Finding(
            f"Saves and failures cost {lost_share:.1%} of the time, more than {_MAX_LOST_TIME:.0%}: {shares}. --plan "
            "true shows which --save_step_interval loses the least.",
            "docs/reliability.md#goodput",
        )


def _check_log(run: ReportedRun) -> Iterator[Finding]:
    """Yield findings about slow steps and lost ranks, which are in run.log."""
    try:
        problems = run.problems
    except OSError:  # a copy without run.log
        return
    slow_lines = [line for line in problems if "slow" in line.text]
    if slow_lines:
        num_lines = counted(len(slow_lines), "such line")
        yield Finding(f"{slow_lines[-1].text} ({num_lines})", "docs/performance.md")
    lost_lines = run.lost_ranks
    if lost_lines:
        num_times = counted(len(lost_lines), "time")
        yield Finding(f"A rank was lost {num_times}: {lost_lines[-1].text}", "docs/how-to/lost_node.md")
