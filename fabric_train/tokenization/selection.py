"""Select the documents of each split, their order and their number of repeats: caps, deduplication, split, mixture.

The result depends only on the documents' order, the settings and the seed, not on processes or shards.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fabric_train.cleaning.dropped import DroppedText, Location, TaskHit
from fabric_train.cli.errors import InputError
from fabric_train.reading.sources import Source
from fabric_train.token_dataset.document_index import DOCUMENT
from fabric_train.token_dataset.manifest import DUPLICATE, NEAR_DUPLICATE, TOO_LONG
from fabric_train.token_dataset.spooled_documents import SpooledDocuments, SpooledFile
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.shards import HASH_BYTES, PlaceInShard, ShardRecord, part_name

_Found = TypeVar("_Found", DroppedText, TaskHit)


@dataclass(frozen=True)
class Collection:
    documents: SpooledDocuments  # all documents on disk, including those that are not kept
    kept: np.ndarray  # int64 [kept], the documents left after caps and deduplication, in the order of the sources
    characters: np.ndarray  # uint32 [documents], code points of each document
    sources: np.ndarray  # uint32 [documents], the number of each document's source
    places: np.ndarray  # DOCUMENT [documents], the file, the row in it, tokens and bytes of each document
    num_read: int  # rows read, up to the row at which a cap was reached
    skipped: dict[int, Counter[str]]  # number of a source → reason → rows skipped among those
    tokens_cut: dict[str, int]  # reason → tokens removed from kept chats, and tokens of chats skipped for this reason
    edits: dict[str, int]  # kind → what cleaning changed in the rows read
    dropped: list[tuple[DroppedText, Location]]  # some of the documents that cleaning dropped
    duplicates: np.ndarray  # int64 [any number], documents that were left out because an earlier one is the same
    near_duplicates: np.ndarray  # int64 [any number], documents that were left out because they nearly repeat another
    hits: list[tuple[TaskHit, Location]]  # what documents share with evaluation tasks, in the order of the sources
    hashes: np.ndarray  # uint8 [kept, 16], of each kept document's content; [0, 16] without --deduplicate
    pairs: np.ndarray | None  # PAIR [documents]; None if they are no preference pairs


@dataclass(frozen=True)
class Split:
    """Documents of a collection in packing order, int64 [documents of the split]; one may come several times."""

    collection: Collection
    order: np.ndarray


def collect(
    records: Sequence[ShardRecord],
    sources: Sequence[Source],
    max_documents: int | None,
    max_tokens: int | None,
    seen: np.ndarray | None,
    is_near_duplicate: np.ndarray | None,
) -> Collection:
    """Collect the documents of finished shards, in the order of the sources, and apply deduplication and caps.

    ``max_tokens`` is reached by the last document. ``seen`` are hashes, uint8 [n, 16], of documents before these, and
    ``is_near_duplicate`` is bool [documents]; None keeps duplicates, or near duplicates.
    """
    documents = np.concatenate([record.documents for record in records])
    first_rows = np.cumsum([0, *(record.num_read for record in records)])
    counts = [len(record.documents) for record in records]
    rows = documents["number"] + np.repeat(first_rows[:-1], counts)
    lengths = documents["length"].astype(np.int64)
    hashes = np.concatenate([record.hashes for record in records])
    is_kept = np.ones(len(documents), dtype=bool) if seen is None else _is_first(hashes, seen)
    is_near = is_kept & (False if is_near_duplicate is None else is_near_duplicate)
    kept = np.flatnonzero(is_kept & ~is_near)
    own_sources = np.repeat(np.array([record.shard.source for record in records], dtype=np.uint32), counts)
    last = _last_within_caps(lengths[kept], max_documents, max_tokens)
    num_read = int(first_rows[-1]) if last == len(kept) else int(rows[kept[last - 1]])
    kept = kept[:last]
    skipped, edits, num_cut = _count(records, first_rows, num_read)
    num_cut += int(documents["num_tokens_cut"][kept].sum(dtype=np.int64))
    duplicates = np.flatnonzero(~is_kept & (rows <= num_read))
    near_duplicates = np.flatnonzero(is_near & (rows <= num_read))
    for reason, repeats in ((DUPLICATE, duplicates), (NEAR_DUPLICATE, near_duplicates)):
        for source, count in zip(*np.unique(own_sources[repeats], return_counts=True), strict=True):
            skipped[int(source)][reason] += int(count)
    parts = _parts(records, sources)
    pairs = np.concatenate([record.pairs for record in records])
    files = tuple(SpooledFile(record.tokens, record.masks) for record in records)
    rejected_at = pairs["rejected_at"].astype(np.int64) if len(pairs) else None
    return Collection(
        documents=SpooledDocuments(lengths, files, rejected_at),
        kept=kept,
        characters=documents["characters"].copy(),
        sources=own_sources,
        places=_places(documents, parts, records),
        num_read=num_read,
        skipped=skipped,
        tokens_cut={TOO_LONG: num_cut} if num_cut else {},
        edits=dict(edits),
        dropped=list(_placed([record.samples for record in records], parts, records, num_read)),
        hits=list(_placed([record.hits for record in records], parts, records, num_read)),
        duplicates=duplicates,
        near_duplicates=near_duplicates,
        hashes=hashes[kept] if len(hashes) else hashes,
        pairs=pairs if len(pairs) else None,
    )


def _count(
    records: Sequence[ShardRecord], first_rows: np.ndarray, num_read: int
) -> tuple[dict[int, Counter[str]], Counter[str], int]:
    """Return rows skipped by source and reason, edits by kind, and tokens cut, of the first ``num_read`` rows."""
    skipped = defaultdict[int, Counter[str]](Counter)
    edits = Counter[str]()
    num_cut = 0
    for record, first in zip(records, first_rows, strict=False):
        within = record.skipped[record.skipped["number"] + first <= num_read]
        num_cut += int(within["num_tokens_cut"].sum(dtype=np.int64))
        for reason, count in zip(*np.unique(within["reason"], return_counts=True), strict=True):
            skipped[record.shard.source][record.reasons[reason]] += int(count)
        changes = record.edits[record.edits["number"] + first <= num_read]
        sums = np.bincount(changes["kind"], changes["count"], len(record.kinds)).astype(int)
        edits.update({kind: count for kind, count in zip(record.kinds, sums.tolist(), strict=True) if count})
    return skipped, edits, num_cut


def _parts(records: Sequence[ShardRecord], sources: Sequence[Source]) -> tuple[np.ndarray, np.ndarray]:
    """Return the file of each part of the shards, and the rows of the file before it, int64 [parts] each."""
    first_files = np.cumsum([0, *(source.num_origins for source in sources)]).tolist()
    files: list[int] = []
    rows_before: list[int] = []
    num_rows: Counter[int] = Counter()
    for record in records:
        shard = record.shard
        counts = zip(shard.origins.tolist(), record.parts["rows"].tolist(), strict=True)
        for index, (origin, counted) in enumerate(counts):
            file = first_files[shard.source] + origin
            files.append(file)
            rows_before.append(num_rows[file])
            num_rows[file] += counted
            if num_rows[file] >> 32:
                name = part_name(sources[shard.source], shard.parts[index])
                raise InputError(f"{name}: more than {1 << 32:,} rows; split it into smaller files")
    return np.array(files, dtype=np.int64), np.array(rows_before, dtype=np.int64)


def _places(documents: np.ndarray, parts: tuple[np.ndarray, np.ndarray], records: Sequence[ShardRecord]) -> np.ndarray:
    files, rows_before = parts
    num_documents = np.concatenate([record.parts["documents"] for record in records])
    places = np.empty(len(documents), dtype=DOCUMENT)
    places["file"] = np.repeat(files, num_documents)
    places["row"] = documents["row"] + np.repeat(rows_before, num_documents)
    places["tokens"] = documents["length"]
    places["bytes"] = documents["bytes"]
    return places


def _placed(
    found: Sequence[Sequence[tuple[PlaceInShard, _Found]]],
    parts: tuple[np.ndarray, np.ndarray],
    records: Sequence[ShardRecord],
    num_read: int,
) -> Iterator[tuple[_Found, Location]]:
    """Yield the items of ``found`` in the first ``num_read`` rows of each shard, with the place of the document."""
    files, rows_before = parts
    first_part = first_row = 0
    for of_record, record in zip(found, records, strict=True):
        for (number, part, row), one in of_record:
            if first_row + number <= num_read:
                yield one, (int(files[first_part + part]), row + int(rows_before[first_part + part]))
        first_part += len(record.parts)
        first_row += record.num_read


def _is_first(hashes: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return whether each document is the first with its content, bool [n]; ``seen`` comes before all of them."""
    both = np.ascontiguousarray(np.concatenate([seen, hashes])).view(f"V{HASH_BYTES}").ravel()
    is_first = np.zeros(len(both), dtype=bool)
    is_first[np.unique(both, return_index=True)[1]] = True
    return is_first[len(seen) :]


