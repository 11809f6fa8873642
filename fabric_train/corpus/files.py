"""Documents out of one local file: txt, md, csv, json, jsonl, parquet.

Files are read directly and not through the loaders of ``datasets``, because those change documents ("NA" in a
csv becomes nothing, strings that look like dates become dates) and report bad JSON or bad UTF-8 without its place.
"""

import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fabric_train.errors import InputError

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


def read_documents(path: Path, text_column: str) -> Iterator[str | None]:
    """Yield the documents of ``path`` in order; None or blank text where a document is empty.

    Raises:
        InputError: the file is not what its name says, or its ``text_column`` is missing or not text; with the place.
    """
    yield from READERS[path.suffix.lower()](path, text_column)


def check_text(value: object, text_column: str, place: str) -> str | None:
    """Return ``value`` if it is text that can be encoded, or None.

    Raises:
        InputError: it is something else; ``place`` tells where.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise not_text(place, text_column, type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{place}: column {text_column!r} holds half a surrogate pair at character {error.start}, which is no text"
        ) from None
    return value


def not_text(place: str, text_column: str, kind: object) -> InputError:
    """Return the fault of a column that holds ``kind``."""
    return InputError(f"{place}: column {text_column!r} holds {kind}, not text; choose another with --text_column")


def missing_column(place: str, text_column: str, columns: Iterable[object]) -> InputError:
    """Return the fault that names the columns there are."""
    names = ", ".join(map(str, columns)) or "none"
    return InputError(f"{place}: no column {text_column!r}; there are: {names}; choose one with --text_column")


def _read_text(path: Path, _text_column: str) -> Iterator[str]:
    _refuse_foreign(path)
    data = path.read_bytes()
    zero = data.find(b"\0")
    if zero >= 0:
        raise InputError(f"{path}: byte {zero} is zero, so it is binary data and not text")
    yield _decode(data, path, 0)


def _read_json_lines(path: Path, text_column: str) -> Iterator[str | None]:
    _refuse_foreign(path)
    offset = 0
    asked = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset).strip()
            offset += len(line)
            if not text:
                continue
            place = f"{path}, line {number}"
            record = _parse(text, place)
            if not isinstance(record, dict):
                raise InputError(
                    f"{place}: a JSON {type(record).__name__}, not an object with a column {text_column!r}"
                )
            if not asked and text_column not in record:
                raise missing_column(place, text_column, record)
            asked = True
            yield check_text(record.get(text_column), text_column, place)


def _read_json(path: Path, text_column: str) -> Iterator[str | None]:
    """Yield the documents of an array of objects, of one object, or of JSON lines in a file called .json."""
    _refuse_foreign(path)
    if _is_json_lines(path):
        yield from _read_json_lines(path, text_column)
        return
    text = _decode(path.read_bytes(), path, 0)
    content = _parse(text, str(path)) if text.strip() else []
    records = content if isinstance(content, list) else [content]
    for number, record in enumerate(records, 1):
        place = f"{path}, record {number}"
        if not isinstance(record, dict):
            raise InputError(f"{place}: a JSON {type(record).__name__}, not an object with a column {text_column!r}")
        if number == 1 and text_column not in record:
            raise missing_column(place, text_column, record)
        yield check_text(record.get(text_column), text_column, place)


def _is_json_lines(path: Path) -> bool:
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        return first.lstrip().startswith(b"{") and isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_csv(path: Path, text_column: str) -> Iterator[str]:
    _refuse_foreign(path)
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                return
            if text_column not in header:
                raise missing_column(str(path), text_column, header)
            column = header.index(text_column)
            for row in rows:
                if row and len(row) != len(header):
                    raise InputError(
                        f"{path}, line {rows.line_num}: {len(row)} fields, but the header has {len(header)}"
                    )
                if row:
                    yield row[column]
        except csv.Error as error:
            raise InputError(f"{path}, line {rows.line_num}: not csv: {error}") from None
        except UnicodeDecodeError:
            raise _undecodable(path) from None


def _read_parquet(path: Path, text_column: str) -> Iterator[str | None]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if text_column not in schema.names:
                raise missing_column(str(path), text_column, schema.names)
            column_type = schema.field(text_column).type
            if not is_text_type(column_type):
                raise not_text(str(path), text_column, column_type)
            for batch in file.iter_batches(batch_size=256, columns=[text_column]):
                yield from batch.column(text_column).to_pylist()
    except UnicodeDecodeError:
        raise InputError(f"{path}: column {text_column!r} holds bytes that are not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a whole parquet file: {str(error).splitlines()[0]}") from None


def is_text_type(arrow_type: Any) -> bool:
    """Return whether a pyarrow type is text, dictionary-encoded or not."""
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return types.is_string(arrow_type) or types.is_large_string(arrow_type) or types.is_string_view(arrow_type)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise InputError(f"{place}: not JSON: {error.msg} at {where}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON that can be read: {error}") from None


def _decode(data: bytes, path: Path, offset: int) -> str:
    """Decode UTF-8 that begins at byte ``offset`` of ``path``, without a byte order mark."""
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset = len(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: byte {offset + error.start} is not UTF-8 (0x{data[error.start]:02x}); convert the file to UTF-8"
        ) from None


def _undecodable(path: Path) -> InputError:
    """Return the fault with the place of the first byte of ``path`` that is not UTF-8."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            try:
                _decode(line, path, offset)
            except InputError as fault:
                return fault
            offset += len(line)
    raise AssertionError(f"{path} is UTF-8 after all")


def _refuse_foreign(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    for mark, kind in _FOREIGN.items():
        if start.startswith(mark):
            raise InputError(
                f"{path}: its content is {kind}, not {path.suffix.lower()} text in UTF-8; convert or unpack it"
            )


READERS: dict[str, Callable[[Path, str], Iterator[str | None]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}
