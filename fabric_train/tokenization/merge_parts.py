"""Describe finished token datasets as the parts of one; no row is copied. ``packing/parts.py`` reads it."""

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_train.cli.errors import InputError, first_line
from fabric_train.tokenization.manifest import FILE_NAME as MANIFEST_NAME
from fabric_train.tokenization.packing.document_index import DocumentIndex, SourceTable, open_index
from fabric_train.tokenization.packing.document_search import rows_of_sources
from fabric_train.tokenization.packing.joined_split import map_file
from fabric_train.tokenization.packing.parts import (
    BATCH,
    BATCHES,
    MAIN_SOURCES,
    Part,
    PartFile,
    PartSplit,
    PartsRecord,
    is_of_parts,
    open_parts,
    write_record,
)
from fabric_train.tokenization.slice_folder import count_rows_before
from fabric_train.tokenization.workers import ThrottledLog

if TYPE_CHECKING:
    from fabric_train.tokenization.manifest import Manifest
    from fabric_train.tokenization.merge import MergeInput
    from fabric_train.tokenization.packing.token_folder import Split


def without_parts(folders: Sequence[Path]) -> list[Path]:
    """Return token datasets with the parts of each that consists of parts in its place."""
    return [own for folder in folders for own in (_parts_of(folder) if is_of_parts(folder) else [folder])]


def _parts_of(folder: Path) -> list[Path]:
    parts = open_parts(folder)
    parts.check_all()
    return [Path(os.path.normpath(parts.folder_of(number))) for number in range(len(parts.record.parts))]


def write_parts(folder: Path, target: Path, merged: Sequence["MergeInput"], manifest: "Manifest") -> None:
    """Write into ``folder``, which will be ``target``, where the parts and their record batches are."""
    faults = [
        f"{one.folder} has no document index, because an older version wrote it: merge without --parts"
        for one in merged
        if not one.manifest.has_index
    ]
    if faults:
        raise InputError(*faults)
    sources, log = SourceTable(manifest.sources), ThrottledLog()
    start = Path(os.path.realpath(target.parent)) / target.name
    rows, files = dict[str, int](), dict[str, int]()
    batches: dict[str, list[np.ndarray]] = {name: [] for name in manifest.ledger.splits}
    main_sources: dict[str, list[np.ndarray]] = {name: [] for name in manifest.ledger.splits if name != "train"}
    parts, has_checksums = list[Part](), True
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


def _describe_split(split: "Split", index: DocumentIndex, manifest: "Manifest", name: str) -> PartSplit:
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


def _batches_of(split: "Split", max_length: int) -> Iterator[np.ndarray]:
    """Yield the record batches of each file, BATCH [batches]; the first row is counted in the split, the file is 0.

    Reads their heads, and not their rows. InputError if rows do not have ``max_length`` tokens.
    """
    row = 0
    for file in split.files:
        mapped = map_file(file)
        mapped.madvise(mmap.MADV_RANDOM)
        found = list[tuple[int, int, int]]()
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
