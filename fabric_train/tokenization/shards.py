"""Divide the input into shards, and into the slices of --shard I/N; write and read the files of a shard.

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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fabric_train.cleaning.dropped import (
    PER_SHARD,
    TEXT_CHARACTERS,
    Cleaned,
    Content,
    Dropped,
    DroppedText,
    TaskHit,
)
from fabric_train.reading.documents import PAIR, BadRowError, LeftOut
from fabric_train.reading.listing import SHA256_BYTES, FilePart
from fabric_train.reading.sources import Source

FORMAT = 8  # of a shard's files
_MAX_SHARD_BYTES = 32 << 20
_TARGET_NUM_SHARDS = 64
_MAX_NUM_SHARDS = 8192  # above 256 GiB shards get larger: the file system of a cluster is slow with many files

# number: of the row among those read in its shard, from 1; row: in its part, as the reader numbers it;
# characters, bytes, num_tokens_cut: see EncodedDocument and LeftOut
ENCODED = np.dtype([(name, "u4") for name in ("number", "row", "length", "characters", "bytes", "num_tokens_cut")])
# documents kept, rows counted by the reader, and the SHA-256 of a file that was read at once, otherwise NO_SHA256
PART = np.dtype([("documents", "u4"), ("rows", "u4"), ("sha256", f"V{SHA256_BYTES}")])
SKIPPED = np.dtype([("number", "u4"), ("reason", "u2"), ("num_tokens_cut", "u4")])  # reason: index of the record's
EDIT = np.dtype([("number", "u4"), ("kind", "u2"), ("count", "u4")])  # kind: index of the record's
HASH_BYTES = 16
_ARRAYS = ("documents", "parts", "skipped", "edits", "pairs", "hashes", "turn_ends")  # of a record, as it stores them
PlaceInShard = tuple[int, int, int]  # number and row of a document, see ENCODED; its part is between them


@dataclass(frozen=True)
class ShardSizes:
    """The least bytes of a shard, and of the finished work that is kept for a restart: less is quickly made again."""

    smallest: int = 1 << 20
    worth_keeping: int = 1 << 20


SIZES = ShardSizes()


@dataclass(frozen=True)
class Shard:
    """Parts of one source that are encoded together; ``key`` names its files, ``source`` is the source's number.

    ``origins`` has the number of each part's file or split, int64 [parts]; ``read_at_once`` whether its reader hashes
    it, bool [parts].
    """

    index: int
    source: int
    parts: Sequence[Any]
    num_bytes: int
    key: str
    origins: np.ndarray
    read_at_once: np.ndarray


def split_into_shards(sources: Sequence[Source], settings: str, sizes: ShardSizes = SIZES) -> list[Shard]:
    """Split the sources, in order, into shards with parts of one source; ``settings`` is a part of their keys."""
    total = sum(source.num_bytes for source in sources)
    shard_bytes = min(max(total // _TARGET_NUM_SHARDS, sizes.smallest), _MAX_SHARD_BYTES)
    shard_bytes = max(shard_bytes, total // _MAX_NUM_SHARDS)
    shards: list[Shard] = []
    for number, source in enumerate(sources):
        parts: list[Any] = []
        num_bytes = 0
        for part in source.parts(shard_bytes):
            if parts and num_bytes + part.num_bytes > shard_bytes:
                shards.append(_shard(len(shards), number, source, parts, settings))
                parts = []
                num_bytes = 0
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


def part_name(source: Source, part: Any) -> str:
    """Return the file of a part, or the name of a dataset that does not consist of files."""
    return part.name if isinstance(part, FilePart) else source.name


@dataclass(frozen=True)
class InputSlice:
    """Slice ``number`` of ``count``, from 1: what one task reads. 1 of 1 is all of the input."""

    number: int = 1
    count: int = 1

    def of(self, sizes: Sequence[int]) -> list[bool]:
        """Return which of consecutive items of these sizes in bytes are in this slice."""
        return [number == self.number for number in slice_numbers(sizes, self.count)]


def slice_numbers(sizes: Sequence[int], count: int) -> list[int]:
    """Return the slice, 1 to ``count``, that has the middle byte of each item; ``sizes`` are bytes in order."""
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


def files_to_hash(
    sources: Sequence[Source], input_slice: InputSlice, are_read: Sequence[np.ndarray], group_bytes: int = 256 << 20
) -> Iterator[FilesToHash]:
    """Yield the files of a slice, in groups of about ``group_bytes``; slices of files are not slices of shards.

    A file is hashed by one process, so that its SHA-256 is of the whole file. ``are_read`` are the files of each
    source that are hashed elsewhere, bool [files] each.
    """
    is_in = input_slice.of([size for source in sources for size in source.files.sizes])
    is_in = (np.array(is_in, dtype=bool) & ~np.concatenate([[], *are_read]).astype(bool)).tolist()
    first = 0
    for number, source in enumerate(sources):
        start = num_bytes = 0
        for index, size in enumerate(source.files.sizes):
            is_own = is_in[first + index]
            num_bytes += size if is_own else 0
            if not is_own or num_bytes >= group_bytes:
                if start < index + is_own:
                    yield FilesToHash(number, start, index + is_own)
                start = index + 1
                num_bytes = 0
        if start < len(source.files):
            yield FilesToHash(number, start, len(source.files))
        first += len(source.files)


@dataclass(frozen=True)
class ShardRecord:
    shard: Shard
    documents: np.ndarray  # ENCODED [kept]
    parts: np.ndarray  # PART [parts of the shard]
    skipped: np.ndarray  # SKIPPED [rows skipped]; `reasons` of the skipped rows, as in the ledger
    reasons: tuple[str, ...]
    edits: np.ndarray  # EDIT [any number], what cleaning changed; `kinds` of the edits, as in the ledger
    kinds: tuple[str, ...]
    samples: Sequence[tuple[PlaceInShard, DroppedText]]  # a few of the documents that cleaning dropped
    hits: Sequence[tuple[PlaceInShard, TaskHit]]  # what documents share with evaluation tasks
    pairs: np.ndarray  # PAIR [kept]; [0] if they are no preference pairs
    hashes: np.ndarray  # uint8 [kept, 16], of each document's content; [0, 16] without --deduplicate
    num_read: int  # rows read
    tokens: Path  # the file of its tokens; and of its masks, if there are any
    masks: Path | None
    first_bad_row: str  # the fault of the first bad row; empty if there is none
    turn_ends: np.ndarray  # int32 [any number], the control tokens with which supervised turns of its chats end
    unused: tuple[str, ...]  # columns of its chats, and keys of their messages, of which nothing was made

    @property
    def num_tokens(self) -> int:
        return int(self.documents["length"].sum(dtype=np.int64))


def read_record(folder: Path, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard, None if it is not finished."""
    file = folder / f"{shard.key}.npz"
    if not file.exists():
        return None
    masks = folder / f"{shard.key}.masks"
    with np.load(file, allow_pickle=False) as stored:
        return ShardRecord(
            shard=shard,
            **{name: stored[name] for name in _ARRAYS},
            reasons=tuple(stored["reasons"].tolist()),
            kinds=tuple(stored["kinds"].tolist()),
            samples=[
                ((one.pop("number"), one.pop("part"), one.pop("row")), DroppedText(**one))
                for one in json.loads(str(stored["samples"]))
            ],
            hits=[((number, part, row), TaskHit(*hit)) for number, part, row, *hit in json.loads(str(stored["hits"]))],
            num_read=int(stored["num_read"]),
            tokens=folder / f"{shard.key}.tokens",
            masks=masks if masks.exists() else None,
            first_bad_row=str(stored["first_bad_row"]),
            unused=tuple(stored["unused"].tolist()),
        )


