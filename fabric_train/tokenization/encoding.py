"""Encode the shards of the corpus in several processes: read, clean and encode documents, and write their tokens.

In parallel, another process compares the encoder's ids with the tokenizer's.
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
from fabric_train.reading.files import naming_memory_errors
from fabric_train.reading.listing import SHA256_BYTES, FilePart, check_unchanged, hash_files
from fabric_train.reading.sources import PartReader
from fabric_train.token_dataset import manifest
from fabric_train.tokenization.chats.formats import UNPAIRED
from fabric_train.tokenization.corpus import OpenedCorpus, SourceFormat, open_formats, sample_texts
from fabric_train.tokenization.shard_files import ENCODED, ShardRecord, ShardWriter, read_record, remove_outdated_shards
from fabric_train.tokenization.shards import FilesToHash, InputSlice, Shard, files_to_hash, part_name
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.tokenization.tokenizers.text_encoder import Borders, FastEncoder, TextEncoder, open_encoder
from fabric_train.workers import WorkerPool

_TICK_SECONDS = 0.2
_BATCH_BYTES = 2 << 20  # of text passed to the encoder at once
_Place = tuple[int, int]  # number and row of a document, see ENCODED
_Task = int | FilesToHash  # an int is the index of a shard


@dataclass
class _LastEncoder:
    """Keeps the encoder of the last call in this process alive.

    Freeing an encoder takes longer than writing the rows, so it is left to the end of the process or to the next call:
    an encoder may have tens of megabytes.
    """

    encoder: TextEncoder | None = None


_last = _LastEncoder()


@dataclass(frozen=True)
class EncodedSources:
    """The finished shards of a slice of the input, or of the entire input."""

    records: list[ShardRecord]  # in the order of the sources
    digests: list[np.ndarray]  # per source the SHA-256 of its files, uint8 [files, 32]; zeros if in other slices
    encoder: str  # ``gigatoken``, or ``tokenizers: WHY``
    num_proc: int  # the processes that have encoded


class _DifferentIdsError(Exception):
    """The encoder and the tokenizer give different ids; the message shows where."""


@dataclass(frozen=True)
class EncodingJob:
    """Everything that a process needs to encode the shard with an index, or to hash files.

    ``shards`` are all shards, with their many files. ``progress`` is an array of int64 [3 * shards] in shared memory:
    the bytes, documents and tokens of each shard that are done.
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
        all_files = self.corpus.sources[task.source].files
        files = (all_files[index] for index in range(task.start, task.stop))
        return b"".join(hash_files(files))

    def show(self, shard: int, num_bytes: int, num_documents: int, num_tokens: int) -> None:
        """Record the finished part of the shard with this index."""
        self.progress[3 * shard : 3 * shard + 3] = num_bytes, num_documents, num_tokens

    def what_is_read(self, task: _Task) -> str:
        """Return the file or dataset that a task is reading, for the message about a process that was killed."""
        if not isinstance(task, int):
            return self.corpus.sources[task.source].name
        shard = self.shards[task]
        source = self.corpus.sources[shard.source]
        bytes_done = self.progress[3 * task]
        part_end = 0  # in the bytes of the shard
        for part in shard.parts:
            part_end += part.num_bytes
            if bytes_done < part_end:
                return part_name(source, part)
        return part_name(source, shard.parts[-1])  # all parts are read, and the last texts are encoded


def encode_sources(corpus: OpenedCorpus, folder: Path, check: ParityCheck, input_slice: InputSlice) -> EncodedSources:
    """Encode the shards of a slice that are not finished yet, and write them to ``folder``.

    If ``check`` finds that gigatoken gives an id that differs from the Hugging Face tokenizer's, everything is encoded
    again with the latter. InputError if a source cannot be read, has a bad row and bad rows are not skipped, or has
    changed meanwhile; ChildProcessError if a process was killed; RunError if memory ran out.
    """
    tokenizer_file = corpus.tokenizer_folder / "tokenizer.json"
    special_text_is_plain = corpus.tokenizer.special_text_is_plain
    check.start(tokenizer_file, special_text_is_plain)
    check.prepare(list(sample_texts(corpus)))
    encoder, encoder_name = open_encoder(tokenizer_file, special_text_is_plain)
    _last.encoder = encoder
    try:
        return _encode_with(encoder, encoder_name, corpus, folder, check, input_slice)
    except _DifferentIdsError as error:
        encoder, encoder_name = open_encoder(tokenizer_file, special_text_is_plain, why_not_gigatoken=str(error))
        kinds = [source_format.kind for source_format in corpus.formats]
        formats = open_formats(kinds, corpus.tokenizer_folder, corpus.arguments, split_at_control_tokens=False)
        corpus = replace(corpus, formats=formats)
        return _encode_with(encoder, encoder_name, corpus, folder, check, input_slice)


