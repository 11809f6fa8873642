"""Open what --dataset names: files, folders, globs, URLs, save_to_disk folders, datasets on the hub."""

import glob
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.cli.output import redact
from fabric_train.tokenization.reading.files import is_readable, readable_suffixes
from fabric_train.tokenization.reading.listing import (
    ListedFiles,
    Listing,
    is_about_data,
    list_file,
    list_folder,
    list_pattern,
)
from fabric_train.tokenization.reading.sources import (
    DatasetName,
    DatasetSource,
    FileSource,
    Source,
    StreamSource,
    errors_of_datasets,
    hub_fault,
    is_hub_name,
    parse_dataset_name,
)
from fabric_train.tokenization.workers import ThrottledLog

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_NAMED = re.compile(r"(\w[\w.-]*)=(.+)", re.DOTALL)
PART = ".part"
"""The suffix of a file whose download has not finished."""
_SAVED = ("dataset_dict.json", "state.json")
_SUBSETS_IN_README = re.compile(r"\s*---\s*\n(?:(?!---).*\n)*?(?:configs|dataset_info):")


def split_names(given: Sequence[str], option: str) -> list[tuple[str, str]]:
    """Return the name and the place (path, pattern, URL or hub name) of each source that ``option`` gives.

    What is before the first ``=`` is a name if it consists of letters, digits and ``_.-``. So a path that begins like a
    name is written with ``./`` before it. Without a name, the place without its secrets is the name. Sources of one
    name are one source.

    Raises:
        InputError: what is given as a whole is a path that exists, so that it is not known what is meant; or the name
            is ``all``, which is that of the whole wherever losses are shown by source.
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


def download(url: str, option: str, folder: Path) -> tuple[Path, ...]:
    """Download the file, or the readable files that a URL with a pattern names, into ``folder``.

    Files are downloaded before they are read, so that several processes can read parts of one file, the file can be
    hashed, and a restart does not download it again. A file that is in ``folder`` already is not downloaded.

    Args:
        url: of one file, or with a glob pattern.
        option: the command-line option that gives it, for error messages.
        folder: made if it does not exist.

    Returns:
        The local files.

    Raises:
        InputError: the protocol's package is not installed, there is no readable file, or the download fails.
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
        named = [path for path in paths if not is_pattern or is_about_data(url) or not is_about_data(path)]
        readable = [path for path in named if is_readable(_name(path))]
        if not readable:
            raise InputError(f"{option} {url}: no readable file there; readable are {readable_suffixes()}")
        return tuple(_fetch(system, path, folder) for path in readable)
    except OSError as error:
        raise InputError(f"{option} {url}: cannot be fetched: {_reason(error, url)}") from None


def _reason(error: BaseException, url: str) -> str:
    """Return why a file cannot be fetched: most of fsspec's errors only repeat the address, and their cause says it."""
    reason = first_line(error)
    if not url.endswith(reason):
        return reason
    return "there is no such file" if error.__cause__ is None else _reason(error.__cause__, url)


def _fetch(system: Any, path: str, folder: Path) -> Path:
    details = system.info(path)
    version = f"{path} {details.get('size')} {details.get('ETag') or details.get('mtime') or ''}"
    target = folder / f"{hashlib.sha256(version.encode()).hexdigest()[:16]}-{_name(path).name}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}{PART}")
    log = ThrottledLog()
    with system.open(path, "rb") as remote, part.open("wb") as local:
        while piece := remote.read(1 << 22):
            local.write(piece)
            log(f"fetching {redact(path)}: {local.tell() / 1e6:,.0f} MB")
    part.rename(target)
    return target


def _name(path: str) -> Path:
    """Return a remote path's file name, without a query."""
    return Path(Path(path.split("?")[0]).name)


def open_sources(names: list[str], option: str, stream: bool, downloads: Path) -> list[Source]:
    """Open every source, in the order of ``names``.

    Args:
        names: files, folders, globs, URLs, save_to_disk folders or hub names; of the last two and of a folder that is a
            copy of a hub dataset, also a part as ``NAME:SUBSET:SPLIT@REVISION``.
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
        if _is_saved(path):
            return _open_saved(name, option, path, None)
        if _is_copy_of_hub(path):
            return _open_part_of_folder(name, option, DatasetName(str(path), None, None, None))
        return _of_files(name, option, "this folder", path, list_folder(path, _is_document))
    if os.path.lexists(path):
        file = list_file(path)
        if not is_readable(path):
            raise InputError(
                f"{option} {name}: cannot read {path.suffix or 'a file without suffix'}; "
                f"readable are {readable_suffixes()}"
            )
        return FileSource(name=name, root=path.parent, files=ListedFiles([file]))
    dataset = parse_dataset_name(name)
    if dataset and Path(dataset.name).expanduser().is_dir():
        return _open_part_of_folder(name, option, dataset)
    if glob.has_magic(name):
        is_wanted = is_readable if is_about_data(name) else _is_document
        listing = list_pattern(os.path.expanduser(name), is_wanted)
        folders = {os.path.dirname(file.name) for file in listing.files}
        root = Path(os.path.commonpath(folders)) if folders else Path()
        return _of_files(name, option, "what this pattern names", root, listing)
    if dataset is None or is_readable(Path(dataset.name)) or not is_hub_name(dataset.name):
        raise InputError(f"{option} {name}: no such file or folder; give a path that exists, or a hub name")
    return _open_hub(name, option, dataset, stream)


def _of_files(name: str, option: str, where: str, root: Path, listing: Listing) -> FileSource:
    num_others = listing.others.total()
    if not listing.files:
        raise InputError(
            f"{option} {name}: no readable file in {where} of {num_others} files; readable are {readable_suffixes()}"
        )
    notes = []
    if num_others:
        listed = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(listing.others.items()))
        about = next((kind for kind in sorted(listing.others) if is_about_data(kind)), None)
        more = f"; a {about} is read if {option} names it" if about else ""
        notes.append(f"{num_others:,} files of other kinds are skipped ({listed}){more}")
    if listing.repeated:
        more = f" and {len(listing.repeated) - 3} more" if len(listing.repeated) > 3 else ""
        links = ", ".join(listing.repeated[:3]) + more
        notes.append(f"links to folders that are read under another path are skipped: {links}")
    return FileSource(name=name, root=root, files=listing.files, notes=tuple(notes))


def _is_document(path: str) -> bool:
    return is_readable(path) and not is_about_data(path)


def _is_copy_of_hub(folder: Path) -> bool:
    """Return whether a folder's README.md lists subsets and splits, as those of datasets on the hub do."""
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    with readme.open(encoding="utf-8-sig", errors="replace") as file:
        return _SUBSETS_IN_README.match(file.read(1 << 20)) is not None


