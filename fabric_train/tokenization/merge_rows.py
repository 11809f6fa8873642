"""Write the rows of finished token datasets as one dataset: copied, linked, or as a list of their locations.

``token_dataset/parts.py`` describes the files of this list.
"""

import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import DownloadColumn, TimeRemainingColumn

from fabric_train.cli.errors import InputError, first_line
from fabric_train.cli.progress import ThrottledLog, transient_bar
from fabric_train.files.typed_json import read_json
from fabric_train.token_dataset.arrow_folder import write_dataset_dict, write_json
from fabric_train.token_dataset.check_parts import check_parts
from fabric_train.token_dataset.document_index import (
    ARRAYS,
    CHECKSUMS,
    LABELS,
    DocumentIndex,
    SourceTable,
    chunks,
    open_index,
)
from fabric_train.token_dataset.document_index import FOLDER as INDEX_FOLDER
from fabric_train.token_dataset.document_search import rows_of_sources
from fabric_train.token_dataset.manifest import FILE_NAME as MANIFEST_NAME
from fabric_train.token_dataset.manifest import Manifest, MergedPart
from fabric_train.token_dataset.parts import (
    BATCH,
    BATCHES,
    MAIN_SOURCES,
    Part,
    PartFile,
    PartSplit,
    PartsRecord,
    is_of_parts,
    map_file,
    open_parts,
    write_record,
)
from fabric_train.token_dataset.token_folder import Split, read_arrow
from fabric_train.tokenization.slice_folder import count_rows_before


@dataclass(frozen=True)
class MergeInput:
    """A token dataset to merge."""

    folder: Path
    manifest: Manifest
    splits: dict[str, Split]

    def parts(self) -> tuple[MergedPart, ...]:
        """Return the parts that were merged into this token dataset, or the dataset as its only part."""
        if self.manifest.parts:
            return self.manifest.parts
        return (
            MergedPart(
                name=str(self.folder),
                manifest_sha256=hashlib.sha256((self.folder / MANIFEST_NAME).read_bytes()).hexdigest(),
                rows={name: split.num_rows for name, split in self.splits.items()},
                settings=self.manifest.settings,
                versions=self.manifest.versions,
                cleaning=self.manifest.cleaning,
            ),
        )


def without_parts(folders: Sequence[Path]) -> list[Path]:
    """Return the token datasets, with each dataset of parts replaced by its parts."""
    dataset_dirs: list[Path] = []
    for folder in folders:
        if is_of_parts(folder):
            dataset_dirs += _open_part_dirs(folder)
        else:
            dataset_dirs.append(folder)
    return dataset_dirs


def _open_part_dirs(folder: Path) -> list[Path]:
    """Return the folders of the parts; InputError if a part is missing or has changed."""
    parts = open_parts(folder)
    check_parts(parts)
    return [Path(os.path.normpath(parts.folder_of(number))) for number in range(len(parts.record.parts))]


def write_rows(
    datasets: Sequence[MergeInput],
    manifest: Manifest,
    folder: Path,
    place_file: Callable[[Path, Path], object] = shutil.copyfile,
) -> None:
    """Write the rows and the document indexes of all splits to ``folder``.

    ``place_file`` copies a file of rows, or links it. A file without labels is rewritten with labels if another file of
    the split has them.
    """
    num_bytes = 0
    for dataset in datasets:
        for split in dataset.splits.values():
            num_bytes += sum(file.stat().st_size for file in split.files)
    with transient_bar("joining", DownloadColumn(), TimeRemainingColumn()) as (bar, task):
        bar.update(task, total=num_bytes)
        for name in manifest.ledger.splits:
            (folder / name).mkdir()
            splits = [dataset.splits[name] for dataset in datasets if name in dataset.splits]
            _join_splits(splits, folder / name, place_file, partial(bar.advance, task))
            if manifest.has_index:
                _join_indexes_of_split(datasets, name, folder / name)
    write_dataset_dict(folder, manifest.ledger.splits)


