"""Build the sections of the report on one run, each from its own files; if these are damaged, the section says so."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.checkpoint.files import CHECKSUMS
from fabric_train.checkpoint.trainer_json import PROGRAM, TrainerJson
from fabric_train.cli.errors import InputError, RunError, describe_os_error
from fabric_train.cli.output import redact, visible
from fabric_train.evaluation.loss_changes import CHANGES, ShownChanges, changes_sections
from fabric_train.evaluation.loss_table import (
    COLUMNS,
    DOCUMENTS,
    NUM_WORDS,
    cells,
    compare_evaluated,
    have_same_tokens,
    notes_on,
    read_evaluated,
)
from fabric_train.evaluation.scores import read_means, score_charts, to_markdown
from fabric_train.export import card_facts
from fabric_train.export.card_facts import ModelRecord
from fabric_train.files.typed_json import read_json
from fabric_train.pages.markdown import SHOWN_DIGITS, Markdown, Section, code, code_block, escaped, table
from fabric_train.report.health import health_section
from fabric_train.report.reported_run import ReportedRun
from fabric_train.report.rollouts import rollouts_section
from fabric_train.run_folder.config_file import CONFIG
from fabric_train.run_folder.run_folder import RunFolder
from fabric_train.training.metric_charts import metric_charts
from fabric_train.training.run_times import TIMES, describe_seconds

_MAX_SAMPLES = 4  # of each prompt
_MAX_SOURCES = 12
_MAX_LOG_LINES = 200
_MAX_SIBLING_RUNS = 200  # in the same folder
_SEED = 0  # of the bootstrap, as in fabric-train evaluate
_LAST_VALUES = (
    ("training loss", "train_loss"),
    ("validation loss", "val_loss"),
    ("reward", "train_reward"),
    ("validation reward", "val_reward"),
)
"""The titles of rows in the summary, and the columns of metrics.csv whose last values they have."""
Rows = list[tuple[str, Any]]
"""The rows of a table: a name and its value."""


def run_sections(run: ReportedRun, price_per_hour: float | None = None) -> list[Section]:
    """Return the sections on a run; ``price_per_hour`` is what an hour of one device costs."""
    builders: tuple[tuple[str, str, Callable[[ReportedRun], Iterator[Section]]], ...] = (
        ("summary", "Summary", partial(_summary_section, price_per_hour=price_per_hour)),
        ("results", "Results", _results_section),
        ("health", "Health", _health_section),
        ("curves", "Curves", _curves_section),
        ("rollouts", "Rollouts", rollouts_section),
        ("events", "What happened", _events_section),
        ("time", "Where the time went", _time_section),
        ("evaluation", "Evaluation", _evaluation_section),
        ("scores", "Scores on tasks", _scores_section),
        ("changes", "Token changes", _changes_section),
        ("samples", "Samples", _samples_section),
        ("data", "Data", _data_section),
        ("lineage", "Lineage", _lineage_section),
        ("checkpoints", "Checkpoints", _checkpoints_section),
        ("exports", "Exports", _exports_section),
        ("repeat", "Repeat this run", _repeat_section),
        ("configuration", "Configuration", _configuration_section),
    )
    sections: list[Section] = []
    for key, title, build in builders:
        sections += _build_or_report_fault(run, key, title, build)
    return sections


def _build_or_report_fault(
    run: ReportedRun, key: str, title: str, build: Callable[[ReportedRun], Iterator[Section]]
) -> list[Section]:
    """Return the sections that ``build`` yields; if a file cannot be read, a section that says why."""
    try:
        return list(build(run))
    except (InputError, RunError) as error:
        reason = str(error)
    except OSError as error:
        reason = describe_os_error(error)
    return [Section(key, title, fault=redact(reason))]


def _summary_section(run: ReportedRun, price_per_hour: float | None) -> Iterator[Section]:
    """Yield a table: the folder, what was trained, and the last metrics."""
    rows: Rows = [("folder", code(redact(str(run.folder))))]
    if run.has_config:
        rows.append(("started by", _owner(run.folder / CONFIG)))
    rows += _rows_or_fault(lambda: _training_rows(run, price_per_hour))
    rows += _rows_or_fault(lambda: _metric_rows(run))
    yield Section("summary", "Summary", table("what | ", rows))


def _owner(file: Path) -> str:
    try:
        return file.owner()
    except KeyError:  # a container may not know the user
        return f"user {file.stat().st_uid}"


def _rows_or_fault(build: Callable[[], Rows]) -> Rows:
    """Return the rows that ``build`` returns; if a file cannot be read, a row that says why."""
    try:
        return build()
    except InputError as error:
        return [("not known", redact(str(error)))]


def _training_rows(run: ReportedRun, price_per_hour: float | None) -> Rows:
    """Return rows about the model, the steps, the devices and the version that trained."""
    record = run.record
    saved = run.newest

    # the model
    origin = record.origin
    model = "random weights" if origin is None else origin.name
    if origin is not None and origin.revision:
        model += f" at {origin.revision[:SHOWN_DIGITS]}"
    if saved.adapter_base is not None:
        model += f", with an adapter on {saved.adapter_base.location}"
    rows: Rows = [("model", model)]
    if saved.trained_modules:
        rows.append(("trained parts", saved.trained_modules))

    # the training
    num_planned = "" if math.isinf(saved.num_steps) else f" of {saved.num_steps:,.0f}"
    rows.append(("trained on", _describe_sources(record)))
    for kind in ("objective", "optimizer"):
        rows.append((kind, saved.component(kind).description))
    rows += _teacher_rows(saved)
    rows.append(("steps", f"{saved.state.step:,}{num_planned} in the newest checkpoint"))
    rows.append(("tokens", saved.state.num_tokens))
    if saved.sessions:
        seconds = sum(session.seconds for session in saved.sessions)
        rows.append(("devices", card_facts.device_hours(saved.sessions)))
        rows.append(("duration", f"{seconds / 3600:,.2f} h of training"))
        if price_per_hour is not None:
            cost = price_per_hour * sum(session.device_hours for session in saved.sessions)
            rows.append(("cost", f"{cost:,.2f} at {price_per_hour:g} per device-hour"))

    # the code
    versions = dict(saved.versions)
    rows.append((f"code of {PROGRAM}", versions.pop(PROGRAM, "not recorded")))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return rows


def _teacher_rows(saved: TrainerJson) -> Rows:
    """Return the teacher of a distilled run, and the settings of its loss; no rows for a run without a teacher."""
    if saved.teacher is None:
        return []
    name = saved.teacher.location
    if saved.teacher.origin is not None:
        name = saved.teacher.origin.name
        if saved.teacher.origin.revision:
            name += f" at {saved.teacher.origin.revision[:SHOWN_DIGITS]}"
    if saved.teacher.stored_as is not None:
        name += f", stored as {saved.teacher.stored_as}"
    settings = [f"temperature {saved.arguments.get('distill_temperature')}"]
    if saved.arguments.get("divergence") == "jsd":
        settings.append(f"beta {saved.arguments.get('jsd_beta')}")
    if saved.arguments.get("sft_weight"):
        settings.append(f"plus {saved.arguments['sft_weight']} × cross entropy")
    settings.append(f"on {saved.arguments.get('distill_on')} tokens")
    return [("teacher", redact(name)), ("divergence", f"{saved.arguments.get('divergence')}, {', '.join(settings)}")]


def _describe_sources(record: ModelRecord) -> str:
    """Return the sources with their shares of the consumed tokens; only the names if the shares are not known."""
    shares = card_facts.seen_shares(record)
    if shares:
        return ", ".join(f"{name} ({share:.1%})" for name, share in shares[:_MAX_SOURCES])
    return ", ".join(source.name for source in record.stream_sources()[:_MAX_SOURCES])


def _metric_rows(run: ReportedRun) -> Rows:
    """Return the last values of the metrics, the best step and the speed."""
    metrics = run.metrics
    rows: Rows = [("last logged step", int(metrics.steps[-1]) if len(metrics.steps) else "none yet")]
    for name, column in _LAST_VALUES:
        value = metrics.last_value(column)
        if value is not None:
            rows.append((name, f"{value:.4f}"))
    if run.best_step is not None:
        rows.append(("best validation", f"step {run.best_step:,}"))
    row_indices = metrics.measured_rows("tokens_per_second")
    if len(row_indices):
        median_speed = np.median(metrics.columns["tokens_per_second"][row_indices])
        rows.append(("speed", f"{median_speed:,.0f} tokens/s (median)"))
    return rows


def _results_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the losses of each source in the newest checkpoint, and how they changed."""
    results = card_facts.results_of(run.record)
    if not results["result_rows"]:
        yield Section("results", "Results", "The run has no evaluation yet.")
        return
    evaluation = results["now"]
    first_evaluation = results["first"]
    note = f"After step {evaluation.step:,}"
    if first_evaluation.step < evaluation.step:
        note += f"; before the arrows, after step {first_evaluation.step:,}"
    columns = results["result_columns"]
    num_number_columns = columns.count("|")  # all but the first column, as "|" separates them
    results_table = table(columns, results["result_rows"], num_number_columns)
    meaning = f"Loss in nats per {evaluation.whole.unit}."
    if evaluation.whole.has_own_unit and run.newest.teacher is None:
        meaning = f"Loss {card_facts.unit_of_loss(run.newest)}."
    if evaluation.whole.of_completions:
        meaning = "Means over one completion of each prompt, with the standard errors of the rewards."
    body = f"{results_table}\n\n{note}. {meaning}"
    yield Section("results", "Results", body)


