"""Measure the memory that ``tokenize_dataset.py`` needs for a large jsonl file, over all its processes."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.corpora import DOCUMENT_CHARACTERS, cut_documents, to_line, whole_documents
from benchmarks.measure import ROOT, run
from benchmarks.report import Report
from benchmarks.tokenization_systems import MAX_LENGTH, NUM_PROC, OURS, our_command
from sample_data import real_data

JSONL_BYTES = 2_000_000_000


@dataclass(frozen=True)
class MemoryRun:
    """The run; ``tokens_per_second`` is over the time of the whole command."""

    seconds: float
    tokens_per_second: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None


@dataclass(frozen=True)
class MemorySummary:
    """What was tokenized, and the run."""

    jsonl_bytes: int
    num_documents: int
    num_tokens: int
    run: MemoryRun


def measure(work: Path) -> Report:
    """Measure one run.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: it failed.
    """
    documents, target = work / "documents.jsonl", work / OURS
    print(f"memory: writing {JSONL_BYTES / 1e9:.1f} GB of jsonl", flush=True)
    _write(ROOT / documents, cut_documents(whole_documents()))
    command = our_command(documents, real_data.llama3_tokenizer_model().relative_to(ROOT), target)
    print("memory: tokenizing it", flush=True)
    measured = run(command)
    ledger = json.loads((ROOT / target / "manifest.json").read_text())["ledger"]
    num_tokens = ledger["train"]["tokens_in"]
    once = MemoryRun(
        seconds=measured.seconds,
        tokens_per_second=num_tokens / measured.seconds,
        peak_rss_bytes=measured.peak_rss_bytes,
        peak_pss_bytes=measured.peak_pss_bytes,
    )
    summary = MemorySummary((ROOT / documents).stat().st_size, ledger["documents_read"], num_tokens, once)
    settings = {
        "num_proc": NUM_PROC,
        "max_length": MAX_LENGTH,
        "tokenizer": "Llama-3",
        "text": "Shakespeare's works and the Spanish Bible, joined, again and again, in documents of "
        f"{DOCUMENT_CHARACTERS} characters",
    }
    return Report("memory", settings, {OURS: command}, {OURS: [once]}, summary)


def table(report: Report) -> Table:
    """Return a table of the run."""
    summary: MemorySummary = report.summary
    title = (
        f"Memory: {summary.jsonl_bytes / 1e9:.2f} GB of jsonl, {summary.num_documents:,} documents, "
        f"{summary.num_tokens:,} tokens, {NUM_PROC} processes"
    )
    columns = ("system", "seconds", "tokens/s", "RSS, MB", "PSS, MB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    once = summary.run
    pss = f"{once.peak_pss_bytes / 1e6:,.0f}" if once.peak_pss_bytes else "unknown"
    speed = f"{once.tokens_per_second:,.0f}"
    shown.add_row(OURS, f"{once.seconds:.1f}", speed, f"{once.peak_rss_bytes / 1e6:,.0f}", pss)
    return shown


def _write(file: Path, documents: Iterable[str]) -> None:
    """Write documents until the file has ``JSONL_BYTES``."""
    with file.open("wb") as lines:
        for document in documents:
            lines.write(to_line(document).encode())
            if lines.tell() >= JSONL_BYTES:
                return
