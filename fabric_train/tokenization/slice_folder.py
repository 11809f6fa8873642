"""Write the folder of a slice, the work of one task of ``--shard I/N``; open and check all slices before a merge.

A slice has the shards as a restarted run finds them, encoded, or with their lines counted::

    slices/3/config.yaml      the arguments of the task
             slice.json       the files of the input, and the sizes and hashes of the shards' files
             3f2a….tokens     an encoded shard, see ``shards``; and its other files
             77ab….lines      or a shard whose lines are counted, see ``boilerplate.py``
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import ThrottledLog
from fabric_train.cli.yaml_core import dump
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken
from fabric_train.files.typed_json import read_json
from fabric_train.reading.sources import Source, place_of
from fabric_train.token_dataset.manifest import Manifest, SourceFile, SourceRecord
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.corpus import OpenedCorpus, open_corpus
from fabric_train.tokenization.shards import InputSlice, Shard, ShardSizes, slice_numbers

FILE_NAME = "slice.json"
_ARGUMENTS = "config.yaml"
_FORMAT = 2
_OF_EACH_TASK = ("shard", "output_dir", "num_proc")
_MOST_NAMED = 10
MAKE_AGAIN = "remove it and run its task again"
FileState = tuple[int, str, int, int, int]
"""The number of a file's source, and the file's path, bytes, mtime_ns and ctime_ns."""


@dataclass(frozen=True)
class InputFile:
    """A file of the input at the time when a task read it; ``hashed`` is None if lines were counted."""

    state: FileState
    hashed: SourceFile | None


@dataclass(frozen=True)
class PackedSlice:
    """The facts that a merge needs about a slice that ``--parts true`` has packed into rows."""

    goes_on: bool
    """Whether the slice's first file begins in an earlier slice."""
    num_files: int
    """The number of files that the slice has read, in full or in part."""
    rows_of_last: int
    """The number of rows that it has read from the last of these files."""


@dataclass(frozen=True)
class SliceRecord:
    """The content of ``slice.json``."""

    encoder: str  # see `EncodedSources`; empty if lines were counted
    settings: str  # what decides the content of the shards: see `OpenedCorpus` and `counting_settings`
    files: list[InputFile]  # the files of the input that belong to this task; each belongs to one task
    shard_files: dict[str, tuple[int, str]]  # bytes and `content_hash` of each file of the slice's shards, by name
    folder: str  # where the task ran; paths in its arguments are relative to it
    packed: PackedSlice | None = None  # None if the slice has no rows
    format: int = _FORMAT


@dataclass(frozen=True)
class Slice:
    """The folder of a finished task of ``--shard I/N``."""

    folder: Path
    arguments: TokenizeArguments
    input_slice: InputSlice  # I and N
    record: SliceRecord


def is_slice(folder: Path) -> bool:
    """Return whether a folder is a slice, which ``tokenize_dataset.py --shard`` writes."""
    return (folder / FILE_NAME).is_file()


def write_slice(
    folder: Path,
    unfinished: Path,
    shards: Sequence[Shard],
    arguments: TokenizeArguments,
    *,
    encoder: str,
    settings: str,
    files: list[InputFile],
) -> None:
    """Make ``folder`` the slice with these finished shards of the folder ``unfinished``; see ``SliceRecord``."""
    shutil.rmtree(folder / "tokenizer")  # a merge saves it again, and compares the hashes
    shard_keys = {shard.key for shard in shards}
    shard_files = [file for file in sorted(unfinished.iterdir()) if file.name.partition(".")[0] in shard_keys]
    sizes_and_hashes = {file.name: (file.stat().st_size, content_hash(file)) for file in shard_files}
    for file in shard_files:
        try:
            os.link(file, folder / file.name)  # a second name, so that a failure after this loses nothing
        except OSError:
            file.rename(folder / file.name)
    record = SliceRecord(
        encoder=encoder, settings=settings, files=files, shard_files=sizes_and_hashes, folder=os.getcwd()
    )
    _write_record(folder, arguments, record)


def write_packed_slice(
    folder: Path,
    arguments: TokenizeArguments,
    *,
    encoder: str,
    settings: str,
    files: list[InputFile],
    packed: PackedSlice,
) -> None:
    """Make the token dataset ``folder`` a packed slice; see ``SliceRecord``."""
    record = SliceRecord(
        encoder=encoder, settings=settings, files=files, shard_files={}, folder=os.getcwd(), packed=packed
    )
    _write_record(folder, arguments, record)