def _join_splits(
    splits: Sequence[Split], folder: Path, place_file: Callable[[Path, Path], object], advance: Callable[[int], None]
) -> None:
    """Place the files of the splits in ``folder``, in order; if one split has labels, the others also get them."""
    splits_with_labels = [split for split in splits if "labels" in split.schema.names]
    template = splits_with_labels[0] if splits_with_labels else splits[0]

    # the files of rows
    num_files = sum(len(split.files) for split in splits)
    names: list[str] = []
    for split in splits:
        lacks_labels = split.schema.names != template.schema.names
        for file in split.files:
            name = f"data-{len(names):05d}-of-{num_files:05d}.arrow"
            names.append(name)
            if lacks_labels:
                _copy_with_labels(file, folder / name, template.schema)
            else:
                place_file(file, folder / name)
            advance(file.stat().st_size)

    # the two records that `datasets.load_from_disk` reads
    info = read_json(template.files[0].parent / "dataset_info.json", dict, "tokenize again")
    write_json(folder / "dataset_info.json", {"features": info["features"]})
    states = [read_json(split.files[0].parent / "state.json", dict, "tokenize again") for split in splits]
    fingerprints = " ".join(str(state["_fingerprint"]) for state in states)
    digest = hashlib.sha256(fingerprints.encode(errors="replace")).hexdigest()
    state = dict(states[0])
    state["_data_files"] = [{"filename": name} for name in names]
    state["_fingerprint"] = digest[:16]  # the length of a fingerprint of datasets
    write_json(folder / "state.json", state)


def _copy_with_labels(file: Path, target: Path, schema: pa.Schema) -> None:
    """Copy a file without ``labels`` and add them, with all tokens supervised."""
    source_columns = ["input_ids" if name == "labels" else name for name in schema.names]
    with pa.OSFile(str(target), "wb") as stream, pa.ipc.new_stream(stream, schema) as writer:
        for batch in read_arrow(file):
            columns = [batch.column(name) for name in source_columns]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


@dataclass(frozen=True)
class IndexToJoin:
    """The document index of a split, and the position of its files in the merged dataset."""

    index: DocumentIndex
    first_file: int
    """The number of the split's first file in the merged manifest."""
    rows_before: int
    """The number of rows of that file in earlier datasets: 0 unless an earlier dataset has the file's beginning."""


def _join_indexes_of_split(datasets: Sequence[MergeInput], split: str, folder: Path) -> None:
    """Join the document indexes of a split; the files of each dataset follow the files of the datasets before it."""
    rows_before = count_rows_before([dataset.folder for dataset in datasets])
    indexes: list[IndexToJoin] = []
    first_file = 0
    for dataset, num_rows_before in zip(datasets, rows_before, strict=True):
        index = open_index(dataset.folder, dataset.manifest, split)
        if index is not None:
            indexes.append(IndexToJoin(index, first_file, num_rows_before))
        # a dataset without this split may still have files
        first_file += sum(source.num_files for source in dataset.manifest.sources)
    join_indexes(folder, indexes)


def join_indexes(folder: Path, inputs: Sequence[IndexToJoin]) -> None:
    """Write the index of the split ``folder``, whose rows come from the splits of ``inputs``, joined in order.

    The joined index has first the documents that begin in a row, and then those that begin in none, as each of the
    inputs does.
    """
    (folder / INDEX_FOLDER).mkdir()
    indexes = [joined.index for joined in inputs]

    # arrays of the final size on disk, so that memory does not grow with the index
    sizes = {
        "documents": sum(len(index.documents) for index in indexes),
        "rows": sum(index.num_rows for index in indexes) + 1,  # and a closing row
        "continuations": sum(len(index.continuations) for index in indexes),
    }
    arrays: dict[str, np.memmap] = {}
    for name, dtype in ARRAYS.items():
        path = folder / INDEX_FOLDER / f"{name}.npy"
        arrays[name] = np.lib.format.open_memmap(path, "w+", dtype, (sizes[name],))
    documents = arrays["documents"]
    rows = arrays["rows"]
    continuations = arrays["continuations"]

    # the next free record of each array; documents are written at two positions
    next_placed = 0
    next_unplaced = sum(index.num_documents_in_rows for index in indexes)
    next_row = 0
    next_continuation = 0
    for joined in inputs:
        index = joined.index
        num_placed = index.num_documents_in_rows
        placed = index.documents[:num_placed]
        unplaced = index.documents[num_placed:]
        added_to_documents = {"file": joined.first_file}
        added_to_rows = {"documents": next_placed, "continuations": next_continuation}
        _copy_records(placed, documents[next_placed:], added_to_documents, joined.rows_before)
        _copy_records(unplaced, documents[next_unplaced:], added_to_documents, joined.rows_before)
        _copy_records(index.rows[:-1], rows[next_row:], added_to_rows)
        _copy_records(index.continuations, continuations[next_continuation:], {"document": next_placed})
        next_placed += num_placed
        next_unplaced += len(unplaced)
        next_row += index.num_rows
        next_continuation += len(index.continuations)
    rows[-1] = (next_placed, next_continuation)
    for array in arrays.values():
        array.flush()

    # the labels of unpaired answers, at the places of their documents
    if all(index.is_desirable is not None for index in indexes):
        placed_labels: list[np.ndarray] = []
        unplaced_labels: list[np.ndarray] = []
        for index in indexes:
            num_placed = int(index.rows["documents"][-1])
            placed_labels.append(index.is_desirable[:num_placed])
            unplaced_labels.append(index.is_desirable[num_placed:])
        joined_labels = np.concatenate([*placed_labels, *unplaced_labels])
        np.save(folder / INDEX_FOLDER / LABELS, joined_labels, allow_pickle=False)

    # an index of an older version has no checksums, and then the joined one has none
    checksums = [index.checksums for index in indexes if index.checksums is not None]
    if len(checksums) == len(indexes):
        np.save(folder / INDEX_FOLDER / CHECKSUMS, np.concatenate(checksums), allow_pickle=False)


