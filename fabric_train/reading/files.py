"""Read the rows of one local file: txt, md, csv, json, jsonl or parquet, plain or compressed with gzip or zstandard.

The loaders of ``datasets`` are not used, because they change documents ("NA" in a csv becomes None, strings that look
like dates become dates) and report bad JSON or bad UTF-8 without its place.
"""

import codecs
import csv
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from fabric_train.cli.errors import InputError, RunError, first_line
from fabric_train.reading import listing
from fabric_train.reading.arrow_rows import nested_columns, without_filling
from fabric_train.reading.documents import (
    BadRowError,
    Row,
    check_not_repeated,
    check_text_column,
    missing_column,
    name_in,
)
from fabric_train.reading.listing import FilePart, ListedFile, file_suffix, is_compressed, open_text


class FileReader:
    """An iterable over the rows of a part as (number, row); ``number`` counts from 1 within the part.

    A ``BadRowError`` takes the place of a row that cannot be used. ``position`` is the number of the part's bytes up to
    the end of the last row; for compressed files, JSON arrays and parquet it is an estimate, for csv up to 8 KiB more.
    ``num_counted`` is the number of rows; in JSON lines, blank lines count too. ``columns`` are those to read of
    parquet; a txt or md file is one row with the first of them. InputError if the file is damaged or of another kind.
    """

    def __init__(self, part: FilePart, columns: tuple[str, ...]) -> None:
        self.part = part
        self.columns = columns
        self.position = 0
        self.num_counted = 0
        self.content: bytes | None = None  # of the file, once it has been read at once
        self.unread_columns: frozenset[str] = frozenset()  # of a parquet file that has been opened
        self._now = part.file
        self._suffix = file_suffix(part.name)

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]:
        try:
            with memory_errors_name(self.part.name):
                if self.part.is_read_at_once:
                    self.content, self._now = listing.read_file(self.part.file)
                for number, row in _READERS[self._suffix](self):
                    self.num_counted = number
                    yield number, row
        except OSError as error:
            if error.errno and error.filename is None:  # of a read that failed
                error.filename = self.part.name
            raise
        self.position = self.part.num_bytes

    def sha256(self) -> bytes:
        """Return the SHA-256 of a file read at once, ``NO_SHA256`` for others; InputError if it has changed."""
        if self.content is None:
            return listing.NO_SHA256
        if self._now != self.part.file:
            raise listing.changed(self.part.file)
        return hashlib.sha256(self.content).digest()

    def place(self, number: int) -> str:
        path = self.part.name
        if self._suffix in (".txt", ".md"):
            return path
        if self._suffix == ".jsonl" or (self._suffix == ".json" and is_json_lines(self.part.file)):
            return f"{path}, line {self._lines_before() + number}"
        return f"{path}, record {number}"

    def _lines_before(self) -> int:
        """Count the lines before the part, for error messages: this reads the file again."""
        if not self.part.start:
            return 0
        with open(self.part.name, "rb") as file:
            lines = 0
            left = self.part.start
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                lines += piece.count(b"\n")
                left -= len(piece)
            file.seek(self.part.start - 1)
            return lines + (file.read(1) != b"\n")  # a line that began earlier belongs to an earlier part


@contextmanager
def memory_errors_name(place: str) -> Iterator[None]:
    """Turn a lack of memory into a RunError that names the file."""
    try:
        yield
    except MemoryError as error:
        fix = "let fewer processes read at a time, or split it into smaller files"
        raise RunError(f"{place}: memory ran out while it was read ({first_line(error)}); {fix}") from None


def is_readable(name: str | Path) -> bool:
    """Return whether a file of this name can be read."""
    suffix = file_suffix(name)
    return suffix in _READERS and not (suffix == ".parquet" and is_compressed(name))


def readable_suffixes() -> str:
    """Return the suffixes of readable files for messages."""
    return f"{', '.join(_READERS)} (all except parquet also with {' or '.join(listing.COMPRESSIONS)})"


def split_file(file: ListedFile, part_bytes: int, origin: int = 0) -> list[FilePart]:
    """Split JSON lines or parquet into parts of about ``part_bytes`` bytes; any other file is one part."""
    size = file.size
    suffix = file_suffix(file.name)
    if suffix == ".parquet":
        return _split_parquet(file, part_bytes, origin)
    can_be_split = size > part_bytes and suffix in (".jsonl", ".json") and not is_compressed(file.name)
    if not can_be_split or (suffix == ".json" and not is_json_lines(file)):
        return [FilePart(file, size, origin=origin)]
    ranges = [(start, min(start + part_bytes, size)) for start in range(0, size, part_bytes)]
    return [FilePart(file, stop - start, start, stop, origin) for start, stop in ranges]


def _split_parquet(file: ListedFile, part_bytes: int, origin: int) -> list[FilePart]:
    from pyarrow import parquet

    with _whole_parquet(file.name), parquet.ParquetFile(file.name) as whole:
        metadata = whole.metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    parts: list[FilePart] = []
    first = total = 0
    for group, size in enumerate(sizes, 1):
        total += size
        if total >= part_bytes or group == len(sizes):
            parts.append(FilePart(file, total, first, group, origin))
            first = group
            total = 0
    return parts or [FilePart(file, file.size, 0, 0, origin)]


