"""Open what --dataset names: files, folders, globs, URLs, save_to_disk folders, hub names."""

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
    FilePart,
    FileReader,
    Row,
    check_text_columns,
    is_readable,
    readable_suffixes,
    split_file,
)
from fabric_train.tokenization.reading.hub_names import hub_fault, is_hub_name

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_SAVED = ("dataset_dict.json", "state.json")


class PartReader(Protocol):
    """An iterable over the rows of a part; see ``files.FileReader``."""

    position: int

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]: ...

    def place(self, number: int) -> str:
        """Return the place of row ``number`` for messages."""


@dataclass(frozen=True)
class FileSource:
    """One or several local files; the manifest lists their paths relative to ``root``.

    All sources have the same members:

    - ``notes``: lines for the user.
    - ``num_bytes``: size of the source; 0 if it is unknown.
    - ``parts(part_bytes)``: yields the source's parts in order, each of about ``part_bytes`` bytes if its kind allows.
    - ``reader(part, columns)``: returns an iterable over the rows of a part.
    - ``identity(part)``: returns a string that changes if the part changes; None if there is no such string.
    - ``record()``: returns the source's record for the manifest.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def parts(self, part_bytes: int) -> Iterator[FilePart]:
        for path in self.files:
            yield from split_file(path, part_bytes)

    def reader(self, part: Any, columns: tuple[str, ...]) -> FileReader:
        return FileReader(part, columns)

    def identity(self, part: Any) -> str:
        status = part.path.stat()
        return f"{part.path.absolute()} {status.st_size} {status.st_mtime_ns} {part.start} {part.stop}"

    def record(self) -> SourceRecord:
        files = hash_files(self.root, self.files)
        return SourceRecord(name=self.name, kind="files", files=files, splits=(), revision=None)


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop`` of a split; of a streamed split, shard ``start`` of ``stop`` shards."""

    split: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the ``datasets`` library; ``root`` is its save_to_disk folder, None for a hub dataset."""

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
        check_text_columns(place, dataset.features.arrow_schema, kept if kept != dataset.column_names else [])
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
    """A hub dataset that is streamed without a copy on disk; a part is one file on the hub."""

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
    """An iterable over the rows of a ``datasets`` dataset; see ``files.FileReader``."""

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
    """Open every source, in the order of ``names``.

    Args:
        names: files, folders, globs, URLs, save_to_disk folders or hub names.
        option: the command-line option that gives them, for error messages.
        stream: stream hub datasets instead of downloading them.
        downloads: folder for the files that URLs name.

    Raises:
        InputError: one line for each name that cannot be opened.
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
        raise InputError(f"{option} {name}: no such file or folder; give a path that exists, or a hub name")
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
    notes = (f"{unread.total():,} files of other kinds are skipped ({listed})",) if unread else ()
    return FileSource(name=name, root=root, files=files, notes=notes)


def _open_url(name: str, option: str, downloads: Path) -> FileSource:
    from fabric_train.tokenization.reading.url_download import download

    files = download(name, option, downloads)
    return FileSource(name=redact(name), root=downloads, files=files)


def _open_saved(name: str, option: str, folder: Path) -> DatasetSource:
    import datasets

    from fabric_train.tokenization.packing.token_folder import check_listed_files

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    check_listed_files(folder, "save it again")
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{option} {name}: not a whole save_to_disk folder: {first_line(error)}; save it again"
        ) from None
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    return DatasetSource(name=name, splits=_splits_to_read(splits), root=folder)


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
        return StreamSource(name=name, splits=_splits_to_read(loaded))
    return DatasetSource(name=name, splits=_splits_to_read(loaded), root=None)


def _splits_to_read(splits: "dict[str, Any]") -> "dict[str, Any]":
    """Return the train split if there is one, otherwise all splits."""
    return {"train": splits["train"]} if "train" in splits else dict(splits)


def hash_files(root: Path, files: Sequence[Path]) -> tuple[SourceFile, ...]:
    """Return the path relative to ``root``, the size in bytes and the SHA-256 of each file."""
    return tuple(SourceFile(path.relative_to(root).as_posix(), path.stat().st_size, sha256(path)) for path in files)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
