# PYTHON_ARGCOMPLETE_OK
"""Show what is in a token dataset and what is wrong with it: ``python -m fabric_train.tokenization.inspect DIR``."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from arguments import InspectArguments, parse
from fabric_train.cli.errors import FAILURE, run_program
from fabric_train.files.regular_file import open_to_write
from fabric_train.tokenization.inspect.page import to_html
from fabric_train.tokenization.inspect.report import DatasetReport, make_report
from fabric_train.tokenization.inspect.terminal import print_report


def main(argv: list[str] | None = None) -> None:
    """Print the report, and write it as an HTML page if ``--html`` is given.

    Raises:
        InputError: the folder is not a token dataset, is damaged, or lacks the requested split or rows.
        SystemExit: the report has problems.
    """
    arguments = parse(InspectArguments, argv)
    report = _examine(arguments)
    print_report(report, Console())
    if arguments.html is not None:
        with open_to_write(Path(arguments.html), "w") as page:
            page.write(to_html(report))
        print(f"written {arguments.html}", file=sys.stderr)
    if report.problems:
        sys.exit(FAILURE)


def _examine(arguments: InspectArguments) -> DatasetReport:
    folder = Path(arguments.dataset_dir).expanduser()
    rows = range(arguments.start, arguments.start + arguments.rows)
    console = Console(stderr=True)
    columns = (TextColumn("reading rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("")
        return make_report(
            folder, arguments.split, rows, lambda done, total: progress.update(task, completed=done, total=total)
        )


if __name__ == "__main__":
    run_program(main)
