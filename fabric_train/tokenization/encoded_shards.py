"""Split the sources into shards, and encode each shard into files of its own.

The name of a shard's files is a hash of everything that decides their content: the source file with its size and time,
the range that was read, and the settings. So a restarted run reuses the finished shards that are still valid::

    .NAME.unfinished/3f2a….tokens   int32, the tokens of all documents, joined
                     3f2a….masks    uint8, 1 where the token is supervised; absent if all are
                     3f2a….signatures   uint32 [documents, 112], with --near_duplicates
                     3f2a….npz      written last: one record per document and per part, and the rows that were skipped
"""

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from fabric_train.tokenization import manifest
from fabric_train.tokenization.cleaning.chat_rows import text_of_chat
from fabric_train.tokenization.cleaning.cleaner import Cleaner, Dropped
from fabric_train.tokenization.cleaning.contamination import TaskHit
from fabric_train.tokenization.cleaning.dropped_sample import PER_SHARD, TEXT_CHARACTERS
from fabric_train.tokenization.documents import BadRowError, LeftOut
from fabric_train.tokenization.reading.columns import Row, text_of
from fabric_train.tokenization.reading.files import FilePart, memory_errors_name
from fabric_train.tokenization.reading.listing import check_unchanged
from fabric_train.tokenization.reading.sources import PartReader, Source
from fabric_train.tokenization.tokenizers.borders import Borders
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder

if TYPE_CHECKING:
    from fabric_train.tokenization.chats.chat_encoder import ChatEncoder

_BATCH_BYTES = 2 << 20  # of text passed to the encoder at once
_MAX_SHARD_BYTES, _MIN_SHARD_BYTES, _TARGET_NUM_SHARDS = 32 << 20, 1 << 20, 64
_MAX_NUM_SHARDS = 8192  # above 256 GiB shards get larger: the file system of a cluster is slow with many files

# number: of the row among those read in its shard, from 1; row: in its part, as the reader numbers it;
# characters, bytes, num_tokens_cut: see EncodedDocument and LeftOut
ENCODED = np.dtype([(name, "u4") for name in ("number", "row", "length", "characters", "bytes", "num_tokens_cut")])
PART = np.dtype([("documents", "u4"), ("rows", "u4")])  # documents kept, and rows counted by the reader
SKIPPED = np.dtype([("number", "u4"), ("reason", "u2"), ("num_tokens_cut", "u4")])  # reason: index of the record's
EDIT = np.dtype([("number", "u4"), ("kind", "u2"), ("count", "u4")])  # kind: index of the record's
HASH_BYTES = 16
_FORMAT = 5  # of the files of a shard

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
        folder: where the shard's files are.
        documents: ENCODED [kept].
        parts: PART [parts of the shard].
        skipped: SKIPPED [rows skipped].
        reasons: of the skipped rows, as in the ledger.
        edits: EDIT [any number], what cleaning changed.
        kinds: of the edits, as in the ledger.
        samples: a few of the documents that cleaning dropped.
        hits: what documents share with evaluation tasks.
        hashes: uint8 [kept, 16], of each document's content; [0, 16] without --deduplicate.
        num_read: rows read.
        has_masks: whether there is a file of masks.
        first_bad_row: what is wrong with the first bad row; empty if there is none.
        turn_ends: int32 [any number], the control tokens with which supervised turns of its chats end.
    """

    folder: Path
    documents: np.ndarray
    parts: np.ndarray
    skipped: np.ndarray
    reasons: tuple[str, ...]
    edits: np.ndarray
    kinds: tuple[str, ...]
    samples: tuple["DroppedRow", ...]
    hits: tuple["ContaminatedRow", ...]
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
class ContaminatedRow:
    """A document that shares words with an evaluation task: its place in the shard, see ENCODED, and what it shares."""

    number: int
    part: int
    row: int
    hit: TaskHit


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
    borders: Borders
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
            folder=folder,
            documents=stored["documents"],
            parts=stored["parts"],
            skipped=stored["skipped"],
            reasons=tuple(stored["reasons"].tolist()),
            edits=stored["edits"],
            kinds=tuple(stored["kinds"].tolist()),
            samples=tuple(DroppedRow(**sample) for sample in json.loads(str(stored["samples"]))),
            hits=tuple(
                ContaminatedRow(number, part, row, TaskHit(*hit))
                for number, part, row, *hit in json.loads(str(stored["hits"]))
            ),
            hashes=stored["hashes"],
            num_read=int(stored["num_read"]),
            has_masks=(folder / f"{shard.key}.masks").exists(),
            first_bad_row=str(stored["first_bad_row"]),
            turn_ends=stored["turn_ends"],
        )


def signatures_file(folder: Path, shard: Shard) -> Path:
    """Return the file with the signatures of a shard's documents."""
    return folder / f"{shard.key}.signatures"


