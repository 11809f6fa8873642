"""Select the documents of each split, their order and their number of repeats: caps, deduplication, split, mixture.

The result depends only on the documents' order, the settings and the seed, not on processes or shards.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fabric_train.cleaning.dropped import DroppedText, Location
from fabric_train.cleaning.results import TaskHit
from fabric_train.cli.errors import InputError
from fabric_train.reading.sources import Source
from fabric_train.token_dataset.document_index import DOCUMENT
from fabric_train.token_dataset.manifest import DUPLICATE, NEAR_DUPLICATE, TOO_LONG
from fabric_train.token_dataset.spooled_documents import SpooledDocuments, SpooledFile
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.shard_files import HASH_BYTES, PlaceInShard, ShardRecord
from fabric_train.tokenization.shards import part_name

_Finding = TypeVar("_Finding", DroppedText, TaskHit)


@dataclass(frozen=True)
class Collection:
    """The documents of --dataset or of --validation_dataset, and counts of what was left out."""

    documents: SpooledDocuments  # all documents on disk, including those that are not kept
    kept_documents: np.ndarray
    """int64 [kept], the documents left after caps and deduplication, in the order of the sources."""
    characters: np.ndarray  # uint32 [documents], code points of each document
    sources: np.ndarray  # uint32 [documents], the number of each document's source
    places: np.ndarray  # DOCUMENT [documents], the file, the row in it, tokens and bytes of each document
    num_read: int  # rows read, up to the row at which a cap was reached
    skipped: dict[int, Counter[str]]  # number of a source → reason → rows skipped among those
    tokens_cut: dict[str, int]  # reason → tokens removed from kept chats, and tokens of chats skipped for this reason
    edits: dict[str, int]  # kind → what cleaning changed in the rows read
    dropped_samples: list[tuple[DroppedText, Location]]  # some of the documents that cleaning dropped
    duplicates: np.ndarray  # int64 [any number], documents that were left out because an earlier one is the same
    near_duplicates: np.ndarray  # int64 [any number], documents that were left out because they nearly repeat another
    hits: list[tuple[TaskHit, Location]]  # what documents share with evaluation tasks, in the order of the sources
    hashes: np.ndarray  # uint8 [kept, 16], of each kept document's content; [0, 16] without --deduplicate
    pairs: np.ndarray | None  # PAIR [documents]; None if they are neither preference pairs nor unpaired answers


@dataclass(frozen=True)
class Split:
    """Documents of a collection in packing order, int64 [documents of the split]; one may occur several times."""

    collection: Collection
    order: np.ndarray


def collect(
    records: Sequence[ShardRecord],
    sources: Sequence[Source],
    *,
    max_documents: int | None,
    max_tokens: int | None,
    earlier_hashes: np.ndarray | None,
    is_near_duplicate: np.ndarray | None,
) -> Collection:
    """Collect the documents of finished shards, in the order of the sources, and apply deduplication and caps.

    Args:
        records: the finished shards.
        sources: all sources, in the order of the shards' source numbers.
        max_documents: the cap on documents; None for no cap.
        max_tokens: the cap on tokens, which the last document reaches or exceeds; None for no cap.
        earlier_hashes: uint8 [n, 16], the hashes of documents before these; None keeps duplicates.
        is_near_duplicate: bool [documents], which documents nearly repeat another; None keeps them.
    """
    # all documents, with their row among all rows read (from 1) and their source
    documents = np.concatenate([record.documents for record in records])
    lengths = documents["length"].astype(np.int64)
    counts = [len(record.documents) for record in records]
    rows_before = np.cumsum([0, *(record.num_read for record in records)])  # each shard, and in all shards
    rows = documents["number"] + np.repeat(rows_before[:-1], counts)
    shard_sources = np.array([record.shard.source for record in records], dtype=np.uint32)
    document_sources = np.repeat(shard_sources, counts)

    # deduplication
    hashes = np.concatenate([record.hashes for record in records])
    if earlier_hashes is None:
        is_first = np.ones(len(documents), dtype=bool)
    else:
        is_first = _is_first(hashes, earlier_hashes)
    if is_near_duplicate is None:
        is_near = np.zeros(len(documents), dtype=bool)
    else:
        is_near = is_first & is_near_duplicate
    distinct = np.flatnonzero(is_first & ~is_near)

    # caps: the rows after the last document count as not read
    num_kept = _count_within_caps(lengths[distinct], max_documents, max_tokens)
    kept_documents = distinct[:num_kept]
    if num_kept == len(distinct):
        num_read = int(rows_before[-1])
    else:
        num_read = int(rows[kept_documents[-1]])

    # what was left out or changed in the rows read
    row_counts = _count_rows(records, rows_before, num_read)
    num_tokens_cut = row_counts.num_tokens_cut + int(documents["num_tokens_cut"][kept_documents].sum(dtype=np.int64))
    is_read = rows <= num_read
    duplicates = np.flatnonzero(~is_first & is_read)
    near_duplicates = np.flatnonzero(is_near & is_read)
    for reason, repeats in ((DUPLICATE, duplicates), (NEAR_DUPLICATE, near_duplicates)):
        sources_with_repeats, num_repeats = np.unique(document_sources[repeats], return_counts=True)
        for source, count in zip(sources_with_repeats.tolist(), num_repeats.tolist(), strict=True):
            row_counts.skipped[source][reason] += count

    part_origins = _find_part_origins(records, sources)
    pairs = np.concatenate([record.pairs for record in records])
    rejected_at = pairs["rejected_at"].astype(np.int64) if len(pairs) else None
    files = tuple(SpooledFile(record.tokens, record.masks) for record in records)
    samples = [record.samples for record in records]
    hits = [record.hits for record in records]
    return Collection(
        documents=SpooledDocuments(lengths, files, rejected_at),
        kept_documents=kept_documents,
        characters=documents["characters"].copy(),
        sources=document_sources,
        places=_document_places(documents, part_origins, records),
        num_read=num_read,
        skipped=row_counts.skipped,
        tokens_cut={TOO_LONG: num_tokens_cut} if num_tokens_cut else {},
        edits=dict(row_counts.edits),
        dropped_samples=list(_locate(samples, part_origins, records, num_read)),
        hits=list(_locate(hits, part_origins, records, num_read)),
        duplicates=duplicates,
        near_duplicates=near_duplicates,
        hashes=hashes[kept_documents] if len(hashes) else hashes,
        pairs=pairs if len(pairs) else None,
    )


@dataclass(frozen=True)
class _RowCounts:
    """The counts of the rows that were read and did not become kept documents."""

    skipped: dict[int, Counter[str]]  # number of a source → reason → rows
    edits: Counter[str]  # kind → what cleaning changed
    num_tokens_cut: int  # tokens of skipped chats that were too long


def _count_rows(records: Sequence[ShardRecord], rows_before: np.ndarray, num_read: int) -> _RowCounts:
    """Count the skips and edits in the first ``num_read`` rows.

    ``rows_before`` has the number of rows in the shards before each shard.
    """
    skipped_by_source = defaultdict[int, Counter[str]](Counter)
    edits = Counter[str]()
    num_tokens_cut = 0
    for record, num_rows_before in zip(records, rows_before, strict=False):
        skipped = record.skipped[record.skipped["number"] + num_rows_before <= num_read]
        num_tokens_cut += int(skipped["num_tokens_cut"].sum(dtype=np.int64))
        reason_numbers, num_rows = np.unique(skipped["reason"], return_counts=True)
        for reason_number, count in zip(reason_numbers, num_rows.tolist(), strict=True):
            skipped_by_source[record.shard.source][record.reasons[reason_number]] += count
        changes = record.edits[record.edits["number"] + num_rows_before <= num_read]
        sums = np.bincount(changes["kind"], changes["count"], len(record.kinds)).astype(int)
        for kind, count in zip(record.kinds, sums.tolist(), strict=True):
            if count:
                edits[kind] += count
    return _RowCounts(skipped_by_source, edits, num_tokens_cut)


@dataclass(frozen=True)
class _PartOrigins:
    """The beginnings of the parts of all shards."""

    files: np.ndarray  # int64 [parts], the number of each part's file among the files of all sources
    rows_before: np.ndarray  # int64 [parts], the rows of that file in earlier parts


def _find_part_origins(records: Sequence[ShardRecord], sources: Sequence[Source]) -> _PartOrigins:
    """Return where the parts of the shards begin; InputError if a file has more rows than the index can number."""
    first_files = np.cumsum([0, *(source.num_origins for source in sources)]).tolist()
    files: list[int] = []
    rows_before: list[int] = []
    num_rows: Counter[int] = Counter()  # by file
    for record in records:
        shard = record.shard
        row_counts = record.parts["rows"].tolist()
        for index, origin in enumerate(shard.origins.tolist()):
            file = first_files[shard.source] + origin
            files.append(file)
            rows_before.append(num_rows[file])
            num_rows[file] += row_counts[index]
            if num_rows[file] >> 32:  # a row is a uint32 in the index
                name = part_name(sources[shard.source], shard.parts[index])
                raise InputError(f"{name}: more than {1 << 32:,} rows; split it into smaller files")
    return _PartOrigins(np.array(files, dtype=np.int64), np.array(rows_before, dtype=np.int64))


def _document_places(documents: np.ndarray, part_origins: _PartOrigins, records: Sequence[ShardRecord]) -> np.ndarray:
    """Return the file, the row in it, the tokens and the bytes of each document, DOCUMENT [documents]."""
    documents_per_part = np.concatenate([record.parts["documents"] for record in records])
    places = np.empty(len(documents), dtype=DOCUMENT)
    places["file"] = np.repeat(part_origins.files, documents_per_part)
    places["row"] = documents["row"] + np.repeat(part_origins.rows_before, documents_per_part)
    places["tokens"] = documents["length"]
    places["bytes"] = documents["bytes"]
    return places


def _locate(
    findings_by_shard: Sequence[Sequence[tuple[PlaceInShard, _Finding]]],
    part_origins: _PartOrigins,
    records: Sequence[ShardRecord],
    num_read: int,
) -> Iterator[tuple[_Finding, Location]]:
    """Yield the findings in the first ``num_read`` rows of all shards, each with the location of its document."""
    first_part = 0
    first_row = 0
    for findings, record in zip(findings_by_shard, records, strict=True):
        for place, finding in findings:
            if first_row + place.number <= num_read:
                part = first_part + place.part
                file = int(part_origins.files[part])
                row = place.row + int(part_origins.rows_before[part])
                yield finding, (file, row)
        first_part += len(record.parts)
        first_row += record.num_read


def _is_first(hashes: np.ndarray, earlier_hashes: np.ndarray) -> np.ndarray:
    """Return whether each document is the first with its content, bool [n]; the earlier hashes come before all."""
    all_hashes = np.concatenate([earlier_hashes, hashes])
    values = np.ascontiguousarray(all_hashes).view(f"V{HASH_BYTES}").ravel()  # a hash is one value
    _, first_indices = np.unique(values, return_index=True)
    is_first = np.zeros(len(values), dtype=bool)
    is_first[first_indices] = True
    return is_first[len(earlier_hashes) :]


def _count_within_caps(lengths: np.ndarray, max_documents: int | None, max_tokens: int | None) -> int:
    """Return the number of documents up to and including the one that reaches a cap."""
    num_documents = len(lengths)
    if max_documents is not None:
        num_documents = min(num_documents, max_documents)
    if max_tokens is not None:
        reaching_document = int(np.searchsorted(np.cumsum(lengths), max_tokens))
        num_documents = min(num_documents, reaching_document + 1)
    return num_documents


def select(collections: Sequence[Collection], sources: list[Source], arguments: TokenizeArguments) -> dict[str, Split]:
    """Return the documents of each split; InputError if --weights names a source without a document for training.

    Args:
        collections: the documents of --dataset and, if given, of --validation_dataset.
        sources: the sources of --dataset.
        arguments: the shares, the weights and the seed.
    """
    # draw the validation split
    collection = collections[0]
    share = 0.0 if arguments.validation_dataset else arguments.validation_split
    in_validation = draw_validation(len(collection.kept_documents), share, arguments.seed)

    # the train split, in the order of the sources or mixed
    train = collection.kept_documents[~in_validation]
    if arguments.weights:
        train_sources = collection.sources[train]
        empty_sources = [source.name for number, source in enumerate(sources) if not (train_sources == number).any()]
        if empty_sources:
            raise InputError(
                f"--weights: no training documents in {', '.join(empty_sources)}; give more documents, a smaller "
                "--validation_split, or leave the source out"
            )
        lengths = collection.documents.lengths[train]
        train = train[mix(lengths, train_sources, arguments.weights, arguments.max_tokens, arguments.seed)]

    splits = {"train": Split(collection, train)}
    if arguments.validation_dataset:
        splits["validation"] = Split(collections[1], collections[1].kept_documents)
    elif share > 0:
        splits["validation"] = Split(collection, collection.kept_documents[in_validation])
    return splits


def draw_validation(num_documents: int, share: float, seed: int) -> np.ndarray:
    """Return which documents validate, bool [num_documents]: a ``share``, at least one if possible, and not all."""
    in_validation = np.zeros(num_documents, dtype=bool)
    if share > 0 and num_documents >= 2:
        num_drawn = max(round(share * num_documents), 1)
        num_drawn = min(num_drawn, num_documents - 1)
        shuffled = np.random.default_rng(seed).permutation(num_documents)
        in_validation[shuffled[:num_drawn]] = True
    return in_validation


def mix(
    lengths: np.ndarray, sources: np.ndarray, weights: Sequence[float], num_tokens: int | None, seed: int
) -> np.ndarray:
    """Return the documents to pack, in random order, int64 [n]; a document may occur several times.

    Source i contributes ``weights[i] / sum(weights)`` of ``num_tokens`` (None means all): full epochs over its
    documents, each in a new random order, and then as many documents as are needed to reach its share. ``lengths`` and
    ``sources``, int64 [documents], are each document's tokens and source.
    """
    total_tokens = num_tokens or int(lengths.sum())
    epochs: list[np.ndarray] = []  # the documents of each epoch of each source
    for source, weight in enumerate(weights):
        source_documents = np.flatnonzero(sources == source)
        # the weight is divided first, because total_tokens * weight may overflow to infinity
        missing_tokens = total_tokens * (weight / sum(weights))
        epoch = 0
        while missing_tokens > 0:
            shuffled = np.random.default_rng([seed, source, epoch]).permutation(source_documents)
            ends = np.cumsum(lengths[shuffled])
            num_documents = np.searchsorted(ends, missing_tokens) + 1  # all, if the epoch is too short
            epochs.append(shuffled[:num_documents])
            missing_tokens -= int(ends[-1])
            epoch += 1
    return np.random.default_rng(seed).permutation(np.concatenate(epochs))


def tokens_by_source(collection: Collection, documents: np.ndarray, num_sources: int) -> np.ndarray:
    """Return the tokens that each of the first sources has in ``documents``, int64 [num_sources]."""
    lengths = collection.documents.lengths[documents]
    tokens = np.bincount(collection.sources[documents], weights=lengths, minlength=num_sources)
    return tokens.astype(np.int64)[:num_sources]
