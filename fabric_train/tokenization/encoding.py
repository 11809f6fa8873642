"""Encode the shards of the corpus in several processes: read, clean and encode documents, and write their tokens.

Another process meanwhile compares the encoder's ids with the tokenizer's.
"""

import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.cleaning.cleaner import text_without_system
from fabric_train.cli.progress import progress_of
from fabric_train.cli.tables import load_extensions
from fabric_train.reading.documents import (
    BadRowError,
    Chat,
    LeftOut,
    Pair,
    columns_beside_text,
    is_blank,
    name_in,
    text_of,
)
from fabric_train.reading.files import memory_errors_name
from fabric_train.reading.listing import SHA256_BYTES, FilePart, check_unchanged, hash_files
from fabric_train.reading.sources import PartReader
from fabric_train.token_dataset import manifest
from fabric_train.tokenization.corpus import OpenedCorpus, SourceFormat, open_formats, sample_texts
from fabric_train.tokenization.shards import (
    ENCODED,
    FilesToHash,
    InputSlice,
    Shard,
    ShardRecord,
    ShardWriter,
    files_to_hash,
    part_name,
    read_record,
    remove_outdated_shards,
)
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.tokenizers.text_encoder import Borders, FastEncoder, TextEncoder, open_encoder
from fabric_train.workers import WorkerPool

_TICK_SECONDS = 0.2
_BATCH_BYTES = 2 << 20  # of text passed to the encoder at once
_Place = tuple[int, int]  # number and row of a document, see ENCODED
_Task = int | FilesToHash  # an int is the index of a shard
_kept_alive: list[TextEncoder] = []  # freeing an encoder takes longer than writing the rows


@dataclass(frozen=True)
class EncodedSources:
    """The records of the finished shards, in the order of the sources.

    ``digests`` has the SHA-256 of the files of each source, uint8 [files, 32], zeros for those in other slices.
    ``encoder`` is ``gigatoken``, or ``tokenizers: WHY``. ``num_proc`` processes have encoded.
    """

    records: list[ShardRecord]
    digests: list[np.ndarray]
    encoder: str
    num_proc: int


class _DifferentIdsError(Exception):
    """The encoder and the tokenizer give different ids; the message shows where."""


@dataclass(frozen=True)
class EncodingJob:
    """What a process needs to encode a shard, whose index it gets, or to hash files.

    ``shards`` are all shards, with their many files. ``progress`` is an array of int64 [3 * shards] in shared memory:
    the bytes, documents and tokens done of each shard.
    """

    corpus: OpenedCorpus
    folder: Path
    encoder: TextEncoder
    shards: Sequence[Shard]
    progress: Any

    @property
    def borders(self) -> Borders:
        return Borders(self.corpus.tokenizer.bos_token_id, self.corpus.tokenizer.eos_token_id)

    def run(self, task: _Task) -> bytes:
        """Encode a shard, or return the SHA-256 of files, joined."""
        if isinstance(task, int):
            encode_shard(self, self.shards[task])
            return b""
        files = self.corpus.sources[task.source].files
        return b"".join(hash_files(map(files.__getitem__, range(task.start, task.stop))))

    def show(self, shard: int, num_bytes: int, num_documents: int, num_tokens: int) -> None:
        """Record the finished part of the shard with this index."""
        self.progress[3 * shard : 3 * shard + 3] = num_bytes, num_documents, num_tokens

    def what_is_read(self, task: _Task) -> str:
        """Return the file or dataset that a task has come to."""
        if not isinstance(task, int):
            return self.corpus.sources[task.source].name
        done = self.progress[3 * task]
        shard = self.shards[task]
        for part in shard.parts:
            if done < part.num_bytes:
                break
            done -= part.num_bytes
        return part_name(self.corpus.sources[shard.source], part)