def _open_url(name: str, option: str, downloads: Path) -> FileSource:

    files = ListedFiles(map(list_file, download(name, option, downloads)))
    return FileSource(name=redact(name), root=downloads, files=files)


def _is_saved(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _SAVED)


def _open_saved(name: str, option: str, folder: Path, split: str | None) -> DatasetSource:
    import datasets

    from fabric_train.tokenization.packing.token_folder import check_listed_files

    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    files = list_folder(folder, lambda _: True).files
    check_listed_files(folder, "save it again")
    try:
        loaded = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise_reached_limit(error)
        raise InputError(
            f"{option} {name}: not a whole save_to_disk folder: {first_line(error)}; save it again"
        ) from None
    splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
    return DatasetSource(name, _splits_to_read(name, option, splits, split), root=folder, files=files)


def _open_part_of_folder(name: str, option: str, dataset: DatasetName) -> DatasetSource | FileSource:
    """Open a split of a save_to_disk folder, or the files of a subset and split of a copy of a hub dataset.

    The latter are read as files, because the loaders of ``datasets`` change documents (see ``files``).
    """
    folder = Path(dataset.name).expanduser().resolve()
    if dataset.revision:
        raise InputError(f"{option} {name}: a folder has no revisions; leave out @{dataset.revision}")
    if _is_saved(folder):
        if dataset.subset:
            raise InputError(f"{option} {name}: a save_to_disk folder has no subsets; give NAME::SPLIT")
        return _open_saved(name, option, folder, dataset.split)
    builder = _builder(name, option, str(folder), dataset)
    by_split = _splits_to_read(name, option, builder.config.data_files or {}, dataset.split)
    paths = [Path(path) for paths in by_split.values() for path in paths]
    for path in paths:
        if not path.is_relative_to(folder) or ".." in path.parts:
            raise InputError(f"{option} {name}: its README.md names {path}, which is not in the folder; correct it")
        if not is_readable(path):
            raise InputError(f"{option} {name}: cannot read {path.name}; readable are {readable_suffixes()}")
    notes = (f"subset {builder.config.name}, splits read: {', '.join(by_split)}",)
    return FileSource(name=name, root=folder, files=ListedFiles(map(list_file, paths)), notes=notes)


def _open_hub(name: str, option: str, dataset: DatasetName, stream: bool) -> DatasetSource | StreamSource:
    print(f"asking the hub for {name}", file=sys.stderr)
    builder = _builder(name, option, dataset.name, dataset)
    for path in [path for paths in (builder.config.data_files or {}).values() for path in paths]:
        if "://" not in path:
            raise InputError(f"{option} {name}: its README.md names {path} on this machine; do not use it")
    try:
        if stream:
            loaded = builder.as_streaming_dataset()
        else:
            builder.download_and_prepare()
            loaded = builder.as_dataset()
    except errors_of_datasets() as error:
        raise hub_fault(option, name, error) from None
    splits = _splits_to_read(name, option, loaded, dataset.split)
    hub = replace(dataset, subset=builder.config.name, revision=str(builder.hash))
    return StreamSource(name, splits, hub) if stream else DatasetSource(name, splits, hub=hub)


def _builder(name: str, option: str, path: str, dataset: DatasetName) -> "DatasetBuilder":
    """Return what loads a dataset from the hub or a folder.

    Raises:
        InputError: there is no such dataset, subset or revision.
    """
    import datasets
    from huggingface_hub.utils import logging as huggingface_logging

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_logging.set_verbosity(huggingface_logging.CRITICAL)
    try:
        return datasets.load_dataset_builder(path, dataset.subset, revision=dataset.revision)
    except errors_of_datasets() as error:
        raise hub_fault(option, name, error, is_folder=os.path.isdir(path)) from None


def _splits_to_read(name: str, option: str, splits: "Mapping[str, Any]", wanted: str | None) -> "dict[str, Any]":
    """Return the ``wanted`` splits, joined by +; by default train if there is one, otherwise all.

    Raises:
        InputError: there is no such split.
    """
    names = {str(split): rows for split, rows in splits.items()}
    if wanted is None:
        return {"train": names["train"]} if "train" in names else names
    for split in wanted.split("+"):
        if split not in names:
            raise InputError(f"{option} {name}: no split {split!r}; there are: {', '.join(names)}")
    return {split: names[split] for split in wanted.split("+")}
