"""Split the sources into shards, and encode each shard into files of its own.

The name of a shard's files is a hash of everything that decides their content: the source file with its size and time,
the range that was read, and the settings. So a restarted run reuses the finished shards that are still valid::

    .NAME.unfinished/3f2a….tokens   int32, the tokens of all documents, joined
                     3f2a….masks    uint8, 1 where the token is supervised; absent if all are
                     3f2a….npz      written last: one record per document and per part, and the rows that were skipped
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fabric_train.tokenization import manifest
from fabric_train.tokenization.cleaning.cleaner import Cleaner, Dropped
from fabric_train.tokenization.cleaning.dropped_sample import PER_SHARD, TEXT_CHARACTERS
from fabric_train.tokenization.documents import BadRowError, EncodedDocument, LeftOut, utf8_length
from fabric_train.tokenization.reading.columns import text_of
from fabric_train.tokenization.reading.files import FilePart, memory_errors_name
from fabric_train.tokenization.reading.listing import check_unchanged
from fabric_train.tokenization.reading.sources import PartReader, Source
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, add_bos_eos

if TYPE_CHECKING:
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

_BATCH_CHARACTERS = 500_000  # passed to the encoder at once
_MAX_SHARD_BYTES, _MIN_SHARD_BYTES, _TARGET_NUM_SHARDS = 32 << 20, 512 << 10, 256

# number: of the row among those read in its shard, from 1; row: in its part, as the reader numbers it;
# characters, bytes, num_tokens_cut: see EncodedDocument and LeftOut
ENCODED = np.dtype([(name, "u4") for name in ("number", "row", "length", "characters", "bytes", "num_tokens_cut")])
PART = np.dtype([("documents", "u4"), ("rows", "u4")])  # documents kept, and rows counted by the reader
SKIPPED = np.dtype([("number", "u4"), ("reason", "u2"), ("num_tokens_cut", "u4")])  # reason: index of the record's
EDIT = np.dtype([("number", "u4"), ("kind", "u2"), ("count", "u4")])  # kind: index of the record's
HASH_BYTES = 16
_FORMAT = 4  # of the files of a shard

_Place = tuple[int, int]  # number and row of a document, see ENCODED


@dataclass(frozen=True)
class Shard:
    """Parts of one source that are encoded together; ``key`` names its files, ``source`` is the source's number."""

    index: int
    source: int
    parts: tuple[Any, ...]
    num_bytes: int
    key: str


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard holds.

    Args:
        documents: ENCODED [kept].
        parts: PART [parts of the shard].
        skipped: SKIPPED [rows skipped].
        reasons: of the skipped rows, as in the ledger.
        edits: EDIT [any number], what cleaning changed.
        kinds: of the edits, as in the ledger.
        samples: a few of the documents that cleaning dropped.
        hashes: uint8 [kept, 16], of each document's content; [0, 16] without --deduplicate.
        num_read: rows read.
        has_masks: whether there is a file of masks.
        first_bad_row: what is wrong with the first bad row; empty if there is none.
        turn_ends: int32 [any number], the control tokens with which supervised turns of its chats end.
    """

    documents: np.ndarray
    parts: np.ndarray
    skipped: np.ndarray
    reasons: tuple[str, ...]
    edits: np.ndarray
    kinds: tuple[str, ...]
    samples: tuple["DroppedRow", ...]
    hashes: np.ndarray
    num_read: int
    has_masks: bool
    first_bad_row: str
    turn_ends: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.documents["length"].sum(dtype=np.int64))


@dataclass(frozen=True)
class DroppedRow:
    """A document that cleaning dropped: its place in the shard, see ENCODED, and the beginning of its text."""

    number: int
    part: int
    row: int
    reason: str
    detail: str
    text: str


@dataclass(frozen=True)
class SourceFormat:
    """How to encode a source's rows of a ``kind``: ``chat`` encodes chats; if it is None, ``columns[0]`` holds text."""

    kind: str
    columns: tuple[str, ...]
    chat: "ChatEncoder | None"


@dataclass(frozen=True)
class EncodingJob:
    """Everything that a process needs to encode a shard.

    ``formats`` has one entry per source. ``progress`` is an array of int64 [3 * shards] in shared memory: the bytes,
    documents and tokens done of each shard. ``hashed`` asks for hashes of the documents. ``cleaner`` is for texts.
    """

    folder: Path
    sources: list[Source]
    formats: list[SourceFormat]
    cleaner: Cleaner | None
    encoder: TextEncoder
    bos_token_id: int | None
    eos_token_id: int
    hashed: bool
    skips_bad_rows: bool
    progress: Any


