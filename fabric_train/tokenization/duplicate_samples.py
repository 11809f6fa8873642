"""Show some of the duplicates and near duplicates that were left out, for ``dropped.jsonl``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.cleaning.dropped import TEXT_CHARACTERS, DroppedText, Place, evenly_spaced
from fabric_train.cleaning.near_duplicates import NearDuplicates
from fabric_train.token_dataset.arrow_folder import PiecesToCopy, SpoolReader
from fabric_train.token_dataset.document_index import SourceTable
from fabric_train.token_dataset.manifest import DUPLICATE, NEAR_DUPLICATE
from fabric_train.tokenization.selection import Collection
from fabric_train.tokenization.tokenizers.text_encoder import load_fast


def sample_duplicates(
    near: NearDuplicates | None, collections: Sequence[Collection], sources: SourceTable, tokenizer_folder: Path
) -> list[tuple[DroppedText, Place]]:
    """Return at most 20 of the duplicates and 20 of the near duplicates that were left out, as cleaning left them.

    The detail of a near duplicate is its estimated similarity with the first document of its cluster, and that
    document's place. It may be below the threshold: then both are similar to others in between. ``near`` numbers the
    documents of all ``collections`` in order.
    """
    starts = np.cumsum([0, *(len(collection.characters) for collection in collections)])
    exact = np.concatenate([first + one.duplicates for first, one in zip(starts, collections, strict=False)])
    nearly = np.concatenate([first + one.near_duplicates for first, one in zip(starts, collections, strict=False)])
    exact = exact[evenly_spaced(len(exact))]
    nearly = nearly[evenly_spaced(len(nearly))]
    tokenizer = load_fast(tokenizer_folder / "tokenizer.json", special_text_is_plain=False)
    readers = [SpoolReader(collection.documents) for collection in collections]

    def find(document: int) -> tuple[int, int]:
        number = int(np.searchsorted(starts, document, side="right")) - 1
        return number, document - int(starts[number])

    def place_of(document: int) -> Place:
        number, local = find(document)
        place = collections[number].places[local]
        return int(place["file"]), int(place["row"])

    def text_of(document: int) -> str:
        number, local = find(document)
        length = min(int(collections[number].documents.lengths[local]), TEXT_CHARACTERS)
        piece = (np.array([value], dtype=np.int64) for value in (local, 0, length, 0))
        tokens = np.empty(length, dtype=np.int32)
        readers[number].read(PiecesToCopy(*piece), tokens, None)
        return str(tokenizer.decode(tokens.tolist())[:TEXT_CHARACTERS])

    found = [(DUPLICATE, document, "the same as an earlier document") for document in exact.tolist()]
    if near is not None:
        firsts = near.firsts[nearly]
        estimates = near.signatures.similarities(nearly, firsts)
        for document, first, similarity in zip(nearly.tolist(), firsts.tolist(), estimates, strict=True):
            found.append((NEAR_DUPLICATE, document, f"{similarity:.2f} like {sources.place(*place_of(first))}"))
    return [(DroppedText(reason, detail, text_of(document)), place_of(document)) for reason, document, detail in found]