def _read_text(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    path = reader.part.name
    with open_text(reader.part.file, reader.content) as file:
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
    compressed = is_compressed(part.name)
    names = {name for column in reader.columns for name in (column, name_in(column, ()))}
    keys = [f'"{name}"'.encode() for name in names]
    with open_text(part.file, reader.content) as file:
        position = 0
        if part.start:
            position = file.seek(part.start - 1)
            position += len(file.readline())  # the rest of a line of the part before
        number = 0
        while position < stop and (line := file.readline()):
            number += 1
            reader.num_counted = number
            start = position
            position = position + len(line)
            reader.position = listing.position_in(file) if compressed else position - part.start
            try:
                row = orjson.loads(line)
                is_plain = all(line.count(key) < 2 for key in keys)  # a key may also be in the text
            except orjson.JSONDecodeError:
                if not line.removeprefix(codecs.BOM_UTF8).strip():
                    continue
                is_plain = False
            if not is_plain:
                try:
                    row = _parse_line(line, start, reader, number)
                except BadRowError as error:
                    yield number, error
                    continue
            yield number, _checked(row, reader, number)


def _parse_line(line: bytes, start: int, reader: FileReader, number: int) -> Any:
    """Parse a line more slowly than orjson, which rejects NaN and lone surrogates, and takes a key that is repeated."""
    text = _decode(line, reader.part.name, start)
    try:
        return _parse_json(text.strip(), reader.columns)
    except BadRowError as error:
        raise BadRowError(f"{reader.place(number)}: {error}") from None


def _checked(row: Any, reader: FileReader, number: int) -> Row | BadRowError:
    if isinstance(row, dict):
        return row
    column = name_in(reader.columns[0], ())
    return BadRowError(f"{reader.place(number)}: a JSON {type(row).__name__}, not an object with a column {column!r}")


def _read_json(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    """Yield the rows of a .json file: an array of objects, one object, or JSON lines."""
    path = reader.part.name
    if is_json_lines(reader.part.file, reader.content):
        yield from _read_json_lines(reader)
        return
    with open_text(reader.part.file, reader.content) as file:
        data = file.read()
    try:
        text = _decode(data, path, 0)
        content = _parse_json(text, reader.columns) if text.strip() else []
    except BadRowError as error:
        where = "" if str(error).startswith(path) else f"{path}: "
        raise InputError(f"{where}{error}; fix the file, or leave it out") from None
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, 1):
        reader.position = reader.part.num_bytes * number // len(rows)
        yield number, _checked(row, reader, number)


def is_json_lines(file: ListedFile, content: bytes | None = None) -> bool:
    """Return whether the first line that is not blank is a complete JSON object; ``content`` as for ``open_text``."""
    with open_text(file, content) as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return first.lstrip(codecs.BOM_UTF8).lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    path = reader.part.name
    csv.field_size_limit(sys.maxsize)
    with (
        open_text(reader.part.file, reader.content) as binary,
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
            check_not_repeated(path, reader.columns, header)
            for number, row in enumerate((row for row in rows if row), 1):
                reader.position = listing.position_in(binary)
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
    """Return the fault of fields that hold bytes as surrogates, None if none does."""
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
    with _whole_parquet(part.name), parquet.ParquetFile(part.name) as file:
        schema = file.schema_arrow
        columns = [name for name in (name_in(one, schema.names) for one in reader.columns) if name in schema.names]
        if not columns:
            raise missing_column(part.name, reader.columns[0], schema.names)
        check_not_repeated(part.name, columns, schema.names)
        check_text_column(part.name, schema, reader.columns[0])
        reader.unread_columns = frozenset(schema.names).difference(columns)
        nested = nested_columns(schema, columns)
        groups = list(range(part.start, file.metadata.num_row_groups if part.stop is None else part.stop))
        num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                number += 1
                reader.position = part.num_bytes * number // num_rows
                for name, kind in nested.items():
                    row[name] = without_filling(row[name], kind, parses_json=True)
                yield number, row


@contextmanager
def _whole_parquet(path: str) -> Iterator[None]:
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


def _parse_json(text: str, columns: Sequence[str]) -> Any:
    """Parse JSON in which no object has one of ``columns`` twice."""

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):
            names = [name for name, _ in pairs]
            for name in (name_in(column, built) for column in columns):
                if names.count(name) > 1:
                    raise BadRowError(f"{names.count(name)} values are called {name!r}; keep one of them")
        return built

    try:
        return json.loads(text, object_pairs_hook=build)
    except BadRowError:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadRowError(f"not JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON that can be read: {error}") from None


def _decode(data: bytes, path: str, offset: int) -> str:
    """Decode UTF-8 that begins at byte ``offset`` of ``path``, and remove a byte order mark."""
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset = len(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(
            f"{path}: byte {offset + error.start} is not UTF-8 (0x{data[error.start]:02x}); convert the file to UTF-8"
        ) from None


_READERS: dict[str, Callable[[FileReader], Iterator[tuple[int, Any]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
