"""Read the texts of a language, sample large ones, hold out a tenth of them, and count words."""

import hashlib
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.cli.errors import InputError
from fabric_train.tokenization.corpus import find_kind
from fabric_train.tokenization.documents import text_of
from fabric_train.tokenization.reading.sources import Source, open_sources, split_names
from fabric_train.tokenization.workers import progress_of

_SAMPLED_PARTS, _SMALLEST_PART = 64, 1 << 14
_FEWEST_TO_HOLD_OUT = 10
# Scripts that are written without spaces: Thai, Lao, Tibetan, Myanmar, Khmer, kana, Chinese characters
_ALONE = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")


@dataclass(frozen=True)
class LanguageTexts:
    """The documents of a language; ``note`` says how much of a large text was read, "" if all."""

    name: str
    documents: tuple[str, ...]
    note: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(len(document.encode()) for document in self.documents)


def words_of(text: str) -> list[str]:
    """Return the words of a text: what stands between spaces; each character of a script without spaces is one."""
    return _WORD.findall(text)


def read_texts(given: Sequence[str], text_column: str, max_bytes: str, seed: int) -> list[LanguageTexts]:
    """Read what ``--texts`` gives as NAME=PLACE; places of one name are one text.

    Of a place with more than ``max_bytes``, read parts all over it, in an order that ``seed`` decides. InputError with
    a line for each place that cannot be read or has no text.
    """
    most = parse_size(max_bytes)
    assert most is not None, "the arguments are checked"
    read: dict[str, LanguageTexts] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as downloads:
        for name, place in split_names(given, "--texts"):
            try:
                found = _read(name, place, text_column, most, seed, Path(downloads))
            except InputError as error:
                faults += error.faults
                continue
            before = read.get(name, LanguageTexts(name, ()))
            notes = "; ".join(filter(None, (before.note, found.note)))
            read[name] = LanguageTexts(name, before.documents + found.documents, notes)
    if faults:
        raise InputError(*faults)
    return list(read.values())


def _read(name: str, place: str, text_column: str, most: int, seed: int, downloads: Path) -> LanguageTexts:
    (source,) = open_sources([place], "--texts", False, downloads)
    kind = find_kind(source, text_column, skips_bad_rows=True)
    if kind != "text":
        raise InputError(f"--texts {place}: its rows are chats or instructions; give documents with plain text")
    documents: list[str] = []
    num_bytes = 0
    with progress_of(f"reading {name}") as show:
        for text in _documents(source, text_column, max(_SMALLEST_PART, most // _SAMPLED_PARTS), seed):
            size = len(text.encode())
            if num_bytes + size > most and documents:
                total = f" of {show_size(source.num_bytes)}" if source.num_bytes else ""
                note = f"{name}: {show_size(num_bytes)}{total} were read, in parts from all over {place}"
                return LanguageTexts(name, tuple(documents), note)
            documents.append(text)
            num_bytes += size
            show(min(1.0, num_bytes / min(most, source.num_bytes or most)))
    if not documents:
        raise InputError(f"--texts {place}: no document has text; give another place")
    return LanguageTexts(name, tuple(documents))


def _documents(source: Source, text_column: str, part_bytes: int, seed: int) -> Iterator[str]:
    """Yield the documents of a source, the parts of a large one in random order; InputError for a bad row."""
    parts = list(source.parts(part_bytes))
    random.Random(seed).shuffle(parts)
    for part in parts:
        reader = source.reader(part, (text_column,))
        for number, row in reader:
            try:
                text, _ = text_of(row, text_column, partial(reader.place, number))
            except ValueError as error:
                raise InputError(str(error)) from None
            if text.strip():
                yield text


def hold_out(texts: LanguageTexts) -> tuple[list[str], list[str]]:
    """Return the documents to learn from, and the tenth that is held out: the same whatever else is read.

    Of fewer than ten documents, lines are held out instead.
    """
    units: Sequence[str] = texts.documents
    if len(units) < _FEWEST_TO_HOLD_OUT:
        units = [line for document in units for line in document.splitlines(keepends=True)]
    is_out = [hashlib.sha256(unit.encode()).digest()[0] * 10 < 256 for unit in units]
    kept = [unit for unit, out in zip(units, is_out, strict=True) if not out]
    return kept, [unit for unit, out in zip(units, is_out, strict=True) if out]
