"""Write planned rows and their document index as a folder for ``datasets.load_from_disk``.

Nothing here imports ``datasets``, which is slow.
"""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import ThrottledLog
from fabric_train.token_dataset.document_index import (
    ARRAYS,
    CHECKSUM,
    CHECKSUMS,
    CONTINUATION,
    LABELS,
    ROW,
    SourceTable,
    row_checksums,
)
from fabric_train.token_dataset.document_index import FOLDER as INDEX_FOLDER
from fabric_train.token_dataset.manifest import SourceLedger
from fabric_train.token_dataset.rows import RowPlan, joined_ranges
from fabric_train.token_dataset.spooled_documents import PiecesToCopy, SpooledDocuments, SpoolReader
from fabric_train.workers import WorkerPool

if TYPE_CHECKING:
    import pyarrow

_TOKEN_BYTES = 4
_IGNORED_LABEL = -100
_TOKENS_PER_BATCH = 1 << 18
_BYTES_PER_FILE = 512 << 20
_TICK_SECONDS = 1.0
_TOKENS_PER_READ = 1 << 22


def check_disk_space(folder: Path, splits: Sequence[tuple[SpooledDocuments, RowPlan]]) -> None:
    """Raise an InputError if the disk of ``folder`` has no room for the tokens and labels of some splits."""
    _, first_plan = splits[0]
    max_length = first_plan.max_length
    num_rows = 0
    num_padding = 0
    num_bytes = 0
    for documents, plan in splits:
        num_rows += plan.num_rows
        num_padding += plan.tokens_padding
        num_bytes += plan.num_rows * _bytes_per_row(max_length, with_labels=_has_labels(documents, plan))
    free_bytes = shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        padding_share = num_padding / (num_rows * max_length)
        raise InputError(
            f"{num_rows:,} rows of {max_length:,} tokens, {padding_share:.0%} of them padding, need "
            f"{num_bytes / 1e9:,.1f} GB, but {folder} has {free_bytes / 1e9:,.1f} GB left; give a smaller "
            "--max_length, --packing best_fit, or an --output_dir on another disk"
        )


def _bytes_per_row(max_length: int, *, with_labels: bool) -> int:
    num_columns = 2 if with_labels else 1
    return _TOKEN_BYTES * max_length * num_columns


