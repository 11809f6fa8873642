"""Open what --dataset names: files, folders, globs, URLs and datasets; each source yields its parts and their rows."""

import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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

Given = TypeVar("Given")
Opened = TypeVar("Opened")
UNFINISHED_SUFFIX = ".part"  # the suffix of a file whose download has not finished
_NAMED = re.compile(r"(\w[\w.-]*)=(.+)", re.DOTALL)
_SHARD_OF_SPLIT = re.compile(r"(\w+)-\d{5}-of-\d{5}")  # as push_to_hub of datasets names files
_SUBSETS_IN_README = re.compile(r"\s*---\s*\n(?:(?!---).*\n)*?(?:configs|dataset_info):")


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


def split_names(given: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Return the name and the place (path, pattern, URL or hub name) of each source that ``option`` gives.

    The text before the first ``=`` is a name if it consists of letters, digits and ``_.-``. So a path that begins like
    a name is written with ``./`` before it. Without a name, the place without its secrets is the name. Sources of one
    name are one source. InputError if NAME=PLACE is also a path that exists; or the name is ``all``, which means all
    sources wherever losses are shown by source.
    """
    faults = []
    named = []
    for value in given:
        found = _NAMED.fullmatch(value)
        if found and (os.path.lexists(value) or (glob.has_magic(value) and next(glob.iglob(value), None))):
            faults.append(f"{option} {value}: a path, and also {found[2]} with the name {found[1]}; give ./{value}")
        name, place = (found[1], found[2]) if found else (redact(value), value)
        if name == "all":
            faults.append(f"{option} {value}: losses of all sources together have the name all; give NAME={place}")
        named.append((name, place))
    if faults:
        raise InputError(*faults)
    return named


def place_of(value: str) -> str:
    """Return the place of a source that was accepted by :func:`split_names`."""
    found = _NAMED.fullmatch(value)
    return found[2] if found else value


def open_each(open_one: Callable[[Given], Opened], given: Iterable[Given]) -> list[Opened]:
    """Return an opened source for each thing given; an InputError has the faults of all, each once."""
    opened: list[Opened] = []
    faults: dict[str, None] = {}
    for one in given:
        try:
            opened.append(open_one(one))
        except InputError as error:
            faults |= dict.fromkeys(error.faults)
    if faults:
        raise InputError(*faults)
    return opened


def open_sources(names: list[str], option: str, stream: bool, downloads: Path) -> list[Source]:
    """Open every source of ``option``; files of URLs come into ``downloads``. InputError with a line for each fault."""
    return open_each(lambda name: _open(name, option, stream, downloads), names)


def _open(name: str, option: str, stream: bool, downloads: Path) -> Source:
    if "://" in name:
        return _open_url(name, option, downloads)
    path = Path(name).expanduser()
    if path.is_dir():
        if hf_datasets.is_saved(path):
            return hf_datasets.open_saved(name, option, path, None)
        if _is_copy_of_hub(path):
            return _open_part_of_folder(name, option, hf_datasets.DatasetName(str(path), None, None, None))
        return _of_files(name, option, "this folder", path, listings.list_folder(path, _is_document))
    if os.path.lexists(path):
        file = listings.list_file(path)
        if not is_readable(path):
            raise InputError(
                f"{option} {name}: cannot read {path.suffix or 'a file without suffix'}; "
                f"readable are {readable_suffixes()}"
            )
        return FileSource(name=name, root=path.parent, files=listings.ListedFiles([file]))
    dataset = hf_datasets.parse_dataset_name(name)
    if dataset and Path(dataset.name).expanduser().is_dir():
        return _open_part_of_folder(name, option, dataset)
    if glob.has_magic(name):
        is_wanted = is_readable if listings.is_about_data(name) else _is_document
        listing = listings.list_pattern(os.path.expanduser(name), is_wanted)
        folders = {os.path.dirname(file.name) for file in listing.files}
        root = Path(os.path.commonpath(folders)) if folders else Path()
        return _of_files(name, option, "what this pattern names", root, listing)
    check_name(name, option)
    assert dataset is not None
    return hf_datasets.open_hub(name, option, dataset, stream)


def check_name(name: str, option: str) -> None:
    """Raise an InputError if a name is no file, folder, pattern or URL, and cannot be a hub name. Nothing is opened."""
    if "://" in name or glob.has_magic(name) or os.path.lexists(Path(name).expanduser()):
        return
    dataset = hf_datasets.parse_dataset_name(name)
    if dataset and Path(dataset.name).expanduser().is_dir():
        return
    if dataset is None or is_readable(Path(dataset.name)) or not hf_datasets.is_hub_name(dataset.name):
        raise InputError(f"{option} {name}: no such file or folder; give a path that exists, or a hub name")


def _is_document(path: str) -> bool:
    return is_readable(path) and not listings.is_about_data(path)


def _of_files(name: str, option: str, where: str, root: Path, listing: listings.Listing) -> FileSource:
    num_others = listing.others.total()
    if not listing.files:
        raise InputError(
            f"{option} {name}: no readable file in {where} of {num_others} files; readable are {readable_suffixes()}"
        )
    notes = []
    if num_others:
        listed = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(listing.others.items()))
        about = next((kind for kind in sorted(listing.others) if listings.is_about_data(kind)), None)
        more = f"; a {about} is read if {option} names it" if about else ""
        notes.append(f"{num_others:,} files of other kinds are skipped ({listed}){more}")
    if listing.repeated:
        more = f" and {len(listing.repeated) - 3} more" if len(listing.repeated) > 3 else ""
        links = ", ".join(listing.repeated[:3]) + more
        notes.append(f"links to folders that are read under another path are skipped: {links}")
    return FileSource(name=name, root=root, files=listing.files, notes=tuple(notes))


def _is_copy_of_hub(folder: Path) -> bool:
    """Return whether a folder has subsets and splits as datasets on the hub do: in its README.md, or as file names."""
    shards = (_SHARD_OF_SPLIT.match(file.name) for file in (folder / "data").glob("*-of-*"))
    splits = {shard[1] for shard in shards if shard}
    if splits and len(hf_datasets.train_splits(sorted(splits))) < len(splits):
        return True
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    with readme.open(encoding="utf-8-sig", errors="replace") as file:
        return _SUBSETS_IN_README.match(file.read(1 << 20)) is not None


def _open_part_of_folder(name: str, option: str, dataset: hf_datasets.DatasetName) -> Source:
    """Open a split of a save_to_disk folder, or as files, which stay unchanged, a part of a copy of a hub dataset."""
    folder = Path(dataset.name).expanduser().resolve()
    if dataset.revision:
        raise InputError(f"{option} {name}: a folder has no revisions; leave out @{dataset.revision}")
    if hf_datasets.is_saved(folder):
        if dataset.subset:
            raise InputError(f"{option} {name}: a save_to_disk folder has no subsets; give NAME::SPLIT")
        return hf_datasets.open_saved(name, option, folder, dataset.split)
    builder = hf_datasets.open_builder(name, option, str(folder), dataset)
    data_files = builder.config.data_files or {}
    by_split = hf_datasets.splits_to_read(name, option, data_files, dataset.split)
    paths = [Path(path) for paths in by_split.values() for path in paths]
    for path in paths:
        if not path.is_relative_to(folder) or ".." in path.parts:
            raise InputError(f"{option} {name}: its README.md names {path}, which is not in the folder; correct it")
        if not is_readable(path):
            raise InputError(f"{option} {name}: cannot read {path.name}; readable are {readable_suffixes()}")
    splits = hf_datasets.describe_splits(by_split, map(str, data_files))
    notes = (f"subset {builder.config.name}, splits read: {splits}",)
    return FileSource(name=name, root=folder, files=listings.ListedFiles(map(listings.list_file, paths)), notes=notes)


def _open_url(url: str, option: str, folder: Path) -> FileSource:
    """Download the file, or the readable files of a pattern, into ``folder``, unless they are there.

    Then processes can read parts of one file, it can be hashed, and a restart need not download it again.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(f"{option} {url}: {error}; pip install 'fabric-train[remote]' has the packages") from None
    try:
        is_web = url.startswith("http")  # in a web address, ? begins the query and is no pattern
        is_pattern = glob.has_magic(path.partition("?")[0] if is_web else path)
        paths = sorted(system.glob(path)) if is_pattern else [path]
        named = [
            path for path in paths if not is_pattern or listings.is_about_data(url) or not listings.is_about_data(path)
        ]
        readable = [path for path in named if is_readable(_name(path))]
        if not readable:
            raise InputError(f"{option} {url}: no readable file there; readable are {readable_suffixes()}")
        files = listings.ListedFiles(listings.list_file(_fetch(system, path, folder)) for path in readable)
    except OSError as error:
        raise InputError(f"{option} {url}: cannot be fetched: {_reason(error, url)}") from None
    return FileSource(name=redact(url), root=folder, files=files)


def _fetch(system: Any, path: str, folder: Path) -> Path:
    details = system.info(path)
    version = f"{path} {details.get('size')} {details.get('ETag') or details.get('mtime') or ''}"
    target = folder / f"{hashlib.sha256(version.encode()).hexdigest()[:16]}-{_name(path).name}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}{UNFINISHED_SUFFIX}")
    log = ThrottledLog()
    with system.open(path, "rb") as remote, part.open("wb") as local:
        while piece := remote.read(1 << 22):
            local.write(piece)
            log(f"fetching {redact(path)}: {local.tell() / 1e6:,.0f} MB")
    part.rename(target)
    return target


def _name(path: str) -> Path:
    return Path(Path(path.split("?")[0]).name)


def _reason(error: BaseException, url: str) -> str:
    """Return why a file cannot be fetched: most of fsspec's errors only repeat the address, and their cause says it."""
    reason = first_line(error)
    if not url.endswith(reason):
        return reason
    return "there is no such file" if error.__cause__ is None else _reason(error.__cause__, url)