def remove_outdated_shards(folder: Path) -> int:
    """Remove the finished shards that an older version wrote, and return their number."""
    outdated = []
    for file in folder.glob("*.npz"):
        with np.load(file, allow_pickle=False) as stored:
            if "unused" not in stored.files or stored["parts"].dtype != PART:
                outdated.append(file)
    for file in outdated:
        for suffix in (".tokens", ".masks", ".signatures", ".npz"):
            file.with_suffix(suffix).unlink(missing_ok=True)
    return len(outdated)


class ShardWriter:
    """A writer of the files of a shard, a context manager that closes them; ``finish`` makes the shard a finished one.

    ``show`` is called with the bytes, documents and tokens done. Documents are ``hashed``, and have signatures if
    ``signed``. The first bad row is an error unless ``skips_bad_rows``.
    """

    def __init__(
        self,
        folder: Path,
        shard: Shard,
        show: Callable[[int, int, int], None],
        *,
        hashed: bool,
        signed: bool,
        skips_bad_rows: bool,
    ) -> None:
        self._documents: list[np.ndarray] = []
        self._parts: list[tuple[int, int, bytes]] = []
        self._skipped: list[tuple[int, int, int]] = []
        self._reasons: dict[str, int] = {}  # with their numbers
        self._edits: list[tuple[int, int, int]] = []
        self._kinds: dict[str, int] = {}
        self._samples: list[tuple[PlaceInShard, DroppedText]] = []
        self._hits: list[tuple[PlaceInShard, TaskHit]] = []
        self._pairs: list[np.ndarray] = []
        self._hashes: list[bytes] = []
        self._num_read = 0
        self._first_bad_row = ""
        self.turn_ends: set[int] = set()
        self.unused: set[str] = set()
        self._folder = folder
        self._shard = shard
        self._show_done = show
        self._hashed = hashed
        self._skips_bad_rows = skips_bad_rows
        self._tokens = (folder / f"{shard.key}.tokens").open("wb")
        self._signatures = (folder / f"{shard.key}.signatures").open("wb") if signed else None
        self._masks_path = folder / f"{shard.key}.masks"
        self._masks_path.unlink(missing_ok=True)
        self._masks: BinaryIO | None = None
        self._num_dropped: Counter[str] = Counter()
        self._bytes_before = self._num_tokens = self._num_documents = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for file in (self._tokens, self._masks, self._signatures):
            if file is not None:
                file.close()

    def end_part(self, num_documents: int, num_bytes: int, num_rows: int, sha256: bytes) -> None:
        """Count a part as read, with its rows and SHA-256, if it has one; documents may be written later."""
        self._parts.append((num_documents, num_rows, sha256))
        self._bytes_before += num_bytes
        self._show(0)

    def read(self) -> int:
        """Count a row as read and return its number in the shard, from 1."""
        self._num_read += 1
        return self._num_read

    def skip(self, ordinal: int, left_out: LeftOut) -> None:
        number = self._reasons.setdefault(left_out.reason, len(self._reasons))
        self._skipped.append((ordinal, number, left_out.num_tokens_cut))

    def clean(
        self, ordinal: int, row: int, result: Cleaned[Content] | Dropped, shown: Callable[[], str]
    ) -> Cleaned[Content] | None:
        """Record what cleaning has found and changed in a document; of the first dropped ones, keep a text to show."""
        place = (ordinal, len(self._parts), row)
        self._hits += [(place, hit) for hit in result.hits]
        if isinstance(result, Dropped):
            self.skip(ordinal, LeftOut(result.reason))
            self._num_dropped[result.reason] += 1
            if self._num_dropped[result.reason] <= PER_SHARD:
                self._samples.append((place, DroppedText(result.reason, result.detail, shown()[:TEXT_CHARACTERS])))
            return None
        for kind, count in result.edits.items():
            self._edits.append((ordinal, self._kinds.setdefault(kind, len(self._kinds)), count))
        return result

    def sign(self, signature: np.ndarray | None) -> None:
        """Write the signature of the next document, if documents have one."""
        if self._signatures is not None:
            assert signature is not None
            self._signatures.write(signature.data)

    def skip_bad_row(self, ordinal: int, error: BadRowError) -> None:
        """Record a bad row as skipped; InputError if bad rows are not skipped."""
        if not self._skips_bad_rows:
            raise error.fault() from None
        self._first_bad_row = self._first_bad_row or str(error)
        self.skip(ordinal, LeftOut(error.reason))

    def write(
        self,
        documents: np.ndarray,
        ids: np.ndarray,
        supervised: np.ndarray | None,
        position: int,
        pairs: np.ndarray | None = None,
    ) -> None:
        """Write documents, ENCODED [documents], with joined tokens, int32 [T], and masks, bool [T], if there are any.

        ``position`` is the number of the part's bytes that have been read. ``pairs`` are PAIR [documents] if the
        documents are preference pairs.
        """
        if supervised is not None and self._masks is None:
            self._masks = self._masks_path.open("wb")
            self._masks.write(b"\1" * self._num_tokens)
        if self._masks is not None:
            self._masks.write(b"\1" * len(ids) if supervised is None else supervised.view(np.uint8).data)
        self._tokens.write(ids.data)
        self._num_tokens += len(ids)
        self._num_documents += len(documents)
        self._documents.append(documents)
        self._pairs += [] if pairs is None else [pairs]
        if self._hashed:
            for begin, end in pairwise([0, *np.cumsum(documents["length"]).tolist()]):
                digest = hashlib.blake2b(ids[begin:end].data, digest_size=HASH_BYTES)
                if supervised is not None:
                    digest.update(supervised[begin:end].data)
                self._hashes.append(digest.digest())
        self._show(position)

    def finish(self) -> None:
        """Write the record of the shard, by which it counts as finished, once its other files are whole."""
        self._close()
        partial_file = self._folder / f"{self._shard.key}.partial"
        samples = [
            dict(zip(("number", "part", "row"), place, strict=True)) | asdict(one) for place, one in self._samples
        ]
        with partial_file.open("wb") as record:
            np.savez(
                record,
                documents=np.concatenate([np.empty(0, ENCODED), *self._documents]),
                parts=np.array(self._parts, dtype=PART),
                skipped=np.array(self._skipped, dtype=SKIPPED),
                reasons=np.array(list(self._reasons), dtype=str),
                edits=np.array(self._edits, dtype=EDIT),
                kinds=np.array(list(self._kinds), dtype=str),
                samples=json.dumps(samples),
                hits=json.dumps([(*place, *astuple(hit)) for place, hit in self._hits]),
                pairs=np.concatenate([np.empty(0, PAIR), *self._pairs]),
                hashes=np.frombuffer(b"".join(self._hashes), np.uint8).reshape(-1, HASH_BYTES),
                num_read=self._num_read,
                first_bad_row=self._first_bad_row,
                turn_ends=np.array(sorted(self.turn_ends), dtype=np.int32),
                unused=np.array(sorted(self.unused), dtype=str),
            )
        partial_file.rename(self._folder / f"{self._shard.key}.npz")

    def _show(self, position: int) -> None:
        self._show_done(self._bytes_before + position, self._num_documents, self._num_tokens)
