"""Compare two token datasets: sums and lengths of all documents; languages and words of a sample.

Sums and lengths come from the document index; rows are read for the sample. ``rendering.py`` shows them.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split as SplitText

from fabric_train.cleaning.language import DEFAULT_THRESHOLD, identify
from fabric_train.cli.errors import InputError
from fabric_train.inspection.report import shown_split
from fabric_train.reading.sources import open_each
from fabric_train.token_dataset.document_index import DocumentIndex, chunks, find_rows, num_records, open_index
from fabric_train.token_dataset.manifest import Manifest, load_manifest
from fabric_train.token_dataset.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

NUM_TOKENS = 1 << 20  # of a sample
FEWEST_DOCUMENTS = 2000
MOST_DOCUMENTS = 10_000
_DOCUMENTS_PER_DECODING = 64
_SAMPLE_RECORDS = 1000  # progress of a sampled document, in records of the index: it is decoded, its language found
UNCERTAIN_LANGUAGE = "uncertain"
# a word is listed if it is so many times as frequent, and in so many documents
TIMES_MORE = 2
IN_DOCUMENTS = 3
_MOST_WORDS = 15

# a character of a script without spaces is a word; a mark belongs to the letter before it
_WORD = SplitText(
    Regex(
        r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]\p{M}*"
        r"|[\p{L}\p{M}\p{N}]+(?:['’][\p{L}\p{M}]+)*"
    ),
    behavior="removed",
    invert=True,
)


@dataclass
class TextTotals:
    """Some documents: their number, tokens with BOS and EOS, and bytes; in a sample, of the decoded text too."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0  # of the text in UTF-8
    words: int = 0
    tokens_read: int = 0

    def add(self, document: "SampledDocument", num_words: int) -> None:
        self.documents += 1
        self.tokens += document.tokens
        self.bytes += document.bytes
        self.words += num_words
        self.tokens_read += document.tokens_read


@dataclass(frozen=True)
class CorpusTotals:
    """The totals of a split by source, and the number of documents by length in tokens and in bytes."""

    sources: dict[str, TextTotals]
    token_lengths: Counter[int]
    byte_lengths: Counter[int]

    @property
    def all(self) -> TextTotals:
        columns = zip(*((one.documents, one.tokens, one.bytes) for one in self.sources.values()), strict=True)
        return TextTotals(*(map(sum, columns) if self.sources else (0, 0, 0)))


def sum_up(index: DocumentIndex, advance: Callable[[int], None]) -> CorpusTotals:
    """Return the totals of all documents of a split; ``advance`` is called with the number of documents just read."""
    names = index.sources.names
    sums = np.zeros((3, len(names)), dtype=np.int64)
    lengths = {"tokens": Counter[int](), "bytes": Counter[int]()}
    for _, documents in chunks(index.documents, advance):
        sources = index.sources.sources_of(documents["file"])
        columns = (np.ones(len(documents)), documents["tokens"], documents["bytes"])
        sums += [np.bincount(sources, column, len(names)).astype(np.int64) for column in columns]
        for unit, counts in lengths.items():
            values, times = np.unique(documents[unit], return_counts=True)
            for value, number in zip(values.tolist(), times.tolist(), strict=True):
                counts[value] += number
    by_source = zip(names, sums.T.tolist(), strict=True)
    return CorpusTotals({name: TextTotals(*values) for name, values in by_source if values[0]}, *lengths.values())


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
        """The number of documents to sample: as many as have 2^20 tokens together, from 2,000 to 10,000, or all."""
        num_tokens = self.manifest.ledger.splits[self.split.name].tokens_in
        as_many = NUM_TOKENS * len(self.index.documents) // max(num_tokens, 1)
        return min(max(as_many, FEWEST_DOCUMENTS), MOST_DOCUMENTS, int(self.index.rows["documents"][-1]))


def open_corpora(folders: Sequence[Path], split: str) -> list[OpenCorpus]:
    """Open a split, "train" or "validation", of two token datasets; InputError if they cannot be compared."""
    opened = open_each(lambda folder: _open_corpus(folder, split), folders)
    if opened[0].folder.samefile(opened[1].folder):
        raise InputError(f"--compare: {folders[0]} and {folders[1]} are the same folder; give two token datasets")
    return opened


def _open_corpus(folder: Path, split: str) -> OpenCorpus:
    shown = shown_split(folder, open_splits(folder), split)
    manifest = load_manifest(folder)
    index = open_index(folder, manifest, shown.name)
    if manifest is None or index is None:
        raise InputError(f"{folder}: no document index, an older version wrote it; tokenize again to compare it")
    if shown.num_rows != len(index.rows) - 1:
        raise InputError(f"{folder}: {shown.name} has more or fewer rows than manifest.json says; tokenize again")
    vocabulary = load_vocabulary(folder / "tokenizer")
    if vocabulary is None:
        raise InputError(f"{folder}: no tokenizer/tokenizer.json, so its texts are unknown; tokenize again")
    return OpenCorpus(folder, manifest, shown, index, vocabulary)


@dataclass(frozen=True)
class SampledDocument:
    """A document of the sample; tokens are with BOS and EOS."""

    tokens: int  # of the whole document
    bytes: int  # of the whole document's text
    text: str  # its beginning, without special tokens
    tokens_read: int  # of that beginning


