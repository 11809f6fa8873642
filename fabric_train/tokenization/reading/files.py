"""Rows out of one local file: txt, md, csv, json, jsonl, parquet, plain or compressed with gzip or zstandard.

Files are read directly and not through the loaders of ``datasets``, because those change documents ("NA" in a
csv becomes nothing, strings that look like dates become dates) and report bad JSON or bad UTF-8 without its place.
"""

import codecs
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from fabric_train.cli.errors import InputError, first_line
from fabric_train.tokenization.documents import BadRowError

Row = Mapping[str, Any]

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_FOREIGN = {
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


@dataclass(frozen=True)
class Part:
    """What is read of a file: all of it, or bytes ``start`` to ``stop`` of JSON lines, or these row groups of parquet.

    ``num_bytes`` is what it takes of the disk. A line belongs to the part that it begins in.
    """

    path: Path
    num_bytes: int
    start: int = 0
    stop: int | None = None

    @property
    def suffix(self) -> str:
        """Lower-case suffix beneath a compression's."""
        return file_suffix(self.path)


class Reader:
    """Iterates over the rows of a part as (number, row), ``number`` counting from 1 within the part.

    A row that cannot be used is a ``BadRowError`` in its stead. ``position`` is how many of the part's bytes have been
    read.

    Args:
        part: what to read.
        columns: columns to keep where a file is stored by column; a txt or md is one row with the first of them.

    Raises:
        InputError: the file is not what its name says; with the place.
    """

    def __init__(self, part: Part, columns: tuple[str, ...]) -> None:
        self.part, self.columns, self.position = part, columns, 0

    def __iter__(self) -> Iterator[tuple[int, Row | BadRowError]]:
        yield from _READERS[self.part.suffix](self)
        self.position = self.part.num_bytes

    def place(self, number: int) -> str:
        """Return where row ``number`` is, for the user."""
        path = self.part.path
        if self.part.suffix in (".txt", ".md"):
            return str(path)
        if self.part.suffix == ".jsonl" or (self.part.suffix == ".json" and is_json_lines(path)):
            return f"{path}, line {self._lines_before() + number}"
        return f"{path}, record {number}"

    def _lines_before(self) -> int:
        """Count the lines before the part, which only a fault makes worth reading them."""
        if not self.part.start:
            return 0
        with self.part.path.open("rb") as file:
            lines = left = 0
            left = self.part.start
            while left > 0 and (piece := file.read(min(left, 1 << 20))):
                lines += piece.count(b"\n")
                left -= len(piece)
            file.seek(self.part.start - 1)
            return lines + (file.read(1) != b"\n")  # the line that began before is the part's before


def file_suffix(path: Path) -> str:
    """Return the lower-case suffix that tells the kind of file, without that of its compression."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in _COMPRESSIONS else path.suffix.lower()


def is_readable(path: Path) -> bool:
    """Return whether the name promises a file that can be read."""
    return file_suffix(path) in _READERS and not (file_suffix(path) == ".parquet" and is_compressed(path))


def is_compressed(path: Path) -> bool:
    """Return whether the name says gzip or zstandard."""
    return path.suffix.lower() in _COMPRESSIONS


def readable_suffixes() -> str:
    """Return the suffixes of readable files, for the user."""
    return f"{', '.join(_READERS)} (but for parquet also with {' or '.join(_COMPRESSIONS)})"


def split_file(path: Path, part_bytes: int) -> list[Part]:
    """Cut a file into parts of about ``part_bytes`` where its kind allows it; otherwise the file is one part.

    Raises:
        InputError: it is not the parquet its name says.
    """
    size = path.stat().st_size
    suffix = file_suffix(path)
    if suffix == ".parquet":
        return _split_parquet(path, part_bytes)
    is_lines = suffix == ".jsonl" or (suffix == ".json" and not is_compressed(path) and is_json_lines(path))
    if not is_lines or is_compressed(path) or size <= part_bytes:
        return [Part(path, size)]
    starts = range(0, size, part_bytes)
    return [Part(path, min(part_bytes, size - start), start, min(start + part_bytes, size)) for start in starts]


def _split_parquet(path: Path, part_bytes: int) -> list[Part]:
    from pyarrow import parquet

    with _whole_parquet(path), parquet.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
    parts: list[Part] = []
    first = total = 0
    for group, size in enumerate(sizes, 1):
        total += size
        if total >= part_bytes or group == len(sizes):
            parts.append(Part(path, total, first, group))
            first, total = group, 0
    return parts or [Part(path, path.stat().st_size, 0, 0)]


@contextmanager
def _opened(reader: Reader) -> Iterator[BinaryIO]:
    """Open the part's file at its beginning, decompressed; keep the reader's position."""
    path = reader.part.path
    with path.open("rb") as raw:
        if not is_compressed(path):
            _refuse_foreign(path, raw.read(8))
            raw.seek(0)
            yield raw
            return
        import pyarrow

        compression = _COMPRESSIONS[path.suffix.lower()]
        try:
            with pyarrow.CompressedInputStream(_Counted(raw, reader), compression) as stream:
                file = io.BufferedReader(stream, 1 << 20)
                _refuse_foreign(path, file.peek(8)[:8])
                yield file
        except OSError as error:  # arrow's errors of damaged streams are OSErrors without a number
            if error.errno:
                raise
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"{path}: not a whole {compression} file: {reason}; fetch it again") from None


class _Counted(io.RawIOBase):
    """A file whose reads set a reader's position."""

    def __init__(self, file: BinaryIO, reader: Reader) -> None:
        self._file, self._reader = file, reader

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self._reader.position += len(piece)
        return piece


def _read_text(reader: Reader) -> Iterator[tuple[int, Row | BadRowError]]:
    path = reader.part.path
    with _opened(reader) as file:
        data = file.read()
    zero = data.find(b"\0")
    if zero >= 0:
        yield 1, BadRowError(f"{path}: byte {zero} is zero, so it is binary data and not text")
        return
    try:
        yield 1, {reader.columns[0]: _decode(data, path, 0)}
    except BadRowError as error:
        yield 1, error


def _read_json_lines(reader: Reader) -> Iterator[tuple[int, Row | BadRowError]]:
    part = reader.part
    stop = sys.maxsize if part.stop is None else part.stop
    with _opened(reader) as file:
        position = 0
        if part.start:
            position = file.seek(part.start - 1)
            position += len(file.readline())  # the rest of the line that began before
        number = 0
        while position < stop and (line := file.readline()):
            number += 1
            start, position = position, position + len(line)
            if not is_compressed(part.path):
                reader.position = position - part.start
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


def _parse_line(line: bytes, start: int, reader: Reader, number: int) -> Any:
    """Parse what orjson refuses: NaN, half surrogates and a byte order mark are read, the rest gets its reason."""
    text = _decode(line, reader.part.path, start)
    try:
        return _parse_json(text.strip())
    except BadRowError as error:
        raise BadRowError(f"{reader.place(number)}: {error}") from None


def _checked(row: Any, reader: Reader, number: int) -> Row | BadRowError:
    if isinstance(row, dict):
        return row
    return BadRowError(
        f"{reader.place(number)}: a JSON {type(row).__name__}, not an object with a column {reader.columns[0]!r}"
    )


def _read_json(reader: Reader) -> Iterator[tuple[int, Row | BadRowError]]:
    """Yield the rows of an array of objects, of one object, or of JSON lines in a file called .json."""
    path = reader.part.path
    if is_json_lines(path):
        yield from _read_json_lines(reader)
        return
    with _opened(reader) as file:
        data = file.read()
    try:
        text = _decode(data, path, 0)
        content = _parse_json(text) if text.strip() else []
    except BadRowError as error:
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise InputError(f"{where}{error}; mend the file, or leave it out") from None
    for number, row in enumerate(content if isinstance(content, list) else [content], 1):
        yield number, _checked(row, reader, number)


def is_json_lines(path: Path) -> bool:
    """Return whether the first line that is not blank is a JSON object by itself."""
    with _opened(Reader(Part(path, 0), ())) as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return first.lstrip(codecs.BOM_UTF8).lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(reader: Reader) -> Iterator[tuple[int, Row | BadRowError]]:
    path = reader.part.path
    csv.field_size_limit(sys.maxsize)
    with _opened(reader) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                return
            for number, row in enumerate((row for row in rows if row), 1):
                if len(row) != len(header):
                    yield (
                        number,
                        BadRowError(
                            f"{path}, line {rows.line_num}: {len(row)} fields, but the header has {len(header)}"
                        ),
                    )
                else:
                    yield number, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise InputError(f"{path}, line {rows.line_num}: not csv: {error}; mend its quotes") from None
        except UnicodeDecodeError:
            raise _undecodable(path) from None


def _read_parquet(reader: Reader) -> Iterator[tuple[int, Row]]:
    from pyarrow import parquet

    part = reader.part
    number = 0
    with _whole_parquet(part.path), parquet.ParquetFile(part.path) as file:
        schema = file.schema_arrow
        columns = [name for name in reader.columns if name in schema.names]
        if not columns:
            raise missing_column(str(part.path), reader.columns[0], schema.names)
        refuse_numbers(str(part.path), schema, columns)
        groups = list(range(part.start, file.metadata.num_row_groups if part.stop is None else part.stop))
        num_rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
        for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
            reader.position = part.num_bytes * number // num_rows


@contextmanager
def _whole_parquet(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except UnicodeDecodeError:
        raise InputError(f"{path}: a column of text holds bytes that are not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole parquet file: {first_line(error).rstrip('.')}; fetch it again") from None


def refuse_numbers(place: str, schema: Any, columns: list[str]) -> None:
    """Raise InputError for a column of a pyarrow schema that is neither text nor nested."""
    from pyarrow import types

    for name in columns:
        kind = schema.field(name).type
        if types.is_dictionary(kind):
            kind = kind.value_type
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        if not (is_text or types.is_nested(kind) or types.is_null(kind)):
            raise InputError(f"{place}: {_not_text(name, kind)}")


def text_of(row: Row, column: str, place: Callable[[], str]) -> str | None:
    """Return the row's text, None or blank where the document is empty.

    Raises:
        BadRowError: the column is missing or holds something else; ``place`` tells where.
    """
    value = row.get(column)
    if value is None:
        if column in row:
            return None
        raise BadRowError(str(missing_column(place(), column, row)))
    if not isinstance(value, str):
        raise BadRowError(f"{place()}: {_not_text(column, type(value).__name__)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRowError(
            f"{place()}: column {column!r} holds half a surrogate pair at character {error.start}, which is no text"
        ) from None
    return value


def _not_text(column: str, kind: object) -> str:
    return f"column {column!r} holds {kind}, not text; choose another with --text_column"


def missing_column(place: str, column: str, columns: Any) -> InputError:
    """Return the fault that names the columns there are."""
    names = ", ".join(map(str, columns)) or "none"
    return InputError(f"{place}: no column {column!r}; there are: {names}; choose one with --text_column")


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadRowError(f"not JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"not JSON that can be read: {error}") from None


def _decode(data: bytes, path: Path, offset: int) -> str:
    """Decode UTF-8 that begins at byte ``offset`` of ``path``, without a byte order mark."""
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset = len(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRowError(
            f"{path}: byte {offset + error.start} is not UTF-8 (0x{data[error.start]:02x}); convert the file to UTF-8"
        ) from None


def _undecodable(path: Path) -> InputError:
    """Return the fault with the place of the first byte of ``path`` that is not UTF-8."""
    offset = 0
    with _opened(Reader(Part(path, 0), ())) as file:
        for line in file:
            try:
                _decode(line, path, offset)
            except BadRowError as fault:
                return InputError(str(fault))
            offset += len(line)
    raise AssertionError(f"{path} is UTF-8 after all")


def _refuse_foreign(path: Path, start: bytes) -> None:
    for mark, kind in _FOREIGN.items():
        if start.startswith(mark):
            raise InputError(
                f"{path}: its content is {kind}, not {file_suffix(path)} text in UTF-8; convert or unpack it"
            )


_READERS: dict[str, Callable[[Reader], Iterator[tuple[int, Any]]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
