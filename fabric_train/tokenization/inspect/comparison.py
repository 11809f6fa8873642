"""Compare two token datasets: totals from the whole document index, languages and n-grams from a sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.tokenization.cleaning.language_filter import DEFAULT_THRESHOLD
from fabric_train.tokenization.inspect.corpus_totals import CorpusTotals, TextTotals, sum_up
from fabric_train.tokenization.inspect.document_sample import SampledDocument, sample_documents, sample_size
from fabric_train.tokenization.inspect.report import SPLIT_NAMES
from fabric_train.tokenization.inspect.word_ngrams import SIZES, NgramScore, WordStream, over_represented
from fabric_train.tokenization.manifest import Manifest, load_manifest
from fabric_train.tokenization.packing.document_index import DocumentIndex, open_index
from fabric_train.tokenization.packing.document_search import num_records
from fabric_train.tokenization.packing.token_folder import Split, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

NGRAMS_SHOWN = 15
UNCERTAIN_LANGUAGE = "uncertain"
_SAMPLE_RECORDS = 1000
"""What a sampled document adds to the progress, in records of the index: it is decoded and its language found."""

Identify = Callable[[str], tuple[str, float]]
"""Return the ISO 639-1 code of a text's language and its probability."""


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
