# PYTHON_ARGCOMPLETE_OK
"""Measure tokenizers, or extend a vocabulary:  python -m fabric_train.vocabulary report|extend"""

import os
import sys
from pathlib import Path

from fabric_train.cli import fabric_command
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.help import complete_choice, print_version, program_name
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments
from fabric_train.vocabulary.arguments import VocabularyExtendArguments, VocabularyReportArguments

COMMANDS: dict[str, type] = {"report": VocabularyReportArguments, "extend": VocabularyExtendArguments}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the first word names."""
    words = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow
        line = os.environ["COMP_LINE"]
        words = [word for word in line.split() if word in COMMANDS and f" {word} " in line]
        if not words:
            complete_choice("command", COMMANDS)
    command, *rest = words or ["--help"]
    if command == "--version":
        print_version()
        return
    if command in ("-h", "--help"):
        print(f"usage: {program_name()} {'|'.join(COMMANDS)} [--argument value ...]")
        print(f"{program_name()} report --help shows the arguments of one of them")
        return
    if command not in COMMANDS:
        raise InputError(f"{command}: no such command; write {' or '.join(COMMANDS)} after {program_name()}")
    called_as = fabric_command.called_as
    fabric_command.called_as = f"{program_name()} {command}"  # for the help
    try:
        arguments: object = parse_arguments(COMMANDS[command], rest)
    finally:
        fabric_command.called_as = called_as
    if isinstance(arguments, VocabularyReportArguments):
        _report(arguments)
    elif isinstance(arguments, VocabularyExtendArguments):
        from fabric_train.vocabulary.extend import extend  # slow

        extend(arguments)


def _report(arguments: VocabularyReportArguments) -> None:
    from fabric_train.pages.charts import DrawError  # slow, like the others
    from fabric_train.vocabulary import report
    from fabric_train.vocabulary.texts import read_texts

    texts = read_texts(arguments.texts, arguments.text_column, arguments.max_bytes, arguments.seed)
    notes = [text.note for text in texts if text.note]
    measured = report.measure(texts, arguments.tokenizer, arguments.seed)
    console = open_console()
    report.print_table(measured, console)
    lines = [*(f"note: {note}" for note in notes), "", *report.recommend(measured), f"({report.thresholds()})"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if arguments.json is not None:
        report.write_json(measured, notes, Path(arguments.json))
    if arguments.picture is not None:
        try:
            report.draw(measured, Path(arguments.picture))
        except DrawError as error:
            raise InputError(str(error)) from None


if __name__ == "__main__":
    run_program(main)
