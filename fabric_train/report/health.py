"""Measure a run against usual values, and say in one sentence each what differs."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.cli.argument_types import counted
from fabric_train.cli.errors import InputError
from fabric_train.pages.markdown import Section, code, escaped
from fabric_train.report.run_files import RunFiles
from fabric_train.training.curves import MetricsTable

_MOST_WAIT = 0.05  # of a step's time
_MOST_LAG = 0.1
_SPIKE = 8.0  # times the median of the norms around it
_AROUND = 50  # logged steps
_RISE = 0.01  # of a source's lowest validation loss
_NEAR_UNIFORM = 0.97  # of ln V, the loss of a model that guesses
_LEARNING_STEPS = 100  # after so many, the loss should be lower than that
_SLOWER = 0.8  # of the speed before
_FEWEST_ROWS = 20
_MOST_LOST = 0.05  # of the time between the starts and the ends of a run
_JUDGED_SECONDS = 600.0  # of such time


@dataclass(frozen=True)
class Finding:
    """A sentence about an unusual value, and the part of the documentation that says what to do."""

    text: str
    page: str


def health_section(runs: Sequence[tuple[str, RunFiles]]) -> Section:
    """Return the section on unusual values of runs, each with the name that its sentences begin with, or ""."""
    found = [(f"{name}: " if name else "", finding) for name, run in runs for finding in find_unusual(run)]
    lines = [f"- {escaped(f'{name}{one.text}')} See {code(one.page)}." for name, one in found]
    told = tuple(f"{name}{one.text} See {one.page}." for name, one in found)
    return Section("health", "Health", "\n".join(lines) or "Nothing unusual was found.", told=told)


def find_unusual(run: RunFiles) -> list[Finding]:
    """Return the unusual values of a run; a part that cannot be read is not judged."""
    table = run.metrics
    findings = [finding for check in _OF_METRICS for finding in check(table)]
    return [*findings, *_near_uniform(run, table), *_lost_time(run), *_in_log(run)]


def _data_wait(table: MetricsTable) -> Iterator[Finding]:
    known = table.known("data_wait")[1:]  # the first step starts the workers
    if len(known) < _FEWEST_ROWS:
        return
    mean = float(table.columns["data_wait"][known].mean())
    if mean > _MOST_WAIT:
        yield Finding(
            f"Steps wait for data {mean:.1%} of their time, more than {_MOST_WAIT:.0%}: raise --num_workers, or "
            "put the token dataset on a faster disk.",
            "docs/how-to/slow.md",
        )


def _norm_spikes(table: MetricsTable) -> Iterator[Finding]:
    known = table.known("grad_norm")
    if len(known) < _FEWEST_ROWS:
        return
    norms = table.columns["grad_norm"][known]
    width = min(_AROUND, len(norms))
    blocks = np.array_split(norms, max(len(norms) // width, 1))
    medians = np.concatenate([np.full(len(block), np.median(block)) for block in blocks])
    spikes = np.flatnonzero(norms > _SPIKE * medians)
    if len(spikes):
        highest = spikes[norms[spikes].argmax()]
        step = int(table.steps[known[highest]])
        yield Finding(
            f"The gradient norm has {counted(len(spikes), 'spike')} above {_SPIKE:.0f} times its median; the highest, "
            f"{norms[highest]:.3g}, is at step {step:,}. To see its documents: "
            f"fabric-train trace RUN --step {step}.",
            "docs/how-to/loss_nan_or_flat.md",
        )


def _rising_sources(table: MetricsTable) -> Iterator[Finding]:
    names = table.sources_of("val_loss")
    for name, column in [(name, f"val_loss/{name}") for name in names] or [("all", "val_loss")]:
        known = table.known(column)
        losses = table.columns.get(column, np.empty(0))[known]
        if len(losses) < 4:
            continue
        lowest = int(losses.argmin())
        if len(losses) - lowest > 2 and losses[-1] > losses[lowest] * (1 + _RISE):
            yield Finding(
                f"The validation loss of {name} rises: {losses[lowest]:.4f} at step {table.steps[known[lowest]]:,}, "
                f"{losses[-1]:.4f} at step {table.steps[known[-1]]:,}: give it a larger share, or lower --lr.",
                "docs/mixture.md",
            )
        if losses[-1] > losses[0] and table.steps[known[0]] == 0:
            yield Finding(
                f"The model forgets {name}: its validation loss is {losses[-1]:.4f}, before training it was "
                f"{losses[0]:.4f}.",
                "docs/mixture.md",
            )


def _slow_rank(table: MetricsTable) -> Iterator[Finding]:
    known = table.known("rank_lag")[1:]
    if len(known) < _FEWEST_ROWS:
        return
    slowest = table.columns["slowest_rank"][known]
    ranks, counts = np.unique(slowest, return_counts=True)
    rank = ranks[counts.argmax()]
    own = known[slowest == rank]
    share = float(np.mean(table.columns["rank_lag"][own] / table.columns["step_time"][own]))
    if counts.max() > len(known) / 2 and share > _MOST_LAG:
        yield Finding(
            f"The others wait for rank {rank:.0f}: its own time is {share:.1%} of a step above the median: look at its "
            "machine's temperature, its GPU's clock, and other programs there.",
            "docs/how-to/slow.md",
        )


def _slower(table: MetricsTable) -> Iterator[Finding]:
    known = table.known("tokens_per_second")[1:]
    if len(known) < 4 * _FEWEST_ROWS:
        return
    speeds = table.columns["tokens_per_second"][known]
    quarter = len(speeds) // 4
    before = float(np.median(speeds[:quarter]))
    after = float(np.median(speeds[-quarter:]))
    if after < _SLOWER * before:
        yield Finding(
            f"The run got slower: {before:,.0f} tokens/s in its first quarter, {after:,.0f} in its last: look for "
            "another program on the machine, a hot GPU or a slow disk.",
            "docs/how-to/slow.md",
        )


def _skipped(table: MetricsTable) -> Iterator[Finding]:
    skipped = table.last("skipped_steps") or 0
    if skipped:
        yield Finding(
            f"{skipped:,.0f} steps were left out, because their loss or gradient was not finite.",
            "docs/how-to/loss_nan_or_flat.md",
        )


def _unevaluated(table: MetricsTable) -> Iterator[Finding]:
    if len(table.steps) >= _LEARNING_STEPS and not len(table.known("val_loss")):
        yield Finding(
            "The run has no evaluation: nobody sees whether it learns by heart.", "docs/training.md#evaluation"
        )


_OF_METRICS: tuple[Callable[[MetricsTable], Iterator[Finding]], ...] = (
    *(_skipped, _rising_sources, _norm_spikes, _data_wait, _slow_rank, _slower, _unevaluated),
)


def _near_uniform(run: RunFiles, table: MetricsTable) -> Iterator[Finding]:
    known = table.known("train_loss")
    try:
        checkpoint = run.record.checkpoint
        vocab_size = json.loads((checkpoint / "config.json").read_bytes())["vocab_size"]
    except (InputError, OSError, ValueError, KeyError, TypeError):  # then the loss is not judged
        return
    if len(known) < _FEWEST_ROWS or table.steps[-1] < _LEARNING_STEPS or not isinstance(vocab_size, int):
        return
    losses = table.columns["train_loss"][known[-_FEWEST_ROWS:]]
    of_guessing = math.log(max(vocab_size, 2))
    if float(losses.mean()) > _NEAR_UNIFORM * of_guessing:
        yield Finding(
            f"The training loss is {losses.mean():.2f}; a model that guesses has {of_guessing:.2f}, ln {vocab_size:,}: "
            "look at the tokens with fabric-train inspect, and at --lr.",
            "docs/how-to/loss_nan_or_flat.md",
        )


def _lost_time(run: RunFiles) -> Iterator[Finding]:
    """Judge saves and failures; the first start, evaluations and the time between two starts are not judged."""
    try:
        times = run.times
    except (InputError, OSError):  # a damaged file is a fault of its section
        return
    if times is None or (running := times.total - times.idle) < _JUDGED_SECONDS:
        return
    lost = {name: times.parts[name] / running for name in ("saving", "restarting", "repeated steps")}
    if sum(lost.values()) > _MOST_LOST:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in lost.items() if share >= 0.001)
        yield Finding(
            f"Saves and failures cost {sum(lost.values()):.1%} of the time, more than {_MOST_LOST:.0%}: {shares}. "
            "--plan true says which --save_step_interval loses the least.",
            "docs/reliability.md#goodput",
        )


def _in_log(run: RunFiles) -> Iterator[Finding]:
    try:
        told = run.told
    except OSError:  # a copy without run.log
        return
    slow = [line for line in told if "slow" in line.text]
    if slow:
        yield Finding(f"{slow[-1].text} ({counted(len(slow), 'such line')})", "docs/performance.md")
    lost = [line for line in told if "lost" in line.text]
    if lost:
        yield Finding(f"A rank was lost {counted(len(lost), 'time')}: {lost[-1].text}", "docs/how-to/lost_node.md")
