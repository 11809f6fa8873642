"""Compute the tensors of a model with an extended vocabulary: new rows of embedding and head, all others as stored.

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


@dataclass(frozen=True)
class _RowStatistics:
    """The mean of the rows of a matrix, fp32 [d], and the mean of their Euclidean norms."""

    mean: torch.Tensor
    mean_norm: float


class ExtendedMatrix:
    """A matrix [V, d] with a new row for each of ``pieces``, from ``first_id`` on; all other stored rows are kept.

    Many models have more rows than tokens, so a new row may take the place of a stored one without a token. Rows after
    the stored and the new ones are padding.

    A new row is the mean of the rows of its pieces, which are the old ids that the token replaces. With a ``seed``, it
    is drawn from the normal distribution with the mean and the covariance of all old rows (Mundra et al. 2024,
    arXiv:2407.05841, who find it as good as elaborate ways); transformers' own ``resize_token_embeddings`` takes a
    billionth of this covariance. A row of padding is the mean of all old rows, so that no token is rare or frequent by
    chance.
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
        """Extend the matrix ``name`` of ``tensors``; nothing is read yet.

        Args:
            tensors: The stored tensors of the model.
            name: The name of the stored matrix.
            first_id: The id of the first new token, which is the number of old tokens.
            pieces: For each new token, the old ids that it replaces.
            num_rows: The number of rows of the extended matrix, with padding.
            seed: Integers that together seed the random rows: each row is drawn with ``(*seed, row_index)``, so it does
                not depend on the block in which it is read. None if new rows are means of the rows of their pieces.
        """
        self._tensors = tensors
        self._name = name
        self.first_id = first_id
        self._pieces = pieces
        self._seed = seed
        self._new_norms: dict[int, float] = {}
        self.num_stored, self.width = tensors.shape(name)
        self.shape = torch.Size((num_rows, self.width))

    def read_block(self, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return the block of ``shape`` that begins at ``offsets``, in the stored dtype."""
        begin, begin_column = offsets
        num_rows, num_columns = shape
        end = begin + num_rows
        block = torch.empty(tuple(shape), dtype=self._tensors.dtype(self._name))

        # stored rows
        for rows in self.kept_rows():
            kept_begin = max(begin, rows.start)
            kept_end = min(end, rows.stop)
            if kept_begin < kept_end:
                offset = (kept_begin, begin_column)
                stored = self._tensors.read_block(self._name, offset, (kept_end - kept_begin, num_columns))
                block[kept_begin - begin : kept_end - begin] = stored

        # new rows, and padding after all rows
        for row_index in range(max(begin, self.first_id), end):
            if self.end_of_new <= row_index < self.num_stored:  # a stored row without a token, read above
                continue
            row = self._compute_row(row_index).to(block.dtype)
            self._new_norms[row_index] = row.float().norm().item()
            block[row_index - begin] = row[begin_column : begin_column + num_columns]
        return block

    @property
    def end_of_new(self) -> int:
        """The first row after those of the new tokens."""
        return self.first_id + len(self._pieces)

    def kept_rows(self) -> tuple[range, range]:
        """Return the stored rows that do not change: those of old tokens, and those that have no token."""
        return range(self.first_id), range(self.end_of_new, self.num_stored)

    def norms(self) -> Norms:
        """Return the mean norms of the old and the new rows; the new ones must have been read."""
        new_norms = [self._new_norms[row_index] for row_index in range(self.first_id, self.end_of_new)]
        return Norms(old=self._old_rows.mean_norm, new=float(np.mean(new_norms)))

    def _compute_row(self, row_index: int) -> torch.Tensor:
        """Return a new row or a row of padding, fp32 [d]."""
        mean = self._old_rows.mean
        if row_index >= self.end_of_new:
            return mean
        if self._seed is not None:
            drawn = np.random.default_rng((*self._seed, row_index)).standard_normal(self.width)
            return mean + (self._covariance_factor @ torch.from_numpy(drawn)).float()
        pieces = self._pieces[row_index - self.first_id]
        if not pieces:  # of bytes that the old tokenizer leaves out
            return mean
        rows = [self._tensors.read_block(self._name, (piece, 0), (1, self.width)).double() for piece in pieces]
        return torch.cat(rows).mean(dim=0).float()

    @cached_property
    def _old_rows(self) -> "_RowStatistics":
        """The mean of the old rows, and their mean norm."""
        total = torch.zeros(self.width, dtype=torch.float64)
        total_norm = 0.0
        for block in self._old_blocks():
            total += block.sum(dim=0, dtype=torch.float64)
            total_norm += float(block.norm(dim=1).sum(dtype=torch.float64))
        return _RowStatistics((total / self.first_id).float(), total_norm / self.first_id)

    @cached_property
    def _covariance_factor(self) -> torch.Tensor:
        """A matrix, fp64 [d, d], whose product with its transpose is the covariance of the old rows."""
        covariance = torch.zeros(self.width, self.width, dtype=torch.float64)
        for block in self._old_blocks():
            centred = (block - self._old_rows.mean).double()
            covariance += centred.T @ centred / self.first_id
        # from the eigenvalues, and not by Cholesky: rows may not span all directions
        eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
        return eigenvectors * eigenvalues.clamp(min=0).sqrt()

    def _old_blocks(self) -> Iterator[torch.Tensor]:
        """Yield the rows of the old tokens in blocks, fp32 [rows, d]."""
        old_shape = torch.Size((self.first_id, self.width))
        for block in blocks(self._tensors, self._name, old_shape):
            yield block.float()


class ExtendedTensors(StoredTensors):
    """The tensors of a model, some of which are extended matrices; each is read on request."""

    def __init__(self, tensors: StoredTensors, matrices: Mapping[str, ExtendedMatrix]) -> None:
        self._tensors = tensors
        self.matrices = matrices

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> torch.Size:
        matrix = self.matrices.get(name)
        return self._tensors.shape(name) if matrix is None else matrix.shape

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors.dtype(name)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        matrix = self.matrices.get(name)
        if matrix is None:
            return self._tensors.read_block(name, offsets, shape)
        return matrix.read_block(offsets, shape)