def encode_sources(corpus: OpenedCorpus, folder: Path, check: ParityCheck, input_slice: InputSlice) -> EncodedSources:
    """Encode the shards of a slice that are not finished yet, into ``folder``.

    If gigatoken gives another id than the Hugging Face tokenizer, as ``check`` finds out, everything is encoded again
    with the latter. InputError if a source cannot be read, has a bad row and bad rows are not skipped, or has changed
    meanwhile; ChildProcessError if a process was killed; RunError if memory ran out.
    """
    file = corpus.tokenizer_folder / "tokenizer.json"
    special_text_is_plain = corpus.tokenizer.special_text_is_plain
    check.start(file, special_text_is_plain)
    check.prepare(list(sample_texts(corpus)))
    encoder, name = open_encoder(file, special_text_is_plain)
    _kept_alive[:] = [encoder]  # without the encoder of an earlier call, which may have tens of megabytes
    try:
        return _encode_with(encoder, name, corpus, folder, check, input_slice)
    except _DifferentIdsError as error:
        encoder, name = open_encoder(file, special_text_is_plain, why_not_gigatoken=str(error))
        kinds = [format_.kind for format_ in corpus.formats]
        corpus = replace(corpus, formats=open_formats(kinds, corpus.tokenizer_folder, corpus.arguments, by_parts=False))
        return _encode_with(encoder, name, corpus, folder, check, input_slice)


def _encode_with(
    encoder: TextEncoder, name: str, corpus: OpenedCorpus, folder: Path, check: ParityCheck, input_slice: InputSlice
) -> EncodedSources:
    """Encode with the encoder of this name; _DifferentIdsError if its ids differ from the tokenizer's."""
    outdated = remove_outdated_shards(folder)
    if outdated:
        print(f"{outdated:,} shards that an older version finished are encoded again", file=sys.stderr)
    all_shards = corpus.shards(name)
    shards = list(compress(all_shards, input_slice.select([shard.num_bytes for shard in all_shards])))
    to_hash = list(files_to_hash(corpus.sources, input_slice, corpus.files_read_at_once(all_shards)))
    job = EncodingJob(corpus, folder, encoder, all_shards, multiprocessing.RawArray("q", 3 * len(all_shards)))
    records = {shard.index: record for shard in shards if (record := _usable_record(job, shard)) is not None}
    for index, record in records.items():
        job.show(index, all_shards[index].num_bytes, len(record.documents), record.num_tokens)
    digests = [np.zeros((len(source.files), SHA256_BYTES), dtype=np.uint8) for source in corpus.sources]
    total = sum(shard.num_bytes for shard in shards)
    started = time.monotonic()
    tasks: Iterator[_Task] = chain(to_hash, (shard.index for shard in unfinished_shards(corpus, shards, records)))
    num_proc = max(1, min(corpus.num_proc, len(to_hash) + len(shards) - len(records)))
    with WorkerPool(job.run, num_proc, job.what_is_read) as workers, progress_of("tokenizing") as show:
        finished_tasks = workers.run(tasks, _TICK_SECONDS)
        next(finished_tasks, None)  # starts the first tasks
        is_compared = not isinstance(encoder, FastEncoder)
        if is_compared:
            check.begin(encoder, job.borders)
        import pyarrow  # noqa: F401 - needed to write the rows; the import takes no extra time while others encode

        for finished in finished_tasks:
            if finished is not None:
                task, result = finished
                if isinstance(task, int):
                    record = read_record(folder, all_shards[task])
                    assert record is not None, task
                    records[task] = record
                else:
                    hashed = np.frombuffer(result, np.uint8).reshape(-1, SHA256_BYTES)
                    digests[task.source][task.start : task.stop] = hashed
            done, documents, tokens = (sum(job.progress[start::3]) for start in range(3))
            speed = tokens / max(time.monotonic() - started, 1e-9)
            show(min(done / max(total, 1), 1), f"{documents:,} documents, {tokens:,} tokens, {speed:,.0f} tokens/s")
        difference = check.result() if is_compared else None
    if difference:
        raise _DifferentIdsError(difference)
    encoded = EncodedSources([records[index] for index in sorted(records)], digests, name, num_proc)
    _check_files(corpus, encoded)
    return encoded


