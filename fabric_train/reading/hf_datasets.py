"""Open and read datasets of the ``datasets`` library: save_to_disk folders, and hub datasets, which may be streamed."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.errors import InputError, RunError, first_line, raise_if_limit_reached
from fabric_train.reading.arrow_rows import nested_columns, without_filling, without_nulls
from fabric_train.reading.documents import Row, check_text_column, name_in
from fabric_train.reading.listing import NO_SHA256, ListedFiles, hashed_files, list_folder
from fabric_train.token_dataset.manifest import SourceRecord

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset, DatasetBuilder, IterableDataset

_HELD_OUT = frozenset(["test", "validation", "valid", "val", "dev", "eval", "evaluation", "heldout"])
"""The beginnings of the names of splits that are not for training."""
_SAVED = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class DatasetName:
    """A dataset written as ``NAME:SUBSET:SPLIT@REVISION``, where all but the name may be left out. + joins splits."""

    name: str
    subset: str | None
    split: str | None
    revision: str | None

    def describe_version(self) -> str:
        return f"subset {self.subset}, commit {self.revision}"


def parse_dataset_name(value: str) -> DatasetName | None:
    """Return the parts of a dataset's name, or None if it cannot be one."""
    subset = r"(?::([^:@]*))?"
    split = r"(?::([\w.+-]+))?"
    revision = r"(?:@([\w./-]+))?"
    match = re.fullmatch(f"([^:@]+){subset}{split}{revision}", value)
    if match is None:
        return None
    return DatasetName(name=match[1], subset=match[2] or None, split=match[3], revision=match[4])


def is_hub_name(value: str) -> bool:
    """Return whether ``value`` has the form NAME or OWNER/NAME and is not an existing path."""
    name = r"\w(?:[\w.-]*\w)?"
    return re.fullmatch(f"(?:{name}/)?{name}", value) is not None and not Path(value).exists()


def errors_of_datasets() -> tuple[type[Exception], ...]:
    """Return the errors that ``datasets`` raises without a network or dataset, or for wrong files or a wrong README."""
    import httpx
    import yaml
    from datasets.exceptions import DatasetsError

    wrong_content = (ValueError, KeyError, TypeError, AttributeError, IndexError, yaml.YAMLError)
    return (OSError, httpx.HTTPError, DatasetsError, RuntimeError, *wrong_content)


def hub_fault(option: str, value: str, error: Exception, is_folder: bool = False) -> InputError:
    """Return an error in one line for the ``value`` of ``option``.

    The class of ``error`` decides the text, since the hub's messages are long. ``is_folder`` says that
    ``value`` is a local folder, so that the hub is not mentioned.
    """
    classes = {base.__name__ for base in type(error).__mro__}  # by name: their modules are slow to import
    message = first_line(error)
    cause: BaseException = error
    if "DatasetGenerationError" in classes and error.__cause__:
        cause = error.__cause__
    if message == "Config name is missing.":
        subsets = ", ".join(re.findall(r"'([^']+)'", str(error).splitlines()[1]))
        return InputError(f"{option} {value}: it has several subsets; give one as NAME:SUBSET; it has {subsets}")
    if is_folder:
        return InputError(f"{option} {value}: {first_line(cause)}")
    is_missing = bool(classes & {"RepositoryNotFoundError", "DatasetNotFoundError"})
    is_unreachable = bool(classes & {"LocalEntryNotFoundError", "ConnectionError", "OfflineModeIsEnabled"})
    if "GatedRepoError" in classes or "is a gated dataset" in message:
        reason = "it is gated on the hub; accept its terms there and log in with `hf auth login`"
    elif message.startswith("Revision "):
        reason = f"the hub answers: {message}"
    elif is_missing and "reach" not in message:
        reason = "the hub has nothing of this name that this login can read"
    elif is_unreachable or "DatasetNotFoundError" in classes:  # its message says that the hub was not reached
        reason = (
            "the hub cannot be reached: no network, or HF_HUB_OFFLINE is set (docs/reference/errors.md#no-internet)"
        )
    else:
        reason = f"the hub answers: {first_line(cause)}"
    return InputError(f"{option} {value}: no such file or folder here, and {reason}")


@dataclass(frozen=True)
class RowRange:
    """Some rows of a split."""

    split: str
    start: int  # the first row; for a streamed split, the number of a shard
    stop: int  # the row after the last one; for a streamed split, the number of its shards
    num_bytes: int
    origin: int  # the number of the split


@dataclass(frozen=True)
class _SplitSource:
    """The base class of sources that are splits; ``FileSource`` describes the members of sources."""

    name: str
    splits: dict[str, Any]  # the splits that are read, by name

    @property
    def num_origins(self) -> int:
        return len(self.splits)

    def pack(self, parts: Iterable[Any]) -> Sequence[RowRange]:
        return tuple(parts)


