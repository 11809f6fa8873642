"""Build the sections that compare runs: configuration, data, reasons why losses are not comparable, results, curves."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from fabric_train.checkpoint import Evaluation
from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import redact
from fabric_train.export.card_facts import ModelRecord, device_hours, seen_shares
from fabric_train.pages.markdown import Section, code, escaped, table
from fabric_train.report.health import health_section
from fabric_train.report.reported_run import ReportedRun
from fabric_train.training.metric_charts import metric_charts
from fabric_train.training.metrics_table import MetricsTable

T = TypeVar("T")
_IRRELEVANT_ARGUMENTS = {"output_dir", "resume", "plan", "report"}
"""Arguments that do not change what a run computes."""


@dataclass(frozen=True)
class _ComparedRun:
    """A run of a comparison; a field is None if its file cannot be read."""

    name: str
    """A name that no other run of the comparison has."""
    files: ReportedRun
    config: dict[str, Any] | None
    metrics: MetricsTable | None
    record: ModelRecord | None

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation in the newest checkpoint."""
        return self.record.saved.state.evaluation if self.record else None


def comparison_sections(runs: Sequence[ReportedRun], price_per_hour: float | None = None) -> list[Section]:
    """Return the sections that compare runs; ``price_per_hour`` is what an hour of one device costs."""
    # read the files; those that cannot be read are sections at the end
    faults: dict[str, str] = {}
    configs = [_read_or_note(run, "config.yaml", lambda run: run.config, faults) for run in runs]
    tables = [_read_or_note(run, "metrics.csv", lambda run: run.metrics, faults) for run in runs]
    records = [_read_or_note(run, "checkpoint", lambda run: run.record, faults) for run in runs]
    compared_runs: list[_ComparedRun] = []
    for index, name in enumerate(_unique_names(runs)):
        compared_run = _ComparedRun(
            name, files=runs[index], config=configs[index], metrics=tables[index], record=records[index]
        )
        compared_runs.append(compared_run)

    logged_tables = []
    for run in compared_runs:
        if run.metrics is not None and len(run.metrics.steps):
            logged_tables.append((run.name, run.metrics))
    charts = metric_charts(logged_tables) if logged_tables else []
    warnings = "\n".join(f"- {escaped(line)}" for line in _find_unfair(compared_runs))
    sections = [
        Section("differences", "Differences of configuration", _compare_arguments(compared_runs)),
        Section("data", "Differences of data", _compare_data(compared_runs)),
        Section("fair", "Unfair comparisons", warnings or "These runs can be compared."),
        Section("results", "Results", _compare_results(compared_runs, price_per_hour)),
        Section("curves", "Curves", "" if charts else "No run has logged steps.", tuple(charts)),
        health_section([(run.name, run.files) for run in compared_runs if run.metrics is not None]),
    ]
    for index, fault in enumerate(faults.values()):
        sections.append(Section(f"fault-{index}", "Left out", fault=fault))
    return sections


def _read_or_note(run: ReportedRun, file: str, read: Callable[[ReportedRun], T], faults: dict[str, str]) -> T | None:
    """Return the result of ``read``; if the run's file cannot be read, add the reason to ``faults`` and return None."""
    try:
        return read(run)
    except (InputError, OSError) as error:
        faults[f"{run.folder}/{file}"] = redact(f"{run.name}, {file}: {error}")
        return None


def _unique_names(runs: Sequence[ReportedRun]) -> list[str]:
    """Return a name for each run: its folder's name, or its folder's path if several runs have the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else redact(str(run.folder)) for run in runs]


def _compare_arguments(runs: Sequence[_ComparedRun]) -> str:
    """Return a table of the arguments whose values differ."""
    configs = [run.config or {} for run in runs]
    rows = []
    for argument in dict.fromkeys(chain.from_iterable(configs)):
        values = [json.dumps(config.get(argument), ensure_ascii=False) for config in configs]
        if argument not in _IRRELEVANT_ARGUMENTS and len(set(values)) > 1:
            rows.append((code(argument), *(redact(value) for value in values)))
    if not rows:
        return "Their arguments are the same."
    return table(["argument", *(run.name for run in runs)], rows)


def _compare_data(runs: Sequence[_ComparedRun]) -> str:
    """Return a table of the sources' shares and of the token datasets."""
    # shares of the sources
    shares = [dict(seen_shares(run.record)) if run.record else {} for run in runs]
    rows: list[Sequence[Any]] = []
    for source in dict.fromkeys(chain.from_iterable(shares)):
        cells = [f"{run_shares[source]:.1%}" if source in run_shares else "" for run_shares in shares]
        rows.append((source, *cells))

    # token datasets
    fingerprints = []
    for run in runs:
        data = run.record.saved.data if run.record else None
        fingerprints.append(getattr(data, "fingerprint", None))  # a stream has no fingerprint
    cells = [str(fingerprint)[:12] if fingerprint else "" for fingerprint in fingerprints]
    rows.append(("token dataset", *cells))
    is_same = len(set(fingerprints)) == 1 and fingerprints[0] is not None
    note = "The runs read the same token datasets." if is_same else "The runs read different token datasets."
    return f"{table(['source', *(run.name for run in runs)], rows, len(runs))}\n\n{note}"