def remove_outdated_shards(folder: Path) -> int:
    """Remove the finished shards that an older version wrote, and return their number."""
    outdated = []
    for file in folder.glob("*.npz"):
        with np.load(file, allow_pickle=False) as stored:
            if "hits" not in stored.files:
                outdated.append(file)
    for file in outdated:
        for suffix in (".tokens", ".masks", ".signatures", ".npz"):
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
        writer = _Writer(file, masks, signatures_file(job.folder, shard), job, shard.index)
        try:
            for part in shard.parts:
                _encode_part(job, shard, part, writer)
        finally:
            writer.close()
    partial_file = job.folder / f"{shard.key}.partial"
    with partial_file.open("wb") as record:
        np.savez(
            record,
            documents=np.concatenate([np.empty(0, ENCODED), *writer.documents]),
            parts=np.array(writer.parts, dtype=PART),
            skipped=np.array(writer.skipped, dtype=SKIPPED),
            reasons=np.array(list(writer.reasons), dtype=str),
            edits=np.array(writer.edits, dtype=EDIT),
            kinds=np.array(list(writer.kinds), dtype=str),
            samples=json.dumps([asdict(sample) for sample in writer.samples]),
            hits=json.dumps([(row.number, row.part, row.row, *astuple(row.hit)) for row in writer.hits]),
            hashes=np.frombuffer(b"".join(writer.hashes), np.uint8).reshape(-1, HASH_BYTES),
            num_read=writer.num_read,
            first_bad_row=writer.first_bad_row,
            turn_ends=np.array(sorted(writer.turn_ends), dtype=np.int32),
        )
    partial_file.rename(job.folder / f"{shard.key}.npz")


def _encode_part(job: EncodingJob, shard: Shard, part: Any, writer: "_Writer") -> None:
    format_, source = job.formats[shard.source], job.sources[shard.source]
    reader = source.reader(part, format_.columns)
    try:
        with memory_errors_name(part_name(source, part)):
            if format_.chat is None:
                _encode_texts(job, reader, format_.columns[0], writer)
            else:
                _encode_chats(job, format_.chat, format_.columns, reader, writer)
    finally:  # what is written to while it is read may look damaged: then that is the error to report
        if isinstance(part, FilePart):
            check_unchanged(part.file)
    writer.end_part(part.num_bytes, reader.num_counted)


def part_name(source: Source, part: Any) -> str:
    """Return the file of a part, or the name of a dataset that does not consist of files."""
    return str(part.path) if isinstance(part, FilePart) else source.name


def _encode_texts(job: EncodingJob, reader: PartReader, column: str, writer: "_Writer") -> None:
    """Encode and write the documents that are not blank, in batches."""
    texts: list[bytes] = []
    counts: list[tuple[int, ...]] = []  # number, row, characters and bytes of each text, see ENCODED
    num_bytes = 0
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
                writer.drop(ordinal, row_number, result, text)
                continue
            writer.count_edits(ordinal, result.edits)
            writer.sign(result.signature)
            text, data = result.text, result.text.encode()
        texts.append(data)
        counts.append((ordinal, row_number, len(text), len(data)))
        num_bytes += len(data)
        if num_bytes >= _BATCH_BYTES:
            _write_texts(job, texts, counts, reader.position, writer)
            texts, counts, num_bytes = [], [], 0
    if texts:
        _write_texts(job, texts, counts, reader.position, writer)


def _write_texts(
    job: EncodingJob, texts: list[bytes], counts: list[tuple[int, ...]], position: int, writer: "_Writer"
) -> None:
    ids, lengths = job.encoder.encode_documents(texts, job.borders)
    documents = np.zeros(len(texts), dtype=ENCODED)
    documents["length"] = lengths
    columns = np.array(counts, dtype=np.uint32)
    for index, name in enumerate(("number", "row", "characters", "bytes")):
        documents[name] = columns[:, index]
    writer.write(documents, ids, None, position)


def _encode_chats(
    job: EncodingJob, chat: "ChatEncoder", columns: Sequence[str], reader: PartReader, writer: "_Writer"
) -> None:
    waiting: deque[tuple[int, int, Row | BadRowError]] = deque()  # number and row, see ENCODED, and what was read

    def read_rows() -> Iterator[Row | BadRowError]:
        for row_number, row in reader:
            place = writer.read(), row_number
            try:
                cleaned = row if isinstance(row, BadRowError) else _clean_chat(job, row, columns, place, writer)
            except BadRowError as error:
                cleaned = error
            if cleaned is not None:
                waiting.append((*place, row))
                yield cleaned

    for encoded in chat.encode_all(read_rows()):
        ordinal, row_number, row = waiting.popleft()
        if isinstance(encoded, BadRowError):
            place = "" if encoded is row else f"{reader.place(row_number)}: "
            writer.skip_bad_row(ordinal, BadRowError(f"{place}{encoded}"))
        elif isinstance(encoded, LeftOut):
            writer.skip(ordinal, encoded)
        else:
            counts = (encoded.num_characters, encoded.num_bytes, encoded.num_tokens_cut)
            document = np.array([(ordinal, row_number, len(encoded.input_ids), *counts)], dtype=ENCODED)
            writer.write(document, encoded.input_ids, encoded.supervised, reader.position)
            writer.turn_ends |= encoded.turn_ends


