"""Open what --dataset names: files, folders, globs, URLs and datasets; each source yields its parts and their rows."""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fabric_train.cli.errors import InputError, first_line
from fabric_train.cli.output import redact
from fabric_train.cli.progress import ThrottledLog
from fabric_train.reading import hf_datasets
from fabric_train.reading import listing as listings
from fabric_train.reading.files import FileReader, is_readable, readable_suffixes, split_file
from fabric_train.token_dataset.manifest import SourceRecord

Item = TypeVar("Item")
Opened = TypeVar("Opened")
_MOST_LINKS_NAMED = 3
UNFINISHED_SUFFIX = ".part"  # the suffix of a file whose download has not finished
_NAMED = re.compile(r"(\w[\w.-]*)=(.+)", re.DOTALL)
_SHARD_OF_SPLIT = re.compile(r"(\w+)-\d{5}-of-\d{5}")  # as push_to_hub of datasets names files
_SUBSETS_IN_README = re.compile(r"\s*---\s*\n(?:(?!---).*\n)*?(?:configs|dataset_info):")


@dataclass(frozen=True)
class FileSource:
    """One or several local files; the manifest lists their paths relative to ``root``.

    All sources have the same members:

    - ``notes``: lines for the user.
    - ``files``: the local files of the source, as they were when it was opened.
    - ``num_origins``: the number of files or splits, in the order of ``record``; each part has its ``origin``, from 0.
    - ``num_bytes``: size of the source; 0 if it is unknown.
    - ``parts(part_bytes)``: yields the source's parts in order, each of about ``part_bytes`` bytes if its kind allows.
    - ``pack(parts)``: returns the parts in a form that needs little memory.
    - ``reader(part, columns)``: returns an iterable over the rows of a part.
    - ``identity(part)``: returns a string that changes if the part changes; None if there is no such string.
    - ``record(digests)``: returns the record for the manifest, with the SHA-256 of its files, uint8 [files, 32].
    """

    name: str
    root: Path
    files: listings.ListedFiles
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(self.files.sizes)

    @property
    def num_origins(self) -> int:
        return len(self.files)

    def parts(self, part_bytes: int) -> Iterator[listings.FilePart]:
        for number, file in enumerate(self.files):
            yield from split_file(file, part_bytes, number)

    def pack(self, parts: Iterable[Any]) -> Sequence[listings.FilePart]:
        return listings.PackedParts(self.files, parts)

    def reader(self, part: Any, columns: tuple[str, ...]) -> FileReader:
        return FileReader(part, columns)

    def identity(self, part: Any) -> str:
        file = part.file
        path = os.fsencode(os.path.join(os.getcwd(), file.name)).hex()  # a name need not be text
        return f"{path} {file.size} {file.mtime_ns} {file.ctime_ns} {part.start} {part.stop}"

    def record(self, digests: np.ndarray) -> SourceRecord:
        files = listings.hashed_files(self.root, self.files, digests)
        folder = None if "://" in self.name else os.fsencode(self.root).decode("utf-8", "backslashreplace")
        return SourceRecord(name=self.name, kind="files", files=files, splits=(), revision=None, folder=folder)


PartReader = FileReader | hf_datasets.RowReader
Source = FileSource | hf_datasets.DatasetSource | hf_datasets.StreamSource


