"""Read the rows of one local file: txt, md, csv, json, jsonl or parquet, plain or compressed with gzip or zstandard.

The loaders of ``datasets`` are not used, because they change documents ("NA" in a csv becomes None, strings that look
like dates become dates) and report bad JSON or bad UTF-8 without its location.
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
from fabric_train.reading.listing import FilePart, ListedFile, file_suffix, is_compressed, open_decompressed


class FileReader:
    """An iterable over the rows of a part as (number, row); ``number`` counts from 1 within the part.

    A row that cannot be used is replaced by a ``BadRowError``. InputError if the file is damaged or of another
    kind.

    Args:
        part: the part of a file.
        columns: the columns to read from parquet; a txt or md file is one row with the first of them.

    Attributes:
        position: the part's bytes up to the end of the last row; an estimate for compressed files, JSON arrays and
            parquet, and up to 8 KiB more for csv.
        num_counted: the rows so far; in JSON lines, blank lines count too.
    """

    def __init__(self, part: FilePart, columns: tuple[str, ...]) -> None:
        self.part = part
        self.columns = columns
        self.position = 0
        self.num_counted = 0
        self.content: bytes | None = None  # of the file, once it has been read at once
        self.unread_columns: frozenset[str] = frozenset()  # of a parquet file that has been opened
        self._file_after_reading = part.file
        self._suffix = file_suffix(part.name)

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]:
        try:
            with naming_memory_errors(self.part.name):
                if self.part.is_read_at_once:
                    self.content, self._file_after_reading = listing.read_file(self.part.file)
                for number, row in _READERS[self._suffix](self):
                    self.num_counted = number
                    yield number, row
        except OSError as error:
            if error.errno and error.filename is None:  # a failed read does not name the file
                error.filename = self.part.name
            raise
        self.position = self.part.num_bytes

    def sha256(self) -> bytes:
        """Return the SHA-256 of a file read at once, or ``NO_SHA256`` for others; InputError if it has changed."""
        if self.content is None:
            return listing.NO_SHA256
        if self._file_after_reading != self.part.file:
            raise listing.changed(self.part.file)
        return hashlib.sha256(self.content).digest()

    def place(self, number: int) -> str:
        """Return the path, and the line or the record, of the row with this number."""
        path = self.part.name
        if self._suffix in (".txt", ".md"):
            return path
        if _has_json_lines(self.part.file):
            return f"{path}, line {self._count_lines_before() + number}"
        return f"{path}, record {number}"

    def _count_lines_before(self) -> int:
        """Count the lines before the part, for error messages: this reads the file again."""
        start = self.part.start
        if start == 0:
            return 0
        num_lines = 0
        with open(self.part.name, "rb") as file:
            remaining_bytes = start
            while remaining_bytes > 0 and (piece := file.read(min(remaining_bytes, 1 << 20))):
                num_lines += piece.count(b"\n")
                remaining_bytes -= len(piece)
            file.seek(start - 1)
            if file.read(1) != b"\n":  # a line that began earlier belongs to an earlier part
                num_lines += 1
        return num_lines


@contextmanager
def naming_memory_errors(file_name: str) -> Iterator[None]:
    """Turn a MemoryError into a RunError that names the file."""
    try:
        yield
    except MemoryError as error:
        fix = "use fewer processes, or split it into smaller files"
        raise RunError(f"{file_name}: out of memory while reading it ({first_line(error)}); {fix}") from None


def is_readable(name: str | Path) -> bool:
    """Return whether a file of this name can be read."""
    suffix = file_suffix(name)
    if suffix == ".parquet" and is_compressed(name):
        return False
    return suffix in _READERS


def readable_suffixes() -> str:
    """Return the suffixes of readable files for messages."""
    return f"{', '.join(_READERS)} (all except parquet also with {' or '.join(listing.COMPRESSIONS)})"


def split_file(file: ListedFile, part_bytes: int, origin: int = 0) -> list[FilePart]:
    """Split JSON lines or parquet into parts of about ``part_bytes`` bytes; any other file is one part."""
    if file_suffix(file.name) == ".parquet":
        return _split_parquet(file, part_bytes, origin)
    if file.size <= part_bytes or is_compressed(file.name) or not _has_json_lines(file):
        return [FilePart(file, file.size, origin=origin)]
    parts: list[FilePart] = []
    for start in range(0, file.size, part_bytes):
        stop = min(start + part_bytes, file.size)
        parts.append(FilePart(file, stop - start, start, stop, origin))
    return parts


def _has_json_lines(file: ListedFile) -> bool:
    """Return whether a file is read as JSON lines; the content of a .json file decides."""
    suffix = file_suffix(file.name)
    if suffix == ".json":
        return is_json_lines(file)
    return suffix == ".jsonl"


def _split_parquet(file: ListedFile, part_bytes: int, origin: int) -> list[FilePart]:
    """Split parquet into parts with row groups of about ``part_bytes`` bytes, uncompressed."""
    from pyarrow import parquet

    with _whole_parquet(file.name), parquet.ParquetFile(file.name) as parquet_file:
        metadata = parquet_file.metadata
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    parts: list[FilePart] = []
    first_group = 0
    num_bytes = 0
    for next_group, size in enumerate(sizes, 1):
        num_bytes += size
        if num_bytes >= part_bytes or next_group == len(sizes):
            parts.append(FilePart(file, num_bytes, first_group, next_group, origin))
            first_group = next_group
            num_bytes = 0
    if not parts:  # a table without rows: its columns are checked
        parts.append(FilePart(file, file.size, 0, 0, origin))
    return parts


def _read_text(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    """Yield the full file as one row."""
    path = reader.part.name
    with open_decompressed(reader.part.file, reader.content) as file:
        data = file.read()
    zero_byte = data.find(b"\0")
    if zero_byte >= 0:
        yield 1, BadRowError(f"{path}: byte {zero_byte} is zero, so it is binary data, not text")
        return
    reader.position = reader.part.num_bytes
    try:
        yield 1, {reader.columns[0]: _decode(data, path, 0)}
    except BadRowError as error:
        yield 1, error


def _read_json_lines(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    """Yield the rows of the lines that begin in the part."""
    part = reader.part
    stop = sys.maxsize if part.stop is None else part.stop
    compressed = is_compressed(part.name)
    # the names that the text may have, as keys of an object
    names = set(reader.columns)
    names.update(name_in(column, ()) for column in reader.columns)
    keys = [f'"{name}"'.encode() for name in names]
    with open_decompressed(part.file, reader.content) as file:
        # the first line that begins in the part
        position = 0
        if part.start:
            position = file.seek(part.start - 1)
            position += len(file.readline())  # the rest of a line of the part before
        number = 0
        while position < stop and (line := file.readline()):
            number += 1
            reader.num_counted = number
            start = position
            position += len(line)
            reader.position = listing.position_in(file) if compressed else position - part.start

            # orjson is fast, but keeps the last of several equal keys. So a line in which a key occurs twice is parsed
            # again below, where a repeated key is a fault and an occurrence in the text is none
            try:
                row = orjson.loads(line)
                is_parsed = all(line.count(key) < 2 for key in keys)
            except orjson.JSONDecodeError:
                is_blank = not line.removeprefix(codecs.BOM_UTF8).strip()
                if is_blank:
                    continue
                is_parsed = False
            if not is_parsed:
                try:
                    row = _parse_line(line, start, reader, number)
                except BadRowError as error:
                    yield number, error
                    continue
            yield number, _check_is_object(row, reader, number)


def _parse_line(line: bytes, start: int, reader: FileReader, number: int) -> Any:
    """Parse a line that orjson rejects, such as one with NaN or a lone surrogate, or that may repeat a key."""
    text = _decode(line, reader.part.name, start)
    try:
        return _parse_json(text.strip(), reader.columns)
    except BadRowError as error:
        raise BadRowError(f"{reader.place(number)}: {error}") from None


def _check_is_object(row: Any, reader: FileReader, number: int) -> Row | BadRowError:
    """Return the row, or raise a fault if the value is not a JSON object."""
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
    with open_decompressed(reader.part.file, reader.content) as file:
        data = file.read()
    try:
        text = _decode(data, path, 0)
        content = _parse_json(text, reader.columns) if text.strip() else []
    except BadRowError as error:
        message = str(error)
        if not message.startswith(path):
            message = f"{path}: {message}"
        raise InputError(f"{message}; fix the file, or leave it out") from None
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, 1):
        reader.position = reader.part.num_bytes * number // len(rows)
        yield number, _check_is_object(row, reader, number)


def is_json_lines(file: ListedFile, content: bytes | None = None) -> bool:
    """Return whether the first line that is not blank is a complete JSON object.

    ``content`` is the content of the file, still compressed, if it has been read; None opens the file.
    """
    first_line_with_text = b""
    with open_decompressed(file, content) as lines:
        for line in lines:
            if line.strip():
                first_line_with_text = line
                break
    without_mark = first_line_with_text.removeprefix(codecs.BOM_UTF8)
    if not without_mark.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(without_mark), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(reader: FileReader) -> Iterator[tuple[int, Row | BadRowError]]:
    """Yield the rows below the header; a row with a fault is a bad row, a faulty header is an InputError."""
    path = reader.part.name
    csv.field_size_limit(sys.maxsize)
    with (
        open_decompressed(reader.part.file, reader.content) as binary_file,
        # bytes that are not UTF-8 are kept as surrogates, so that they are a fault of their own row only
        io.TextIOWrapper(binary_file, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        rows = csv.reader(file, strict=True)
        try:
            header: list[str] | None = next(rows, None)
            if header is None:  # an empty file
                return
            header_fault = _find_undecodable(header)
            if header_fault:
                raise InputError(f"{path}, line {rows.line_num}: {header_fault}")
            check_not_repeated(path, reader.columns, header)
            number = 0
            for row in rows:
                if not row:  # a blank line
                    continue
                number += 1
                reader.position = listing.position_in(binary_file)
                fault = _find_undecodable(row)
                if len(row) != len(header):
                    fault = f"{len(row)} fields, but the header has {len(header)}"
                if fault:
                    yield number, BadRowError(f"{path}, line {rows.line_num}: {fault}")
                else:
                    yield number, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}, line {rows.line_num}: not csv: {error}; fix the quotes") from None


def _find_undecodable(fields: list[str]) -> str | None:
    """Return the fault of fields that hold bytes as surrogates; None if no field does."""
    try:
        "".join(fields).encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) - 0xDC00
        return f"byte 0x{byte:02x} is not UTF-8; convert the file to UTF-8"
    return None


def _read_parquet(reader: FileReader) -> Iterator[tuple[int, Row]]:
    """Yield the rows of the part's row groups, with only the columns to read."""
    from pyarrow import parquet

    part = reader.part
    with _whole_parquet(part.name), parquet.ParquetFile(part.name) as file:
        # the columns
        schema = file.schema_arrow
        candidates = [name_in(column, schema.names) for column in reader.columns]
        columns = [name for name in candidates if name in schema.names]
        if not columns:
            raise missing_column(part.name, reader.columns[0], schema.names)
        check_not_repeated(part.name, columns, schema.names)
        check_text_column(part.name, schema, reader.columns[0])
        reader.unread_columns = frozenset(schema.names).difference(columns)
        nested = nested_columns(schema, columns)

        # the rows
        stop = file.metadata.num_row_groups if part.stop is None else part.stop
        groups = list(range(part.start, stop))
        num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
        number = 0
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                number += 1
                reader.position = part.num_bytes * number // num_rows
                for name, kind in nested.items():
                    row[name] = without_filling(row[name], kind, parses_json=True)
                yield number, row


@contextmanager
def _whole_parquet(path: str) -> Iterator[None]:
    """Turn the errors that pyarrow raises for a damaged file into an InputError."""
    import pyarrow

    try:
        yield
    except MemoryError:  # pyarrow's own error is also an ArrowException
        raise
    except UnicodeDecodeError:
        raise InputError(f"{path}: a text column holds bytes that are not UTF-8; save it as UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the system's, and no fault of the file
            raise
        reason = first_line(error).rstrip(".")
        raise InputError(f"{path}: incomplete parquet file: {reason}; download it again") from None


def _parse_json(text: str, columns: Sequence[str]) -> Any:
    """Parse JSON, and raise an error if an object has one of ``columns`` twice."""

    def build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            for column in columns:
                name = name_in(column, entries)
                count = keys.count(name)
                if count > 1:
                    raise BadRowError(f"{count} values are named {name!r}; keep one of them")
        return entries

    try:
        return json.loads(text, object_pairs_hook=build_object)
    except BadRowError:
        raise
    except json.JSONDecodeError as error:
        position = f"column {error.colno}"
        if "\n" in text:
            position = f"line {error.lineno}, {position}"
        raise BadRowError(f"not JSON: {error.msg} at {position}") from None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"cannot read JSON: {error}") from None


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