def _find_unfair(runs: Sequence[_ComparedRun]) -> Iterator[str]:
    """Yield the reasons why the runs' losses or rewards cannot be compared."""
    # validation rows and units
    evaluations = [(run.name, run.evaluation) for run in runs if run.evaluation is not None]
    for name, evaluation in evaluations[1:]:
        first_name, first_evaluation = evaluations[0]
        has_rewards = first_evaluation.whole.of_completions and evaluation.whole.of_completions
        if has_rewards and not first_evaluation.is_comparable(evaluation):
            yield (
                f"{name} was evaluated on other prompts, rewards or settings of sampling than {first_name}: their "
                "validation rewards are not comparable."
            )
        elif not first_evaluation.is_comparable(evaluation):
            yield (
                f"{name} was evaluated on different validation rows than {first_name}: their validation losses are "
                "not comparable."
            )
        first_unit = first_evaluation.whole.unit
        unit = evaluation.whole.unit
        if first_unit != unit:
            yield f"{name} and {first_name} report losses in different units: per {unit} and per {first_unit}."
        elif first_evaluation.whole.has_own_unit or evaluation.whole.has_own_unit:
            yield (
                f"The loss of {name} or {first_name} is not a plain cross entropy: only compare losses if both use the "
                "same objective."
            )

    # tokenizers
    tokenizers = [(run.name, run.record.manifest.tokenizer) for run in runs if run.record and run.record.manifest]
    for name, tokenizer in tokenizers[1:]:
        first_name, first_tokenizer = tokenizers[0]
        if tokenizer.vocab_size != first_tokenizer.vocab_size or tokenizer.name != first_tokenizer.name:
            yield f"{name} has a different tokenizer than {first_name}: compare bits per byte, not losses."

    # missing evaluations
    names_without = [run.name for run in runs if run.evaluation is None]
    if names_without and len(names_without) < len(runs):
        yield f"There is no evaluation in the newest checkpoint of {', '.join(names_without)}."

    # lengths
    num_tokens = {run.name: run.record.saved.state.num_tokens for run in runs if run.record}
    if len(set(num_tokens.values())) > 1:
        lengths = ", ".join(f"{name} {count:,}" for name, count in num_tokens.items())
        yield f"The runs saw different numbers of tokens ({lengths}): choose tokens as the axis of the curves."


def _compare_results(runs: Sequence[_ComparedRun], price_per_hour: float | None) -> str:
    """Return a table with the last values of each run in a column."""
    cells_of_runs = [_result_cells(run, price_per_hour) for run in runs]
    rows = []
    for name in dict.fromkeys(chain.from_iterable(cells_of_runs)):  # the names of the rows, each once
        rows.append((name, *(cells.get(name) for cells in cells_of_runs)))
    return table(["", *(run.name for run in runs)], rows, len(runs))


def _result_cells(run: _ComparedRun, price_per_hour: float | None) -> dict[str, Any]:
    """Return the cells of a run in the table of results, by the row's title; a value that is not known is absent."""
    saved = run.record.saved if run.record else None  # of the newest checkpoint
    cells: dict[str, Any] = {}
    if saved is not None:
        cells["code"] = saved.versions.get(PROGRAM, "not recorded")
        cells["steps"] = saved.state.step
        cells["tokens"] = saved.state.num_tokens

    # the last training loss and speed
    if run.metrics is not None:
        for name, column in (("training loss", "train_loss"), ("tokens/s at the end", "tokens_per_second")):
            value = run.metrics.last_value(column)
            if value is not None:
                cells[name] = f"{value:,.4g}"

    # the validation losses of each source
    if run.evaluation is not None:
        for source, loss in run.evaluation.parts.items():
            figures = loss.figures()
            figures.pop("perplexity", None)  # follows from the loss
            for figure_name, figure in figures.items():
                if figure is not None:
                    cells[f"validation {figure_name.replace('_', ' ')}, {source}"] = f"{figure:.4f}"

    # devices and their cost
    if saved is not None and saved.sessions:
        cells["devices"] = device_hours(saved.sessions)
        if price_per_hour is not None:
            hours = sum(session.device_hours for session in saved.sessions)
            cells["cost"] = f"{hours * price_per_hour:,.2f}"
    return cells
