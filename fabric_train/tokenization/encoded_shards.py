"""Shards: the sources cut into pieces that processes encode one by one, each finished on the disk for itself.

A shard's files are named by what decides their content (the source's file, its size and time, the range, the settings),
so an interrupted run starts again with the shards that are finished and still true::

    .NAME.unfinished/3f2a….tokens   int32, the documents' tokens one after another
                     3f2a….masks    uint8, 1 where the token is supervised; absent where all are
                     3f2a….npz      written last: a record a document, and the rows that were left out
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fabric_train.tokenization import manifest
from fabric_train.tokenization.documents import BadRowError, EncodedDocument
from fabric_train.tokenization.reading.files import text_of
from fabric_train.tokenization.reading.sources import PartReader, Source
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, add_bos_eos

if TYPE_CHECKING:
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

_BATCH_CHARACTERS = 500_000  # texts handed to the encoder at once
_LARGEST, _SMALLEST, _WANTED = 32 << 20, 512 << 10, 256  # bytes of a shard; how many shards there should be
REASONS = (manifest.EMPTY, manifest.BAD_ROW, manifest.TOO_LONG, manifest.NOTHING_SUPERVISED, manifest.DUPLICATE)

# number: the row's among those read of its shard, from 1; num_tokens_cut: see EncodedDocument
DOCUMENT = np.dtype([("number", "u4"), ("length", "u4"), ("characters", "u4"), ("num_tokens_cut", "u4")])
SKIPPED = np.dtype([("number", "u4"), ("reason", "u1")])
HASH_BYTES = 16


@dataclass(frozen=True)
class Shard:
    """Parts of one source that are read together; ``key`` is its name on the disk."""

    index: int
    source: int
    parts: tuple[Any, ...]
    num_bytes: int
    key: str


@dataclass(frozen=True)
class ShardRecord:
    """What a shard holds: ``documents`` DOCUMENT [kept], ``skipped`` SKIPPED, ``hashes`` of content, bytes [kept, 16]
    or [0, 16], the number of rows read, whether there are masks, and the first bad row in words.
    """

    documents: np.ndarray
    skipped: np.ndarray
    hashes: np.ndarray
    num_read: int
    has_masks: bool
    first_bad_row: str

    @property
    def num_tokens(self) -> int:
        """Tokens of all its documents."""
        return int(self.documents["length"].sum(dtype=np.int64))


@dataclass(frozen=True)
class SourceFormat:
    """How a source's rows become tokens: text of ``columns[0]``, or chats by ``chat``."""

    columns: tuple[str, ...]
    chat: "ChatEncoder | None"


@dataclass(frozen=True)
class Work:
    """All that a process needs to encode a shard.

    ``progress`` holds bytes, documents and tokens done, for shard i at 3 i, shared among the processes.
    """

    folder: Path
    sources: list[Source]
    formats: list[SourceFormat]
    encoder: TextEncoder
    bos_token_id: int | None
    eos_token_id: int
    hashed: bool
    skips_bad_rows: bool
    progress: Any


