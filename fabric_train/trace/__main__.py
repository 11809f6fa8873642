# PYTHON_ARGCOMPLETE_OK
"""Show which documents a step read, or which steps read a document: ``python -m fabric_train.trace RUN --step N``."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from arguments import TraceArguments, parse
from fabric_train.cli.errors import run_program

if TYPE_CHECKING:
    from fabric_train.trace.documents import DocumentSteps
    from fabric_train.trace.run_history import RunHistory


def main(argv: list[str] | None = None) -> None:
    """Print the documents of a step, or the steps and checkpoints that read a document, or both as JSON."""
    arguments = parse(TraceArguments, argv)

    from fabric_train.trace.documents import list_documents, print_document, print_step  # slow
    from fabric_train.trace.run_history import RunHistory

    history = RunHistory(Path(arguments.run).expanduser(), arguments.train_data_dir)
    if arguments.step is not None:
        listed = list_documents(history, arguments.step, arguments.rank)
        if arguments.json:
            print(json.dumps(dataclasses.asdict(listed), indent=2, ensure_ascii=False))
        else:
            print_step(listed)
        return
    assert arguments.document is not None
    found = _find_steps(history, arguments.document)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False))
    else:
        print_document(found)


def _find_steps(history: "RunHistory", document: str) -> "DocumentSteps":
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from fabric_train.cli.output import open_console
    from fabric_train.trace.documents import find_steps

    console = open_console(stderr=True)
    columns = (TextColumn("searching the index"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        return find_steps(history, document, lambda done, total: progress.update(task, completed=done, total=total))


if __name__ == "__main__":
    run_program(main)
