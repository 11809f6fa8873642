# PYTHON_ARGCOMPLETE_OK
"""Translate another program's training file: ``fabric-train translate FILE.yaml --output OUR.yaml``."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.arguments import TrainArguments
from fabric_train.cli.argument_types import POSITIONAL, PositiveInt, counted
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.output import escape_controls
from fabric_train.cli.parser import build_arguments, parse_arguments
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.translate.foreign_file import Program, read_foreign_file
from fabric_train.translate.intervals import translate_intervals
from fabric_train.translate.method import translate_method
from fabric_train.translate.optimization import rows_per_step, translate_optimization
from fabric_train.translate.parallelism import translate_parallelism
from fabric_train.translate.remaining import translate_remaining
from fabric_train.translate.run_length import RunLength, count_rows, length_by_epochs
from fabric_train.translate.tokenizing import tokenize_command, translate_tokenizing
from fabric_train.translate.translation import Translation
from fabric_train.translate.write_config import config_text, set_by_length, train_command


@dataclass(frozen=True)
class TranslateArguments:
    """Translate a training file of axolotl, TRL, LLaMA-Factory or torchtune, and print the tokenize command

    PROGRAM axolotl.yaml --output ours.yaml
    PROGRAM sft.yaml --from trl --output ours.yaml
    PROGRAM axolotl.yaml --train_data_dir data/tokens --devices 8 --output ours.yaml
    """

    file: str = field(metadata=POSITIONAL)
    """The other program's YAML file."""
    output: str
    """Training file to write; must not exist yet."""
    from_: Program | None = None
    """Program that the file belongs to; default: recognized by the setting names."""
    train_data_dir: str | None = None
    """Token dataset written by the printed command. Its number of rows turns shares of steps and fractions of epochs
    into numbers; without it, they are written as formulas in comments.
    """
    devices: PositiveInt | None = None
    """Number of devices of the run, over all machines; determines total_batch_size and the number of steps."""


@dataclass(frozen=True)
class Translated:
    """A translation with the text to write."""

    translation: Translation
    config: str
    """The text of our training file."""
    devices: int | None
    """The number of devices; None if neither the command line nor the file has it."""


def main(argv: list[str] | None = None) -> None:
    """Write the training file and the chat template; print what happened to the settings, and the commands."""
    arguments = parse_arguments(TranslateArguments, argv)
    output = Path(arguments.output).expanduser()
    template_file = output.with_suffix(".chat_template.jinja")
    if os.path.lexists(output):
        raise InputError(f"--output {arguments.output} already exists; give another file")
    if not output.parent.is_dir():
        raise InputError(f"--output {arguments.output}: its folder does not exist; create it")
    translated = translate(arguments, str(template_file))
    template = translated.translation.templates.get("jinja")
    if template is not None:
        if os.path.lexists(template_file):
            raise InputError(f"{template_file} already exists; move it, or give another --output")
        template_file.write_text(template, encoding="utf-8")
    output.write_text(translated.config, encoding="utf-8")
    _print_summary(translated, arguments)


def translate(arguments: TranslateArguments, template_file: str) -> Translated:
    """Translate a file; ``template_file`` is where its chat template will be written, if it has one.

    Raises:
        InputError: the file cannot be read, or is for something that this project does not train.
    """
    file = read_foreign_file(arguments.file, arguments.from_)
    translation = Translation(file)
    devices = arguments.devices
    if devices is None and file.program == "trl":  # a file of accelerate may be merged into it
        num_processes = translation.number("num_processes")
        if num_processes:
            devices = int(num_processes)
            translation.ignore("num_processes")

    # The order matters: later rules read the arguments that earlier ones have set, and the last takes what is left.
    objective = translate_method(translation)
    translate_parallelism(translation)
    translate_optimization(translation, objective, devices)
    translate_intervals(translation)
    translate_tokenizing(translation, objective, arguments.train_data_dir)
    if translation.templates:
        translation.set_tokenizing("chat_template", template_file)
    translate_remaining(translation)
    _compute_by_length(translation, arguments.train_data_dir, devices)
    _check(translation)
    return Translated(translation, config_text(translation, arguments.output, devices), devices)


def _compute_by_length(translation: Translation, folder: str | None, devices: int | None) -> None:
    """Compute values that depend on the number of steps, if max_step or the token dataset ``folder`` gives it."""
    if not translation.by_length:
        return
    max_step = translation.training.get("max_step")
    if max_step is not None:
        set_by_length(translation, RunLength(max_step.value, f"{max_step.value:,} steps"))
        return
    if folder is None:
        return
    if devices is None:
        names = ", ".join(translation.by_length)
        raise InputError(
            f"--train_data_dir: the number of steps depends on the number of devices; give --devices to compute {names}"
        )
    num_epochs = translation.number("num_epochs", "num_train_epochs", "epochs")
    if num_epochs is None:
        num_epochs = float(translation.training["number_epochs"].value)
    length = length_by_epochs(count_rows(folder), rows_per_step(translation, devices), num_epochs)
    set_by_length(translation, length)


def _check(translation: Translation) -> None:
    """Raise an InputError if our programs would refuse the values."""
    path = translation.file.path
    training_values = {name: setting.value for name, setting in translation.training.items()}
    tokenizing_values = {name: setting.value for name, setting in translation.tokenizing.items()}
    try:
        build_arguments(TrainArguments, training_values)
        if tokenizing_values:
            build_arguments(TokenizeArguments, tokenizing_values)
    except InputError as error:
        raise InputError(*(f"{path}: the translation is not valid: {fault}" for fault in error.faults)) from None


def _print_summary(translated: Translated, arguments: TranslateArguments) -> None:
    """Print how many settings have which outcome, the notes, and the commands that tokenize and train."""
    translation = translated.translation
    file = translation.file
    counts = Counter(translation.outcomes.values())
    print(f"{file.path} is a {file.program} file with {counted(len(file.settings), 'setting')}:")
    print(f"  {counts['training']:>4}  are training arguments, written to {arguments.output}")
    print(f"  {counts['tokenizing']:>4}  are tokenization arguments")
    print(f"  {counts['no counterpart']:>4}  have no counterpart (comments at the end of {arguments.output})")
    print(f"  {counts['off']:>4}  are empty, turned off, or always on in Fabric Train")
    if translation.by_length:
        names = ", ".join(translation.by_length)
        print(f"{names} depend on the number of steps; translate again with --train_data_dir and --devices")
    for note in translation.notes:
        print(escape_controls(f"note: {note}"))
    command = tokenize_command(translation)
    if command:
        print(escape_controls(f"tokenize  {command}"))
    print(f"train     {train_command(arguments.output, translated.devices)}")


if __name__ == "__main__":
    run_program(main)