def _health_section(run: ReportedRun) -> Iterator[Section]:
    yield health_section([("", run)])


def _curves_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the curves of the metrics."""
    charts = metric_charts([(run.name, run.metrics)], run.marks)
    yield Section("curves", "Curves", "" if charts else "No steps are logged yet.", tuple(charts))


def _events_section(run: ReportedRun) -> Iterator[Section]:
    """Yield what happened at which step, and the last lines of run.log about stops and faults."""
    # events on the axis of steps
    event_rows = [(int(mark.x), mark.kind, mark.text) for mark in run.marks]
    body = table("step | what | ", event_rows) if event_rows else "Only training."

    # lines of the log
    num_lines = len(run.problems)
    lines = run.problems[-_MAX_LOG_LINES:]
    if lines:
        heading = f"The last {len(lines):,} of {num_lines:,} lines" if num_lines > len(lines) else "Lines"
        log_rows = [(line.time, line.machine, line.rank, line.text) for line in lines]
        body = f"{body}\n\n{heading} of {code('run.log')} about stops and errors:\n\n"
        body += table("time | machine | rank | line", log_rows)
    yield Section("events", "What happened", body)


def _time_section(run: ReportedRun) -> Iterator[Section]:
    """Yield a table of how the run's time was used, and of how long saves and starts took."""
    times = run.times
    if times is None:
        body = f"Unknown: the run has no {code(TIMES)}, because it was trained by an earlier version."
        yield Section("time", "Where the time went", body)
        return
    rows = []
    for name, seconds in times.parts.items():
        rows.append((name, describe_seconds(seconds), f"{times.share(seconds):.1%}"))
    rows.append(("in all", describe_seconds(times.total), ""))
    sentences = [f"Goodput: {times.goodput:.1%} of the time was spent on steps that count."]
    if times.stall is not None:
        stall = describe_seconds(times.stall)
        sentences.append(f"A save blocked training for {stall} (median of {len(times.stalls)}).")
    if times.save is not None:
        sentences.append(f"It was complete {describe_seconds(times.save)} after it began.")
    if times.start is not None:
        sentences.append(
            f"A start took {describe_seconds(times.start)} from program start to the end of the first step (median "
            f"of {len(times.starts)})."
        )
    body = f"{table('what | time | share', rows, 2)}\n\n{' '.join(sentences)}"
    yield Section("time", "Where the time went", body)


