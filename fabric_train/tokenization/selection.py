"""Which of the encoded documents go into which split, in which order and how often.

All is a function of the documents' order in the sources, the settings and the seed: the number of processes, and where
shards begin, decide nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabric_train.tokenization.encoded_shards import HASH_BYTES, REASONS, Shard, ShardRecord
from fabric_train.tokenization.manifest import DUPLICATE, TOO_LONG
from fabric_train.tokenization.packing.spooled import SpooledDocuments, SpooledFile


@dataclass(frozen=True)
class Collection:
    """The encoded documents of some sources.

    Args:
        documents: all on the disk, those left out included.
        kept: int64 [kept], the documents that caps and deduplication leave, in the order of the sources.
        characters: int64 [documents].
        sources: int64 [documents], each one's number among the sources.
        num_read: rows read, up to the one at which a cap ended the reading.
        skipped: reason → rows left out among those.
        tokens_cut: reason → tokens taken off kept chats.
        hashes: uint8 [kept, 16] or [0, 16], of the kept documents' content.
    """

    documents: SpooledDocuments
    kept: np.ndarray
    characters: np.ndarray
    sources: np.ndarray
    num_read: int
    skipped: dict[str, int]
    tokens_cut: dict[str, int]
    hashes: np.ndarray


def collect(
    folder: Path,
    shards: Sequence[Shard],
    records: Sequence[ShardRecord],
    max_documents: int | None,
    max_tokens: int | None,
    seen: np.ndarray | None,
) -> Collection:
    """Put finished shards together.

    Args:
        folder: where they lie.
        shards: in the order of the sources.
        records: as many.
        max_documents: stop after so many documents.
        max_tokens: stop after the document that reaches so many tokens.
        seen: where duplicates are to be left out, hashes of documents that were read before these; else None.
    """
    documents = np.concatenate([record.documents for record in records])
    first_rows = np.cumsum([0, *(record.num_read for record in records)])
    counts = [len(record.documents) for record in records]
    rows = documents["number"] + np.repeat(first_rows[:-1], counts)
    lengths = documents["length"].astype(np.int64)
    hashes = np.concatenate([record.hashes for record in records])
    is_kept = np.ones(len(documents), dtype=bool) if seen is None else _is_first(hashes, seen)
    kept = np.flatnonzero(is_kept)
    last = _last_within_caps(lengths[kept], max_documents, max_tokens)
    num_read = int(first_rows[-1]) if last == len(kept) else int(rows[kept[last - 1]])
    kept = kept[:last]
    skipped: Counter[str] = Counter()
    for record, first in zip(records, first_rows, strict=False):
        within = record.skipped["reason"][record.skipped["number"] + first <= num_read]
        for reason, count in zip(*np.unique(within, return_counts=True), strict=True):
            skipped[REASONS[reason]] += int(count)
    num_duplicates = int((~is_kept & (rows <= num_read)).sum())
    if num_duplicates:
        skipped[DUPLICATE] = num_duplicates
    num_cut = int(documents["num_tokens_cut"][kept].sum(dtype=np.int64))
    return Collection(
        documents=SpooledDocuments(
            lengths, tuple(_spooled(folder, *pair) for pair in zip(shards, records, strict=True))
        ),
        kept=kept,
        characters=documents["characters"].astype(np.int64),
        sources=np.repeat([shard.source for shard in shards], counts),
        num_read=num_read,
        skipped=dict(skipped),
        tokens_cut={TOO_LONG: num_cut} if num_cut else {},
        hashes=hashes[kept] if len(hashes) else hashes,
    )


def _spooled(folder: Path, shard: Shard, record: ShardRecord) -> SpooledFile:
    masks = folder / f"{shard.key}.masks" if record.has_masks else None
    return SpooledFile(folder / f"{shard.key}.tokens", masks)


def _is_first(hashes: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Return whether each document, bool [n], is the first of its content, those ``seen`` before counted."""
    both = np.ascontiguousarray(np.concatenate([seen, hashes])).view(f"V{HASH_BYTES}").ravel()
    is_first = np.zeros(len(both), dtype=bool)
    is_first[np.unique(both, return_index=True)[1]] = True
    return is_first[len(seen) :]


def _last_within_caps(lengths: np.ndarray, max_documents: int | None, max_tokens: int | None) -> int:
    """Return how many of the documents are read before a cap ends it; the one that reaches a cap counts."""
    last = len(lengths) if max_documents is None else min(max_documents, len(lengths))
    if max_tokens is not None:
        last = min(last, int(np.searchsorted(np.cumsum(lengths), max_tokens)) + 1)
    return last


def draw_validation(num_documents: int, share: float, seed: int) -> np.ndarray:
    """Return which documents go to validation, bool [num_documents].

    Exactly ``share`` of them, rounded; but where the share is not 0 and there are two or more, at least one and at most
    all but one. A function of these three numbers alone.
    """
    chosen = np.zeros(num_documents, dtype=bool)
    if share > 0 and num_documents >= 2:
        count = min(max(round(share * num_documents), 1), num_documents - 1)
        chosen[np.random.default_rng(seed).permutation(num_documents)[:count]] = True
    return chosen


def mix(
    lengths: np.ndarray, sources: np.ndarray, weights: Sequence[float], num_tokens: int | None, seed: int
) -> np.ndarray:
    """Return the documents, int64 [n], in the random order in which they are packed, some of them several times.

    Source i gives its share ``weights[i] / sum(weights)`` of ``num_tokens`` (or, where that is None, of as many tokens
    as all documents have): all its documents as often as they fit, in a new random order each time, and then as many as
    it takes to reach the share.

    Args:
        lengths: int64 [documents].
        sources: int64 [documents], below ``len(weights)``; every source has a document.
    """
    total = num_tokens or int(lengths.sum())
    chosen = []
    for source, weight in enumerate(weights):
        own = np.flatnonzero(sources == source)
        wanted = total * weight / sum(weights)
        epoch = 0
        while wanted > 0:
            shuffled = np.random.default_rng([seed, source, epoch]).permutation(own)
            ends = np.cumsum(lengths[shuffled])
            chosen.append(shuffled[: np.searchsorted(ends, wanted) + 1])
            wanted -= int(ends[-1])
            epoch += 1
    return np.random.default_rng(seed).permutation(np.concatenate(chosen))
