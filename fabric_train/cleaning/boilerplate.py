"""Remove lines that occur in many documents: headers, footers, navigation, notices.

CCNet (arXiv:1911.00359) removes paragraphs that repeat, and C4 (arXiv:1910.10683) spans of sentences. Here a line is
removed from all documents if at least ``num_documents`` of them have it. ``tokenization/line_counts.py`` counts the
lines of a corpus.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json

# a line with fewer letters and digits is never removed: a blank line, a brace, ``else:``, the name of a speaker
MIN_LETTERS = 15
_COUNTS = re.compile(rf"(?:[\W_]*[^\W_]){{{MIN_LETTERS}}}")
_EDIT = "boilerplate lines"
_REASON = "only_boilerplate"
_SHOWN_CHARACTERS = 100
FORMAT = 1  # of the hashes, the rule, and the files of counts; raise it when one of them changes
_RECORD = "lines.json"
_HASHES = "hashes"
_MAKE_AGAIN = "count the lines again with --shard and this version, and merge the slices"


@dataclass(frozen=True)
class Boilerplate:
    """The cleaning step that removes lines which occur in many documents."""

    num_documents: int
    """A line is removed if it occurs in at least this number of documents."""
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    """Hashes of the lines to remove, uint64 [lines], sorted; empty until the lines of the corpus are counted."""
    most_frequent: tuple[tuple[str, int], ...] = ()
    """The lines in the most documents, each with the number of documents, as examples for the user."""

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text without the repeated lines, and without the blank lines that they leave.

        A blank line after a removed line is removed too if the removed line came first, or after another blank line. So
        are blank lines at the end of the text if only boilerplate came before them.

        ``edits`` counts the removed lines.
        """
        lines = text.split("\n")
        repeated = self._find_repeated(lines)
        if not repeated:
            return text
        edits[_EDIT] += len(repeated)
        remaining_lines: list[str] = []
        follows_removed = False  # whether only removed and blank lines came since the last remaining text
        for index, line in enumerate(lines):
            if index in repeated:
                follows_removed = True
                continue
            if line.strip():
                remaining_lines.append(line)
                follows_removed = False
                continue
            # a blank line separates: one is enough
            ends_with_text = bool(remaining_lines) and bool(remaining_lines[-1].strip())
            if ends_with_text or not follows_removed:
                remaining_lines.append(line)
        while follows_removed and remaining_lines and not remaining_lines[-1].strip():
            remaining_lines.pop()
        if not remaining_lines:
            return Dropped(_REASON, f"{len(repeated)} lines")
        return "\n".join(remaining_lines)

    def _find_repeated(self, lines: list[str]) -> set[int]:
        """Return the indices of the lines to remove."""
        if not len(self.hashes):
            return set()
        hashed_lines = np.array(list(hash_lines(lines)), dtype=np.uint64).reshape(-1, 2)  # [lines that count, 2]
        line_indices = hashed_lines[:, 0]
        line_hashes = hashed_lines[:, 1]
        positions = np.searchsorted(self.hashes, line_hashes)
        positions = np.minimum(positions, len(self.hashes) - 1)  # a hash above all others has the position after them
        is_repeated = self.hashes[positions] == line_hashes
        return set(line_indices[is_repeated].tolist())

    def redacted(self, redact: Callable[[str], str]) -> "Boilerplate":
        """Return this step with ``redact`` applied to the lines that the user sees."""
        return replace(self, most_frequent=tuple((redact(line), count) for line, count in self.most_frequent))

    def shown(self) -> list[str]:
        """Return the beginnings of the most frequent lines."""
        return [f"{line[:_SHOWN_CHARACTERS]} ({count:,} documents)" for line, count in self.most_frequent]

    def settings(self) -> dict[str, Any]:
        """Return everything that determines the result, and the most frequent lines, for the manifest."""
        return {
            "num_documents": self.num_documents,
            "min_letters": MIN_LETTERS,
            "lines": len(self.hashes),
            "sha256": hashlib.sha256(self.hashes.tobytes()).hexdigest(),
            "most_frequent": self.shown(),
            "format": FORMAT,
        }


def hash_lines(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the index and the 64-bit hash of each line that has at least 15 letters or digits.

    Lines that differ only in white space have the same hash.
    """
    for index, line in enumerate(lines):
        if _COUNTS.match(line):
            normalized = " ".join(line.split())
            yield index, xxhash.xxh3_64_intdigest(normalized.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class _LinesRecord:
    """The content of ``lines.json``."""

    format: int
    text_column: str
    num_documents: int
    sha256: str  # of the file ``hashes``, in hexadecimal
    most_frequent: list[tuple[str, int]]


def write_repeated_lines(folder: Path, lines: Boilerplate, text_column: str) -> None:
    """Write the folder for --boilerplate with the hashes of ``lines``, which were counted in ``text_column``."""
    hashes = lines.hashes.astype("<u8").tobytes()
    record = _LinesRecord(
        format=FORMAT,
        text_column=text_column,
        num_documents=lines.num_documents,
        sha256=hashlib.sha256(hashes).hexdigest(),
        most_frequent=list(lines.most_frequent),
    )
    (folder / _HASHES).write_bytes(hashes)
    (folder / _RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def open_boilerplate(switch: int | str, text_column: str) -> Boilerplate:
    """Return the step for the value of --boilerplate.

    Args:
        switch: a number of documents, for a step that has no lines until they are counted; or a folder of repeated
            lines.
        text_column: the column that is cleaned; the folder's lines must have been counted in the same column.

    Raises:
        InputError: the folder is missing, damaged or from another version, or its lines come from another column.
    """
    if isinstance(switch, int):
        return Boilerplate(switch)
    return _read_repeated_lines(Path(switch).expanduser(), text_column)


def _read_repeated_lines(folder: Path, text_column: str) -> Boilerplate:
    """Read a folder that :func:`write_repeated_lines` has written."""
    if not (folder / _RECORD).is_file():
        remedy = "give a number of documents, or a folder written by a merge of counted slices"
        raise InputError(f"--boilerplate {folder}: it has no lines.json; {remedy} (docs/cleaning.md)")
    record = read_json(folder / _RECORD, _LinesRecord, _MAKE_AGAIN)
    if record.format != FORMAT:
        raise InputError(
            f"{folder / _RECORD} has format {record.format}, but this version reads {FORMAT}; {_MAKE_AGAIN}"
        )
    if record.text_column != text_column:
        fault = f"--boilerplate {folder} has lines from the column {record.text_column!r}, not {text_column!r}"
        raise InputError(f"{fault}; give --text_column {record.text_column}, or count the lines of {text_column!r}")
    try:
        hashes = (folder / _HASHES).read_bytes()
    except OSError as error:
        raise InputError(f"{folder / _HASHES}: {error.strerror}; {_MAKE_AGAIN}") from None
    if hashlib.sha256(hashes).hexdigest() != record.sha256:
        raise InputError(f"{folder / _HASHES}: damaged; {_MAKE_AGAIN}")
    line_hashes = np.frombuffer(hashes, "<u8").astype(np.uint64)  # also on big-endian machines
    return Boilerplate(record.num_documents, line_hashes, tuple(record.most_frequent))