def _write_record(folder: Path, arguments: TokenizeArguments, record: SliceRecord) -> None:
    (folder / _ARGUMENTS).write_text(dump(asdict(arguments)), encoding="utf-8")
    (folder / FILE_NAME).write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")


def count_rows_before(folders: Sequence[Path]) -> list[int]:
    """Return the number of rows of each token dataset's first file that are in packed slices before it.

    Example: three slices of one long file, from its beginning, with 100, 30 and 50 rows give 0, 100 and 130.
    """
    counts: list[int] = []
    rows_of_last_file = 0  # rows that the slices so far have read of the last file that they have read
    for folder in folders:
        packed: PackedSlice | None = None
        if is_slice(folder):
            packed = read_json(folder / FILE_NAME, SliceRecord, MAKE_AGAIN).packed
        if packed is None:
            counts.append(0)
            rows_of_last_file = 0
            continue
        rows_before = rows_of_last_file if packed.goes_on else 0
        counts.append(rows_before)
        rows_of_last_file = packed.rows_of_last
        if packed.num_files == 1:  # its first file is also its last one
            rows_of_last_file += rows_before
    return counts


def fill_hashes(manifests: Sequence[Manifest], slices: Sequence[Slice]) -> list[Manifest]:
    """Return the manifests of packed slices with the SHA-256 of files that another slice has hashed."""
    hashed_files: dict[tuple[int, str], SourceFile] = {}  # by number of the source and path
    for task_slice in slices:
        for file in task_slice.record.files:
            if file.hashed:
                source_number, *_ = file.state
                hashed_files[source_number, file.hashed.path] = file.hashed
    filled_manifests: list[Manifest] = []
    for manifest in manifests:
        sources: list[SourceRecord] = []
        for source_number, source in enumerate(manifest.sources):
            files = [file if file.sha256 else hashed_files[source_number, file.path] for file in source.files]
            sources.append(replace(source, files=tuple(files)))
        filled_manifests.append(replace(manifest, sources=tuple(sources)))
    return filled_manifests


def find_finished_slice(arguments: TokenizeArguments) -> bool:
    """Return whether --output_dir has the slice of these arguments; InputError if it has a slice of other arguments."""
    folder = Path(arguments.output_dir).expanduser()
    if not is_slice(folder):
        return False
    finished = open_slice(folder)
    differences: list[str] = []
    if finished.input_slice != part_of(arguments):
        differences.append(f"--shard {finished.arguments.shard}")
    differences += differing_arguments(finished.arguments, arguments)
    if differences:
        raise InputError(f"{folder} was written with {differences[0]}; choose another folder, or remove it")
    return True


def part_of(arguments: TokenizeArguments) -> InputSlice:
    """Return the slice of --shard."""
    assert arguments.part is not None, "the caller has looked at --shard"
    return InputSlice(*arguments.part)


def content_hash(file: Path) -> str:
    """Return the XXH3-128 hash of a file's content in hexadecimal."""
    digest = xxh3_128()
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def states_of(sources: Sequence[Source]) -> list[list[FileState]]:
    """Return the size and times of each file of each source, which show whether the file has changed."""
    all_states: list[list[FileState]] = []
    for number, source in enumerate(sources):
        states: list[FileState] = []
        for file in source.files:
            # a name need not be UTF-8, and JSON must be
            name = os.fsencode(file.name).decode("utf-8", "backslashreplace")
            states.append((number, name, file.size, file.mtime_ns, file.ctime_ns))
        all_states.append(states)
    return all_states


def open_slice(folder: Path) -> Slice:
    """Open a slice and check that its files are there; InputError if it is damaged, or of another version."""
    from fabric_train.cli.parser import parse_arguments

    record = read_json(folder / FILE_NAME, SliceRecord, MAKE_AGAIN)
    if record.format != _FORMAT:
        raise InputError(
            f"{folder / FILE_NAME} has format {record.format}, but this version reads {_FORMAT}; {MAKE_AGAIN}"
        )
    arguments = parse_arguments(TokenizeArguments, ["--config", str(folder / _ARGUMENTS)])
    if arguments.part is None:
        raise InputError(f"{folder / _ARGUMENTS}: damaged (no shard); {MAKE_AGAIN}")
    return Slice(folder, arguments, InputSlice(*arguments.part), record)


