"""Plant dirt in real texts and chats by a fixed seed, and write down the kind and place of each."""

import json
import random
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fabric_train.sample_data.real_data import bible_es, chats, shakespeare
from tests.support.dirty_texts import (
    CONTACTS,
    FOOTER,
    HEADER,
    MENU,
    OTHER_LANGUAGES,
    PARAPHRASES,
    SHORT,
    TASKS,
    personal_data,
)

_SEED = 18
_PIECE_CHARACTERS = 4000
_NUM_CHATS = 1500
_NUM_CHAPTERS = 1189
"""Of the Bible."""
_NUM_PAGES = 200
"""Chapters that get lines as pages of a website have them: headers and footers, or a footer with a number."""
_NUM_NUMBERED_PAGES = 50
_NUM_CONTACTS = 200
_NUM_TABLES = 20
_COLUMNS_OF_TABLES = tuple(kind for kind, _ in CONTACTS[:5])

Value = TypeVar("Value")


@dataclass(frozen=True)
class Planted:
    """A piece of dirt."""

    kind: str
    source: str
    row: int
    """In the source, from 1."""
    text: str = ""
    """The dirt within the document; "" if the whole document is dirt."""


@dataclass(frozen=True)
class DirtyDocument:
    """A document that is dirt as a whole."""

    kind: str
    text: str


