"""The folder of repeated lines that --boilerplate may name instead of a number of documents.

A merge of counted slices writes it (``counted_slices.py``); any corpus may be cleaned with it::

    lines/lines.json   in how many documents they are, the column that has them, and those that most documents have
          hashes       uint64, little endian, sorted: the hash of each
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json
from fabric_train.tokenization.cleaning.boilerplate import FORMAT, Boilerplate

_RECORD, _HASHES = "lines.json", "hashes"
_MAKE_AGAIN = "count the lines again, with --shard and this version, and merge the slices"


@dataclass(frozen=True)
class _LinesRecord:
    """The content of ``lines.json``.

    Args:
        format: of hashes and rule.
        text_column: the column whose lines were counted.
        num_documents: see ``Boilerplate``.
        sha256: of the file of hashes.
        most_frequent: see ``Boilerplate``.
    """

    format: int
    text_column: str
    num_documents: int
    sha256: str
    most_frequent: list[tuple[str, int]]


def write_repeated_lines(folder: Path, lines: Boilerplate, text_column: str) -> None:
    """Write the lines that are in many documents; ``text_column`` is the one whose lines were counted."""
    hashes = lines.hashes.astype("<u8").tobytes()
    digest = hashlib.sha256(hashes).hexdigest()
    record = _LinesRecord(FORMAT, text_column, lines.num_documents, digest, list(lines.most_frequent))
    (folder / _HASHES).write_bytes(hashes)
    (folder / _RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def open_boilerplate(given: int | str, text_column: str) -> Boilerplate:
    """Return the step for a value of --boilerplate: of a folder with its lines, of a number without, to be counted.

    Raises:
        InputError: the folder has no such lines or is damaged, or they were counted in another way or column.
    """
    return Boilerplate(given) if isinstance(given, int) else _read(Path(given).expanduser(), text_column)


def _read(folder: Path, text_column: str) -> Boilerplate:
    if not (folder / _RECORD).is_file():
        known = "give a number of documents, or a folder that a merge of counted slices has written"
        raise InputError(f"--boilerplate {folder}: no lines.json there; {known} (docs/cleaning.md)")
    record = read_json(folder / _RECORD, _LinesRecord, _MAKE_AGAIN)
    if record.format != FORMAT:
        raise InputError(f"{folder / _RECORD} has format {record.format}, this version reads {FORMAT}; {_MAKE_AGAIN}")
    if record.text_column != text_column:
        counted = f"--boilerplate {folder} has lines of the column {record.text_column!r}, not {text_column!r}"
        raise InputError(f"{counted}; give --text_column {record.text_column}, or count the lines of {text_column!r}")
    try:
        hashes = (folder / _HASHES).read_bytes()
    except OSError as error:
        raise InputError(f"{folder / _HASHES}: {error.strerror}; {_MAKE_AGAIN}") from None
    if hashlib.sha256(hashes).hexdigest() != record.sha256:
        raise InputError(f"{folder / _HASHES}: damaged; {_MAKE_AGAIN}")
    lines = np.frombuffer(hashes, "<u8").astype(np.uint64)
    return Boilerplate(record.num_documents, lines, tuple(record.most_frequent))
