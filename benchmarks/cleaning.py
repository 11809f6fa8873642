"""Measure what each cleaning switch of ``tokenize_dataset.py`` costs: megabytes of text a second on one core."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.corpora import DOCUMENT_CHARACTERS, cut_documents, whole_documents
from benchmarks.measure import Spread, interleave, spread
from benchmarks.report import Report
from fabric_train.cleaning.boilerplate import Boilerplate, hash_lines
from fabric_train.cleaning.cleaner import Cleaner, open_cleaner
from fabric_train.cleaning.results import Dropped
from fabric_train.cli.parser import parse_arguments
from fabric_train.sample_data import real_data
from fabric_train.tokenization.arguments import TokenizeArguments

SWITCHES = (
    "--language es,en",
    "--language es,en --language_by paragraph",
    "--quality gopher",
    "--quality c4",
    "--quality fineweb",
    "--language es,en --quality gopher,c4,fineweb",
    "--near_duplicates 0.8",
    "--boilerplate 10",
    "--redact email,phone,iban,dni,ip",
    "--decontaminate tasks.jsonl",
)
COUNTING = "--boilerplate 10: counting"
REPETITIONS = 5
_TASKS = "tasks.jsonl"
_NUM_ITEMS = 5_000


@dataclass(frozen=True)
class CleaningRun:
    """One pass over the documents: CPU seconds, documents dropped by reason, and changes by kind."""

    cpu_seconds: float
    dropped: dict[str, int]
    edits: dict[str, int]


@dataclass(frozen=True)
class SwitchSummary:
    """One switch over its repetitions; ``megabytes_per_second`` are of UTF-8 and CPU seconds."""

    megabytes_per_second: Spread
    num_dropped: int
    num_edits: int


@dataclass(frozen=True)
class CleaningSummary:
    """All switches on the same documents."""

    num_documents: int
    num_bytes: int
    switches: dict[str, SwitchSummary]


def measure(work: Path) -> Report:
    """Clean the same documents with each switch in this process, after its models are loaded.

    Args:
        work: a folder for the items of the tasks.
    """
    with real_data.chats().open("rb") as lines:
        (work / _TASKS).write_bytes(b"".join(islice(lines, _NUM_ITEMS)))
    documents = list(cut_documents(whole_documents(), 1))
    num_bytes = sum(len(document.encode()) for document in documents)
    systems = {switch: partial(_run_once, _open(switch, documents, work), documents) for switch in SWITCHES}
    systems[COUNTING] = partial(_count_lines, documents)
    runs = interleave(systems, dict.fromkeys(systems, REPETITIONS), "cleaning")
    summaries = {switch: _summarize(of_switch, num_bytes) for switch, of_switch in runs.items()}
    settings = {
        "documents": f"Shakespeare's works and the Spanish Bible, in documents of {DOCUMENT_CHARACTERS} characters",
        "tasks": f"{_NUM_ITEMS:,} chats, each an item",
        "time": "CPU seconds of one process, without reading and encoding",
        "repetitions": REPETITIONS,
    }
    commands = {switch: f"python tokenize_dataset.py {switch}" for switch in SWITCHES}
    return Report("cleaning", settings, commands, runs, CleaningSummary(len(documents), num_bytes, summaries))


def table(report: Report) -> Table:
    """Return a table with a line for each switch."""
    summary: CleaningSummary = report.summary
    title = f"Cleaning of {summary.num_documents:,} documents, {summary.num_bytes / 1e6:.1f} MB: MB/s a core, medians"
    columns = ("MB/s", "lowest–highest", "dropped", "edits")
    shown = Table("switch", *columns, title=title, title_justify="left", box=box.SIMPLE)
    for column in shown.columns[1:]:
        column.justify = "right"
    for switch, of_switch in summary.switches.items():
        speed = of_switch.megabytes_per_second
        shown.add_row(
            switch,
            f"{speed.median:.1f}",
            f"{speed.lowest:.1f}–{speed.highest:.1f}",
            f"{of_switch.num_dropped:,}",
            f"{of_switch.num_edits:,}",
        )
    return shown


def _open(switch: str, documents: Sequence[str], work: Path) -> Cleaner:
    needed = ["--dataset", "texts.jsonl", "--tokenizer_name", "tokenizer", "--output_dir", "tokens"]
    given = [str(work / _TASKS) if word == _TASKS else word for word in switch.split()]
    cleaner = open_cleaner(parse_arguments(TokenizeArguments, [*needed, *given]), ["text"], "text")
    step = cleaner.steps.get("boilerplate")
    if isinstance(step, Boilerplate):  # which a run gives the lines once it has counted them
        repeated = [line for line, count in _documents_by_line(documents).items() if count >= step.num_documents]
        step = replace(step, hashes=np.array(sorted(repeated), dtype=np.uint64))
        return replace(cleaner, steps={**cleaner.steps, "boilerplate": step})
    return cleaner


def _documents_by_line(documents: Sequence[str]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for document in documents:
        counts.update({hashed for _, hashed in hash_lines(document.split("\n"))})
    return counts


def _count_lines(documents: Sequence[str]) -> CleaningRun:
    started = time.process_time()
    _documents_by_line(documents)
    return CleaningRun(time.process_time() - started, {}, {})


def _run_once(cleaner: Cleaner, documents: Sequence[str]) -> CleaningRun:
    dropped: Counter[str] = Counter()
    edits: Counter[str] = Counter()
    started = time.process_time()
    for document in documents:
        result = cleaner.clean(document)
        if isinstance(result, Dropped):
            dropped[result.reason] += 1
        else:
            edits.update(result.edits)
    return CleaningRun(time.process_time() - started, dict(dropped), dict(edits))


def _summarize(runs: Sequence[CleaningRun], num_bytes: int) -> SwitchSummary:
    return SwitchSummary(
        megabytes_per_second=spread([num_bytes / 1e6 / run.cpu_seconds for run in runs]),
        num_dropped=sum(runs[0].dropped.values()),
        num_edits=sum(runs[0].edits.values()),
    )
