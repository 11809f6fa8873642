"""Read a Bible in the format of CrossWire's Sword (driver zText, markup OSIS)."""

import re
import struct
import zlib
from collections.abc import Iterator, Mapping

_CHAPTER = re.compile(r'<chapter n="(\d+)"')
_BOOK = re.compile(r'<milestone n="([^"]+)" type="x-usfm-h"/>')
_TAG = re.compile(r"<[^>]+>")


def read_chapters(files: Mapping[str, bytes], testament: str) -> Iterator[str]:
    """Yield the chapters of a testament, each as a line with book and number and then a line for each verse.

    Args:
        files: the contents of the module's files, by name.
        testament: ``ot`` or ``nt``.
    """
    book = ""
    lines: list[str] = []
    for entry in _read_entries(files, testament):
        chapter_heading = _CHAPTER.search(entry)
        book_heading = _BOOK.search(entry)
        if (chapter_heading or book_heading) and lines:
            yield "\n".join(lines)
            lines = []
        if book_heading:
            book = book_heading[1]
        elif chapter_heading:
            lines = [f"{book} {chapter_heading[1]}"]
        elif lines:  # text before a book's first chapter is its title
            verse = _TAG.sub("", entry)
            lines.append(" ".join(verse.split()))
    yield "\n".join(lines)


def _read_entries(files: Mapping[str, bytes], testament: str) -> Iterator[str]:
    """Yield the headings and verses in their order, without empty ones (verse numbers that this Bible does not use).

    ``.bzz`` has blocks compressed with zlib, ``.bzs`` each block's start and length, and ``.bzv`` each entry's block,
    start in the block and length.
    """
    block_index = _find_file(files, f"/{testament}.bzs")
    entry_index = _find_file(files, f"/{testament}.bzv")
    compressed = _find_file(files, f"/{testament}.bzz")
    blocks = []
    for start, length, _uncompressed_length in struct.iter_unpack("<III", block_index):
        blocks.append(zlib.decompress(compressed[start : start + length]))
    for block, start, length in struct.iter_unpack("<IIH", entry_index):
        if length:
            yield blocks[block][start : start + length].decode("utf-8")


def _find_file(files: Mapping[str, bytes], ending: str) -> bytes:
    return next(content for name, content in files.items() if name.endswith(ending))
