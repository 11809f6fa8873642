# PYTHON_ARGCOMPLETE_OK
"""Check this machine for what usually stops or slows a run: ``python -m fabric_train.doctor [--json]``."""

import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from fabric_train.cli.errors import FAILURE, run_program
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.preflight.node_checks import NodeCheck, check_node


@dataclass(frozen=True)
class DoctorArguments:
    """Check this machine for what stops or slows runs; the exit code is 0, or 1 if something would stop one

    PROGRAM
    PROGRAM --output_dir /scratch/runs
    PROGRAM --json
    """

    output_dir: str | None = None
    """Folder that runs will write into, to be checked as well; it need not exist yet."""
    json: bool = False
    """Print the results as JSON."""


_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red"}


def main(argv: list[str] | None = None) -> None:
    """Print one line for each check, or all of them as JSON.

    Raises:
        SystemExit: a fault would stop a run, or leave its GPUs unused.
    """
    arguments = parse_arguments(DoctorArguments, argv)
    checks = list(check_node(arguments.output_dir))
    counts = Counter[str](check.level for check in checks)
    console = open_console()
    if arguments.json:
        content = {"faults": counts["fault"], "warnings": counts["warning"]}
        print(json.dumps({**content, "checks": [dataclasses.asdict(check) for check in checks]}, indent=2))
    elif console.is_terminal:
        console.print(_table(checks))
        console.print(_summary(counts), soft_wrap=True, highlight=False)
    else:  # for logs and grep: every line begins with its level and is whole
        for check in checks:
            print(f"{check.level:<8} {check.name}: {check.found}" + (f"; {check.fix}" if check.fix else ""))
        print(f"{next(level for level in ('fault', 'warning', 'ok') if counts[level]):<8} {_summary(counts)}")
    if counts["fault"]:
        sys.exit(FAILURE)


def _table(checks: list[NodeCheck]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True, header_style="dim")
    table.add_column("found", overflow="fold", header_style="dim")
    table.add_column("how to fix it", overflow="fold", header_style="dim")
    for check in checks:
        table.add_row(Text(check.level, _STYLES[check.level]), *map(Text, (check.name, check.found, check.fix)))
    return table


def _summary(counts: Counter[str]) -> str:
    if not counts["fault"] and not counts["warning"]:
        return f"{counts.total()} checks, nothing wrong"
    return f"{counts.total()} checks: {counts['fault']} would stop a run, {counts['warning']} might slow or stop one"


if __name__ == "__main__":
    run_program(main)
