"""All slices of ``--shard``, opened together and compared with each other and with the input, before a merge."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken
from fabric_train.tokenization.opened_corpus import OpenedCorpus, open_corpus
from fabric_train.tokenization.progress import ThrottledLog
from fabric_train.tokenization.reading.source_names import place_of
from fabric_train.tokenization.shard_files import Shard
from fabric_train.tokenization.sharding import slice_numbers
from fabric_train.tokenization.slice_folder import (
    MAKE_AGAIN,
    Slice,
    content_hash,
    differing_arguments,
    is_slice,
    open_slice,
    states_of,
)
from fabric_train.tokenization.unfinished import DOWNLOADS


def open_slices(folders: Sequence[Path], target: Path) -> list[Slice]:
    """Open all slices of a run, to be merged into ``target``, and return them in their order.

    Raises:
        InputError: slices are missing, damaged or of different arguments, or were made where paths mean something else;
            or ``target`` is taken, or in one of them.
    """
    check_not_taken(target)
    for folder in folders:
        check_not_inside(target, folder)
    slices = _open_all(folders)
    _check_working_folder(slices)
    return slices


def open_input(slices: Sequence[Slice], folder: Path) -> OpenedCorpus:
    """Open the input of the slices again, as one run without --shard does, with its tokenizer in ``folder``.

    Raises:
        InputError: a source, the tokenizer or a cleaning step cannot be used.
    """
    arguments = replace(slices[0].arguments, shard=None, num_proc=None)
    return open_corpus(arguments, folder / "tokenizer", folder / DOWNLOADS)


def _open_all(folders: Sequence[Path]) -> list[Slice]:
    """Open slices and return them in their order.

    Raises:
        InputError: they are not all slices of one run, each once.
    """
    others = [folder for folder in folders if not is_slice(folder)]
    if others:
        like = next(folder for folder in folders if is_slice(folder))
        raise InputError(*(f"{folder} is no slice made with --shard, as {like} is; leave it out" for folder in others))
    slices = [open_slice(folder) for folder in folders]
    first, by_number = slices[0], dict[int, Slice]()
    kinds = {one.arguments.counts_lines: one.folder for one in slices}
    if len(kinds) > 1:
        raise InputError(f"{kinds[True]} has counted lines, and {kinds[False]} is encoded; merge each kind by itself")
    faults, log = [], ThrottledLog()
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
        file, found = one.folder / name, -1
        with suppress(FileNotFoundError):
            found = file.stat().st_size
        if found != size:
            yield f"{one.folder}: {name} " + ("is missing" if found < 0 else f"has {found:,} bytes instead of {size:,}")
            return
        if content_hash(file) != hashed:
            yield f"{one.folder}: {name} has changed since it was written"
            return


def _check_working_folder(slices: Sequence[Slice]) -> None:
    """Check that paths mean what they meant for the tasks.

    Raises:
        InputError: some are relative, and a task ran in another folder.
    """
    given = slices[0].arguments
    places = [*map(place_of, [*given.dataset, *(given.validation_dataset or ())]), given.tokenizer_name]
    places += [*(given.decontaminate or ()), *([given.chat_template] if given.chat_template else [])]
    places += [given.boilerplate] if isinstance(given.boilerplate, str) else []
    relative = [place for place in places if not os.path.isabs(os.path.expanduser(place))]
    other = next((one for one in slices if one.record.folder != os.getcwd()), None)
    if relative and other:
        raise InputError(f"{other.folder} was made in {other.record.folder}, where {relative[0]} is; merge there")


def check_settings(slices: Sequence[Slice], settings: str) -> None:
    """Check that all shards were made with the settings that this process has.

    Raises:
        InputError: some were not.
    """
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
    """Check that the slices have all that the input consists of now.

    Args:
        slices: all slices.
        corpus: the input.
        shards: all shards of the input.
        lost: the indexes of those that no slice has.

    Raises:
        InputError: files have changed, or are new.
    """
    count, known = slices[0].part.count, {file.state for one in slices for file in one.record.files}
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
