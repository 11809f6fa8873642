"""Memory-map Arrow files so that opening them reads only the metadata of their batches, and no rows."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa


@contextmanager
def without_read_ahead() -> Iterator[None]:
    """Let ``datasets`` map files by :func:`map_table` here, and the kernel read ahead again afterwards.

    pyarrow's own memory map tells the kernel that it will need every batch (``madvise``), so a dataset of 1 TB would be
    read as a whole when it is opened. ``datasets`` offers no other way to open a file.
    """
    from datasets import table as tables  # slow, and not needed for ``map_table``

    maps: list[mmap.mmap] = []

    def map_file(file: str) -> pa.Table:
        table, mapped = map_table(file)
        maps.append(mapped)
        return table

    theirs = tables._memory_mapped_arrow_table_from_file
    tables._memory_mapped_arrow_table_from_file = map_file
    try:
        yield
    finally:
        tables._memory_mapped_arrow_table_from_file = theirs
        for mapped in maps:
            mapped.madvise(mmap.MADV_NORMAL)


def map_table(file: str | Path) -> tuple[pa.Table, mmap.mmap]:
    """Return the table of an Arrow stream file, and its memory map, of which only what is used is read.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or its content is not an Arrow stream.
    """
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    return pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(mapped))).read_all(), mapped
