"""Measure how ``tokenize_dataset.py`` grows with the text and with the number of files, beside bare gigatoken."""

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table

from benchmarks.corpora import cut_documents, to_line, whole_documents
from benchmarks.measure import ROOT, Command, Measurement, run
from benchmarks.report import Report
from benchmarks.tokenization_systems import GIGATOKEN, MAX_LENGTH, NUM_PROC, OURS, bare_gigatoken_command, our_command
from fabric_train.sample_data import real_data

SIZES = {"9 MB": 9_000_000, "90 MB": 90_000_000, "300 MB": 300_000_000, "2 GB": 2_000_000_000}
NUM_FILES = (1, 1_000, 200_000)
REPETITIONS = 3
_SHORT = 1_500  # characters of the documents in the files


@dataclass(frozen=True)
class GrowthRun:
    """One run; ``tokens_per_second`` is over the time of the whole command."""

    seconds: float
    tokens_per_second: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None


@dataclass(frozen=True)
class GrowthSet:
    """A set of documents, with the best run of each system, and bare gigatoken's seconds over ours."""

    name: str
    num_bytes: int
    num_files: int
    num_documents: int
    num_tokens: int
    best: dict[str, GrowthRun]
    ratio: float | None


@dataclass(frozen=True)
class GrowthSummary:
    """By the size of one file, and by the number of files of the same text."""

    by_size: list[GrowthSet]
    by_files: list[GrowthSet]


def measure(work: Path) -> Report:
    """Measure each set, the systems in turn.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a system failed, or both count different tokens.
    """
    tokenizer = _save_tokenizer(work)
    runs: dict[str, list[GrowthRun]] = {}
    by_size = []
    by_files = []
    for name, num_bytes in SIZES.items():
        file = ROOT / work / "documents.jsonl"
        num_documents = _write(file, cut_documents(whole_documents()), num_bytes)
        by_size.append(_measure_set(name, work, file, 1, num_documents, tokenizer, runs, with_peer=True))
        file.unlink()
    for num_files in NUM_FILES:
        folder = ROOT / work / "documents"
        lines = list(_lines_of(cut_documents(whole_documents(), None, _SHORT), SIZES["300 MB"]))
        _write_files(folder, lines, num_files)
        name = f"300 MB in {num_files:,} files"
        by_files.append(_measure_set(name, work, folder, num_files, len(lines), tokenizer, runs, with_peer=False))
        shutil.rmtree(folder)
    settings = {"num_proc": NUM_PROC, "max_length": MAX_LENGTH, "tokenizer": "Llama-3", "repetitions": REPETITIONS}
    given = work / "documents.jsonl"
    target = work / "rows"
    commands = {
        OURS: our_command(given, tokenizer, target),
        GIGATOKEN: bare_gigatoken_command(given, tokenizer, target),
    }
    return Report("growth", settings, commands, runs, GrowthSummary(by_size, by_files))


def table(report: Report) -> Group:
    """Return a table by size and a table by number of files."""
    summary: GrowthSummary = report.summary
    return Group(
        _table_of("Growth with the text: one jsonl file, the best run of each", summary.by_size),
        _table_of("Growth with the number of files: the same text", summary.by_files),
    )


