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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path

import numpy as np
from xxhash import xxh3_128

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import ThrottledLog
from fabric_train.cli.yaml_core import dump
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken
from fabric_train.files.regular_file import read_json
from fabric_train.reading.sources import Source, place_of
from fabric_train.token_dataset.manifest import Manifest, SourceFile
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.corpus import OpenedCorpus, open_corpus
from fabric_train.tokenization.shards import InputSlice, Shard, ShardSizes, slice_numbers

FILE_NAME = "slice.json"
_ARGUMENTS = "config.yaml"
_FORMAT = 2
_OF_EACH_TASK = ("shard", "output_dir", "num_proc")
MAKE_AGAIN = "remove it, and run its task again"
FileState = tuple[int, str, int, int, int]
"""The number of a file's source, and its path, bytes, mtime_ns and ctime_ns."""


@dataclass(frozen=True)
class InputFile:
    """A file of the input as it was when a task looked at it; ``hashed`` is None if lines were counted."""

    state: FileState
    hashed: SourceFile | None


@dataclass(frozen=True)
class PackedSlice:
    """What a merge needs of a slice that ``--parts true`` has packed into rows.

    ``goes_on`` says whether its first file begins in a slice before, ``num_files`` counts the files that it has read,
    and ``rows_of_last`` the rows that it has read of the last one.
    """

    goes_on: bool
    num_files: int
    rows_of_last: int


@dataclass(frozen=True)
class SliceRecord:
    """The content of ``slice.json``."""

    encoder: str  # see `EncodedSources`; empty if lines were counted
    settings: str  # what decides the content of the shards: see `OpenedCorpus` and `counting_settings`
    files: list[InputFile]  # the files of the input that are this task's; each is one task's
    shard_files: dict[str, tuple[int, str]]  # bytes and `content_hash` of each file of the slice's shards, by name
    folder: str  # where the task ran; paths in its arguments are relative to it
    packed: PackedSlice | None = None  # None if the slice has no rows
    format: int = _FORMAT


@dataclass(frozen=True)
class Slice:
    folder: Path
    arguments: TokenizeArguments
    part: InputSlice
    record: SliceRecord


def is_slice(folder: Path) -> bool:
    """Return whether a folder is a slice, which ``tokenize_dataset.py --shard`` writes."""
    return (folder / FILE_NAME).is_file()


def write_slice(
    folder: Path,
    unfinished: Path,
    shards: Sequence[Shard],
    arguments: TokenizeArguments,
    encoder: str,
    settings: str,
    files: list[InputFile],
) -> None:
    """Make ``folder`` the slice with these finished shards of the folder ``unfinished``; see ``SliceRecord``."""
    shutil.rmtree(folder / "tokenizer")  # a merge saves it again, and compares the hashes
    keys = {shard.key for shard in shards}
    own = [file for file in sorted(unfinished.iterdir()) if file.name.partition(".")[0] in keys]
    written = {file.name: (file.stat().st_size, content_hash(file)) for file in own}
    for file in own:
        try:
            os.link(file, folder / file.name)  # a second name, so that a failure after this loses nothing
        except OSError:
            file.rename(folder / file.name)
    (folder / _ARGUMENTS).write_text(dump(asdict(arguments)), encoding="utf-8")
    record = SliceRecord(encoder, settings, files, written, os.getcwd())
    (folder / FILE_NAME).write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")


def write_packed_slice(
    folder: Path, arguments: TokenizeArguments, encoder: str, settings: str, files: list[InputFile], packed: PackedSlice
) -> None:
    """Make the token dataset ``folder`` a packed slice; see ``SliceRecord``."""
    (folder / _ARGUMENTS).write_text(dump(asdict(arguments)), encoding="utf-8")
    record = SliceRecord(encoder, settings, files, {}, os.getcwd(), packed)
    (folder / FILE_NAME).write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")


def count_rows_before(folders: Sequence[Path]) -> list[int]:
    """Return for each token dataset how many rows of its first file are in packed slices before it."""
    counts: list[int] = []
    before = 0
    for folder in folders:
        packed = read_json(folder / FILE_NAME, SliceRecord, MAKE_AGAIN).packed if is_slice(folder) else None
        counts.append(before if packed and packed.goes_on else 0)
        is_inside = packed is not None and packed.num_files == 1
        before = (packed.rows_of_last if packed else 0) + (counts[-1] if is_inside else 0)
    return counts


