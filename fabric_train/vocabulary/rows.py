"""The tensors of a model with more tokens: the stored ones, and an embedding and a head with new rows.

Rows are read and computed a block at a time. Of a 70B's matrix [128,256, 8,192], the mean takes one pass over it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fabric_train.export.hub_format import blocks
from fabric_train.model.weight_files import StoredTensors


@dataclass(frozen=True)
class Norms:
    """The mean Euclidean norm of a matrix's old rows and of its new ones, without padding."""

    old: float
    new: float


class ExtendedMatrix:
    """A matrix [V, d] whose rows from ``first_id`` on are new: one for each of ``pieces``, then padding.

    A new row is the mean of the rows of its pieces, the old ids that the token replaces. With a ``seed``, it is drawn
    from the normal distribution with the mean and the covariance of all old rows (Mundra et al. 2024, arXiv:2407.05841,
    who find it as good as elaborate ways); transformers' own ``resize_token_embeddings`` takes a billionth of this
    covariance. A row of padding is the mean of all old rows, so that no token is rare or frequent by chance.
    """

    def __init__(
        self,
        tensors: StoredTensors,
        name: str,
        first_id: int,
        pieces: Sequence[tuple[int, ...]],
        num_rows: int,
        seed: Sequence[int] | None,
    ) -> None:
        self._tensors, self._name, self.first_id, self._pieces = tensors, name, first_id, pieces
        self._seed = seed
        self._new_norms: dict[int, float] = {}
        self.width = tensors.shape(name)[1]
        self.shape = torch.Size((num_rows, self.width))

    def read_block(self, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets``, in the stored dtype."""
        begin, end = offsets[0], offsets[0] + shape[0]
        num_old = max(0, min(end, self.first_id) - begin)
        columns = slice(offsets[1], offsets[1] + shape[1])
        block = torch.empty(tuple(shape), dtype=self._tensors.dtype(self._name))
        if num_old:
            block[:num_old] = self._tensors.read_block(self._name, offsets, (num_old, shape[1]))
        for row in range(begin + num_old, end):
            new = self._new_row(row).to(block.dtype)
            self._new_norms[row] = new.float().norm().item()
            block[row - begin] = new[columns]
        return block

    def norms(self) -> Norms:
        """Return the mean norms of the old and the new rows; the new ones must have been read."""
        new = [self._new_norms[self.first_id + place] for place in range(len(self._pieces))]
        return Norms(self._statistics[1], float(np.mean(new)))

    def _new_row(self, row: int) -> torch.Tensor:
        """Return row ``row``, fp32 [d]."""
        place = row - self.first_id
        if place >= len(self._pieces):
            return self._mean
        if self._seed is not None:
            drawn = np.random.default_rng((*self._seed, row)).standard_normal(self.width)
            return self._mean + (self._factor @ torch.from_numpy(drawn)).float()
        pieces = self._pieces[place]
        if not pieces:  # of bytes that the old tokenizer leaves out
            return self._mean
        rows = [self._tensors.read_block(self._name, (piece, 0), (1, self.width)).double() for piece in pieces]
        return torch.cat(rows).mean(dim=0).float()

    @property
    def _mean(self) -> torch.Tensor:
        return self._statistics[0]

    @cached_property
    def _statistics(self) -> tuple[torch.Tensor, float]:
        """The mean of the old rows, fp32 [d], and their mean norm."""
        total, norms = torch.zeros(self.width, dtype=torch.float64), 0.0
        for block in self._old_blocks():
            total += block.sum(dim=0, dtype=torch.float64)
            norms += float(block.norm(dim=1).sum(dtype=torch.float64))
        return (total / self.first_id).float(), norms / self.first_id

    @cached_property
    def _factor(self) -> torch.Tensor:
        """A matrix, fp64 [d, d], whose product with its transpose is the covariance of the old rows."""
        covariance = torch.zeros(self.width, self.width, dtype=torch.float64)
        for block in self._old_blocks():
            centred = (block - self._mean).double()
            covariance += centred.T @ centred / self.first_id
        values, vectors = torch.linalg.eigh(covariance)  # also where rows do not span all directions
        return vectors * values.clamp(min=0).sqrt()

    def _old_blocks(self) -> Iterator[torch.Tensor]:
        old = torch.Size((self.first_id, self.width))
        return (block.float() for block in blocks(self._tensors, self._name, old))


class ExtendedTensors(StoredTensors):
    """The tensors of a model, with some matrices extended; each is read on request."""

    def __init__(self, tensors: StoredTensors, matrices: Mapping[str, ExtendedMatrix]) -> None:
        self._tensors, self.matrices = tensors, matrices

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> torch.Size:
        matrix = self.matrices.get(name)
        return self._tensors.shape(name) if matrix is None else matrix.shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        matrix = self.matrices.get(name)
        return self._tensors.read_block(name, offsets, shape) if matrix is None else matrix.read_block(offsets, shape)
