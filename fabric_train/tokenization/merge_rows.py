"""Write the rows of finished token datasets as one: copied or linked, with joined indexes; or only where they are.

``token_dataset/parts.py`` has the form of the second.
"""

import hashlib
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import DownloadColumn, TimeRemainingColumn

from fabric_train.cli.errors import InputError, first_line
from fabric_train.cli.progress import ThrottledLog, transient_bar
from fabric_train.files.regular_file import read_json
from fabric_train.token_dataset.arrow_folder import write_dataset_dict, write_json
from fabric_train.token_dataset.check_parts import check_parts
from fabric_train.token_dataset.document_index import ARRAYS, CHECKSUMS, DocumentIndex, SourceTable, chunks, open_index
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
        """Return the parts that were merged into this token dataset, or the dataset itself as the only part."""
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
    """Return token datasets with the parts of each that consists of parts in its place."""
    return [own for folder in folders for own in (_parts_of(folder) if is_of_parts(folder) else [folder])]


def _parts_of(folder: Path) -> list[Path]:
    parts = open_parts(folder)
    check_parts(parts)
    return [Path(os.path.normpath(parts.folder_of(number))) for number in range(len(parts.record.parts))]


def write_rows(
    merged: Sequence[MergeInput],
    manifest: Manifest,
    folder: Path,
    place: Callable[[Path, Path], object] = shutil.copyfile,
) -> None:
    """Write the rows and the document indexes of all splits into ``folder``.

    ``place`` copies a file of rows, or links it. A file without labels is written with them if others have labels.
    """
    num_bytes = sum(
        file.stat().st_size for dataset in merged for split in dataset.splits.values() for file in split.files
    )
    with transient_bar("joining", DownloadColumn(), TimeRemainingColumn()) as (bar, task):
        bar.update(task, total=num_bytes)
        for name in manifest.ledger.splits:
            (folder / name).mkdir()
            own = [dataset.splits[name] for dataset in merged if name in dataset.splits]
            _join(own, folder / name, place, partial(bar.advance, task))
            if manifest.has_index:
                _join_indexes(merged, name, folder / name)
    write_dataset_dict(folder, manifest.ledger.splits)


def _join(
    splits: Sequence[Split], folder: Path, place: Callable[[Path, Path], object], advance: Callable[[int], None]
) -> None:
    """Place the files of the splits in ``folder`` in order; if one split has labels, the others get them too."""
    template = next((split for split in splits if "labels" in split.schema.names), splits[0])
    files = [(file, split.schema.names == template.schema.names) for split in splits for file in split.files]
    names = [f"data-{index:05d}-of-{len(files):05d}.arrow" for index in range(len(files))]
    for name, (file, is_whole) in zip(names, files, strict=True):
        if is_whole:
            place(file, folder / name)
        else:
            _copy_with_labels(file, folder / name, template.schema)
        advance(file.stat().st_size)
    info = read_json(template.files[0].parent / "dataset_info.json", dict, "tokenize again")
    write_json(folder / "dataset_info.json", {"features": info["features"]})
    states = [read_json(split.files[0].parent / "state.json", dict, "tokenize again") for split in splits]
    fingerprints = " ".join(str(state["_fingerprint"]) for state in states)
    digest = hashlib.sha256(fingerprints.encode(errors="replace")).hexdigest()
    listed = {"_data_files": [{"filename": name} for name in names], "_fingerprint": digest[:16]}
    write_json(folder / "state.json", {**states[0], **listed})


def _copy_with_labels(file: Path, target: Path, schema: pa.Schema) -> None:
    """Copy a file without ``labels`` and add them: all its tokens are supervised."""
    with pa.OSFile(str(target), "wb") as opened, pa.ipc.new_stream(opened, schema) as writer:
        for batch in read_arrow(file):
            columns = [batch.column("input_ids" if name == "labels" else name) for name in schema.names]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _join_indexes(merged: Sequence[MergeInput], split: str, folder: Path) -> None:
    """Join the document indexes of a split; the files of each dataset follow the files of the datasets before it."""
    num_files = [sum(source.num_files for source in dataset.manifest.sources) for dataset in merged]
    first_files = np.cumsum([0, *num_files]).tolist()
    rows_before = count_rows_before([dataset.folder for dataset in merged])
    opened = [
        (index, first, before)
        for dataset, first, before in zip(merged, first_files, rows_before, strict=False)
        if (index := open_index(dataset.folder, dataset.manifest, split)) is not None
    ]
    indexes, firsts, before = zip(*opened, strict=True)
    join_indexes(folder, indexes, firsts, before)