@dataclass(frozen=True)
class DatasetSource(_SplitSource):
    """A save_to_disk folder ``root`` and its ``files``, or a dataset of the ``hub`` with its subset and commit."""

    root: Path = Path()
    files: ListedFiles = field(default_factory=ListedFiles)
    hub: DatasetName | None = None
    all_splits: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        note = f"splits read: {describe_splits(self.splits, self.all_splits)}"
        if self.hub:
            note += f", {self.hub.describe_version()}"
        return (note,)

    @property
    def num_bytes(self) -> int:
        return sum(dataset.data.nbytes for dataset in self.splits.values())

    def parts(self, part_bytes: int) -> Iterator[RowRange]:
        for origin, (split, dataset) in enumerate(self.splits.items()):
            bytes_per_row = max(1, dataset.data.nbytes // max(1, len(dataset)))
            num_rows = max(1, part_bytes // bytes_per_row)
            for start in range(0, len(dataset), num_rows):
                stop = min(start + num_rows, len(dataset))
                yield RowRange(split, start, stop, (stop - start) * bytes_per_row, origin)

    def reader(self, part: Any, columns: tuple[str, ...]) -> "RowReader":
        dataset = self.splits[part.split]
        place = f"{self.name} ({part.split})"
        all_names = dataset.column_names
        candidates = [name_in(column, all_names) for column in columns]
        names = [name for name in candidates if name in all_names]
        if not names:
            names = all_names  # the fault of each row will name the columns there are
        check_text_column(place, dataset.features.arrow_schema, columns[0])
        rows = dataset.select_columns(names).select(range(part.start, part.stop))
        return RowReader(rows, place, part, part.start, unread_columns=frozenset(all_names).difference(names))

    def identity(self, part: Any) -> str:
        return f"{self.splits[part.split]._fingerprint} {part.split} {part.start} {part.stop}"

    def record(self, digests: np.ndarray) -> SourceRecord:
        if self.hub:
            return _hub_record(self.hub, self.splits)
        files = hashed_files(self.root, self.files, digests)
        return SourceRecord(name=self.name, kind="saved_dataset", files=files, splits=tuple(self.splits), revision=None)


@dataclass(frozen=True)
class StreamSource(_SplitSource):
    """A dataset on the ``hub`` that is streamed without a copy on disk; a part is one of its files."""

    hub: DatasetName
    files: ListedFiles = field(default_factory=ListedFiles)
    all_splits: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        splits = describe_splits(self.splits, self.all_splits)
        return (f"splits streamed: {splits}, {self.hub.describe_version()}",)

    @property
    def num_bytes(self) -> int:
        return sum(dataset.info.dataset_size or 0 for dataset in self.splits.values())

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


def _hub_record(hub: DatasetName, splits: Mapping[str, Any]) -> SourceRecord:
    return SourceRecord(hub.name, "hub", files=(), splits=tuple(splits), revision=hub.revision, subset=hub.subset)


class RowReader:
    """An iterable over the rows of a dataset, see ``files.FileReader``; RunError if it cannot be read to the end."""

    def __init__(
        self,
        rows: "Dataset | IterableDataset",
        place: str,
        part: RowRange,
        first_row: int,
        unread_columns: frozenset[str] = frozenset(),
    ) -> None:
        self.position = 0
        self.num_counted = 0
        self.unread_columns = unread_columns
        self._rows = rows
        self._place = place
        self._part = part
        self._first_row = first_row
        self._nested: dict[str, pyarrow.DataType] | None = None  # types of the nested columns, once a row is read

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        number = 0
        num_rows = max(1, self._part.stop - self._part.start)
        for columns in self._batches():
            for values in zip(*columns.values(), strict=True):
                number += 1
                self.num_counted = number
                self.position = min(self._part.num_bytes, self._part.num_bytes * number // num_rows)
                row = dict(zip(columns, values, strict=True))
                yield number, self._without_filling(row)
        self.position = self._part.num_bytes

    def _without_filling(self, row: dict[str, Any]) -> Row:
        """Return the row with the keys that it had before it was in a table; ``datasets`` has already parsed JSON."""
        features = self._rows.features
        if features is None:  # of a stream whose files do not say what is in them
            return {name: without_nulls(value) for name, value in row.items()}
        if self._nested is None:
            schema = features.arrow_schema
            self._nested = nested_columns(schema, [name for name in row if name in schema.names])
        for name, kind in self._nested.items():
            row[name] = without_filling(row[name], kind, parses_json=False)
        return row

    def _batches(self) -> Iterator[Mapping[str, Sequence[Any]]]:
        try:
            yield from self._rows.iter(batch_size=256)
        except errors_of_datasets() as error:
            raise RunError(f"{self._place}: cannot be read completely: {first_line(error)}") from None

    def sha256(self) -> bytes:
        return NO_SHA256

    def place(self, number: int) -> str:
        return f"{self._place}, row {self._first_row + number}"


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` of ``datasets`` wrote a folder."""
    return any((folder / mark).is_file() for mark in _SAVED)


def open_saved(name: str, option: str, folder: Path, split: str | None) -> DatasetSource:
    """Open a ``save_to_disk`` folder that ``option`` names; InputError if it is incomplete, or has no such split."""
    import datasets

    from fabric_train.token_dataset.token_folder import check_listed_files

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    files = list_folder(folder, lambda _: True).files
    check_listed_files(folder, "save it again")
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise_if_limit_reached(error)
        raise InputError(
            f"{option} {name}: incomplete save_to_disk folder: {first_line(error)}; save it again"
        ) from None
    if isinstance(loaded, datasets.DatasetDict):
        all_splits = dict(loaded)
    else:  # one split, which may have no name
        all_splits = {str(loaded.split or "train"): loaded}
    splits = splits_to_read(name, option, all_splits, split)
    return DatasetSource(name, splits, root=folder, files=files, all_splits=tuple(map(str, all_splits)))


def open_hub(name: str, option: str, dataset: DatasetName, stream: bool) -> DatasetSource | StreamSource:
    """Open a hub dataset that ``option`` names, and download it unless it is streamed."""
    print(f"asking the hub for {name}", file=sys.stderr)
    builder = open_builder(name, option, dataset.name, dataset)
    data_files = builder.config.data_files or {}
    for path in chain.from_iterable(data_files.values()):
        if "://" not in path:
            raise InputError(
                f"{option} {name}: its README.md points to {path} on this machine; do not use this dataset"
            )
    try:
        if stream:
            loaded = builder.as_streaming_dataset()
        else:
            builder.download_and_prepare()
            loaded = builder.as_dataset()
    except errors_of_datasets() as error:
        raise hub_fault(option, name, error) from None
    splits = splits_to_read(name, option, loaded, dataset.split)
    hub = replace(dataset, subset=builder.config.name, revision=str(builder.hash))
    all_splits = tuple(map(str, loaded))
    if stream:
        return StreamSource(name, splits, hub, all_splits=all_splits)
    return DatasetSource(name, splits, hub=hub, all_splits=all_splits)


def open_builder(name: str, option: str, path: str, dataset: DatasetName) -> "DatasetBuilder":
    """Return the builder of a dataset on the hub or in the folder ``path``; InputError if there is no such dataset."""
    import datasets
    from huggingface_hub.utils import logging as huggingface_logging

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_logging.set_verbosity(huggingface_logging.CRITICAL)
    try:
        return datasets.load_dataset_builder(path, dataset.subset, revision=dataset.revision)
    except errors_of_datasets() as error:
        raise hub_fault(option, name, error, is_folder=os.path.isdir(path)) from None


def splits_to_read(name: str, option: str, splits: "Mapping[str, Any]", wanted: str | None) -> "dict[str, Any]":
    """Return the ``wanted`` splits, joined by +, which must exist; by default the splits for training."""
    splits_by_name = {str(split): rows for split, rows in splits.items()}
    if wanted is None:
        selected = train_splits(list(splits_by_name))
    else:
        selected = wanted.split("+")
    for split in selected:
        if split not in splits_by_name:
            raise InputError(f"{option} {name}: no split {split!r}; it has {', '.join(splits_by_name)}")
    return {split: splits_by_name[split] for split in selected}


def train_splits(names: Sequence[str]) -> list[str]:
    """Return the splits for training: train, or those such as train_sft, or those that are not held out, or all.

    A split such as train_gen has prompts for generating answers, as in HuggingFaceH4/ultrachat_200k.
    """
    if "train" in names:
        return ["train"]
    not_held_out = [name for name in names if re.split(r"[_.-]", name)[0].lower() not in _HELD_OUT]
    with_train = [name for name in not_held_out if name.lower().startswith("train")]
    with_answers = [name for name in with_train if not name.endswith("_gen")]
    for candidates in (with_answers, with_train, not_held_out):
        if candidates:
            return candidates
    return list(names)


def describe_splits(read_splits: Iterable[str], all_splits: Iterable[str]) -> str:
    """Return a sentence that says which splits are read and which are not."""
    names = list(read_splits)
    description = ", ".join(names)
    unread_names = [name for name in all_splits if name not in names]
    if unread_names:
        description += f"; not read: {', '.join(unread_names)} (give NAME::SPLIT to read one)"
    return description