class DirtyCorpus:
    """Sources of real documents, to which dirt is added.

    Dirt of different kinds is in different documents.

    Attributes:
        sources: the documents of es (chapters of the Bible), en (pieces of Shakespeare), web (only dirt) and chats.
        planted: all dirt.
    """

    def __init__(self) -> None:
        self.sources: dict[str, list[Any]] = {
            "es": [row["text"] for row in _read_rows(bible_es())],
            "en": list(_pieces(row["text"] for row in _read_rows(shakespeare()))),
            "web": [],
            "chats": [row["messages"] for row in _read_rows(chats())[:_NUM_CHATS]],
        }
        self.planted: list[Planted] = []
        self._random = random.Random(_SEED)
        self._untouched = {name: self._shuffled(range(len(rows))) for name, rows in self.sources.items()}
        """Indices of the documents of each source that have no dirt yet, in random order."""

    def write(self, folder: Path) -> None:
        """Write a jsonl file for each source that has documents."""
        folder.mkdir(parents=True)
        for name, documents in self.sources.items():
            if not documents:
                continue
            column = "messages" if name == "chats" else "text"
            lines = [json.dumps({column: document}, ensure_ascii=False) + "\n" for document in documents]
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def plant(self) -> None:
        """Add all dirt."""
        self._plant_page_lines()
        self._plant_contacts()
        self._plant_tables()
        self._plant_tasks()
        self._plant_french_paragraphs()
        self._plant_web()

    # ------------------------------------------------------------------------------------- dirt within documents

    def _plant_page_lines(self) -> None:
        """Add header and footer to chapters, and a footer with a page number to others."""
        for _ in range(_NUM_PAGES - _NUM_NUMBERED_PAGES):
            index = self._untouched["es"].pop()
            self.sources["es"][index] = f"{HEADER}\n\n{self.sources['es'][index]}\n\n{FOOTER}"
            self._note("es", index, {HEADER: "header line", FOOTER: "footer line"})
        for _ in range(_NUM_NUMBERED_PAGES):
            index = self._untouched["es"].pop()
            page = f"Biblioteca digital, página {index + 1} de {_NUM_CHAPTERS}"
            self.sources["es"][index] = f"{self.sources['es'][index]}\n\n{page}"
            self._note("es", index, {page: "footer with a number"})

    def _plant_contacts(self) -> None:
        """Add sentences with personal data: each kind in each source in turn."""
        for contact in range(_NUM_CONTACTS):
            kind, (spanish, english) = CONTACTS[contact % len(CONTACTS)]
            source = ("es", "en", "chats")[contact // len(CONTACTS) % 3]
            value = personal_data(self._random)[kind]
            sentence = (spanish if source == "es" else english).format(value)
            if source == "chats":
                self._add_to_chat(sentence, {value: f"{kind} in a chat"})
            else:
                self._insert(source, sentence, {value: f"{kind} in prose"})

    def _plant_tables(self) -> None:
        """Add tables with the personal data of three people."""
        for table in range(_NUM_TABLES):
            people = [personal_data(self._random) for _ in range(3)]
            lines = []
            kind_by_text = {}
            for person in people:
                kinds = [kind for kind in person if kind in _COLUMNS_OF_TABLES]
                cells = [person[kind] for kind in kinds]
                lines.append(f"| {' | '.join(cells)} |")
                for kind in kinds:
                    kind_by_text[person[kind]] = f"{kind} in a table"
            self._insert(("es", "en")[table % 2], "\n".join(lines), kind_by_text)

    def _plant_tasks(self) -> None:
        """Add the questions of an evaluation task."""
        forms: dict[str, Callable[[str], str]] = {
            "task item, wrapped at 38 columns": lambda text: textwrap.fill(text, 38),
            "task item in capitals without punctuation": lambda text: text.upper().replace(",", "").replace("¿", ""),
        }
        for item in TASKS:
            if "quotes" in item:  # a document of the corpus has it by itself
                continue
            for kind, form in forms.items():
                self._insert_spoiling(item["language"], form(item["question"]), kind)
            self._add_to_chat(item["question"], {"": "task item in a chat"})
        for language, text in PARAPHRASES:
            self._insert_spoiling(language, text, "paraphrase of a task item")

    def _plant_french_paragraphs(self) -> None:
        for paragraph_index in range(10):
            paragraph = " ".join(self._random.sample(OTHER_LANGUAGES["fr"], 3))
            source = ("es", "en")[paragraph_index % 2]
            self._insert(source, paragraph, {paragraph: "French paragraph in a document"})

    def _insert_spoiling(self, source: str, paragraph: str, kind: str) -> None:
        """Insert a paragraph for which the whole document has to be left out."""
        self._insert(source, paragraph, {"": kind})

    def _insert(self, source: str, paragraph: str, kind_by_text: Mapping[str, str]) -> None:
        """Insert a paragraph in the middle of an untouched document, and note texts in it by their kinds."""
        index = self._untouched[source].pop()
        lines = self.sources[source][index].split("\n")
        lines.insert(len(lines) // 2, paragraph)
        self.sources[source][index] = "\n".join(lines)
        self._note(source, index, kind_by_text)

    def _add_to_chat(self, paragraph: str, kind_by_text: Mapping[str, str]) -> None:
        """Add a paragraph to the first message of an untouched chat, and note texts in it by their kinds."""
        index = self._untouched["chats"].pop()
        first_message, *later_messages = self.sources["chats"][index]
        content = f"{first_message['content']}\n{paragraph}"
        self.sources["chats"][index] = [{**first_message, "content": content}, *later_messages]
        self._note("chats", index, kind_by_text)

    def _note(self, source: str, index: int, kind_by_text: Mapping[str, str]) -> None:
        for text, kind in kind_by_text.items():
            self.planted.append(Planted(kind, source, index + 1, text))

    # ------------------------------------------------------------------------------ documents that are dirt as a whole

    def _plant_web(self) -> None:
        """Add documents of the source web, in random order."""
        documents = [*self._copies(), *self._junk(), *self._in_other_languages()]
        order = self._shuffled(range(len(documents)))
        self.sources["web"] = [documents[index].text for index in order]
        row_by_index = {index: row for row, index in enumerate(order, 1)}
        for index, document in enumerate(documents):
            self.planted.append(Planted(document.kind, "web", row_by_index[index]))

    def _copies(self) -> Iterator[DirtyDocument]:
        for copy in range(40):
            yield DirtyDocument("exact duplicate", self._take_document(copy))
        for changed_every in (100, 50, 25):
            kind = f"near duplicate, 1 word in {changed_every} changed"
            for copy in range(40):
                yield DirtyDocument(kind, self._with_changed_words(self._take_document(copy), changed_every))
        for copy in range(20):
            text = self._take_document(copy)
            yield DirtyDocument("first half of a document", text[: len(text) // 2])

    def _junk(self) -> Iterator[DirtyDocument]:
        verses = self._take_document(0).split("\n")
        for _ in range(30):
            yield DirtyDocument("short notice", " ".join(self._random.sample(SHORT, 2)))
        for _ in range(30):
            verse = self._random.choice(verses)
            num_times = self._random.randint(20, 60)
            yield DirtyDocument("one line repeated", "\n".join([verse] * num_times))
        for _ in range(30):
            yield DirtyDocument("menu of links", "\n".join(self._random.choices(MENU, k=60)))
        for _ in range(30):
            cells = [f"{self._random.random():.4f}" for _ in range(200)]
            yield DirtyDocument("table of numbers", "\n".join(textwrap.wrap("; ".join(cells), 60)))

    def _in_other_languages(self) -> Iterator[DirtyDocument]:
        for language, paragraphs in OTHER_LANGUAGES.items():
            for _ in range(10):
                yield DirtyDocument(f"document in {language}", "\n\n".join(self._random.sample(paragraphs, 3)))

    def _take_document(self, copy: int) -> str:
        """Return an untouched document, of es if ``copy`` is even, otherwise of en."""
        source = ("es", "en")[copy % 2]
        return str(self.sources[source][self._untouched[source].pop()])

    def _with_changed_words(self, text: str, changed_every: int) -> str:
        """Return a text in which one word in ``changed_every`` is another word of it with an s; at least one word."""
        words = text.split(" ")
        num_changed = max(1, len(words) // changed_every)
        for position in self._random.sample(range(len(words)), num_changed):
            words[position] = self._random.choice(words) + "s"
        return " ".join(words)

    def _shuffled(self, values: Sequence[Value]) -> list[Value]:
        return self._random.sample(values, len(values))


def _read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield pieces of texts, each of whole paragraphs with 4,000 characters or more, or the rest of a text."""
    for text in texts:
        piece = ""
        for paragraph in text.split("\n\n"):
            piece = f"{piece}\n\n{paragraph}" if piece else paragraph
            if len(piece) >= _PIECE_CHARACTERS:
                yield piece
                piece = ""
        if piece.strip():
            yield piece