def split_names(values: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Return the name and the place (path, pattern, URL or hub name) of each source in ``option``.

    The text before the first ``=`` is a name if it consists of letters, digits and ``_.-``. So a path that begins like
    a name is written with ``./`` before it. Without a name, the place without its secrets is the name. Sources with the
    same name are one source. InputError if NAME=PLACE is also an existing path, or if the name is ``all``, which means
    all sources wherever losses are shown by source.
    """
    faults: list[str] = []
    sources: list[tuple[str, str]] = []
    for value in values:
        match = _NAMED.fullmatch(value)
        if match is None:
            name = redact(value)
            place = value
        else:
            name = match[1]
            place = match[2]
            if _is_path_or_pattern(value):
                faults.append(
                    f"{option} {value}: ambiguous, since it is a path and could also be {place} with the name "
                    f"{name}; give ./{value} for the path"
                )
        if name == "all":
            faults.append(
                f"{option} {value}: the name all is reserved for the losses of all sources together; give another "
                f"NAME={place}"
            )
        sources.append((name, place))
    if faults:
        raise InputError(*faults)
    return sources


def _is_path_or_pattern(value: str) -> bool:
    """Return whether a path exists, or a pattern matches one."""
    if os.path.lexists(value):
        return True
    return glob.has_magic(value) and any(glob.iglob(value))


def place_of(value: str) -> str:
    """Return the place of a source that :func:`split_names` has accepted."""
    match = _NAMED.fullmatch(value)
    if match is None:
        return value
    return match[2]


def open_each(open_item: Callable[[Item], Opened], items: Iterable[Item]) -> list[Opened]:
    """Return the result of ``open_item`` for each item; an InputError has the faults of all items, each once."""
    opened_items: list[Opened] = []
    faults: dict[str, None] = {}
    for item in items:
        try:
            opened_items.append(open_item(item))
        except InputError as error:
            faults |= dict.fromkeys(error.faults)
    if faults:
        raise InputError(*faults)
    return opened_items


def open_sources(names: list[str], option: str, stream: bool, downloads: Path) -> list[Source]:
    """Open every source in ``option``; the files of URLs are saved in ``downloads``.

    Raises an InputError with a line for each fault.
    """
    return open_each(lambda name: _open_source(name, option, stream, downloads), names)


def _open_source(name: str, option: str, stream: bool, downloads: Path) -> Source:
    """Open what a name means: a URL, a folder, a file, a part of a folder, a pattern, or a dataset on the hub."""
    if "://" in name:
        return _open_url(name, option, downloads)

    # what is there under this name
    path = Path(name).expanduser()
    if path.is_dir():
        if hf_datasets.is_saved(path):
            return hf_datasets.open_saved(name, option, path, split=None)
        if _is_copy_of_hub(path):
            dataset = hf_datasets.DatasetName(str(path), subset=None, split=None, revision=None)
            return _open_part_of_folder(name, option, dataset)
        return _open_files(name, option, "this folder", path, listings.list_folder(path, _is_document))
    if os.path.lexists(path):
        file = listings.list_file(path)
        if not is_readable(path):
            raise InputError(
                f"{option} {name}: cannot read {path.suffix or 'a file without suffix'}; "
                f"supported formats: {readable_suffixes()}"
            )
        return FileSource(name=name, root=path.parent, files=listings.ListedFiles([file]))

    # FOLDER:SUBSET:SPLIT
    parsed_name = hf_datasets.parse_dataset_name(name)
    if parsed_name and Path(parsed_name.name).expanduser().is_dir():
        return _open_part_of_folder(name, option, parsed_name)

    if glob.has_magic(name):
        # a README is read if the pattern names it
        is_wanted = is_readable if listings.is_about_data(name) else _is_document
        listing = listings.list_pattern(os.path.expanduser(name), is_wanted)
        folders = {os.path.dirname(file.name) for file in listing.files}
        root = Path(os.path.commonpath(folders)) if folders else Path()
        return _open_files(name, option, "this pattern", root, listing)

    check_name(name, option)
    assert parsed_name is not None, "check_name has found it to be a hub name"
    return hf_datasets.open_hub(name, option, parsed_name, stream)


def check_name(name: str, option: str) -> None:
    """Raise an InputError if a name is no file, folder, pattern or URL, and cannot be a hub name; open nothing."""
    if "://" in name or glob.has_magic(name) or os.path.lexists(Path(name).expanduser()):
        return
    dataset = hf_datasets.parse_dataset_name(name)
    if dataset and Path(dataset.name).expanduser().is_dir():
        return
    if dataset is None or is_readable(Path(dataset.name)) or not hf_datasets.is_hub_name(dataset.name):
        raise InputError(f"{option} {name}: no such file or folder; give a path that exists, or a hub name")


def _is_document(path: str) -> bool:
    return is_readable(path) and not listings.is_about_data(path)


def _open_files(name: str, option: str, description: str, root: Path, listing: listings.Listing) -> FileSource:
    """Return a source of listed files, with notes about skipped ones; InputError if there is no file to read.

    ``description`` describes what was listed.
    """
    num_skipped = listing.others.total()
    if not listing.files:
        others = f", only {num_skipped:,} in other formats" if num_skipped else ""
        raise InputError(
            f"{option} {name}: no readable file in {description}{others}; supported formats: {readable_suffixes()}"
        )
    notes: list[str] = []
    if num_skipped:
        kinds = sorted(listing.others)
        counts = ", ".join(f"{listing.others[kind]:,} {kind}" for kind in kinds)
        note = f"skipping {num_skipped:,} files of other kinds ({counts})"
        files_about_data = [kind for kind in kinds if listings.is_about_data(kind)]
        if files_about_data:
            note += f"; to read a {files_about_data[0]}, name it in {option}"
        notes.append(note)
    if listing.repeated:
        links = ", ".join(listing.repeated[:_MOST_LINKS_NAMED])
        if len(listing.repeated) > _MOST_LINKS_NAMED:
            links += f" and {len(listing.repeated) - _MOST_LINKS_NAMED} more"
        notes.append(f"skipping links to folders that are already read under another path: {links}")
    return FileSource(name=name, root=root, files=listing.files, notes=tuple(notes))


def _is_copy_of_hub(folder: Path) -> bool:
    """Return whether a folder has subsets and splits like a hub dataset, in its README.md or as file names."""
    # data/train-00000-of-00002.parquet and data/test-00000-of-00001.parquet: not all splits are read
    splits: set[str] = set()
    for shard in (folder / "data").glob("*-of-*"):
        match = _SHARD_OF_SPLIT.match(shard.name)
        if match:
            splits.add(match[1])
    if splits and len(hf_datasets.train_splits(sorted(splits))) < len(splits):
        return True
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    with readme.open(encoding="utf-8-sig", errors="replace") as file:
        return _SUBSETS_IN_README.match(file.read(1 << 20)) is not None


def _open_part_of_folder(name: str, option: str, dataset: hf_datasets.DatasetName) -> Source:
    """Open a split of a save_to_disk folder, or a subset or split of a copy of a hub dataset, whose files are read."""
    folder = Path(dataset.name).expanduser().resolve()
    if dataset.revision:
        raise InputError(f"{option} {name}: a folder has no revisions; leave out @{dataset.revision}")
    if hf_datasets.is_saved(folder):
        if dataset.subset:
            raise InputError(f"{option} {name}: a save_to_disk folder has no subsets; give NAME::SPLIT")
        return hf_datasets.open_saved(name, option, folder, dataset.split)

    # the files of the splits, which the README.md of a stranger may name
    builder = hf_datasets.open_builder(name, option, str(folder), dataset)
    data_files = builder.config.data_files or {}
    paths_by_split = hf_datasets.splits_to_read(name, option, data_files, dataset.split)
    paths = [Path(path) for path in chain.from_iterable(paths_by_split.values())]
    for path in paths:
        if not path.is_relative_to(folder) or ".." in path.parts:
            raise InputError(f"{option} {name}: its README.md names {path}, which is not in the folder; fix README.md")
        if not is_readable(path):
            raise InputError(f"{option} {name}: cannot read {path.name}; supported formats: {readable_suffixes()}")
    files = listings.ListedFiles(map(listings.list_file, paths))
    splits = hf_datasets.describe_splits(paths_by_split, map(str, data_files))
    notes = (f"subset {builder.config.name}, splits read: {splits}",)
    return FileSource(name=name, root=folder, files=files, notes=notes)


def _open_url(url: str, option: str, folder: Path) -> FileSource:
    """Download the file, or the readable files of a pattern, into ``folder``, unless they are there.

    Processes can then read parts of one file, it can be hashed, and a restart need not download it again.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        file_system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{option} {url}: {error}; install the packages with pip install 'fabric-train[remote]'"
        ) from None
    try:
        # the files that the URL names
        possible_pattern = path
        if url.startswith("http"):  # in a web address, ? begins the query and is no pattern
            possible_pattern, _, _ = path.partition("?")
        paths = [path]
        if glob.has_magic(possible_pattern):
            paths = sorted(file_system.glob(path))
            if not listings.is_about_data(url):  # a README is read if the pattern names it
                paths = [path for path in paths if not listings.is_about_data(path)]
        readable_paths = [path for path in paths if is_readable(_file_name(path))]
        if not readable_paths:
            raise InputError(f"{option} {url}: no readable file; supported formats: {readable_suffixes()}")

        downloads = (_fetch(file_system, path, folder) for path in readable_paths)
        files = listings.ListedFiles(map(listings.list_file, downloads))
    except OSError as error:
        raise InputError(f"{option} {url}: cannot be downloaded: {_reason(error, url)}") from None
    return FileSource(name=redact(url), root=folder, files=files)


