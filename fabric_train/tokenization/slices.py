"""Run a task of ``--shard I/N``, which encodes a slice of the input or counts its lines; merge the slices of all tasks.

A merge is a run in which all shards are finished. The next commands after a task are printed.
"""

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from itertools import chain, compress
from pathlib import Path

import numpy as np

from fabric_train.cleaning.boilerplate import Boilerplate, write_repeated_lines
from fabric_train.cli.commands import command_from_here
from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import ThrottledLog
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.reading.listing import SHA256_BYTES
from fabric_train.reading.sources import Source
from fabric_train.token_dataset.manifest import Manifest, SourceFile
from fabric_train.tokenization import slice_folder
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.build import notes_of, write_token_dataset
from fabric_train.tokenization.corpus import OpenedCorpus, opened_corpus
from fabric_train.tokenization.encoding import EncodedSources, encode_sources, unfinished_shards
from fabric_train.tokenization.line_counts import (
    add_up_lines,
    count_lines,
    counting_settings,
    lines_file,
    split_to_count,
)
from fabric_train.tokenization.shard_files import ShardRecord, read_record
from fabric_train.tokenization.shards import SIZES, ShardSizes
from fabric_train.tokenization.slice_folder import (
    FileState,
    InputFile,
    PackedSlice,
    Slice,
    part_of,
    states_of,
    write_packed_slice,
    write_slice,
)
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck


def count_slice(arguments: TokenizeArguments, sizes: ShardSizes = SIZES) -> list[str]:
    """Count the lines of the slice --shard; --output_dir is complete or absent. Return the lines of a summary."""
    input_slice = part_of(arguments)
    # counting needs no tokenizer, but a wrong one is reported before the lines are counted
    with opened_corpus(arguments, sizes) as (corpus, folder, unfinished):
        # count the shards of the slice
        all_shards = split_to_count(corpus)
        is_selected = input_slice.select([shard.num_bytes for shard in all_shards])
        shards = list(compress(all_shards, is_selected))
        started = time.monotonic()
        count_lines(corpus, shards, unfinished)

        # record the state of its files, which a merge compares; each file belongs to one slice
        states = list(chain.from_iterable(states_of(corpus.sources)))
        is_selected = input_slice.select([num_bytes for _, _, num_bytes, *_ in states])
        files = [InputFile(state, hashed=None) for state in compress(states, is_selected)]
        settings = counting_settings(corpus)
        write_slice(folder, unfinished, shards, arguments, encoder="", settings=settings, files=files)
    seconds = time.monotonic() - started
    num_bytes = sum(shard.num_bytes for shard in shards)
    return [
        f"slice      {arguments.shard}: counted the lines of {len(shards):,} shards",
        f"speed      {num_bytes / 1e6 / seconds:,.1f} MB/s, {seconds:.1f} s with {corpus.num_proc} processes",
    ]


def merge_counts(slices: Sequence[Slice], target: Path, sizes: ShardSizes = SIZES) -> Boilerplate:
    """Add up all counted slices, and write the lines that repeat to ``target``, which is complete or absent."""
    with complete_folder(target) as folder:
        corpus = slice_folder.open_input(slices, folder, sizes)
        shutil.rmtree(corpus.tokenizer_folder)
        slice_folder.check_settings(slices, counting_settings(corpus))
        shards = split_to_count(corpus)
        folders = slice_folder.folders_of_shards(slices)
        lost = [shard.index for shard in shards if shard.key not in folders]
        slice_folder.check_unchanged(slices, corpus, shards, lost)
        assert corpus.cleaner is not None, "--boilerplate is a cleaning step"
        files = [lines_file(folders[shard.key], shard) for shard in shards]
        lines = add_up_lines(corpus, shards, files).redacted(corpus.cleaner.redact)
        write_repeated_lines(folder, lines, corpus.arguments.text_column)
    return lines


