"""The sections of a report on one run, each from its own files; one whose files are damaged says so."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.errors import InputError, describe_os_error
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
from fabric_train.files.regular_file import read_json
from fabric_train.pages.markdown import SHOWN_DIGITS, Markdown, Section, code, escaped, table
from fabric_train.report.health import health_section
from fabric_train.report.run_files import RunFiles, best_step, content_hash
from fabric_train.training.curves import metric_charts
from fabric_train.training.run_times import TIMES, describe_seconds

_SHOWN_SAMPLES = 4  # of each prompt
_SHOWN_SOURCES = 12
_SHOWN_LINES = 200
_MOST_RUNS_BESIDE = 200
_SEED = 0  # of the bootstrap, as in fabric-train evaluate


def run_sections(run: RunFiles, price_per_hour: float | None = None) -> list[Section]:
    """Return the sections on a run; ``price_per_hour`` is of one device."""
    planned: tuple[tuple[str, str, Callable[[RunFiles], Iterator[Section]]], ...] = (
        ("summary", "Summary", partial(_summary, price_per_hour=price_per_hour)),
        ("results", "Results", _results),
        ("health", "Health", _health),
        ("curves", "Curves", _curves),
        ("events", "What happened", _events),
        ("time", "Where the time went", _time),
        ("evaluation", "Evaluation", _evaluation),
        ("scores", "Scores on tasks", _scores),
        ("changes", "Token changes", _changes),
        ("samples", "Samples", _samples),
        ("data", "Data", _data),
        ("lineage", "Lineage", _lineage),
        ("checkpoints", "Checkpoints", _checkpoints),
        ("exports", "Exports", _exports),
        ("repeat", "How to repeat this run", _repeat),
        ("configuration", "Configuration", _configuration),
    )
    return [section for key, title, build in planned for section in _guarded(run, key, title, build)]


def _guarded(run: RunFiles, key: str, title: str, build: Callable[[RunFiles], Iterator[Section]]) -> list[Section]:
    try:
        return list(build(run))
    except InputError as error:
        reason = str(error)
    except OSError as error:
        reason = describe_os_error(error)
    return [Section(key, title, fault=redact(reason))]


def _summary(run: RunFiles, price_per_hour: float | None) -> Iterator[Section]:
    rows: list[tuple[str, Any]] = [("folder", code(redact(str(run.folder))))]
    if (run.folder / "config.yaml").is_file():
        rows.append(("started by", _owner(run.folder / "config.yaml")))
    rows += _guarded_rows(lambda: _trained(run, price_per_hour))
    rows += _guarded_rows(lambda: _last(run))
    yield Section("summary", "Summary", table("what | ", rows))


def _owner(file: Path) -> str:
    try:
        return file.owner()
    except KeyError:  # a container may not know the user
        return f"user {file.stat().st_uid}"


def _guarded_rows(build: Callable[[], list[tuple[str, Any]]]) -> list[tuple[str, Any]]:
    try:
        return build()
    except InputError as error:
        return [("not known", redact(str(error)))]


def _trained(run: RunFiles, price_per_hour: float | None) -> list[tuple[str, Any]]:
    record = run.record
    saved = run.saved
    origin = record.origin
    begun = "random weights" if origin is None else origin.name
    if origin is not None and origin.revision:
        begun += f" at {origin.revision[:SHOWN_DIGITS]}"
    if saved.adapter_base is not None:
        begun += f", with an adapter on {saved.adapter_base.place}"
    trained_parts = [("trained parts", saved.trained_modules)] if saved.trained_modules else []
    planned = "" if math.isinf(saved.num_steps) else f" of {saved.num_steps:,.0f}"
    hours = sum(one.device_hours for one in saved.sessions)
    rows: list[tuple[str, Any]] = [
        ("model", begun),
        *trained_parts,
        ("trained on", _trained_on(record)),
        *((kind, saved.component(kind).description) for kind in ("objective", "optimizer")),
        ("steps", f"{saved.state.step:,}{planned} in the newest checkpoint"),
        ("tokens", saved.state.num_tokens),
    ]
    if saved.sessions:
        rows.append(("devices", card_facts.device_hours(saved.sessions)))
        rows.append(("duration", f"{sum(one.seconds for one in saved.sessions) / 3600:,.2f} h of training"))
        if price_per_hour is not None:
            rows.append(("cost", f"{hours * price_per_hour:,.2f} at {price_per_hour:g} for an hour of a device"))
    versions = dict(saved.versions)
    rows.append((f"code of {PROGRAM}", versions.pop(PROGRAM, "not recorded")))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return rows


def _trained_on(record: ModelRecord) -> str:
    """Return the sources with their shares of what the steps consumed; only their names if that is not known."""
    shares = card_facts.seen_shares(record)
    if shares:
        return ", ".join(f"{name} ({share:.1%})" for name, share in shares[:_SHOWN_SOURCES])
    return ", ".join(source.name for source in record.stream_sources()[:_SHOWN_SOURCES])


def _last(run: RunFiles) -> list[tuple[str, Any]]:
    metrics = run.metrics
    rows: list[tuple[str, Any]] = [("last logged step", int(metrics.steps[-1]) if len(metrics.steps) else "none yet")]
    for name, column in (("training loss", "train_loss"), ("validation loss", "val_loss")):
        if (value := metrics.last(column)) is not None:
            rows.append((name, f"{value:.4f}"))
    if best := best_step(run):
        rows.append(("best validation", f"step {best:,}"))
    if len(known := metrics.known("tokens_per_second")):
        speeds = metrics.columns["tokens_per_second"][known]
        rows.append(("speed", f"{np.median(speeds):,.0f} tokens/s, the median"))
    return rows


def _results(run: RunFiles) -> Iterator[Section]:
    found = card_facts.results_of(run.record)
    if not found["result_rows"]:
        yield Section("results", "Results", "The run has no evaluation yet.")
        return
    now = found["now"]
    first = found["first"]
    about = f"After step {now.step:,}"
    if first.step < now.step:
        about += f"; before the arrows, after step {first.step:,}"
    head = found["result_columns"]
    body = f"{table(head, found['result_rows'], head.count('|'))}\n\n{about}. Loss in nats per {now.whole.unit}."
    yield Section("results", "Results", body)


def _health(run: RunFiles) -> Iterator[Section]:
    yield health_section([("", run)])


def _curves(run: RunFiles) -> Iterator[Section]:
    charts = metric_charts([(run.name, run.metrics)], run.marks)
    yield Section("curves", "Curves", "" if charts else "No step is logged yet.", tuple(charts))


def _events(run: RunFiles) -> Iterator[Section]:
    rows = [(int(mark.x), mark.kind, mark.text) for mark in run.marks]
    body = table("step | what | ", rows) if rows else "Nothing but training."
    told = run.told
    lines = [(line.when, line.machine, line.rank, line.text) for line in told[-_SHOWN_LINES:]]
    if lines:
        shown = f"The last {len(lines):,} of {len(told):,} lines" if len(told) > len(lines) else "Lines"
        body = f"{body}\n\n{shown} of {code('run.log')} about stops and faults:\n\n"
        body += table("time | machine | rank | line", lines)
    yield Section("events", "What happened", body)


def _time(run: RunFiles) -> Iterator[Section]:
    times = run.times
    if times is None:
        body = f"Not known: the run has no {code(TIMES)}, which earlier versions did not write."
        yield Section("time", "Where the time went", body)
        return
    rows = [(name, describe_seconds(seconds), f"{times.share(seconds):.1%}") for name, seconds in times.parts.items()]
    rows.append(("in all", describe_seconds(times.total), ""))
    facts = [f"Goodput: {times.goodput:.1%} of the time went into steps that count."]
    if times.stall is not None:
        facts.append(
            f"A save held up the steps for {describe_seconds(times.stall)}, the median of {len(times.stalls)}."
        )
    if times.save is not None:
        facts.append(f"It was complete {describe_seconds(times.save)} after it began.")
    if times.start is not None:
        first = "from the start of the program to the end of its first step"
        facts.append(f"A start took {describe_seconds(times.start)} {first}, the median of {len(times.starts)}.")
    yield Section("time", "Where the time went", f"{table('what | time | share', rows, 2)}\n\n{' '.join(facts)}")


def _evaluation(run: RunFiles) -> Iterator[Section]:
    folder = run.folder / "evaluation"
    if not (folder / DOCUMENTS).is_file():
        return
    evaluated = read_evaluated(folder)
    results = compare_evaluated(evaluated, _SEED)
    rows = [
        (source, model, *cells(found)) for source, of_models in results.items() for model, found in of_models.items()
    ]
    notes = "\n".join(f"- {escaped(line)}" for line in notes_on(results, have_same_tokens(evaluated)))
    yield Section("evaluation", "Evaluation", f"{table(COLUMNS, rows, len(COLUMNS) - NUM_WORDS)}\n\n{notes}")


def _scores(run: RunFiles) -> Iterator[Section]:
    file = run.folder / "evaluation" / "scores.csv"
    if file.is_file():
        means = read_means(file)
        yield Section("scores", "Scores on tasks", to_markdown(means), tuple(score_charts(means)))


def _changes(run: RunFiles) -> Iterator[Section]:
    file = run.folder / "evaluation" / CHANGES
    if file.is_file():
        yield from changes_sections(read_json(file, ShownChanges, "evaluate again"))


def _samples(run: RunFiles) -> Iterator[Section]:
    parts = []
    for prompt in dict.fromkeys(sample.prompt for sample in run.samples):
        own = [sample for sample in run.samples if sample.prompt == prompt]
        chosen = np.unique(np.linspace(0, len(own) - 1, _SHOWN_SAMPLES).round().astype(int))
        parts.append(f"### {escaped(prompt)}")
        for number in chosen.tolist():
            parts.append(f"Step {own[number].step:,}:\n\n{_block(visible(own[number].text))}")
    if parts:
        yield Section("samples", "Samples", "\n\n".join(parts))


def _block(text: str) -> str:
    """Return a text as a block of code; nothing in it ends the block."""
    return "\n".join(f"    {line}" for line in redact(text).splitlines() or [""])


def _data(run: RunFiles) -> Iterator[Section]:
    record = run.record
    parts: list[str] = []
    if sources := [card_facts.source_row(one) for one in card_facts.stored_sources(record)]:
        columns = "source | share of the token dataset | tokens | documents | files | SHA-256 or revision"
        parts.append(table(columns, sources))
    elif rows := card_facts.stream_rows(record):
        parts.append(table("stream | share | revision", rows))
    if record.manifest:
        left_out = card_facts.left_out_rows(record.manifest, record.names)
        parts.append(table("ledger: source | documents read | kept | left out", left_out))
    if seen := card_facts.mixture_rows(record):
        parts.append(table("mixture: source | share seen | tokens seen", seen))
    given = {name: run.saved.arguments.get(name) for name in ("shares", "token_shares")}
    parts += [
        f"Planned with {code(f'--{name}')}: {escaped(json.dumps(value))}" for name, value in given.items() if value
    ]
    if phases := card_facts.phase_rows(record):
        parts.append(table("phase: first step | shares | learning rate", phases))
    yield Section("data", "Data", "\n\n".join(parts) or "The data are not described in the checkpoint.")


def _lineage(run: RunFiles) -> Iterator[Section]:
    """Show the runs before this one as a tree, with the branches that lie beside it."""
    saved = run.saved
    trunks = [branch for branch in saved.lineage if not branch.is_border_of(run.folder)]
    names = [Path(branch.run).name for branch in trunks]
    begun = [stage.run for stage in saved.stages]
    origin = saved.base_model.name if saved.base_model else "random weights"
    lines = [f"- {code(name)}" for name in [origin, *begun]]
    for depth, branch in enumerate(trunks):
        follows = [*names, run.name][depth + 1]
        if depth == 0:
            lines.append(f"- {code(names[0])}")
        lines.append(f"{'  ' * (depth + 1)}- after step {branch.step:,}: {code(follows)}")
    lines += [] if trunks else [f"- {code(run.name)}"]
    indent = "  " * (len(trunks) + 1)
    lines += [f"{indent}- after step {step:,}: {code(name)}" for name, step in _branches_of(run)]
    body = "\n".join(lines)
    if saved.lineage:
        body += f"\n\n{table('branch of | after step | changed', list(map(card_facts.lineage_row, saved.lineage)))}"
    yield Section("lineage", "Lineage", body)


def _branches_of(run: RunFiles) -> Iterator[tuple[str, int]]:
    beside = sorted(path for path in run.folder.resolve().parent.iterdir() if (path / "checkpoints").is_dir())
    for folder in beside[:_MOST_RUNS_BESIDE]:
        other = RunFiles(folder)
        try:
            lineage = [branch for branch in other.saved.lineage if not branch.is_border_of(folder)]
        except (InputError, OSError):  # another run's damage is not this run's
            continue
        if lineage and Path(lineage[-1].run).name == run.name and folder != run.folder.resolve():
            yield folder.name, lineage[-1].step


def _checkpoints(run: RunFiles) -> Iterator[Section]:
    rows: list[Sequence[Any]] = []
    losses = dict(zip(run.metrics.steps.tolist(), run.metrics.columns.get("val_loss", []), strict=False))
    for step, folder in run.checkpoints.items():
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        inside = ", ".join(sorted({path.relative_to(folder).parts[0] for path in files}))
        loss = losses.get(step, math.nan)
        shown = "" if math.isnan(loss) else f"{loss:.4f}"
        rows.append((step, f"{size / 1e9:,.3f}", shown, content_hash(folder), inside))
    parts = [table("step | GB | validation loss | hash of checksums.json | content", rows) if rows else "None yet."]
    if rows:
        parts.append(f"Hash of the rows read up to the newest one: {code(str(run.saved.state.rows_hash))}.")
    if certificate := run.record.certificate if rows else None:
        steps = "{:,} to {:,}".format(*certificate.steps)
        parts.append(f"Replayed: steps {steps} were trained again on {certificate.date}, and {certificate.rule}.")
    yield Section("checkpoints", "Checkpoints", "\n\n".join(parts))


def _exports(run: RunFiles) -> Iterator[Section]:
    rows = []
    for one in card_facts.read_exports(run.folder):
        found = f"not exported: {one.faults}" if one.faults else f"{one.num_tensors:,} tensors equal, bit for bit"
        if one.logit_difference is not None:
            found += f"; logits differ by {one.logit_difference:.3g} at most"
        hashes = Markdown(
            ", ".join(f"{escaped(name)} {code(digest[:SHOWN_DIGITS])}" for name, digest in one.weights.items())
        )
        rows.append((one.time, one.source, one.folder, one.dtype, found, hashes))
    if rows:
        head = "time | weights of | folder | dtype | verification | SHA-256 of weights"
        yield Section("exports", "Exports", table(head, rows))


def _repeat(run: RunFiles) -> Iterator[Section]:
    config = run.folder / "config.yaml"
    if not config.is_file():
        raise InputError(f"{config}: no such file")
    devices = run.config.get("devices", "auto")
    lines = [
        f"fabric run fabric_train --devices {devices} --config {config} --resume false --output_dir NEW",
        f"fabric-train replay {run.folder} --steps FIRST:LAST",
    ]
    about = "The second command trains some steps again and compares every loss with this run's."
    blocks = "\n\n".join(_block(line) for line in lines)
    yield Section("repeat", "How to repeat this run", f"{blocks}\n\n{about}")


def _configuration(run: RunFiles) -> Iterator[Section]:
    text = (run.folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    run.config  # noqa: B018 - a damaged one is a fault
    yield Section("configuration", "Configuration", Markdown(_block(text)), is_folded=True)