def _copy_records(records: np.ndarray, target: np.ndarray, added: dict[str, int], rows_before: int = 0) -> None:
    """Copy records to the beginning of ``target``, and add the numbers in ``added`` to their fields.

    ``rows_before`` is added to the rows of file 0.
    """
    for begin, mapped in chunks(records, lambda _: None):
        chunk = np.array(mapped)
        if rows_before:  # first, because the number of the file changes below
            chunk["row"][chunk["file"] == 0] += rows_before
        for field_name, increment in added.items():
            chunk[field_name] += increment
        target[begin : begin + len(chunk)] = chunk


def write_parts(folder: Path, target: Path, datasets: Sequence[MergeInput], manifest: Manifest) -> None:
    """Write the locations of the parts and their record batches to ``folder``, which will become ``target``."""
    faults = [
        f"{dataset.folder} has no document index because an older version wrote it; merge without --parts"
        for dataset in datasets
        if not dataset.manifest.has_index
    ]
    if faults:
        raise InputError(*faults)

    # read the record batches and the index of each split of each part
    joined_splits = {name: _JoinedSplit() for name in manifest.ledger.splits}
    source_names = SourceTable(manifest.sources).names
    real_target = Path(os.path.realpath(target.parent)) / target.name
    parts: list[Part] = []
    has_checksums = True
    rows_before = count_rows_before([dataset.folder for dataset in datasets])
    log = ThrottledLog()
    for part_index, dataset in enumerate(datasets):
        log(f"reading the index of part {part_index + 1:,} of {len(datasets):,}")
        part_splits: dict[str, PartSplit] = {}
        for name, split in dataset.splits.items():
            index = open_index(dataset.folder, dataset.manifest, name)
            assert index is not None, "a manifest with an index has one for each split"
            has_checksums &= index.checksums is not None
            joined_split = joined_splits[name]
            joined_split.append_batches(split, dataset.manifest.settings.max_length)
            # In train, the rows of a source are a range, which `PartSplit.source_rows` has. In other splits the source
            # of each row is stored.
            if name != "train" and len(source_names) > 1:
                joined_split.append_main_sources(index, source_names)
            part_splits[name] = _describe_split(split, index, dataset.manifest, name)
        path = os.path.relpath(os.path.realpath(dataset.folder), real_target)
        num_files = sum(source.num_files for source in dataset.manifest.sources)
        digest = hashlib.sha256((dataset.folder / MANIFEST_NAME).read_bytes()).hexdigest()
        part = Part(
            path=path,
            manifest_sha256=digest,
            num_files=num_files,
            rows_before=rows_before[part_index],
            splits=part_splits,
        )
        parts.append(part)

    # write them
    for name, joined_split in joined_splits.items():
        (folder / name).mkdir()
        np.save(folder / name / BATCHES, np.concatenate(joined_split.batches), allow_pickle=False)
        if joined_split.main_sources:
            np.save(folder / name / MAIN_SOURCES, np.concatenate(joined_split.main_sources), allow_pickle=False)
    has_document_starts = "document_starts" in datasets[0].splits["train"].schema.names
    record = PartsRecord(
        max_length=manifest.settings.max_length,
        has_borders=has_document_starts,
        has_checksums=has_checksums,
        parts=tuple(parts),
    )
    write_record(folder, record)


