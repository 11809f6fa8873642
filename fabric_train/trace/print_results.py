"""Print the documents of a step, or the steps and checkpoints that read a document."""

import os
import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fabric_train.cli.argument_types import counted
from fabric_train.cli.output import open_console, visible
from fabric_train.trace.documents import (
    DocumentInStep,
    DocumentRead,
    DocumentSteps,
    IndexedDocument,
    StepDocuments,
)

_FILE_WIDTH = 1000  # lines in a file or pipe are not wrapped


def print_step(step_documents: StepDocuments) -> None:
    """Print the documents of a step by rank and row."""
    console = _open_console()
    run = _shorten_path(step_documents.run)
    checkpoint = _shorten_path(step_documents.checkpoint)
    note = "" if step_documents.is_taken else ", which no checkpoint has yet"
    position = f"epoch {step_documents.epoch}, {step_documents.num_rows} rows"
    _print_line(console, f"step {step_documents.step:,} of {run}{note}: {position}")
    _print_line(console, f"{counted(step_documents.num_ranks, 'rank')}, according to {checkpoint}")

    table = _create_table(("rank", "row", "source", "document", "tokens", "first words"), right_aligned=("tokens",))
    for document in step_documents.documents:
        ranks = str(document.ranks[0])
        if len(document.ranks) > 1:
            ranks += f"-{document.ranks[-1]}"
        row = f"{document.dataset}:{document.row}"
        source = document.source or ""
        _add_row(table, [ranks, row, source, _describe_origin(document), f"{document.tokens:,}", document.text])
    console.print(table)


def _describe_origin(document: DocumentInStep) -> str:
    if document.file is None:
        return "unknown: no document index"
    origin = f"{document.file}:{document.line}"
    if document.first_token:
        origin += f", from token {document.first_token:,}"
    return origin


def print_document(steps: DocumentSteps) -> None:
    """Print where a document is, the steps that read it, and the checkpoints with and without it."""
    console = _open_console()
    for document in steps.found:
        _print_line(console, _describe_document(document))

    # steps
    if steps.read:
        num_steps = _count_steps(steps.read)
        _print_line(console, f"read by {num_steps}, up to step {steps.num_done:,}, the newest checkpoint:")
        console.print(_create_table_of_reads(steps.read))
    else:
        _print_line(console, f"read by no step up to {steps.num_done:,}, the newest checkpoint")
    if steps.to_come:
        _print_line(console, f"will be read by {_count_steps(steps.to_come)} if the run continues:")
        console.print(_create_table_of_reads(steps.to_come))

    # checkpoints
    if steps.read:
        for checkpoint in steps.checkpoints:
            _print_line(console, f"has read it       {_shorten_path(checkpoint)}")
    if steps.last_without:
        _print_line(console, f"newest without it {_shorten_path(steps.last_without)}")
    else:
        start = "none left; start from the weights that the first run began with"
        _print_line(console, f"newest without it {start}")
    for note in steps.notes:
        print(f"note: {note}", file=sys.stderr)


def _describe_document(document: IndexedDocument) -> str:
    """Return a line about a document in a split of a token dataset: its origin, size and rows."""
    if document.rows:
        training_note = "" if document.split == "train" else ", which is not used for training"
        copies = "" if document.copies == 1 else f", {document.copies} times"
        num_in_rows = sum(row.tokens - row.repeated for row in document.rows)
        num_tokens = document.tokens * document.copies
        rows = f"{num_in_rows:,} of {num_tokens:,} tokens in {counted(len(document.rows), 'row')}"
        location = f"{document.dataset}, {document.split} split{training_note}{copies}: {rows}"
    else:
        location = f"{document.dataset}: in no row"
    origin = f"{document.source}: {document.file}:{document.line}"
    return f"{origin}, {document.tokens:,} tokens, {document.bytes:,} bytes; {location}"


def _count_steps(reads: list[DocumentRead]) -> str:
    return counted(len({read.step for read in reads}), "step")


def _create_table_of_reads(reads: list[DocumentRead]) -> Table:
    """Return a table of the steps that read a document, with a column for the run if there are several runs."""
    columns = ["step", "epoch", "row", "tokens"]
    has_several_runs = len({read.run for read in reads}) > 1
    if has_several_runs:
        columns.append("run")
    table = _create_table(columns, right_aligned=("step", "epoch", "tokens"))
    for read in reads:
        cells = [f"{read.step:,}", f"{read.epoch}", f"{read.dataset}:{read.row}", f"{read.tokens:,}"]
        if has_several_runs:
            cells.append(_shorten_path(read.run))
        _add_row(table, cells)
    return table


def _create_table(columns: list[str] | tuple[str, ...], right_aligned: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in columns:
        justify = "right" if name in right_aligned else "left"
        table.add_column(name, justify=justify, overflow="fold", header_style="dim")  # type: ignore[arg-type]
    return table


def _add_row(table: Table, cells: list[str]) -> None:
    # as Text, so that rich reads no markup in names and documents
    table.add_row(*(Text(visible(cell)) for cell in cells))


def _shorten_path(path: str) -> str:
    """Return a path relative to the current folder if it is in that folder, and otherwise unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _open_console() -> Console:
    if sys.stdout.isatty():
        return open_console()
    return open_console(width=_FILE_WIDTH)


def _print_line(console: Console, text: str) -> None:
    console.print(Text(visible(text)), soft_wrap=True)
