"""Plant dirt in real texts and chats by a fixed seed, and write down the kind and place of each."""

import json
import random
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
_SCENE_CHARACTERS = 4000
_NUM_CHATS = 1500


@dataclass(frozen=True)
class Planted:
    """A piece of dirt: its kind, the source, the row there from 1, and the text; without text, the whole document."""

    kind: str
    source: str
    row: int
    text: str = ""


class DirtyCorpus:
    """Sources of real documents, to which dirt is added.

    ``sources`` has the documents of es (chapters of the Bible), en (pieces of Shakespeare), web (only dirt) and chats.
    Dirt of different kinds is in different documents.
    """

    def __init__(self) -> None:
        self.sources: dict[str, list[Any]] = {
            "es": [row["text"] for row in _rows(bible_es())],
            "en": [piece for row in _rows(shakespeare()) for piece in _pieces(row["text"])],
            "web": [],
            "chats": [row["messages"] for row in _rows(chats())[:_NUM_CHATS]],
        }
        self.planted: list[Planted] = []
        self._random = random.Random(_SEED)
        self._untouched = {name: self._shuffled(range(len(rows))) for name, rows in self.sources.items()}

    def write(self, folder: Path) -> None:
        """Write a jsonl file for each source that has documents."""
        folder.mkdir(parents=True)
        for name, documents in self.sources.items():
            column = "messages" if name == "chats" else "text"
            lines = [json.dumps({column: document}, ensure_ascii=False) + "\n" for document in documents]
            if lines:
                (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def plant(self) -> None:
        """Add all dirt."""
        self._plant_lines()
        self._plant_personal_data()
        self._plant_tasks()
        for number in range(10):
            paragraph = " ".join(self._random.sample(OTHER_LANGUAGES["fr"], 3))
            self._insert(("es", "en")[number % 2], {paragraph: "French paragraph in a document"})
        web = [*self._copies(), *self._junk(), *self._foreign()]
        order = self._shuffled(range(len(web)))
        self.sources["web"] = [web[number][1] for number in order]
        rows = {number: row for row, number in enumerate(order, 1)}
        self.planted += [Planted(kind, "web", rows[number]) for number, (kind, _) in enumerate(web)]

    def _shuffled(self, values: Sequence[Any]) -> list[Any]:
        return self._random.sample(values, len(values))

    def _insert(self, source: str, texts: dict[str, str], shown: str | None = None) -> None:
        """Insert a paragraph in the middle of an untouched document, and note texts in it by their kinds."""
        number = self._untouched[source].pop()
        lines = self.sources[source][number].split("\n")
        lines.insert(len(lines) // 2, shown or "\n".join(texts))
        self.sources[source][number] = "\n".join(lines)
        self.planted += [Planted(kind, source, number + 1, text) for text, kind in texts.items()]

    def _plant_lines(self) -> None:
        for number in range(200):
            row = self._untouched["es"].pop()
            page = f"Biblioteca digital, página {row + 1} de 1189"
            lines = {HEADER: "header line", FOOTER: "footer line"} if number < 150 else {page: "footer with a number"}
            text = self.sources["es"][row]
            self.sources["es"][row] = f"{HEADER}\n\n{text}\n\n{FOOTER}" if number < 150 else f"{text}\n\n{page}"
            self.planted += [Planted(kind, "es", row + 1, line) for line, kind in lines.items()]

    def _plant_personal_data(self) -> None:
        for number in range(200):
            kind, (spanish, english) = CONTACTS[number % len(CONTACTS)]
            value = personal_data(self._random)[kind]
            source = ("es", "en", "chats")[number // len(CONTACTS) % 3]
            text = (spanish if source == "es" else english).format(value)
            if source == "chats":
                self._add_to_chat({value: f"{kind} in a chat"}, text)
            else:
                self._insert(source, {value: f"{kind} in prose"}, text)
        for number in range(20):
            people = [personal_data(self._random) for _ in range(3)]
            kinds = [kind for kind in people[0] if kind in dict(CONTACTS[:5])]
            table = "\n".join("| " + " | ".join(person[kind] for kind in kinds) + " |" for person in people)
            texts = {person[kind]: f"{kind} in a table" for person in people for kind in kinds}
            self._insert(("es", "en")[number % 2], texts, table)

    def _add_to_chat(self, texts: dict[str, str], shown: str) -> None:
        number = self._untouched["chats"].pop()
        first, *others = self.sources["chats"][number]
        self.sources["chats"][number] = [{**first, "content": f"{first['content']}\n{shown}"}, *others]
        self.planted += [Planted(kind, "chats", number + 1, text) for text, kind in texts.items()]

    def _plant_tasks(self) -> None:
        forms: dict[str, Callable[[str], str]] = {
            "task item, wrapped at 38 columns": lambda text: textwrap.fill(text, 38),
            "task item in capitals without punctuation": lambda text: text.upper().replace(",", "").replace("¿", ""),
        }
        for item in TASKS:
            if "quotes" in item:
                continue
            for kind, form in forms.items():
                self._whole(item["language"], kind, form(item["question"]))
            number = len(self.planted)
            self._add_to_chat({"": "task item in a chat"}, item["question"])
            assert len(self.planted) == number + 1
        for language, text in PARAPHRASES:
            self._whole(language, "paraphrase of a task item", text)

    def _whole(self, source: str, kind: str, shown: str) -> None:
        """Insert a paragraph for which the whole document has to be left out."""
        self._insert(source, {"": kind}, shown)

    def _copies(self) -> Iterator[tuple[str, str]]:
        for number in range(40):
            yield "exact duplicate", self._any_document(number)
        for words in (100, 50, 25):
            for number in range(40):
                yield f"near duplicate, 1 word in {words} changed", self._changed(self._any_document(number), words)
        for number in range(20):
            text = self._any_document(number)
            yield "first half of a document", text[: len(text) // 2]

    def _any_document(self, number: int) -> str:
        source = ("es", "en")[number % 2]
        return str(self.sources[source][self._untouched[source].pop()])

    def _changed(self, text: str, words: int) -> str:
        """Return a text in which one word in ``words`` is another word of it; at least one."""
        pieces = text.split(" ")
        for place in self._random.sample(range(len(pieces)), max(1, len(pieces) // words)):
            pieces[place] = self._random.choice(pieces) + "s"
        return " ".join(pieces)

    def _junk(self) -> Iterator[tuple[str, str]]:
        verses = self._any_document(0).split("\n")
        for _ in range(30):
            yield "short notice", " ".join(self._random.sample(SHORT, 2))
        for _ in range(30):
            yield "one line repeated", "\n".join([self._random.choice(verses)] * self._random.randint(20, 60))
        for _ in range(30):
            yield "menu of links", "\n".join(self._random.choices(MENU, k=60))
        for _ in range(30):
            numbers = (f"{self._random.random():.4f}" for _ in range(200))
            yield "table of numbers", "\n".join(textwrap.wrap("; ".join(numbers), 60))

    def _foreign(self) -> Iterator[tuple[str, str]]:
        for language, paragraphs in OTHER_LANGUAGES.items():
            for _ in range(10):
                yield f"document in {language}", "\n\n".join(self._random.sample(paragraphs, 3))


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of whole paragraphs with 4,000 characters or more."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += f"\n\n{paragraph}" if piece else paragraph
        if len(piece) >= _SCENE_CHARACTERS:
            yield piece
            piece = ""
    if piece.strip():
        yield piece