@dataclass
class _JoinedSplit:
    """The rows of a split from all parts so far; for the arrays see ``token_dataset/parts.py``."""

    num_rows: int = 0
    num_files: int = 0
    batches: list[np.ndarray] = field(default_factory=list)  # of each file, BATCH [batches]
    main_sources: list[np.ndarray] = field(default_factory=list)  # of each part, uint32 [rows]

    def append_batches(self, split: Split, max_length: int) -> None:
        """Append the record batches of the files of a part's split."""
        for batches in _read_batch_positions(split, max_length):
            batches["row"] += self.num_rows
            batches["file"] = self.num_files
            self.batches.append(batches)
            self.num_files += 1
        self.num_rows += split.num_rows

    def append_main_sources(self, index: DocumentIndex, source_names: Sequence[str]) -> None:
        """Append the main source of each row of a part, as its number in ``source_names``."""
        numbers = np.array([source_names.index(name) for name in index.sources.names], "<u4")
        self.main_sources.append(numbers[index.main_sources()])


def _describe_split(split: Split, index: DocumentIndex, manifest: Manifest, name: str) -> PartSplit:
    ranges_by_source: dict[str, list[range]] | None = {}
    if name == "train":
        ranges_by_source = rows_of_sources(index, manifest)  # None if the sources are mixed
    source_rows: dict[str, list[tuple[int, int]]] | None = None
    if ranges_by_source is not None:
        source_rows = {}
        for source, ranges in ranges_by_source.items():
            source_rows[source] = [(rows.start, rows.stop) for rows in ranges]
    return PartSplit(
        rows=split.num_rows,
        tokens=manifest.ledger.splits[name].tokens_in_rows,
        documents=len(index.documents),
        placed=index.num_documents_in_rows,
        continuations=len(index.continuations),
        has_labels="labels" in split.schema.names,
        files=tuple(PartFile(file.name, file.stat().st_size) for file in split.files),
        source_rows=source_rows,
    )


def _read_batch_positions(split: Split, max_length: int) -> Iterator[np.ndarray]:
    """Yield the record batches of each file, BATCH [batches], with first rows counted in the split and file 0.

    This reads their headers, not their rows. InputError if rows do not have ``max_length`` tokens.
    """
    row = 0
    for file in split.files:
        mapped = map_file(file)
        mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead: the heads are far apart
        positions: list[tuple[int, int, int]] = []  # the fields of BATCH
        try:
            stream = pa.BufferReader(pa.py_buffer(mapped))
            schema = pa.ipc.read_schema(stream)
            while True:
                offset = stream.tell()
                try:
                    message = pa.ipc.read_message(stream)
                except EOFError:
                    break
                batch = pa.ipc.read_record_batch(message, schema)
                _check_batch(batch, max_length, file)
                positions.append((row, offset, 0))
                row += batch.num_rows
        except (ValueError, OSError) as error:
            raise InputError(f"{file}: damaged, {first_line(error)}; tokenize again") from None
        yield np.array(positions, BATCH)


def _check_batch(batch: pa.RecordBatch, max_length: int, file: Path) -> None:
    """Raise an InputError unless each row has ``max_length`` tokens and labels, and no column has a null."""
    for name in {"input_ids", "labels"} & set(batch.schema.names):
        column = batch.column(name)
        if pa.types.is_fixed_size_list(column.type):
            lengths = {column.type.list_size}
        else:
            lengths = set(pc.list_value_length(column).to_pylist())
        if batch.num_rows and lengths != {max_length}:
            raise InputError(
                f"{file}: {name} has rows that are not --max_length {max_length} tokens long; tokenize again"
            )
    for name in batch.schema.names:
        if batch.column(name).null_count:
            raise InputError(f"{file}: damaged, its {name} contain nulls; tokenize again")
