"""Count the lines of a corpus for --boilerplate, and find those that repeat.

Each shard is counted by itself, in any process or task of --shard, into a file that a restart uses again::

    .NAME.unfinished/77ab….lines   LINE, sorted by hash: each line of the shard, and how many of its documents have it

Then the files are added up, one range of hashes at a time. Memory is a fixed amount besides the hashes of the lines
that repeat: 8 bytes each.
"""

import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fabric_train.cleaning import boilerplate
from fabric_train.cleaning.boilerplate import Boilerplate, hash_lines
from fabric_train.reading.documents import BadRowError, text_of
from fabric_train.reading.files import memory_errors_name
from fabric_train.reading.sources import Source
from fabric_train.tokenization.corpus import OpenedCorpus
from fabric_train.tokenization.shards import Shard, part_name, split_into_shards
from fabric_train.workers import WorkerPool, progress_of

LINE = np.dtype([("hash", np.uint64), ("documents", np.uint32)])
_LINES_AT_ONCE = 1 << 23  # 100 MB
_SHOWN_LINES = 10
_TICK_SECONDS = 0.2


def find_boilerplate(corpus: OpenedCorpus, folder: Path) -> Boilerplate:
    """Count the lines of all documents, in files in ``folder``; return the step that removes those that repeat."""
    shards = split_to_count(corpus)
    count_lines(corpus, shards, folder)
    return add_up_lines(corpus, shards, [lines_file(folder, shard) for shard in shards])


def counting_settings(corpus: OpenedCorpus) -> str:
    """Return what decides the counts of a shard besides its source, as JSON."""
    return json.dumps(["lines", boilerplate.FORMAT, corpus.arguments.text_column, corpus.arguments.skips_bad_rows])


def split_to_count(corpus: OpenedCorpus) -> list[Shard]:
    """Return all shards of the sources, whose lines are counted."""
    return split_into_shards(corpus.sources, counting_settings(corpus), corpus.sizes)


def lines_file(folder: Path, shard: Shard) -> Path:
    """Return the file with the counted lines of a shard."""
    return folder / f"{shard.key}.lines"


def count_lines(corpus: OpenedCorpus, shards: Sequence[Shard], folder: Path) -> None:
    """Count the lines of these shards, except those that are counted already, into files in ``folder``."""
    sources = corpus.sources
    left = [shard for shard in shards if not lines_file(folder, shard).exists()]
    count = partial(_count_shard, folder, sources, corpus.arguments.text_column, corpus.arguments.skips_bad_rows)
    with progress_of("counting lines") as show:
        total = sum(shard.num_bytes for shard in shards)
        done = total - sum(shard.num_bytes for shard in left)
        num_proc = min(corpus.num_proc, len(left))
        with WorkerPool(count, num_proc, lambda shard: part_name(sources[shard.source], shard.parts[0])) as workers:
            for finished in workers.run(iter(left), _TICK_SECONDS):
                done += 0 if finished is None else finished[0].num_bytes
                show(done / max(total, 1))


def add_up_lines(corpus: OpenedCorpus, shards: Sequence[Shard], files: Sequence[Path]) -> Boilerplate:
    """Return the step that removes the lines that repeat; ``files`` are the counts of ``shards``, all of the corpus."""
    num_documents = corpus.arguments.boilerplate
    assert isinstance(num_documents, int), "a folder of lines needs no counts"
    lines = _find_repeated(files, num_documents)
    order = np.lexsort([lines["hash"], -lines["documents"].astype(np.int64)])[:_SHOWN_LINES]
    documents = dict(lines[order].tolist())
    texts = _find_texts(corpus.sources, shards, files, corpus.arguments.text_column, documents)
    shown = tuple((" ".join(texts[hashed].split()), count) for hashed, count in documents.items())
    return Boilerplate(num_documents, np.ascontiguousarray(lines["hash"]), shown)


