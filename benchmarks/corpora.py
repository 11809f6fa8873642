"""The texts that are tokenized: Shakespeare and the Spanish Bible as they are, and any amount cut out of them."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from sample_data import real_data

DOCUMENT_CHARACTERS = 5_000
_SHIFT = 577  # characters by which each copy is cut elsewhere; it has no divisor in common with the above


@dataclass(frozen=True)
class Corpus:
    """Documents in one jsonl file; ``parts`` is a folder with the same in several, for systems that share out files."""

    file: Path
    parts: Path
    num_documents: int
    num_characters: int


def whole_documents() -> list[str]:
    """Return Shakespeare's 42 works and the 1,189 chapters of the Spanish Bible, 8.9 million characters."""
    texts = []
    for source in (real_data.shakespeare(), real_data.bible_es()):
        with source.open(encoding="utf-8") as lines:
            texts += [json.loads(line)["text"] for line in lines]
    return texts


def cut_documents(texts: Iterable[str], num_copies: int | None = None) -> Iterator[str]:
    """Yield documents of ``DOCUMENT_CHARACTERS`` out of all the texts joined, ``num_copies`` times or without end.

    Each copy is cut at other places, so that no two documents are the same; nothing of it is left out.
    """
    joined = "\n".join(texts)
    for copy in range(num_copies) if num_copies is not None else count():
        first = copy * _SHIFT % DOCUMENT_CHARACTERS
        for start in chain([first - DOCUMENT_CHARACTERS], range(first, len(joined), DOCUMENT_CHARACTERS)):
            if document := joined[max(start, 0) : start + DOCUMENT_CHARACTERS]:
                yield document


def write_corpus(folder: Path, documents: Iterable[str], num_parts: int) -> Corpus:
    """Write the documents into ``folder``, in one file and in ``num_parts`` of about the same size."""
    file, parts = folder / "documents.jsonl", folder / "parts"
    parts.mkdir(parents=True)
    num_documents = num_characters = 0
    with file.open("w", encoding="utf-8") as lines:
        for document in documents:
            lines.write(to_line(document))
            num_documents += 1
            num_characters += len(document)
    _split(file, parts, num_parts)
    return Corpus(file, parts, num_documents, num_characters)


def to_line(document: str) -> str:
    """Return the document as a line of jsonl."""
    return json.dumps({"text": document}, ensure_ascii=False) + "\n"


def _split(whole: Path, parts: Path, num_parts: int) -> None:
    size = whole.stat().st_size
    with whole.open("rb") as lines:
        for part in range(num_parts):
            with (parts / f"{part:05d}.jsonl").open("wb") as file:
                while lines.tell() < size * (part + 1) // num_parts:
                    file.write(lines.readline())
