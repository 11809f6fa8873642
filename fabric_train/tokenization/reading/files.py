"""Read the rows of one local file: txt, md, csv, json, jsonl or parquet, plain or compressed with gzip or zstandard.

The loaders of ``datasets`` are not used, because they change documents ("NA" in a csv becomes None, strings that look
like dates become dates) and report bad JSON or bad UTF-8 without its place.
"""

import codecs
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from fabric_train.cli.errors import InputError, RunError, first_line
from fabric_train.tokenization.documents import BadRowError
from fabric_train.tokenization.reading.columns import Row, check_not_repeated, check_text_columns, missing_column
from fabric_train.tokenization.reading.listing import ListedFile

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
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


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file, or a part of it: bytes ``start`` to ``stop`` of JSON lines, or those row groups of parquet.

    ``num_bytes`` is its size, of row groups uncompressed. A line belongs to the part in which it begins.
    """

    file: ListedFile
    num_bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.file.path

    @property
    def origin(self) -> Path:
        """The file that it is of."""
        return self.file.path

    @property
    def suffix(self) -> str:
        """Lower-case suffix without that of a compression."""
        return file_suffix(self.path)


class FileReader:
    """An iterable over the rows of a part as (number, row); ``number`` counts from 1 within the part.

    A ``BadRowError`` takes the place of a row that cannot be used. ``position`` is the number of the part's bytes up to
    the end of the last row; of compressed files, arrays of JSON and parquet it is estimated in proportion to what has
    been read, of csv it is up to 8 KiB more. ``num_counted`` is the number of rows; of JSON lines, blank lines count
    too.

    Args:
        part: what to read.
        columns: the columns to read of parquet; a txt or md file is one row with the first of them.

    Raises:
        InputError: the file is not of the kind that its name says, or a damaged one.
        RunError: memory ran out.
    """

    def __init__(self, part: FilePart, columns: tuple[str, ...]) -> None:
        self.part, self.columns, self.position, self.num_counted = part, columns, 0, 0

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]:
        try:
            with memory_errors_name(str(self.part.path)):
                for number, row in _READERS[self.part.suffix](self):
                    self.num_counted = number
                    yield number, row
        except OSError as error:
            if error.errno and error.filename is None:  # of a read that failed
                error.filename = str(self.part.path)
            raise
        self.position = self.part.num_bytes

    def place(self, number: int) -> str:
        """Return the place of row ``number`` for messages."""
        path = self.part.path
        if self.part.suffix in (".txt", ".md"):
            return str(path)
        if self.part.suffix == ".jsonl" or (self.part.suffix == ".json" and is_json_lines(path)):
            return f"{path}, line {self._lines_before() + number}"
        return f"{path}, record {number}"

    def _lines_before(self) -> int:
        """Count the lines before the part. This reads the file again, so it is for error messages only."""
        if not self.part.start:
            return 0
        with self.part.path.open("rb") as file:
            lines, left = 0, self.part.start
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                lines += piece.count(b"\n")
                left -= len(piece)
            file.seek(self.part.start - 1)
            return lines + (file.read(1) != b"\n")  # a line that began earlier belongs to an earlier part


@contextmanager
def memory_errors_name(place: str) -> Iterator[None]:
    """Turn a lack of memory into an error that names what is read.

    Raises:
        RunError: memory ran out.
    """
    try:
        yield
    except MemoryError as error:
        fix = "let fewer processes read at a time, or split it into smaller files"
        raise RunError(f"{place}: memory ran out while it was read ({first_line(error)}); {fix}") from None


def file_suffix(path: Path) -> str:
    """Return the lower-case suffix that names the kind of file, without that of a compression."""
    stem, suffix = os.path.splitext(path.name.lower())
    return os.path.splitext(stem)[1] if suffix in _COMPRESSIONS else suffix


def is_readable(path: Path) -> bool:
    """Return whether the name is that of a file that can be read."""
    return file_suffix(path) in _READERS and not (file_suffix(path) == ".parquet" and is_compressed(path))


def is_compressed(path: Path) -> bool:
    """Return whether the name is that of a gzip or zstandard file."""
    return os.path.splitext(path.name.lower())[1] in _COMPRESSIONS


def readable_suffixes() -> str:
    """Return the suffixes of readable files for messages."""
    return f"{', '.join(_READERS)} (all except parquet also with {' or '.join(_COMPRESSIONS)})"


def split_file(file: ListedFile, part_bytes: int) -> list[FilePart]:
    """Split JSON lines or parquet into parts of about ``part_bytes`` bytes; any other file is one part.

    Raises:
        InputError: the file has the suffix of parquet and is something else, or damaged.
    """
    path, size = file.path, file.size
    suffix = file_suffix(path)
    if suffix == ".parquet":
        return _split_parquet(file, part_bytes)
    can_be_split = suffix in (".jsonl", ".json") and not is_compressed(path) and size > part_bytes
    if not can_be_split or (suffix == ".json" and not is_json_lines(path)):
        return [FilePart(file, size)]
    starts = range(0, size, part_bytes)
    return [FilePart(file, min(part_bytes, size - start), start, min(start + part_bytes, size)) for start in starts]


def _split_parquet(file: ListedFile, part_bytes: int) -> list[FilePart]:
    from pyarrow import parquet

    with _whole_parquet(file.path), parquet.ParquetFile(file.path) as opened:
        metadata = opened.metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    parts: list[FilePart] = []
    first = total = 0
    for group, size in enumerate(sizes, 1):
        total += size
        if total >= part_bytes or group == len(sizes):
            parts.append(FilePart(file, total, first, group))
            first, total = group, 0
    return parts or [FilePart(file, file.size, 0, 0)]


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file at its beginning, decompressed."""
    with path.open("rb") as raw:
        if not is_compressed(path):
            _check_is_text(path, raw.read(8))
            raw.seek(0)
            yield raw
            return
        import pyarrow

        compression = _COMPRESSIONS[path.suffix.lower()]
        try:
            counted = _Counted(raw)
            with pyarrow.CompressedInputStream(counted, compression) as stream:
                file = _Decompressed(stream, counted)
                _check_is_text(path, file.peek(8)[:8])
                yield file
        except OSError as error:  # for a damaged stream, pyarrow raises an OSError without errno
            if error.errno:
                raise
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{path}: not a whole {compression} file: {reason}; fetch it again") from None


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


