"""Open a local text file, plain or compressed with gzip or zstandard, and refuse what is no text."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.reading.listing import ListedFile

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


def file_suffix(name: str | Path) -> str:
    """Return the lower-case suffix that names the kind of file, without that of a compression."""
    stem, suffix = os.path.splitext(os.fspath(name).lower())
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def is_compressed(name: str | Path) -> bool:
    """Return whether the name is that of a gzip or zstandard file."""
    return os.path.splitext(name)[1].lower() in COMPRESSIONS


@contextmanager
def opened(file: ListedFile, content: bytes | None = None) -> Iterator[BinaryIO]:
    """Open a file at its beginning, decompressed; ``content`` is what is in it, if that has been read.

    Raises:
        InputError: it is no text, or a damaged archive.
    """
    with open(file.name, "rb") if content is None else io.BytesIO(content) as raw:
        if not is_compressed(file.name):
            _check_is_text(file.name, raw.read(8))
            raw.seek(0)
            yield raw
            return
        compression = COMPRESSIONS[os.path.splitext(file.name)[1].lower()]
        try:
            counted = _Counted(raw)
            with _decompress(counted, compression) as stream:
                text = _Decompressed(stream, counted)
                _check_is_text(file.name, text.peek(8)[:8])
                yield text
        except (OSError, EOFError, zlib.error) as error:  # for a damaged stream, an OSError has no errno
            if isinstance(error, OSError) and error.errno:
                raise
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{file.name}: not a whole {compression} file: {reason}; fetch it again") from None


def _decompress(file: "_Counted", compression: str) -> Any:
    """Return a stream of the content; gzip's may be followed by zero bytes, which pyarrow refuses."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=io.BufferedReader(file, 1 << 20))
    import pyarrow

    return pyarrow.CompressedInputStream(file, compression)


class _Counted(io.RawIOBase):
    """A file that counts the bytes read from it."""

    def __init__(self, file: Any) -> None:
        self._file, self.num_read = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num_bytes: int = self._file.readinto(buffer)
        self.num_read += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.num_read


class _Decompressed(io.BufferedReader):
    """The content of a compressed file."""

    def __init__(self, stream: Any, compressed: _Counted) -> None:
        self._content, self._compressed = _Counted(stream), compressed
        super().__init__(self._content, 1 << 20)

    def compressed_position(self) -> int:
        """Return the position in the compressed file, in proportion to what was taken of the content read so far."""
        return self._compressed.num_read * self.tell() // max(1, self._content.num_read)


def position_in(file: BinaryIO) -> int:
    """Return the position in a file, of a compressed one in proportion to what was taken of it."""
    return file.compressed_position() if isinstance(file, _Decompressed) else file.tell()


def _check_is_text(name: str, start: bytes) -> None:
    """Raise InputError if the first bytes of a file are those of an archive, a PDF, parquet or UTF-16."""
    for signature, kind in _NOT_TEXT_SIGNATURES.items():
        if start.startswith(signature):
            raise InputError(
                f"{name}: its content is {kind}, not {file_suffix(name)} text in UTF-8; convert or unpack it"
            )
