"""Compare two token datasets: totals from the whole document index, languages and n-grams from a sample."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.cleaning.language import DEFAULT_THRESHOLD
from fabric_train.tokenization.inspect.report import SPLIT_NAMES
from fabric_train.tokenization.inspect.word_ngrams import SIZES, NgramScore, WordStream, over_represented
from fabric_train.tokenization.manifest import Manifest, load_manifest
from fabric_train.tokenization.packing.document_index import DocumentIndex, find_rows, num_records, open_index
from fabric_train.tokenization.packing.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

_DOCUMENTS_PER_READ = 1 << 20  # bounds memory, however large the index is
NUM_TOKENS = 1 << 20
FEWEST_DOCUMENTS, MOST_DOCUMENTS = 2000, 10_000
_DOCUMENTS_PER_DECODING = 64
NGRAMS_SHOWN = 15
UNCERTAIN_LANGUAGE = "uncertain"
_SAMPLE_RECORDS = 1000
"""What a sampled document adds to the progress, in records of the index: it is decoded and its language found."""
Identify = Callable[[str], tuple[str, float]]
"""Return the ISO 639-1 code of a text's language and its probability."""


@dataclass(frozen=True)
class TextTotals:
    """Some documents: their number, their tokens with BOS and EOS, and the UTF-8 bytes of their text."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class CorpusTotals:
    """The totals of a split by source, and the number of documents by length in tokens and in bytes."""

    sources: dict[str, TextTotals]
    token_lengths: Counter[int]
    byte_lengths: Counter[int]

    @property
    def all(self) -> TextTotals:
        """The sums over the sources."""
        sources = self.sources.values()
        return TextTotals(
            sum(source.documents for source in sources),
            sum(source.tokens for source in sources),
            sum(source.bytes for source in sources),
        )


def sum_up(index: DocumentIndex, advance: Callable[[int], None]) -> CorpusTotals:
    """Return the totals of all documents of a split, in one pass over its index.

    Args:
        index: of the split.
        advance: called with the number of documents read since the last call.

    Raises:
        InputError: the index is damaged.
    """
    names = index.sources.names
    sums = np.zeros((len(TextTotals.__dataclass_fields__), len(names)), dtype=np.int64)
    lengths = {"tokens": Counter[int](), "bytes": Counter[int]()}
    for begin in range(0, len(index.documents), _DOCUMENTS_PER_READ):
        documents = index.documents[begin : begin + _DOCUMENTS_PER_READ]
        sources = index.sources.sources_of(documents["file"])
        columns = (np.ones(len(documents)), documents["tokens"], documents["bytes"])
        sums += [np.bincount(sources, column, len(names)).astype(np.int64) for column in columns]
        for unit, counts in lengths.items():
            values, times = np.unique(documents[unit], return_counts=True)
            for value, number in zip(values.tolist(), times.tolist(), strict=True):
                counts[value] += number
        advance(len(documents))
    by_source = zip(names, sums.T.tolist(), strict=True)
    return CorpusTotals({name: TextTotals(*values) for name, values in by_source if values[0]}, *lengths.values())


@dataclass(frozen=True)
class SampledDocument:
    """A document of the sample.

    Args:
        tokens: of the whole document, BOS and EOS included.
        bytes: of the whole document's text.
        text: its beginning, without special tokens.
        tokens_read: tokens of that beginning, BOS and EOS included.
    """

    tokens: int
    bytes: int
    text: str
    tokens_read: int


def sample_size(index: DocumentIndex, num_tokens: int) -> int:
    """Return the number of documents to sample: as many as have 2^20 tokens together, from 2,000 to 10,000, or all.

    Args:
        index: of the split.
        num_tokens: of all its documents.
    """
    as_many = NUM_TOKENS * len(index.documents) // max(num_tokens, 1)
    return min(max(as_many, FEWEST_DOCUMENTS), MOST_DOCUMENTS, int(index.rows["documents"][-1]))


def sample_documents(
    index: DocumentIndex, count: int, split: Split, vocabulary: Vocabulary, advance: Callable[[int], None]
) -> Iterator[SampledDocument]:
    """Yield some documents, cut to one length so that together they have at most 2^20 tokens.

    The documents that begin in the rows are divided into ``count`` equal parts, and each part gives one document.

    Args:
        index: of the split.
        count: of documents, from ``sample_size``.
        split: its rows, of which only those with tokens of the sample are read.
        vocabulary: with which the documents were encoded.
        advance: called with the number of records of the index searched since the last call.

    Raises:
        InputError: the index or the rows are damaged.
    """
    chosen = _spread(int(index.rows["documents"][-1]), count)
    records = index.documents[chosen]
    limit = _common_limit(records["tokens"].astype(np.int64), NUM_TOKENS)
    ids = _read_beginnings(index, split, chosen, limit, advance)
    if not all(min(own) >= 0 and max(own) < vocabulary.size for own in ids.values() if own):
        raise InputError("rows have tokens that the tokenizer does not have; tokenize again")
    for first in range(0, len(chosen), _DOCUMENTS_PER_DECODING):
        part = slice(first, first + _DOCUMENTS_PER_DECODING)
        beginnings = [ids[document] for document in chosen[part].tolist()]
        texts = vocabulary.tokenizer.decode_batch(beginnings, skip_special_tokens=True)
        for record, text, own in zip(records[part], texts, beginnings, strict=True):
            yield SampledDocument(int(record["tokens"]), int(record["bytes"]), text, len(own))


def _spread(total: int, count: int) -> np.ndarray:
    """Return ``count`` different numbers below ``total``, which is not smaller, in ascending order; int64.

    Each is in its own of ``count`` equal ranges. The place in the range follows multiples of the golden ratio, so that
    no regular order of documents meets a regular step.
    """
    numbers = np.arange(count)
    return ((numbers + numbers * 0.6180339887498949 % 1) * (total / count)).astype(np.int64)


def _common_limit(lengths: np.ndarray, total: int) -> int:
    """Return the largest length so that the lengths, cut to it, have at most ``total`` as their sum."""
    ordered = np.sort(lengths)
    before = np.cumsum(ordered) - ordered
    limits = (total - before) // np.arange(len(ordered), 0, -1)
    too_long = np.flatnonzero(ordered > limits)
    return int(limits[too_long[0]] if len(too_long) else ordered[-1])


def _read_beginnings(
    index: DocumentIndex, split: Split, documents: np.ndarray, limit: int, advance: Callable[[int], None]
) -> dict[int, list[int]]:
    """Return the first ``limit`` tokens of some documents, by the documents' numbers."""
    rows = np.array(sorted(find_rows(index, documents.tolist(), advance)), dtype=np.int64)
    pieces = index.pieces(rows)
    wanted = np.flatnonzero(np.isin(pieces.documents, documents) & (pieces.starts + pieces.repeated < limit))
    needed, owners = np.unique(pieces.rows[wanted], return_inverse=True)
    bounds = np.searchsorted(owners, np.arange(len(needed) + 1))
    parts: dict[int, list[tuple[int, list[int]]]] = {document: [] for document in documents.tolist()}
    for number, ids in enumerate(split.read_rows(rows[needed])):
        for piece in wanted[bounds[number] : bounds[number + 1]].tolist():
            position, repeated = int(pieces.positions[piece]), int(pieces.repeated[piece])
            start = int(pieces.starts[piece]) + repeated
            stop = position + min(int(pieces.lengths[piece]), limit - start + repeated)
            parts[int(pieces.documents[piece])].append((start, ids[position + repeated : stop].tolist()))
    return {document: [token for _, own in sorted(found) for token in own] for document, found in parts.items()}


