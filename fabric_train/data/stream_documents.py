"""Read the documents of --streaming_dataset, one pass over the sources after another."""

import hashlib
import heapq
import math
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import xxhash

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import global_rank
from fabric_train.cli.tables import CHAT_FORMATS
from fabric_train.reading.documents import BadRowError, Row, columns_beside_text, text_of, utf8_length, why_left_out
from fabric_train.reading.hf_datasets import DatasetSource, StreamSource
from fabric_train.reading.listing import FilePart
from fabric_train.reading.sources import FileSource, Source
from fabric_train.tokenization.chats.formats import read_chat

if TYPE_CHECKING:
    from datasets import DatasetInfo

T = TypeVar("T")
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio
TRAIN_ON = "assistant"
"""The supervised part of a chat."""
WHOLE_FILES = 1 << 62
"""Bytes of a part: each file is one part."""
_HASHED_BYTES = 1 << 20  # at each end of a file


def times_read(document: int, epoch: int, share: Fraction, key: int) -> int:
    """Return how often pass ``epoch`` reads a document of a source with this share: the share, rounded up or down.

    A document has a fixed place u in [0, 1). Before pass p it has been read ``floor(p × share + u)`` times. So a share
    of 1/n reads each document once in any n passes. The places are the multiples of the golden ratio, modulo 1, so any
    stretch of the source has about the same share of documents that are read (H. Weyl: Über die Gleichverteilung von
    Zahlen mod. Eins, 1916). ``key``, below 2**64, is the place of document 0.
    """
    place = (key + document * _GOLDEN_RATIO_64) % 2**64 * share.denominator
    one = share.denominator << 64
    until, after = ((passes * (share.numerator << 64) + place) // one for passes in (epoch, epoch + 1))
    return after - until


def read_share(
    read: Callable[[], Iterable[tuple[float, T]]], share: Fraction, epoch: int, key: int
) -> Iterator[tuple[float, T]]:
    """Yield the documents that a pass reads of a source, each with the part of them that is read after it, up to 1.

    A share above 1 reads the source several times, the last time only the documents that come once more. ``read``
    yields the source's documents, each with the part of the source that is read after it; see :func:`times_read`.
    """
    for time in range(math.ceil(share)):
        of_this_time = min(1.0, float(share - time))
        for number, (read_part, document) in enumerate(read()):
            if times_read(number, epoch, share, key) > time:
                yield (time + of_this_time * read_part) / float(share), document


def interleave(sources: Sequence[Iterator[tuple[float, T]]]) -> Iterator[T]:
    """Yield the documents of all sources: the next one is of the source with the smallest part read.

    So the parts of any two sources never differ by more than the part that one document is, and all end together.
    ``sources`` yield documents, each with the part of the source that is read after it.
    """
    parts = [(0.0, number) for number in range(len(sources))]  # a heap
    while parts:
        number = parts[0][1]
        following = next(sources[number], None)
        if following is None:
            heapq.heappop(parts)
            continue
        read_part, document = following
        heapq.heapreplace(parts, (read_part, number))
        yield document


def shuffle(documents: Iterable[T], size: int, seed: int, epoch: int) -> Iterator[T]:
    """Yield the documents of a pass in a random order: each is drawn from a buffer of ``size``, where the next replaces
    it.
    """
    buffer: list[T] = []
    drawn = 0
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        place = draw(seed, epoch, drawn) % size
        drawn += 1
        document, buffer[place] = buffer[place], document
        yield document
    while buffer:
        place = draw(seed, epoch, drawn) % len(buffer)
        drawn += 1
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def draw(*numbers: int) -> int:
    """Return a number below 2**64 that depends on ``numbers``, each from 0 to 2**63 - 1."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))


class Document(NamedTuple):
    """A text or a chat.

    ``source`` is an index of ``StreamedDocuments.source_names``, ``kind`` is text or the format of the chat.
    ``content`` is a text that is not blank, or the columns of a chat in which something is supervised. ``num_bytes``,
    at least 1, are of the text in UTF-8, or of the chat's messages. ``place`` returns where it is, for messages.
    """

    source: int
    kind: str
    content: str | Row
    num_bytes: int
    place: Callable[[], str]


@dataclass(frozen=True)
class StreamedSource:
    """A place of --streaming_dataset, with the ``kind`` of its documents and the ``columns`` of their parts.

    ``unused`` are the columns, known so far, of which nothing is made.
    """

    name: str
    source: Source
    kind: str
    columns: tuple[str, ...]
    unused: set[str] = field(default_factory=set, compare=False)

    @cached_property
    def size(self) -> int:
        """The size in bytes; of a streamed hub dataset in rows. 0 if it is not known."""
        if not isinstance(self.source, StreamSource):
            return self.source.num_bytes
        counts = [_num_rows(dataset.info, split) for split, dataset in self.source.splits.items()]
        return sum(counts) if all(counts) else 0

    def describe_size(self) -> str:
        if not self.size:
            return "unknown"
        return f"{self.size:,} rows" if isinstance(self.source, StreamSource) else f"{self.size:,} bytes"

    def read(self, number: int) -> Iterator[tuple[float, Document]]:
        """Yield the documents that are not blank, each with the part of the source that is read after it, up to 1.

        That part is exact for texts in lines, else see ``files.FileReader.position``. ``number`` is their ``source``.
        """
        size = max(1, self.size)
        before = 0
        for part in self.source.parts(WHOLE_FILES):
            reader = self.source.reader(part, self.columns)
            part_size = part.file.size if isinstance(part, FilePart) else part.num_bytes
            for row_number, row in reader:
                document = self._document(number, row, partial(reader.place, row_number))
                if document is None:
                    continue
                in_part = reader.position / max(1, part.num_bytes) * part_size
                in_part = row_number if isinstance(self.source, StreamSource) else in_part
                yield min(1.0, (before + in_part) / size), document
            self._name_unused(reader.unread_columns, partial(reader.place, 1))
            before += reader.num_counted if isinstance(self.source, StreamSource) else part_size

    def _document(self, number: int, row: Row | BadRowError, place: Callable[[], str]) -> Document | None:
        if isinstance(row, BadRowError):
            raise fault_of(str(row))
        try:
            if self.kind == "text":
                text, data = text_of(row, self.columns[0], place)
                self._name_unused(columns_beside_text(row, self.columns[0]), place)
                return Document(number, self.kind, text, len(data), place) if text and not text.isspace() else None
            chat = read_chat(row, self.kind)
        except BadRowError as error:
            raise fault_of(str(error) if self.kind == "text" else f"{place()}: {error}") from None
        if why_left_out(chat, TRAIN_ON) is not None:
            return None
        self._name_unused(chat.unused, place)
        num_bytes = sum(utf8_length(message["content"]) for message in chat.messages)
        content = {name: row[name] for name in self.columns if name in row}
        return Document(number, self.kind, content, max(1, num_bytes), place)  # else, one lane would get all empty ones

    def _name_unused(self, columns: Set[str], place: Callable[[], str]) -> None:
        """Name columns on standard error that no row before had, on the first of the processes that read the rows."""
        if columns <= self.unused:
            return
        from torch.utils.data import get_worker_info  # slow to import

        worker = get_worker_info()
        if global_rank() == 0 and (worker is None or worker.id == 0):
            shown = ", ".join(sorted(columns - self.unused))
            print(f"note: {place()}: columns not used, from here on: {shown}", file=sys.stderr)
        self.unused.update(columns)

    def identities(self) -> Iterator[str]:
        """Yield a line per file or split that identifies its content.

        The line of a file has a hash of its first and last MiB; the line of a split has the dataset's fingerprint or,
        if it is streamed, its commit on the hub. A registered format of chats has a line of its own.
        """
        source = self.source
        if isinstance(source, FileSource):
            for file in source.files:
                yield f"{file.path.relative_to(source.root).as_posix()}, {file.size} bytes, {_hash_ends(file.path)}"
        elif isinstance(source, DatasetSource):
            for split, dataset in source.splits.items():
                yield f"{source.name}, {split}, {dataset._fingerprint}"
        else:
            for split in source.splits:
                yield f"{source.hub.name}, subset {source.hub.subset}, {split}, commit {source.hub.revision}"
        if self.kind in CHAT_FORMATS.registered:
            yield f"read as the {CHAT_FORMATS.describe(self.kind)}"


@dataclass(frozen=True)
class StreamedDocuments:
    """The documents of all places of --streaming_dataset, in passes.

    Without ``shares``, a pass reads the places one after the other. With them, it reads each in its share, and the
    places take turns so that the same part of each is read, see :func:`interleave`. The next document is drawn from
    ``shuffle_buffer`` ones; 0 keeps their order. ``seed`` decides this, and the documents of a share that is not whole.
    """

    places: Sequence[StreamedSource]
    shares: Sequence[float] | None
    shuffle_buffer: int
    seed: int

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """The names of the sources; places of one name are one source."""
        return tuple(dict.fromkeys(place.name for place in self.places))

    def read(self, epoch: int) -> Iterator[Document]:
        documents = self._in_order(epoch)
        return shuffle(documents, self.shuffle_buffer, self.seed, epoch) if self.shuffle_buffer else documents

    def _in_order(self, epoch: int) -> Iterator[Document]:
        reads = [partial(place.read, self.source_names.index(place.name)) for place in self.places]
        if self.shares is None:
            return (document for _, document in chain.from_iterable(read() for read in reads))
        return interleave(
            [
                read_share(read, Fraction(str(share)), epoch, draw(self.seed, number))
                for number, (read, share) in enumerate(zip(reads, self.shares, strict=True))
            ]
        )

    def describe_source(self, name: str) -> tuple[str, str]:
        """Return the size and the share of a source for people; of several places, both for each."""
        numbers = [number for number, place in enumerate(self.places) if place.name == name]
        shares = [f"{self.shares[number]:g}" if self.shares is not None else "1" for number in numbers]
        return ", ".join(self.places[number].describe_size() for number in numbers), ", ".join(shares)

    def identities(self) -> list[list[str]]:
        """Return lines that identify the content of each place, see ``StreamedSource.identities``."""
        return [list(place.identities()) for place in self.places]


def fault_of(bad_row: str) -> InputError:
    """Return the error that ends the run, from a message that names the row and its fault."""
    return InputError(f"{bad_row}; fix it, or leave such rows out with fabric-train tokenize --on_bad_rows skip")


def _num_rows(info: "DatasetInfo", split: str) -> int:
    """Return 0 if the number of rows is not known."""
    found = (info.splits or {}).get(split)
    return (found.num_examples or 0) if found else 0


def _hash_ends(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - _HASHED_BYTES))
        digest.update(file.read(_HASHED_BYTES))
    return f"sha256 of its ends {digest.hexdigest()[:16]}"