def split_into_shards(sources: list[Source], settings: str) -> list[Shard]:
    """Split the sources into shards, each with parts of one source.

    Args:
        sources: in the order in which they are read.
        settings: everything besides the sources that decides the tokens; it becomes part of each shard's key.
    """
    total = sum(source.num_bytes for source in sources)
    shard_bytes = min(max(total // _TARGET_NUM_SHARDS, _MIN_SHARD_BYTES), _MAX_SHARD_BYTES)
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
    content = "\n".join([f"{_FORMAT} {settings}", *map(str, identities)]) if known else os.urandom(16).hex()
    key = hashlib.sha256(content.encode()).hexdigest()[:24]
    return Shard(index, number, tuple(parts), sum(part.num_bytes for part in parts), key)


def read_record(folder: Path, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard, None if it is not finished."""
    file = folder / f"{shard.key}.npz"
    if not file.exists():
        return None
    with np.load(file, allow_pickle=False) as stored:
        return ShardRecord(
            documents=stored["documents"],
            parts=stored["parts"],
            skipped=stored["skipped"],
            reasons=tuple(stored["reasons"].tolist()),
            edits=stored["edits"],
            kinds=tuple(stored["kinds"].tolist()),
            samples=tuple(DroppedRow(**sample) for sample in json.loads(str(stored["samples"]))),
            hashes=stored["hashes"],
            num_read=int(stored["num_read"]),
            has_masks=(folder / f"{shard.key}.masks").exists(),
            first_bad_row=str(stored["first_bad_row"]),
            turn_ends=stored["turn_ends"],
        )


def remove_outdated_shards(folder: Path) -> int:
    """Remove the finished shards that an older version wrote, and return their number."""
    outdated = []
    for file in folder.glob("*.npz"):
        with np.load(file, allow_pickle=False) as stored:
            if "samples" not in stored.files:
                outdated.append(file)
    for file in outdated:
        for suffix in (".tokens", ".masks", ".npz"):
            file.with_suffix(suffix).unlink(missing_ok=True)
    return len(outdated)


def encode_shard(job: EncodingJob, shard: Shard) -> None:
    """Read, encode and write one shard.

    Raises:
        InputError: a file is not of the kind that its name says, or has changed since it was listed; or a row is bad,
            and bad rows are not skipped.
        RunError: memory ran out.
    """
    tokens = job.folder / f"{shard.key}.tokens"
    masks = job.folder / f"{shard.key}.masks"
    with tokens.open("wb") as file:
        writer = _Writer(file, masks, job, shard.index)
        try:
            for part in shard.parts:
                _encode_part(job, shard, part, writer)
        finally:
            writer.close()
    partial_file = job.folder / f"{shard.key}.partial"
    with partial_file.open("wb") as record:
        np.savez(
            record,
            documents=np.array(writer.documents, dtype=ENCODED),
            parts=np.array(writer.parts, dtype=PART),
            skipped=np.array(writer.skipped, dtype=SKIPPED),
            reasons=np.array(list(writer.reasons), dtype=str),
            edits=np.array(writer.edits, dtype=EDIT),
            kinds=np.array(list(writer.kinds), dtype=str),
            samples=json.dumps([asdict(sample) for sample in writer.samples]),
            hashes=np.frombuffer(b"".join(writer.hashes), np.uint8).reshape(-1, HASH_BYTES),
            num_read=writer.num_read,
            first_bad_row=writer.first_bad_row,
            turn_ends=np.array(sorted(writer.turn_ends), dtype=np.int32),
        )
    partial_file.rename(job.folder / f"{shard.key}.npz")


def _encode_part(job: EncodingJob, shard: Shard, part: Any, writer: "_Writer") -> None:
    format_, source = job.formats[shard.source], job.sources[shard.source]
    reader = source.reader(part, format_.columns)
    if format_.chat is None:
        documents = _encode_texts(job, reader, format_.columns[0], writer)
    else:
        documents = _encode_chats(format_.chat, reader, writer)
    try:
        with memory_errors_name(part_name(source, part)):
            for place, document in documents:
                writer.write(place, document, reader.position)
    finally:  # what is written to while it is read may look damaged: then that is the error to report
        if isinstance(part, FilePart):
            check_unchanged(part.file)
    writer.end_part(part.num_bytes, reader.num_counted)


def part_name(source: Source, part: Any) -> str:
    """Return the file of a part, or the name of a dataset that does not consist of files."""
    return str(part.path) if isinstance(part, FilePart) else source.name


def _encode_texts(
    job: EncodingJob, reader: PartReader, column: str, writer: "_Writer"
) -> Iterator[tuple[_Place, EncodedDocument]]:
    """Yield the documents that are not blank, encoded in batches."""
    texts: list[str] = []
    places: list[_Place] = []
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
            writer.skip(ordinal, LeftOut(manifest.EMPTY))
            continue
        if job.cleaner is not None:
            result = job.cleaner.clean(text)
            if isinstance(result, Dropped):
                writer.drop(ordinal, number, result, text)
                continue
            writer.count_edits(ordinal, result.edits)
            text = result.text
        texts.append(text)
        places.append((ordinal, number))
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield from _encode_batch(job, texts, places)
            texts, places, num_characters = [], [], 0
    yield from _encode_batch(job, texts, places)


def _encode_batch(job: EncodingJob, texts: list[str], places: list[_Place]) -> Iterator[tuple[_Place, EncodedDocument]]:
    for place, text, ids in zip(places, texts, job.encoder.encode_batch(texts), strict=True):
        whole = add_bos_eos(ids, job.bos_token_id, job.eos_token_id)
        yield place, EncodedDocument(whole, None, len(text), utf8_length(text))


def _encode_chats(
    chat: "ChatEncoder", reader: PartReader, writer: "_Writer"
) -> Iterator[tuple[_Place, EncodedDocument]]:
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
        if isinstance(encoded, LeftOut):
            writer.skip(ordinal, encoded)
        else:
            yield (ordinal, number), encoded


class _Writer:
    """A writer of a shard's tokens and masks, which keeps the record of its documents."""

    def __init__(self, tokens: BinaryIO, masks: Path, job: EncodingJob, index: int) -> None:
        self.documents: list[tuple[int, ...]] = []
        self.parts: list[tuple[int, int]] = []
        self.skipped: list[tuple[int, int, int]] = []
        self.reasons: dict[str, int] = {}  # with their numbers
        self.edits: list[tuple[int, int, int]] = []
        self.kinds: dict[str, int] = {}
        self.samples: list[DroppedRow] = []
        self.hashes: list[bytes] = []
        self.num_read = 0
        self.first_bad_row = ""
        self.turn_ends: set[int] = set()
        self._tokens, self._job, self._slot = tokens, job, 3 * index
        self._masks_path = masks
        self._masks: BinaryIO | None = None
        masks.unlink(missing_ok=True)
        self._num_dropped: Counter[str] = Counter()
        self._bytes_before = self._num_tokens = self._documents_before = 0

    def end_part(self, num_bytes: int, num_rows: int) -> None:
        """Count a part as done."""
        self.parts.append((len(self.documents) - self._documents_before, num_rows))
        self._documents_before = len(self.documents)
        self._bytes_before += num_bytes
        self._show(0)

    def read(self) -> int:
        """Count a row as read and return its number in the shard, from 1."""
        self.num_read += 1
        return self.num_read

    def skip(self, ordinal: int, left_out: LeftOut) -> None:
        """Record a row as skipped."""
        number = self.reasons.setdefault(left_out.reason, len(self.reasons))
        self.skipped.append((ordinal, number, left_out.num_tokens_cut))

    def drop(self, ordinal: int, row: int, dropped: Dropped, text: str) -> None:
        """Record a document as dropped by cleaning, and keep the beginning of the first ones."""
        self.skip(ordinal, LeftOut(dropped.reason))
        self._num_dropped[dropped.reason] += 1
        if self._num_dropped[dropped.reason] <= PER_SHARD:
            place = (ordinal, len(self.parts), row)
            self.samples.append(DroppedRow(*place, dropped.reason, dropped.detail, text[:TEXT_CHARACTERS]))

    def count_edits(self, ordinal: int, edits: dict[str, int]) -> None:
        """Record what cleaning changed in a document."""
        for kind, count in edits.items():
            self.edits.append((ordinal, self.kinds.setdefault(kind, len(self.kinds)), count))

    def skip_bad_row(self, ordinal: int, error: BadRowError) -> None:
        """Record a bad row as skipped.

        Raises:
            InputError: bad rows are not skipped.
        """
        if not self._job.skips_bad_rows:
            raise error.fault() from None
        self.first_bad_row = self.first_bad_row or str(error)
        self.skip(ordinal, LeftOut(manifest.BAD_ROW))

    def write(self, place: _Place, document: EncodedDocument, position: int) -> None:
        """Write a document's tokens; write masks from the first document on that has one."""
        num_tokens = len(document.input_ids)
        if document.supervised is not None and self._masks is None:
            self._masks = self._masks_path.open("wb")
            self._masks.write(b"\1" * self._num_tokens)
        if self._masks is not None:
            mask = document.supervised
            self._masks.write(b"\1" * num_tokens if mask is None else mask.astype(np.uint8).data)
        self._tokens.write(document.input_ids.data)
        self._num_tokens += num_tokens
        counts = (num_tokens, document.num_characters, document.num_bytes, document.num_tokens_cut)
        self.documents.append((*place, *counts))
        self.turn_ends |= document.turn_ends
        if self._job.hashed:
            digest = hashlib.blake2b(document.input_ids.data, digest_size=HASH_BYTES)
            if document.supervised is not None:
                digest.update(document.supervised.data)
            self.hashes.append(digest.digest())
        self._show(position)

    def close(self) -> None:
        """Close the file of masks."""
        if self._masks is not None:
            self._masks.close()

    def _show(self, position: int) -> None:
        done = (self._bytes_before + position, len(self.documents), self._num_tokens)
        self._job.progress[self._slot : self._slot + 3] = done
