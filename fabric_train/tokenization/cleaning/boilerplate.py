"""Remove lines that are in many documents: headers, footers, navigation, notices.

CCNet (arXiv:1911.00359) removes paragraphs that repeat, and C4 (arXiv:1910.10683) spans of sentences. Here a line is
removed from all documents if at least ``num_documents`` of them have it.

Lines are counted before. Each shard is counted by itself, in any process or task of --shard, into a file that a restart
uses again::

    .NAME.unfinished/77ab….lines   LINE, sorted by hash: each line of the shard, and how many of its documents have it

Then the files are added up, one range of hashes at a time. Memory is a fixed amount besides the hashes of the lines
that repeat: 8 bytes each.
"""

import hashlib
import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json
from fabric_train.tokenization.cleaning.dropped import Dropped
from fabric_train.tokenization.documents import BadRowError, text_of
from fabric_train.tokenization.reading.files import memory_errors_name
from fabric_train.tokenization.reading.sources import Source
from fabric_train.tokenization.shards import Shard, part_name, split_into_shards
from fabric_train.tokenization.workers import WorkerPool, progress_of

if TYPE_CHECKING:
    from fabric_train.tokenization.corpus import OpenedCorpus

# letters and digits of a line that counts, so that no blank line, brace, ``else:`` or name in a play is removed
MIN_LETTERS = 15
_COUNTS = re.compile(rf"(?:[\W_]*[^\W_]){{{MIN_LETTERS}}}")
_EDIT = "boilerplate lines"
_REASON = "only_boilerplate"
_SHOWN_CHARACTERS = 100
FORMAT = 1  # of the hashes, the rule, and the files of counts; raise it when one of them changes
_RECORD = "lines.json"
_HASHES = "hashes"
_MAKE_AGAIN = "count the lines again, with --shard and this version, and merge the slices"
LINE = np.dtype([("hash", np.uint64), ("documents", np.uint32)])
_LINES_AT_ONCE = 1 << 23  # 100 MB
_SHOWN_LINES = 10
_TICK_SECONDS = 0.2


@dataclass(frozen=True)
class Boilerplate:
    """The cleaning step: removes the lines that ``num_documents`` documents or more have.

    ``hashes`` of these lines are uint64 [lines], sorted; empty until they are counted. ``most_frequent`` are those that
    most documents have, each with the number of documents.
    """

    num_documents: int
    hashes: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    most_frequent: tuple[tuple[str, int], ...] = ()

    def clean(self, text: str, edits: Counter[str]) -> str | Dropped:
        """Return the text without the repeated lines, and without the blank lines that they leave.

        A blank line after a removed line is removed too if a blank line or nothing is before; so are blank lines at the
        end after which there was only boilerplate.
        """
        lines = text.split("\n")
        places = self._find(lines)
        if not places:
            return text
        edits[_EDIT] += len(places)
        kept: list[str] = []
        after_removed = False
        for place, line in enumerate(lines):
            if place in places:
                after_removed = True
            elif line.strip():
                kept.append(line)
                after_removed = False
            elif not after_removed or (kept and kept[-1].strip()):
                kept.append(line)
        while after_removed and kept and not kept[-1].strip():
            kept.pop()
        return "\n".join(kept) if kept else Dropped(_REASON, f"{len(places)} lines")

    def _find(self, lines: list[str]) -> set[int]:
        if not len(self.hashes):
            return set()
        hashed = np.array(list(hash_lines(lines)), dtype=np.uint64).reshape(-1, 2)
        found = np.searchsorted(self.hashes, hashed[:, 1])
        is_repeated = self.hashes[np.minimum(found, len(self.hashes) - 1)] == hashed[:, 1]
        return set(hashed[is_repeated, 0].tolist())

    def redacted(self, redact: Callable[[str], str]) -> "Boilerplate":
        """Return the step with ``redact`` of the lines to be shown."""
        return replace(self, most_frequent=tuple((redact(line), count) for line, count in self.most_frequent))

    def shown(self) -> list[str]:
        """Return the beginnings of the most frequent lines."""
        return [f"{line[:_SHOWN_CHARACTERS]} ({count:,} documents)" for line, count in self.most_frequent]

    def settings(self) -> dict[str, Any]:
        return {
            "num_documents": self.num_documents,
            "min_letters": MIN_LETTERS,
            "lines": len(self.hashes),
            "sha256": hashlib.sha256(self.hashes.tobytes()).hexdigest(),
            "most_frequent": self.shown(),
            "format": FORMAT,
        }


