"""Build the report's section on the completions that a run sampled: some steps, the time of each, and samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fabric_train.cli.argument_types import counted
from fabric_train.cli.output import visible
from fabric_train.pages.charts import Chart, Series
from fabric_train.pages.markdown import Section, code, code_block, escaped, table
from fabric_train.report.reported_run import ReportedRun
from fabric_train.rollouts.rendering import STEP_NOTE, describe_completion, step_table
from fabric_train.rollouts.step_view import CompletionGroup, StepGroups, read_groups, summarize_step
from fabric_train.rollouts.store import StoredCompletion, list_steps, read_manifest, step_folder

_MAX_STEPS = 8  # in the table
_MAX_TIMED_STEPS = 1000  # in the chart
_MAX_SAMPLES = 2  # of the best completions, and of the worst
_MAX_CHARACTERS = 1500  # of a prompt or a completion


@dataclass(frozen=True)
class _Sample:
    """A completion, and the group that it belongs to."""

    group: CompletionGroup
    completion: StoredCompletion


def rollouts_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the steps, times and samples of a run that sampled completions; nothing for other runs."""
    steps = list_steps(run.folder)
    if not steps:
        return
    newest = steps[-1]
    command = code(f"fabric-train rollouts {run.folder} --step {newest}")
    paragraphs = [
        f"The completions of {counted(len(steps), 'step')} are stored. {command} shows all of step {newest:,}.",
        _table_of_steps(run, _choose_evenly(steps, _MAX_STEPS)),
        escaped(STEP_NOTE),
        *_describe_samples(read_groups(run.folder, newest)),
    ]
    charts = []
    if run.has_metrics and len(run.metrics.steps):  # the page needs their tokens and hours for its axes
        charts.append(_time_chart(run, steps))
    yield Section("rollouts", "Rollouts", "\n\n".join(paragraphs), tuple(charts))


def _choose_evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` steps, evenly spaced, with the first and the last one."""
    indices = np.unique(np.linspace(0, len(steps) - 1, most).round().astype(int))
    return [steps[index] for index in indices.tolist()]


def _table_of_steps(run: ReportedRun, steps: Sequence[int]) -> str:
    summaries = [summarize_step(run.folder, step) for step in steps]
    steps_as_text = step_table(summaries)
    return table(steps_as_text.columns, steps_as_text.lines, len(steps_as_text.columns))


def _time_chart(run: ReportedRun, steps: Sequence[int]) -> Chart:
    """Return the seconds of each part of the stored steps, and of whole steps if they were logged."""
    timed_steps = _choose_evenly(steps, _MAX_TIMED_STEPS)
    manifests = [read_manifest(step_folder(run.folder, step)) for step in timed_steps]
    x = np.array(timed_steps, dtype=np.float64)
    sampling_seconds = np.array([manifest.sampling_seconds for manifest in manifests])
    reward_seconds = np.array([manifest.reward_seconds for manifest in manifests])
    update_seconds = np.array([manifest.update_seconds for manifest in manifests])
    series = [
        Series("weights", x, update_seconds),
        Series("sampling", x, sampling_seconds),
        Series("rewards", x, reward_seconds),
    ]
    logged_rows = run.metrics.measured_rows("step_time")
    logged_rows = logged_rows[run.metrics.steps[logged_rows] >= steps[0]]
    if len(logged_rows):
        logged_steps = run.metrics.steps[logged_rows].astype(np.float64)
        series.append(Series("whole step", logged_steps, run.metrics.columns["step_time"][logged_rows]))
    note = (
        "Weights (given to the sampler), sampling and rewards: on the slowest rank. Whole steps: means since the "
        "logged step before."
    )
    return Chart("rollout-time", "Time of a step", "seconds", tuple(series), from_zero=True, note=note)


def _describe_samples(step: StepGroups) -> Iterator[str]:
    """Yield the best and the worst completions of a step, with their prompts."""
    best = _choose_samples(step, is_best=True)
    worst = _choose_samples(step, is_best=False)
    for title, samples in (("Best", best), ("Worst", worst)):
        yield f"### {title} of step {step.manifest.step:,}"
        for sample in samples:
            description = describe_completion(step.manifest, sample.completion)
            yield f"**{escaped(sample.group.prompt_id)}**: {escaped(description)}"
            if sample.completion.reward_error is not None:
                yield escaped(f"Reward error: {sample.completion.reward_error}")
            yield "Prompt:"
            yield _shown_text(sample.group.prompt)
            yield "Completion:"
            yield _shown_text(sample.completion.text)


def _choose_samples(step: StepGroups, *, is_best: bool) -> list[_Sample]:
    """Return the completions with the highest or lowest rewards, at most one of each prompt.

    Among completions with the same reward, those whose group did worse come first in the best, and those whose group
    did better in the worst.
    """
    sign = 1 if is_best else -1

    def rank(completion: StoredCompletion) -> tuple[float, float]:
        return sign * completion.reward, sign * completion.advantage

    samples = [_Sample(group, max(group.completions, key=rank)) for group in step.groups]
    samples.sort(key=lambda sample: rank(sample.completion), reverse=True)
    return samples[:_MAX_SAMPLES]


def _shown_text(text: str) -> str:
    """Return a text as a block of code with its line breaks, without the middle of a long text."""
    if not text.strip():  # Markdown would leave out the block
        return code(visible(text)) if text else "*empty*"
    if len(text) > _MAX_CHARACTERS:
        half = _MAX_CHARACTERS // 2
        num_hidden = len(text) - 2 * half
        text = f"{text[:half]}\n⋯ {num_hidden:,} characters ⋯\n{text[-half:]}"
    lines = [visible(line) for line in text.split("\n")]
    return code_block("\n".join(lines))
