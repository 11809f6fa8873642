"""Find the documents of a step with the highest losses, when a step's loss is not what it should be."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from lightning import Fabric

from fabric_train.data.row_documents import describe_piece
from fabric_train.data.step_sampler import Window
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.collectives import data_ranks, gather_over_data_ranks

_NUM_NAMED = 3


@dataclass(frozen=True)
class WorstDocuments:
    """Names the documents of a window that have the highest mean losses over all ranks."""

    fabric: Fabric
    data: TokenDataset | TokenMixture

    def describe(self, window: Window, of_pieces: torch.Tensor) -> str:
        """Return a part of a message that names them; empty if no token dataset has a document index.

        All ranks call this together and get the same text.

        Args:
            window: this rank's part of the step.
            of_pieces: the summed losses of its pieces, fp64 [P] on the CPU.
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
            if batch.pieces is None:
                continue
            rows = np.array(window.rows_of(number, ranks.size, ranks.rank))
            owners = self.data.train.pieces(rows.tolist()).rows
            places = np.arange(len(owners)) - np.searchsorted(owners, owners)
            counts = batch.pieces.num_targets
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