def _fetch(file_system: Any, path: str, folder: Path) -> Path:
    """Download a file, unless this version of it is there, and return where it is."""
    # the name has a hash of what changes with the content
    details = file_system.info(path)
    version = f"{path} {details.get('size')} {details.get('ETag') or details.get('mtime') or ''}"
    version_hash = hashlib.sha256(version.encode()).hexdigest()[:16]
    target = folder / f"{version_hash}-{_file_name(path)}"
    if target.exists():
        return target

    # renamed when complete
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}{UNFINISHED_SUFFIX}")
    log = ThrottledLog()
    with file_system.open(path, "rb") as remote_file, unfinished.open("wb") as local_file:
        while piece := remote_file.read(1 << 22):
            local_file.write(piece)
            log(f"downloading {redact(path)}: {local_file.tell() / 1e6:,.0f} MB")
    unfinished.rename(target)
    return target


def _file_name(path: str) -> str:
    """Return the name of a file, without the query of a web address."""
    return Path(path.partition("?")[0]).name


def _reason(error: BaseException, url: str) -> str:
    """Return why a file cannot be fetched; most of fsspec's errors only repeat the address, their causes say why."""
    reason = first_line(error)
    if not url.endswith(reason):
        return reason
    if error.__cause__ is None:
        return "no such file"
    return _reason(error.__cause__, url)
