"""Count lines for --boilerplate in slices of the input (``--shard I/N``), and add all slices up."""

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.cli.fabric_command import command_from_here
from fabric_train.files.atomic_folder import check_not_taken, complete_folder
from fabric_train.tokenization.build import notes_of, write_token_dataset
from fabric_train.tokenization.cleaning.boilerplate import Boilerplate, write_repeated_lines
from fabric_train.tokenization.cleaning.line_counts import (
    add_up_lines,
    count_lines,
    counting_settings,
    lines_file,
    split_to_count,
)
from fabric_train.tokenization.corpus import OpenedCorpus, open_corpus
from fabric_train.tokenization.encoding import EncodedSources, encode_sources, unfinished_shards
from fabric_train.tokenization.manifest import Manifest
from fabric_train.tokenization.reading.listing import SHA256_BYTES
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shard_files import ShardRecord, read_record
from fabric_train.tokenization.slice_folder import (
    InputFile,
    Slice,
    SliceRecord,
    check_settings,
    check_unchanged,
    folders_of_shards,
    link_shards,
    open_input,
    part_of,
    states_of,
    write_slice,
)
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.unfinished import DOWNLOADS, unfinished_folder
from fabric_train.tokenization.workers import ThrottledLog

if TYPE_CHECKING:
    from fabric_train.tokenization.arguments import TokenizeArguments


@dataclass(frozen=True)
class CountOutcome:
    """What a task has done: shards, bytes of the input, processes that may work, seconds."""

    num_shards: int
    num_bytes: int
    num_proc: int
    seconds: float


def count_slice(arguments: "TokenizeArguments") -> CountOutcome:
    """Count the lines of the slice --shard of the input into --output_dir. The folder is complete or absent.

    Raises:
        InputError: a source, the tokenizer or the output folder cannot be used, or a row is bad and not skipped.
    """
    target, part = Path(arguments.output_dir).expanduser(), part_of(arguments)
    check_not_taken(target)
    with unfinished_folder(target) as unfinished, complete_folder(target) as folder:
        corpus = open_corpus(arguments, folder / "tokenizer", unfinished / DOWNLOADS)
        shutil.rmtree(folder / "tokenizer")  # of no use here, but a wrong one is found before the lines are counted
        all_shards = split_to_count(corpus)
        shards = list(compress(all_shards, part.of([shard.num_bytes for shard in all_shards])))
        started = time.monotonic()
        count_lines(corpus, shards, unfinished)
        states = list(chain.from_iterable(states_of(corpus.sources)))
        own = compress(states, part.of([size for _, _, size, *_ in states]))
        files, written = [InputFile(state, None) for state in own], link_shards(shards, unfinished, folder)
        write_slice(folder, arguments, SliceRecord("", counting_settings(corpus), files, written, os.getcwd()))
    num_bytes = sum(shard.num_bytes for shard in shards)
    return CountOutcome(len(shards), num_bytes, corpus.num_proc, time.monotonic() - started)


def merge_counts(slices: Sequence[Slice], target: Path) -> Boilerplate:
    """Add up all counted slices and write the lines that repeat into ``target``, which is complete or absent.

    Args:
        slices: all slices of a run, in their order.
        target: the folder to write; see ``repeated_lines``.

    Raises:
        InputError: the input has changed since the slices were made, or cannot be read.
    """
    with complete_folder(target) as folder:
        corpus = open_input(slices, folder)
        shutil.rmtree(folder / "tokenizer")
        check_settings(slices, counting_settings(corpus))
        shards, folders = split_to_count(corpus), folders_of_shards(slices)
        lost = [shard.index for shard in shards if shard.key not in folders]
        check_unchanged(slices, corpus, shards, lost)
        assert corpus.cleaner is not None, "--boilerplate is a cleaning step"
        lines = add_up_lines(corpus, shards, [lines_file(folders[shard.key], shard) for shard in shards])
        lines = lines.redacted(corpus.cleaner.redact)
        write_repeated_lines(folder, lines, corpus.arguments.text_column)
    return lines


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


