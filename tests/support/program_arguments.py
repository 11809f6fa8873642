"""The dataclass of each program's arguments, by the words after ``python`` that start it."""

from typing import Any

from fabric_train.all_arguments import ALL_ARGUMENTS
from fabric_train.cli.commands import PROGRAMS, script_of


def words_of_program(name: str) -> str:
    """Return the words after ``python`` for ``vocabulary report``: ``-m fabric_train.vocabulary report``."""
    program, *subcommand = name.split()
    start = script_of(program) or f"-m {PROGRAMS[program]}"
    return " ".join([start, *subcommand])


PROGRAM_ARGUMENTS: dict[str, Any] = {words_of_program(name): arguments for name, arguments in ALL_ARGUMENTS.items()}