def encode_slice(arguments: TokenizeArguments, check: ParityCheck, sizes: ShardSizes = SIZES) -> list[str]:
    """Encode the slice --shard; --output_dir is complete or absent. Return the lines of a summary."""
    with opened_corpus(arguments, sizes) as (corpus, folder, unfinished):
        started = time.monotonic()
        encoded = encode_sources(corpus, unfinished, check, part_of(arguments))
        seconds = time.monotonic() - started
        # `write_token_dataset` empties the records: what the summary needs is taken from them before
        files = list(_hashed_files(corpus.sources, encoded.digests))
        shards = [record.shard for record in encoded.records]
        num_documents = sum(len(record.documents) for record in encoded.records)
        num_tokens = sum(record.num_tokens for record in encoded.records)
        notes = notes_of(corpus, encoded)
        if arguments.parts:
            packed = _describe_packed(corpus, encoded)
            write_token_dataset(folder, corpus, encoded, of_slice=True)
            write_packed_slice(
                folder, arguments, encoder=encoded.encoder, settings=corpus.settings, files=files, packed=packed
            )
        else:
            write_slice(
                folder, unfinished, shards, arguments, encoder=encoded.encoder, settings=corpus.settings, files=files
            )
    speed = f"{num_tokens / seconds:,.0f} tokens/s, {seconds:.1f} s with {encoded.num_proc} processes"
    summary = [
        f"slice      {arguments.shard}: {len(shards):,} shards, {num_documents:,} documents, {num_tokens:,} tokens",
        f"speed      {speed}",
    ]
    summary += [f"note       {note}" for note in notes]
    return summary


def _describe_packed(corpus: OpenedCorpus, encoded: EncodedSources) -> PackedSlice:
    """Return the facts that a merge needs about the encoded slice; InputError if it has no document."""
    records = encoded.records
    if not any(len(record.documents) for record in records):
        raise InputError(f"--shard {corpus.arguments.shard}: this slice has no documents; use fewer slices")

    # does the shard before the slice end in the file with which the slice begins?
    first_shard = records[0].shard
    goes_on = False
    for shard in corpus.shards(encoded.encoder):
        if shard.index == first_shard.index - 1:
            last_file_before = (shard.source, shard.origins[-1])
            goes_on = last_file_before == (first_shard.source, first_shard.origins[0])
            break

    # the files of the slice, and the rows of its last file, which may be in several shards
    last_shard = records[-1].shard
    last_origin = last_shard.origins[-1]
    files: set[tuple[int, int]] = set()  # number of the source and of the file in it
    rows_of_last = 0
    for record in records:
        origins = record.shard.origins
        files.update((record.shard.source, origin) for origin in origins.tolist())
        if record.shard.source == last_shard.source:
            rows_of_parts = record.parts["rows"][origins == last_origin]
            rows_of_last += int(rows_of_parts.sum(dtype=np.int64))
    return PackedSlice(goes_on=goes_on, num_files=len(files), rows_of_last=rows_of_last)


def _hashed_files(sources: Sequence[Source], digests: Sequence[np.ndarray]) -> Iterator[InputFile]:
    """Yield the files that this slice has hashed; the digests of other files are zeros."""
    for source, source_digests, states in zip(sources, digests, states_of(sources), strict=True):
        files = source.record(source_digests).files
        for state, file, digest in zip(states, files, source_digests, strict=True):
            if np.any(digest):
                yield InputFile(state, file)


def merge_slices(slices: Sequence[Slice], target: Path, sizes: ShardSizes = SIZES) -> tuple[Manifest, list[str]]:
    """Write the token dataset that a single run without --shard would write, complete or absent; also return notes."""
    with complete_folder(target) as folder:
        corpus = slice_folder.open_input(slices, folder, sizes)
        encoded = _join_slices(corpus, slices)
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return manifest, notes


