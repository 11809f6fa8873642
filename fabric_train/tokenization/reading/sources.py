"""What --dataset names, as parts that processes read: files, folders, globs, URLs, save_to_disk folders, hub names."""

import glob
import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fabric_train.cli.errors import InputError, first_line
from fabric_train.cli.redaction import redact
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.manifest import SourceFile, SourceRecord
from fabric_train.tokenization.reading.files import (
    Part,
    Reader,
    Row,
    is_readable,
    readable_suffixes,
    refuse_numbers,
    split_file,
)
from fabric_train.tokenization.reading.hub_names import hub_fault, is_hub_name

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_SAVED = ("dataset_dict.json", "state.json")


class PartReader(Protocol):
    """Iterates over a part's rows; see ``files.Reader``."""

    position: int

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]: ...

    def place(self, number: int) -> str:
        """Return where row ``number`` is, for the user."""


@dataclass(frozen=True)
class FileSource:
    """A file, or several in the order of their names beneath ``root``.

    Like every source it has ``notes``, lines for the user, is cut in order into ``parts`` of at most about so many
    bytes where its kind allows that, and opens a part with ``reader``. ``identity`` tells that a part has not changed
    since it was read, and is None where nothing tells; ``record`` is what the manifest says.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(path.stat().st_size for path in self.files)

    def parts(self, part_bytes: int) -> Iterator[Part]:
        for path in self.files:
            yield from split_file(path, part_bytes)

    def reader(self, part: Any, columns: tuple[str, ...]) -> Reader:
        return Reader(part, columns)

    def identity(self, part: Any) -> str:
        status = part.path.stat()
        return f"{part.path.absolute()} {status.st_size} {status.st_mtime_ns} {part.start} {part.stop}"

    def record(self) -> SourceRecord:
        files = hash_files(self.root, self.files)
        return SourceRecord(name=self.name, kind="files", files=files, splits=(), revision=None)


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop`` of a split; the ``start``-th of ``stop`` shards of a streamed one."""

    split: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the ``datasets`` library: its train split where there is one, otherwise all its splits."""

    name: str
    splits: "dict[str, Dataset]"
    root: Path | None

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"splits read: {', '.join(self.splits)}",)

    @property
    def num_bytes(self) -> int:
        return sum(dataset.data.nbytes for dataset in self.splits.values())

    def parts(self, part_bytes: int) -> Iterator[RowRange]:
        for split, dataset in self.splits.items():
            bytes_per_row = max(1, dataset.data.nbytes // max(1, len(dataset)))
            num_rows = max(1, part_bytes // bytes_per_row)
            for start in range(0, len(dataset), num_rows):
                stop = min(start + num_rows, len(dataset))
                yield RowRange(split, start, stop, (stop - start) * bytes_per_row)

    def reader(self, part: Any, columns: tuple[str, ...]) -> "RowReader":
        dataset, place = self.splits[part.split], f"{self.name} ({part.split})"
        kept = [name for name in columns if name in dataset.column_names] or dataset.column_names
        refuse_numbers(place, dataset.features.arrow_schema, kept if kept != dataset.column_names else [])
        rows = dataset.select_columns(kept).select(range(part.start, part.stop))
        return RowReader(rows, place, part, part.start)

    def identity(self, part: Any) -> str:
        return f"{self.splits[part.split]._fingerprint} {part.split} {part.start} {part.stop}"

    def record(self) -> SourceRecord:
        splits = tuple(self.splits)
        if self.root is None:
            revision = " ".join(dataset._fingerprint for dataset in self.splits.values())
            return SourceRecord(name=self.name, kind="hub", files=(), splits=splits, revision=revision)
        files = hash_files(self.root, sorted(path for path in self.root.rglob("*") if path.is_file()))
        return SourceRecord(name=self.name, kind="saved_dataset", files=files, splits=splits, revision=None)


@dataclass(frozen=True)
class StreamSource:
    """A hub dataset read as a stream, without a copy on the disk; a file of the hub is a part."""

    name: str
    splits: "dict[str, IterableDataset]"

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"splits streamed: {', '.join(self.splits)}",)

    @property
    def num_bytes(self) -> int:
        return sum(dataset.info.dataset_size or 0 for dataset in self.splits.values())

    def parts(self, _part_bytes: int) -> Iterator[RowRange]:
        for split, dataset in self.splits.items():
            for index in range(dataset.num_shards):
                num_bytes = (dataset.info.dataset_size or 0) // dataset.num_shards
                yield RowRange(split, index, dataset.num_shards, num_bytes)

    def reader(self, part: Any, _columns: tuple[str, ...]) -> "RowReader":
        rows = self.splits[part.split].shard(num_shards=part.stop, index=part.start, contiguous=True)
        return RowReader(rows, f"{self.name} ({part.split}, file {part.start})", part, 0)

    def identity(self, _part: Any) -> None:
        return None

    def record(self) -> SourceRecord:
        revision = " ".join(str(dataset.info.version) for dataset in self.splits.values())
        return SourceRecord(name=self.name, kind="hub", files=(), splits=tuple(self.splits), revision=revision)


class RowReader:
    """The rows of a ``datasets`` dataset; see ``files.Reader``."""

    def __init__(self, rows: "Dataset | IterableDataset", place: str, part: RowRange, first: int) -> None:
        self.position = 0
        self._rows, self._place, self._part, self._first = rows, place, part, first

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        number = 0
        num_rows = max(1, self._part.stop - self._part.start)
        for batch in self._rows.iter(batch_size=256):
            columns: Mapping[str, Sequence[Any]] = batch
            for values in zip(*columns.values(), strict=True):
                number += 1
                yield number, dict(zip(columns, values, strict=True))
            self.position = min(self._part.num_bytes, self._part.num_bytes * number // num_rows)
        self.position = self._part.num_bytes

    def place(self, number: int) -> str:
        return f"{self._place}, row {self._first + number}"


Source = FileSource | DatasetSource | StreamSource


def open_sources(names: list[str], option: str, stream: bool, downloads: Path) -> list[Source]:
    """Find every source, in the order given; what a URL names is downloaded into ``downloads`` first.

    Raises:
        InputError: one line for each name that leads nowhere.
    """
    sources: list[Source] = []
    faults: list[str] = []
    for name in names:
        try:
            sources.append(_open(name, option, stream, downloads))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    return sources


def _open(name: str, option: str, stream: bool, downloads: Path) -> Source:
    if "://" in name:
        return _open_url(name, option, downloads)
    path = Path(name).expanduser()
    if path.is_dir():
        if any((path / mark).is_file() for mark in _SAVED):
            return _open_saved(name, option, path)
        return _open_folder(name, option, path)
    if path.is_file():
        if not is_readable(path):
            raise InputError(
                f"{option} {name}: cannot read {path.suffix or 'a file without suffix'}; "
                f"readable are {readable_suffixes()}"
            )
        return FileSource(name=name, root=path.parent, files=(path,))
    if glob.has_magic(name):
        return _open_glob(name, option)
    if is_readable(path) or not is_hub_name(name):
        raise InputError(f"{option} {name}: no such file or folder; give a path that is there, or a hub name")
    return _open_hub(name, option, stream)


def _open_folder(name: str, option: str, folder: Path) -> FileSource:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    found.sort(key=lambda path: path.relative_to(folder).parts)
    return _of_files(name, option, "this folder", folder, found)


def _open_glob(name: str, option: str) -> FileSource:
    found = sorted(path for path in map(Path, glob.glob(os.path.expanduser(name), recursive=True)) if path.is_file())
    root = Path(os.path.commonpath([path.parent for path in found])) if found else Path()
    return _of_files(name, option, "what this pattern names", root, found)


def _of_files(name: str, option: str, where: str, root: Path, found: list[Path]) -> FileSource:
    files = tuple(path for path in found if is_readable(path))
    unread = Counter(path.suffix or "no suffix" for path in found if not is_readable(path))
    if not files:
        raise InputError(
            f"{option} {name}: no readable file in {where} of {len(found)} files; readable are {readable_suffixes()}"
        )
    listed = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(unread.items()))
    notes = (f"{unread.total():,} files of other kinds are passed over ({listed})",) if unread else ()
    return FileSource(name=name, root=root, files=files, notes=notes)


def _open_url(name: str, option: str, downloads: Path) -> FileSource:
    from fabric_train.tokenization.reading.url_download import download

    files = download(name, option, downloads)
    return FileSource(name=redact(name), root=downloads, files=files)


def _open_saved(name: str, option: str, folder: Path) -> DatasetSource:
    import datasets

    from fabric_train.tokenization.packing.token_folder import refuse_foreign_files

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    refuse_foreign_files(folder, "save it again")
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{option} {name}: not a whole save_to_disk folder: {first_line(error)}; save it again"
        ) from None
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    return DatasetSource(name=name, splits=_choose(splits), root=folder)


def _open_hub(name: str, option: str, stream: bool) -> DatasetSource | StreamSource:
    import datasets
    from huggingface_hub.utils import logging as huggingface_logging

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_logging.set_verbosity(huggingface_logging.CRITICAL)
    print(f"asking the hub for {name}", file=sys.stderr)
    try:
        loaded = datasets.load_dataset(name, streaming=stream)
    except (OSError, ValueError) as error:
        raise hub_fault(option, name, error) from None
    if stream:
        return StreamSource(name=name, splits=_choose(loaded))
    return DatasetSource(name=name, splits=_choose(loaded), root=None)


def _choose(splits: "dict[str, Any]") -> "dict[str, Any]":
    return {"train": splits["train"]} if "train" in splits else dict(splits)


def hash_files(root: Path, files: Sequence[Path]) -> tuple[SourceFile, ...]:
    """Return name beneath ``root``, size in bytes and SHA-256 of each file, read in pieces."""
    return tuple(SourceFile(path.relative_to(root).as_posix(), path.stat().st_size, sha256(path)) for path in files)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
