"""Compare two token datasets: totals and lengths over all documents, languages and words in a sample.

Totals and lengths come from the document index; only the sample's rows are read. ``rendering.py`` shows the result.
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
from fabric_train.inspection.report import choose_split
from fabric_train.reading.sources import open_each
from fabric_train.token_dataset.document_index import DocumentIndex, chunks, open_index
from fabric_train.token_dataset.document_search import find_rows, num_records
from fabric_train.token_dataset.manifest import Manifest, load_manifest
from fabric_train.token_dataset.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

NUM_TOKENS = 1 << 20  # of a sample
FEWEST_DOCUMENTS = 2000
MOST_DOCUMENTS = 10_000
_DOCUMENTS_PER_DECODING = 64
# The progress bar counts records of the index that were read. A sampled document is decoded and its language is
# identified, which counts as many records.
_PROGRESS_PER_SAMPLED_DOCUMENT = 1000
UNCERTAIN_LANGUAGE = "uncertain"
# a word is listed if it is at least twice as frequent as in the other corpus, and in three documents or more
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
    """Totals over some documents."""

    documents: int = 0
    tokens: int = 0  # with BOS and EOS
    bytes: int = 0  # of the text in UTF-8
    # of sampled documents only: the part of their text that was decoded
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
    """Totals and lengths of all documents of a split."""

    sources: dict[str, TextTotals]  # by the name of the source
    token_lengths: Counter[int]  # number of documents by length in tokens
    byte_lengths: Counter[int]  # number of documents by length in bytes

    @property
    def all(self) -> TextTotals:
        """The totals over all sources."""
        totals = TextTotals()
        for source in self.sources.values():
            totals.documents += source.documents
            totals.tokens += source.tokens
            totals.bytes += source.bytes
        return totals


def sum_up(index: DocumentIndex, advance: Callable[[int], None]) -> CorpusTotals:
    """Return the totals of all documents of a split.

    Args:
        index: the document index of the split.
        advance: called with the number of documents that were just read.
    """
    names = index.sources.names
    num_documents = np.zeros(len(names), dtype=np.int64)  # by source, as the two sums
    num_tokens = np.zeros(len(names), dtype=np.int64)
    num_bytes = np.zeros(len(names), dtype=np.int64)
    token_lengths: Counter[int] = Counter()
    byte_lengths: Counter[int] = Counter()
    for _, documents in chunks(index.documents, advance):
        sources = index.sources.sources_of(documents["file"])
        num_documents += np.bincount(sources, minlength=len(names))
        num_tokens += np.bincount(sources, documents["tokens"], len(names)).astype(np.int64)
        num_bytes += np.bincount(sources, documents["bytes"], len(names)).astype(np.int64)
        _count_lengths(token_lengths, documents["tokens"])
        _count_lengths(byte_lengths, documents["bytes"])
    totals = {}
    for source, name in enumerate(names):
        if num_documents[source]:
            totals[name] = TextTotals(int(num_documents[source]), int(num_tokens[source]), int(num_bytes[source]))
    return CorpusTotals(totals, token_lengths, byte_lengths)


def _count_lengths(counter: Counter[int], lengths: np.ndarray) -> None:
    values, counts = np.unique(lengths, return_counts=True)
    counter.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


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
        """The number of documents to sample.

        They have about 2^20 tokens together, but are at least 2,000 (or all, if there are fewer) and at most 10,000.
        """
        num_tokens = self.manifest.ledger.splits[self.split.name].tokens_in
        size = NUM_TOKENS * len(self.index.documents) // max(num_tokens, 1)
        return min(max(size, FEWEST_DOCUMENTS), MOST_DOCUMENTS, self.index.num_documents_in_rows)


def open_corpora(folders: Sequence[Path], split_name: str) -> list[OpenCorpus]:
    """Open a split, "train" or "validation", of two token datasets; InputError if they cannot be compared."""
    corpora = open_each(lambda folder: _open_corpus(folder, split_name), folders)
    if corpora[0].folder.samefile(corpora[1].folder):
        raise InputError(f"--compare: {folders[0]} and {folders[1]} are the same folder; give two token datasets")
    return corpora


def _open_corpus(folder: Path, split_name: str) -> OpenCorpus:
    split = choose_split(folder, open_splits(folder), split_name)
    manifest = load_manifest(folder)
    index = open_index(folder, manifest, split.name)
    if manifest is None or index is None:
        raise InputError(
            f"{folder}: it has no document index because an older version wrote it; tokenize again to compare it"
        )
    if split.num_rows != index.num_rows:
        raise InputError(
            f"{folder}: {split.name} has a different number of rows than manifest.json says; tokenize again"
        )
    vocabulary = load_vocabulary(folder / "tokenizer")
    if vocabulary is None:
        raise InputError(f"{folder}: it has no tokenizer/tokenizer.json, so its texts are unknown; tokenize again")
    return OpenCorpus(folder, manifest, split, index, vocabulary)


@dataclass(frozen=True)
class SampledDocument:
    """A document of the sample."""

    tokens: int  # of the whole document, with BOS and EOS
    bytes: int  # of the whole document's text
    text: str  # its beginning, without special tokens
    tokens_read: int  # of that beginning, with BOS and EOS


def sample_documents(corpus: OpenCorpus, advance: Callable[[int], None]) -> Iterator[SampledDocument]:
    """Yield ``sample_size`` documents, cut to one length so that together they have at most 2^20 tokens.

    The documents that begin in the rows are divided into equal ranges, and each range gives one document.

    Raises:
        InputError: rows have tokens that the tokenizer does not have.
    """
    index = corpus.index
    vocabulary = corpus.vocabulary
    documents = _spread(index.num_documents_in_rows, corpus.sample_size)
    records = index.documents[documents]
    max_tokens = _common_limit(records["tokens"].astype(np.int64), NUM_TOKENS)
    beginnings = _read_beginnings(index, corpus.split, documents, max_tokens, advance)
    for token_ids in beginnings.values():
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocabulary.size):
            raise InputError(f"{corpus.folder}: its rows have tokens that its tokenizer does not have; tokenize again")
    for start in range(0, len(documents), _DOCUMENTS_PER_DECODING):
        end = start + _DOCUMENTS_PER_DECODING
        ids_of_documents = [beginnings[document] for document in documents[start:end].tolist()]
        texts = vocabulary.tokenizer.decode_batch(ids_of_documents, skip_special_tokens=True)
        for record, text, token_ids in zip(records[start:end], texts, ids_of_documents, strict=True):
            yield SampledDocument(int(record["tokens"]), int(record["bytes"]), text, len(token_ids))


def _spread(total: int, count: int) -> np.ndarray:
    """Return an integer from each of ``count`` equal ranges of ``range(total)``, int64, in ascending order.

    The position in the range follows multiples of the golden ratio, so that no regular order of the documents meets a
    regular step.
    """
    ranges = np.arange(count)
    positions_in_range = ranges * 0.6180339887498949 % 1
    return ((ranges + positions_in_range) * (total / count)).astype(np.int64)


def _common_limit(lengths: np.ndarray, total: int) -> int:
    """Return the largest length to which ``lengths`` can be cut so that their sum is at most ``total``.

    Example: lengths 1, 5 and 9 with a total of 10 are cut to 4, so that 1 + 4 + 4 is at most 10.
    """
    ascending = np.sort(lengths)
    sum_before = np.cumsum(ascending) - ascending  # of all shorter lengths
    num_remaining = np.arange(len(ascending), 0, -1)
    limits = (total - sum_before) // num_remaining  # if all shorter lengths are not cut
    too_long = np.flatnonzero(ascending > limits)
    if not len(too_long):
        return int(ascending[-1])
    return int(limits[too_long[0]])


def _read_beginnings(
    index: DocumentIndex, split: Split, documents: np.ndarray, max_tokens: int, advance: Callable[[int], None]
) -> dict[int, list[int]]:
    """Return the first ``max_tokens`` token ids of some documents, by the documents' numbers.

    Args:
        index: the document index of the split.
        split: the rows.
        documents: the numbers of the documents, int64.
        max_tokens: the most tokens to read of each.
        advance: called with the number of records of the index that were just read.
    """
    # the pieces of these documents that begin within the limit, and the rows that hold them
    rows = np.array(sorted(find_rows(index, documents.tolist(), advance)), dtype=np.int64)
    pieces = index.pieces(rows)
    first_new_tokens = pieces.starts + pieces.repeated  # in the document; a piece repeats tokens of the previous one
    is_needed = np.isin(pieces.documents, documents) & (first_new_tokens < max_tokens)
    needed_pieces = np.flatnonzero(is_needed)
    needed_rows, row_of_piece = np.unique(pieces.rows[needed_pieces], return_inverse=True)
    piece_borders = np.searchsorted(row_of_piece, np.arange(len(needed_rows) + 1))

    # read each row once
    tokens_by_document: dict[int, dict[int, list[int]]] = {document: {} for document in documents.tolist()}
    for row_index, token_ids in enumerate(split.read_rows(rows[needed_rows])):
        for piece in needed_pieces[piece_borders[row_index] : piece_borders[row_index + 1]].tolist():
            position = int(pieces.positions[piece])  # in the row
            num_repeated = int(pieces.repeated[piece])
            first_token = int(first_new_tokens[piece])
            length = min(int(pieces.lengths[piece]), max_tokens - first_token + num_repeated)
            new_token_ids = token_ids[position + num_repeated : position + length].tolist()
            document = int(pieces.documents[piece])
            tokens_by_document[document][first_token] = new_token_ids

    # join the pieces of each document in order
    beginnings: dict[int, list[int]] = {}
    for document, tokens_by_start in tokens_by_document.items():
        beginnings[document] = []
        for start in sorted(tokens_by_start):
            beginnings[document] += tokens_by_start[start]
    return beginnings


@dataclass
class WordCounts:
    """How often each word occurs in some documents, and in how many of them."""

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
    """A word that is more frequent in one corpus than in the other."""

    word: str
    per_million: tuple[float, float]  # times per million words, in each of the two corpora
    documents: int  # that have it, in the corpus that has it more often


def words_more_often(counts: tuple[WordCounts, WordCounts], corpus: int) -> list[FrequentWord]:
    """Return up to 15 words that are clearly more frequent in one corpus, the largest difference first.

    Args:
        counts: the words of the two corpora.
        corpus: 0 or 1, the corpus in which the words are more frequent.
    """
    millions_of_words = [max(word_counts.times.total(), 1) / 1e6 for word_counts in counts]
    frequent_words = []
    for word, num_documents in counts[corpus].documents.items():
        if num_documents < IN_DOCUMENTS:
            continue
        per_million = (counts[0].times[word] / millions_of_words[0], counts[1].times[word] / millions_of_words[1])
        if per_million[corpus] >= TIMES_MORE * per_million[1 - corpus]:
            frequent_words.append(FrequentWord(word, per_million, num_documents))

    def rank(word: FrequentWord) -> tuple[float, str]:
        difference = abs(word.per_million[0] - word.per_million[1])
        return -difference, word.word

    return sorted(frequent_words, key=rank)[:_MOST_WORDS]


@dataclass(frozen=True)
class CorpusSummary:
    """One of two corpora that are compared."""

    folder: Path
    manifest: Manifest
    split: str
    totals: CorpusTotals  # of all documents
    sample: TextTotals
    languages: dict[str, TextTotals]  # of the sample, by language code


@dataclass(frozen=True)
class Comparison:
    """The comparison of two corpora."""

    corpora: tuple[CorpusSummary, CorpusSummary]
    words: tuple[list[FrequentWord], list[FrequentWord]]  # that each corpus has more often than the other
    no_languages: str | None  # why languages were not identified; None if they were

    @property
    def same_tokenizer(self) -> bool:
        hashes = [corpus.manifest.tokenizer.sha256.get("tokenizer.json") for corpus in self.corpora]
        return hashes[0] == hashes[1]


def compare(corpora: Sequence[OpenCorpus], no_languages: str | None, advance: Callable[[int], None]) -> Comparison:
    """Compare two opened corpora.

    Args:
        corpora: the two corpora.
        no_languages: why languages cannot be identified; None if they can.
        advance: called with the work that was done since its last call; all of it is :func:`amount_of_work`.

    Raises:
        InputError: a corpus is damaged; the error names its folder.
    """
    counts = (WordCounts(), WordCounts())
    summaries = []
    for corpus, word_counts in zip(corpora, counts, strict=True):
        try:
            summaries.append(_summarize(corpus, word_counts, advance, with_languages=no_languages is None))
        except InputError as error:  # some faults do not name the folder, and there are two
            folder = str(corpus.folder)
            faults = [fault if folder in fault else f"{folder}: {fault}" for fault in error.faults]
            raise InputError(*faults) from None
    return Comparison(
        corpora=(summaries[0], summaries[1]),
        words=(words_more_often(counts, 0), words_more_often(counts, 1)),
        no_languages=no_languages,
    )


def amount_of_work(corpora: Sequence[OpenCorpus]) -> int:
    """Return the sum of the amounts that ``compare`` passes to ``advance``."""
    amount = 0
    for corpus in corpora:
        amount += num_records(corpus.index)
        amount += _PROGRESS_PER_SAMPLED_DOCUMENT * corpus.sample_size
    return amount


def _summarize(
    corpus: OpenCorpus, word_counts: WordCounts, advance: Callable[[int], None], *, with_languages: bool
) -> CorpusSummary:
    """Return the totals of a corpus and of its sample; with ``with_languages``, also those of each language.

    The words of the sample are added to ``word_counts``.
    """
    totals = sum_up(corpus.index, advance)
    sample = TextTotals()
    languages = defaultdict[str, TextTotals](TextTotals)
    for document in sample_documents(corpus, advance):
        num_words = word_counts.add(document.text)
        sample.add(document, num_words)
        if with_languages:
            language, probability = identify(document.text)
            if probability < DEFAULT_THRESHOLD:
                language = UNCERTAIN_LANGUAGE
            languages[language].add(document, num_words)
        advance(_PROGRESS_PER_SAMPLED_DOCUMENT)
    return CorpusSummary(
        folder=corpus.folder,
        manifest=corpus.manifest,
        split=corpus.split.name,
        totals=totals,
        sample=sample,
        languages=languages,
    )
