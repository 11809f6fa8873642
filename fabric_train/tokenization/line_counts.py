"""Count the lines of a corpus for --boilerplate, and find the lines that repeat.

Each shard is counted separately, by any process or task of --shard, and has a file that a restart reuses::

    .NAME.unfinished/77ab….lines   LINE, sorted by hash: each line of the shard, and how many of its documents have it

Then the files are added up, one range of hashes at a time. Memory is a fixed amount, plus 8 bytes for the hash of each
line that repeats.
"""

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.cleaning import boilerplate
from fabric_train.cleaning.boilerplate import Boilerplate, hash_lines
from fabric_train.cli.progress import progress_of
from fabric_train.reading.documents import BadRowError, Row, text_of
from fabric_train.reading.files import naming_memory_errors
from fabric_train.reading.sources import Source
from fabric_train.tokenization.corpus import OpenedCorpus
from fabric_train.tokenization.shards import Shard, part_name, split_into_shards
from fabric_train.workers import WorkerPool

LINE = np.dtype([("hash", np.uint64), ("documents", np.uint32)])
_LINES_AT_ONCE = 1 << 23  # 100 MB
_SHOWN_LINES = 10
_TICK_SECONDS = 0.2


def find_boilerplate(corpus: OpenedCorpus, folder: Path) -> Boilerplate:
    """Count the lines of all documents, in files in ``folder``; return the step that removes repeated lines."""
    shards = split_to_count(corpus)
    count_lines(corpus, shards, folder)
    return add_up_lines(corpus, shards, [lines_file(folder, shard) for shard in shards])


def counting_settings(corpus: OpenedCorpus) -> str:
    """Return everything that determines a shard's counts, except its source, as JSON."""
    return json.dumps(["lines", boilerplate.FORMAT, corpus.arguments.text_column, corpus.arguments.skips_bad_rows])


def split_to_count(corpus: OpenedCorpus) -> list[Shard]:
    """Return all shards of the sources, whose lines are counted."""
    return split_into_shards(corpus.sources, counting_settings(corpus), corpus.sizes)


def lines_file(folder: Path, shard: Shard) -> Path:
    """Return the file with the counted lines of a shard."""
    return folder / f"{shard.key}.lines"


def count_lines(corpus: OpenedCorpus, shards: Sequence[Shard], folder: Path) -> None:
    """Count the lines of these shards in several processes, and write them to files in ``folder``.

    A shard that already has its file is not counted again.
    """
    sources = corpus.sources
    remaining_shards = [shard for shard in shards if not lines_file(folder, shard).exists()]
    count_shard = partial(
        _count_shard,
        folder=folder,
        sources=sources,
        column=corpus.arguments.text_column,
        skips_bad_rows=corpus.arguments.skips_bad_rows,
    )

    def describe(shard: Shard) -> str:
        return part_name(sources[shard.source], shard.parts[0])

    num_bytes = sum(shard.num_bytes for shard in shards)
    num_bytes_done = num_bytes - sum(shard.num_bytes for shard in remaining_shards)
    num_proc = min(corpus.num_proc, len(remaining_shards))
    with progress_of("counting lines") as show_share, WorkerPool(count_shard, num_proc, describe) as workers:
        for counted in workers.run(iter(remaining_shards), _TICK_SECONDS):
            if counted is not None:  # None is a tick without a result
                shard, _ = counted
                num_bytes_done += shard.num_bytes
            show_share(num_bytes_done / max(num_bytes, 1))


def add_up_lines(corpus: OpenedCorpus, shards: Sequence[Shard], files: Sequence[Path]) -> Boilerplate:
    """Return the step that removes the lines that repeat in a corpus.

    Args:
        corpus: the corpus, whose --boilerplate is a number of documents.
        shards: all shards of the corpus.
        files: the counted lines of each shard.
    """
    num_documents = corpus.arguments.boilerplate
    assert isinstance(num_documents, int), "a folder of lines needs no counts"
    lines = _find_repeated(files, num_documents)
    # the most frequent lines are shown, those of the same frequency in the order of their hashes
    order = np.lexsort([lines["hash"], -lines["documents"].astype(np.int64)])
    shown_lines = lines[order[:_SHOWN_LINES]]
    hashes = shown_lines["hash"].tolist()
    documents_by_hash = dict(zip(hashes, shown_lines["documents"].tolist(), strict=True))
    texts = _find_texts(corpus.sources, shards, files, corpus.arguments.text_column, hashes)
    most_frequent = []
    for line_hash, count in documents_by_hash.items():
        text = " ".join(texts[line_hash].split())
        most_frequent.append((text, count))
    return Boilerplate(num_documents, np.ascontiguousarray(lines["hash"]), tuple(most_frequent))


