"""Show some of the near duplicates: the text of each, and which document it repeats."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.tokenization.cleaning.dropped_sample import PER_REASON, TEXT_CHARACTERS, DroppedDocument
from fabric_train.tokenization.cleaning.near_duplicates import NearDuplicates
from fabric_train.tokenization.manifest import NEAR_DUPLICATE
from fabric_train.tokenization.packing.document_index import SourceTable
from fabric_train.tokenization.packing.spooled import PiecesToCopy, SpoolReader
from fabric_train.tokenization.selection import Collection
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast


def sample_near_duplicates(
    near: NearDuplicates, collections: Sequence[Collection], sources: SourceTable, tokenizer_folder: Path
) -> list[DroppedDocument]:
    """Return at most 20 of the documents left out as near duplicates, spread evenly.

    The detail is the estimated similarity with the first document of the cluster, and that document's place. It may be
    below the threshold: then both are similar to others in between. Texts are decoded from tokens, so they are as
    cleaning has left them.

    Args:
        near: numbers the documents of all collections in order.
        collections: the documents of --dataset, and of --validation_dataset.
        sources: those of the token dataset.
        tokenizer_folder: holds ``tokenizer.json``.
    """
    starts = np.cumsum([0, *(len(collection.characters) for collection in collections)])
    left_out = np.concatenate(
        [start + collection.near_duplicates for start, collection in zip(starts, collections, strict=False)]
    )
    count = min(len(left_out), PER_REASON)
    if not count:
        return []
    chosen = left_out[np.arange(count) * len(left_out) // count]
    similarities = near.signatures.similarities(chosen, near.firsts[chosen])
    tokenizer = load_fast(tokenizer_folder / "tokenizer.json", special_text_is_plain=False)

    def find(document: int) -> tuple[Collection, int]:
        number = int(np.searchsorted(starts, document, side="right")) - 1
        return collections[number], document - int(starts[number])

    dropped = []
    for document, first, similarity in zip(chosen, near.firsts[chosen], similarities, strict=True):
        text = tokenizer.decode(_first_tokens(*find(document)))
        detail = f"{similarity:.2f} like {sources.place(*_place(*find(first)))}"
        dropped.append(DroppedDocument(NEAR_DUPLICATE, detail, *_place(*find(document)), text[:TEXT_CHARACTERS]))
    return dropped


def _place(collection: Collection, document: int) -> tuple[int, int]:
    """Return the number of the document's file, and its row there."""
    place = collection.places[document]
    return int(place["file"]), int(place["row"])


def _first_tokens(collection: Collection, document: int) -> list[int]:
    """Return the document's first tokens, as many as its sample has characters."""
    length = min(int(collection.documents.lengths[document]), TEXT_CHARACTERS)
    piece = (np.array([value], dtype=np.int64) for value in (document, 0, length, 0))
    tokens = np.empty(length, dtype=np.int32)
    SpoolReader(collection.documents).read(PiecesToCopy(*piece), tokens, None)
    return tokens.tolist()
