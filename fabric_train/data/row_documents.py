"""Describe the documents in rows: source, file, position and first words."""

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
from fabric_train.token_dataset.document_index import DocumentOrigin
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_DECODED_TOKENS = 32
_SHOWN_CHARACTERS = 60
_NUM_NAMED = 3


@dataclass(frozen=True)
class RowDocument:
    """A document's ``num_tokens`` tokens from ``start`` on, in a row; ``origin`` is None without a document index."""

    origin: DocumentOrigin | None
    start: int
    num_tokens: int
    text: str


def documents_in(dataset: TokenDataset, row: int, vocabulary: Vocabulary | None) -> Iterator[RowDocument]:
    """Yield the documents of a row of the train split, in order; without a vocabulary, their text is token ids."""
    (stored_row,) = dataset.train.read([row])
    input_ids, _, _ = stored_row
    ids = input_ids.tolist()
    index = dataset.train.index
    if index is None:
        yield RowDocument(origin=None, start=0, num_tokens=len(ids), text=_first_words(ids, vocabulary))
        return
    pieces = index.pieces(np.array([row]))
    for piece in range(len(pieces.documents)):
        position = int(pieces.positions[piece])
        length = int(pieces.lengths[piece])
        yield RowDocument(
            origin=index.origin(int(pieces.documents[piece])),
            start=int(pieces.starts[piece]),
            num_tokens=length,
            text=_first_words(ids[position : position + length], vocabulary),
        )


def describe_piece(dataset: TokenDataset, row: int, piece: int) -> str | None:
    """Return where a piece's document comes from, and the piece's first words; None without a document index."""
    if dataset.train.index is None:
        return None
    vocabulary = load_vocabulary(dataset.folder / "tokenizer")
    documents = documents_in(dataset, row, vocabulary)
    document = next(islice(documents, piece, None))
    return f"{document.origin} “{document.text}”"


def _first_words(ids: list[int], vocabulary: Vocabulary | None) -> str:
    """Return the beginning of the text of some tokens, in one line that cannot control a terminal."""
    first_ids = ids[:_DECODED_TOKENS]
    if vocabulary is None:
        return " ".join(map(str, first_ids))[:_SHOWN_CHARACTERS]
    text = vocabulary.tokenizer.decode(first_ids, skip_special_tokens=True)
    text = text.strip("\ufffd")  # half a character, where the tokens are cut
    line = visible(" ".join(text.split()))
    is_whole = len(first_ids) == len(ids) and len(line) <= _SHOWN_CHARACTERS
    return line if is_whole else f"{line[:_SHOWN_CHARACTERS]}…"


@dataclass(frozen=True)
class PieceLoss:
    """The mean loss of a piece of a document."""

    mean: float
    row: int
    """The row of the run; -1 if there is no such piece."""
    piece: int
    """The index of the piece in the row."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """The sort key that puts losses that are not finite first, and then the highest ones."""
        descending = -self.mean if math.isfinite(self.mean) else -math.inf
        return descending, self.row, self.piece


@dataclass(frozen=True)
class WorstDocuments:
    """Names the documents of a window that have the highest mean losses over all ranks."""

    fabric: Fabric
    data: TokenDataset | TokenMixture

    def describe(self, window: Window, losses_by_piece: torch.Tensor) -> str:
        """Return a part of a message that names these documents; "" if no token dataset has a document index.

        All ranks call this together and get the same text.

        Args:
            window: The window, with this rank's micro-batches.
            losses_by_piece: The summed losses of the pieces in them, fp64 [pieces] on the CPU.
        """
        worst_of_rank = [[loss.mean, loss.row, loss.piece] for loss in self._worst(window, losses_by_piece)]
        missing = [[0.0, -1, -1]] * (_NUM_NAMED - len(worst_of_rank))  # every rank sends equally many
        packed = torch.tensor(worst_of_rank + missing, dtype=torch.float64)  # [_NUM_NAMED, 3]
        gathered = gather_over_data_ranks(self.fabric, packed).flatten(0, 1)

        losses = [PieceLoss(mean, int(row), int(piece)) for mean, row, piece in gathered.tolist()]
        losses = sorted((loss for loss in losses if loss.row >= 0), key=lambda loss: loss.rank)
        documents = []
        for loss in losses[:_NUM_NAMED]:
            name = self._name(loss.row, loss.piece)
            if name is not None:
                documents.append(f"{loss.mean:.4f} {name}")
        return f"; highest mean losses: {', '.join(documents)}" if documents else ""

    def _worst(self, window: Window, losses_by_piece: torch.Tensor) -> list[PieceLoss]:
        """Return the pieces of this rank that have the highest mean losses."""
        ranks = data_ranks(self.fabric)
        losses: list[PieceLoss] = []
        first_piece = 0  # of the micro-batch, among the pieces of all micro-batches
        for batch_index, batch in enumerate(window.batches):
            if batch.pieces is None or not len(losses_by_piece):  # the objective has no loss for each token
                continue
            rows = window.rows_of(batch_index, ranks.size, ranks.rank)
            row_of_piece = self.data.train.pieces(rows).rows  # int64 [pieces], indices into ``rows``, ascending
            first_of_row = np.searchsorted(row_of_piece, row_of_piece)
            piece_of_row = np.arange(len(row_of_piece)) - first_of_row

            counts = batch.pieces.num_targets
            if self.data.has_pairs or self.data.has_unpaired:  # such a loss is no sum over tokens
                counts = torch.ones_like(counts)
            means = losses_by_piece[first_piece : first_piece + len(row_of_piece)] / counts
            first_piece += len(row_of_piece)
            for index in counts.nonzero().flatten().tolist():
                row = rows[row_of_piece[index]]
                losses.append(PieceLoss(float(means[index]), row, piece=int(piece_of_row[index])))
        return sorted(losses, key=lambda loss: loss.rank)[:_NUM_NAMED]

    def _name(self, row: int, piece: int) -> str | None:
        if isinstance(self.data, TokenDataset):
            return describe_piece(self.data, row, piece)
        dataset_index, row_of_dataset = self.data.train.locate(row)
        return describe_piece(self.data.parts[dataset_index], row_of_dataset, piece)
