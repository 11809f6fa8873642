"""All documents' tokens on the disk until the number of documents is known and the split can be drawn."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabric_train.corpus.encoder import EncodedDocument


@dataclass(frozen=True)
class Spool:
    """The encoded documents: ``lengths`` and ``characters`` int64 [documents], their tokens in ``file``, int32.

    ``last_number`` is the last one's number among all documents read; ``is_cut`` tells that the cap on tokens ended it.
    """

    file: Path
    lengths: np.ndarray
    characters: np.ndarray
    last_number: int
    is_cut: bool

    def documents(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the tokens, int32, of the documents where ``chosen`` (bool [documents]) is true, in order."""
        tokens = np.memmap(self.file, dtype=np.int32, mode="r")
        ends = np.cumsum(self.lengths)
        for index in np.flatnonzero(chosen):
            yield tokens[ends[index] - self.lengths[index] : ends[index]]


def fill_spool(file: Path, documents: Iterable[EncodedDocument], max_tokens: int | None) -> Spool:
    """Write the documents' tokens to ``file``, to the one that reaches ``max_tokens``, BOS and EOS counted."""
    lengths, characters = array("q"), array("q")  # 8 bytes a document each
    number = total = 0
    is_cut = False
    with file.open("wb") as spool:
        for document in documents:
            spool.write(document.input_ids.data)
            lengths.append(len(document.input_ids))
            characters.append(document.num_characters)
            number = document.number
            total += len(document.input_ids)
            is_cut = max_tokens is not None and total >= max_tokens
            if is_cut:
                break
    return Spool(file, np.array(lengths, dtype=np.int64), np.array(characters, dtype=np.int64), number, is_cut)


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
