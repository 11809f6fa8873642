# PYTHON_ARGCOMPLETE_OK
"""Show what is in a token dataset and what is wrong with it: ``python -m fabric_train.tokenization.inspect DIR``."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from arguments import InspectArguments, parse
from fabric_train.cli.errors import FAILURE, InputError, run_program
from fabric_train.cli.output import open_console
from fabric_train.files.regular_file import open_to_write
from fabric_train.tokenization.cleaning.language import load_identifier
from fabric_train.tokenization.inspect.comparison import Comparison, amount_of_work, compare, open_corpora
from fabric_train.tokenization.inspect.page import comparison_to_html, report_to_html
from fabric_train.tokenization.inspect.report import DatasetReport, make_report
from fabric_train.tokenization.inspect.terminal import print_comparison, print_report


def main(argv: list[str] | None = None) -> None:
    """Print the report, and write it as an HTML page if ``--html`` is given; with ``--compare``, the comparison.

    Raises:
        InputError: a folder is not a token dataset, is damaged, or lacks the requested split or rows.
        SystemExit: the report has problems.
    """
    arguments = parse(InspectArguments, argv)
    if arguments.compare is not None:
        comparison = _compare(arguments.compare, arguments.split)
        print_comparison(comparison, open_console())
        _write_page(arguments.html, comparison_to_html(comparison))
        return
    report = _examine(arguments)
    print_report(report, open_console())
    _write_page(arguments.html, report_to_html(report))
    if report.problems:
        sys.exit(FAILURE)


def _write_page(file: str | None, page: str) -> None:
    if file is not None:
        with open_to_write(Path(file), "w") as opened:
            opened.write(page)
        print(f"written {file}", file=sys.stderr)


def _examine(arguments: InspectArguments) -> DatasetReport:
    assert arguments.dataset_dir is not None
    folder = Path(arguments.dataset_dir).expanduser()
    rows = range(arguments.start, arguments.start + arguments.rows)
    with _progress("reading rows", MofNCompleteColumn(), TimeRemainingColumn()) as (progress, task):
        return make_report(
            folder, arguments.split, rows, lambda done, total: progress.update(task, completed=done, total=total)
        )


def _compare(folders: Sequence[str], split: str) -> Comparison:
    corpora = open_corpora([Path(folder).expanduser() for folder in folders], split)
    no_languages = None
    try:
        load_identifier("this table")
    except InputError as error:  # all the rest can be compared without it
        no_languages = str(error)
    with _progress("comparing", TaskProgressColumn(), TimeRemainingColumn()) as (progress, task):
        progress.update(task, total=amount_of_work(corpora))
        return compare(corpora, no_languages, lambda n: progress.advance(task, n))


@contextmanager
def _progress(what: str, *columns: ProgressColumn) -> Iterator[tuple[Progress, TaskID]]:
    """Show a progress bar with one task on standard error, if that is a terminal."""
    console = open_console(stderr=True)
    bar = Progress(
        TextColumn(what), BarColumn(), *columns, console=console, transient=True, disable=not console.is_terminal
    )
    with bar as progress:
        yield progress, progress.add_task("")


if __name__ == "__main__":
    run_program(main)