def _position(file: BinaryIO) -> int:
    return file.compressed_position() if isinstance(file, _Decompressed) else file.tell()


def _read_text(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    path = reader.part.path
    with _opened(path) as file:
        data = file.read()
    zero = data.find(b"\0")
    if zero >= 0:
        yield 1, BadRowError(f"{path}: byte {zero} is zero, so it is binary data and not text")
        return
    reader.position = reader.part.num_bytes
    try:
        yield 1, {reader.columns[0]: _decode(data, path, 0)}
    except BadRowError as error:
        yield 1, error


def _read_json_lines(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    part = reader.part
    stop = sys.maxsize if part.stop is None else part.stop
    compressed = is_compressed(part.path)
    with _opened(part.path) as file:
        position = 0
        if part.start:
            position = file.seek(part.start - 1)
            position += len(file.readline())  # the rest of a line of the part before
        number = 0
        while position < stop and (line := file.readline()):
            number += 1
            reader.num_counted = number
            start, position = position, position + len(line)
            reader.position = _position(file) if compressed else position - part.start
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                if not line.removeprefix(codecs.BOM_UTF8).strip():
                    continue
                try:
                    row = _parse_line(line, start, reader, number)
                except BadRowError as error:
                    yield number, error
                    continue
            yield number, _checked(row, reader, number)


def _parse_line(line: bytes, start: int, reader: FileReader, number: int) -> Any:
    """Parse a line that orjson rejects: the standard library accepts NaN and lone surrogates.

    Raises:
        BadRowError: the line is not UTF-8 or not JSON.
    """
    text = _decode(line, reader.part.path, start)
    try:
        return _parse_json(text.strip())
    except BadRowError as error:
        raise BadRowError(f"{reader.place(number)}: {error}") from None


def _checked(row: Any, reader: FileReader, number: int) -> Row | BadRowError:
    if isinstance(row, dict):
        return row
    return BadRowError(
        f"{reader.place(number)}: a JSON {type(row).__name__}, not an object with a column {reader.columns[0]!r}"
    )


def _read_json(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    """Yield the rows of a .json file: an array of objects, one object, or JSON lines."""
    path = reader.part.path
    if is_json_lines(path):
        yield from _read_json_lines(reader)
        return
    with _opened(path) as file:
        data = file.read()
    try:
        text = _decode(data, path, 0)
        content = _parse_json(text) if text.strip() else []
    except BadRowError as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise InputError(f"{where}{error}; fix the file, or leave it out") from None
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, 1):
        reader.position = reader.part.num_bytes * number // len(rows)
        yield number, _checked(row, reader, number)


def is_json_lines(path: Path) -> bool:
    """Return whether the first line that is not blank is a complete JSON object."""
    with _opened(path) as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return first.lstrip(codecs.BOM_UTF8).lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    path = reader.part.path
    csv.field_size_limit(sys.maxsize)
    with (
        _opened(path) as binary,
        # bytes that are not UTF-8 are kept as surrogates, so that they are a fault of their own row only
        io.TextIOWrapper(binary, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                return
            if fault := _undecodable(header):
                raise InputError(f"{path}, line {rows.line_num}: {fault}")
            check_not_repeated(str(path), reader.columns, header)
            for number, row in enumerate((row for row in rows if row), 1):
                reader.position = _position(binary)
                fault = _undecodable(row)
                if len(row) != len(header):
                    fault = f"{len(row)} fields, but the header has {len(header)}"
                if fault:
                    yield number, BadRowError(f"{path}, line {rows.line_num}: {fault}")
                else:
                    yield number, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}, line {rows.line_num}: not csv: {error}; fix the quotes") from None


def _undecodable(fields: list[str]) -> str | None:
    """Return what is wrong with fields that hold bytes as surrogates, None if they hold none."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) - 0xDC00
        return f"byte 0x{byte:02x} is not UTF-8; convert the file to UTF-8"
    return None


def _read_parquet(reader: FileReader) -> Iterator[tuple[int, Row]]:
    from pyarrow import parquet

    part = reader.part
    number = 0
    with _whole_parquet(part.path), parquet.ParquetFile(part.path) as file:
        schema = file.schema_arrow
        columns = [name for name in reader.columns if name in schema.names]
        if not columns:
            raise missing_column(str(part.path), reader.columns[0], schema.names)
        check_not_repeated(str(part.path), columns, schema.names)
        check_text_columns(str(part.path), schema, columns)
        groups = list(range(part.start, file.metadata.num_row_groups if part.stop is None else part.stop))
        num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                number += 1
                reader.position = part.num_bytes * number // num_rows
                yield number, row


@contextmanager
def _whole_parquet(path: Path) -> Iterator[None]:
    """Turn the errors that pyarrow raises for a damaged file into InputError."""
    import pyarrow

    try:
        yield
    except MemoryError:  # pyarrow's is an ArrowException too
        raise
    except UnicodeDecodeError:
        raise InputError(f"{path}: a column of text holds bytes that are not UTF-8; write it as UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the system's, and no fault of the file
            raise
        reason = first_line(error).rstrip(".")
        raise InputError(f"{path}: not a whole parquet file: {reason}; fetch it again") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadRowError(f"not JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON that can be read: {error}") from None


def _decode(data: bytes, path: Path, offset: int) -> str:
    """Decode UTF-8 that begins at byte ``offset`` of ``path``, and remove a byte order mark.

    Raises:
        BadRowError: naming the first byte that is not UTF-8.
    """
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset = len(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(
            f"{path}: byte {offset + error.start} is not UTF-8 (0x{data[error.start]:02x}); convert the file to UTF-8"
        ) from None


def _check_is_text(path: Path, start: bytes) -> None:
    """Raise InputError if the first bytes of a file are those of an archive, a PDF, parquet or UTF-16."""
    for signature, kind in _NOT_TEXT_SIGNATURES.items():
        if start.startswith(signature):
            raise InputError(
                f"{path}: its content is {kind}, not {file_suffix(path)} text in UTF-8; convert or unpack it"
            )


_READERS: dict[str, Callable[[FileReader], Iterator[tuple[int, Any]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
