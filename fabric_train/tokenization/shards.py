"""Find out what the rows of a source hold, text or chats, and how they are encoded."""

import hashlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.tokenization import manifest
from fabric_train.tokenization.chats.chat_format import (
    Chat,
    columns,
    detect_format,
    is_blank,
    read_chat,
    unexpected_format,
)
from fabric_train.tokenization.cleaning.cleaner import Cleaner, Dropped, text_without_system
from fabric_train.tokenization.documents import BadRowError, LeftOut, missing_column, name_in, text_of
from fabric_train.tokenization.reading.files import memory_errors_name
from fabric_train.tokenization.reading.listing import FilePart, check_unchanged
from fabric_train.tokenization.reading.sources import PartReader, Source
from fabric_train.tokenization.shard_files import ENCODED, FORMAT, Shard, ShardWriter
from fabric_train.tokenization.tokenizers.text_encoder import Borders, TextEncoder
from fabric_train.tokenization.tokenizers.tokenizer_folder import set_chat_template

if TYPE_CHECKING:
    from fabric_train.tokenization.arguments import TokenizeArguments
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

_BATCH_BYTES = 2 << 20  # of text passed to the encoder at once
_MAX_SHARD_BYTES, _MIN_SHARD_BYTES, _TARGET_NUM_SHARDS = 32 << 20, 1 << 20, 64
_MAX_NUM_SHARDS = 8192  # above 256 GiB shards get larger: the file system of a cluster is slow with many files
_Place = tuple[int, int]  # number and row of a document, see ENCODED


@dataclass(frozen=True)
class SourceFormat:
    """How to encode a source's rows of a ``kind``: ``chat`` encodes chats; if it is None, ``columns[0]`` holds text."""

    kind: str
    columns: tuple[str, ...]
    chat: "ChatEncoder | None"


def find_kinds(sources: Sequence[Source], arguments: "TokenizeArguments") -> list[str]:
    """Return each source's data format, found from its first row.

    Raises:
        InputError: one line for each source whose first row is bad or neither text nor a chat.
    """
    kinds: list[str] = []
    faults: list[str] = []
    for source in sources:
        try:
            given, skips = arguments.data_format, arguments.on_bad_rows == "skip"
            kinds.append(find_kind(source, arguments.text_column, skips) if given == "auto" else given)
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    return kinds


def find_kind(source: Source, text_column: str, skips_bad_rows: bool) -> str:
    """Return the data format of a source's first row: text if it has that column, else that of a chat or instruction.

    Raises:
        InputError: it has none of them, or the row is bad and bad rows are not skipped.
    """
    looked_for = (text_column, *columns("auto"))
    for part in source.parts(1 << 20):
        reader = source.reader(part, looked_for)
        for number, row in reader:
            if isinstance(row, BadRowError):
                if not skips_bad_rows:
                    raise row.fault()
                continue
            if name_in(text_column, row) in row:
                return "text"
            kind = detect_format(row)
            if kind is None:
                no_text = str(missing_column(reader.place(number), text_column, row))
                raise InputError(unexpected_format(row, "auto", f"{no_text}; and no chat or instruction"))
            return kind
    return "text"


def open_formats(
    kinds: Sequence[str], tokenizer_folder: Path, arguments: "TokenizeArguments", by_parts: bool = True
) -> list[SourceFormat]:
    """Return how to encode the sources of these kinds.

    If there are chats, their template becomes that of ``tokenizer_folder``.

    Args:
        kinds: from ``find_kinds``.
        tokenizer_folder: holds ``tokenizer.json``.
        arguments: the command line of ``tokenize_dataset.py``, with the packing.
        by_parts: see ``ChatEncoder``.

    Raises:
        InputError: the chat template cannot be used.
    """
    formats = {"text": SourceFormat("text", (arguments.text_column,), None)}
    longest = None if arguments.packing == "concat" else arguments.max_length
    for kind in sorted(set(kinds) - {"text"}):
        from fabric_train.tokenization.chats.chat_encoder import ChatEncoder  # slow to import, and texts do not need it

        encoder = ChatEncoder(
            tokenizer_folder,
            kind,
            arguments.train_on,
            arguments.too_long,
            longest,
            by_parts=by_parts,
            is_chosen=arguments.chat_template is not None,
        )
        formats[kind] = SourceFormat(kind, columns(kind), encoder)
        set_chat_template(tokenizer_folder, encoder.chat_template)
    return [formats[kind] for kind in kinds]