def differing_arguments(ours: TokenizeArguments, theirs: TokenizeArguments) -> list[str]:
    """Return our arguments that differ from theirs, in the form of a command line."""
    differences: list[str] = []
    for argument in fields(ours):
        value = getattr(ours, argument.name)
        if argument.name not in _OF_EACH_TASK and value != getattr(theirs, argument.name):
            differences.append(f"--{argument.name} {value}")
    return differences


def open_slices(folders: Sequence[Path], target: Path) -> list[Slice]:
    """Return all slices of a run in order, to be merged into ``target``; InputError if any is missing."""
    check_not_taken(target)
    for folder in folders:
        check_not_inside(target, folder)
    missing_dirs = [folder for folder in folders if not folder.exists()]
    if missing_dirs:
        raise InputError(*(f"{folder}: no such folder" for folder in missing_dirs))
    slice_dirs = [folder for folder in folders if is_slice(folder)]
    other_dirs = [folder for folder in folders if not is_slice(folder)]
    if other_dirs:
        example = slice_dirs[0]
        faults: list[str] = []
        for folder in other_dirs:
            faults.append(f"{folder} is not a slice made with --shard, but {example} is; leave out {folder}")
        raise InputError(*faults)
    slices = _sort_and_check([open_slice(folder) for folder in folders])
    if not slices[0].arguments.parts:
        _check_working_folder(slices)
    return slices


def open_input(slices: Sequence[Slice], folder: Path, sizes: ShardSizes) -> OpenedCorpus:
    """Open the slices' input again, as a single run without --shard does, with its tokenizer in ``folder``."""
    return open_corpus(replace(slices[0].arguments, shard=None, num_proc=None), folder, folder, sizes)


def _sort_and_check(slices: Sequence[Slice]) -> list[Slice]:
    """Return slices in order; InputError unless they are all slices of one run, each once and undamaged."""
    # all hold the same kind of work
    folders_by_kind = {task_slice.arguments.counts_lines: task_slice.folder for task_slice in slices}
    if len(folders_by_kind) > 1:
        raise InputError(
            f"{folders_by_kind[True]} contains line counts, but {folders_by_kind[False]} contains tokens; merge each "
            "kind separately"
        )

    # all belong to the run of the first slice, none comes twice, and their files are as they were written
    reference = slices[0]
    count = reference.input_slice.count
    slices_by_number: dict[int, Slice] = {}
    faults: list[str] = []
    log = ThrottledLog()
    for task_slice in slices:
        folder = task_slice.folder
        shard = task_slice.arguments.shard
        number = task_slice.input_slice.number
        differences = differing_arguments(reference.arguments, task_slice.arguments)
        if task_slice.input_slice.count != count:
            faults.append(
                f"{folder} is slice {shard}, but {reference.folder} is slice {reference.arguments.shard}; {MAKE_AGAIN}"
            )
        elif number in slices_by_number:
            faults.append(
                f"{folder} and {slices_by_number[number].folder} are both slice {shard}; leave one of them out"
            )
        elif differences:
            faults.append(f"{reference.folder} was written with {differences[0]}, but {folder} was not; {MAKE_AGAIN}")
        else:
            slices_by_number[number] = task_slice
            damage = _find_damage(task_slice, log)
            if damage:
                faults.append(f"{damage}; {MAKE_AGAIN}")
    if faults:
        raise InputError(*faults)

    # none is missing
    missing = [number for number in range(1, count + 1) if number not in slices_by_number]
    if missing:
        numbers = ", ".join(map(str, missing[:_MOST_NAMED]))
        if len(missing) > _MOST_NAMED:
            numbers += f" and {len(missing) - _MOST_NAMED:,} more"
        raise InputError(
            f"missing slices (of {count:,}): {numbers}; run their tasks to completion (such as --shard "
            f"{missing[0]}/{count}), and give their folders"
        )
    return [slices_by_number[number] for number in sorted(slices_by_number)]


