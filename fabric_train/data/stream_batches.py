"""Make the micro-batches of each window from a stream; DataLoader workers read, encode and pack.

Position p of every window is a row of lane p (see ``lanes``), and ``step_sampler.positions`` gives the positions of
each rank. So each lane has one reader, and a window has the same rows for any number of ranks and workers.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.batch import Batch, make_batch
from fabric_train.data.lanes import LaneCursor, LaneRow, Lanes, TextPosition
from fabric_train.data.step_sampler import Window, WorkerLoader, positions
from fabric_train.data.stream_documents import Document
from fabric_train.data.token_dataset import RowPieces, place_pieces
from fabric_train.distributed.signals import ignore_signals_in_worker
from fabric_train.tokenization.documents import EncodedDocument


@dataclass(frozen=True)
class LaneOrder:
    """The assignment of lanes to the micro-batches of a rank; it is the same in every window."""

    rows_per_window: int
    micro_batch_size: int
    world_size: int
    rank: int

    @property
    def num_batches(self) -> int:
        """Micro-batches of a window on each rank."""
        return self.rows_per_window // (self.micro_batch_size * self.world_size)

    def lanes(self, batch: int) -> range:
        """Return the lanes whose rows are micro-batch ``batch`` of a window on this rank."""
        return positions(batch, self.micro_batch_size, self.world_size, self.rank)


@dataclass(frozen=True)
class StreamBatches:
    """The windows of a streaming run on this rank, made by up to ``num_workers`` processes.

    Args:
        read: returns the documents of a pass.
        encode: returns a document's tokens, at least 1, BOS and EOS included.
        num_sources: whose tokens are counted.
        max_length: tokens in a row.
        isolates: whether attention stays within a document.
        order: the lanes of this rank.
        cursors: the state of all lanes, also those of other ranks; None at the beginning of a run.
        num_workers: the most processes to use.
        pin_memory: whether batches are put in page-locked memory.
    """

    read: Callable[[int], Iterable[Document]]
    encode: Callable[[Document], EncodedDocument]
    num_sources: int
    max_length: int
    isolates: bool
    order: LaneOrder
    cursors: Sequence[LaneCursor] | None
    num_workers: int
    pin_memory: bool

    def windows(self, after_step: int, last_step: int) -> Iterator[Window]:
        """Yield the windows of the steps ``after_step + 1`` to ``last_step``; ``self.cursors`` are of ``after_step``.

        Raises:
            InputError: a text cannot be read, or a lane's last row has changed since it was trained on.
        """
        made = iter(self._loader(last_step - after_step))
        for step in range(after_step + 1, last_step + 1):
            parts = [next(made) for _ in range(self.order.num_batches)]
            cursors = np.concatenate([part.cursors for part in parts])
            yield Window(
                step=step,
                epoch=int(cursors[0, 1]),
                ends_epoch=False,
                rows=np.arange(self.order.rows_per_window),
                micro_batch_size=self.order.micro_batch_size,
                batches=[part.batch for part in parts],
                cursors=cursors,
            )

    def _loader(self, num_windows: int) -> DataLoader:
        """Return the loader, whose workers make the rank's micro-batches in turn.

        The number of workers divides the number of micro-batches of a window, so each lane stays with one worker.
        """
        num_batches = self.order.num_batches
        dividing = [number for number in range(1, self.num_workers + 1) if num_batches % number == 0]
        num_workers = max(dividing, default=0)
        return WorkerLoader(
            _LaneDataset(self, num_windows),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_identity,
            pin_memory=self.pin_memory,
            prefetch_factor=8 if num_workers else None,
            worker_init_fn=ignore_signals_in_worker,
        )

    def batches(self, first: int, stride: int, num_windows: int) -> Iterator["StreamBatch"]:
        """Yield every ``stride``-th micro-batch of each of ``num_windows`` windows, from micro-batch ``first`` on."""
        own = [self.order.lanes(batch) for batch in range(first, self.order.num_batches, stride)]
        begins = {lane: self.cursors[lane].last if self.cursors else TextPosition() for lanes in own for lane in lanes}
        reader = Lanes(self.read, self.encode, self.order.rows_per_window, begins, self.max_length, self.num_sources)
        if self.cursors:
            for lane in begins:
                saved = self.cursors[lane]
                _check_last_row(lane, reader.next_row(lane).cursor, saved)
                counted = len(saved.tokens_read) == self.num_sources
                reader.set_tokens_read(lane, saved.tokens_read if counted else ())
        for _ in range(num_windows):
            for lanes in own:
                yield _batch(lanes, [reader.next_row(lane) for lane in lanes], self.isolates)


@dataclass(frozen=True)
class StreamBatch:
    """A micro-batch of B rows, and their cursors.

    ``cursors``, int64 [B, 9 or more], holds for each row its lane and ``LaneCursor.numbers`` after the row.
    """

    batch: Batch
    cursors: np.ndarray

    def pin_memory(self) -> "StreamBatch":
        """Return the batch in page-locked memory (the DataLoader calls this)."""
        return StreamBatch(self.batch.pin_memory(), self.cursors)


class _LaneDataset(IterableDataset):
    def __init__(self, batches: StreamBatches, num_windows: int) -> None:
        self._batches, self._num_windows = batches, num_windows

    def __iter__(self) -> Iterator[StreamBatch | InputError | RunError | OSError]:
        """Yield this worker's micro-batches, or an error as the last item.

        The error is not raised here, because the DataLoader would add a traceback to its message.
        """
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        if info:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --num_workers decides how many cores are used
        try:
            yield from self._batches.batches(first, stride, self._num_windows)
        except (InputError, RunError, OSError) as error:
            yield error


def _batch(lanes: range, rows: Sequence[LaneRow], isolates: bool) -> StreamBatch:
    input_ids = np.stack([row.input_ids for row in rows]).astype(np.int64)
    labels = np.stack([row.labels for row in rows]).astype(np.int64)
    starts = [np.array(row.document_starts, np.int64) for row in rows] if isolates else []
    cursors = np.array([(lane, *row.cursor.numbers()) for lane, row in zip(lanes, rows, strict=True)], np.int64)
    batch = make_batch(input_ids, labels, starts, [input_ids.shape[1]] * len(rows))
    return StreamBatch(replace(batch, pieces=place_pieces(_pieces(rows), batch.labels.numpy())), cursors)


def _pieces(rows: Sequence[LaneRow]) -> RowPieces:
    lengths = [len(row.input_ids) for row in rows]
    begins = [[piece.position for piece in row.pieces] for row in rows]
    pieces = [piece for row in rows for piece in row.pieces]
    return RowPieces(
        rows=np.repeat(np.arange(len(rows)), [len(row.pieces) for row in rows]),
        positions=np.concatenate(begins),
        sources=np.array([piece.source for piece in pieces], np.int64),
        num_tokens=np.concatenate([np.diff([*of_row, end]) for of_row, end in zip(begins, lengths, strict=True)]),
        num_bytes=np.array([piece.num_bytes for piece in pieces]),
    )


def _check_last_row(lane: int, here: LaneCursor, saved: LaneCursor) -> None:
    """Raise InputError if a lane's last row is not the row that the run was trained on."""
    if here != saved:
        raise InputError(
            f"--streaming_dataset: row {lane} of the last step before the checkpoint is not the one that was trained "
            "on: texts up to it have changed; resume with the original texts, or take only the checkpoint's weights "
            "with --weights_only true"
        )


def _identity(item: Any) -> Any:
    return item
