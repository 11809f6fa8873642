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
"""A size in bytes that makes each file one part."""
_HASHED_BYTES = 1 << 20  # at each end of a file


def times_read(document: int, epoch: int, share: Fraction, key: int) -> int:
    """Return how often pass ``epoch`` reads a document of a source with this share: the share, rounded up or down.

    A document has a fixed point u in [0, 1). Before pass p it has been read ``floor(p × share + u)`` times. So a share
    of 1/n reads each document once in any n passes. The points are the multiples of the golden ratio, modulo 1, so any
    interval of the source has about the same share of documents that are read (H. Weyl: Über die Gleichverteilung von
    Zahlen mod. Eins, 1916). ``key``, below 2**64, is the point of document 0, times 2**64.
    """

    def times_before(current_epoch: int) -> int:
        # floor(p × share + u) in integers: with a point below 2**64, both terms are scaled by 2**64 × denominator
        point = (key + document * _GOLDEN_RATIO_64) % 2**64
        scaled_times = current_epoch * share.numerator * 2**64 + point * share.denominator
        return scaled_times // (share.denominator * 2**64)

    return times_before(epoch + 1) - times_before(epoch)


def read_share(
    read: Callable[[], Iterable[tuple[float, T]]], share: Fraction, epoch: int, key: int
) -> Iterator[tuple[float, T]]:
    """Yield the documents that a pass reads of a source with a share, each with the progress after it, from 0 to 1.

    A share above 1 reads the source several times, the last time only the documents that come once more.

    Args:
        read: Reads the source once: yields its documents, each with the progress after it, from 0 to 1.
        share: How often the pass reads the source.
        epoch: The number of the pass.
        key: See :func:`times_read`.
    """
    for reading in range(math.ceil(share)):
        reading_share = min(1.0, float(share - reading))  # the last reading has what remains of the share
        for document_number, (progress, document) in enumerate(read()):
            if times_read(document_number, epoch, share, key) > reading:
                yield (reading + reading_share * progress) / float(share), document


def interleave(sources: Sequence[Iterator[tuple[float, T]]]) -> Iterator[T]:
    """Yield the documents of all sources: the next one comes from the source with the least progress.

    So the progress of two sources never differs by more than one document adds, and all sources end together.
    ``sources`` yield documents, each with the source's progress after it, from 0 to 1.
    """
    progress_of_sources = [(0.0, source) for source in range(len(sources))]  # a heap
    while progress_of_sources:
        _, source = progress_of_sources[0]
        try:
            progress, document = next(sources[source])
        except StopIteration:
            heapq.heappop(progress_of_sources)
            continue
        heapq.heapreplace(progress_of_sources, (progress, source))
        yield document


def shuffle(documents: Iterable[T], size: int, seed: int, epoch: int) -> Iterator[T]:
    """Yield the documents of a pass in a random order.

    Each document is drawn from a buffer of ``size`` documents, in which the next document of the source replaces it.
    """
    buffer: list[T] = []
    num_drawn = 0
    for document in documents:
        if len(buffer) < size:
            buffer.append(document)
            continue
        index = draw(seed, epoch, num_drawn) % size
        num_drawn += 1
        drawn_document = buffer[index]
        buffer[index] = document
        yield drawn_document

    # the source has ended: draw the remaining documents; the last one takes the index of the drawn one
    while buffer:
        index = draw(seed, epoch, num_drawn) % len(buffer)
        num_drawn += 1
        drawn_document = buffer[index]
        buffer[index] = buffer[-1]
        buffer.pop()
        yield drawn_document


def draw(*numbers: int) -> int:
    """Return a number below 2**64 that depends on ``numbers``, each from 0 to 2**63 - 1."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))


class Document(NamedTuple):
    """A text or a chat."""

    source: int
    """The source, as an index of ``StreamedDocuments.source_names``."""
    kind: str
    """``text``, or the format of the chat."""
    content: str | Row
    """A text that is not blank, or the columns of a chat in which something is supervised."""
    num_bytes: int
    """The UTF-8 bytes of the text, or of the chat's messages; at least 1."""
    locate: Callable[[], str]
    """A function that returns the file or split and the line or row, for messages."""