def hash_lines(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield place and 64-bit hash of each line with 15 letters or digits or more; white space counts as one space."""
    for place, line in enumerate(lines):
        if _COUNTS.match(line):
            yield place, xxhash.xxh3_64_intdigest(" ".join(line.split()).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class _LinesRecord:
    """The content of ``lines.json``; ``sha256`` is of the file of hashes."""

    format: int
    text_column: str
    num_documents: int
    sha256: str
    most_frequent: list[tuple[str, int]]


def write_repeated_lines(folder: Path, lines: Boilerplate, text_column: str) -> None:
    """Write the lines that are in many documents; they were counted in ``text_column``."""
    hashes = lines.hashes.astype("<u8").tobytes()
    digest = hashlib.sha256(hashes).hexdigest()
    record = _LinesRecord(FORMAT, text_column, lines.num_documents, digest, list(lines.most_frequent))
    (folder / _HASHES).write_bytes(hashes)
    (folder / _RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def open_boilerplate(given: int | str, text_column: str) -> Boilerplate:
    """Return the step for --boilerplate: of a folder with its lines, of a number without, to be counted."""
    return Boilerplate(given) if isinstance(given, int) else _read(Path(given).expanduser(), text_column)


def _read(folder: Path, text_column: str) -> Boilerplate:
    if not (folder / _RECORD).is_file():
        known = "give a number of documents, or a folder that a merge of counted slices has written"
        raise InputError(f"--boilerplate {folder}: no lines.json there; {known} (docs/cleaning.md)")
    record = read_json(folder / _RECORD, _LinesRecord, _MAKE_AGAIN)
    if record.format != FORMAT:
        raise InputError(f"{folder / _RECORD} has format {record.format}, this version reads {FORMAT}; {_MAKE_AGAIN}")
    if record.text_column != text_column:
        counted = f"--boilerplate {folder} has lines of the column {record.text_column!r}, not {text_column!r}"
        raise InputError(f"{counted}; give --text_column {record.text_column}, or count the lines of {text_column!r}")
    try:
        hashes = (folder / _HASHES).read_bytes()
    except OSError as error:
        raise InputError(f"{folder / _HASHES}: {error.strerror}; {_MAKE_AGAIN}") from None
    if hashlib.sha256(hashes).hexdigest() != record.sha256:
        raise InputError(f"{folder / _HASHES}: damaged; {_MAKE_AGAIN}")
    lines = np.frombuffer(hashes, "<u8").astype(np.uint64)
    return Boilerplate(record.num_documents, lines, tuple(record.most_frequent))


def find_boilerplate(corpus: "OpenedCorpus", folder: Path) -> Boilerplate:
    """Count the lines of all documents, in files in ``folder``; return the step that removes those that repeat."""
    shards = split_to_count(corpus)
    count_lines(corpus, shards, folder)
    return add_up_lines(corpus, shards, [lines_file(folder, shard) for shard in shards])


def counting_settings(corpus: "OpenedCorpus") -> str:
    """Return what decides the counts of a shard besides its source, as JSON."""
    return json.dumps(["lines", FORMAT, corpus.arguments.text_column, corpus.arguments.skips_bad_rows])


def split_to_count(corpus: "OpenedCorpus") -> list[Shard]:
    """Return all shards of the sources, whose lines are counted."""
    return split_into_shards(corpus.sources, counting_settings(corpus), corpus.sizes)


def lines_file(folder: Path, shard: Shard) -> Path:
    """Return the file with the counted lines of a shard."""
    return folder / f"{shard.key}.lines"


def count_lines(corpus: "OpenedCorpus", shards: Sequence[Shard], folder: Path) -> None:
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


def add_up_lines(corpus: "OpenedCorpus", shards: Sequence[Shard], files: Sequence[Path]) -> Boilerplate:
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
