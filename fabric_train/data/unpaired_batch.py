"""Select one kind of sequence from a batch of unpaired answers: the answers, or the mismatched answers next to them.

Shapes: A answers, T tokens per row.
"""

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, pad_rows

ANSWER: Final = 0
"""The sequence of a prompt with its answer."""
MISMATCHED: Final = 1
"""The sequence of the same prompt with another row's answer."""


def select_sequences(batch: Batch, kind: int) -> Batch:
    """Return a batch on the CPU with the sequences of one kind: ``ANSWER`` or ``MISMATCHED``.

    Rows stay apart and become shorter. Each document of the result is a piece. ``reference`` has the log-probability of
    each of its answers, fp64 [A]. The batch of a rank without rows is returned unchanged.
    """
    if batch.documents is None or batch.is_desirable is None:
        return batch
    num_rows, row_length = batch.input_ids.shape

    # where the sequences are in the flattened batch, without padding
    begins = batch.documents.borders.numpy()[:-1][kind::2].astype(np.int64)  # [A]
    lengths = np.array(batch.lengths, dtype=np.int64)[kind::2]
    input_ids = batch.input_ids.numpy().ravel()
    labels = batch.labels.numpy().ravel()

    # join the documents of each row
    ids_of_rows: list[list[np.ndarray]] = [[] for _ in range(num_rows)]
    labels_of_rows: list[list[np.ndarray]] = [[] for _ in range(num_rows)]
    num_targets: list[int] = []
    for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
        row = begin // row_length
        sequence_labels = labels[begin : begin + length]
        ids_of_rows[row].append(input_ids[begin : begin + length])
        labels_of_rows[row].append(sequence_labels)
        num_targets.append(int((sequence_labels[1:] != IGNORED_LABEL).sum()))  # nothing predicts the first token
    selected = pad_rows(
        [np.concatenate(sequences) for sequences in ids_of_rows],
        [np.concatenate(sequences) for sequences in labels_of_rows],
        [np.cumsum([0, *map(len, sequences[:-1])]) for sequences in ids_of_rows],
    )

    # what is known of each answer
    reference = None if batch.reference is None else batch.reference[:, kind].contiguous()
    pieces = batch.pieces
    if pieces is None:
        no_sources = torch.zeros(len(num_targets), dtype=torch.int64)
        pieces = Pieces(no_sources, no_sources, torch.full((len(num_targets),), torch.nan, dtype=torch.float64))
    pieces = replace(pieces, num_targets=torch.tensor(num_targets))
    selected = replace(selected, pieces=pieces, reference=reference, is_desirable=batch.is_desirable)
    return selected.pin_memory() if batch.input_ids.is_pinned() else selected