def _clean_chat(job: EncodingJob, row: Row, columns: Sequence[str], place: _Place, writer: "_Writer") -> Row | None:
    """Return the row as cleaning leaves it, or None if cleaning drops it; record what was changed and found."""
    if job.cleaner is None:
        return row
    result = job.cleaner.clean_chat(row, columns)
    writer.list_hits(*place, result.hits)
    if isinstance(result, Dropped):
        writer.drop(*place, result, text_of_chat(row, columns))
        return None
    writer.count_edits(place[0], result.edits)
    return result.row


class _Writer:
    """A writer of a shard's tokens and masks, which keeps the record of its documents."""

    def __init__(self, tokens: BinaryIO, masks: Path, signatures: Path, job: EncodingJob, index: int) -> None:
        self.documents: list[np.ndarray] = []
        self.parts: list[tuple[int, int]] = []
        self.skipped: list[tuple[int, int, int]] = []
        self.reasons: dict[str, int] = {}  # with their numbers
        self.edits: list[tuple[int, int, int]] = []
        self.kinds: dict[str, int] = {}
        self.samples: list[DroppedRow] = []
        self.hits: list[ContaminatedRow] = []
        self.hashes: list[bytes] = []
        self.num_read = 0
        self.first_bad_row = ""
        self.turn_ends: set[int] = set()
        self._tokens, self._job, self._slot = tokens, job, 3 * index
        self._masks_path = masks
        self._masks: BinaryIO | None = None
        masks.unlink(missing_ok=True)
        is_signed = job.cleaner is not None and job.cleaner.near_duplicates is not None
        self._signatures = signatures.open("wb") if is_signed else None
        self._num_dropped: Counter[str] = Counter()
        self._bytes_before = self._num_tokens = self._num_documents = self._documents_before = 0

    def end_part(self, num_bytes: int, num_rows: int) -> None:
        """Count a part as done."""
        self.parts.append((self._num_documents - self._documents_before, num_rows))
        self._documents_before = self._num_documents
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
            assert self._job.cleaner is not None
            shown = self._job.cleaner.redact(text)[:TEXT_CHARACTERS]
            self.samples.append(DroppedRow(*place, dropped.reason, dropped.detail, shown))

    def list_hits(self, ordinal: int, row: int, hits: Sequence[TaskHit]) -> None:
        """Record what a document shares with evaluation tasks, whether it is kept or not."""
        self.hits += [ContaminatedRow(ordinal, len(self.parts), row, hit) for hit in hits]

    def count_edits(self, ordinal: int, edits: dict[str, int]) -> None:
        """Record what cleaning changed in a document."""
        for kind, count in edits.items():
            self.edits.append((ordinal, self.kinds.setdefault(kind, len(self.kinds)), count))

    def sign(self, signature: np.ndarray | None) -> None:
        """Write the signature of the next document, if documents have one."""
        if self._signatures is not None:
            assert signature is not None
            self._signatures.write(signature.data)

    def skip_bad_row(self, ordinal: int, error: BadRowError) -> None:
        """Record a bad row as skipped.

        Raises:
            InputError: bad rows are not skipped.
        """
        if not self._job.skips_bad_rows:
            raise error.fault() from None
        self.first_bad_row = self.first_bad_row or str(error)
        self.skip(ordinal, LeftOut(manifest.BAD_ROW))

    def write(self, documents: np.ndarray, ids: np.ndarray, supervised: np.ndarray | None, position: int) -> None:
        """Write the tokens of documents; write masks from the first ones on that have them.

        Args:
            documents: ENCODED [documents].
            ids: int32 [T], their tokens, joined.
            supervised: bool [T]; None if all tokens are supervised.
            position: bytes of the part that have been read.
        """
        if supervised is not None and self._masks is None:
            self._masks = self._masks_path.open("wb")
            self._masks.write(b"\1" * self._num_tokens)
        if self._masks is not None:
            self._masks.write(b"\1" * len(ids) if supervised is None else supervised.view(np.uint8).data)
        self._tokens.write(ids.data)
        self._num_tokens += len(ids)
        self._num_documents += len(documents)
        self.documents.append(documents)
        if self._job.hashed:
            ends = np.cumsum(documents["length"])
            for begin, end in pairwise([0, *ends.tolist()]):
                digest = hashlib.blake2b(ids[begin:end].data, digest_size=HASH_BYTES)
                if supervised is not None:
                    digest.update(supervised[begin:end].data)
                self.hashes.append(digest.digest())
        self._show(position)

    def close(self) -> None:
        """Close the files of masks and signatures."""
        for file in (self._masks, self._signatures):
            if file is not None:
                file.close()

    def _show(self, position: int) -> None:
        done = (self._bytes_before + position, self._num_documents, self._num_tokens)
        self._job.progress[self._slot : self._slot + 3] = done
