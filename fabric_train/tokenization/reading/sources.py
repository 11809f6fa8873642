"""Sources of documents: files, save_to_disk folders, datasets on the hub; their parts, rows and records."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fabric_train.cli.errors import InputError, RunError, first_line
from fabric_train.tokenization.documents import BadRowError, Row, check_text_columns, name_in
from fabric_train.tokenization.manifest import SourceFile, SourceRecord
from fabric_train.tokenization.reading.files import FileReader, split_file
from fabric_train.tokenization.reading.listing import NO_SHA256, FilePart, ListedFiles, PackedParts

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


@dataclass(frozen=True)
class DatasetName:
    """A dataset as ``NAME:SUBSET:SPLIT@REVISION``, of which everything except the name may be left out.

    ``NAME@REVISION`` and ``NAME::SPLIT`` are such names too. Several splits are joined by +. None is the default.
    """

    name: str
    subset: str | None
    split: str | None
    revision: str | None

    def found(self) -> str:
        """Return subset and revision for messages."""
        return f"subset {self.subset}, commit {self.revision}"


def parse_dataset_name(value: str) -> DatasetName | None:
    """Return the parts of a dataset's name, None if it cannot be one."""
    subset, split, revision = r"(?::([^:@]*))?", r"(?::([\w.+-]+))?", r"(?:@([\w./-]+))?"
    parts = re.fullmatch(f"([^:@]+){subset}{split}{revision}", value)
    return DatasetName(parts[1], parts[2] or None, parts[3], parts[4]) if parts else None


def is_hub_name(value: str) -> bool:
    """Return whether ``value`` has the form NAME or OWNER/NAME and is not an existing path."""
    name = r"\w(?:[\w.-]*\w)?"
    return re.fullmatch(f"(?:{name}/)?{name}", value) is not None and not Path(value).exists()


def errors_of_datasets() -> tuple[type[Exception], ...]:
    """Return what ``datasets`` raises when there is no network or dataset, or a dataset's files or README are wrong."""
    import httpx
    import yaml
    from datasets.exceptions import DatasetsError

    wrong_content = (ValueError, KeyError, TypeError, AttributeError, IndexError, yaml.YAMLError)
    return (OSError, httpx.HTTPError, DatasetsError, RuntimeError, *wrong_content)


def hub_fault(option: str, value: str, error: Exception, is_folder: bool = False) -> InputError:
    """Return the one-line error for ``value`` of ``option``, which cannot be loaded from the hub, or from a folder.

    The messages of ``datasets`` and ``huggingface_hub`` are long, so the reason is taken from the class of ``error``.
    """
    classes = {base.__name__ for base in type(error).__mro__}
    message = first_line(error)
    cause = error.__cause__ if "DatasetGenerationError" in classes and error.__cause__ else error
    if message == "Config name is missing.":
        subsets = ", ".join(re.findall(r"'([^']+)'", str(error).splitlines()[1]))
        return InputError(f"{option} {value}: it has several subsets; give one of them as NAME:SUBSET: {subsets}")
    if is_folder:
        return InputError(f"{option} {value}: {first_line(cause)}")
    if "GatedRepoError" in classes or "is a gated dataset" in message:
        why = "it is gated on the hub: accept its terms there and log in with `hf auth login`"
    elif message.startswith("Revision "):
        why = f"the hub answers: {message}"
    elif classes & {"RepositoryNotFoundError", "DatasetNotFoundError"} and "reach" not in message:
        why = "the hub has nothing of this name that this login may read"
    elif classes & {"LocalEntryNotFoundError", "ConnectionError", "OfflineModeIsEnabled", "DatasetNotFoundError"}:
        why = "the hub cannot be reached to look for it (no network, or HF_HUB_OFFLINE is set)"
    else:
        why = f"the hub answers: {first_line(cause)}"
    return InputError(f"{option} {value}: no such file or folder here, and {why}")


