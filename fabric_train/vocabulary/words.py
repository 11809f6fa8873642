"""Read the texts of a language, sample large ones, hold out a tenth, and split them into words."""

import hashlib
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fabric_train.cli.argument_types import parse_size, show_size
from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of
from fabric_train.reading.documents import columns_beside_text, text_of
from fabric_train.reading.sources import Source, open_sources, split_names
from fabric_train.tokenization.corpus import find_kind

_SAMPLED_PARTS = 64
_SMALLEST_PART = 1 << 14
_MIN_DOCUMENTS_TO_HOLD_OUT = 10
# Scripts that are written without spaces: Thai, Lao, Tibetan, Myanmar, Khmer, kana, Chinese characters
_NO_SPACES = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\s{_NO_SPACES}]+")


@dataclass(frozen=True)
class LanguageTexts:
    """The documents of a language; ``note`` says which part and which columns were read, "" if all."""

    name: str
    documents: tuple[str, ...]
    note: str = ""

    @property
    def num_bytes(self) -> int:
        """The size of the documents in UTF-8."""
        return sum(len(document.encode()) for document in self.documents)


def words_of(text: str) -> list[str]:
    """Return the words of a text: the parts between spaces, and each character of a script without spaces."""
    return _WORD.findall(text)


def read_texts(texts: Sequence[str], text_column: str, max_bytes: str, seed: int) -> list[LanguageTexts]:
    """Read the texts that ``--texts`` gives as NAME=PLACE; places with the same name are one text.

    From a place with more than ``max_bytes``, read parts all over it, in an order that ``seed`` decides. InputError
    with a line for each place that cannot be read or has no text.
    """
    byte_limit = parse_size(max_bytes)
    assert byte_limit is not None, "the arguments are checked"
    texts_by_name: dict[str, LanguageTexts] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as downloads:
        for name, place in split_names(texts, "--texts"):
            try:
                language = _read_place(
                    name, place, text_column, byte_limit=byte_limit, seed=seed, downloads=Path(downloads)
                )
            except InputError as error:
                faults += error.faults
                continue
            previous = texts_by_name.get(name, LanguageTexts(name, ()))
            notes = [note for note in (previous.note, language.note) if note]
            documents = previous.documents + language.documents
            texts_by_name[name] = LanguageTexts(name, documents, "; ".join(notes))
    if faults:
        raise InputError(*faults)
    return list(texts_by_name.values())


def _read_place(name: str, place: str, text_column: str, byte_limit: int, seed: int, downloads: Path) -> LanguageTexts:
    """Read the documents of one place, up to a limit of bytes."""
    (source,) = open_sources([place], "--texts", stream=False, downloads=downloads)
    kind = find_kind(source, text_column, skips_bad_rows=True, prefers_text=True)
    if kind != "text":
        raise InputError(f"--texts {place}: its rows are chats or instructions; give documents with plain text")
    # parts are small, so that a sample has documents from all over a large source
    part_bytes = max(_SMALLEST_PART, byte_limit // _SAMPLED_PARTS)
    expected_bytes = min(byte_limit, source.num_bytes or byte_limit)
    documents: list[str] = []
    unused_columns: set[str] = set()
    notes: list[str] = []
    num_bytes = 0
    with progress_of(f"reading {name}") as show:
        for document in _read_documents(source, text_column, part_bytes, seed, unused_columns):
            size = len(document.encode())
            if documents and num_bytes + size > byte_limit:
                total = f" of {show_size(source.num_bytes)}" if source.num_bytes else ""
                notes.append(f"{name}: {show_size(num_bytes)}{total} were read, in parts from all over {place}")
                break
            documents.append(document)
            num_bytes += size
            show(min(1.0, num_bytes / expected_bytes))
    if not documents:
        raise InputError(f"--texts {place}: no document has text; give another source")
    if unused_columns:
        notes.append(f"{name}: columns of {place} not used: {', '.join(sorted(unused_columns))}")
    return LanguageTexts(name, tuple(documents), "; ".join(notes))


def _read_documents(
    source: Source, text_column: str, part_bytes: int, seed: int, unused_columns: set[str]
) -> Iterator[str]:
    """Yield the documents of a source, the parts of a large one in random order; InputError for a bad row.

    Columns other than the text are added to ``unused_columns``.
    """
    parts = list(source.parts(part_bytes))
    random.Random(seed).shuffle(parts)
    for part in parts:
        reader = source.reader(part, (text_column,))
        for row_number, row in reader:
            try:
                text, _ = text_of(row, text_column, partial(reader.place, row_number))
            except ValueError as error:
                raise InputError(str(error)) from None
            if isinstance(row, Mapping):
                unused_columns |= columns_beside_text(row, text_column)
            if text.strip():
                yield text
        unused_columns |= reader.unread_columns


def hold_out(texts: LanguageTexts) -> tuple[list[str], list[str]]:
    """Return the documents to learn from, and the held-out tenth, which does not depend on what else is read.

    With fewer than ten documents, lines are held out instead.
    """
    units: list[str] = list(texts.documents)
    if len(units) < _MIN_DOCUMENTS_TO_HOLD_OUT:
        units = []
        for document in texts.documents:
            units += document.splitlines(keepends=True)
    learned_from: list[str] = []
    held_out: list[str] = []
    for unit in units:
        first_byte = hashlib.sha256(unit.encode()).digest()[0]
        is_held_out = first_byte * 10 < 256  # a tenth of the values
        if is_held_out:
            held_out.append(unit)
        else:
            learned_from.append(unit)
    return learned_from, held_out