def _check_files(corpus: OpenedCorpus, encoded: EncodedSources) -> None:
    """Add the hashes of files that were read at once to ``encoded``, and check that no file has changed."""
    for record in encoded.records:
        hashed = np.ascontiguousarray(record.parts["sha256"]).view(np.uint8).reshape(-1, SHA256_BYTES)
        are_hashed = hashed.any(axis=1)
        encoded.digests[record.shard.source][record.shard.origins[are_hashed]] = hashed[are_hashed]
    for source, of_files in zip(corpus.sources, encoded.digests, strict=True):
        for number in np.flatnonzero(of_files.any(axis=1)).tolist():
            check_unchanged(source.files[number], of_files[number].tobytes())


def _usable_record(job: EncodingJob, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard; None if it skipped bad rows and this run must report them."""
    record = read_record(job.folder, shard)
    must_report = record is not None and bool(record.first_bad_row) and not job.corpus.arguments.skips_bad_rows
    return None if must_report else record


def unfinished_shards(
    corpus: OpenedCorpus, shards: Sequence[Shard], records: dict[int, ShardRecord]
) -> Iterator[Shard]:
    """Yield the shards that are not in ``records``, which grows meanwhile, until those before them reach a cap."""
    max_documents, max_tokens = (cap or float("inf") for cap in corpus.caps)
    num_documents = num_tokens = following = 0
    for shard in shards:
        while following < len(shards) and (before := records.get(shards[following].index)) is not None:
            if shards[following].source < len(corpus.train):
                num_documents += len(before.documents)
                num_tokens += before.num_tokens
            following += 1
        reached = num_documents >= max_documents or num_tokens >= max_tokens
        if shard.index not in records and not (reached and shard.source < len(corpus.train)):
            yield shard


def encode_shard(job: EncodingJob, shard: Shard) -> None:
    """Read, encode and write one shard."""
    corpus = job.corpus
    load_extensions(corpus.arguments.extensions or [])  # a process that was not forked has no registered formats
    source = corpus.sources[shard.source]
    format_ = corpus.formats[shard.source]
    writer = ShardWriter(
        job.folder,
        shard,
        partial(job.show, shard.index),
        hashed=corpus.arguments.deduplicate,
        signed=corpus.cleaner is not None and corpus.cleaner.near_duplicates is not None,
        skips_bad_rows=corpus.arguments.skips_bad_rows,
    )
    with writer:
        texts = _WaitingTexts(job, writer)
        for part in shard.parts:
            reader = source.reader(part, format_.columns)
            try:
                with memory_errors_name(part_name(source, part)):
                    if format_.chat is None:
                        num_documents = _encode_texts(corpus, format_.columns[0], reader, texts, writer)
                    else:
                        num_documents = _encode_chats(corpus, format_, reader, writer)
            finally:  # a file that is written to while it is read may look damaged: then that is the error
                if isinstance(part, FilePart):
                    check_unchanged(part.file)
            writer.end_part(num_documents, part.num_bytes, reader.num_counted, reader.sha256())
        with memory_errors_name(part_name(source, shard.parts[-1])):
            texts.encode(0)
        writer.finish()


class _WaitingTexts:
    """Texts of a shard, also of several parts, that wait to be encoded at once."""

    def __init__(self, job: EncodingJob, writer: ShardWriter) -> None:
        self._encoder = job.encoder
        self._borders = job.borders
        self._writer = writer
        self._texts: list[bytes] = []
        self._counts: list[tuple[int, ...]] = []
        self._num_bytes = 0

    def add(self, place: _Place, text: str, data: bytes, position: int) -> None:
        """Add a text, ``data`` in UTF-8; ``position`` is the number of the part's bytes that have been read."""
        self._texts.append(data)
        self._counts.append((*place, len(text), len(data)))
        self._num_bytes += len(data)
        if self._num_bytes >= _BATCH_BYTES:
            self.encode(position)

    def encode(self, position: int) -> None:
        if not self._texts:
            return
        ids, lengths = self._encoder.encode_documents(self._texts, self._borders)
        documents = np.zeros(len(self._texts), dtype=ENCODED)
        documents["length"] = lengths
        columns = np.array(self._counts, dtype=np.uint32)
        for index, name in enumerate(("number", "row", "characters", "bytes")):
            documents[name] = columns[:, index]
        self._writer.write(documents, ids, None, position)
        self._texts = []
        self._counts = []
        self._num_bytes = 0


def _encode_texts(
    corpus: OpenedCorpus, column: str, reader: PartReader, waiting: _WaitingTexts, writer: ShardWriter
) -> int:
    """Read and clean a part's documents, encode them in batches, and return the number of those that are kept."""
    num_documents = 0
    cleaner = corpus.cleaner
    columns_seen = {name_in(column, ())} | writer.unused  # of most rows, which are then looked at no further
    for row_number, row in reader:
        ordinal = writer.read()
        try:
            text, data = text_of(row, column, partial(reader.place, row_number))
        except BadRowError as error:
            writer.skip_bad_row(ordinal, error)
            continue
        if isinstance(row, Mapping) and not row.keys() <= columns_seen:
            writer.unused |= columns_beside_text(row, column)
            columns_seen |= writer.unused
        if not text or text.isspace():
            writer.skip(ordinal, LeftOut(manifest.EMPTY))
            continue
        if cleaner is not None:
            cleaned = writer.clean(ordinal, row_number, cleaner.clean(text), partial(cleaner.redact, text))
            if cleaned is None:
                continue
            writer.sign(cleaned.signature)
            text = cleaned.content
            data = cleaned.content.encode()
        waiting.add((ordinal, row_number), text, data, reader.position)
        num_documents += 1
    writer.unused |= reader.unread_columns
    return num_documents


def _encode_chats(corpus: OpenedCorpus, format_: SourceFormat, reader: PartReader, writer: ShardWriter) -> int:
    """Read, clean, encode and write a part's chats or pairs, and return the number of those that are kept."""
    num_documents = 0
    waiting: deque[tuple[_Place, Chat | Pair | BadRowError, np.ndarray | None]] = deque()

    def read_chats() -> Iterator[Any]:
        for row_number, row in reader:
            place = writer.read(), row_number
            try:
                read = row if isinstance(row, BadRowError) else format_.read(row)
                cleaned = _clean_chat(corpus, read, place, writer)
            except BadRowError as error:
                cleaned = error.at(reader.place(row_number)), None
            if cleaned is not None:
                waiting.append((place, *cleaned))
                yield cleaned[0]

    encoder = format_.pairs or format_.chat
    assert encoder is not None, "texts are encoded elsewhere"
    for encoded in encoder.encode_all(read_chats()):
        (ordinal, row_number), given, signature = waiting.popleft()
        if isinstance(encoded, BadRowError):
            writer.skip_bad_row(ordinal, encoded if encoded is given else encoded.at(reader.place(row_number)))
        elif isinstance(encoded, LeftOut):
            writer.skip(ordinal, encoded)
        else:
            counts = (encoded.num_characters, encoded.num_bytes, encoded.num_tokens_cut)
            document = np.array([(ordinal, row_number, len(encoded.input_ids), *counts)], dtype=ENCODED)
            writer.write(document, encoded.input_ids, encoded.supervised, reader.position, encoded.pair)
            writer.sign(signature)
            writer.turn_ends |= encoded.turn_ends
            writer.unused |= encoded.unused
            num_documents += 1
    writer.unused |= reader.unread_columns
    return num_documents


def _clean_chat(
    corpus: OpenedCorpus, chat: Chat | Pair | BadRowError, place: _Place, writer: ShardWriter
) -> tuple[Chat | Pair | BadRowError, np.ndarray | None] | None:
    """Return the cleaned chat and its signature, None if it is dropped; bad rows and blank chats stay as they are."""
    cleaner = corpus.cleaner
    if cleaner is None or isinstance(chat, BadRowError) or is_blank(chat.joined):
        return chat, None
    cleaned = writer.clean(*place, cleaner.clean_chat(chat), lambda: cleaner.redact(text_without_system(chat.joined)))
    return None if cleaned is None else (cleaned.content, cleaned.signature)
