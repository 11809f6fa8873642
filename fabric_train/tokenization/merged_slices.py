"""Merge all slices of ``--shard`` into the token dataset that one run would write."""

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.atomic_folder import check_not_inside, check_not_taken, complete_folder
from fabric_train.tokenization.build import notes_of, write_token_dataset
from fabric_train.tokenization.encoded_slices import (
    MAKE_AGAIN,
    EncodedSlice,
    FileState,
    differing_arguments,
    is_slice,
    open_slice,
    states_of,
)
from fabric_train.tokenization.encoding import EncodedSources, unfinished_shards
from fabric_train.tokenization.manifest import Manifest
from fabric_train.tokenization.opened_corpus import OpenedCorpus, open_corpus
from fabric_train.tokenization.progress import ThrottledLog
from fabric_train.tokenization.reading.source_names import place_of
from fabric_train.tokenization.shard_files import Shard, ShardRecord, read_record
from fabric_train.tokenization.sharding import slice_numbers
from fabric_train.tokenization.unfinished import DOWNLOADS


def merge_slices(folders: Sequence[Path], target: Path) -> tuple[Manifest, list[str]]:
    """Write the token dataset ``target`` that one run without --shard would write. It is complete or absent.

    Returns:
        The manifest, and notes for the user.

    Raises:
        InputError: slices are missing, damaged or of different arguments; the input has changed since; or the token
            dataset cannot be written.
    """
    check_not_taken(target)
    for folder in folders:
        check_not_inside(target, folder)
    slices = _open_all(folders)
    _check_working_folder(slices)
    with complete_folder(target) as folder:
        arguments = replace(slices[0].arguments, shard=None, output_dir=str(target), num_proc=None)
        corpus = open_corpus(arguments, folder / "tokenizer", folder / DOWNLOADS)
        encoded = _join(corpus, slices)
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return manifest, notes


def _open_all(folders: Sequence[Path]) -> list[EncodedSlice]:
    """Open slices and return them in their order.

    Raises:
        InputError: they are not all slices of one run, each once.
    """
    others = [folder for folder in folders if not is_slice(folder)]
    if others:
        like = next(folder for folder in folders if is_slice(folder))
        raise InputError(*(f"{folder} is no slice made with --shard, as {like} is; leave it out" for folder in others))
    slices = [open_slice(folder) for folder in folders]
    first, by_number = slices[0], dict[int, EncodedSlice]()
    faults = []
    for one in slices:
        other = differing_arguments(first.arguments, one.arguments)
        if one.part.count != first.part.count:
            faults.append(f"{one.folder} is slice {one.arguments.shard}, and {first.folder} {first.arguments.shard}")
        elif one.part.number in by_number:
            faults.append(f"{one.folder} and {by_number[one.part.number].folder} are both slice {one.arguments.shard}")
        elif other:
            faults.append(f"{first.folder} was made with {other[0]}, and {one.folder} not")
        else:
            by_number[one.part.number] = one
            faults += list(_missing_files(one))
    if faults:
        raise InputError(*(f"{fault}; {MAKE_AGAIN}" for fault in faults))
    missing = [number for number in range(1, first.part.count + 1) if number not in by_number]
    if missing:
        named = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10:,} more" if len(missing) > 10 else "")
        raise InputError(
            f"of {first.part.count:,} slices these are missing: {named}; run their tasks, such as --shard "
            f"{missing[0]}/{first.part.count}, to their end, and give their folders"
        )
    return [by_number[number] for number in sorted(by_number)]


def _missing_files(one: EncodedSlice) -> Iterator[str]:
    """Yield a line for the first file of a slice that is not there as it was written."""
    for name, size in one.record.sizes.items():
        file, found = one.folder / name, -1
        with suppress(FileNotFoundError):
            found = file.stat().st_size
        if found != size:
            yield f"{one.folder}: {name} " + ("is missing" if found < 0 else f"has {found:,} bytes instead of {size:,}")
            return


def _check_working_folder(slices: Sequence[EncodedSlice]) -> None:
    """Check that paths mean what they meant for the tasks.

    Raises:
        InputError: some are relative, and a task ran in another folder.
    """
    given = slices[0].arguments
    places = [*map(place_of, [*given.dataset, *(given.validation_dataset or ())]), given.tokenizer_name]
    places += [*(given.decontaminate or ()), *([given.chat_template] if given.chat_template else [])]
    relative = [place for place in places if not os.path.isabs(os.path.expanduser(place))]
    other = next((one for one in slices if one.record.folder != os.getcwd()), None)
    if relative and other:
        raise InputError(f"{other.folder} was made in {other.record.folder}, where {relative[0]} is; merge there")


def _join(corpus: OpenedCorpus, slices: Sequence[EncodedSlice]) -> EncodedSources:
    """Return the shards and the hashed files of all slices.

    Raises:
        InputError: the input has changed since, or a slice is damaged.
    """
    encoder = slices[0].record.encoder
    changed = [one.folder for one in slices if one.record.settings != corpus.settings]
    if changed:
        what = "the tokenizer, or a package or file that cleaning uses, has changed since it was made"
        raise InputError(f"{changed[0]}: {what}; {MAKE_AGAIN}")
    by_encoder = {one.record.encoder: one.folder for one in slices}
    if len(by_encoder) > 1:
        pairs = " and ".join(f"{folder} by {name}" for name, folder in list(by_encoder.items())[:2])
        raise InputError(f"encoded differently: {pairs}; run the tasks on machines with the same packages")
    shards = corpus.shards(encoder)
    folders = {name.partition(".")[0]: one.folder for one in slices for name in one.record.sizes}
    records, log = dict[int, ShardRecord](), ThrottledLog()
    for shard in shards:
        log(f"reading slices: {shard.index:,} of {len(shards):,} shards")
        record = read_record(folders[shard.key], shard) if shard.key in folders else None
        if record is not None:
            records[shard.index] = record
    states, files = states_of(corpus.sources), {file.state: file.hashed for one in slices for file in one.record.files}
    lost = [shard.index for shard in unfinished_shards(shards, records, corpus.caps)]
    _check_unchanged(slices, shards, lost, list(states.values()), files)
    return EncodedSources(
        shards=[shard for shard in shards if shard.index in records],
        records=[records[index] for index in sorted(records)],
        files={key: files[state] for key, state in states.items()},
        encoder=encoder,
        num_proc=1,
    )


def _check_unchanged(
    slices: Sequence[EncodedSlice],
    shards: Sequence[Shard],
    lost: Sequence[int],
    states: Sequence[FileState],
    files: Container[FileState],
) -> None:
    """Check that the slices have all that the input consists of now.

    Args:
        slices: all slices.
        shards: all shards of the input.
        lost: the indexes of those that no slice has.
        states: those of all files of the input.
        files: those of the files that were hashed.

    Raises:
        InputError: files have changed, or are new.
    """
    count = slices[0].part.count
    of_shards = slice_numbers([shard.num_bytes for shard in shards], count)
    of_files = slice_numbers([size for _, _, size, *_ in states], count)
    unhashed = [index for index, state in enumerate(states) if state not in files]
    stale = sorted({*(of_shards[index] for index in lost), *(of_files[index] for index in unhashed)})
    if stale:
        what = states[unhashed[0]][1] if unhashed else "the input"
        named = ", ".join(str(slices[number - 1].folder) for number in stale[:10])
        more = f" and {len(stale) - 10:,} more" if len(stale) > 10 else ""
        raise InputError(f"{what} has changed since the tasks ran; remove {named}{more}, and run their tasks again")
