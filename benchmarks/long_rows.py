"""Tokenize books to rows of 131,072 and of 2,048 tokens, inspect the rows and read them as training does."""

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.corpora import to_line, whole_documents
from benchmarks.measure import ROOT, Command, run
from benchmarks.report import Report
from fabric_train.data.token_dataset import open_dataset
from fabric_train.sample_data import real_data

LENGTHS = (131_072, 2_048)
PACKINGS = ("concat", "best_fit")
CHARACTERS = 200_000_000
# characters of a book: about 0.2 to 3 million tokens
SHORTEST = 700_000
LONGEST = 10_000_000
_NUM_PROC = 2
_READ_TOKENS = 8 * 1024**2
_SHIFT = 577  # characters between the end of a book and the begin of the next one; a prime number


@dataclass(frozen=True)
class LongRowsRun:
    """A token dataset of books. CPU seconds are user and system time of a command with all its processes.

    ``read_cpu_seconds`` is for reading ``_READ_TOKENS`` as batches of one row. ``page_bytes`` is the inspector's page
    with three rows.
    """

    cpu_seconds: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None
    rows: int
    padding_share: float
    inspect_cpu_seconds: float
    inspect_peak_rss_bytes: int
    page_bytes: int
    read_cpu_seconds: float


@dataclass(frozen=True)
class LongRowsSummary:
    """The corpus, and how much more CPU time the longer rows take, by packing."""

    books: int
    bytes: int
    tokens: int
    cpu_ratios: dict[str, float]


def measure(work: Path) -> Report:
    """Tokenize the same books with each row length and packing.

    Args:
        work: folder for the files, relative to the project's root.

    Raises:
        ChildProcessError: a program failed.
    """
    file = ROOT / work / "books.jsonl"
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        books = sum(bool(lines.write(to_line(book))) for book in cut_books("\n".join(whole_documents())))
    commands: dict[str, Command] = {}
    runs: dict[str, LongRowsRun] = {}
    tokens = 0
    for length in LENGTHS:
        for packing in PACKINGS:
            name = f"{packing}, {length:,}"
            folder = work / f"{packing}-{length}"
            print(f"long_rows: {name}", flush=True)
            commands[name] = tokenize_command(work / "books.jsonl", packing, length, folder)
            commands[f"inspect {name}"] = inspect_command(folder)
            runs[name], tokens = _measure_one(commands[name], commands[f"inspect {name}"], ROOT / folder)
    first, second = LENGTHS
    ratios = {
        packing: runs[f"{packing}, {first:,}"].cpu_seconds / runs[f"{packing}, {second:,}"].cpu_seconds
        for packing in PACKINGS
    }
    settings = {"num_proc": _NUM_PROC, "tokenizer": "Llama-3", "texts": "Shakespeare and the Spanish Bible, repeated"}
    summary = LongRowsSummary(books, file.stat().st_size, tokens, ratios)
    return Report("long_rows", settings, commands, {name: [one] for name, one in runs.items()}, summary)


def table(report: Report) -> Table:
    """Return a line for each row length and packing."""
    summary: LongRowsSummary = report.summary
    title = f"{summary.books} books, {summary.bytes / 1e6:.0f} MB, {summary.tokens / 1e6:.1f} million tokens"
    shown = Table(title=title, box=box.SIMPLE)
    shown.add_column("packing, row")
    for column in ("CPU s", "RSS, GB", "PSS, GB", "rows", "padding", "inspect, s", "page, MB", "read, tok/s"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, (one,) in report.runs.items():
        pss = "" if one.peak_pss_bytes is None else f"{one.peak_pss_bytes / 1e9:.1f}"
        memory = [f"{one.peak_rss_bytes / 1e9:.1f}", pss]
        rows = [f"{one.rows:,}", f"{one.padding_share:.1%}"]
        inspected = [f"{one.inspect_cpu_seconds:.1f}", f"{one.page_bytes / 1e6:.1f}"]
        read = f"{_READ_TOKENS / one.read_cpu_seconds / 1e6:.1f} M"
        shown.add_row(name, f"{one.cpu_seconds:.1f}", *memory, *rows, *inspected, read)
    return shown


def cut_books(text: str, num_characters: int = CHARACTERS) -> Iterator[str]:
    """Yield books of ``SHORTEST`` to ``LONGEST`` characters, short ones more often, in all ``num_characters`` or more.

    A book is consecutive text, which begins again at its end; each begins elsewhere.
    """
    rng = random.Random(0)
    place = 0
    total = 0
    while total < num_characters:
        size = int(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        repeated = text[place:] + text * (size // len(text) + 1)
        yield repeated[:size]
        place = (place + size + _SHIFT) % len(text)
        total += size


def tokenize_command(file: Path, packing: str, length: int, folder: Path) -> Command:
    """Return the command that tokenizes the books into ``folder``."""
    tokenizer = real_data.llama3_tokenizer_model().relative_to(ROOT)
    words = f"python tokenize_dataset.py --dataset {file} --tokenizer_name {tokenizer} --max_length {length}"
    return Command(tuple(f"{words} --packing {packing} --num_proc {_NUM_PROC} --output_dir {folder}".split()))


def inspect_command(folder: Path) -> Command:
    """Return the command that checks a token dataset and writes a page with its first rows."""
    return Command(tuple(f"python -m fabric_train.inspection {folder} --html {folder}.html".split()))


def _measure_one(tokenize: Command, inspect: Command, folder: Path) -> tuple[LongRowsRun, int]:
    """Return the figures of a token dataset, and the tokens of its documents."""
    made = run(tokenize)
    seen = run(inspect)
    ledger = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["ledger"]
    splits = [ledger[name] for name in ("train", "validation")]
    rows, padding, in_rows = (
        sum(split[key] for split in splits) for key in ("rows", "tokens_padding", "tokens_in_rows")
    )
    found = LongRowsRun(
        *(made.cpu_seconds, made.peak_rss_bytes, made.peak_pss_bytes),
        *(rows, padding / (padding + in_rows)),
        *(seen.cpu_seconds, seen.peak_rss_bytes),
        folder.with_name(f"{folder.name}.html").stat().st_size,
        _read(folder),
    )
    return found, sum(split["tokens_in"] for split in splits)


def _read(folder: Path) -> float:
    """Return the CPU seconds of this process for reading ``_READ_TOKENS``, one row at a time."""
    rows = open_dataset(str(folder)).train
    started = time.process_time()
    left = _READ_TOKENS
    number = 0
    while left > 0:
        left -= rows.__getitems__([number % len(rows)]).input_ids.numel()
        number += 1
    return time.process_time() - started
