"""Print what was traced: a table of documents, or of steps, and lines on checkpoints."""

import os
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabric_train.cli.output import open_console
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.trace.document_steps import DocumentRead, DocumentSteps, IndexedDocument
from fabric_train.trace.step_documents import DocumentInStep, StepDocuments

_WIDTH_OF_FILES = 1000  # a line of a file or pipe is not broken


def print_step(listed: StepDocuments) -> None:
    """Print the documents of a step."""
    console = _console()
    taken = "" if listed.is_taken else ", which no checkpoint has yet"
    ranks = f"{listed.num_ranks} rank" + ("s" if listed.num_ranks > 1 else "")
    _line(console, f"step {listed.step:,} of {_short(listed.run)}{taken}: epoch {listed.epoch}, {listed.num_rows} rows")
    _line(console, f"{ranks}, as {_short(listed.checkpoint)} says")
    table = _table(("rank", "row", "source", "document", "tokens", "first words"), numbers=("tokens",))
    for one in listed.documents:
        ranks = str(one.ranks[0]) if len(one.ranks) == 1 else f"{one.ranks[0]}-{one.ranks[-1]}"
        cells = (ranks, f"{one.dataset}:{one.row}", one.source or "", _place(one), f"{one.tokens:,}", one.text)
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console.print(table)


def _place(one: DocumentInStep) -> str:
    if one.file is None:
        return "not known: no document index"
    return f"{one.file}:{one.line}" + (f", from token {one.first_token:,}" if one.first_token else "")


def print_document(found: DocumentSteps) -> None:
    """Print where a document is, the steps that read it, and the checkpoints with and without it."""
    console = _console()
    for one in found.found:
        _line(console, _describe(one))
    if found.read:
        _line(console, f"read by {_steps(found.read)}, up to step {found.num_done:,}, the newest checkpoint:")
        console.print(_table_of(found.read))
    else:
        _line(console, f"read by no step up to {found.num_done:,}, the newest checkpoint")
    if found.to_come:
        _line(console, f"will be read by {_steps(found.to_come)} if the run goes on:")
        console.print(_table_of(found.to_come))
    for checkpoint in found.checkpoints if found.read else []:
        _line(console, f"has read it       {_short(checkpoint)}")
    none = "none is left: start from the weights that the first run began with"
    _line(console, f"newest without it {_short(found.last_without) if found.last_without else none}")
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)


def _describe(one: IndexedDocument) -> str:
    placed = sum(row.tokens - row.repeated for row in one.rows)
    copies = "" if one.copies == 1 else f", {one.copies} times"
    whole = one.tokens * one.copies
    rows = f"{placed:,} of {whole:,} tokens in {len(one.rows)} row{'' if len(one.rows) == 1 else 's'}"
    trained = ", which is not trained on" if one.split != "train" else ""
    where = f"{one.dataset}, {one.split} split{trained}{copies}: {rows}" if one.rows else f"{one.dataset}: in no row"
    return f"{one.source}: {one.file}:{one.line}, {one.tokens:,} tokens, {one.bytes:,} bytes; {where}"


def _steps(reads: list[DocumentRead]) -> str:
    number = len({read.step for read in reads})
    return f"{number:,} step" + ("" if number == 1 else "s")


def _table_of(reads: list[DocumentRead]) -> Table:
    has_runs = len({read.run for read in reads}) > 1
    table = _table(("step", "epoch", "row", "tokens", *["run"] * has_runs), numbers=("step", "epoch", "tokens"))
    for read in reads:
        cells = [f"{read.step:,}", f"{read.epoch}", f"{read.dataset}:{read.row}", f"{read.tokens:,}"]
        table.add_row(*(Text(visible(cell)) for cell in (*cells, *[_short(read.run)] * has_runs)))
    return table


def _table(columns: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold", header_style="dim")
    return table


def _short(path: str) -> str:
    """Return a path relative to the current folder if it is in it."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _console() -> Console:
    return open_console() if sys.stdout.isatty() else open_console(width=_WIDTH_OF_FILES)


def _line(console: Console, text: str) -> None:
    console.print(Text(visible(text)), soft_wrap=True)
