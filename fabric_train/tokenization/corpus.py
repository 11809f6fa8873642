"""Divide the shards and the files of the input among the tasks of ``--shard I/N``, by bytes."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.cli.output import redact
from fabric_train.tokenization.chats.chat_template import read_chosen_template
from fabric_train.tokenization.cleaning.cleaner import Cleaner, open_cleaner
from fabric_train.tokenization.manifest import SourceRecord
from fabric_train.tokenization.packing.rows import Packing
from fabric_train.tokenization.reading.listing import sha256
from fabric_train.tokenization.reading.opening import open_sources, split_names
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shard_files import Shard
from fabric_train.tokenization.shards import SourceFormat, find_kinds, open_formats, split_into_shards
from fabric_train.tokenization.tokenizers.tokenizer import CorpusTokenizer, load_tokenizer
from fabric_train.tokenization.tokenizers.tokenizer_folder import set_chat_template

if TYPE_CHECKING:
    from fabric_train.tokenization.arguments import TokenizeArguments

_BYTES_HASHED_TOGETHER = 256 << 20
_SOURCE_OPTIONS = ("--dataset", "--validation_dataset")


@dataclass(frozen=True)
class InputSlice:
    """Slice ``number`` of ``count``, from 1: what one task reads. 1 of 1 is all of the input."""

    number: int = 1
    count: int = 1

    def of(self, sizes: Sequence[int]) -> list[bool]:
        """Return which of consecutive items of these sizes in bytes are in this slice."""
        return [number == self.number for number in slice_numbers(sizes, self.count)]


def slice_numbers(sizes: Sequence[int], count: int) -> list[int]:
    """Return the slice, from 1 to ``count``, of each of consecutive items: the one that its middle byte is in.

    Slices have as many bytes each as the items allow.

    Args:
        sizes: bytes of each item.
        count: number of slices.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    total = max(1, int(ends[-1])) if len(ends) else 1
    numbers = 1 + ((ends - np.asarray(sizes) / 2) * count / total).astype(np.int64)
    return [min(number, count) for number in numbers.tolist()]


@dataclass(frozen=True)
class FilesToHash:
    """The files ``start`` to ``stop - 1`` of source ``source``, which one process hashes."""

    source: int
    start: int
    stop: int


def files_read_at_once(sources: Sequence[Source], shards: Sequence[Shard]) -> list[np.ndarray]:
    """Return which files of each source are hashed when their shard is read, bool [files] each."""
    are_read = [np.zeros(len(source.files), dtype=bool) for source in sources]
    for shard in shards:
        are_read[shard.source][shard.origins[shard.read_at_once]] = True
    return are_read


def files_to_hash(
    sources: Sequence[Source], input_slice: InputSlice, are_read: Sequence[np.ndarray]
) -> Iterator[FilesToHash]:
    """Yield the files of a slice, in groups of about 256 MiB; the slices of files are not those of shards.

    A file is hashed by one process, so that SHA-256 of it is as for the whole file.

    Args:
        sources: all sources.
        input_slice: the slice.
        are_read: which files of each source are hashed elsewhere, bool [files] each.
    """
    is_in = input_slice.of([size for source in sources for size in source.files.sizes])
    is_in = (np.array(is_in, dtype=bool) & ~np.concatenate([[], *are_read]).astype(bool)).tolist()
    first = 0
    for number, source in enumerate(sources):
        start, num_bytes = 0, 0
        for index, size in enumerate(source.files.sizes):
            num_bytes += size if is_in[first + index] else 0
            if not is_in[first + index]:
                if start < index:
                    yield FilesToHash(number, start, index)
                start, num_bytes = index + 1, 0
            elif num_bytes >= _BYTES_HASHED_TOGETHER:
                yield FilesToHash(number, start, index + 1)
                start, num_bytes = index + 1, 0
        if start < len(source.files):
            yield FilesToHash(number, start, len(source.files))
        first += len(source.files)


@dataclass(frozen=True)
class Caps:
    """Documents and tokens after which reading the first ``num_sources`` sources may stop; None is no cap."""

    num_sources: int
    max_documents: int | None
    max_tokens: int | None


