"""Name the documents of rows: source, file, place and first words."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.output import visible
from fabric_train.data.step_sampler import Window
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.ranks import data_ranks, gather_over_data_ranks
from fabric_train.tokenization.packing.document_index import DocumentOrigin
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_DECODED_TOKENS = 32
_SHOWN_CHARACTERS = 60
_NUM_NAMED = 3


@dataclass(frozen=True)
class RowDocument:
    """A document, or its ``num_tokens`` from ``start`` on, in a row; ``origin`` is None without a document index."""

    origin: DocumentOrigin | None
    start: int
    num_tokens: int
    text: str


def documents_in(dataset: TokenDataset, row: int, vocabulary: Vocabulary | None) -> Iterator[RowDocument]:
    """Yield the documents of a row of the train split, in order; without a vocabulary, their text is token ids."""
    ids = dataset.train.read([row])[0][0].tolist()
    index = dataset.train.index
    if index is None:
        yield RowDocument(None, 0, len(ids), _first_words(ids, vocabulary))
        return
    pieces = index.pieces(np.array([row]))
    columns = (pieces.positions, pieces.documents, pieces.starts, pieces.lengths)
    for position, document, start, length in zip(*(column.tolist() for column in columns), strict=True):
        text = _first_words(ids[position : position + length], vocabulary)
        yield RowDocument(index.origin(document), start, length, text)


def describe_piece(dataset: TokenDataset, row: int, piece: int) -> str | None:
    """Return where the document of a piece comes from, and its first words; None without a document index."""
    if dataset.train.index is None:
        return None
    document = next(islice(documents_in(dataset, row, load_vocabulary(dataset.folder / "tokenizer")), piece, None))
    return f"{document.origin} “{document.text}”"


def _first_words(ids: list[int], vocabulary: Vocabulary | None) -> str:
    """Return the beginning of the text of some tokens, in one line that cannot control a terminal."""
    begin = ids[:_DECODED_TOKENS]
    if vocabulary is None:
        return " ".join(map(str, begin))[:_SHOWN_CHARACTERS]
    text = vocabulary.tokenizer.decode(begin, skip_special_tokens=True).strip("\ufffd")
    line = visible(" ".join(text.split()))
    return line if len(line) <= _SHOWN_CHARACTERS and len(begin) == len(ids) else f"{line[:_SHOWN_CHARACTERS]}…"


@dataclass(frozen=True)
class WorstDocuments:
    """Names the documents of a window that have the highest mean losses over all ranks."""

    fabric: Fabric
    data: TokenDataset | TokenMixture

    def describe(self, window: Window, of_pieces: torch.Tensor) -> str:
        """Return a part of a message that names them; empty if no token dataset has a document index.

        All ranks call this together and get the same text. ``of_pieces``, fp64 [P] on the CPU, are the summed losses of
        the pieces in this rank's part of the window.
        """
        everywhere = gather_over_data_ranks(self.fabric, self._worst(window, of_pieces)).flatten(0, 1).tolist()
        found = sorted(((loss, int(row), int(piece)) for loss, row, piece in everywhere if row >= 0), key=_order)
        named = [(loss, self._name(row, piece)) for loss, row, piece in found[:_NUM_NAMED]]
        documents = [f"{loss:.4f} {name}" for loss, name in named if name is not None]
        return f"; highest mean losses: {', '.join(documents)}" if documents else ""

    def _worst(self, window: Window, of_pieces: torch.Tensor) -> torch.Tensor:
        """Return the worst pieces of this rank, fp64 [3, 3]: mean loss, row of the run and piece in it; or row -1."""
        ranks, found, first = data_ranks(self.fabric), list[tuple[float, int, int]](), 0
        for number, batch in enumerate(window.batches):
            if batch.pieces is None or not len(of_pieces):  # the objective tells no tokens apart
                continue
            rows = np.array(window.rows_of(number, ranks.size, ranks.rank))
            owners = self.data.train.pieces(rows.tolist()).rows
            places = np.arange(len(owners)) - np.searchsorted(owners, owners)
            counts = batch.pieces.num_targets
            if self.data.has_pairs:  # the loss of a pair is no sum over its tokens
                counts = torch.ones_like(counts)
            means = (of_pieces[first : first + len(owners)] / counts).tolist()
            first += len(owners)
            columns = zip(means, rows[owners].tolist(), places.tolist(), counts.tolist(), strict=True)
            found += [(mean, row, place) for mean, row, place, count in columns if count]
        worst = sorted(found, key=_order)[:_NUM_NAMED]
        return torch.tensor([*worst, *[(0.0, -1, -1)] * (_NUM_NAMED - len(worst))], dtype=torch.float64)

    def _name(self, row: int, piece: int) -> str | None:
        if isinstance(self.data, TokenDataset):
            return describe_piece(self.data, row, piece)
        part, number = self.data.train.place(row)
        return describe_piece(self.data.parts[part], number, piece)


def _order(found: tuple[float, int, int]) -> tuple[float, int, int]:
    """Return a key that sorts the highest losses first, and before them those that are not finite."""
    loss, row, piece = found
    return (-loss if math.isfinite(loss) else -math.inf), row, piece