def _encode_with(
    encoder: TextEncoder,
    encoder_name: str,
    corpus: OpenedCorpus,
    folder: Path,
    check: ParityCheck,
    input_slice: InputSlice,
) -> EncodedSources:
    """Encode the unfinished shards with this encoder, and compare its ids with the tokenizer's meanwhile.

    Raises:
        _DifferentIdsError: the ids differ.
    """
    num_outdated = remove_outdated_shards(folder)
    if num_outdated:
        print(f"re-encoding {num_outdated:,} shards that were finished by an older version", file=sys.stderr)

    # the shards of the slice, and those of them that an earlier run has finished
    all_shards = corpus.shards(encoder_name)
    is_selected = input_slice.select([shard.num_bytes for shard in all_shards])
    shards = list(compress(all_shards, is_selected))
    progress = multiprocessing.RawArray("q", 3 * len(all_shards))
    job = EncodingJob(corpus, folder, encoder, all_shards, progress)
    records = _read_finished_records(job, shards)

    # the tasks: first files to hash, then shards, until the finished ones reach a cap
    groups_to_hash = list(files_to_hash(corpus.sources, input_slice, corpus.files_read_at_once(all_shards)))
    unfinished = (shard.index for shard in unfinished_shards(corpus, shards, records))
    tasks: Iterator[_Task] = chain(groups_to_hash, unfinished)
    num_tasks = len(groups_to_hash) + len(shards) - len(records)
    num_proc = max(1, min(corpus.num_proc, num_tasks))

    digests = [np.zeros((len(source.files), SHA256_BYTES), dtype=np.uint8) for source in corpus.sources]
    total_bytes = max(1, sum(shard.num_bytes for shard in shards))
    started = time.monotonic()
    with WorkerPool(job.run, num_proc, job.what_is_read) as workers, progress_of("tokenizing") as show:
        finished_tasks = workers.run(tasks, _TICK_SECONDS)
        next(finished_tasks, None)  # starts the first tasks
        # a FastEncoder is the library that ids are compared with
        is_compared = not isinstance(encoder, FastEncoder)
        if is_compared:
            check.begin(encoder, job.borders)
        import pyarrow  # noqa: F401 - needed to write the rows; the import takes no extra time while others encode

        for finished_task in finished_tasks:
            # None is a tick, on which only the progress is shown
            if finished_task is not None:
                task, result = finished_task
                if isinstance(task, int):
                    record = read_record(folder, all_shards[task])
                    assert record is not None, task
                    records[task] = record
                else:
                    hashed = np.frombuffer(result, np.uint8).reshape(-1, SHA256_BYTES)
                    digests[task.source][task.start : task.stop] = hashed
            share_done = min(sum(progress[0::3]) / total_bytes, 1)
            show(share_done, _describe_progress(progress, time.monotonic() - started))
        difference = check.result() if is_compared else None
    if difference:
        raise _DifferentIdsError(difference)
    sorted_records = [records[index] for index in sorted(records)]
    encoded = EncodedSources(sorted_records, digests, encoder_name, num_proc)
    _check_files(corpus, encoded)
    return encoded


def _describe_progress(progress: Any, seconds: float) -> str:
    """Return the documents and tokens that are done, and the tokens per second; ``progress`` is the job's."""
    num_documents = sum(progress[1::3])
    num_tokens = sum(progress[2::3])
    speed = num_tokens / max(seconds, 1e-9)
    return f"{num_documents:,} documents, {num_tokens:,} tokens, {speed:,.0f} tokens/s"


def _check_files(corpus: OpenedCorpus, encoded: EncodedSources) -> None:
    """Add the hashes of files that were read at once to ``encoded``, and check that no file has changed."""
    for record in encoded.records:
        part_digests = np.ascontiguousarray(record.parts["sha256"]).view(np.uint8).reshape(-1, SHA256_BYTES)
        is_hashed = part_digests.any(axis=1)  # zeros: the file is hashed by a task of its own
        files = record.shard.origins[is_hashed]
        encoded.digests[record.shard.source][files] = part_digests[is_hashed]
    for source, file_digests in zip(corpus.sources, encoded.digests, strict=True):
        hashed_files = np.flatnonzero(file_digests.any(axis=1))
        for number in hashed_files.tolist():
            check_unchanged(source.files[number], file_digests[number].tobytes())