def _evaluation_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the losses that fabric-train evaluate has written for the run, if there are any."""
    folder = run.folder / "evaluation"
    if not (folder / DOCUMENTS).is_file():
        return
    evaluated = read_evaluated(folder)
    results = compare_evaluated(evaluated, _SEED)
    rows = []
    for source, results_by_model in results.items():
        for model, result in results_by_model.items():
            rows.append((source, model, *cells(result)))
    losses = table(COLUMNS, rows, len(COLUMNS) - NUM_WORDS)
    notes = "\n".join(f"- {escaped(line)}" for line in notes_on(results, have_same_tokens(evaluated)))
    yield Section("evaluation", "Evaluation", f"{losses}\n\n{notes}")


def _scores_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the scores on tasks that fabric-train evaluate has written, if there are any."""
    file = run.folder / "evaluation" / "scores.csv"
    if file.is_file():
        means = read_means(file)
        yield Section("scores", "Scores on tasks", to_markdown(means), tuple(score_charts(means)))


def _changes_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the changes of single tokens' losses that fabric-train evaluate has written, if there are any."""
    file = run.folder / "evaluation" / CHANGES
    if file.is_file():
        yield from changes_sections(read_json(file, ShownChanges, "evaluate again"))


def _samples_section(run: ReportedRun) -> Iterator[Section]:
    """Yield some texts that the model wrote for each prompt, evenly spaced over the run."""
    paragraphs = []
    for prompt in dict.fromkeys(sample.prompt for sample in run.samples):
        samples = [sample for sample in run.samples if sample.prompt == prompt]
        indices = np.unique(np.linspace(0, len(samples) - 1, _MAX_SAMPLES).round().astype(int))
        paragraphs.append(f"### {escaped(prompt)}")
        for index in indices.tolist():
            sample = samples[index]
            paragraphs.append(f"Step {sample.step:,}:\n\n{code_block(visible(sample.text))}")
    if paragraphs:
        yield Section("samples", "Samples", "\n\n".join(paragraphs))