def sample_documents(corpus: OpenCorpus, advance: Callable[[int], None]) -> Iterator[SampledDocument]:
    """Yield ``sample_size`` documents, cut to one length so that together they have at most 2^20 tokens.

    The documents that begin in the rows are divided into equal parts, and each part gives one document.
    """
    index = corpus.index
    vocabulary = corpus.vocabulary
    chosen = _spread(int(index.rows["documents"][-1]), corpus.sample_size)
    records = index.documents[chosen]
    limit = _common_limit(records["tokens"].astype(np.int64), NUM_TOKENS)
    ids = _read_beginnings(index, corpus.split, chosen, limit, advance)
    if not all(min(own) >= 0 and max(own) < vocabulary.size for own in ids.values() if own):
        raise InputError(f"{corpus.folder}: rows have tokens that its tokenizer does not have; tokenize again")
    for first in range(0, len(chosen), _DOCUMENTS_PER_DECODING):
        part = slice(first, first + _DOCUMENTS_PER_DECODING)
        beginnings = [ids[document] for document in chosen[part].tolist()]
        texts = vocabulary.tokenizer.decode_batch(beginnings, skip_special_tokens=True)
        for record, text, own in zip(records[part], texts, beginnings, strict=True):
            yield SampledDocument(int(record["tokens"]), int(record["bytes"]), text, len(own))


def _spread(total: int, count: int) -> np.ndarray:
    """Return a number from each of ``count`` equal ranges of ``range(total)``, int64, in ascending order.

    The place in the range follows multiples of the golden ratio, so that no regular order meets a regular step.
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
            position = int(pieces.positions[piece])
            repeated = int(pieces.repeated[piece])
            start = int(pieces.starts[piece]) + repeated
            stop = position + min(int(pieces.lengths[piece]), limit - start + repeated)
            parts[int(pieces.documents[piece])].append((start, ids[position + repeated : stop].tolist()))
    return {document: [token for _, own in sorted(found) for token in own] for document, found in parts.items()}


@dataclass
class WordCounts:
    """How often each word is in some documents, and in how many of them it is."""

    times: Counter[str] = field(default_factory=Counter)
    documents: Counter[str] = field(default_factory=Counter)

    def add(self, text: str) -> int:
        """Count the words of a document in lower case, and return their number."""
        words = [word for word, _ in _WORD.pre_tokenize_str(text.lower())]
        self.times.update(words)
        self.documents.update(set(words))
        return len(words)


@dataclass(frozen=True)
class FrequentWord:
    """A word that one corpus has more often: its times per million words in both, and its documents there."""

    word: str
    per_million: tuple[float, float]
    documents: int


def words_more_often(counts: tuple[WordCounts, WordCounts], which: int) -> list[FrequentWord]:
    """Return up to 15 words that corpus ``which`` has clearly more often than the other, largest difference first."""
    own = counts[which]
    millions = [max(one.times.total(), 1) / 1e6 for one in counts]
    found = []
    for word in (word for word, number in own.documents.items() if number >= IN_DOCUMENTS):
        rates = (counts[0].times[word] / millions[0], counts[1].times[word] / millions[1])
        if rates[which] >= TIMES_MORE * rates[1 - which]:
            found.append(FrequentWord(word, rates, own.documents[word]))
    found.sort(key=lambda one: (-abs(one.per_million[0] - one.per_million[1]), one.word))
    return found[:_MOST_WORDS]


@dataclass(frozen=True)
class CorpusSummary:
    """One of two corpora: its totals and its sample's, for all documents and by language code."""

    folder: Path
    manifest: Manifest
    split: str
    totals: CorpusTotals
    sample: TextTotals
    languages: dict[str, TextTotals]


@dataclass(frozen=True)
class Comparison:
    """Two corpora, the words that each has more often, and why languages were not identified, None if they were."""

    corpora: tuple[CorpusSummary, CorpusSummary]
    words: tuple[list[FrequentWord], list[FrequentWord]]
    no_languages: str | None

    @property
    def same_tokenizer(self) -> bool:
        first, second = (corpus.manifest.tokenizer.sha256.get("tokenizer.json") for corpus in self.corpora)
        return first == second


def compare(corpora: Sequence[OpenCorpus], no_languages: str | None, advance: Callable[[int], None]) -> Comparison:
    """Compare two opened corpora; ``advance`` gets how far it came since the last call, of ``amount_of_work``."""
    counts = (WordCounts(), WordCounts())
    summaries = []
    for corpus, words in zip(corpora, counts, strict=True):
        try:
            summaries.append(_summarize(corpus, words, advance, with_languages=no_languages is None))
        except InputError as error:  # some do not name the folder, and there are two
            name = str(corpus.folder)
            raise InputError(*(one if name in one else f"{name}: {one}" for one in error.faults)) from None
    more_often = (words_more_often(counts, 0), words_more_often(counts, 1))
    return Comparison((summaries[0], summaries[1]), more_often, no_languages)


def amount_of_work(corpora: Sequence[OpenCorpus]) -> int:
    """Return the sum of what ``compare`` passes to ``advance``."""
    return sum(num_records(corpus.index) + _SAMPLE_RECORDS * corpus.sample_size for corpus in corpora)


def _summarize(
    corpus: OpenCorpus, words: WordCounts, advance: Callable[[int], None], *, with_languages: bool
) -> CorpusSummary:
    """Return the totals of a corpus, and add the words of its sample to ``words``."""
    totals = sum_up(corpus.index, advance)
    sample = TextTotals()
    languages = defaultdict[str, TextTotals](TextTotals)
    for document in sample_documents(corpus, advance):
        num_words = words.add(document.text)
        sample.add(document, num_words)
        if with_languages:
            language, probability = identify(document.text)
            language = language if probability >= DEFAULT_THRESHOLD else UNCERTAIN_LANGUAGE
            languages[language].add(document, num_words)
        advance(_SAMPLE_RECORDS)
    return CorpusSummary(corpus.folder, corpus.manifest, corpus.split.name, totals, sample, languages)