@dataclass(frozen=True)
class OpenCorpus:
    """A split of a token dataset, opened to be compared."""

    folder: Path
    manifest: Manifest
    split: Split
    index: DocumentIndex
    vocabulary: Vocabulary

    @property
    def sample_size(self) -> int:
        """The number of documents that are sampled."""
        return sample_size(self.index, self.manifest.ledger.splits[self.split.name].tokens_in)


@dataclass(frozen=True)
class SampleTotals(TextTotals):
    """Some sampled documents, whole, and the words and tokens of the parts of them that were decoded."""

    words: int
    tokens_read: int

    def plus(self, document: SampledDocument, num_words: int) -> "SampleTotals":
        """Return the totals with one more document."""
        return SampleTotals(
            self.documents + 1,
            self.tokens + document.tokens,
            self.bytes + document.bytes,
            self.words + num_words,
            self.tokens_read + document.tokens_read,
        )


_NOTHING = SampleTotals(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class CorpusSummary:
    """One of two corpora: its totals, and those of its sample, for all documents and by language code."""

    folder: Path
    manifest: Manifest
    split: str
    totals: CorpusTotals
    sample: SampleTotals
    languages: dict[str, SampleTotals]


@dataclass(frozen=True)
class Comparison:
    """Two corpora, and by size the n-grams that the first and the second has more often.

    ``no_languages`` says why languages were not identified, and is None if they were.
    """

    corpora: tuple[CorpusSummary, CorpusSummary]
    ngrams: dict[int, tuple[list[NgramScore], list[NgramScore]]]
    no_languages: str | None

    @property
    def same_tokenizer(self) -> bool:
        """Whether both corpora have the same ``tokenizer.json``."""
        first, second = (corpus.manifest.tokenizer.sha256.get("tokenizer.json") for corpus in self.corpora)
        return first == second


def open_corpora(folders: Sequence[Path], split: str) -> list[OpenCorpus]:
    """Open a split of each token dataset.

    Args:
        folders: of two token datasets.
        split: "train" or "validation".

    Raises:
        InputError: one line for each that cannot be compared, or one if they are the same folder.
    """
    opened, faults = list[OpenCorpus](), list[str]()
    for folder in folders:
        try:
            opened.append(_open_corpus(folder, split))
        except InputError as error:
            faults += error.faults
    if not faults and opened[0].folder.samefile(opened[1].folder):
        faults.append(f"--compare: {folders[0]} and {folders[1]} are the same folder; give two token datasets")
    if faults:
        raise InputError(*dict.fromkeys(faults))
    return opened


def compare(
    corpora: Sequence[OpenCorpus], identify: Identify | None, no_languages: str | None, advance: Callable[[int], None]
) -> Comparison:
    """Compare two opened corpora; the result depends on their content alone.

    Args:
        corpora: the first and the second.
        identify: finds the language of a text; None finds none.
        no_languages: why there is no ``identify``.
        advance: called with how far it came since the last call, of ``amount_of_work`` in all.

    Raises:
        InputError: an index or rows are damaged.
    """
    numbers: dict[str, int] = {}
    streams = [WordStream(numbers), WordStream(numbers)]
    summaries = []
    for corpus, words in zip(corpora, streams, strict=True):
        try:
            summaries.append(_summarize(corpus, words, identify, advance))
        except InputError as error:  # some do not name the folder, and there are two
            name = str(corpus.folder)
            raise InputError(*(one if name in one else f"{name}: {one}" for one in error.faults)) from None
    ngrams = {size: over_represented(streams[0], streams[1], numbers, size, NGRAMS_SHOWN) for size in SIZES}
    return Comparison((summaries[0], summaries[1]), ngrams, no_languages)


def amount_of_work(corpora: Sequence[OpenCorpus]) -> int:
    """Return the sum of what ``compare`` passes to ``advance``."""
    return sum(num_records(corpus.index) + _SAMPLE_RECORDS * corpus.sample_size for corpus in corpora)


def _open_corpus(folder: Path, split: str) -> OpenCorpus:
    splits = open_splits(folder)
    name = next((name for name in SPLIT_NAMES[split] if name in splits), None)
    if name is None:
        raise InputError(f"{folder}: no {split} split, only {', '.join(splits)}; give --split")
    manifest = load_manifest(folder)
    index = open_index(folder, manifest, name)
    if manifest is None or index is None:
        raise InputError(f"{folder}: no document index, an older version wrote it; tokenize again to compare it")
    if splits[name].num_rows != len(index.rows) - 1:
        raise InputError(f"{folder}: {name} has more or fewer rows than manifest.json says; tokenize again")
    vocabulary = load_vocabulary(folder / "tokenizer")
    if vocabulary is None:
        raise InputError(f"{folder}: no tokenizer/tokenizer.json, so its texts are unknown; tokenize again")
    return OpenCorpus(folder, manifest, splits[name], index, vocabulary)


def _summarize(
    corpus: OpenCorpus, words: WordStream, identify: Identify | None, advance: Callable[[int], None]
) -> CorpusSummary:
    """Return the totals of a corpus, and add the words of its sample to ``words``."""
    totals = sum_up(corpus.index, advance)
    sample, languages = _NOTHING, dict[str, SampleTotals]()
    for document in sample_documents(corpus.index, corpus.sample_size, corpus.split, corpus.vocabulary, advance):
        num_words = words.add(document.text)
        sample = sample.plus(document, num_words)
        if identify is not None:
            language, probability = identify(document.text)
            language = language if probability >= DEFAULT_THRESHOLD else UNCERTAIN_LANGUAGE
            languages[language] = languages.get(language, _NOTHING).plus(document, num_words)
        advance(_SAMPLE_RECORDS)
    return CorpusSummary(corpus.folder, corpus.manifest, corpus.split.name, totals, sample, languages)