def _find_damage(task_slice: Slice, log: ThrottledLog) -> str:
    """Describe the first file of a slice that is missing or has changed; "" if there is none."""
    folder = task_slice.folder
    shard_files = task_slice.record.shard_files
    for number, (name, (num_bytes, expected_hash)) in enumerate(shard_files.items()):
        log(f"checking {folder}: {number:,} of {len(shard_files):,} files")
        file = folder / name
        try:
            found_bytes = file.stat().st_size
        except FileNotFoundError:
            return f"{folder}: {name} is missing"
        if found_bytes != num_bytes:
            return f"{folder}: {name} has {found_bytes:,} bytes instead of {num_bytes:,}"
        if content_hash(file) != expected_hash:
            return f"{folder}: {name} has changed since it was written"
    return ""


def _check_working_folder(slices: Sequence[Slice]) -> None:
    """Raise an InputError if relative paths in the arguments mean different files here than where the tasks ran."""
    arguments = slices[0].arguments
    paths = [place_of(name) for name in arguments.dataset]
    paths += [place_of(name) for name in arguments.validation_dataset or ()]
    paths.append(arguments.tokenizer_name)
    paths += arguments.decontaminate or ()
    if arguments.chat_template:
        paths.append(arguments.chat_template)
    if isinstance(arguments.boilerplate, str):
        paths.append(arguments.boilerplate)
    relative_paths = [path for path in paths if not os.path.isabs(os.path.expanduser(path))]
    if not relative_paths:
        return
    working_folder = os.getcwd()
    for task_slice in slices:
        task_folder = task_slice.record.folder
        if task_folder != working_folder:
            raise InputError(
                f"{task_slice.folder} was written in {task_folder}, and the path {relative_paths[0]} is relative to "
                "that folder; run the merge there"
            )


def check_settings(slices: Sequence[Slice], settings: str) -> None:
    """Raise an InputError if some shards were made with settings that differ from this process's."""
    changed_dirs = [task_slice.folder for task_slice in slices if task_slice.record.settings != settings]
    if changed_dirs:
        reason = "the tokenizer, or a package or file that cleaning uses, has changed since it was written"
        raise InputError(f"{changed_dirs[0]}: {reason}; {MAKE_AGAIN}")


def folders_of_shards(slices: Sequence[Slice]) -> dict[str, Path]:
    """Return the folder that has the files of each shard, by the shard's key."""
    folders: dict[str, Path] = {}
    for task_slice in slices:
        for name in task_slice.record.shard_files:
            key = name.partition(".")[0]
            folders[key] = task_slice.folder
    return folders


def check_unchanged(
    slices: Sequence[Slice], corpus: OpenedCorpus, shards: Sequence[Shard], lost: Sequence[int]
) -> None:
    """Raise an InputError if files of the input are new or have changed; ``lost`` are the shards that no slice has.

    The message names the slices to make again: the slices of the lost shards, and of files that no slice has
    seen in their current state.
    """
    count = slices[0].input_slice.count

    # the files that are new or have changed since a task looked at them
    recorded_states: set[FileState] = set()
    for task_slice in slices:
        recorded_states.update(file.state for file in task_slice.record.files)
    states = list(chain.from_iterable(states_of(corpus.sources)))
    changed_files = [index for index, state in enumerate(states) if state not in recorded_states]

    # the slices that they, and the lost shards, belong to
    slices_of_shards = slice_numbers([shard.num_bytes for shard in shards], count)
    slices_of_files = slice_numbers([num_bytes for _, _, num_bytes, *_ in states], count)
    stale = {slices_of_shards[index] for index in lost}
    # a file that is read at once belongs to the slice of its shard, which is lost if the file has changed
    is_read_with_shard = np.concatenate([[], *corpus.files_read_at_once(shards)]).astype(bool)
    stale.update(slices_of_files[index] for index in changed_files if not is_read_with_shard[index])
    if not stale:
        return
    changed = "the input"
    if changed_files:
        _, changed, *_ = states[changed_files[0]]
    folders = [str(slices[number - 1].folder) for number in sorted(stale)]
    names = ", ".join(folders[:_MOST_NAMED])
    if len(folders) > _MOST_NAMED:
        names += f" and {len(folders) - _MOST_NAMED:,} more"
    raise InputError(f"{changed} has changed since the tasks ran; remove {names} and run their tasks again")