def _measure_set(
    name: str,
    work: Path,
    given: Path,
    num_files: int,
    num_documents: int,
    tokenizer: Path,
    runs: dict[str, list[GrowthRun]],
    *,
    with_peer: bool,
) -> GrowthSet:
    target = work / "rows"
    dataset = given.relative_to(ROOT)
    commands = {OURS: our_command(dataset, tokenizer, target)}
    if with_peer:
        commands[GIGATOKEN] = bare_gigatoken_command(dataset, tokenizer, target)
    best: dict[str, GrowthRun] = {}
    num_tokens = 0
    for repetition in range(REPETITIONS):
        for system, command in commands.items():
            print(f"growth: {name}, {system}, run {repetition + 1}", flush=True)
            measured, counted = _run_once(system, command, ROOT / target, num_documents)
            if num_tokens not in (0, counted):
                raise ChildProcessError(f"{name}: {system} counts {counted:,} tokens, not {num_tokens:,}")
            num_tokens = counted
            rss = measured.peak_rss_bytes
            pss = measured.peak_pss_bytes
            once = GrowthRun(measured.seconds, num_tokens / measured.seconds, rss, pss)
            runs.setdefault(f"{system}, {name}", []).append(once)
            if system not in best or once.seconds < best[system].seconds:
                best[system] = once
    ratio = best[GIGATOKEN].seconds / best[OURS].seconds if with_peer else None
    num_bytes = sum(file.stat().st_size for file in ([given] if given.is_file() else given.rglob("*.jsonl")))
    return GrowthSet(name, num_bytes, num_files, num_documents, num_tokens, best, ratio)


def _run_once(system: str, command: Command, target: Path, num_documents: int) -> tuple[Measurement, int]:
    """Run a system and return its figures and the tokens with BOS and EOS."""
    shutil.rmtree(target, ignore_errors=True)
    measured = run(command)
    if system == OURS:
        counted = json.loads((target / "manifest.json").read_text())["ledger"]["train"]["tokens_in"]
    else:
        counted = json.loads(measured.output.splitlines()[-1])["tokens"] + 2 * num_documents
    shutil.rmtree(target)
    return measured, counted


def _save_tokenizer(work: Path) -> Path:
    """Write Llama-3's ``tokenizer.json`` and return its folder, relative to the project's root."""
    sample = work / "sample.jsonl"
    target = work / "sample"
    _write(ROOT / sample, cut_documents(whole_documents()), 100_000)
    run(our_command(sample, real_data.llama3_tokenizer_model().relative_to(ROOT), target))
    shutil.move(ROOT / target / "tokenizer", ROOT / work / "tokenizer")
    return work / "tokenizer"


def _lines_of(documents: Iterable[str], num_bytes: int) -> Iterable[bytes]:
    """Yield lines of jsonl until they have ``num_bytes``."""
    total = 0
    for document in documents:
        line = to_line(document).encode()
        yield line
        total += len(line)
        if total >= num_bytes:
            return


def _write(file: Path, documents: Iterable[str], num_bytes: int) -> int:
    """Write documents until the file has ``num_bytes``; return their number."""
    num_documents = 0
    with file.open("wb") as opened:
        for line in _lines_of(documents, num_bytes):
            opened.write(line)
            num_documents += 1
    return num_documents


def _write_files(folder: Path, lines: list[bytes], num_files: int) -> None:
    """Write the lines into files of like numbers of lines, 1,000 files in a folder."""
    left = iter(lines)
    for number in range(num_files):
        file = folder / f"{number // 1000:03d}" / f"{number % 1000:03d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        count = len(lines) * (number + 1) // num_files - len(lines) * number // num_files
        file.write_bytes(b"".join(islice(left, count)))


def _table_of(title: str, sets: list[GrowthSet]) -> Table:
    columns = ("set", "documents", "tokens", "system", "seconds", "MB/s", "gigatoken's s / s", "RSS, MB", "PSS, MB")
    shown = Table(*columns, title=title, title_justify="left", box=box.SIMPLE)
    for column in shown.columns[4:]:
        column.justify = "right"
    for one in sets:
        for system, best in one.best.items():
            ratio = f"{one.ratio:.2f}" if one.ratio is not None and system == OURS else ""
            pss = f"{best.peak_pss_bytes / 1e6:,.0f}" if best.peak_pss_bytes else "unknown"
            shown.add_row(
                *(one.name, f"{one.num_documents:,}", f"{one.num_tokens:,}", system, f"{best.seconds:.1f}"),
                *(f"{one.num_bytes / 1e6 / best.seconds:.0f}", ratio, f"{best.peak_rss_bytes / 1e6:,.0f}", pss),
            )
    return shown
