"""List regular files, and check later that they are still the same.

A folder is listed with the folders that links in it lead to, each real folder once. Whatever cannot be read to an end,
such as a named pipe, is refused here, before anything opens it.
"""

import glob
import hashlib
import heapq
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.manifest import SourceFile

_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A regular file as it was when it was listed: size in bytes, times of the last change in ns.

    A program can set ``mtime_ns`` back, but not ``ctime_ns``, which changes with permissions and links too.
    """

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Listing:
    """Files in the order of their paths, compared folder by folder.

    Args:
        files: the files that were wanted.
        others: suffix → number of files that were not.
        repeated: links to folders that are listed under another path, such as links to a folder above them.
    """

    files: tuple[ListedFile, ...]
    others: Counter[str]
    repeated: tuple[str, ...] = ()


def list_file(path: Path) -> ListedFile:
    """Return a file's size and times.

    Raises:
        InputError: it is a link to nowhere, a pipe, a socket or a device.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            fix = "restore that file, or remove the link"
            raise InputError(f"{path}: a link to {os.readlink(path)}, which does not exist; {fix}") from None
        raise
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a folder")
        raise InputError(f"{path}: {kind}, not a file; write its content to a file first, or remove it")
    return ListedFile(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def list_folder(folder: Path, is_wanted: Callable[[Path], bool]) -> Listing:
    """List the files of a folder and of all folders in it, except hidden ones.

    Raises:
        InputError: a link leads nowhere, or what is called like a wanted file is a pipe, a socket or a device.
    """
    repeated: list[str] = []
    return _listing(_walk([str(folder)], repeated), is_wanted, repeated)


def list_pattern(pattern: str, is_wanted: Callable[[Path], bool]) -> Listing:
    """List the files whose paths match a pattern; ``**`` stands for any number of folders.

    Raises:
        InputError: as for ``list_folder``, or ``**`` is not a whole part of the path.
    """
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    head, recursive, _ = pattern.partition("**")
    repeated: list[str] = []
    if recursive:  # glob would follow a link to a folder above it again and again
        try:
            matches = re.compile(glob_translate(pattern)).match
        except ValueError as error:
            raise InputError(f"{pattern}: {error}; put it between two slashes") from None
        roots = glob.glob(os.path.dirname(head)) if os.path.dirname(head) else [""]
        found = [
            path for path in _walk((root for root in roots if os.path.isdir(root or ".")), repeated) if matches(path)
        ]
    else:
        found = [path for path in glob.glob(pattern) if not os.path.isdir(path)]
    return _listing(found, is_wanted, repeated)


def _listing(found: Iterable[str], is_wanted: Callable[[Path], bool], repeated: Sequence[str]) -> Listing:
    wanted: list[ListedFile] = []
    others: Counter[str] = Counter()
    for path in map(Path, sorted(found, key=lambda path: path.replace(os.sep, "\0"))):  # folder by folder
        if is_wanted(path):
            wanted.append(list_file(path))
            continue
        if path.is_symlink() and not path.exists():
            list_file(path)  # raises: it may be a folder of documents that is missing
        others[path.suffix or "no suffix"] += 1
    return Listing(tuple(wanted), others, tuple(sorted(repeated)))


def _walk(roots: Iterable[str], repeated: list[str]) -> Iterator[str]:
    """Yield the paths of all that is no folder in the ``roots``, in no order; add repeated links to ``repeated``.

    The current folder is "". Linked folders come after all others, so that a link to one of these is known as such.
    """
    folders, links = list[str](), list[str]()
    for root in roots:
        (links if os.path.islink(root) else folders).append(root)
    heapq.heapify(links)
    seen: set[tuple[int, int]] = set()
    while folders or links:
        folder = folders.pop() if folders else heapq.heappop(links)
        status = os.stat(folder or ".")
        if (status.st_dev, status.st_ino) in seen:
            repeated.append(folder)
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder or ".") as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_symlink() and os.path.isdir(path):
                    heapq.heappush(links, path)
                else:
                    yield path


def hash_files(root: Path, files: Sequence[ListedFile]) -> tuple[SourceFile, ...]:
    """Return the path relative to ``root``, the size in bytes and the SHA-256 of each file.

    Raises:
        InputError: a file has changed since it was listed.
    """
    hashed: list[SourceFile] = []
    for file in files:
        digest = sha256(file.path)
        if list_file(file.path) != file:
            raise _changed(file)
        path = os.fsencode(file.path.relative_to(root)).decode("utf-8", "backslashreplace")
        hashed.append(SourceFile(path, file.size, digest))
    return tuple(hashed)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def check_unchanged(file: ListedFile, digest: str | None = None) -> None:
    """Check that a file is still what it was when it was listed.

    Args:
        file: the file.
        digest: its SHA-256 of that time. It is computed again if ``ctime_ns`` is all that has changed; None if only
            size and ``mtime_ns`` are to be compared.

    Raises:
        InputError: its size, time or content has changed, or it is gone.
    """
    try:
        now = list_file(file.path)
    except FileNotFoundError:
        raise InputError(f"{file.path}: removed while it was read; restore it, then start again") from None
    if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
        raise _changed(file)
    if digest is not None and now.ctime_ns != file.ctime_ns and sha256(file.path) != digest:
        raise _changed(file)


def _changed(file: ListedFile) -> InputError:
    return InputError(f"{file.path}: changed while it was read; start again once nothing writes to it")
