"""Encode one slice of the input (``--shard I/N``) into a folder, which is complete or absent."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.files.atomic_folder import check_not_taken, complete_folder
from fabric_train.tokenization.build import notes_of
from fabric_train.tokenization.encoding import encode_sources
from fabric_train.tokenization.opened_corpus import open_corpus
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.slice_folder import (
    InputFile,
    SliceRecord,
    link_shards,
    part_of,
    states_of,
    write_slice,
)
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.unfinished import DOWNLOADS, unfinished_folder

if TYPE_CHECKING:
    from arguments import TokenizeArguments


@dataclass(frozen=True)
class SliceOutcome:
    """What a task has done: shards, documents, tokens, processes, seconds; lines for the user."""

    num_shards: int
    num_documents: int
    num_tokens: int
    num_proc: int
    seconds: float
    notes: tuple[str, ...]


def encode_slice(arguments: "TokenizeArguments", check: ParityCheck) -> SliceOutcome:
    """Encode the slice --shard of the input into --output_dir. The folder is complete or absent.

    Args:
        arguments: the command line of ``tokenize_dataset.py``.
        check: compares the encoder's ids with the tokenizer's; it may already be loading the tokenizer.

    Raises:
        InputError: a source, the tokenizer or the output folder cannot be used.
    """
    target = Path(arguments.output_dir).expanduser()
    check_not_taken(target)
    with unfinished_folder(target) as unfinished, complete_folder(target) as folder:
        corpus = open_corpus(arguments, folder / "tokenizer", unfinished / DOWNLOADS)
        started = time.monotonic()
        encoded = encode_sources(corpus, unfinished, check, part_of(arguments))
        seconds = time.monotonic() - started
        shutil.rmtree(folder / "tokenizer")  # a merge saves it again, and compares the hashes
        files = list(_hashed_files(corpus.sources, encoded.digests))
        written = link_shards(encoded.shards, unfinished, folder)
        write_slice(folder, arguments, SliceRecord(encoded.encoder, corpus.settings, files, written, os.getcwd()))
    return SliceOutcome(
        num_shards=len(encoded.shards),
        num_documents=sum(len(record.documents) for record in encoded.records),
        num_tokens=sum(record.num_tokens for record in encoded.records),
        num_proc=encoded.num_proc,
        seconds=seconds,
        notes=tuple(notes_of(corpus, encoded)),
    )


def _hashed_files(sources: Sequence[Source], digests: Sequence[np.ndarray]) -> Iterator[InputFile]:
    """Yield the files that this task has hashed."""
    for source, of_files, states in zip(sources, digests, states_of(sources), strict=True):
        triples = zip(states, source.record(of_files).files, map(np.any, of_files), strict=True)
        yield from (InputFile(state, hashed) for state, hashed, is_own in triples if is_own)
