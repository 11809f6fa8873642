"""What --dataset names, as a stream of documents: a file, a folder of files, a save_to_disk folder, a hub dataset."""

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train.corpus.files import READERS, check_text, is_text_type, missing_column, not_text, read_documents
from fabric_train.corpus.hub import hub_fault, is_hub_name
from fabric_train.corpus.manifest import SourceFile, SourceRecord
from fabric_train.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset

_SAVED = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class FileSource:
    """A file, or the files of a folder and its subfolders in the order of their names; hidden ones are not read.

    ``notes`` are lines for the user: which files were passed over.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    def documents(self, text_column: str) -> Iterator[str | None]:
        """Yield every document, None where there is none; see ``read_documents`` for what is raised."""
        for path in self.files:
            yield from read_documents(path, text_column)

    def record(self) -> SourceRecord:
        """Return what the manifest says of this source; reads every file once for its hash."""
        return SourceRecord(
            name=self.name, kind="files", files=hash_files(self.root, self.files), splits=(), revision=None
        )


@dataclass(frozen=True)
class DatasetSource:
    """A dataset of the ``datasets`` library: its train split where there is one, otherwise all its splits."""

    name: str
    splits: "dict[str, Dataset]"
    root: Path | None

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user: which splits are read."""
        return (f"splits read: {', '.join(self.splits)}",)

    def documents(self, text_column: str) -> Iterator[str | None]:
        """Yield every document, None where there is none.

        Raises:
            InputError: the column is missing or does not hold text.
        """
        for split, dataset in self.splits.items():
            place = f"{self.name} ({split})"
            if text_column not in dataset.column_names:
                raise missing_column(place, text_column, dataset.column_names)
            column_type = dataset.features.arrow_schema.field(text_column).type
            if not is_text_type(column_type):
                raise not_text(place, text_column, column_type)
            for batch in dataset.select_columns(text_column).iter(batch_size=256):
                yield from (check_text(text, text_column, place) for text in batch[text_column])

    def record(self) -> SourceRecord:
        """Return what the manifest says of this source: a folder by its files, a hub dataset by its fingerprints."""
        splits = tuple(self.splits)
        if self.root is None:
            revision = " ".join(dataset._fingerprint for dataset in self.splits.values())
            return SourceRecord(name=self.name, kind="hub", files=(), splits=splits, revision=revision)
        files = hash_files(self.root, sorted(path for path in self.root.rglob("*") if path.is_file()))
        return SourceRecord(name=self.name, kind="saved_dataset", files=files, splits=splits, revision=None)


Source = FileSource | DatasetSource


def open_sources(names: list[str]) -> list[Source]:
    """Find every source, in the order given.

    Raises:
        InputError: one line for each name that leads nowhere.
    """
    sources: list[Source] = []
    faults: list[str] = []
    for name in names:
        try:
            sources.append(_open(name))
        except InputError as error:
            faults += error.faults
    if faults:
        raise InputError(*faults)
    return sources


def _open(name: str) -> Source:
    path = Path(name).expanduser()
    if path.is_dir():
        if any((path / mark).is_file() for mark in _SAVED):
            return _open_saved(name, path)
        return _open_folder(name, path)
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise InputError(
                f"--dataset {name}: cannot read {path.suffix or 'a file without suffix'}; readable are {_readable()}"
            )
        return FileSource(name=name, root=path.parent, files=(path,), notes=())
    if path.suffix.lower() in READERS or not is_hub_name(name):
        raise InputError(f"--dataset {name}: no such file or folder")
    return _open_hub(name)


def _open_folder(name: str, folder: Path) -> FileSource:
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    found.sort(key=lambda path: path.relative_to(folder).parts)
    files = tuple(path for path in found if path.suffix.lower() in READERS)
    unread = Counter(path.suffix or "no suffix" for path in found if path.suffix.lower() not in READERS)
    if not files:
        raise InputError(
            f"--dataset {name}: no readable file in this folder of {len(found)} files; readable are {_readable()}"
        )
    listed = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(unread.items()))
    notes = (f"{unread.total():,} files of other kinds are passed over ({listed})",) if unread else ()
    return FileSource(name=name, root=folder, files=files, notes=notes)


def _open_saved(name: str, folder: Path) -> DatasetSource:
    import datasets

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--dataset {name}: not a whole save_to_disk folder: {_first_line(error)}") from None
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    return DatasetSource(name=name, splits=_choose(splits), root=folder)


def _open_hub(name: str) -> DatasetSource:
    import datasets
    from huggingface_hub.utils import logging as huggingface_logging

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_logging.set_verbosity(huggingface_logging.CRITICAL)
    print(f"asking the hub for {name}", file=sys.stderr)
    try:
        loaded = datasets.load_dataset(name)
    except (OSError, ValueError) as error:
        raise hub_fault("--dataset", name, error) from None
    return DatasetSource(name=name, splits=_choose(loaded), root=None)


def _choose(splits: "dict[str, Dataset]") -> "dict[str, Dataset]":
    return {"train": splits["train"]} if "train" in splits else dict(splits)


def hash_files(root: Path, files: list[Path] | tuple[Path, ...]) -> tuple[SourceFile, ...]:
    """Return name beneath ``root``, size in bytes and SHA-256 of each file, read in pieces."""
    return tuple(SourceFile(path.relative_to(root).as_posix(), path.stat().st_size, sha256(path)) for path in files)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _readable() -> str:
    return ", ".join(READERS)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
