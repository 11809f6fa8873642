"""Show some of the duplicates and near duplicates: the text of each, and which document a near duplicate repeats."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.tokenization.cleaning.dropped_sample import PER_REASON, TEXT_CHARACTERS, DroppedDocument
from fabric_train.tokenization.cleaning.near_duplicates import NearDuplicates
from fabric_train.tokenization.manifest import DUPLICATE, NEAR_DUPLICATE
from fabric_train.tokenization.packing.document_index import SourceTable
from fabric_train.tokenization.packing.spooled import PiecesToCopy, SpoolReader
from fabric_train.tokenization.selection import Collection
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast


def sample_duplicates(
    near: NearDuplicates | None, collections: Sequence[Collection], sources: SourceTable, tokenizer_folder: Path
) -> list[DroppedDocument]:
    """Return at most 20 of the duplicates and 20 of the near duplicates that were left out, spread evenly.

    The detail of a near duplicate is its estimated similarity with the first document of its cluster, and that
    document's place. It may be below the threshold: then both are similar to others in between. Texts are decoded from
    tokens, so they are as cleaning has left them.

    Args:
        near: numbers the documents of all collections in order; None without --near_duplicates.
        collections: the documents of --dataset, and of --validation_dataset.
        sources: those of the token dataset.
        tokenizer_folder: holds ``tokenizer.json``.
    """
    starts = np.cumsum([0, *(len(collection.characters) for collection in collections)])
    exact = _spread([first + one.duplicates for first, one in zip(starts, collections, strict=False)])
    nearly = _spread([first + one.near_duplicates for first, one in zip(starts, collections, strict=False)])
    if not len(exact) and not len(nearly):
        return []
    tokenizer = load_fast(tokenizer_folder / "tokenizer.json", special_text_is_plain=False)
    readers = [SpoolReader(collection.documents) for collection in collections]

    def place_of(document: int) -> tuple[int, int]:
        number = int(np.searchsorted(starts, document, side="right")) - 1
        place = collections[number].places[document - starts[number]]
        return int(place["file"]), int(place["row"])

    def text_of(document: int) -> str:
        number = int(np.searchsorted(starts, document, side="right")) - 1
        local = document - int(starts[number])
        length = min(int(collections[number].documents.lengths[local]), TEXT_CHARACTERS)
        piece = (np.array([value], dtype=np.int64) for value in (local, 0, length, 0))
        tokens = np.empty(length, dtype=np.int32)
        readers[number].read(PiecesToCopy(*piece), tokens, None)
        return str(tokenizer.decode(tokens.tolist())[:TEXT_CHARACTERS])

    details = [(DUPLICATE, document, "the same as an earlier document") for document in exact.tolist()]
    if near is not None:
        firsts = near.firsts[nearly]
        similarities = near.signatures.similarities(nearly, firsts)
        for document, first, similarity in zip(nearly.tolist(), firsts.tolist(), similarities, strict=True):
            details.append((NEAR_DUPLICATE, document, f"{similarity:.2f} like {sources.place(*place_of(first))}"))
    return [
        DroppedDocument(reason, detail, *place_of(document), text_of(document)) for reason, document, detail in details
    ]


def _spread(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Return at most 20 of the documents, evenly spaced, int64."""
    joined = np.concatenate(documents)
    count = min(len(joined), PER_REASON)
    return joined[np.arange(count) * len(joined) // max(count, 1)]