def _data_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the sources, the ledger, the shares and the phases of the data."""
    record = run.record
    paragraphs: list[str] = []
    source_rows = [card_facts.source_row(source) for source in card_facts.stored_sources(record)]
    if source_rows:
        columns = "source | share of the token dataset | tokens | documents | files | SHA-256 or revision"
        paragraphs.append(table(columns, source_rows))
    stream_rows = card_facts.stream_rows(record)
    if stream_rows and not source_rows:
        paragraphs.append(table("stream | share | revision", stream_rows))
    if record.manifest:
        ledger_rows = card_facts.left_out_rows(record.manifest, record.names)
        paragraphs.append(table("ledger: source | documents read | kept | left out", ledger_rows))
    mixture_rows = card_facts.mixture_rows(record)
    if mixture_rows:
        paragraphs.append(table("mixture: source | share seen | tokens seen", mixture_rows))
    for option in ("shares", "token_shares"):
        value = run.newest.arguments.get(option)
        if value:
            paragraphs.append(f"Planned with {code(f'--{option}')}: {escaped(json.dumps(value))}")
    phase_rows = card_facts.phase_rows(record)
    if phase_rows:
        paragraphs.append(table("phase: first step | shares | learning rate", phase_rows))
    body = "\n\n".join(paragraphs) or "The checkpoint does not describe the data."
    yield Section("data", "Data", body)


def _lineage_section(run: ReportedRun) -> Iterator[Section]:
    """Yield a tree of the runs before this one, this one, and the runs in the same folder that branched off it.

    Example of a run "b" that branched off "a", and of a branch "c" of "b":

        - meta-llama/Llama-3.2-1B
        - a
          - after step 100: b
            - after step 200: c
    """
    saved = run.newest
    origin = saved.base_model.name if saved.base_model else "random weights"
    lines = [f"- {code(origin)}"]
    for stage in saved.stages:
        lines.append(f"- {code(stage.run)}")

    # from the first trunk to this run, one level deeper with each branch
    trunks = [branch for branch in saved.lineage if not branch.is_border_of(run.folder)]
    names = [*(Path(branch.run).name for branch in trunks), run.name]
    lines.append(f"- {code(names[0])}")
    for depth, branch in enumerate(trunks, 1):
        lines.append(f"{'  ' * depth}- after step {branch.step:,}: {code(names[depth])}")
    indent = "  " * (len(trunks) + 1)
    for name, step in _find_branches(run):
        lines.append(f"{indent}- after step {step:,}: {code(name)}")

    body = "\n".join(lines)
    if saved.lineage:
        rows = [card_facts.lineage_row(branch) for branch in saved.lineage]
        body += f"\n\n{table('branch of | after step | changed', rows)}"
    yield Section("lineage", "Lineage", body)


def _find_branches(run: ReportedRun) -> Iterator[tuple[str, int]]:
    """Yield the name and the branch step of each run in the same folder that branched off this run."""
    run_folder = run.folder.resolve()
    siblings = sorted(path for path in run_folder.parent.iterdir() if (path / "checkpoints").is_dir())
    for folder in siblings[:_MAX_SIBLING_RUNS]:
        try:
            lineage = RunFolder(folder).newest.lineage
        except (InputError, OSError):  # another run's damage is not this run's
            continue
        trunks = [branch for branch in lineage if not branch.is_border_of(folder)]
        if trunks and Path(trunks[-1].run).name == run.name and folder != run_folder:
            yield folder.name, trunks[-1].step


def _checkpoints_section(run: ReportedRun) -> Iterator[Section]:
    """Yield a table of the checkpoints with their sizes, losses or rewards, and hashes."""
    steps = run.metrics.steps.tolist()
    column = run.metrics.deciding_column
    losses = dict(zip(steps, run.metrics.columns.get(column, []), strict=False))  # none without an evaluation
    loss_title = "validation reward" if column == "val_reward" else "validation loss"
    if not run.checkpoints:
        yield Section("checkpoints", "Checkpoints", "None yet.")
        return
    rows: list[Sequence[Any]] = []
    for step, folder in run.checkpoints.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        content = ", ".join(sorted({path.relative_to(folder).parts[0] for path in files}))
        loss = losses.get(step, math.nan)
        loss_cell = "" if math.isnan(loss) else f"{loss:.4f}"
        rows.append((step, f"{num_bytes / 1e9:,.3f}", loss_cell, _content_hash(folder), content))
    paragraphs = [
        table(f"step | GB | {loss_title} | hash of checksums.json | content", rows),
        f"Hash of the rows read up to the newest checkpoint: {code(str(run.newest.state.rows_hash))}.",
    ]
    yield Section("checkpoints", "Checkpoints", "\n\n".join(paragraphs))


def _content_hash(checkpoint: Path) -> str:
    """Return the first digits of the SHA-256 of checksums.json, which hashes all files of the checkpoint."""
    checksums = (checkpoint / CHECKSUMS).read_bytes()
    return hashlib.sha256(checksums).hexdigest()[:SHOWN_DIGITS]


def _exports_section(run: ReportedRun) -> Iterator[Section]:
    """Yield a table of the run's exports with the results of their verification, if there are any."""
    rows = []
    for export in card_facts.read_exports(run.folder):
        if export.faults:
            verification = f"not exported: {export.faults}"
        else:
            verification = f"{export.num_tensors:,} tensors bit-identical"
        if export.logit_difference is not None:
            verification += f"; logits differ by {export.logit_difference:.3g} at most"
        weights = [f"{escaped(name)} {code(digest[:SHOWN_DIGITS])}" for name, digest in export.weights.items()]
        hashes = Markdown(", ".join(weights))
        rows.append((export.time, export.source, export.folder, export.dtype, verification, hashes))
    if rows:
        columns = "time | weights | folder | dtype | verification | SHA-256 of weights"
        yield Section("exports", "Exports", table(columns, rows))


def _repeat_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the commands that train the run again."""
    config = run.folder / CONFIG
    if not run.has_config:
        raise InputError(f"{config}: no such file")
    devices = run.config.get("devices", "auto")
    commands = (
        f"fabric run fabric_train --devices {devices} --config {config} --resume false --output_dir NEW",
        f"fabric-train replay {run.folder} --steps FIRST:LAST",
    )
    note = "The second command trains some steps again and compares every loss with this run's."
    blocks = "\n\n".join(code_block(command) for command in commands)
    yield Section("repeat", "Repeat this run", f"{blocks}\n\n{note}")


def _configuration_section(run: ReportedRun) -> Iterator[Section]:
    """Yield the content of config.yaml."""
    text = (run.folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    run.config  # noqa: B018 - a damaged one is a fault
    yield Section("configuration", "Configuration", Markdown(code_block(text)), is_folded=True)