@dataclass(frozen=True)
class StreamedSource:
    """An entry of --streaming_dataset."""

    name: str
    source: Source
    kind: str
    """The kind of the documents, see ``Document.kind``."""
    columns: tuple[str, ...]
    """The columns of a row that make a document."""
    unused_columns: set[str] = field(default_factory=set, compare=False)
    """The columns in the rows so far that are not in any document; reading adds to them."""

    @cached_property
    def size(self) -> int:
        """The size in bytes, or in rows for a streamed hub dataset; 0 if it is not known."""
        if not isinstance(self.source, StreamSource):
            return self.source.num_bytes
        rows_of_splits = [_num_rows(dataset.info, split) for split, dataset in self.source.splits.items()]
        return sum(rows_of_splits) if all(rows_of_splits) else 0

    def describe_size(self) -> str:
        """Return the size with its unit."""
        if not self.size:
            return "unknown"
        unit = "rows" if isinstance(self.source, StreamSource) else "bytes"
        return f"{self.size:,} {unit}"

    def read(self, source_index: int) -> Iterator[tuple[float, Document]]:
        """Yield the documents that are not blank, each with the progress after it, from 0 to 1.

        The progress is exact for texts in lines; for other files see ``files.FileReader.position``.

        Args:
            source_index: The ``source`` of the documents.
        """
        # a streamed hub dataset is measured in rows, everything else in bytes
        counts_rows = isinstance(self.source, StreamSource)
        size = max(1, self.size)
        done_before_part = 0
        for file_part in self.source.parts(WHOLE_FILES):
            reader = self.source.reader(file_part, self.columns)
            # a compressed file has another size than its content
            part_size = file_part.file.size if isinstance(file_part, FilePart) else file_part.num_bytes
            for row_number, row in reader:
                document = self._read_document(source_index, row, partial(reader.place, row_number))
                if document is None:
                    continue
                if counts_rows:
                    done_in_part: float = row_number
                else:
                    done_in_part = reader.position / max(1, file_part.num_bytes) * part_size
                yield min(1.0, (done_before_part + done_in_part) / size), document
            self._note_unused(reader.unread_columns, partial(reader.place, 1))
            done_before_part += reader.num_counted if counts_rows else part_size

    def _read_document(self, source_index: int, row: Row | BadRowError, locate: Callable[[], str]) -> Document | None:
        """Return the document of a row; None for a blank text, or a chat in which nothing is supervised.

        Raises:
            InputError: the row cannot be used.
        """
        if isinstance(row, BadRowError):
            raise bad_row_error(str(row))
        if self.kind == "text":
            try:
                text, data = text_of(row, self.columns[0], locate)
            except BadRowError as error:
                raise bad_row_error(str(error)) from None
            self._note_unused(columns_beside_text(row, self.columns[0]), locate)
            if not text or text.isspace():
                return None
            return Document(source_index, self.kind, text, len(data), locate)

        try:
            chat = read_chat(row, self.kind)
        except BadRowError as error:
            raise bad_row_error(f"{locate()}: {error}") from None
        if why_left_out(chat, TRAIN_ON) is not None:
            return None
        self._note_unused(chat.unused, locate)
        content = {name: row[name] for name in self.columns if name in row}
        num_bytes = sum(utf8_length(message["content"]) for message in chat.messages)
        # at least 1, or one lane would get all chats that are empty
        return Document(source_index, self.kind, content, max(1, num_bytes), locate)

    def _note_unused(self, columns: Set[str], locate: Callable[[], str]) -> None:
        """Print a note on columns that no earlier row had, in the first process that reads rows."""
        new_columns = columns - self.unused_columns
        if not new_columns:
            return
        from torch.utils.data import get_worker_info  # slow to import

        worker = get_worker_info()
        if global_rank() == 0 and (worker is None or worker.id == 0):
            names = ", ".join(sorted(new_columns))
            print(f"note: {locate()}: columns not used from here on: {names}", file=sys.stderr)
        self.unused_columns.update(new_columns)

    def identities(self) -> Iterator[str]:
        """Yield a line per file or split that identifies its content.

        The line of a file has a hash of its first and last MiB; the line of a split has the dataset's fingerprint or,
        if it is streamed, its commit on the hub. A registered format of chats has a line too.
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
    """The documents of all entries of --streaming_dataset, in passes."""

    sources: Sequence[StreamedSource]
    shares: Sequence[float] | None
    """How often a pass reads each source, while they take turns (see :func:`interleave`).

    None: a pass reads one source after the other.
    """
    shuffle_buffer: int
    """The number of documents from which the next one is drawn; 0 keeps their order."""
    seed: int
    """The seed for drawing from the buffer, and for the documents of a fractional share."""

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """The distinct names of the sources; sources with the same name are one source for losses and tokens."""
        return tuple(dict.fromkeys(source.name for source in self.sources))

    def read(self, epoch: int) -> Iterator[Document]:
        """Yield the documents of pass ``epoch``, counted from 0."""
        if self.shares is None:
            documents = self._read_in_turn()
        else:
            documents = interleave(self._read_shares(epoch, self.shares))
        if self.shuffle_buffer:
            return shuffle(documents, self.shuffle_buffer, self.seed, epoch)
        return documents

    def _read_in_turn(self) -> Iterator[Document]:
        """Yield the documents of one source after the other."""
        for source in self.sources:
            for _, document in source.read(self.source_names.index(source.name)):
                yield document

    def _read_shares(self, epoch: int, shares: Sequence[float]) -> list[Iterator[tuple[float, Document]]]:
        """Return for each source an iterator of its share in a pass, see :func:`read_share`."""
        reads = []
        for index, (source, share) in enumerate(zip(self.sources, shares, strict=True)):
            read = partial(source.read, self.source_names.index(source.name))
            # through text: 0.1 is one tenth, and not the fraction that a float stores
            exact_share = Fraction(str(share))
            reads.append(read_share(read, exact_share, epoch, key=draw(self.seed, index)))
        return reads

    def describe_source(self, name: str) -> tuple[str, str]:
        """Return the sizes and the shares of the sources with a name, as text."""
        sizes = []
        shares = []
        for index, source in enumerate(self.sources):
            if source.name == name:
                sizes.append(source.describe_size())
                shares.append("1" if self.shares is None else f"{self.shares[index]:g}")
        return ", ".join(sizes), ", ".join(shares)

    def identities(self) -> list[list[str]]:
        """Return lines that identify the content of each source, see ``StreamedSource.identities``."""
        return [list(source.identities()) for source in self.sources]


def bad_row_error(message: str) -> InputError:
    """Return the error that ends the run, with a message that names the row and what is wrong with it."""
    return InputError(f"{message}; fix it, or skip such rows with fabric-train tokenize --on_bad_rows skip")


def _num_rows(info: "DatasetInfo", split: str) -> int:
    """Return the number of rows of a split; 0 if it is not known."""
    if not info.splits or split not in info.splits:
        return 0
    return info.splits[split].num_examples or 0


def _hash_ends(path: Path) -> str:
    """Return the start of the SHA-256 of the first and the last MiB of a file, as text."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
        # in a file of less than 2 MiB, continue after the first MiB: no byte is hashed twice
        last_start = path.stat().st_size - _HASHED_BYTES
        file.seek(max(file.tell(), last_start))
        digest.update(file.read(_HASHED_BYTES))
    return f"sha256 of its ends {digest.hexdigest()[:16]}"