@dataclass(frozen=True)
class EncodingJob:
    """Everything that a process needs to encode a shard.

    ``formats`` has one entry per source. ``shards`` are all shards, so that no shard with its many files is sent to a
    process: it gets the number of one. ``progress`` is an array of int64 [3 * shards] in shared memory: the bytes,
    documents and tokens done of each shard. ``hashed`` asks for hashes of the documents.
    """

    folder: Path
    sources: list[Source]
    formats: list[SourceFormat]
    cleaner: Cleaner | None
    encoder: TextEncoder
    borders: Borders
    hashed: bool
    skips_bad_rows: bool
    progress: Any
    shards: Sequence[Shard] = ()


def split_into_shards(sources: list[Source], settings: str) -> list[Shard]:
    """Split the sources into shards, each with parts of one source.

    Args:
        sources: in the order in which they are read.
        settings: everything besides the sources that decides the tokens; it becomes part of each shard's key.
    """
    total = sum(source.num_bytes for source in sources)
    shard_bytes = min(max(total // _TARGET_NUM_SHARDS, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
    shard_bytes = max(shard_bytes, total // _MAX_NUM_SHARDS)
    shards: list[Shard] = []
    for number, source in enumerate(sources):
        parts: list[Any] = []
        num_bytes = 0
        for part in source.parts(shard_bytes):
            if parts and num_bytes + part.num_bytes > shard_bytes:
                shards.append(_shard(len(shards), number, source, parts, settings))
                parts, num_bytes = [], 0
            parts.append(part)
            num_bytes += part.num_bytes
        if parts:
            shards.append(_shard(len(shards), number, source, parts, settings))
    return shards


def _shard(index: int, number: int, source: Source, parts: list[Any], settings: str) -> Shard:
    identities = [source.identity(part) for part in parts]
    known = all(identity is not None for identity in identities)
    content = "\n".join([f"{FORMAT} {settings}", *map(str, identities)]) if known else os.urandom(16).hex()
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return Shard(
        index=index,
        source=number,
        parts=source.pack(parts),
        num_bytes=sum(part.num_bytes for part in parts),
        key=key,
        origins=np.array([part.origin for part in parts], dtype=np.int64),
        read_at_once=np.array([isinstance(part, FilePart) and part.is_read_at_once for part in parts]),
    )


def encode_shard(job: EncodingJob, shard: Shard) -> None:
    """Read, encode and write one shard.

    Raises:
        InputError: a file is not of the kind that its name says, or has changed since it was listed; or a row is bad,
            and bad rows are not skipped.
        RunError: memory ran out.
    """
    writer = ShardWriter(
        job.folder,
        shard,
        partial(_show, job, 3 * shard.index),
        hashed=job.hashed,
        signed=job.cleaner is not None and job.cleaner.near_duplicates is not None,
        skips_bad_rows=job.skips_bad_rows,
    )
    with writer:
        waiting = _WaitingTexts(job, writer)
        for part in shard.parts:
            _encode_part(job, shard, part, writer, waiting)
        with memory_errors_name(part_name(job.sources[shard.source], shard.parts[-1])):
            waiting.encode(0)
        writer.finish()


def _show(job: EncodingJob, slot: int, num_bytes: int, num_documents: int, num_tokens: int) -> None:
    job.progress[slot : slot + 3] = num_bytes, num_documents, num_tokens


def _encode_part(job: EncodingJob, shard: Shard, part: Any, writer: ShardWriter, waiting: "_WaitingTexts") -> None:
    format_, source = job.formats[shard.source], job.sources[shard.source]
    reader = source.reader(part, format_.columns)
    try:
        with memory_errors_name(part_name(source, part)):
            if format_.chat is None:
                num_documents = _read_texts(job, reader, format_.columns[0], writer, waiting)
            else:
                num_documents = _encode_chats(job, format_, format_.chat, reader, writer)
    finally:  # what is written to while it is read may look damaged: then that is the error to report
        if isinstance(part, FilePart):
            check_unchanged(part.file)
    writer.end_part(num_documents, part.num_bytes, reader.num_counted, reader.sha256())


def part_name(source: Source, part: Any) -> str:
    """Return the file of a part, or the name of a dataset that does not consist of files."""
    return part.name if isinstance(part, FilePart) else source.name


@dataclass(frozen=True)
class _WaitingChat:
    """A chat that waits to be encoded, as it was given to the encoder; ``signature`` is that of its text, if any."""

    place: _Place
    given: Chat | BadRowError
    signature: np.ndarray | None


class _WaitingTexts:
    """Texts of a shard, also of several parts, that wait to be encoded at once."""

    def __init__(self, job: EncodingJob, writer: ShardWriter) -> None:
        self._job, self._writer = job, writer
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
        """Encode and write the texts that wait."""
        if not self._texts:
            return
        ids, lengths = self._job.encoder.encode_documents(self._texts, self._job.borders)
        documents = np.zeros(len(self._texts), dtype=ENCODED)
        documents["length"] = lengths
        columns = np.array(self._counts, dtype=np.uint32)
        for index, name in enumerate(("number", "row", "characters", "bytes")):
            documents[name] = columns[:, index]
        self._writer.write(documents, ids, None, position)
        self._texts, self._counts, self._num_bytes = [], [], 0


def _read_texts(job: EncodingJob, reader: PartReader, column: str, writer: ShardWriter, waiting: _WaitingTexts) -> int:
    """Read and clean a part's documents, encode them in batches, and return the number of those that are kept."""
    num_documents = 0
    for row_number, row in reader:
        ordinal = writer.read()
        try:
            if isinstance(row, BadRowError):
                raise row
            text, data = text_of(row, column, partial(reader.place, row_number))
        except BadRowError as error:
            writer.skip_bad_row(ordinal, error)
            continue
        if not text or text.isspace():
            writer.skip(ordinal, LeftOut(manifest.EMPTY))
            continue
        if job.cleaner is not None:
            result = job.cleaner.clean(text)
            writer.list_hits(ordinal, row_number, result.hits)
            if isinstance(result, Dropped):
                writer.drop(ordinal, row_number, result, text, job.cleaner.redact)
                continue
            writer.count_edits(ordinal, result.edits)
            writer.sign(result.signature)
            text, data = result.text, result.text.encode()
        waiting.add((ordinal, row_number), text, data, reader.position)
        num_documents += 1
    return num_documents


def _encode_chats(
    job: EncodingJob, format_: SourceFormat, chat: "ChatEncoder", reader: PartReader, writer: ShardWriter
) -> int:
    """Read, clean, encode and write a part's chats, and return the number of those that are kept."""
    num_documents = 0
    waiting: deque[_WaitingChat] = deque()

    def read_chats() -> Iterator[Chat | BadRowError]:
        for row_number, row in reader:
            place = writer.read(), row_number
            try:
                read = row if isinstance(row, BadRowError) else read_chat(row, format_.kind)
                cleaned = _clean_chat(job, read, place, writer)
            except BadRowError as error:
                cleaned = BadRowError(f"{reader.place(row_number)}: {error}"), None
            if cleaned is not None:
                waiting.append(_WaitingChat(place, *cleaned))
                yield cleaned[0]

    for encoded in chat.encode_all(read_chats()):
        one = waiting.popleft()
        ordinal, row_number = one.place
        if isinstance(encoded, BadRowError):
            place = "" if encoded is one.given else f"{reader.place(row_number)}: "
            writer.skip_bad_row(ordinal, BadRowError(f"{place}{encoded}"))
        elif isinstance(encoded, LeftOut):
            writer.skip(ordinal, encoded)
        else:
            counts = (encoded.num_characters, encoded.num_bytes, encoded.num_tokens_cut)
            document = np.array([(ordinal, row_number, len(encoded.input_ids), *counts)], dtype=ENCODED)
            writer.write(document, encoded.input_ids, encoded.supervised, reader.position)
            writer.sign(one.signature)
            writer.turn_ends |= encoded.turn_ends
            num_documents += 1
    return num_documents


def _clean_chat(
    job: EncodingJob, chat: Chat | BadRowError, place: _Place, writer: ShardWriter
) -> tuple[Chat | BadRowError, np.ndarray | None] | None:
    """Return the chat as cleaning leaves it with its signature, or None if cleaning drops it; record what was found.

    Bad rows stay as they are, and so do blank chats: encoding reports or counts them.

    Raises:
        BadRowError: the chat is nested too deeply, or has half of a surrogate pair.
    """
    if job.cleaner is None or isinstance(chat, BadRowError) or is_blank(chat):
        return chat, None
    result = job.cleaner.clean_chat(chat)
    writer.list_hits(*place, result.hits)
    if isinstance(result, Dropped):
        writer.drop(*place, result, text_without_system(chat), job.cleaner.redact)
        return None
    writer.count_edits(place[0], result.edits)
    return result.chat, result.signature