@dataclass(frozen=True)
class OpenedCorpus:
    """The sources, the tokenizer, and how documents are cleaned and encoded.

    Args:
        arguments: the command line of ``tokenize_dataset.py``, with the packing that the sources decide.
        named: the name and place of each source as given.
        train: the sources of --dataset.
        held_out: the sources of --validation_dataset.
        tokenizer: the tokenizer.
        tokenizer_folder: the folder that it was saved in, with the chat template that is used.
        tokenizer_hashes: SHA-256 of each file in that folder.
        formats: one per source.
        cleaner: cleans texts before they are encoded; None leaves them as they are.
    """

    arguments: "TokenizeArguments"
    named: list[tuple[str, str]]
    train: list[Source]
    held_out: list[Source]
    tokenizer: CorpusTokenizer
    tokenizer_folder: Path
    tokenizer_hashes: dict[str, str]
    formats: list[SourceFormat]
    cleaner: Cleaner | None

    @property
    def sources(self) -> list[Source]:
        """Return all sources, by which shards and files are numbered."""
        return [*self.train, *self.held_out]

    @property
    def settings(self) -> str:
        """Return what decides the tokens of a shard besides its source and the encoder, as JSON."""
        given = self.arguments
        longest = None if given.packing == "concat" else given.max_length
        chosen = (given.text_column, given.data_format, given.train_on, given.too_long, longest)
        cleaning = {} if self.cleaner is None else self.cleaner.settings()
        return json.dumps([chosen, self.tokenizer_hashes, given.deduplicate, cleaning], sort_keys=True)

    @property
    def num_proc(self) -> int:
        """Return the number of processes that may work at a time."""
        return self.arguments.num_proc or available_cores()

    @property
    def caps(self) -> Caps:
        """Return where reading may stop; --deduplicate, --near_duplicates and --weights need all documents."""
        given = self.arguments
        reads_all = given.deduplicate or given.near_duplicates is not None or given.weights is not None
        caps = (None, None) if reads_all else (given.max_documents, given.max_tokens)
        return Caps(len(self.train), *caps)

    def shards(self, encoder: str) -> list[Shard]:
        """Return all shards of the sources, as the encoder of this name encodes them."""
        return split_into_shards(self.sources, f"{self.settings} {encoder}")

    def files_read_at_once(self, shards: Sequence[Shard]) -> list[np.ndarray]:
        """Return which files of each source are hashed when their shard is read, bool [files] each.

        There are none if a cap may end the reading before.
        """
        ends_early = self.caps.max_documents is not None or self.caps.max_tokens is not None
        return files_read_at_once(self.sources, [] if ends_early else shards)

    def source_records(self, digests: Sequence[np.ndarray]) -> list[SourceRecord]:
        """Return the sources' records for the manifest; ``digests`` has the SHA-256 of the files of each source."""
        records = []
        for source, of_files, (name, place) in zip(self.sources, digests, self.named, strict=True):
            records.append(replace(source.record(of_files), name=name, place=redact(place)))
        return records


def open_corpus(arguments: "TokenizeArguments", tokenizer_folder: Path, downloads: Path) -> OpenedCorpus:
    """Open the sources and the tokenizer, print the sources' notes, and save the tokenizer.

    Args:
        arguments: the command line of ``tokenize_dataset.py``.
        tokenizer_folder: where to save the tokenizer, with the chat template that is used.
        downloads: folder for the files that URLs name.

    Raises:
        InputError: a source, the tokenizer, the chat template or a cleaning step cannot be used.
    """
    named = {option: split_names(getattr(arguments, option[2:]) or [], option) for option in _SOURCE_OPTIONS}
    tokenizer = load_tokenizer(arguments.tokenizer_name)
    chosen = None if arguments.chat_template is None else read_chosen_template(arguments.chat_template, tokenizer)
    train, held_out = (
        open_sources([place for _, place in given], option, arguments.stream, downloads)
        for option, given in named.items()
    )
    for source in (*train, *held_out):
        print(f"reading {source.name}", *source.notes, sep="\n  ", file=sys.stderr)
    tokenizer.save(tokenizer_folder)
    if chosen is not None:
        set_chat_template(tokenizer_folder, chosen)
    kinds = find_kinds([*train, *held_out], arguments)
    default: Packing = "best_fit" if set(kinds) - {"text"} else "concat"  # which would cut chats
    arguments = replace(arguments, packing=arguments.packing or default)
    formats = open_formats(kinds, tokenizer_folder, arguments)
    return OpenedCorpus(
        arguments=arguments,
        named=[one for given in named.values() for one in given],
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        tokenizer_hashes={file.name: sha256(file) for file in sorted(tokenizer_folder.iterdir())},
        formats=formats,
        cleaner=open_cleaner(arguments, kinds),
    )


def available_cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