def _find_texts(
    sources: Sequence[Source], shards: Sequence[Shard], files: Sequence[Path], column: str, hashes: Collection[int]
) -> dict[int, str]:
    """Return the lines with these ``hashes``, as they are in the first document that has them.

    ``files`` has the counted lines of each shard, so only shards with one of the lines are read again.
    """
    texts: dict[int, str] = {}
    for shard, file in zip(shards, files, strict=True):
        missing = {line_hash for line_hash in hashes if line_hash not in texts and _has_line(file, line_hash)}
        if not missing:
            continue
        for text in _read_texts(sources[shard.source], shard, column, skips_bad_rows=True):
            lines = text.split("\n")
            for index, line_hash in hash_lines(lines):
                if line_hash in missing:
                    texts[line_hash] = lines[index]
            missing -= texts.keys()
            if not missing:
                break
    return texts


def _has_line(file: Path, line_hash: int) -> bool:
    return len(_read_range(file, line_hash, line_hash)) > 0


def _count_shard(shard: Shard, *, folder: Path, sources: list[Source], column: str, skips_bad_rows: bool) -> None:
    """Write the file of a shard's lines: each line's hash, and the number of the shard's documents that have it."""
    counted = np.empty(0, dtype=LINE)
    hashes = array("Q")  # of each document's lines, each line once a document
    for text in _read_texts(sources[shard.source], shard, column, skips_bad_rows):
        hashes.extend({line_hash for _, line_hash in hash_lines(text.split("\n"))})
        if len(hashes) >= _LINES_AT_ONCE:
            counted = _add_up([counted, _counted_once(hashes)])
            hashes = array("Q")
    counted = _add_up([counted, _counted_once(hashes)])
    # renamed when complete, so that a restart finds whole files only
    partial_file = folder / f"{shard.key}.lines_partial"
    counted.tofile(partial_file)
    partial_file.rename(lines_file(folder, shard))


def _read_texts(source: Source, shard: Shard, column: str, skips_bad_rows: bool) -> Iterator[str]:
    """Yield the texts of a shard; a bad row is left out, or raises InputError unless ``skips_bad_rows``."""
    for part in shard.parts:
        reader: Any = source.reader(part, (column,))
        with naming_memory_errors(part_name(source, part)):
            for row_number, row in reader:
                text = _read_text(row, column, partial(reader.place, row_number), skips_bad_rows)
                if text is not None:
                    yield text


def _read_text(row: Row | BadRowError, column: str, place: Callable[[], str], skips_bad_rows: bool) -> str | None:
    """Return the text of a row; for a bad row None, or raise InputError unless ``skips_bad_rows``."""
    try:
        text, _ = text_of(row, column, place)
    except BadRowError as error:
        if not skips_bad_rows:
            raise error.fault() from None
        return None
    return text


def _counted_once(hashes: "array[int]") -> np.ndarray:
    """Return each hash as a line that occurs in one document, LINE [hashes]; hashes may repeat."""
    lines = np.empty(len(hashes), dtype=LINE)
    lines["hash"] = np.frombuffer(hashes, np.uint64)
    lines["documents"] = 1
    return lines


def _add_up(counts: Sequence[np.ndarray]) -> np.ndarray:
    """Return each line of LINE arrays once, with its total number of documents, LINE [lines], sorted by hash."""
    lines = np.concatenate(counts)
    if not len(lines):
        return lines
    lines = lines[np.argsort(lines["hash"])]
    is_new_hash = np.concatenate([[True], lines["hash"][1:] != lines["hash"][:-1]])
    group_starts = np.flatnonzero(is_new_hash)
    summed = lines[group_starts]
    summed["documents"] = np.add.reduceat(lines["documents"], group_starts)
    return summed


def _find_repeated(files: Sequence[Path], num_documents: int) -> np.ndarray:
    """Return the lines that are in ``num_documents`` documents or more, LINE [lines], sorted by hash.

    The 64-bit hashes are divided into ranges, so that the lines of one range in all files fit into memory.
    """
    num_lines = sum(file.stat().st_size for file in files) // LINE.itemsize
    num_ranges = num_lines // _LINES_AT_ONCE + 1
    limits = [(index << 64) // num_ranges for index in range(num_ranges + 1)]
    repeated = []
    with progress_of("adding up lines") as show_share:
        for smallest, limit in pairwise(limits):
            lines = _add_up([_read_range(file, smallest, limit - 1) for file in files])
            repeated.append(lines[lines["documents"] >= num_documents])
            show_share(len(repeated) / num_ranges)
    return np.concatenate(repeated)


def _read_range(file: Path, smallest: int, largest: int) -> np.ndarray:
    """Return the lines of a file with hashes from ``smallest`` to ``largest``, LINE [lines]."""
    if not file.stat().st_size:  # an empty file cannot be mapped
        return np.empty(0, dtype=LINE)
    lines = np.memmap(file, LINE, "r")
    hashes = lines["hash"]  # searched with bisect: numpy would first copy all of them
    start = bisect_left(hashes, smallest)
    end = bisect_right(hashes, largest)
    return np.array(lines[start:end])
