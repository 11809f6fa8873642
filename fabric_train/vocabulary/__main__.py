# PYTHON_ARGCOMPLETE_OK
"""Measure tokenizers, or extend a vocabulary:  fabric-train vocabulary report|extend"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fabric_train.cli.argument_types import NonNegativeInt64, PositiveInt, given_twice, parse_size
from fabric_train.cli.commands import program_name
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.help import complete_choice, print_version
from fabric_train.cli.output import open_console
from fabric_train.cli.parser import parse_arguments


def _faults_of_texts(texts: list[str] | None, max_bytes: str) -> list[str]:
    """Return what is wrong with ``--texts`` and ``--max_bytes``."""
    faults = []
    if texts is not None and not texts:
        faults.append("--texts is empty; give a text such as ca=corpus/ca")
    if parse_size(max_bytes) is None:
        faults.append(f"--max_bytes: expected a size such as 100MB or 1GB, got {max_bytes!r}")
    return faults


def _faults_of_output(option: str, file: str | None) -> list[str]:
    """Return what is wrong with a file to write."""
    if file is None:
        return []
    folder = os.path.dirname(file) or "."
    if os.path.isdir(file) or not os.path.isdir(folder):
        return [f"{option} {file}: expected a file in an existing folder"]
    return []


@dataclass(frozen=True)
class VocabularyReportArguments:
    """Measure how many tokens each tokenizer needs for the words of each language, and recommend what to do

    PROGRAM --tokenizer HuggingFaceTB/SmolLM2-135M --texts ca=corpus/ca.jsonl en=corpus/en.jsonl
    PROGRAM --tokenizer models/8b models/8b-ca --texts ca=corpus/ca/ es=corpus/es/ --picture tokens.png
    PROGRAM --tokenizer A B C --texts ca=ca.parquet --text_column content --json tokens.json
    """

    tokenizer: list[str]
    """Tokenizers: hub names, folders, or tokenizer.model files. The first one is the reference for the others."""
    texts: list[str]
    """Texts by language: ca=PATH, where PATH is any text source that fabric-train tokenize reads."""
    text_column: str = "text"
    """Column that holds the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts; for
    example, 'moves: ' joins them with a space.
    """
    max_bytes: str = "20MB"
    """Read only about this much of a larger text, spread over the entire text."""
    seed: NonNegativeInt64 = 0
    """Seed for choosing what to read of a larger text, and for the bootstrap intervals."""
    json: str | None = None
    """Also write all results to this file as JSON."""
    picture: str | None = None
    """Also plot the tokens per word into this PNG file."""

    def faults(self) -> list[str]:
        """Return names that are missing or given twice, and files that cannot be written."""
        faults = []
        if not self.tokenizer:
            faults.append("--tokenizer is empty; give one or more tokenizers")
        faults += [f"--tokenizer: {fault}" for _, fault in given_twice(self.tokenizer)]
        faults += _faults_of_texts(self.texts, self.max_bytes)
        if self.picture is not None and not self.picture.endswith(".png"):
            faults.append(f"--picture {self.picture}: expected a file name that ends in .png")
        faults += _faults_of_output("--json", self.json)
        faults += _faults_of_output("--picture", self.picture)
        return faults


@dataclass(frozen=True)
class VocabularyExtendArguments:
    """Add tokens to the vocabulary of a model: its tokenizer, its embedding and its head

    PROGRAM --model HuggingFaceTB/SmolLM2-135M --texts ca=corpus/ca.jsonl --num_tokens 16000 --output_dir models/ca
    PROGRAM --model models/8b --texts ca=ca/ va=va/ --num_tokens 16000 --output_dir models/8b-ca --plan true
    PROGRAM --model models/8b --special_tokens markers.txt --output_dir models/8b-markers
    """

    model: str
    """Model and tokenizer: a hub name, or a Hugging Face folder with safetensors."""
    output_dir: str
    """Model folder to write; must not exist yet."""
    texts: list[str] | None = None
    """Texts by language to learn tokens from: ca=PATH, where PATH is any text source that fabric-train tokenize reads.
    A tenth of the documents is held out to measure how many tokens the new vocabulary saves.
    """
    num_tokens: PositiveInt | None = None
    """Number of tokens to learn from --texts."""
    tokens: str | None = None
    """File with additional tokens, one per line. This text always becomes a single token."""
    special_tokens: str | None = None
    """File with additional special tokens, one per line, such as <|turn|>. They are left out of generated text."""
    init: Literal["mean", "normal"] = "mean"
    """Initialization of the new rows of embedding and head: mean averages the rows of the pieces that a token replaces;
    normal draws from the normal distribution with the mean and covariance of all old rows.
    """
    plan: bool = False
    """Learn the tokens and print their savings and costs, but write nothing."""
    text_column: str = "text"
    """Column that holds the text in csv, json, jsonl, parquet and datasets. NAME:SEPARATOR joins lists of texts; for
    example, 'moves: ' joins them with a space.
    """
    max_bytes: str = "500MB"
    """Read only about this much of a larger text, spread over the entire text."""
    max_shard_size: str = "5GB"
    """Maximum size of a safetensors file."""
    seed: NonNegativeInt64 = 0
    """Seed for choosing what to read of a larger text, and for --init normal."""

    def faults(self) -> list[str]:
        """Return what leaves nothing to add, and contradictions."""
        faults = _faults_of_texts(self.texts, self.max_bytes)
        if (self.texts is None) != (self.num_tokens is None):
            faults.append("--texts and --num_tokens need each other; give both, or neither")
        token_sources = (self.texts, self.num_tokens, self.tokens, self.special_tokens)
        if all(source is None for source in token_sources):
            faults.append("no tokens to add; give --texts with --num_tokens, --tokens or --special_tokens")
        if parse_size(self.max_shard_size) is None:
            faults.append(f"--max_shard_size: expected a size such as 5GB or 500MB, got {self.max_shard_size!r}")
        return faults


COMMANDS: dict[str, type] = {"report": VocabularyReportArguments, "extend": VocabularyExtendArguments}


def main(argv: list[str] | None = None) -> None:
    """Run the command that the first word names."""
    words = sys.argv[1:] if argv is None else argv
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may follow the words on its line
        line = os.environ["COMP_LINE"]
        words = [word for word in line.split() if word in COMMANDS and f" {word} " in line]
        if not words:
            complete_choice("command", COMMANDS)
    command = words[0] if words else "--help"
    if command == "--version":
        print_version()
        return
    if command in ("-h", "--help"):
        print(f"usage: {program_name()} {'|'.join(COMMANDS)} [--argument value ...]")
        print(f"{program_name()} report --help shows the arguments of one of them")
        return
    if command not in COMMANDS:
        raise InputError(f"{command}: no such command; write {' or '.join(COMMANDS)} after {program_name()}")
    arguments: object = parse_arguments(COMMANDS[command], words[1:], program=f"{program_name()} {command}")
    if isinstance(arguments, VocabularyReportArguments):
        _report(arguments)
    elif isinstance(arguments, VocabularyExtendArguments):
        from fabric_train.vocabulary.extend import extend  # slow

        extend(arguments)


def _report(arguments: VocabularyReportArguments) -> None:
    """Measure the tokenizers, print a table and the recommendation, and write the requested files."""
    from fabric_train.files.requirements import check_file_to_write
    from fabric_train.vocabulary import report  # slow, like the others
    from fabric_train.vocabulary.words import read_texts

    if arguments.json is not None:
        check_file_to_write(Path(arguments.json), "--json")
    if arguments.picture is not None:
        check_file_to_write(Path(arguments.picture), "--picture")
    texts = read_texts(arguments.texts, arguments.text_column, arguments.max_bytes, arguments.seed)
    figures = report.measure(texts, arguments.tokenizer, arguments.seed)
    console = open_console()
    report.print_table(figures, console)
    notes = [text.note for text in texts if text.note]
    lines = [f"note: {note}" for note in notes]
    lines += ["", *report.recommend(figures), f"({report.thresholds()})"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if arguments.json is not None:
        report.write_json(figures, notes, Path(arguments.json))
    if arguments.picture is not None:
        report.draw(figures, Path(arguments.picture))


if __name__ == "__main__":
    run_program(main)
