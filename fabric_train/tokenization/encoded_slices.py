"""Encode one slice of the input (``--shard I/N``) into a folder, which is complete or absent.

It has the shards as a restarted run finds them, so a merge (``merged_slices``) is a run in which every shard is
finished::

    slices/3/config.yaml      the arguments of the task
             slice.json       the hashed files of the input, and the sizes of the shards' files
             3f2a….tokens     a shard, see ``shard_files``; and its other files
"""

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.cli.errors import InputError
from fabric_train.cli.yaml_core import dump
from fabric_train.files.atomic_folder import check_not_taken, complete_folder
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.build import notes_of
from fabric_train.tokenization.encoding import encode_sources
from fabric_train.tokenization.manifest import SourceFile
from fabric_train.tokenization.opened_corpus import open_corpus
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.sharding import InputSlice
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.unfinished import DOWNLOADS, unfinished_folder

if TYPE_CHECKING:
    from arguments import TokenizeArguments

FILE_NAME = "slice.json"
_ARGUMENTS = "config.yaml"
_FORMAT = 1
_OF_EACH_TASK = ("shard", "output_dir", "num_proc")
MAKE_AGAIN = "remove it, and run its task again"
"""How to fix a slice, for error messages."""
FileState = tuple[int, str, int, int, int]
"""What changes with a file of the input: the number of its source, path, bytes, mtime_ns, ctime_ns."""


@dataclass(frozen=True)
class _HashedFile:
    """A file of the input as it was when it was hashed."""

    state: FileState
    hashed: SourceFile


@dataclass(frozen=True)
class _SliceRecord:
    """The content of ``slice.json``.

    Args:
        format: of this file.
        folder: where the task ran; paths in its arguments are relative to it.
        encoder: see ``EncodedSources``.
        settings: see ``OpenedCorpus``.
        files: the files of the input that this task has hashed.
        sizes: bytes of each file of the slice's shards, by name.
    """

    format: int
    folder: str
    encoder: str
    settings: str
    files: list[_HashedFile]
    sizes: dict[str, int]


@dataclass(frozen=True)
class EncodedSlice:
    """A finished slice."""

    folder: Path
    arguments: "TokenizeArguments"
    part: InputSlice
    record: _SliceRecord


@dataclass(frozen=True)
class SliceOutcome:
    """What a task has done: shards, documents, tokens, processes, seconds; lines for the user."""

    num_shards: int
    num_documents: int
    num_tokens: int
    num_proc: int
    seconds: float
    notes: tuple[str, ...]


def is_slice(folder: Path) -> bool:
    """Return whether a folder has a finished slice."""
    return (folder / FILE_NAME).is_file()


def encode_slice(arguments: "TokenizeArguments", check: ParityCheck) -> SliceOutcome:
    """Encode the slice --shard of the input into --output_dir. The folder is complete or absent.

    Args:
        arguments: the command line of ``tokenize_dataset.py``.
        check: compares the encoder's ids with the tokenizer's; it may already be loading the tokenizer.

    Raises:
        InputError: a source, the tokenizer or the output folder cannot be used.
    """
    target, part = Path(arguments.output_dir).expanduser(), _part(arguments)
    check_not_taken(target)
    with unfinished_folder(target) as unfinished, complete_folder(target) as folder:
        corpus = open_corpus(arguments, folder / "tokenizer", unfinished / DOWNLOADS)
        started = time.monotonic()
        encoded = encode_sources(corpus, unfinished, check, part)
        seconds = time.monotonic() - started
        shutil.rmtree(folder / "tokenizer")  # a merge saves it again, and compares the hashes
        keys = {shard.key for shard in encoded.shards}
        own = [file for file in sorted(unfinished.iterdir()) if file.name.partition(".")[0] in keys]
        sizes = {file.name: file.stat().st_size for file in own}
        for file in own:
            _link(file, folder / file.name)
        states = states_of(corpus.sources)
        files = [_HashedFile(states[key], hashed) for key, hashed in encoded.files.items()]
        record = _SliceRecord(_FORMAT, os.getcwd(), encoded.encoder, corpus.settings, files, sizes)
        (folder / _ARGUMENTS).write_text(dump(asdict(arguments)), encoding="utf-8")
        (folder / FILE_NAME).write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
    return SliceOutcome(
        num_shards=len(encoded.shards),
        num_documents=sum(len(record.documents) for record in encoded.records),
        num_tokens=sum(record.num_tokens for record in encoded.records),
        num_proc=encoded.num_proc,
        seconds=seconds,
        notes=tuple(notes_of(corpus, encoded)),
    )


def find_finished_slice(arguments: "TokenizeArguments") -> bool:
    """Return whether --output_dir has the slice of these arguments already.

    Raises:
        InputError: it has a slice of other arguments.
    """
    folder = Path(arguments.output_dir).expanduser()
    if not is_slice(folder):
        return False
    found = open_slice(folder)
    other = [] if found.part == _part(arguments) else [f"--shard {found.arguments.shard}"]
    other += differing_arguments(found.arguments, arguments)
    if other:
        raise InputError(f"{folder} was made with {other[0]}; choose another folder, or remove it")
    return True


def _part(arguments: "TokenizeArguments") -> InputSlice:
    assert arguments.part is not None, "the caller has looked at --shard"
    return InputSlice(*arguments.part)


def _link(file: Path, target: Path) -> None:
    """Give a file a second name, so that a failure after this loses nothing; rename it where links are not possible."""
    try:
        os.link(file, target)
    except OSError:
        file.rename(target)


def states_of(sources: Sequence[Source]) -> dict[tuple[int, int], FileState]:
    """Return the state of each file, by the numbers of source and file."""
    return {
        (number, index): (number, _as_text(file.path), file.size, file.mtime_ns, file.ctime_ns)
        for number, source in enumerate(sources)
        for index, file in enumerate(source.files)
    }


def _as_text(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def open_slice(folder: Path) -> EncodedSlice:
    """Open a slice and check that its files are there.

    Raises:
        InputError: it is damaged, or of another version.
    """
    from arguments import TokenizeArguments, parse

    record = read_json(folder / FILE_NAME, _SliceRecord, MAKE_AGAIN)
    if record.format != _FORMAT:
        raise InputError(f"{folder / FILE_NAME} has format {record.format}, this version reads {_FORMAT}; {MAKE_AGAIN}")
    arguments = parse(TokenizeArguments, ["--config", str(folder / _ARGUMENTS)])
    if arguments.part is None:
        raise InputError(f"{folder / _ARGUMENTS}: damaged (no shard); {MAKE_AGAIN}")
    return EncodedSlice(folder, arguments, InputSlice(*arguments.part), record)


def differing_arguments(ours: "TokenizeArguments", theirs: "TokenizeArguments") -> list[str]:
    """Return those of our arguments that are not theirs, as on the command line."""
    names = [field.name for field in fields(ours) if field.name not in _OF_EACH_TASK]
    return [f"--{name} {getattr(ours, name)}" for name in names if getattr(ours, name) != getattr(theirs, name)]
