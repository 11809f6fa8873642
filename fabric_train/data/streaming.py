"""Stream files and hub datasets into the micro-batches of each window; DataLoader workers read, encode and pack.

Position p of every window is a row of lane p (see ``lanes``), and ``step_sampler.positions`` gives the positions of
each rank. So each lane has one reader, and a window has the same rows for any number of ranks and workers.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.batch import Batch, make_batch
from fabric_train.data.lanes import LaneCursor, LaneRow, Lanes, TextPosition
from fabric_train.data.step_sampler import Window, WorkerLoader, positions
from fabric_train.data.stream_documents import WHOLE_FILES, Document, StreamedDocuments, StreamedSource
from fabric_train.data.token_dataset import IndexedRows, TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.signals import ignore_signals_in_worker
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.chats.chat_format import detect_format
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.reading.columns import missing_column
from fabric_train.tokenization.reading.opening import open_sources
from fabric_train.tokenization.reading.source_names import split_names
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.tokenizers.byte_bpe import ByteBPE
from fabric_train.tokenization.tokenizers.reference import Reference, find_difference
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, add_bos_eos, open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import CorpusTokenizer, load_tokenizer

if TYPE_CHECKING:
    from arguments import DataArguments

_COMPARED_DOCUMENTS, _COMPARED_CHARACTERS = 8, 50_000
_CHAT_COLUMNS = ("messages", "conversations", "instruction", "output", "prompt", "completion")


@dataclass(frozen=True)
class DocumentEncoder:
    """An encoder that gives the ids of tokenization, BOS and EOS included."""

    encoder: TextEncoder
    bos_token_id: int | None
    eos_token_id: int

    def __call__(self, document: Document) -> np.ndarray:
        """Return the ids, int32 [at least 1]."""
        (ids,) = self.encoder.encode_batch([document.text])
        return add_bos_eos(ids, self.bos_token_id, self.eos_token_id)


@dataclass(frozen=True)
class Stream:
    """The training data of --streaming_dataset.

    Args:
        documents: of all places.
        tokenizer: the model's tokenizer.
        tokenizer_folder: where the run stores the tokenizer; the encoder is opened from there.
        max_length: tokens in a row.
        isolates: whether attention stays within a document.
        held_out: the token dataset whose validation split is used, None without --train_data_dir.
    """

    documents: StreamedDocuments
    tokenizer: CorpusTokenizer
    tokenizer_folder: Path
    max_length: int
    isolates: bool
    held_out: TokenDataset | TokenMixture | None

    @property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources."""
        return self.documents.source_names

    @property
    def validation(self) -> IndexedRows | None:
        """The rows of the validation split, None if there is none."""
        return self.held_out.validation if self.held_out else None

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources of the training rows that are told apart: none."""
        return ()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that ends documents."""
        return (self.tokenizer.eos_token_id,)

    @property
    def attachments(self) -> tuple[Path, ...]:
        """Folders that each checkpoint copies, so that it can be exported and used on its own."""
        return (self.tokenizer_folder,)

    @property
    def tokenizer_hash(self) -> str:
        """SHA-256 of everything that decides the ids, BOS and EOS included."""
        source = self.tokenizer.source
        if isinstance(source, Path):
            given = read_json(source / "tokenizer.json", dict, "fetch the file again")
        else:
            given = json.loads(source.backend_tokenizer.to_str())
        content = json.dumps(given, sort_keys=True)  # independent of the formatting
        borders = f"{self.tokenizer.bos_token_id} {self.tokenizer.eos_token_id} {self.tokenizer.special_text_is_plain}"
        return hashlib.sha256(f"{content} {borders}".encode()).hexdigest()

    def open_encoder(self) -> DocumentEncoder:
        """Open the encoder of the tokenizer in ``tokenizer_folder``; its ids are those that tokenization writes.

        Forked processes may use it as long as this process has encoded nothing with it.
        """
        file, is_plain = self.tokenizer_folder / "tokenizer.json", self.tokenizer.special_text_is_plain
        encoder, _ = open_encoder(file, is_plain)
        if isinstance(encoder, ByteBPE) and (difference := self._find_difference(encoder, Reference(file, is_plain))):
            encoder, _ = open_encoder(file, is_plain, why_not_tiktoken=difference)
        return DocumentEncoder(encoder, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)

    def _find_difference(self, encoder: ByteBPE, reference: Reference) -> str | None:
        """Compare the encoder's ids of hard strings and of the first documents with the tokenizer's.

        Compares twice, because the encoder changes to a faster path after many texts. Returns None if all are equal.
        """
        first = islice(replace(self.documents, shuffle_buffer=0).read(0), _COMPARED_DOCUMENTS)
        texts = [*reference.hard_strings(), *(document.text[:_COMPARED_CHARACTERS] for document in first)]
        ids = encoder.encode_batch(texts)
        encoder.pieces.use_quick_pattern()
        return find_difference(texts * 2, reference.encode(texts) * 2, [*ids, *encoder.encode_batch(texts)])


