"""Write the report of a run, or of several beside one another: the page, the Markdown, and the picture that it shows.

The report on several runs has the differences of configuration and data, unfair comparisons, results and curves.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fabric_train.checkpoint import Evaluation
from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import escape_controls, redact
from fabric_train.export.card_facts import device_hours, seen_shares
from fabric_train.files.regular_file import check_no_link, write_atomically
from fabric_train.pages.charts import draw
from fabric_train.pages.markdown import Section, WrittenPage, code, escaped, table, to_html, to_markdown
from fabric_train.report.health import health_section
from fabric_train.report.run_files import RunFiles
from fabric_train.report.sections import run_sections
from fabric_train.training.curves import MetricsTable, metric_charts, page_axis

PAGE = "report.html"
_HEIGHTS = {"loss": 260, "sources": 220}
_OF_THE_PLACE = {"output_dir", "resume", "plan", "report"}
"""Arguments that say nothing about what a run does."""


def write_report(runs: Sequence[RunFiles], page: Path, price_per_hour: float | None = None) -> WrittenPage:
    """Write the report of one run, or of several beside one another.

    Raises:
        InputError: a file cannot be written.
    """
    if len(runs) == 1:
        title = f"Report of {runs[0].name}"
        sections = run_sections(runs[0], price_per_hour)
    else:
        title = f"{' and '.join(run.name for run in runs)} compared"
        sections = comparison_sections(runs, price_per_hour)
    markdown = page.with_suffix(".md")
    picture = page.with_suffix(".png")
    for file in (page, markdown, picture):
        check_no_link(file)
    charts = [chart for section in sections for chart in section.charts if chart.key in _HEIGHTS]
    has_picture = bool(charts) and draw(charts, picture, title=title, heights=[_HEIGHTS[chart.key] for chart in charts])
    axes = [page_axis(run.metrics) for run in runs if _has_metrics(run)]  # as the charts number them
    write_atomically(page, to_html(title, sections, axes))
    write_atomically(markdown, to_markdown(title, sections, picture.name if has_picture else ""))
    lines = [line for section in sections for line in section.told]
    lines += [f"left out of the report: {section.fault}" for section in sections if section.fault]
    lines.append(f"written {page} and {markdown.name}")
    return WrittenPage(page, markdown, list(map(escape_controls, lines)))


def _has_metrics(run: RunFiles) -> bool:
    try:
        return len(run.metrics.steps) > 0
    except (InputError, OSError):
        return False


def comparison_sections(runs: Sequence[RunFiles], price_per_hour: float | None = None) -> list[Section]:
    """Return the sections on several runs; ``price_per_hour`` is of one device."""
    faults: dict[str, str] = {}
    configurations = [_read(run, "config.yaml", lambda run: run.config, faults) or {} for run in runs]
    tables = [_read(run, "metrics.csv", lambda run: run.metrics, faults) for run in runs]
    records = [_read(run, "checkpoint", lambda run: run.record, faults) for run in runs]
    names = _names(runs)
    known = [(name, one) for name, one in zip(names, tables, strict=True) if one is not None and len(one.steps)]
    charts = metric_charts(known) if known else []
    evaluations = [record.saved.state.evaluation if record else None for record in records]
    unfair = [*_unfair(names, evaluations, records)]
    warnings = "\n".join(f"- {escaped(line)}" for line in unfair) or "Nothing speaks against comparing these runs."
    sections = [
        Section("differences", "Differences of configuration", _differences(names, configurations)),
        Section("data", "Differences of data", _data(names, records)),
        Section("fair", "Unfair comparisons", warnings),
        Section("results", "Results", _results(names, tables, evaluations, records, price_per_hour)),
        Section("curves", "Curves", "" if charts else "No run has logged steps.", tuple(charts)),
        health_section([(name, run) for name, run, one in zip(names, runs, tables, strict=True) if one is not None]),
    ]
    return [*sections, *(Section(f"fault-{n}", "Left out", fault=fault) for n, fault in enumerate(faults.values()))]


def _read(run: RunFiles, what: str, part: Any, faults: dict[str, str]) -> Any:
    try:
        return part(run)
    except (InputError, OSError) as error:
        faults[f"{run.folder}/{what}"] = redact(f"{run.name}, {what}: {error}")
        return None


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """Return a name for each run; of runs with the same name, their folders."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else redact(str(run.folder)) for name, run in zip(names, runs, strict=True)]


