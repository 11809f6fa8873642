# PYTHON_ARGCOMPLETE_OK
"""Write the report of a run, or of several: ``python -m fabric_train.report RUN [RUN …] [--output FILE.html]``."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.cli.argument_types import POSITIONAL, NonNegativeFloat
from fabric_train.cli.errors import InputError, describe_os_error, run_program
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.files.requirements import check_file_to_write
from fabric_train.pages.markdown import library


@dataclass(frozen=True)
class ReportArguments:
    """Write the report of a run as a page without other files, and as Markdown; several runs are compared

    PROGRAM runs/1
    PROGRAM runs/1/best --price_per_hour 2.5
    PROGRAM runs/1 runs/2 runs/3 --output comparison.html
    """

    runs: list[str] = field(metadata=POSITIONAL)
    """Run folders: the --output_dir of training. A copy of a run, an old run or a run in progress works too."""
    output: str | None = None
    """Path of the HTML page; the Markdown version is written next to it, with the suffix .md. Default: RUN/report.html,
    or report.html in the current folder for several runs.
    """
    price_per_hour: NonNegativeFloat | None = None
    """Price of one device for an hour, in any currency; the report then shows the cost."""

    def faults(self) -> list[str]:
        if self.output is not None and not self.output.endswith(".html"):
            return [f"--output {self.output}: expected a file name that ends in .html"]
        return []


def main(argv: list[str] | None = None) -> None:
    """Write the report, and print where it is and the unusual findings."""
    arguments = parse_arguments(ReportArguments, argv)

    console = open_console()
    with console.status("reading and drawing"), ThreadPoolExecutor(1) as pool:
        # the JavaScript of the page takes seconds, as the imports do: both at the same time
        script = pool.submit(library)

        from fabric_train.report.reported_run import open_runs
        from fabric_train.report.write import PAGE, write_report

        runs = open_runs(arguments.runs)
        if arguments.output:
            page = Path(arguments.output)
        elif len(runs) == 1:
            page = runs[0].folder / PAGE
        else:
            page = Path(PAGE)
        check_file_to_write(page, "--output")
        try:
            script.result()
            report = write_report(runs, page, arguments.price_per_hour)
        except OSError as error:
            raise InputError(f"{page}: {describe_os_error(error)}; give another file with --output") from None
    for line in report.lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_program(main)
