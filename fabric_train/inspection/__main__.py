# PYTHON_ARGCOMPLETE_OK
"""Show the content of a token dataset and its faults: ``python -m fabric_train.inspection DIR``."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.progress import MofNCompleteColumn, TaskProgressColumn, TimeRemainingColumn

from fabric_train.cleaning.language import load_identifier
from fabric_train.cli.argument_types import POSITIONAL, NonNegativeInt, NonNegativeInt64
from fabric_train.cli.errors import FAILURE, InputError, run_program
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.cli.progress import transient_bar
from fabric_train.files.regular_file import open_to_write
from fabric_train.inspection.comparison import Comparison, amount_of_work, compare, open_corpora
from fabric_train.inspection.rendering import (
    comparison_to_html,
    print_comparison,
    print_report,
    report_to_html,
)
from fabric_train.inspection.report import DatasetReport, make_report


@dataclass(frozen=True)
class InspectArguments:
    """Show and check the contents of a token dataset; exit with code 0, or 1 if there are problems

    PROGRAM data/tokens --html tokens.html
    PROGRAM data/tokens --split validation --rows 10 --start 100
    PROGRAM --compare data/before data/after --html compared.html
    """

    dataset_dir: str | None = field(default=None, metadata=POSITIONAL)
    """Token dataset: a folder written by fabric-train tokenize."""
    compare: list[str] | None = None
    """Compare two token datasets instead of showing one: sources, languages, lengths, tokens per byte, and the words
    that are more frequent in each. Their tokenizers may differ.
    """
    split: Literal["train", "validation"] = "train"
    """Split to show or compare: its document lengths and rows. When showing one dataset, all splits are checked."""
    rows: NonNegativeInt = 3
    """Number of rows to show."""
    start: NonNegativeInt64 = 0
    """First row to show, starting at 0."""
    html: str | None = None
    """Also write the full report to this file as an HTML page."""

    def faults(self) -> list[str]:
        """Return what is wrong with the number of datasets, and an --html that cannot be a file."""
        faults = []
        if self.compare is None and self.dataset_dir is None:
            faults.append("DATASET_DIR is required; give --dataset_dir DIR, or --compare A B")
        if self.compare is not None and self.dataset_dir is not None:
            faults.append(f"--compare takes both token datasets; write --compare {self.dataset_dir} OTHER")
        elif self.compare is not None and len(self.compare) != 2:
            faults.append(f"--compare: expected two token datasets, got {len(self.compare)}")
        if self.compare is not None and self.start:
            faults.append("--compare shows no rows; leave out --start")
        if self.html:
            folder = os.path.dirname(self.html) or "."
            if os.path.isdir(self.html) or not os.path.isdir(folder):
                faults.append(f"--html {self.html}: expected a file in an existing folder, such as page.html")
        return faults


def main(argv: list[str] | None = None) -> None:
    """Print the report, and write it as an HTML page if ``--html`` is given; with ``--compare``, the comparison."""
    arguments = parse_arguments(InspectArguments, argv)
    if arguments.compare is not None:
        comparison = _compare(arguments.compare, arguments.split)
        print_comparison(comparison, open_console())
        if arguments.html is not None:
            _write_page(arguments.html, comparison_to_html(comparison))
        return
    report = _examine(arguments)
    print_report(report, open_console())
    if arguments.html is not None:
        _write_page(arguments.html, report_to_html(report))
    if report.problems:
        sys.exit(FAILURE)


def _write_page(path: str, page: str) -> None:
    with open_to_write(Path(path), "w") as file:
        file.write(page)
    print(f"written {path}", file=sys.stderr)


def _examine(arguments: InspectArguments) -> DatasetReport:
    """Read and check the token dataset, with a progress bar."""
    assert arguments.dataset_dir is not None
    folder = Path(arguments.dataset_dir).expanduser()
    rows = range(arguments.start, arguments.start + arguments.rows)
    with transient_bar("reading rows", MofNCompleteColumn(), TimeRemainingColumn()) as (progress, task):

        def show_progress(num_rows_read: int, num_rows: int) -> None:
            progress.update(task, completed=num_rows_read, total=num_rows)

        return make_report(folder, arguments.split, rows, show_progress)


def _compare(folders: Sequence[str], split: str) -> Comparison:
    """Compare two token datasets, with a progress bar."""
    corpora = open_corpora([Path(folder).expanduser() for folder in folders], split)
    no_languages = None
    try:
        load_identifier("this table")
    except InputError as error:  # everything else can be compared without it
        no_languages = str(error)
    with transient_bar("comparing", TaskProgressColumn(), TimeRemainingColumn()) as (progress, task):
        progress.update(task, total=amount_of_work(corpora))
        return compare(corpora, no_languages, lambda amount: progress.advance(task, amount))


if __name__ == "__main__":
    run_program(main)