def join_indexes(
    folder: Path, indexes: Sequence[DocumentIndex], first_files: Sequence[int], rows_before: Sequence[int]
) -> None:
    """Write the index of the split ``folder``, whose rows come from several splits, joined in order.

    ``first_files`` has the number of each one's first file in the new manifest, and ``rows_before`` how many rows of
    this file are in the splits before.
    """
    (folder / INDEX_FOLDER).mkdir()
    num_placed = [int(index.rows["documents"][-1]) for index in indexes]
    sizes = (
        sum(len(index.documents) for index in indexes),
        sum(len(index.rows) - 1 for index in indexes) + 1,
        sum(len(index.continuations) for index in indexes),
    )
    documents, rows, continuations = (
        np.lib.format.open_memmap(folder / INDEX_FOLDER / f"{name}.npy", "w+", dtype, (size,))
        for (name, dtype), size in zip(ARRAYS.items(), sizes, strict=True)
    )
    row = document = continuation = 0
    left = sum(num_placed)
    for index, first_file, before, placed in zip(indexes, first_files, rows_before, num_placed, strict=True):
        _copy(index.documents[:placed], documents[document:], {"file": first_file}, before)
        _copy(index.documents[placed:], documents[left:], {"file": first_file}, before)
        _copy(index.rows[:-1], rows[row:], {"documents": document, "continuations": continuation})
        _copy(index.continuations, continuations[continuation:], {"document": document})
        row += len(index.rows) - 1
        document += placed
        left += len(index.documents) - placed
        continuation += len(index.continuations)
    rows[-1] = (document, continuation)
    for array in (documents, rows, continuations):
        array.flush()
    checksums = [index.checksums for index in indexes if index.checksums is not None]
    if len(checksums) == len(indexes):
        np.save(folder / INDEX_FOLDER / CHECKSUMS, np.concatenate(checksums), allow_pickle=False)


def _copy(records: np.ndarray, target: np.ndarray, added: dict[str, int], rows_before: int = 0) -> None:
    """Copy records to the beginning of ``target``, with numbers added to some of their fields.

    ``rows_before`` are added to the rows of file 0.
    """
    for begin, mapped in chunks(records, lambda _: None):
        part = np.array(mapped)
        if rows_before:
            part["row"][part["file"] == 0] += rows_before
        for name, number in added.items():
            part[name] += number
        target[begin : begin + len(part)] = part