def open_stream(
    given: "DataArguments",
    tokenizer_name: str,
    special_text_is_plain: bool | None,
    tokenizer_folder: Path,
    held_out: TokenDataset | TokenMixture | None,
) -> Stream:
    """Open the sources of --streaming_dataset and the tokenizer.

    Args:
        given: the sources, with their column, shares and row length.
        tokenizer_name: a folder or a hub name.
        special_text_is_plain: see ``CorpusTokenizer``; None takes the default of the tokenizer's kind.
        tokenizer_folder: where the run stores the tokenizer.
        held_out: the token dataset whose validation split is used, if any.

    Raises:
        InputError: a source or the tokenizer cannot be opened, a source's first row has no text, there is no text, or
            sources cannot be mixed because the size of one is not known.
    """
    assert given.streaming_dataset is not None
    documents = _open_documents(given, given.streaming_dataset, tokenizer_folder)
    try:
        tokenizer = load_tokenizer(tokenizer_name)
    except InputError as error:
        raise InputError(*(fault.replace("--tokenizer_name", "--model_name") for fault in error.faults)) from None
    if special_text_is_plain is not None:
        tokenizer = replace(tokenizer, special_text_is_plain=special_text_is_plain)
    return Stream(documents, tokenizer, tokenizer_folder, given.max_length, given.isolate_documents, held_out)


def _open_documents(given: "DataArguments", places: list[str], downloads: Path) -> StreamedDocuments:
    named = split_names(places, "--streaming_dataset")
    sources = open_sources([place for _, place in named], "--streaming_dataset", stream=True, downloads=downloads)
    for source in sources:
        _check_first_row(source, given.text_column)
    streamed = [
        StreamedSource(name, source, given.text_column) for (name, _), source in zip(named, sources, strict=True)
    ]
    shares = _shares_of(given, [place.name for place in streamed])
    documents = StreamedDocuments(streamed, shares, given.shuffle_buffer, given.seed)
    if shares is not None:
        faults = [fault for place in streamed if (fault := _fault_in_shares(place, alone=len(streamed) == 1))]
        if faults:
            raise InputError(*faults)
    elif all(next(place.read(0), None) is None for place in streamed):
        raise InputError("--streaming_dataset: no document with any text in it; give others")
    return documents


def _shares_of(given: "DataArguments", names: list[str]) -> list[float] | None:
    """Return the share of each place; those that --shares does not name have 1. None without --shares.

    Raises:
        InputError: --shares names a source that is not there.
    """
    shares = given.shares_of_epochs
    if shares.given is None:
        return None
    by_name = shares.by_name()
    if by_name is None:
        return [float(share) for share in shares.given if not isinstance(share, dict)]
    unknown = [name for name in by_name if name not in names]
    if unknown:
        raise InputError(f"--shares: {unknown[0]} is not a source of --streaming_dataset; there are: {', '.join(names)}")
    return [by_name.get(name, 1.0) for name in names]


def _fault_in_shares(place: StreamedSource, alone: bool) -> str | None:
    """Return why a place cannot be read in a share, None if it can."""
    if not alone and not place.size:
        return (
            f"--shares: the hub does not say how many rows {place.name} has, so it cannot be mixed evenly; download it "
            "and give its folder, or tokenize it with tokenize_dataset.py"
        )
    if next(place.read(0), None) is None:
        return f"--streaming_dataset {place.name}: no document with any text in it; give others"
    return None


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
        encode: returns a document's ids, int32 [at least 1], BOS and EOS included.
        num_sources: whose tokens are counted.
        max_length: tokens in a row.
        isolates: whether attention stays within a document.
        order: the lanes of this rank.
        cursors: the state of all lanes, also those of other ranks; None at the beginning of a run.
        num_workers: the most processes to use.
        pin_memory: whether batches are put in page-locked memory.
    """

    read: Callable[[int], Iterable[Document]]
    encode: Callable[[Document], np.ndarray]
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
            parts = [_raised(next(made)) for _ in range(self.order.num_batches)]
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


def _raised(item: StreamBatch | InputError | RunError | OSError) -> StreamBatch:
    if isinstance(item, StreamBatch):
        return item
    raise item


def _batch(lanes: range, rows: Sequence[LaneRow], isolates: bool) -> StreamBatch:
    input_ids = np.stack([row.input_ids for row in rows]).astype(np.int64)
    starts = [np.array(row.document_starts, np.int64) for row in rows] if isolates else []
    cursors = np.array([(lane, *row.cursor.numbers()) for lane, row in zip(lanes, rows, strict=True)], np.int64)
    ends = [input_ids.shape[1]] * len(input_ids)
    return StreamBatch(make_batch(input_ids, input_ids.copy(), starts, ends), cursors)


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


def _check_first_row(source: Source, column: str) -> None:
    """Raise InputError if the first row has a chat or no text, before the model is loaded."""
    for part in source.parts(WHOLE_FILES):
        reader = source.reader(part, (column, *_CHAT_COLUMNS))
        for number, row in reader:
            if isinstance(row, BadRowError) or column in row:
                return
            if detect_format(row):
                raise InputError(
                    f"--streaming_dataset {source.name}: chats and instructions are not streamed; make a token "
                    "dataset of them with tokenize_dataset.py and give --train_data_dir"
                )
            raise missing_column(reader.place(number), column, row)