def _join_slices(corpus: OpenedCorpus, slices: Sequence[Slice]) -> EncodedSources:
    """Return the shards of all slices as a single run would have encoded them; InputError if they do not match."""
    # all were made with the settings and the encoder of this run
    slice_folder.check_settings(slices, corpus.settings)
    folders_by_encoder = {task_slice.record.encoder: task_slice.folder for task_slice in slices}
    if len(folders_by_encoder) > 1:
        examples = list(folders_by_encoder.items())[:2]
        encodings = " and ".join(f"{folder} by {name}" for name, folder in examples)
        raise InputError(
            f"the slices were encoded differently: {encodings}; run the tasks on machines with the same packages"
        )
    encoder = slices[0].record.encoder

    # read the finished shards
    shards = corpus.shards(encoder)
    folders = slice_folder.folders_of_shards(slices)
    records: dict[int, ShardRecord] = {}
    log = ThrottledLog()
    for shard in shards:
        log(f"reading slices: {shard.index:,} of {len(shards):,} shards")
        if shard.key in folders:
            record = read_record(folders[shard.key], shard)
            if record is not None:
                records[shard.index] = record
    lost = [shard.index for shard in unfinished_shards(corpus, shards, records)]
    slice_folder.check_unchanged(slices, corpus, shards, lost)

    # the SHA-256 of each file, from the slice that has hashed it
    hashed_files: dict[FileState, SourceFile] = {}
    for task_slice in slices:
        for file in task_slice.record.files:
            if file.hashed is not None:
                hashed_files[file.state] = file.hashed
    digests: list[np.ndarray] = []
    for states in states_of(corpus.sources):
        hexadecimal = "".join(hashed_files[state].sha256 for state in states)
        digests.append(np.frombuffer(bytes.fromhex(hexadecimal), np.uint8).reshape(-1, SHA256_BYTES))
    return EncodedSources(
        records=[records[index] for index in sorted(records)],
        digests=digests,
        encoder=encoder,
        num_proc=1,
    )


def merge_command(arguments: TokenizeArguments, output_dir: str) -> str:
    """Return the command that merges all slices into ``output_dir``; ``arguments`` are the arguments of one task.

    The pattern of folders comes from the task's --output_dir: task 3 with ``slices/3`` gives ``slices/*``.
    """
    parent, name = os.path.split(os.path.normpath(arguments.output_dir))
    whole_number = rf"(?<!\d){_slice_number(arguments)}(?!\d)"  # 3 in slice-3, and not in slice-13
    pattern, num_replaced = re.subn(whole_number, "*", name, count=1)
    folders = os.path.join(parent, pattern) if num_replaced else "SLICES"
    # quote all but the asterisk, which the shell must expand; shlex would quote an empty piece as ''
    quoted_pieces = [shlex.quote(piece) if piece else "" for piece in folders.split("*")]
    command = f"{command_from_here('merge')} {'*'.join(quoted_pieces)} --output_dir {shlex.quote(output_dir)}"
    if arguments.parts and not arguments.counts_lines:
        command += " --parts true"
    return command


def encode_command(arguments: TokenizeArguments, lines_dir: str) -> str:
    """Return the command that encodes the slice that was counted with ``arguments``.

    ``lines_dir`` is the folder with the repeated lines of all slices, which the encoding leaves out.
    """
    # the arguments of the command that differ from the defaults, with those that change in the end
    new_values = {
        "boilerplate": lines_dir,
        "shard": arguments.shard,
        "output_dir": beside_slices(arguments, os.path.join("slices", _slice_number(arguments))),
    }
    values: dict[str, object] = {}
    for argument in fields(arguments):
        default: object = argument.default
        if argument.default_factory is not MISSING:
            default = argument.default_factory()
        value = getattr(arguments, argument.name)
        if value != default and argument.name not in new_values:
            values[argument.name] = value
    values |= new_values

    # as words of the command line
    words: list[str] = []
    for name, value in values.items():
        words.append(f"--{name}")
        if isinstance(value, bool):
            words.append(str(value).lower())
        elif isinstance(value, list):
            words += [str(item) for item in value]
        else:
            words.append(str(value))
    return f"{command_from_here('tokenize')} {shlex.join(words)}"


def beside_slices(arguments: TokenizeArguments, name: str) -> str:
    """Return the path of ``name`` next to the folder of the slices, or next to the slices if they have no folder."""
    folder = os.path.normpath(arguments.output_dir)
    parent = os.path.dirname(folder)
    if os.path.basename(folder) == _slice_number(arguments):  # slices/3: beside `slices`
        parent = os.path.dirname(parent)
    return os.path.join(parent, name)


def _slice_number(arguments: TokenizeArguments) -> str:
    assert arguments.part is not None, "only tasks of --shard have others that follow"
    return str(arguments.part[0])