def cut_into_shards(sources: list[Source], settings: str) -> list[Shard]:
    """Cut the sources, a shard holding parts of one source alone; ``settings`` is what else decides their tokens."""
    total = sum(source.num_bytes for source in sources)
    shard_bytes = min(max(total // _WANTED, _SMALLEST), _LARGEST)
    shards: list[Shard] = []
    for number, source in enumerate(sources):
        parts: list[Any] = []
        for part in source.parts(shard_bytes):
            if parts and sum(part.num_bytes for part in parts) + part.num_bytes > shard_bytes:
                shards.append(_shard(len(shards), number, source, parts, settings))
                parts = []
            parts.append(part)
        if parts:
            shards.append(_shard(len(shards), number, source, parts, settings))
    return shards


def _shard(index: int, number: int, source: Source, parts: list[Any], settings: str) -> Shard:
    identities = [source.identity(part) for part in parts]
    known = all(identity is not None for identity in identities)
    content = "\n".join([settings, *map(str, identities)]) if known else os.urandom(16).hex()
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return Shard(index, number, tuple(parts), sum(part.num_bytes for part in parts), key)


def read_record(folder: Path, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard, None where it is not finished."""
    file = folder / f"{shard.key}.npz"
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as stored:
        return ShardRecord(
            documents=stored["documents"],
            skipped=stored["skipped"],
            hashes=stored["hashes"],
            num_read=int(stored["num_read"]),
            has_masks=(folder / f"{shard.key}.masks").exists(),
            first_bad_row=str(stored["first_bad_row"]),
        )


def encode_shard(work: Work, shard: Shard) -> None:
    """Read, encode and write one shard.

    Raises:
        InputError: a file that is not what its name says, or a bad row that is not to be skipped.
    """
    tokens = work.folder / f"{shard.key}.tokens"
    masks = work.folder / f"{shard.key}.masks"
    with tokens.open("wb") as file:
        writer = _Writer(file, masks, work, shard.index)
        try:
            for part in shard.parts:
                _encode_part(work, shard, part, writer)
        finally:
            writer.close()
    partial_file = work.folder / f"{shard.key}.partial"
    with partial_file.open("wb") as record:
        np.savez(
            record,
            documents=np.array(writer.documents, dtype=DOCUMENT),
            skipped=np.array(writer.skipped, dtype=SKIPPED),
            hashes=np.frombuffer(b"".join(writer.hashes), np.uint8).reshape(-1, HASH_BYTES),
            num_read=writer.num_read,
            first_bad_row=writer.first_bad_row,
        )
    partial_file.rename(work.folder / f"{shard.key}.npz")


def _encode_part(work: Work, shard: Shard, part: Any, writer: "_Writer") -> None:
    format_ = work.formats[shard.source]
    reader = work.sources[shard.source].reader(part, format_.columns)
    if format_.chat is None:
        documents = _encode_texts(work, reader, format_.columns[0], writer)
    else:
        documents = _encode_chats(format_.chat, reader, writer)
    for ordinal, document in documents:
        writer.write(ordinal, document, reader.position)
    writer.end_part(part.num_bytes)


def _encode_texts(
    work: Work, reader: PartReader, column: str, writer: "_Writer"
) -> Iterator[tuple[int, EncodedDocument]]:
    """Yield the documents with text, encoded by batches."""
    texts: list[str] = []
    ordinals: list[int] = []
    num_characters = 0
    for number, row in reader:
        ordinal = writer.read()
        try:
            if isinstance(row, BadRowError):
                raise row
            text = text_of(row, column, partial(reader.place, number))
        except BadRowError as error:
            writer.skip_bad_row(ordinal, error)
            continue
        if text is None or not text.strip():
            writer.skip(ordinal, manifest.EMPTY)
            continue
        texts.append(text)
        ordinals.append(ordinal)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield from _encode_batch(work, texts, ordinals)
            texts, ordinals, num_characters = [], [], 0
    yield from _encode_batch(work, texts, ordinals)


def _encode_batch(work: Work, texts: list[str], ordinals: list[int]) -> Iterator[tuple[int, EncodedDocument]]:
    for ordinal, text, ids in zip(ordinals, texts, work.encoder.encode_batch(texts), strict=True):
        whole = add_bos_eos(ids, work.bos_token_id, work.eos_token_id)
        yield ordinal, EncodedDocument(whole, None, len(text))


def _encode_chats(chat: "ChatEncoder", reader: PartReader, writer: "_Writer") -> Iterator[tuple[int, EncodedDocument]]:
    for number, row in reader:
        ordinal = writer.read()
        try:
            if isinstance(row, BadRowError):
                raise row
            encoded = chat.encode(row)
        except BadRowError as error:
            place = "" if error is row else f"{reader.place(number)}: "
            writer.skip_bad_row(ordinal, BadRowError(f"{place}{error}"))
            continue
        if isinstance(encoded, str):
            writer.skip(ordinal, encoded)
        else:
            yield ordinal, encoded


class _Writer:
    """Takes a shard's documents to the disk and counts them."""

    def __init__(self, tokens: BinaryIO, masks: Path, work: Work, index: int) -> None:
        self.documents: list[tuple[int, int, int, int]] = []
        self.skipped: list[tuple[int, int]] = []
        self.hashes: list[bytes] = []
        self.num_read = 0
        self.first_bad_row = ""
        self._tokens, self._work, self._slot = tokens, work, 3 * index
        self._masks_path = masks
        self._masks: BinaryIO | None = None
        masks.unlink(missing_ok=True)
        self._bytes_before = self._num_tokens = 0

    def end_part(self, num_bytes: int) -> None:
        """Count a part as done."""
        self._bytes_before += num_bytes
        self._show(0)

    def read(self) -> int:
        """Count a row as read and return its number in the shard, from 1."""
        self.num_read += 1
        return self.num_read

    def skip(self, ordinal: int, reason: str) -> None:
        """Leave a row out."""
        self.skipped.append((ordinal, REASONS.index(reason)))

    def skip_bad_row(self, ordinal: int, error: BadRowError) -> None:
        """Leave a row out that cannot be used, or raise InputError."""
        if not self._work.skips_bad_rows:
            raise error.fault() from None
        self.first_bad_row = self.first_bad_row or str(error)
        self.skip(ordinal, manifest.BAD_ROW)

    def write(self, ordinal: int, document: EncodedDocument, position: int) -> None:
        """Write a document's tokens and, from the first that has one, masks."""
        num_tokens = len(document.input_ids)
        if document.supervised is not None and self._masks is None:
            self._masks = self._masks_path.open("wb")
            self._masks.write(b"\1" * self._num_tokens)
        if self._masks is not None:
            mask = document.supervised
            self._masks.write(b"\1" * num_tokens if mask is None else mask.astype(np.uint8).data)
        self._tokens.write(document.input_ids.data)
        self._num_tokens += num_tokens
        self.documents.append((ordinal, num_tokens, document.num_characters, document.num_tokens_cut))
        if self._work.hashed:
            digest = hashlib.blake2b(document.input_ids.data, digest_size=HASH_BYTES)
            if document.supervised is not None:
                digest.update(document.supervised.data)
            self.hashes.append(digest.digest())
        self._show(position)

    def close(self) -> None:
        """Close the masks' file."""
        if self._masks is not None:
            self._masks.close()

    def _show(self, position: int) -> None:
        done = (self._bytes_before + position, len(self.documents), self._num_tokens)
        self._work.progress[self._slot : self._slot + 3] = done
