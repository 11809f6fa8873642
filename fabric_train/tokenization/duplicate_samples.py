"""Show some of the duplicates and near duplicates that were left out, for ``dropped.jsonl``."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.cleaning.dropped import TEXT_CHARACTERS, DroppedText, Location, evenly_spaced
from fabric_train.cleaning.near_duplicates import NearDuplicates
from fabric_train.token_dataset.document_index import SourceTable
from fabric_train.token_dataset.manifest import DUPLICATE, NEAR_DUPLICATE
from fabric_train.token_dataset.spooled_documents import PiecesToCopy, SpoolReader
from fabric_train.tokenization.selection import Collection
from fabric_train.tokenization.tokenizers.fast_tokenizer import load_fast


class _CollectedDocuments:
    """The documents of several collections, numbered in the order of the collections."""

    def __init__(self, collections: Sequence[Collection], tokenizer_folder: Path) -> None:
        self._collections = collections
        counts = [len(collection.characters) for collection in collections]
        self.first_documents = np.cumsum([0, *counts])
        """The number of each collection's first document, int64 [collections + 1]."""
        self._readers = [SpoolReader(collection.documents) for collection in collections]
        self._tokenizer = load_fast(tokenizer_folder / "tokenizer.json", special_text_is_plain=False)

    def _find(self, document: int) -> tuple[int, int]:
        """Return the index of a document's collection, and its number in that collection."""
        index = int(np.searchsorted(self.first_documents, document, side="right")) - 1
        return index, document - int(self.first_documents[index])

    def location(self, document: int) -> Location:
        """Return a document's file and row."""
        collection_index, document_in_collection = self._find(document)
        place = self._collections[collection_index].places[document_in_collection]
        return int(place["file"]), int(place["row"])

    def text(self, document: int) -> str:
        """Decode the first 500 characters of a document; they have at most as many tokens."""
        collection_index, document_in_collection = self._find(document)
        num_tokens = int(self._collections[collection_index].documents.lengths[document_in_collection])
        length = min(num_tokens, TEXT_CHARACTERS)
        piece = PiecesToCopy(
            documents=np.array([document_in_collection]),
            starts=np.array([0]),
            lengths=np.array([length]),
            targets=np.array([0]),
        )
        token_ids = np.empty(length, dtype=np.int32)
        self._readers[collection_index].read(piece, token_ids, supervised=None)
        return str(self._tokenizer.decode(token_ids.tolist())[:TEXT_CHARACTERS])


def sample_duplicates(
    near_duplicates: NearDuplicates | None,
    collections: Sequence[Collection],
    sources: SourceTable,
    tokenizer_folder: Path,
) -> list[tuple[DroppedText, Location]]:
    """Return at most 20 duplicates and 20 near duplicates that were left out, as they were after cleaning.

    The detail of a near duplicate is its estimated similarity with the first document of its cluster, and where that
    document is. The similarity may be below the threshold if both are similar to other documents of the cluster.

    Args:
        near_duplicates: which documents are near duplicates, with the documents of all collections numbered in
            order; None without --near_duplicates.
        collections: the documents of --dataset and, if given, of --validation_dataset.
        sources: the names of sources and files.
        tokenizer_folder: the folder with the ``tokenizer.json`` that decodes the documents.
    """
    documents = _CollectedDocuments(collections, tokenizer_folder)
    duplicate_documents: list[np.ndarray] = []  # of each collection, as numbers over all collections
    near_duplicate_documents: list[np.ndarray] = []
    for first_document, collection in zip(documents.first_documents, collections, strict=False):
        duplicate_documents.append(first_document + collection.duplicates)
        near_duplicate_documents.append(first_document + collection.near_duplicates)

    sample: list[tuple[DroppedText, Location]] = []

    def add(document: int, reason: str, detail: str) -> None:
        sample.append((DroppedText(reason, detail, documents.text(document)), documents.location(document)))

    for document in _spread(np.concatenate(duplicate_documents)).tolist():
        add(document, DUPLICATE, "the same as an earlier document")
    if near_duplicates is not None:
        sampled_documents = _spread(np.concatenate(near_duplicate_documents))
        cluster_roots = near_duplicates.cluster_roots[sampled_documents]
        similarities = near_duplicates.signatures.similarities(sampled_documents, cluster_roots)
        for document, root, similarity in zip(
            sampled_documents.tolist(), cluster_roots.tolist(), similarities, strict=True
        ):
            similar_place = sources.location(*documents.location(root))
            add(document, NEAR_DUPLICATE, f"{similarity:.2f} like {similar_place}")
    return sample


def _spread(documents: np.ndarray) -> np.ndarray:
    """Return up to 20 of the documents, evenly spaced."""
    return documents[evenly_spaced(len(documents))]