def _find_texts(
    sources: Sequence[Source], shards: Sequence[Shard], files: Sequence[Path], column: str, hashes: Collection[int]
) -> dict[int, str]:
    """Return the lines with these hashes, as they are where they come first."""
    texts: dict[int, str] = {}
    for shard, file in zip(shards, files, strict=True):
        wanted = {hashed for hashed in hashes if hashed not in texts and len(_read_range(file, hashed, hashed))}
        for text in _texts(sources[shard.source], shard, column, skips_bad_rows=True) if wanted else ():
            lines = text.split("\n")
            found = {hashed: lines[place] for place, hashed in hash_lines(lines) if hashed in wanted}
            texts |= found
            wanted -= found.keys()
            if not wanted:
                break
    return texts


def _count_shard(folder: Path, sources: list[Source], column: str, skips_bad_rows: bool, shard: Shard) -> None:
    counted = np.empty(0, dtype=LINE)
    hashes = array("Q")
    for text in _texts(sources[shard.source], shard, column, skips_bad_rows):
        hashes.extend({hashed for _, hashed in hash_lines(text.split("\n"))})
        if len(hashes) >= _LINES_AT_ONCE:
            counted = _add_up([counted, _once(hashes)])
            hashes = array("Q")
    partial_file = folder / f"{shard.key}.lines_partial"
    _add_up([counted, _once(hashes)]).tofile(partial_file)
    partial_file.rename(lines_file(folder, shard))


def _texts(source: Source, shard: Shard, column: str, skips_bad_rows: bool) -> Iterator[str]:
    for part in shard.parts:
        reader: Any = source.reader(part, (column,))
        with memory_errors_name(part_name(source, part)):
            for number, row in reader:
                try:
                    yield text_of(row, column, partial(reader.place, number))[0]
                except BadRowError as error:
                    if not skips_bad_rows:
                        raise error.fault() from None


def _once(hashes: "array[int]") -> np.ndarray:
    lines = np.empty(len(hashes), dtype=LINE)
    lines["hash"] = np.frombuffer(hashes, np.uint64)
    lines["documents"] = 1
    return lines


def _add_up(counts: Sequence[np.ndarray]) -> np.ndarray:
    """Return each line of LINE arrays once with the sum of its documents, LINE [lines], sorted by hash."""
    lines = np.concatenate(counts)
    lines = lines[np.argsort(lines["hash"])]
    firsts = np.flatnonzero(np.concatenate([[True], lines["hash"][1:] != lines["hash"][:-1]])[: len(lines)])
    summed = lines[firsts]
    if len(lines):
        summed["documents"] = np.add.reduceat(lines["documents"], firsts)
    return summed


def _find_repeated(files: Sequence[Path], num_documents: int) -> np.ndarray:
    """Return the lines that are in ``num_documents`` documents or more, LINE [lines], sorted by hash."""
    num_ranges = sum(file.stat().st_size for file in files) // LINE.itemsize // _LINES_AT_ONCE + 1
    limits = [(number << 64) // num_ranges for number in range(1, num_ranges)]
    repeated = []
    with progress_of("adding up lines") as show:
        for first, last in zip([0, *limits], [*(limit - 1 for limit in limits), (1 << 64) - 1], strict=True):
            lines = _add_up([_read_range(file, first, last) for file in files])
            repeated.append(lines[lines["documents"] >= num_documents])
            show(len(repeated) / num_ranges)
    return np.concatenate(repeated)


def _read_range(file: Path, first: int, last: int) -> np.ndarray:
    """Return the lines of a file with hashes from ``first`` to ``last``, LINE [lines]."""
    if not file.stat().st_size:
        return np.empty(0, dtype=LINE)
    lines = np.memmap(file, LINE, "r")
    hashes = lines["hash"]  # searched with bisect, because numpy would first copy all of it
    return np.array(lines[bisect_left(hashes, first) : bisect_right(hashes, last)])
