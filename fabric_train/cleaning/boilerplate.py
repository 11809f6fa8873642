"""Remove lines that are in many documents: headers, footers, navigation, notices.

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

from fabric_train.cleaning.dropped import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json

# letters and digits of a line that counts, so that no blank line, brace, ``else:`` or name in a play is removed
MIN_LETTERS = 15
_COUNTS = re.compile(rf"(?:[\W_]*[^\W_]){{{MIN_LETTERS}}}")
_EDIT = "boilerplate lines"
_REASON = "only_boilerplate"
_SHOWN_CHARACTERS = 100
FORMAT = 1  # of the hashes, the rule, and the files of counts; raise it when one of them changes
_RECORD = "lines.json"
_HASHES = "hashes"
_MAKE_AGAIN = "count the lines again, with --shard and this version, and merge the slices"


@dataclass(frozen=True)
class Boilerplate:
    """The cleaning step: removes the lines that ``num_documents`` documents or more have.

    ``hashes`` of these lines are uint64 [lines], sorted; empty until they are counted. ``most_frequent`` are those that
    most documents have, each with the number of documents.
    """

    num_documents: int
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    most_frequent: tuple[tuple[str, int], ...] = ()

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text without the repeated lines, and without the blank lines that they leave.

        A blank line after a removed line is removed too if a blank line or nothing is before; so are blank lines at the
        end after which there was only boilerplate.
        """
        lines = text.split("\n")
        places = self._find(lines)
        if not places:
            return text
        edits[_EDIT] += len(places)
        kept: list[str] = []
        after_removed = False
        for place, line in enumerate(lines):
            if place in places:
                after_removed = True
            elif line.strip():
                kept.append(line)
                after_removed = False
            elif not after_removed or (kept and kept[-1].strip()):
                kept.append(line)
        while after_removed and kept and not kept[-1].strip():
            kept.pop()
        return "\n".join(kept) if kept else Dropped(_REASON, f"{len(places)} lines")

    def _find(self, lines: list[str]) -> set[int]:
        if not len(self.hashes):
            return set()
        hashed = np.array(list(hash_lines(lines)), dtype=np.uint64).reshape(-1, 2)
        found = np.searchsorted(self.hashes, hashed[:, 1])
        is_repeated = self.hashes[np.minimum(found, len(self.hashes) - 1)] == hashed[:, 1]
        return set(hashed[is_repeated, 0].tolist())

    def redacted(self, redact: Callable[[str], str]) -> "Boilerplate":
        """Return the step with ``redact`` of the lines to be shown."""
        return replace(self, most_frequent=tuple((redact(line), count) for line, count in self.most_frequent))

    def shown(self) -> list[str]:
        """Return the beginnings of the most frequent lines."""
        return [f"{line[:_SHOWN_CHARACTERS]} ({count:,} documents)" for line, count in self.most_frequent]

    def settings(self) -> dict[str, Any]:
        return {
            "num_documents": self.num_documents,
            "min_letters": MIN_LETTERS,
            "lines": len(self.hashes),
            "sha256": hashlib.sha256(self.hashes.tobytes()).hexdigest(),
            "most_frequent": self.shown(),
            "format": FORMAT,
        }


def hash_lines(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield place and 64-bit hash of each line with 15 letters or digits or more; white space counts as one space."""
    for place, line in enumerate(lines):
        if _COUNTS.match(line):
            yield place, xxhash.xxh3_64_intdigest(" ".join(line.split()).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class _LinesRecord:
    """The content of ``lines.json``; ``sha256`` is of the file of hashes."""

    format: int
    text_column: str
    num_documents: int
    sha256: str
    most_frequent: list[tuple[str, int]]


def write_repeated_lines(folder: Path, lines: Boilerplate, text_column: str) -> None:
    """Write the lines that are in many documents; they were counted in ``text_column``."""
    hashes = lines.hashes.astype("<u8").tobytes()
    digest = hashlib.sha256(hashes).hexdigest()
    record = _LinesRecord(FORMAT, text_column, lines.num_documents, digest, list(lines.most_frequent))
    (folder / _HASHES).write_bytes(hashes)
    (folder / _RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def open_boilerplate(given: int | str, text_column: str) -> Boilerplate:
    """Return the step for --boilerplate: of a folder with its lines, of a number without, to be counted."""
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