def write_parts(folder: Path, target: Path, merged: Sequence[MergeInput], manifest: Manifest) -> None:
    """Write into ``folder``, which will be ``target``, where the parts and their record batches are."""
    faults = [
        f"{one.folder} has no document index, because an older version wrote it: merge without --parts"
        for one in merged
        if not one.manifest.has_index
    ]
    if faults:
        raise InputError(*faults)
    sources = SourceTable(manifest.sources)
    log = ThrottledLog()
    start = Path(os.path.realpath(target.parent)) / target.name
    rows: dict[str, int] = {}
    files: dict[str, int] = {}
    batches: dict[str, list[np.ndarray]] = {name: [] for name in manifest.ledger.splits}
    main_sources: dict[str, list[np.ndarray]] = {name: [] for name in manifest.ledger.splits if name != "train"}
    parts: list[Part] = []
    has_checksums = True
    rows_before = count_rows_before([one.folder for one in merged])
    for number, one in enumerate(merged):
        log(f"reading the index of part {number + 1:,} of {len(merged):,}")
        splits = {}
        for name, split in one.splits.items():
            index = open_index(one.folder, one.manifest, name)
            assert index is not None, "a manifest with an index has one for each split"
            has_checksums &= index.checksums is not None
            found = list(_batches_of(split, one.manifest.settings.max_length))
            for file, of_file in enumerate(found):
                of_file["row"] += rows.get(name, 0)
                of_file["file"] = files.get(name, 0) + file
            batches[name] += found
            rows[name], files[name] = rows.get(name, 0) + split.num_rows, files.get(name, 0) + len(split.files)
            if name in main_sources and len(sources.names) > 1:
                numbers = np.array([sources.names.index(own) for own in index.sources.names], "<u4")
                main_sources[name].append(numbers[index.main_sources()])
            splits[name] = _describe_split(split, index, one.manifest, name)
        path = os.path.relpath(os.path.realpath(one.folder), start)
        num_files = sum(source.num_files for source in one.manifest.sources)
        digest = hashlib.sha256((one.folder / MANIFEST_NAME).read_bytes()).hexdigest()
        parts.append(Part(path, digest, num_files, rows_before[number], splits))
    for name, of_split in batches.items():
        (folder / name).mkdir()
        np.save(folder / name / BATCHES, np.concatenate(of_split), allow_pickle=False)
        if main_sources.get(name):
            np.save(folder / name / MAIN_SOURCES, np.concatenate(main_sources[name]), allow_pickle=False)
    has_borders = "document_starts" in merged[0].splits["train"].schema.names
    write_record(folder, PartsRecord(manifest.settings.max_length, has_borders, has_checksums, tuple(parts)))


def _describe_split(split: Split, index: DocumentIndex, manifest: Manifest, name: str) -> PartSplit:
    of_sources = rows_of_sources(index, manifest) if name == "train" else {}
    return PartSplit(
        rows=split.num_rows,
        tokens=manifest.ledger.splits[name].tokens_in_rows,
        documents=len(index.documents),
        placed=int(index.rows["documents"][-1]),
        continuations=len(index.continuations),
        has_labels="labels" in split.schema.names,
        files=tuple(PartFile(file.name, file.stat().st_size) for file in split.files),
        source_rows=None
        if of_sources is None
        else {source: [(one.start, one.stop) for one in ranges] for source, ranges in of_sources.items()},
    )


def _batches_of(split: Split, max_length: int) -> Iterator[np.ndarray]:
    """Yield the record batches of each file, BATCH [batches]; the first row is counted in the split, the file is 0.

    Reads their heads, and not their rows. InputError if rows do not have ``max_length`` tokens.
    """
    row = 0
    for file in split.files:
        mapped = map_file(file)
        mapped.madvise(mmap.MADV_RANDOM)
        found: list[tuple[int, int, int]] = []
        try:
            stream = pa.BufferReader(pa.py_buffer(mapped))
            schema = pa.ipc.read_schema(stream)
            for offset, batch in _batches_in(stream, schema):
                _check_batch(batch, max_length, file)
                found.append((row, offset, 0))
                row += batch.num_rows
        except (ValueError, OSError) as error:
            raise InputError(f"{file}: damaged, {first_line(error)}; tokenize again") from None
        yield np.array(found, BATCH)


def _batches_in(stream: pa.BufferReader, schema: pa.Schema) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield each record batch from here on, with its place in the stream."""
    while True:
        offset = stream.tell()
        try:
            message = pa.ipc.read_message(stream)
        except EOFError:
            return
        yield offset, pa.ipc.read_record_batch(message, schema)


def _check_batch(batch: pa.RecordBatch, max_length: int, file: Path) -> None:
    for name in {"input_ids", "labels"} & set(batch.schema.names):
        column = batch.column(name)
        is_fixed = pa.types.is_fixed_size_list(column.type)
        lengths = {column.type.list_size} if is_fixed else set(pc.list_value_length(column).to_pylist())
        if batch.num_rows and lengths != {max_length}:
            raise InputError(f"{file}: {name} has rows of other lengths than --max_length {max_length}; tokenize again")
    for name in batch.schema.names:
        if batch.column(name).null_count:
            raise InputError(f"{file}: damaged, its {name} contain nulls; tokenize again")
