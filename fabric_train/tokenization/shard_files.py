"""Write and read the files of a shard.

The files of shard ``3f2a…``, the beginning of its key, which :mod:`~fabric_train.tokenization.shards` explains::

    .NAME.unfinished/3f2a….tokens   int32, the tokens of all documents, joined
                     3f2a….masks    uint8, 1 where the token is supervised; absent if all are
                     3f2a….signatures   uint32 [documents, 112], with --near_duplicates
                     3f2a….npz      written last: one record per document and per part, and the rows that were skipped
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fabric_train.cleaning.dropped import PER_SHARD, TEXT_CHARACTERS, DroppedText
from fabric_train.cleaning.results import Cleaned, Content, Dropped, TaskHit
from fabric_train.reading.documents import PAIR, BadRowError, LeftOut
from fabric_train.reading.listing import SHA256_BYTES
from fabric_train.tokenization.shards import Shard

# number: of the row among those read in its shard, from 1; row: in its part, as the reader numbers it;
# characters, bytes, num_tokens_cut: see EncodedDocument and LeftOut
ENCODED = np.dtype([(name, "u4") for name in ("number", "row", "length", "characters", "bytes", "num_tokens_cut")])
# documents kept, rows counted by the reader, and the SHA-256 of a file that was read at once, otherwise NO_SHA256
PART = np.dtype([("documents", "u4"), ("rows", "u4"), ("sha256", f"V{SHA256_BYTES}")])
SKIPPED = np.dtype([("number", "u4"), ("reason", "u2"), ("num_tokens_cut", "u4")])  # reason: index of the record's
EDIT = np.dtype([("number", "u4"), ("kind", "u2"), ("count", "u4")])  # kind: index of the record's
HASH_BYTES = 16
_ARRAYS = ("documents", "parts", "skipped", "edits", "pairs", "hashes", "turn_ends")  # of a record, as it stores them


class PlaceInShard(NamedTuple):
    """The place where a document was read."""

    number: int  # see ENCODED
    part: int  # the index of the part in its shard
    row: int  # see ENCODED


@dataclass(frozen=True)
class ShardRecord:
    """The content of a finished shard, except tokens, masks and signatures, which stay in their files."""

    shard: Shard
    documents: np.ndarray  # ENCODED [kept]
    parts: np.ndarray  # PART [parts of the shard]
    skipped: np.ndarray  # SKIPPED [rows skipped]; `reasons` of the skipped rows, as in the ledger
    reasons: tuple[str, ...]
    edits: np.ndarray  # EDIT [any number], what cleaning changed; `kinds` of the edits, as in the ledger
    kinds: tuple[str, ...]
    samples: Sequence[tuple[PlaceInShard, DroppedText]]  # a few of the documents that cleaning dropped
    hits: Sequence[tuple[PlaceInShard, TaskHit]]  # what documents share with evaluation tasks
    pairs: np.ndarray  # PAIR [kept]; [0] if they are neither preference pairs nor unpaired answers
    hashes: np.ndarray  # uint8 [kept, 16], of each document's content; [0, 16] without --deduplicate
    num_read: int  # rows read
    tokens: Path  # the file of its tokens; and of its masks, if there are any
    masks: Path | None
    first_bad_row: str  # the fault of the first bad row; empty if there is none
    turn_ends: np.ndarray  # int32 [any number], the control tokens with which supervised turns of its chats end
    unused: tuple[str, ...]  # columns of its chats, and keys of their messages, that were not used

    @property
    def num_tokens(self) -> int:
        return int(self.documents["length"].sum(dtype=np.int64))


def read_record(folder: Path, shard: Shard) -> ShardRecord | None:
    """Return the record of a finished shard; None if it is not finished."""
    file = folder / f"{shard.key}.npz"
    if not file.exists():
        return None
    masks = folder / f"{shard.key}.masks"
    with np.load(file, allow_pickle=False) as stored:
        samples: list[tuple[PlaceInShard, DroppedText]] = []
        for sample in json.loads(str(stored["samples"])):
            place = PlaceInShard(sample.pop("number"), sample.pop("part"), sample.pop("row"))
            samples.append((place, DroppedText(**sample)))
        hits: list[tuple[PlaceInShard, TaskHit]] = []
        for number, part, row, *hit in json.loads(str(stored["hits"])):
            hits.append((PlaceInShard(number, part, row), TaskHit(*hit)))
        return ShardRecord(
            shard=shard,
            **{name: stored[name] for name in _ARRAYS},
            reasons=tuple(stored["reasons"].tolist()),
            kinds=tuple(stored["kinds"].tolist()),
            samples=samples,
            hits=hits,
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
    """A context manager that writes the files of a shard and closes them; ``finish`` marks the shard as finished.

    ``show`` is called with the bytes, documents and tokens done. Documents are ``hashed``, of unpaired answers only the
    first sequence and the label (``hashes_first_sequence``), and have signatures if ``signed``. The first bad row is an
    error unless ``skips_bad_rows``.
    """

    def __init__(
        self,
        folder: Path,
        shard: Shard,
        show: Callable[[int, int, int], None],
        *,
        hashed: bool,
        hashes_first_sequence: bool = False,
        signed: bool,
        skips_bad_rows: bool,
    ) -> None:
        self._folder = folder
        self._shard = shard
        self._show_progress = show
        self._hashes_documents = hashed
        self._hashes_first_sequence = hashes_first_sequence
        self._skips_bad_rows = skips_bad_rows

        # the record, in memory until `finish` writes it; see `ShardRecord`
        self._documents: list[np.ndarray] = []  # ENCODED [documents] of each write
        self._parts: list[tuple[int, int, bytes]] = []  # the fields of PART
        self._skipped: list[tuple[int, int, int]] = []  # the fields of SKIPPED
        self._reason_numbers: dict[str, int] = {}
        self._edits: list[tuple[int, int, int]] = []  # the fields of EDIT
        self._kind_numbers: dict[str, int] = {}
        self._samples: list[tuple[PlaceInShard, DroppedText]] = []
        self._num_dropped: Counter[str] = Counter()  # by reason, to limit the samples
        self._hits: list[tuple[PlaceInShard, TaskHit]] = []
        self._pairs: list[np.ndarray] = []
        self._hashes: list[bytes] = []
        self._num_read = 0
        self._first_bad_row = ""
        self.turn_ends: set[int] = set()
        self.unused: set[str] = set()

        # progress
        self._bytes_before = 0  # of the parts that have ended
        self._num_documents = 0
        self._num_tokens = 0

        # the other files are written as the documents come
        self._tokens = (folder / f"{shard.key}.tokens").open("wb")
        self._signatures = (folder / f"{shard.key}.signatures").open("wb") if signed else None
        self._masks_path = folder / f"{shard.key}.masks"
        self._masks_path.unlink(missing_ok=True)  # of an earlier attempt
        self._masks: BinaryIO | None = None  # opened for the first document with a mask

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for file in (self._tokens, self._masks, self._signatures):
            if file is not None:
                file.close()

    def end_part(self, num_documents: int, num_bytes: int, num_rows: int, sha256: bytes) -> None:
        """Count a part as read, with its rows and its SHA-256 if it has one; documents may be written later."""
        self._parts.append((num_documents, num_rows, sha256))
        self._bytes_before += num_bytes
        self._show(0)

    def read(self) -> int:
        """Count a row as read and return its number in the shard, from 1."""
        self._num_read += 1
        return self._num_read

    def skip(self, ordinal: int, left_out: LeftOut) -> None:
        """Record why a row has no document; ``ordinal`` is its number in the shard, which ``read`` returned."""
        reason_number = self._reason_numbers.setdefault(left_out.reason, len(self._reason_numbers))
        self._skipped.append((ordinal, reason_number, left_out.num_tokens_cut))

    def clean(
        self, ordinal: int, row: int, result: Cleaned[Content] | Dropped, text_to_show: Callable[[], str]
    ) -> Cleaned[Content] | None:
        """Record what cleaning has found and changed in a document; return its content, or None if cleaning drops it.

        The first documents that are dropped for a reason become samples, with the result of ``text_to_show``.
        """
        place = PlaceInShard(ordinal, len(self._parts), row)
        self._hits += [(place, hit) for hit in result.hits]
        if isinstance(result, Dropped):
            self.skip(ordinal, LeftOut(result.reason))
            self._num_dropped[result.reason] += 1
            if self._num_dropped[result.reason] <= PER_SHARD:
                text = text_to_show()[:TEXT_CHARACTERS]
                sample = DroppedText(result.reason, result.detail, text)
                self._samples.append((place, sample))
            return None
        for kind, count in result.edits.items():
            kind_number = self._kind_numbers.setdefault(kind, len(self._kind_numbers))
            self._edits.append((ordinal, kind_number, count))
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
        if not self._first_bad_row:
            self._first_bad_row = str(error)
        self.skip(ordinal, LeftOut(error.reason))

    def write(
        self,
        documents: np.ndarray,
        ids: np.ndarray,
        supervised: np.ndarray | None,
        position: int,
        pairs: np.ndarray | None = None,
    ) -> None:
        """Write documents, ENCODED [documents], with their joined tokens, int32 [T], and masks, bool [T], if any.

        ``position`` is the number of the part's bytes that have been read. ``pairs`` are PAIR [documents] if the
        documents are preference pairs or unpaired answers.
        """
        # most shards have no masks: the file begins with the first one, and all tokens before it are supervised
        if supervised is not None and self._masks is None:
            self._masks = self._masks_path.open("wb")
            self._masks.write(b"\1" * self._num_tokens)
        if self._masks is not None:
            if supervised is None:
                self._masks.write(b"\1" * len(ids))
            else:
                self._masks.write(supervised.view(np.uint8).data)
        self._tokens.write(ids.data)
        self._num_tokens += len(ids)
        self._num_documents += len(documents)
        self._documents.append(documents)
        if pairs is not None:
            self._pairs.append(pairs)
        if self._hashes_documents:
            ends = np.cumsum(documents["length"], dtype=np.int64)
            begins = ends - documents["length"]
            labels = [b""] * len(documents)
            if pairs is not None and self._hashes_first_sequence:
                ends = begins + pairs["rejected_at"]
                labels = [label.tobytes() for label in pairs["is_desirable"]]
            for begin, end, label in zip(begins.tolist(), ends.tolist(), labels, strict=True):
                digest = hashlib.blake2b(ids[begin:end].data, digest_size=HASH_BYTES)
                if supervised is not None:
                    digest.update(supervised[begin:end].data)
                digest.update(label)
                self._hashes.append(digest.digest())
        self._show(position)

    def finish(self) -> None:
        """Write the record of the shard, which marks it as finished, after its other files are complete."""
        self._close()
        samples = [place._asdict() | asdict(sample) for place, sample in self._samples]
        hits = [(*place, *astuple(hit)) for place, hit in self._hits]
        partial_file = self._folder / f"{self._shard.key}.partial"
        with partial_file.open("wb") as file:
            np.savez(
                file,
                documents=np.concatenate([np.empty(0, ENCODED), *self._documents]),
                parts=np.array(self._parts, dtype=PART),
                skipped=np.array(self._skipped, dtype=SKIPPED),
                reasons=np.array(list(self._reason_numbers), dtype=str),
                edits=np.array(self._edits, dtype=EDIT),
                kinds=np.array(list(self._kind_numbers), dtype=str),
                samples=json.dumps(samples),
                hits=json.dumps(hits),
                pairs=np.concatenate([np.empty(0, PAIR), *self._pairs]),
                hashes=np.frombuffer(b"".join(self._hashes), np.uint8).reshape(-1, HASH_BYTES),
                num_read=self._num_read,
                first_bad_row=self._first_bad_row,
                turn_ends=np.array(sorted(self.turn_ends), dtype=np.int32),
                unused=np.array(sorted(self.unused), dtype=str),
            )
        partial_file.rename(self._folder / f"{self._shard.key}.npz")

    def _show(self, position: int) -> None:
        self._show_progress(self._bytes_before + position, self._num_documents, self._num_tokens)
