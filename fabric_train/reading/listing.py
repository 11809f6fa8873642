"""List local files, open their text, hash them, and check later that they have not changed.

A folder is listed with the folders that its links lead to, each real folder once. Anything that cannot be read to an
end, such as a named pipe, is refused here, before anything opens it.
"""

import glob
import gzip
import hashlib
import heapq
import io
import os
import re
import stat
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.token_dataset.manifest import SourceFile

SHA256_BYTES = 32
NO_SHA256 = bytes(SHA256_BYTES)  # of a file that is not hashed
READ_AT_ONCE = 1 << 20  # bytes up to which a file is read in one piece
_ABOUT_DATA = re.compile(
    r"(?:readme|licen[cs]e|copying|notice|citation|changelog|contributing|use_policy)(?:[-.].*)?"
    r"(?:\.(?:txt|md)(?:\.\w+)?|\*.*)|dataset_infos\.json",
    re.IGNORECASE,
)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_NOT_TEXT_SIGNATURES = {
    b"\x1f\x8b": "gzip-compressed",
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2-compressed",
    b"\x28\xb5\x2f\xfd": "zstandard-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"%PDF": "a PDF",
    b"PAR1": "parquet",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_TO_THE_END = -1
_FIELDS = 4


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A regular file at the time of listing: its path as text, size in bytes, and times of the last change in ns.

    A program can set ``mtime_ns`` back, but not ``ctime_ns``, which changes with permissions and links too.
    """

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def path(self) -> Path:
        """The path; creating it takes longer than a system call, so code for many files uses ``name``."""
        return Path(self.name)


class ListedFiles(Sequence[ListedFile]):
    """Files, of which there may be millions, stored in 32 bytes each and their paths. ``sizes`` are in bytes."""

    def __init__(self, files: Iterable[ListedFile] = ()) -> None:
        names = bytearray()
        self._ends = array("q", [0])
        self.sizes = array("q")
        self._mtimes = array("q")
        self._ctimes = array("q")
        for file in files:
            names += os.fsencode(file.name)
            self._ends.append(len(names))
            self.sizes.append(file.size)
            self._mtimes.append(file.mtime_ns)
            self._ctimes.append(file.ctime_ns)
        self._names = bytes(names)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[ListedFile]:
        start = 0
        ends = islice(self._ends, 1, None)
        for end, size, mtime_ns, ctime_ns in zip(ends, self.sizes, self._mtimes, self._ctimes, strict=True):
            yield ListedFile(os.fsdecode(self._names[start:end]), size, mtime_ns, ctime_ns)
            start = end

    def __getitem__(self, index: int) -> ListedFile:  # type: ignore[override]  # nobody needs slices
        index = range(len(self))[index]
        name = os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])
        return ListedFile(name, self.sizes[index], self._mtimes[index], self._ctimes[index])


@dataclass(frozen=True)
class Listing:
    """Files in the order of their paths, compared folder by folder.

    ``others`` are the numbers of unwanted files, by suffix, or by name if they are about the data.
    ``repeated`` are links to folders that are listed under another path, such as links to a folder above them.
    """

    files: ListedFiles
    others: Counter[str]
    repeated: tuple[str, ...] = ()


def list_file(path: str | Path) -> ListedFile:
    """Return a file with its size and times; InputError if it is a link to nowhere, a pipe, a socket or a device."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            fix = "restore that file, or remove the link"
            raise InputError(f"{path}: a link to {os.readlink(path)}, which does not exist; {fix}") from None
        raise
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a folder")
        raise InputError(f"{path}: {kind}, not a file; write its content to a file, or remove it")
    return ListedFile(os.fspath(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_about_data(name: str) -> bool:
    """Return whether a name or pattern means a README, a licence or the like, rather than a document."""
    return _ABOUT_DATA.fullmatch(os.path.basename(name)) is not None


def list_folder(folder: Path, is_wanted: Callable[[str], bool]) -> Listing:
    """List the files of a folder and of all folders in it, except hidden ones; InputError as in ``list_file``."""
    root = "" if folder == Path() else str(folder)
    repeated: list[str] = []
    return _list_paths(_walk([root], repeated), is_wanted, repeated)


def list_pattern(pattern: str, is_wanted: Callable[[str], bool]) -> Listing:
    """List the files whose paths match a pattern, in which the component ``**`` stands for any number of folders."""
    from fsspec.utils import glob_translate  # type: ignore[import-untyped]

    head, recursive, _ = pattern.partition("**")
    repeated: list[str] = []
    if recursive:
        # not by glob, which would follow a link to a folder above it again and again
        try:
            matches = re.compile(glob_translate(pattern)).match
        except ValueError as error:
            raise InputError(f"{pattern}: {error}; put ** between two slashes") from None
        root_pattern = os.path.dirname(head)
        roots = [""]  # the current folder
        if root_pattern:
            roots = [path for path in glob.glob(root_pattern) if os.path.isdir(path)]
        paths = [path for path in _walk(roots, repeated) if matches(path)]
    else:
        paths = [path for path in glob.glob(pattern) if not os.path.isdir(path)]
    if str(Path(pattern)) != pattern:  # it has // or ./
        paths = [str(Path(path)) for path in paths]
    return _list_paths(paths, is_wanted, repeated)


def _list_paths(paths: Iterable[str], is_wanted: Callable[[str], bool], repeated: Sequence[str]) -> Listing:
    """List the wanted files in order, and count the others."""
    others: Counter[str] = Counter()

    def wanted_files() -> Iterator[ListedFile]:
        for path in sorted(paths, key=lambda path: path.replace(os.sep, "\0")):  # folder by folder
            if is_wanted(path):
                yield list_file(path)
                continue
            if os.path.islink(path) and not os.path.exists(path):
                list_file(path)  # raises: it may be a folder of documents that is missing
            if is_about_data(path):
                kind = os.path.basename(path)
            else:
                kind = Path(path).suffix or "no suffix"
            others[kind] += 1

    return Listing(ListedFiles(wanted_files()), others, tuple(sorted(repeated)))


def _walk(roots: Iterable[str], repeated: list[str]) -> Iterator[str]:
    """Yield all files below ``roots``, and add links to folders that were listed before to ``repeated``.

    Links are followed after all other folders, so a folder that is reached both ways is listed under its real path.
    A root is "" for the current folder.
    """
    folders: list[str] = []
    links: list[str] = []  # a heap: links are followed in the order of their paths
    for root in roots:
        if os.path.islink(root):
            links.append(root)
        else:
            folders.append(root)
    heapq.heapify(links)
    visited: set[tuple[int, int]] = set()  # device and inode
    while folders or links:
        folder = folders.pop() if folders else heapq.heappop(links)
        status = os.stat(folder or ".")
        inode = (status.st_dev, status.st_ino)
        if inode in visited:
            repeated.append(folder)
            continue
        visited.add(inode)
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


def read_file(file: ListedFile) -> tuple[bytes, ListedFile]:
    """Return a file's content, up to its listed size, and its current state, in four system calls."""
    descriptor = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, file.size)
        while len(data) < file.size and (piece := os.read(descriptor, file.size - len(data))):
            data += piece  # some file systems give a part at a time
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return data, ListedFile(file.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def hash_files(files: Iterable[ListedFile]) -> Iterator[bytes]:
    """Yield the SHA-256 of each file; InputError if one has changed since it was listed."""
    for file in files:
        if file.size <= READ_AT_ONCE:
            data, now = read_file(file)
            digest = hashlib.sha256(data).digest()
        else:
            digest = bytes.fromhex(sha256(file.name))
            now = list_file(file.name)
        if now != file:
            raise changed(file)
        yield digest


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def hashed_files(root: Path, files: ListedFiles, digests: np.ndarray) -> tuple[SourceFile, ...]:
    """Return the records of hashed files; a path that is not UTF-8 has escapes.

    Args:
        root: the folder to which the recorded paths are relative.
        files: the files.
        digests: the files' SHA-256, uint8 [files, 32].
    """
    folder = "" if root == Path() else os.path.join(root, "")
    records: list[SourceFile] = []
    for file, digest in zip(files, digests, strict=False):
        path = os.fsencode(file.name.removeprefix(folder)).decode("utf-8", "backslashreplace")
        records.append(SourceFile(path, file.size, digest.tobytes().hex()))
    return tuple(records)


def check_unchanged(file: ListedFile, digest: bytes | None = None) -> None:
    """Check that a file's size and ``mtime_ns`` have not changed since it was listed.

    With ``digest``, its SHA-256, it is hashed again if only ``ctime_ns`` differs. InputError if it has changed or is
    gone.
    """
    try:
        now = list_file(file.name)
    except FileNotFoundError:
        raise InputError(f"{file.name}: removed while it was being read; restore it and start again") from None
    if (now.size, now.mtime_ns) != (file.size, file.mtime_ns):
        raise changed(file)
    if digest is not None and now.ctime_ns != file.ctime_ns and sha256(file.name) != digest.hex():
        raise changed(file)


def changed(file: ListedFile) -> InputError:
    """Return the error for a file that has changed since it was listed."""
    return InputError(f"{file.name}: changed while it was being read; start again when nothing is writing to it")


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file that is read at once: bytes of JSON lines, row groups of parquet, or the whole file."""

    file: ListedFile
    num_bytes: int
    """The size; for row groups, the uncompressed size."""
    start: int = 0
    """The first byte, or row group. A line belongs to the part in which it begins."""
    stop: int | None = None
    """The byte, or row group, after the last one; None for a full file."""
    origin: int = 0
    """The number of the file in its source."""

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def is_read_at_once(self) -> bool:
        """Whether this is a full file that is small enough for its reader to have in memory and hash."""
        return self.stop is None and self.file.size <= READ_AT_ONCE


class PackedParts(Sequence[FilePart]):
    """Parts of ``files``, stored in 32 bytes each."""

    def __init__(self, files: ListedFiles, parts: Iterable[FilePart]) -> None:
        self._files = files
        self._numbers = array("q")
        for part in parts:
            stop = _TO_THE_END if part.stop is None else part.stop
            self._numbers.extend((part.origin, part.num_bytes, part.start, stop))

    def __len__(self) -> int:
        return len(self._numbers) // _FIELDS

    def __getitem__(self, index: int) -> FilePart:  # type: ignore[override]  # nobody needs slices
        index = range(len(self))[index]
        origin, num_bytes, start, packed_stop = self._numbers[_FIELDS * index : _FIELDS * (index + 1)]
        stop = None if packed_stop == _TO_THE_END else packed_stop
        return FilePart(self._files[origin], num_bytes, start, stop, origin)


def file_suffix(name: str | Path) -> str:
    """Return the lower-case suffix that names the kind of file, without the suffix of a compression."""
    stem, suffix = os.path.splitext(os.fspath(name).lower())
    if suffix in COMPRESSIONS:
        _, suffix = os.path.splitext(stem)
    return suffix


def is_compressed(name: str | Path) -> bool:
    """Return whether this is the name of a gzip or zstandard file."""
    return os.path.splitext(name)[1].lower() in COMPRESSIONS


@contextmanager
def open_decompressed(file: ListedFile, content: bytes | None = None) -> Iterator[BinaryIO]:
    """Open a file, or its ``content``, decompressed; InputError if it is not text, or is damaged."""
    with open(file.name, "rb") if content is None else io.BytesIO(content) as raw:
        if not is_compressed(file.name):
            _check_is_text(file.name, raw.read(8))
            raw.seek(0)
            yield raw
            return
        compression = COMPRESSIONS[os.path.splitext(file.name)[1].lower()]
        try:
            with _decompress(raw, compression) as stream:
                text = _Decompressed(stream, raw)
                _check_is_text(file.name, text.peek(8)[:8])
                yield text
        except (OSError, EOFError, zlib.error) as error:  # for a damaged stream, an OSError has no errno
            if isinstance(error, OSError) and error.errno:
                raise
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{file.name}: incomplete {compression} file: {reason}; download it again") from None


def _decompress(file: BinaryIO, compression: str) -> Any:
    """Return a stream of the content; gzip's may be followed by zero bytes, which pyarrow refuses."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    import pyarrow

    return pyarrow.CompressedInputStream(file, compression)


class _CountedStream(io.RawIOBase):
    """A stream that counts the bytes that were read from it."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes: int = self._file.readinto(buffer)
        self.num_read += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.num_read


class _Decompressed(io.BufferedReader):
    """The buffered content of a compressed file; ``position_in`` estimates the position in the file."""

    def __init__(self, stream: Any, compressed: BinaryIO) -> None:
        self.content = _CountedStream(stream)
        self.compressed = compressed
        super().__init__(self.content, 1 << 20)


def position_in(file: BinaryIO) -> int:
    """Return the position in a file; for a compressed file, in proportion to the content that was read."""
    if isinstance(file, _Decompressed):
        return file.compressed.tell() * file.tell() // max(1, file.content.num_read)
    return file.tell()


def _check_is_text(name: str, start: bytes) -> None:
    for signature, kind in _NOT_TEXT_SIGNATURES.items():
        if start.startswith(signature):
            raise InputError(
                f"{name}: its content is {kind}, not {file_suffix(name)} text in UTF-8; convert or unpack it"
            )
