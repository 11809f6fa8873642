"""Run a task of ``--shard I/N``, which encodes a slice of the input or counts its lines; merge the slices of all tasks.

A merge is a run in which all shards are finished. The commands that follow a task are printed.
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
from typing import Any

import numpy as np

from fabric_train.cleaning.boilerplate import Boilerplate, write_repeated_lines
from fabric_train.cli.errors import InputError
from fabric_train.cli.fabric_command import command_from_here
from fabric_train.cli.progress import ThrottledLog
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.reading.listing import SHA256_BYTES
from fabric_train.reading.sources import Source
from fabric_train.token_dataset.manifest import Manifest
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
from fabric_train.tokenization.shards import SIZES, ShardRecord, ShardSizes, read_record
from fabric_train.tokenization.slice_folder import (
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
    """Count the lines of the slice --shard into --output_dir, complete or absent; return lines of a summary."""
    part = part_of(arguments)
    # the tokenizer is of no use here, but a wrong one is found before the lines are counted
    with opened_corpus(arguments, sizes) as (corpus, folder, unfinished):
        all_shards = split_to_count(corpus)
        shards = list(compress(all_shards, part.of([shard.num_bytes for shard in all_shards])))
        started = time.monotonic()
        count_lines(corpus, shards, unfinished)
        states = list(chain.from_iterable(states_of(corpus.sources)))
        own = compress(states, part.of([size for _, _, size, *_ in states]))
        files = [InputFile(state, None) for state in own]
        write_slice(folder, unfinished, shards, arguments, "", counting_settings(corpus), files)
    seconds = time.monotonic() - started
    num_bytes = sum(shard.num_bytes for shard in shards)
    return [
        f"slice      {arguments.shard}: lines of {len(shards):,} shards are counted",
        f"speed      {num_bytes / 1e6 / seconds:,.1f} MB/s, {seconds:.1f} s with {corpus.num_proc} processes",
    ]


def merge_counts(slices: Sequence[Slice], target: Path, sizes: ShardSizes = SIZES) -> Boilerplate:
    """Add up all counted slices and write the lines that repeat into ``target``, which is complete or absent."""
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
    """Encode the slice --shard into --output_dir, complete or absent; return lines of a summary."""
    with opened_corpus(arguments, sizes) as (corpus, folder, unfinished):
        started = time.monotonic()
        encoded = encode_sources(corpus, unfinished, check, part_of(arguments))
        seconds = time.monotonic() - started
        files = list(_hashed_files(corpus.sources, encoded.digests))
        shards = [record.shard for record in encoded.records]
        num_documents = sum(len(record.documents) for record in encoded.records)
        num_tokens = sum(record.num_tokens for record in encoded.records)
        notes = notes_of(corpus, encoded)
        if arguments.parts:
            packed = _describe_packed(corpus, encoded)
            write_token_dataset(folder, corpus, encoded, of_slice=True)
            write_packed_slice(folder, arguments, encoded.encoder, corpus.settings, files, packed)
        else:
            write_slice(folder, unfinished, shards, arguments, encoded.encoder, corpus.settings, files)
    speed = f"{num_tokens / seconds:,.0f} tokens/s, {seconds:.1f} s with {encoded.num_proc} processes"
    return [
        f"slice      {arguments.shard}: {len(shards):,} shards, {num_documents:,} documents, {num_tokens:,} tokens",
        f"speed      {speed}",
        *(f"note       {note}" for note in notes),
    ]


def _describe_packed(corpus: OpenedCorpus, encoded: EncodedSources) -> PackedSlice:
    if not any(len(record.documents) for record in encoded.records):
        raise InputError(f"--shard {corpus.arguments.shard}: no document is in this slice; use fewer slices")
    first = encoded.records[0].shard
    last = encoded.records[-1].shard
    before = next((shard for shard in corpus.shards(encoded.encoder) if shard.index == first.index - 1), None)
    goes_on = before is not None and (before.source, before.origins[-1]) == (first.source, first.origins[0])
    own = [record for record in encoded.records if record.shard.source == last.source]
    rows_of_last = sum(
        int(record.parts["rows"][record.shard.origins == last.origins[-1]].sum(dtype=np.int64)) for record in own
    )
    files = {(record.shard.source, origin) for record in encoded.records for origin in record.shard.origins.tolist()}
    return PackedSlice(goes_on, len(files), rows_of_last)


def _hashed_files(sources: Sequence[Source], digests: Sequence[np.ndarray]) -> Iterator[InputFile]:
    for source, of_files, states in zip(sources, digests, states_of(sources), strict=True):
        triples = zip(states, source.record(of_files).files, map(np.any, of_files), strict=True)
        yield from (InputFile(state, hashed) for state, hashed, is_own in triples if is_own)


def merge_slices(slices: Sequence[Slice], target: Path, sizes: ShardSizes = SIZES) -> tuple[Manifest, list[str]]:
    """Write the token dataset that one run without --shard would write, complete or absent; return notes too."""
    with complete_folder(target) as folder:
        corpus = slice_folder.open_input(slices, folder, sizes)
        encoded = _join(corpus, slices)
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return manifest, notes


def _join(corpus: OpenedCorpus, slices: Sequence[Slice]) -> EncodedSources:
    encoder = slices[0].record.encoder
    slice_folder.check_settings(slices, corpus.settings)
    by_encoder = {one.record.encoder: one.folder for one in slices}
    if len(by_encoder) > 1:
        pairs = " and ".join(f"{folder} by {name}" for name, folder in list(by_encoder.items())[:2])
        raise InputError(f"encoded differently: {pairs}; run the tasks on machines with the same packages")
    shards = corpus.shards(encoder)
    folders = slice_folder.folders_of_shards(slices)
    records: dict[int, ShardRecord] = {}
    log = ThrottledLog()
    for shard in shards:
        log(f"reading slices: {shard.index:,} of {len(shards):,} shards")
        record = read_record(folders[shard.key], shard) if shard.key in folders else None
        if record is not None:
            records[shard.index] = record
    lost = [shard.index for shard in unfinished_shards(corpus, shards, records)]
    slice_folder.check_unchanged(slices, corpus, shards, lost)
    hashed = {file.state: file.hashed for one in slices for file in one.record.files if file.hashed is not None}
    return EncodedSources(
        records=[records[index] for index in sorted(records)],
        digests=[
            np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, SHA256_BYTES)
            for digests in ([hashed[state].sha256 for state in states] for states in states_of(corpus.sources))
        ],
        encoder=encoder,
        num_proc=1,
    )


def merge_command(arguments: TokenizeArguments, output_dir: str) -> str:
    """Return the command that merges all slices into ``output_dir``; ``arguments`` are of one task."""
    parent, name = os.path.split(os.path.normpath(arguments.output_dir))
    pattern, is_numbered = re.subn(rf"(?<!\d){_number(arguments)}(?!\d)", "*", name, count=1)
    folders = os.path.join(parent, pattern) if is_numbered else "SLICES"
    quoted = "*".join(shlex.quote(piece) if piece else "" for piece in folders.split("*"))
    as_parts = " --parts true" if arguments.parts and not arguments.counts_lines else ""
    return f"{command_from_here('merge')} {quoted} --output_dir {shlex.quote(output_dir)}{as_parts}"


def encode_command(arguments: TokenizeArguments, lines: str) -> str:
    """Return the command that encodes the slice counted with ``arguments``, without ``lines``, a folder."""
    output_dir = beside_slices(arguments, os.path.join("slices", _number(arguments)))
    changed = {"boilerplate": lines, "shard": arguments.shard, "output_dir": output_dir}
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments) if _is_given(field, arguments)}
    same = {name: value for name, value in given.items() if name not in changed}
    words = [word for name, value in (same | changed).items() for word in (f"--{name}", *_words(value))]
    return f"{command_from_here('tokenize')} {shlex.join(words)}"


def beside_slices(arguments: TokenizeArguments, name: str) -> str:
    """Return the path of ``name`` beside the folder of the slices, or beside the slices if they have no folder."""
    folder = os.path.normpath(arguments.output_dir)
    parent = os.path.dirname(folder)
    return os.path.join(os.path.dirname(parent) if os.path.basename(folder) == _number(arguments) else parent, name)


def _number(arguments: TokenizeArguments) -> str:
    assert arguments.part is not None, "only tasks of --shard have others that follow"
    return str(arguments.part[0])


def _is_given(field: Any, arguments: TokenizeArguments) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return bool(getattr(arguments, field.name) != default)


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