def write_split(
    folder: Path, documents: SpooledDocuments, plan: RowPlan, pad_token_id: int, num_proc: int = 1
) -> tuple[int, np.ndarray]:
    """Write the planned rows to the new folder ``folder``, in files of about 512 MiB.

    The columns of a row of ``max_length`` tokens:

    - ``input_ids``: int32 [max_length], with padding at the end of the row.
    - ``document_starts``: list of int32, the positions at which pieces of documents begin. Position 0 is included only
      if a document begins there, and not if the row continues one. Any other position is also included if its piece is
      a window of a document that began in another row. So tokens on the two sides of such a position never belong to
      the same document. A preference pair has two entries: where its chosen and where its rejected sequence begins. An
      unpaired answer has two as well: where its prompt with its answer, and where the same prompt with another row's
      answer begins.
    - ``labels``: int32 [max_length], ``input_ids`` with -100 for tokens that are not supervised: masked tokens,
      repeated tokens and padding. The column is missing if there are no such tokens: the documents have no masks, and
      the plan neither repeats tokens nor pads.

    Documents ``B a b E`` and ``B c d e f g E`` (B and E are BOS and EOS, P is padding) in rows of 5, with one token of
    overlap, packed with ``best_fit``; the first ``B a`` is masked::

        input_ids  B a b E P    labels  -100 -100    b    E -100    document_starts  0
        input_ids  B c d e f    labels     B    c    d    e    f    document_starts  0
        input_ids  f g E P P    labels  -100    g    E -100 -100    document_starts

    Args:
        folder: the folder to write; its name is the name of the split.
        documents: the encoded documents.
        plan: the rows.
        pad_token_id: the token at the end of rows that are not full.
        num_proc: the number of processes, each of which writes a file at a time.

    Returns:
        The number of tokens whose label is not -100, and the checksums of the rows, CHECKSUM [rows].
    """
    folder.mkdir()
    # divide the rows among files
    with_labels = _has_labels(documents, plan)
    features = _features(plan.max_length, with_labels=with_labels)
    rows_per_file = max(1, _BYTES_PER_FILE // _bytes_per_row(plan.max_length, with_labels=with_labels))
    num_files = max(1, -(-plan.num_rows // rows_per_file))  # datasets does not load a folder without a file
    names = [f"data-{index:05d}-of-{num_files:05d}.arrow" for index in range(num_files)]
    files = _SplitFiles(
        folder=folder,
        names=names,
        rows_per_file=rows_per_file,
        plan=plan,
        reader=SpoolReader(documents),
        pad_token_id=pad_token_id,
        features=features,
        rejected_at=documents.rejected_at,
    )

    # write them
    num_supervised = 0
    num_rows_written = 0
    checksums = np.empty(plan.num_rows, dtype=CHECKSUM)
    log = ThrottledLog()
    for index, written_file in _write_files(files, num_proc):
        num_rows = len(written_file.checksums)
        first_row = index * rows_per_file
        checksums[first_row : first_row + num_rows] = written_file.checksums
        num_supervised += written_file.num_supervised
        num_rows_written += num_rows
        log(f"writing {folder.name}: {num_rows_written:,} of {plan.num_rows:,} rows")

    # and the descriptions that datasets needs
    fingerprint = xxh3_64(json.dumps(features).encode())
    fingerprint.update(checksums.data)
    info = {"description": "", "citation": "", "homepage": "", "license": "", "features": features}
    write_json(folder / "dataset_info.json", info)
    write_json(folder / "state.json", _state(folder.name, names, fingerprint.hexdigest()))
    return num_supervised, checksums


@dataclass(frozen=True)
class _WrittenFile:
    """The counts from writing a file."""

    num_supervised: int  # tokens
    checksums: np.ndarray  # CHECKSUM [rows of the file]


@dataclass(frozen=True)
class _Rows:
    """Some rows, as the arguments of ``row_checksums``."""

    input_ids: np.ndarray  # int32 [tokens of all rows]
    labels: np.ndarray | None  # int32 [tokens of all rows]
    document_starts: np.ndarray  # int32 [starts of all rows], positions in their rows
    offsets: np.ndarray  # int32 [rows + 1], where the starts of each row begin

    @property
    def num_supervised(self) -> int:
        if self.labels is None:
            return len(self.input_ids)
        return int(np.count_nonzero(self.labels != _IGNORED_LABEL))


@dataclass(frozen=True)
class _SplitFiles:
    """The files of a split; a process can write each on its own."""

    folder: Path
    names: list[str]
    rows_per_file: int
    plan: RowPlan
    reader: SpoolReader
    pad_token_id: int
    features: dict[str, Any]  # in the JSON form of ``datasets.Features``
    rejected_at: np.ndarray | None  # int64 [documents], where rejected sequences begin

    def write(self, index: int) -> _WrittenFile:
        """Write the file with this index, in record batches of about 250,000 tokens."""
        import pyarrow

        schema = _schema(self.features)
        first_row = index * self.rows_per_file
        end_row = min(first_row + self.rows_per_file, self.plan.num_rows)
        rows_per_batch = max(1, _TOKENS_PER_BATCH // self.plan.max_length)
        num_supervised = 0
        checksums = np.empty(end_row - first_row, dtype=CHECKSUM)
        path = str(self.folder / self.names[index])
        with pyarrow.OSFile(path, "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
            for batch_start in range(first_row, end_row, rows_per_batch):
                batch_end = min(batch_start + rows_per_batch, end_row)
                rows = self._fill(batch_start, batch_end)
                writer.write_batch(_record_batch(rows, schema))
                checksums[batch_start - first_row : batch_end - first_row] = row_checksums(
                    rows.input_ids, rows.labels, rows.document_starts, rows.offsets
                )
                num_supervised += rows.num_supervised
        return _WrittenFile(num_supervised, checksums)

    def _fill(self, first_row: int, end_row: int) -> _Rows:
        """Read the tokens of the rows from ``first_row`` to ``end_row - 1``, at least one row."""
        # the pieces of these rows, and where they begin in their rows
        plan = self.plan
        max_length = plan.max_length
        num_rows = end_row - first_row
        row_offsets = plan.row_offsets[first_row : end_row + 1]
        pieces_of_rows = slice(row_offsets[0], row_offsets[-1])
        starts = plan.starts[pieces_of_rows]
        lengths = plan.lengths[pieces_of_rows].astype(np.int64)
        repeated = plan.repeated[pieces_of_rows]
        rows = np.repeat(np.arange(num_rows), np.diff(row_offsets))  # the row of each piece
        row_lengths = np.bincount(rows, weights=lengths).astype(np.int64)  # without padding
        tokens_before_row = np.cumsum(row_lengths) - row_lengths
        positions = np.cumsum(lengths) - lengths - tokens_before_row[rows]
        pieces = PiecesToCopy(plan.documents(pieces_of_rows), starts, lengths, targets=rows * max_length + positions)

        # tokens and labels
        input_ids = np.full(num_rows * max_length, self.pad_token_id, dtype=np.int32)
        labels = None
        if "labels" in self.features:
            supervised = np.ones(len(input_ids), dtype=np.uint8)
            self.reader.read(pieces, input_ids, supervised)
            padding_starts = np.arange(num_rows) * max_length + row_lengths
            supervised[joined_ranges(pieces.targets, repeated)] = 0
            supervised[joined_ranges(padding_starts, max_length - row_lengths)] = 0
            labels = np.where(supervised, input_ids, np.int32(_IGNORED_LABEL))
        else:
            self.reader.read(pieces, input_ids, supervised=None)

        # document starts: a piece at position 0 may continue a document, which does not start there
        is_start = (positions > 0) | (starts + repeated == 0)
        if self.rejected_at is not None:  # each piece is a whole pair, with two sequences
            rejected_positions = positions + self.rejected_at[pieces.documents]
            positions = np.stack([positions, rejected_positions], axis=1).ravel()
            is_start = np.ones(len(positions), dtype=bool)
            rows = np.repeat(rows, 2)
        num_starts = np.bincount(rows[is_start], minlength=num_rows)
        offsets = np.concatenate([[0], np.cumsum(num_starts)])
        return _Rows(
            input_ids=input_ids,
            labels=labels,
            document_starts=positions[is_start].astype(np.int32),
            offsets=offsets.astype(np.int32),
        )

    def describe(self, index: int) -> str:
        """Describe what a process reads to write a file."""
        return f"the tokens for {self.names[index]}"


def _record_batch(rows: _Rows, schema: "pyarrow.Schema") -> "pyarrow.RecordBatch":
    import pyarrow

    row_type = schema.field("input_ids").type
    columns = [
        pyarrow.FixedSizeListArray.from_arrays(_int32(rows.input_ids), type=row_type),
        pyarrow.ListArray.from_arrays(_int32(rows.offsets), _int32(rows.document_starts)),
    ]
    if rows.labels is not None:
        columns.append(pyarrow.FixedSizeListArray.from_arrays(_int32(rows.labels), type=row_type))
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _write_files(files: _SplitFiles, num_proc: int) -> Iterator[tuple[int, _WrittenFile]]:
    """Write all files of a split, and yield the index and the counts of each."""
    num_files = len(files.names)
    num_proc = min(num_proc, num_files)
    if num_proc == 1 or sys.platform != "linux":  # elsewhere each process would get a copy of the plan
        for index in range(num_files):
            yield index, files.write(index)
        return
    with WorkerPool(files.write, num_proc, files.describe) as workers:
        for result in workers.run(iter(range(num_files)), _TICK_SECONDS):
            if result is not None:  # None is a tick without a result
                yield result


def write_index(
    folder: Path,
    plan: RowPlan,
    documents: np.ndarray,
    checksums: np.ndarray,
    is_desirable: np.ndarray | None = None,
) -> None:
    """Write the document index of the split ``folder``.

    Args:
        folder: the folder of the split.
        plan: the rows of the split.
        documents: DOCUMENT [entries of ``plan.order``].
        checksums: CHECKSUM [rows].
        is_desirable: the labels of unpaired answers, bool [entries of ``plan.order``]; None for other documents.
    """
    # number the documents in the order in which they begin in the rows, then those that are in no row
    begins = plan.begins
    begun_entries = plan.entries[begins]
    is_in_no_row = np.ones(len(documents), dtype=bool)
    is_in_no_row[begun_entries] = False
    order = np.concatenate([begun_entries, np.flatnonzero(is_in_no_row)])
    numbers = np.empty(len(documents), dtype=np.int64)  # of each entry
    numbers[order] = np.arange(len(documents))

    # count what is before each row
    rows = np.empty(plan.num_rows + 1, dtype=ROW)
    num_begun_before = np.concatenate([[0], np.cumsum(begins)])
    rows["documents"] = num_begun_before[plan.row_offsets]
    rows["continuations"] = plan.row_offsets - rows["documents"].astype(np.int64)

    # list the pieces that continue a document
    continuing_pieces = np.flatnonzero(~begins)
    rows_of_pieces = np.searchsorted(plan.row_offsets, continuing_pieces, side="right") - 1
    continuations = np.empty(len(continuing_pieces), dtype=CONTINUATION)
    continuations["document"] = numbers[plan.entries[continuing_pieces]]
    continuations["start"] = plan.starts[continuing_pieces]
    continuations["repeated"] = plan.repeated[continuing_pieces]
    continuations["ordinal"] = continuing_pieces - plan.row_offsets[rows_of_pieces]

    index_folder = folder / INDEX_FOLDER
    index_folder.mkdir()
    arrays = {"documents": documents[order], "rows": rows, "continuations": continuations}
    assert list(arrays) == list(ARRAYS)
    for name, array in arrays.items():
        np.save(index_folder / f"{name}.npy", array, allow_pickle=False)
    np.save(index_folder / CHECKSUMS, checksums, allow_pickle=False)
    if is_desirable is not None:
        np.save(index_folder / LABELS, is_desirable[order], allow_pickle=False)


def count_sources(plan: RowPlan, documents: np.ndarray, sources: SourceTable) -> dict[str, SourceLedger]:
    """Return the ledger of each source in the plan by name; ``documents`` are DOCUMENT [entries of ``plan.order``]."""
    source_of_document = sources.sources_of(documents["file"])
    source_of_piece = source_of_document[plan.entries]

    def sum_by_source(source_indices: np.ndarray, values: np.ndarray | None = None) -> list[int]:
        """Add each value to its source; without values, count."""
        return np.bincount(source_indices, values, minlength=len(sources.names)).astype(np.int64).tolist()

    num_documents = sum_by_source(source_of_document)
    num_bytes = sum_by_source(source_of_document, documents["bytes"])
    tokens_in = sum_by_source(source_of_document, documents["tokens"])
    tokens_repeated = sum_by_source(source_of_piece, plan.repeated)
    tokens_in_rows = sum_by_source(source_of_piece, plan.lengths)
    ledgers = {}
    for source, name in enumerate(sources.names):
        if num_documents[source]:
            ledgers[name] = SourceLedger(
                documents=num_documents[source],
                bytes=num_bytes[source],
                tokens_in=tokens_in[source],
                tokens_repeated=tokens_repeated[source],
                tokens_in_rows=tokens_in_rows[source],
                tokens_dropped=tokens_in[source] + tokens_repeated[source] - tokens_in_rows[source],
            )
    return ledgers


def write_dataset_dict(folder: Path, splits: Iterable[str]) -> None:
    """Write ``dataset_dict.json``, which joins the folders of the splits into a ``DatasetDict``."""
    write_json(folder / "dataset_dict.json", {"splits": list(splits)})


def _has_labels(documents: SpooledDocuments, plan: RowPlan) -> bool:
    """Return whether some tokens are not supervised, so that the rows need labels."""
    return documents.has_masks or plan.tokens_repeated > 0 or plan.tokens_padding > 0


def _int32(values: np.ndarray) -> "pyarrow.Array":
    """Return int32 values without a copy; ``pyarrow.array`` would import pandas, which takes 0.3 s."""
    from pyarrow import Array, int32, py_buffer

    return Array.from_buffers(int32(), len(values), [None, py_buffer(np.ascontiguousarray(values))])


def _features(max_length: int, *, with_labels: bool) -> dict[str, Any]:
    """Return the columns as the JSON of ``datasets.Features``."""
    token = {"dtype": "int32", "_type": "Value"}
    row = {"feature": token, "length": max_length, "_type": "List"}
    features = {"input_ids": row, "document_starts": {"feature": token, "_type": "List"}}
    if with_labels:
        features["labels"] = row
    return features


def _schema(features: dict[str, Any]) -> "pyarrow.Schema":
    import pyarrow

    # -1 stands for a variable length
    types = {name: pyarrow.list_(pyarrow.int32(), column.get("length", -1)) for name, column in features.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pyarrow.schema(types, metadata=metadata)


def _state(split: str, names: list[str], fingerprint: str) -> dict[str, Any]:
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object on several lines."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def count_severed_chats(documents: SpooledDocuments, plan: RowPlan, is_chat: np.ndarray) -> int:
    """Return the number of chats with a supervised token in a row without the chat's beginning (only ``concat``).

    The model learns these tokens without the turns before them. ``is_chat`` is bool [documents].
    """
    new_starts = plan.starts + plan.repeated  # the first token of each piece that is not repeated
    is_chat_of_piece = is_chat[plan.order][plan.entries]
    pieces = np.flatnonzero(is_chat_of_piece & (new_starts > 0))
    is_severed = np.zeros(len(is_chat), dtype=bool)
    reader = SpoolReader(documents)
    pieces_per_read = max(1, _TOKENS_PER_READ // plan.max_length)
    for first in range(0, len(pieces), pieces_per_read):
        batch = pieces[first : first + pieces_per_read]
        chats = plan.documents(batch)
        lengths = (plan.lengths[batch] - plan.repeated[batch]).astype(np.int64)
        targets = np.cumsum(lengths) - lengths
        supervised = np.ones(int(lengths.sum()), dtype=np.uint8)
        token_ids = np.empty(len(supervised), dtype=np.int32)
        reader.read(PiecesToCopy(chats, new_starts[batch], lengths, targets), token_ids, supervised)
        has_supervised = np.maximum.reduceat(supervised, targets) > 0
        is_severed[chats[has_supervised]] = True
    return int(is_severed.sum())