def merge_slices(slices: Sequence[Slice], target: Path) -> tuple[Manifest, list[str]]:
    """Write the token dataset ``target`` that one run without --shard would write. It is complete or absent.

    Args:
        slices: all slices of a run, in their order.
        target: the folder to write.

    Returns:
        The manifest, and notes for the user.

    Raises:
        InputError: the input has changed since the slices were made, or the token dataset cannot be written.
    """
    with complete_folder(target) as folder:
        corpus = open_input(slices, folder)
        encoded = _join(corpus, slices)
        notes = notes_of(corpus, encoded)
        manifest = write_token_dataset(folder, corpus, encoded)
    return manifest, notes


def _join(corpus: OpenedCorpus, slices: Sequence[Slice]) -> EncodedSources:
    """Return the shards and the hashed files of all slices.

    Raises:
        InputError: the input has changed since, or a slice is damaged.
    """
    encoder = slices[0].record.encoder
    check_settings(slices, corpus.settings)
    by_encoder = {one.record.encoder: one.folder for one in slices}
    if len(by_encoder) > 1:
        pairs = " and ".join(f"{folder} by {name}" for name, folder in list(by_encoder.items())[:2])
        raise InputError(f"encoded differently: {pairs}; run the tasks on machines with the same packages")
    shards = corpus.shards(encoder)
    folders = folders_of_shards(slices)
    records, log = dict[int, ShardRecord](), ThrottledLog()
    for shard in shards:
        log(f"reading slices: {shard.index:,} of {len(shards):,} shards")
        record = read_record(folders[shard.key], shard) if shard.key in folders else None
        if record is not None:
            records[shard.index] = record
    lost = [shard.index for shard in unfinished_shards(shards, records, corpus.caps)]
    check_unchanged(slices, corpus, shards, lost)
    hashed = {file.state: file.hashed for one in slices for file in one.record.files if file.hashed is not None}
    return EncodedSources(
        shards=[shard for shard in shards if shard.index in records],
        records=[records[index] for index in sorted(records)],
        digests=[
            np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, SHA256_BYTES)
            for digests in ([hashed[state].sha256 for state in states] for states in states_of(corpus.sources))
        ],
        encoder=encoder,
        num_proc=1,
    )


def merge_command(arguments: "TokenizeArguments", output_dir: str) -> str:
    """Return the command that merges all slices into ``output_dir``, as their folders are called in a shell.

    Args:
        arguments: of one task.
        output_dir: the folder to write.
    """
    parent, name = os.path.split(os.path.normpath(arguments.output_dir))
    pattern, is_numbered = re.subn(rf"(?<!\d){_number(arguments)}(?!\d)", "*", name, count=1)
    folders = os.path.join(parent, pattern) if is_numbered else "SLICES"
    quoted = "*".join(shlex.quote(piece) if piece else "" for piece in folders.split("*"))
    return f"{command_from_here('merge')} {quoted} --output_dir {shlex.quote(output_dir)}"


def encode_command(arguments: "TokenizeArguments", lines: str) -> str:
    """Return the command of a task that encodes its slice without the lines of the folder ``lines``.

    Args:
        arguments: of the task that counted the lines of this slice.
        lines: see ``repeated_lines``.
    """
    output_dir = beside_slices(arguments, os.path.join("slices", _number(arguments)))
    changed = {"boilerplate": lines, "shard": arguments.shard, "output_dir": output_dir}
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments) if _is_given(field, arguments)}
    same = {name: value for name, value in given.items() if name not in changed}
    words = [word for name, value in (same | changed).items() for word in (f"--{name}", *_words(value))]
    return f"{command_from_here('tokenize')} {shlex.join(words)}"


def beside_slices(arguments: "TokenizeArguments", name: str) -> str:
    """Return the path of ``name`` beside the folder of the slices, or beside the slices if they have no folder."""
    folder = os.path.normpath(arguments.output_dir)
    parent = os.path.dirname(folder)
    return os.path.join(os.path.dirname(parent) if os.path.basename(folder) == _number(arguments) else parent, name)


def _number(arguments: "TokenizeArguments") -> str:
    assert arguments.part is not None, "only tasks of --shard have others that follow"
    return str(arguments.part[0])


def _is_given(field: Any, arguments: "TokenizeArguments") -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return bool(getattr(arguments, field.name) != default)


def _words(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) for one in values]