def _last_within_caps(lengths: np.ndarray, max_documents: int | None, max_tokens: int | None) -> int:
    """Return the number of documents up to and including the one that reaches a cap."""
    last = len(lengths) if max_documents is None else min(max_documents, len(lengths))
    if max_tokens is not None:
        last = min(last, int(np.searchsorted(np.cumsum(lengths), max_tokens)) + 1)
    return last


def select(collections: Sequence[Collection], sources: list[Source], arguments: TokenizeArguments) -> dict[str, Split]:
    """Return the documents of each split; InputError if --weights names a source without a document for training."""
    collection = collections[0]
    share = 0.0 if arguments.validation_dataset else arguments.validation_split
    in_validation = draw_validation(len(collection.kept), share, arguments.seed)
    train = collection.kept[~in_validation]
    if arguments.weights:
        own = collection.sources[train]
        without = [source.name for number, source in enumerate(sources) if not (own == number).any()]
        if without:
            raise InputError(
                f"--weights: no document for training in {', '.join(without)}; "
                "give more documents, a smaller --validation_split, or leave the source out"
            )
        lengths = collection.documents.lengths[train]
        train = train[mix(lengths, own, arguments.weights, arguments.max_tokens, arguments.seed)]
    splits = {"train": Split(collection, train)}
    if arguments.validation_dataset:
        splits["validation"] = Split(collections[1], collections[1].kept)
    elif share > 0:
        splits["validation"] = Split(collection, collection.kept[in_validation])
    return splits


