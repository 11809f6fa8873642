"""Build the corpora of the tokenization benchmarks from Shakespeare and the Spanish Bible."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from fabric_train.sample_data import real_data

DOCUMENT_CHARACTERS = 5_000
_SHIFT = 577  # offset of each copy in characters; a prime number


@dataclass(frozen=True)
class Corpus:
    """Documents in one jsonl file, and in several in ``parts``, for systems whose workers take whole files."""

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


def cut_documents(
    texts: Iterable[str], num_copies: int | None = None, num_characters: int = DOCUMENT_CHARACTERS
) -> Iterator[str]:
    """Join the texts and yield them as documents of ``num_characters``, ``num_copies`` times or endlessly.

    Each copy is split at other offsets, so that no two documents are the same. No text is lost.
    """
    joined = "\n".join(texts)
    for copy in range(num_copies) if num_copies is not None else count():
        first = copy * _SHIFT % num_characters
        for start in chain([first - num_characters], range(first, len(joined), num_characters)):
            if document := joined[max(start, 0) : start + num_characters]:
                yield document


def write_corpus(folder: Path, documents: Iterable[str], num_parts: int) -> Corpus:
    """Write the documents into ``folder``: as one file, and as ``num_parts`` files of about the same size."""
    file = folder / "documents.jsonl"
    parts = folder / "parts"
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