class PartReader(Protocol):
    """An iterable over the rows of a part; see ``files.FileReader``."""

    position: int
    num_counted: int

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]: ...

    def sha256(self) -> bytes:
        """Return the SHA-256 of the file that was read, ``NO_SHA256`` if that is not known."""

    def place(self, number: int) -> str:
        """Return the place of row ``number`` for messages."""


@dataclass(frozen=True)
class FileSource:
    """One or several local files; the manifest lists their paths relative to ``root``.

    All sources have the same members:

    - ``notes``: lines for the user.
    - ``files``: the local files that it consists of, as they were when it was opened.
    - ``num_origins``: number of its files or splits, in the order of ``record``; each part has the ``origin``, from 0.
    - ``num_bytes``: size of the source; 0 if it is unknown.
    - ``parts(part_bytes)``: yields the source's parts in order, each of about ``part_bytes`` bytes if its kind allows.
    - ``pack(parts)``: returns parts in little memory.
    - ``reader(part, columns)``: returns an iterable over the rows of a part.
    - ``identity(part)``: returns a string that changes if the part changes; None if there is no such string.
    - ``record(digests)``: returns the source's record for the manifest; uint8 [files, 32], SHA-256 of its ``files``.
    """

    name: str
    root: Path
    files: ListedFiles
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(self.files.sizes)

    @property
    def num_origins(self) -> int:
        return len(self.files)

    def parts(self, part_bytes: int) -> Iterator[FilePart]:
        for number, file in enumerate(self.files):
            yield from split_file(file, part_bytes, number)

    def pack(self, parts: Iterable[Any]) -> Sequence[FilePart]:
        return PackedParts(self.files, parts)

    def reader(self, part: Any, columns: tuple[str, ...]) -> FileReader:
        return FileReader(part, columns)

    def identity(self, part: Any) -> str:
        file = part.file
        path = os.fsencode(os.path.join(os.getcwd(), file.name)).hex()  # a name need not be text
        return f"{path} {file.size} {file.mtime_ns} {file.ctime_ns} {part.start} {part.stop}"

    def record(self, digests: np.ndarray) -> SourceRecord:
        files = _hashed(self.root, self.files, digests)
        folder = None if "://" in self.name else os.fsencode(self.root).decode("utf-8", "backslashreplace")
        return SourceRecord(name=self.name, kind="files", files=files, splits=(), revision=None, folder=folder)


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop`` of a split; of a streamed split, shard ``start`` of ``stop`` shards.

    ``origin`` is the number of the split in its source.
    """

    split: str
    start: int
    stop: int
    num_bytes: int
    origin: int


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the ``datasets`` library: the ``files`` of a save_to_disk folder ``root``, or one from the ``hub``.

    ``hub`` has the subset and the commit that were found there.
    """

    name: str
    splits: "dict[str, Dataset]"
    root: Path = Path()
    files: ListedFiles = field(default_factory=ListedFiles)
    hub: DatasetName | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"splits read: {', '.join(self.splits)}" + (f", {self.hub.found()}" if self.hub else ""),)

    @property
    def num_bytes(self) -> int:
        return sum(dataset.data.nbytes for dataset in self.splits.values())

    @property
    def num_origins(self) -> int:
        return len(self.splits)

    def pack(self, parts: Iterable[Any]) -> Sequence[RowRange]:
        return tuple(parts)

    def parts(self, part_bytes: int) -> Iterator[RowRange]:
        for origin, (split, dataset) in enumerate(self.splits.items()):
            bytes_per_row = max(1, dataset.data.nbytes // max(1, len(dataset)))
            num_rows = max(1, part_bytes // bytes_per_row)
            for start in range(0, len(dataset), num_rows):
                stop = min(start + num_rows, len(dataset))
                yield RowRange(split, start, stop, (stop - start) * bytes_per_row, origin)

    def reader(self, part: Any, columns: tuple[str, ...]) -> "RowReader":
        dataset, place = self.splits[part.split], f"{self.name} ({part.split})"
        names = dataset.column_names
        kept = [name for name in (name_in(column, names) for column in columns) if name in names] or names
        check_text_columns(place, dataset.features.arrow_schema, kept if kept != names else [])
        rows = dataset.select_columns(kept).select(range(part.start, part.stop))
        return RowReader(rows, place, part, part.start)

    def identity(self, part: Any) -> str:
        return f"{self.splits[part.split]._fingerprint} {part.split} {part.start} {part.stop}"

    def record(self, digests: np.ndarray) -> SourceRecord:
        if self.hub:
            return _hub_record(self.hub, self.splits)
        files = _hashed(self.root, self.files, digests)
        return SourceRecord(name=self.name, kind="saved_dataset", files=files, splits=tuple(self.splits), revision=None)


@dataclass(frozen=True)
class StreamSource:
    """A dataset on the ``hub`` that is streamed without a copy on disk; a part is one file there."""

    name: str
    splits: "dict[str, IterableDataset]"
    hub: DatasetName
    files: ListedFiles = field(default_factory=ListedFiles)

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"splits streamed: {', '.join(self.splits)}, {self.hub.found()}",)

    @property
    def num_bytes(self) -> int:
        return sum(dataset.info.dataset_size or 0 for dataset in self.splits.values())

    @property
    def num_origins(self) -> int:
        return len(self.splits)

    def pack(self, parts: Iterable[Any]) -> Sequence[RowRange]:
        return tuple(parts)

    def parts(self, _part_bytes: int) -> Iterator[RowRange]:
        for origin, (split, dataset) in enumerate(self.splits.items()):
            for index in range(dataset.num_shards):
                num_bytes = (dataset.info.dataset_size or 0) // dataset.num_shards
                yield RowRange(split, index, dataset.num_shards, num_bytes, origin)

    def reader(self, part: Any, _columns: tuple[str, ...]) -> "RowReader":
        rows = self.splits[part.split].shard(num_shards=part.stop, index=part.start, contiguous=True)
        return RowReader(rows, f"{self.name} ({part.split}, file {part.start})", part, 0)

    def identity(self, _part: Any) -> None:
        return None

    def record(self, _digests: np.ndarray) -> SourceRecord:
        return _hub_record(self.hub, self.splits)


def _hashed(root: Path, files: ListedFiles, digests: np.ndarray) -> tuple[SourceFile, ...]:
    """Return the records of hashed files; a path that is not UTF-8 has escapes."""
    folder = "" if root == Path() else os.path.join(root, "")
    names = (os.fsencode(file.name.removeprefix(folder)) for file in files)
    paths = (name.decode("utf-8", "backslashreplace") for name in names)
    hashes = (digest.tobytes().hex() for digest in digests)
    return tuple(map(SourceFile, paths, files.sizes, hashes))


def _hub_record(hub: DatasetName, splits: Mapping[str, Any]) -> SourceRecord:
    return SourceRecord(hub.name, "hub", files=(), splits=tuple(splits), revision=hub.revision, subset=hub.subset)


class RowReader:
    """An iterable over the rows of a ``datasets`` dataset; see ``files.FileReader``.

    Raises:
        RunError: its files are damaged, or the connection to the hub has broken off.
    """

    def __init__(self, rows: "Dataset | IterableDataset", place: str, part: RowRange, first: int) -> None:
        self.position = self.num_counted = 0
        self._rows, self._place, self._part, self._first = rows, place, part, first

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        number = 0
        num_rows = max(1, self._part.stop - self._part.start)
        for columns in self._batches():
            for values in zip(*columns.values(), strict=True):
                number += 1
                self.num_counted = number
                self.position = min(self._part.num_bytes, self._part.num_bytes * number // num_rows)
                yield number, dict(zip(columns, values, strict=True))
        self.position = self._part.num_bytes

    def _batches(self) -> Iterator[Mapping[str, Sequence[Any]]]:
        try:
            yield from self._rows.iter(batch_size=256)
        except errors_of_datasets() as error:
            raise RunError(f"{self._place}: cannot be read to the end: {first_line(error)}") from None

    def sha256(self) -> bytes:
        return NO_SHA256

    def place(self, number: int) -> str:
        return f"{self._place}, row {self._first + number}"


Source = FileSource | DatasetSource | StreamSource