def draw_validation(num_documents: int, share: float, seed: int) -> np.ndarray:
    """Return which documents go to validation, bool [num_documents]: a ``share``, at least one if possible, not all."""
    chosen = np.zeros(num_documents, dtype=bool)
    if share > 0 and num_documents >= 2:
        count = min(max(round(share * num_documents), 1), num_documents - 1)
        chosen[np.random.default_rng(seed).permutation(num_documents)[:count]] = True
    return chosen


def mix(
    lengths: np.ndarray, sources: np.ndarray, weights: Sequence[float], num_tokens: int | None, seed: int
) -> np.ndarray:
    """Return the documents to pack in random order, int64 [n]; a document may come several times.

    Source i contributes ``weights[i] / sum(weights)`` of ``num_tokens`` (None: of all): whole epochs over its
    documents, each in a new random order, and then as many documents as are needed to reach its share. ``lengths`` and
    ``sources``, int64 [documents], are each document's tokens and source.
    """
    total = num_tokens or int(lengths.sum())
    chosen = []
    for source, weight in enumerate(weights):
        own = np.flatnonzero(sources == source)
        wanted = total * (weight / sum(weights))  # total * weight may be infinite
        epoch = 0
        while wanted > 0:
            shuffled = np.random.default_rng([seed, source, epoch]).permutation(own)
            ends = np.cumsum(lengths[shuffled])
            chosen.append(shuffled[: np.searchsorted(ends, wanted) + 1])
            wanted -= int(ends[-1])
            epoch += 1
    return np.random.default_rng(seed).permutation(np.concatenate(chosen))


def tokens_by_source(collection: Collection, documents: np.ndarray, num_sources: int) -> np.ndarray:
    """Return the tokens that each of the first sources has in ``documents``, int64 [num_sources]."""
    lengths = collection.documents.lengths[documents]
    tokens = np.bincount(collection.sources[documents], weights=lengths, minlength=num_sources)
    return tokens.astype(np.int64)[:num_sources]