def _read_finished_records(job: EncodingJob, shards: Sequence[Shard]) -> dict[int, ShardRecord]:
    """Return the records of the shards that an earlier run has finished, by index, and count these as done."""
    records = {}
    for shard in shards:
        record = _usable_record(job, shard)
        if record is not None:
            records[shard.index] = record
            job.show(shard.index, shard.num_bytes, len(record.documents), record.num_tokens)
    return records


def _usable_record(job: EncodingJob, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard; None if it skipped bad rows and this run must report them."""
    record = read_record(job.folder, shard)
    if record is None:
        return None
    if record.first_bad_row and not job.corpus.arguments.skips_bad_rows:
        return None
    return record


def unfinished_shards(
    corpus: OpenedCorpus, shards: Sequence[Shard], records: dict[int, ShardRecord]
) -> Iterator[Shard]:
    """Yield the shards that are not in ``records``, which grows meanwhile, until those before them reach a cap.

    A cap only counts finished shards that have no unfinished shard before them: later documents are not needed
    if these shards reach the cap.
    """
    max_documents, max_tokens = corpus.caps
    num_train = len(corpus.train)
    num_documents = 0
    num_tokens = 0
    num_counted = 0  # shards from the beginning that are counted
    for shard in shards:
        # count the shards that have been finished since the last one was yielded
        while num_counted < len(shards) and shards[num_counted].index in records:
            counted_shard = shards[num_counted]
            if counted_shard.source < num_train:
                record = records[counted_shard.index]
                num_documents += len(record.documents)
                num_tokens += record.num_tokens
            num_counted += 1
        has_documents = max_documents is not None and num_documents >= max_documents
        has_tokens = max_tokens is not None and num_tokens >= max_tokens
        is_unneeded = (has_documents or has_tokens) and shard.source < num_train  # caps are for --dataset
        if shard.index not in records and not is_unneeded:
            yield shard


def encode_shard(job: EncodingJob, shard: Shard) -> None:
    """Read, encode and write one shard."""
    corpus = job.corpus
    load_extensions(corpus.arguments.extensions or [])  # a process that was not forked has no registered formats
    source = corpus.sources[shard.source]
    source_format = corpus.formats[shard.source]
    writer = ShardWriter(
        job.folder,
        shard,
        partial(job.show, shard.index),
        hashed=corpus.arguments.deduplicate,
        hashes_first_sequence=source_format.kind == UNPAIRED,
        signed=corpus.cleaner is not None and corpus.cleaner.near_duplicates is not None,
        skips_bad_rows=corpus.arguments.skips_bad_rows,
    )
    with writer:
        waiting_texts = _WaitingTexts(job, writer)
        for part in shard.parts:
            reader = source.reader(part, source_format.columns)
            try:
                with naming_memory_errors(part_name(source, part)):
                    num_documents = _encode_part(corpus, source_format, reader, waiting_texts, writer)
            finally:  # a file that is changed while it is read may look damaged; the change is then the error to report
                if isinstance(part, FilePart):
                    check_unchanged(part.file)
            writer.end_part(num_documents, part.num_bytes, reader.num_counted, reader.sha256())
        with naming_memory_errors(part_name(source, shard.parts[-1])):
            waiting_texts.encode(0)
        writer.finish()


def _encode_part(
    corpus: OpenedCorpus,
    source_format: SourceFormat,
    reader: PartReader,
    waiting_texts: "_WaitingTexts",
    writer: ShardWriter,
) -> int:
    """Encode the documents of a part, and return their number; the last texts may be left in ``waiting_texts``."""
    if source_format.chat is not None:
        return _encode_chats(corpus, source_format, reader, writer)
    text_column = source_format.columns[0]
    return _encode_texts(corpus, text_column, reader, waiting_texts, writer)


class _WaitingTexts:
    """Texts of a shard, from one or several parts, that wait to be encoded together."""

    def __init__(self, job: EncodingJob, writer: ShardWriter) -> None:
        self._encoder = job.encoder
        self._borders = job.borders
        self._writer = writer
        self._texts: list[bytes] = []
        self._counts: list[tuple[int, int, int, int]] = []  # number, row, characters and bytes: see ENCODED
        self._num_bytes = 0

    def add(self, place: _Place, text: str, data: bytes, position: int) -> None:
        """Add a text, given as UTF-8 ``data``; ``position`` is the number of the part's bytes that have been read."""
        self._texts.append(data)
        self._counts.append((*place, len(text), len(data)))
        self._num_bytes += len(data)
        if self._num_bytes >= _BATCH_BYTES:
            self.encode(position)

    def encode(self, position: int) -> None:
        """Encode and write the waiting texts."""
        if not self._texts:
            return
        ids, lengths = self._encoder.encode_documents(self._texts, self._borders)
        documents = np.zeros(len(self._texts), dtype=ENCODED)
        documents["length"] = lengths
        counts = np.array(self._counts, dtype=np.uint32)  # [documents, 4]
        documents["number"] = counts[:, 0]
        documents["row"] = counts[:, 1]
        documents["characters"] = counts[:, 2]
        documents["bytes"] = counts[:, 3]
        self._writer.write(documents, ids, None, position)
        self._texts = []
        self._counts = []
        self._num_bytes = 0


def _encode_texts(
    corpus: OpenedCorpus, column: str, reader: PartReader, waiting_texts: _WaitingTexts, writer: ShardWriter
) -> int:
    """Read and clean a part's documents, encode them in batches, and return the number of kept documents."""
    num_documents = 0
    cleaner = corpus.cleaner
    known_columns = {name_in(column, ())} | writer.unused  # most rows have no others and need no closer look
    for row_number, row in reader:
        ordinal = writer.read()
        place = (ordinal, row_number)
        try:
            text, data = text_of(row, column, partial(reader.place, row_number))
        except BadRowError as error:
            writer.skip_bad_row(ordinal, error)
            continue
        if isinstance(row, Mapping) and not row.keys() <= known_columns:
            writer.unused |= columns_beside_text(row, column)
            known_columns |= writer.unused
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
        waiting_texts.add(place, text, data, reader.position)
        num_documents += 1
    writer.unused |= reader.unread_columns
    return num_documents


@dataclass(frozen=True)
class _WaitingChat:
    """A chat or pair that was read and cleaned, and waits for its tokens; or a bad row."""

    place: _Place
    content: Chat | Pair | BadRowError
    signature: np.ndarray | None


def _encode_chats(corpus: OpenedCorpus, source_format: SourceFormat, reader: PartReader, writer: ShardWriter) -> int:
    """Read, clean, encode and write a part's chats or pairs, and return the number of kept ones."""
    encoder = source_format.pairs or source_format.chat
    assert encoder is not None, "texts are encoded elsewhere"
    # the encoder reads ahead, to encode several chats at once, and yields results in the order of the chats
    waiting: deque[_WaitingChat] = deque()

    def read_chats() -> Iterator[Any]:
        for row_number, row in reader:
            place = (writer.read(), row_number)
            chat: _WaitingChat | None
            try:
                content = row if isinstance(row, BadRowError) else source_format.read(row)
                chat = _clean_chat(corpus, content, place, writer)
            except BadRowError as error:
                chat = _WaitingChat(place, error.at(reader.place(row_number)), None)
            if chat is not None:  # None if cleaning drops it
                waiting.append(chat)
                yield chat.content

    num_documents = 0
    for encoded in encoder.encode_all(read_chats()):
        chat = waiting.popleft()
        ordinal, row_number = chat.place
        if isinstance(encoded, BadRowError):
            error = encoded
            if error is not chat.content:  # an error of the encoder, which does not know the place of the row
                error = error.at(reader.place(row_number))
            writer.skip_bad_row(ordinal, error)
        elif isinstance(encoded, LeftOut):
            writer.skip(ordinal, encoded)
        else:
            counts = (encoded.num_characters, encoded.num_bytes, encoded.num_tokens_cut)
            document = np.array([(ordinal, row_number, len(encoded.input_ids), *counts)], dtype=ENCODED)
            writer.write(document, encoded.input_ids, encoded.supervised, reader.position, encoded.pair)
            writer.sign(chat.signature)
            writer.turn_ends |= encoded.turn_ends
            writer.unused |= encoded.unused
            num_documents += 1
    writer.unused |= reader.unread_columns
    return num_documents


def _clean_chat(
    corpus: OpenedCorpus, content: Chat | Pair | BadRowError, place: _Place, writer: ShardWriter
) -> _WaitingChat | None:
    """Return the cleaned chat and its signature, or None if it is dropped; bad rows and blank chats are not changed."""
    cleaner = corpus.cleaner
    if cleaner is None or isinstance(content, BadRowError):
        return _WaitingChat(place, content, None)
    joined = content.joined
    if is_blank(joined):
        return _WaitingChat(place, content, None)
    result = cleaner.clean_chat(content)
    ordinal, row_number = place
    cleaned = writer.clean(ordinal, row_number, result, lambda: cleaner.redact(text_without_system(joined)))
    if cleaned is None:
        return None
    return _WaitingChat(place, cleaned.content, cleaned.signature)
