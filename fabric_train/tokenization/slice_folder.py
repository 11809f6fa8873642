"""The folder that a task of ``--shard I/N`` writes: one slice of the input, encoded, or with its lines counted.

It has the shards as a restarted run finds them, so a merge is a run in which every shard is finished::

    slices/3/config.yaml      the arguments of the task
             slice.json       the files of the input, and the sizes and hashes of the shards' files
             3f2a….tokens     an encoded shard, see ``shard_files``; and its other files
             77ab….lines      or a shard whose lines are counted, see ``line_counts``
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from fabric_train.cli.errors import InputError
from fabric_train.cli.yaml_core import dump
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.manifest import SourceFile
from fabric_train.tokenization.reading.listing import ListedFile
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shard_files import Shard
from fabric_train.tokenization.sharding import InputSlice

if TYPE_CHECKING:
    from arguments import TokenizeArguments

FILE_NAME = "slice.json"
_ARGUMENTS = "config.yaml"
_FORMAT = 2
_OF_EACH_TASK = ("shard", "output_dir", "num_proc")
MAKE_AGAIN = "remove it, and run its task again"
"""How to fix a slice, for error messages."""
FileState = tuple[int, str, int, int, int]
"""What changes with a file of the input: the number of its source, path, bytes, mtime_ns, ctime_ns."""


@dataclass(frozen=True)
class InputFile:
    """A file of the input as it was when a task looked at it; ``hashed`` is None if lines were counted."""

    state: FileState
    hashed: SourceFile | None


@dataclass(frozen=True)
class SliceRecord:
    """The content of ``slice.json``.

    Args:
        encoder: see ``EncodedSources``; empty if lines were counted.
        settings: what decides the content of the shards: see ``OpenedCorpus`` and ``line_counts``.
        files: the files of the input that are this task's; each is one task's.
        shard_files: bytes and hash, see ``content_hash``, of each file of the slice's shards, by name.
        folder: where the task ran; paths in its arguments are relative to it.
        format: of this file.
    """

    encoder: str
    settings: str
    files: list[InputFile]
    shard_files: dict[str, tuple[int, str]]
    folder: str
    format: int = _FORMAT


@dataclass(frozen=True)
class Slice:
    """A finished slice."""

    folder: Path
    arguments: "TokenizeArguments"
    part: InputSlice
    record: SliceRecord


def is_slice(folder: Path) -> bool:
    """Return whether a folder has a finished slice."""
    return (folder / FILE_NAME).is_file()


def link_shards(shards: Sequence[Shard], unfinished: Path, folder: Path) -> dict[str, tuple[int, str]]:
    """Give the files of finished shards a second name in ``folder``, and return bytes and hash of each by name."""
    keys = {shard.key for shard in shards}
    own = [file for file in sorted(unfinished.iterdir()) if file.name.partition(".")[0] in keys]
    written = {file.name: (file.stat().st_size, content_hash(file)) for file in own}
    for file in own:
        _link(file, folder / file.name)
    return written


def write_slice(folder: Path, arguments: "TokenizeArguments", record: SliceRecord) -> None:
    """Write what a slice has besides the files of its shards."""
    (folder / _ARGUMENTS).write_text(dump(asdict(arguments)), encoding="utf-8")
    (folder / FILE_NAME).write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")


def find_finished_slice(arguments: "TokenizeArguments") -> bool:
    """Return whether --output_dir has the slice of these arguments already.

    Raises:
        InputError: it has a slice of other arguments.
    """
    folder = Path(arguments.output_dir).expanduser()
    if not is_slice(folder):
        return False
    found = open_slice(folder)
    other = [] if found.part == part_of(arguments) else [f"--shard {found.arguments.shard}"]
    other += differing_arguments(found.arguments, arguments)
    if other:
        raise InputError(f"{folder} was made with {other[0]}; choose another folder, or remove it")
    return True


def part_of(arguments: "TokenizeArguments") -> InputSlice:
    """Return the slice of --shard."""
    assert arguments.part is not None, "the caller has looked at --shard"
    return InputSlice(*arguments.part)


def _link(file: Path, target: Path) -> None:
    """Give a file a second name, so that a failure after this loses nothing; rename it where links are not possible."""
    try:
        os.link(file, target)
    except OSError:
        file.rename(target)


def content_hash(file: Path) -> str:
    """Return the XXH3-128 hash of a file's content in hexadecimal."""
    digest = xxh3_128()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def states_of(sources: Sequence[Source]) -> list[list[FileState]]:
    """Return the states of the files of each source."""
    return [[_state(number, file) for file in source.files] for number, source in enumerate(sources)]


def _state(source: int, file: ListedFile) -> FileState:
    name = os.fsencode(file.name).decode("utf-8", "backslashreplace")
    return source, name, file.size, file.mtime_ns, file.ctime_ns


def open_slice(folder: Path) -> Slice:
    """Open a slice and check that its files are there.

    Raises:
        InputError: it is damaged, or of another version.
    """
    from arguments import TokenizeArguments, parse

    record = read_json(folder / FILE_NAME, SliceRecord, MAKE_AGAIN)
    if record.format != _FORMAT:
        raise InputError(f"{folder / FILE_NAME} has format {record.format}, this version reads {_FORMAT}; {MAKE_AGAIN}")
    arguments = parse(TokenizeArguments, ["--config", str(folder / _ARGUMENTS)])
    if arguments.part is None:
        raise InputError(f"{folder / _ARGUMENTS}: damaged (no shard); {MAKE_AGAIN}")
    return Slice(folder, arguments, InputSlice(*arguments.part), record)


def differing_arguments(ours: "TokenizeArguments", theirs: "TokenizeArguments") -> list[str]:
    """Return those of our arguments that are not theirs, as on the command line."""
    names = [field.name for field in fields(ours) if field.name not in _OF_EACH_TASK]
    return [f"--{name} {getattr(ours, name)}" for name in names if getattr(ours, name) != getattr(theirs, name)]