def _differences(names: Sequence[str], configurations: Sequence[dict[str, Any]]) -> str:
    arguments = dict.fromkeys(name for one in configurations for name in one if name not in _OF_THE_PLACE)
    rows = []
    for argument in arguments:
        values = [json.dumps(one.get(argument), ensure_ascii=False) for one in configurations]
        if len(set(values)) > 1:
            rows.append((code(argument), *(redact(value) for value in values)))
    return table(["argument", *names], rows) if rows else "Their arguments are the same."


def _data(names: Sequence[str], records: Sequence[Any]) -> str:
    shares = [dict(seen_shares(record)) if record else {} for record in records]
    rows: list[Sequence[Any]] = []
    for source in dict.fromkeys(source for one in shares for source in one):
        rows.append((source, *(f"{one[source]:.1%}" if source in one else "" for one in shares)))
    fingerprints = [getattr(record.saved.data, "fingerprint", None) if record else None for record in records]
    rows.append(("token dataset", *(str(one)[:12] if one else "" for one in fingerprints)))
    same = len(set(fingerprints)) == 1 and fingerprints[0] is not None
    about = "The runs read the same token datasets." if same else "The runs read different token datasets."
    return f"{table(['source', *names], rows, len(names))}\n\n{about}"


def _unfair(names: Sequence[str], evaluations: Sequence[Evaluation | None], records: Sequence[Any]) -> Iterator[str]:
    """Yield what makes losses of the runs incomparable."""
    known = [(name, one) for name, one in zip(names, evaluations, strict=True) if one is not None]
    for name, one in known[1:]:
        first, base = known[0]
        if not base.is_comparable(one):
            yield f"{name} was evaluated on other validation rows than {first}: do not compare their validation losses."
        if base.whole.of_pairs != one.whole.of_pairs:
            yield f"{name} and {first} have losses of different units: pairs and tokens."
        elif base.whole.has_own_unit or one.whole.has_own_unit:
            yield f"{name} or {first} has a registered objective: compare losses only if both have the same one."
    tokenizers = [
        (name, one.manifest.tokenizer) for name, one in zip(names, records, strict=True) if one and one.manifest
    ]
    for name, tokenizer in tokenizers[1:]:
        if tokenizer.vocab_size != tokenizers[0][1].vocab_size or tokenizer.name != tokenizers[0][1].name:
            yield f"{name} has another tokenizer than {tokenizers[0][0]}: compare bits per byte alone, not losses."
    missing = [name for name, one in zip(names, evaluations, strict=True) if one is None]
    if missing and len(missing) < len(names):
        yield f"{', '.join(missing)} has no evaluation in its newest checkpoint."
    steps = {name: record.saved.state.num_tokens for name, record in zip(names, records, strict=True) if record}
    if len(set(steps.values())) > 1:
        shown = ", ".join(f"{name} {number:,}" for name, number in steps.items())
        yield f"The runs saw different numbers of tokens ({shown}): choose tokens as the axis of the curves."


def _results(
    names: Sequence[str],
    tables: Sequence[MetricsTable | None],
    evaluations: Sequence[Evaluation | None],
    records: Sequence[Any],
    price_per_hour: float | None,
) -> str:
    rows: dict[str, list[Any]] = {}
    for number, (metrics, evaluation, record) in enumerate(zip(tables, evaluations, records, strict=True)):
        cells: dict[str, Any] = {}
        if record is not None:
            cells |= {"code": record.saved.versions.get(PROGRAM, "not recorded"), "steps": record.saved.state.step}
            cells["tokens"] = record.saved.state.num_tokens
        if metrics is not None:
            losses = {
                "training loss": metrics.last("train_loss"),
                "tokens/s at the end": metrics.last("tokens_per_second"),
            }
            cells |= {name: f"{value:,.4g}" for name, value in losses.items() if value is not None}
        for part, loss in evaluation.parts.items() if evaluation else ():
            for figure, value in loss.figures().items():
                if value is not None and figure != "perplexity":
                    cells[f"validation {figure.replace('_', ' ')}, {part}"] = f"{value:.4f}"
        if record is not None and record.saved.sessions:
            cells["devices"] = device_hours(record.saved.sessions)
            if price_per_hour is not None:
                cells["cost"] = f"{sum(one.device_hours for one in record.saved.sessions) * price_per_hour:,.2f}"
        for name, value in cells.items():
            rows.setdefault(name, [None] * len(names))[number] = value
    return table(["", *names], [(name, *values) for name, values in rows.items()], len(names))