def fill_hashes(manifests: Sequence[Manifest], slices: Sequence[Slice]) -> list[Manifest]:
    """Return the manifests of packed slices with the SHA-256 of files that another slice has hashed."""
    hashed = {
        (file.state[0], file.hashed.path): file.hashed for one in slices for file in one.record.files if file.hashed
    }
    filled = []
    for manifest in manifests:
        sources = []
        for number, source in enumerate(manifest.sources):
            files = (file if file.sha256 else hashed[number, file.path] for file in source.files)
            sources.append(replace(source, files=tuple(files)))
        filled.append(replace(manifest, sources=tuple(sources)))
    return filled


def find_finished_slice(arguments: TokenizeArguments) -> bool:
    """Return whether --output_dir has the slice of these arguments; InputError if it has one of other arguments."""
    folder = Path(arguments.output_dir).expanduser()
    if not is_slice(folder):
        return False
    found = open_slice(folder)
    other = [] if found.part == part_of(arguments) else [f"--shard {found.arguments.shard}"]
    other += differing_arguments(found.arguments, arguments)
    if other:
        raise InputError(f"{folder} was made with {other[0]}; choose another folder, or remove it")
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
    """Return size and times of each file of each source; a changed file has others."""
    states: list[list[FileState]] = []
    for number, source in enumerate(sources):
        names = (os.fsencode(file.name).decode("utf-8", "backslashreplace") for file in source.files)
        pairs = zip(names, source.files, strict=True)
        states.append([(number, name, file.size, file.mtime_ns, file.ctime_ns) for name, file in pairs])
    return states


def open_slice(folder: Path) -> Slice:
    """Open a slice and check that its files are there; InputError if it is damaged, or of another version."""
    from fabric_train.cli.parser import parse_arguments

    record = read_json(folder / FILE_NAME, SliceRecord, MAKE_AGAIN)
    if record.format != _FORMAT:
        raise InputError(f"{folder / FILE_NAME} has format {record.format}, this version reads {_FORMAT}; {MAKE_AGAIN}")
    arguments = parse_arguments(TokenizeArguments, ["--config", str(folder / _ARGUMENTS)])
    if arguments.part is None:
        raise InputError(f"{folder / _ARGUMENTS}: damaged (no shard); {MAKE_AGAIN}")
    return Slice(folder, arguments, InputSlice(*arguments.part), record)


def differing_arguments(ours: TokenizeArguments, theirs: TokenizeArguments) -> list[str]:
    """Return our arguments that differ from theirs, as on the command line."""
    names = [field.name for field in fields(ours) if field.name not in _OF_EACH_TASK]
    return [f"--{name} {getattr(ours, name)}" for name in names if getattr(ours, name) != getattr(theirs, name)]


def open_slices(folders: Sequence[Path], target: Path) -> list[Slice]:
    """Return all slices of a run in their order, to be merged into ``target``; InputError if they are not all there."""
    check_not_taken(target)
    for folder in folders:
        check_not_inside(target, folder)
    others = [folder for folder in folders if not is_slice(folder)]
    if others:
        like = next(folder for folder in folders if is_slice(folder))
        raise InputError(*(f"{folder} is no slice made with --shard, as {like} is; leave it out" for folder in others))
    slices = _in_order([open_slice(folder) for folder in folders])
    if not slices[0].arguments.parts:
        _check_working_folder(slices)
    return slices


def open_input(slices: Sequence[Slice], folder: Path, sizes: ShardSizes) -> OpenedCorpus:
    """Open the input of the slices again, as one run without --shard does, with its tokenizer in ``folder``."""
    return open_corpus(replace(slices[0].arguments, shard=None, num_proc=None), folder, folder, sizes)


