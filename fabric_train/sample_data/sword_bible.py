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
        files: the module's files, name → content.
        testament: ``ot`` or ``nt``.
    """
    book = ""
    lines: list[str] = []
    for entry in _entries(files, testament):
        begun = _CHAPTER.search(entry)
        named = _BOOK.search(entry)
        if (begun or named) and lines:
            yield "\n".join(lines)
            lines = []
        if named:
            book = named[1]
        elif begun:
            lines = [f"{book} {begun[1]}"]
        elif lines:  # text before a book's first chapter is its title
            lines.append(" ".join(_TAG.sub("", entry).split()))
    yield "\n".join(lines)


def _entries(files: Mapping[str, bytes], testament: str) -> Iterator[str]:
    """Yield the headings and verses in their order, without empty ones (verse numbers that this Bible does not use).

    ``.bzz`` has blocks compressed with zlib, ``.bzs`` each block's start and length, and ``.bzv`` each entry's block,
    start in the block and length.
    """
    table, verses, compressed = (_file(files, f"/{testament}.{suffix}") for suffix in ("bzs", "bzv", "bzz"))
    sizes = struct.iter_unpack("<III", table)
    blocks = [zlib.decompress(compressed[start : start + length]) for start, length, _ in sizes]
    for block, start, length in struct.iter_unpack("<IIH", verses):
        if length:
            yield blocks[block][start : start + length].decode("utf-8")


def _file(files: Mapping[str, bytes], ending: str) -> bytes:
    return next(content for name, content in files.items() if name.endswith(ending))
