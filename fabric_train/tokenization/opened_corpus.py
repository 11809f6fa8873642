"""Open everything that a command line names, before the first document is encoded."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.cli.redaction import redact
from fabric_train.tokenization.chats.chosen_template import read_chosen_template
from fabric_train.tokenization.cleaning.cleaner import Cleaner, open_cleaner
from fabric_train.tokenization.encoded_shards import split_into_shards
from fabric_train.tokenization.manifest import SourceRecord
from fabric_train.tokenization.packing.rows import Packing
from fabric_train.tokenization.reading.listing import sha256
from fabric_train.tokenization.reading.opening import open_sources
from fabric_train.tokenization.reading.source_names import split_names
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shard_files import Shard
from fabric_train.tokenization.sharding import files_read_at_once
from fabric_train.tokenization.source_formats import SourceFormat, find_kinds, open_formats
from fabric_train.tokenization.tokenizers.chat_template_file import set_chat_template
from fabric_train.tokenization.tokenizers.tokenizer import CorpusTokenizer, load_tokenizer

if TYPE_CHECKING:
    from arguments import TokenizeArguments

_SOURCE_OPTIONS = ("--dataset", "--validation_dataset")


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