def _in_order(slices: Sequence[Slice]) -> list[Slice]:
    """Return slices in their order; raise InputError unless they are all slices of one run, each once and undamaged."""
    first = slices[0]
    by_number: dict[int, Slice] = {}
    kinds = {one.arguments.counts_lines: one.folder for one in slices}
    if len(kinds) > 1:
        raise InputError(f"{kinds[True]} has counted lines, and {kinds[False]} is encoded; merge each kind by itself")
    faults = []
    log = ThrottledLog()
    for one in slices:
        other = differing_arguments(first.arguments, one.arguments)
        if one.part.count != first.part.count:
            are = f"{one.folder} is slice {one.arguments.shard}, and {first.folder} {first.arguments.shard}"
            faults.append(f"{are}; {MAKE_AGAIN}")
        elif one.part.number in by_number:
            same = by_number[one.part.number].folder
            faults.append(f"{one.folder} and {same} are both slice {one.arguments.shard}; leave one of them out")
        elif other:
            faults.append(f"{first.folder} was made with {other[0]}, and {one.folder} not; {MAKE_AGAIN}")
        else:
            by_number[one.part.number] = one
            faults += [f"{damage}; {MAKE_AGAIN}" for damage in _damaged_files(one, log)]
    if faults:
        raise InputError(*faults)
    missing = [number for number in range(1, first.part.count + 1) if number not in by_number]
    if missing:
        named = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10:,} more" if len(missing) > 10 else "")
        raise InputError(
            f"of {first.part.count:,} slices these are missing: {named}; run their tasks, such as --shard "
            f"{missing[0]}/{first.part.count}, to their end, and give their folders"
        )
    return [by_number[number] for number in sorted(by_number)]


def _damaged_files(one: Slice, log: ThrottledLog) -> Iterator[str]:
    """Yield a line for the first file of a slice that is not there as it was written."""
    for number, (name, (size, hashed)) in enumerate(one.record.shard_files.items()):
        log(f"checking {one.folder}: {number:,} of {len(one.record.shard_files):,} files")
        file = one.folder / name
        found = -1
        with suppress(FileNotFoundError):
            found = file.stat().st_size
        if found != size:
            yield f"{one.folder}: {name} " + ("is missing" if found < 0 else f"has {found:,} bytes instead of {size:,}")
            return
        if content_hash(file) != hashed:
            yield f"{one.folder}: {name} has changed since it was written"
            return


def _check_working_folder(slices: Sequence[Slice]) -> None:
    """Check that paths mean what they meant for the tasks."""
    given = slices[0].arguments
    places = [*map(place_of, [*given.dataset, *(given.validation_dataset or ())]), given.tokenizer_name]
    places += [*(given.decontaminate or ()), *([given.chat_template] if given.chat_template else [])]
    places += [given.boilerplate] if isinstance(given.boilerplate, str) else []
    relative = [place for place in places if not os.path.isabs(os.path.expanduser(place))]
    other = next((one for one in slices if one.record.folder != os.getcwd()), None)
    if relative and other:
        raise InputError(f"{other.folder} was made in {other.record.folder}, where {relative[0]} is; merge there")


def check_settings(slices: Sequence[Slice], settings: str) -> None:
    """Raise an InputError if some shards were made with other settings than this process has."""
    changed = [one.folder for one in slices if one.record.settings != settings]
    if changed:
        what = "the tokenizer, or a package or file that cleaning uses, has changed since it was made"
        raise InputError(f"{changed[0]}: {what}; {MAKE_AGAIN}")


def folders_of_shards(slices: Sequence[Slice]) -> dict[str, Path]:
    """Return the folder that has the files of each shard, by the shard's key."""
    return {name.partition(".")[0]: one.folder for one in slices for name in one.record.shard_files}


def check_unchanged(
    slices: Sequence[Slice], corpus: OpenedCorpus, shards: Sequence[Shard], lost: Sequence[int]
) -> None:
    """Raise an InputError if files of the input have changed or are new; ``lost`` are the shards that no slice has."""
    count = slices[0].part.count
    known = {file.state for one in slices for file in one.record.files}
    states = list(chain.from_iterable(states_of(corpus.sources)))
    of_shards = slice_numbers([shard.num_bytes for shard in shards], count)
    of_files = slice_numbers([size for _, _, size, *_ in states], count)
    unknown = [index for index, state in enumerate(states) if state not in known]
    is_of_shard = np.concatenate([[], *corpus.files_read_at_once(shards)]).astype(bool)  # a slice has it with its shard
    apart = [index for index in unknown if not is_of_shard[index]]
    stale = sorted({*(of_shards[index] for index in lost), *(of_files[index] for index in apart)})
    if stale:
        what = states[unknown[0]][1] if unknown else "the input"
        named = ", ".join(str(slices[number - 1].folder) for number in stale[:10])
        more = f" and {len(stale) - 10:,} more" if len(stale) > 10 else ""
        raise InputError(f"{what} has changed since the tasks ran; remove {named}{more}, and run their tasks again")
