"""Count the tokens that tokenizers need for the words of languages; recommend to keep or to change the tokenizer.

The intervals come from a bootstrap over documents (``training/statistics.py``), with the same draws for all tokenizers
of a language.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fabric_train.cli.errors import InputError
from fabric_train.cli.progress import progress_of
from fabric_train.files.regular_file import open_to_write
from fabric_train.pages.charts import COLOURS, TEXT, write_png
from fabric_train.tokenization.tokenizers.text_encoder import TextEncoder, open_encoder
from fabric_train.tokenization.tokenizers.tokenizer import load_tokenizer
from fabric_train.training.statistics import FEWEST_DOCUMENTS, LEVEL, Interval, interval_of, resample
from fabric_train.vocabulary.words import LanguageTexts, words_of

CONTEXT = 8192
"""The number of tokens in the context whose words are counted."""
MANY_PIECES = 4
"""A word with at least this number of tokens counts as cut into many."""
KEEP_BELOW = 0.10
"""The share of saved tokens below which the tokenizer is kept."""
CHANGE_FROM = 0.25
"""The share of saved tokens from which the tokenizer is changed; in between, it depends."""
GOOD_UP_TO = 1.6
"""The most tokens per word with which a single tokenizer is good for a language."""
BAD_FROM = 2.2
"""The fewest tokens per word with which a single tokenizer is bad for a language."""
_TEXTS_AT_ONCE = 256
_MAX_SINGLE_CHARACTERS = 0.5  # the share of words of one character below which a language has spaces
_BAR_HEIGHT = 14


@dataclass(frozen=True)
class Estimate:
    """A value and its interval, which is None for fewer than ten documents."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class TokenizerFigures:
    """The figures of a tokenizer for a language; these names are in the JSON file."""

    language: str
    tokenizer: str
    """The tokenizer's name by :func:`short_names`."""
    num_documents: int
    num_words: int
    num_tokens: int
    spaces: bool
    """Whether most of the language's words are between spaces."""
    tokens_per_word: Estimate
    bytes_per_token: Estimate
    share_cut_in_many: Estimate
    words_in_context: Estimate
    saving: Estimate | None
    """The share of the first tokenizer's tokens that this one saves, negative if it needs more; None for the first."""


@dataclass(frozen=True)
class _Counts:
    """The counts of a language's documents with a tokenizer, fp64 [documents] each."""

    words: np.ndarray
    num_bytes: np.ndarray
    tokens: np.ndarray
    cut: np.ndarray
    """The number of words that are cut into many tokens."""


@dataclass(frozen=True)
class _Sum:
    """The sum of a count over the documents of a language, and over the documents of each draw of the bootstrap."""

    total: float
    drawn: np.ndarray | None
    """fp64 [draws]; None for fewer than ten documents."""

    def ratio_to(self, denominator: "_Sum", factor: float = 1.0, offset: float = 0.0) -> Estimate:
        """Estimate ``offset + factor * (this sum / denominator)``."""
        interval = None
        if self.drawn is not None and denominator.drawn is not None:
            interval = interval_of(offset + factor * self.drawn / denominator.drawn)
        return Estimate(float(offset + factor * self.total / denominator.total), interval)


@dataclass(frozen=True)
class _Sums:
    """The sums of the ``_Counts`` of a tokenizer."""

    words: _Sum
    num_bytes: _Sum
    tokens: _Sum
    cut: _Sum


def _sum_up(counts: Sequence[_Counts], seed: int) -> list[_Sums]:
    """Return the sums of each tokenizer's counts for a language.

    All counts are resampled together, so that tokenizers are compared on the same draws of documents.
    """
    columns: list[np.ndarray] = []
    for tokenizer_counts in counts:
        columns += [tokenizer_counts.words, tokenizer_counts.num_bytes, tokenizer_counts.tokens, tokenizer_counts.cut]
    num_documents = len(columns[0])
    draws = resample(columns, seed) if num_documents >= FEWEST_DOCUMENTS else None  # [draws, columns]
    sums_of_columns: list[_Sum] = []
    for index, column in enumerate(columns):
        drawn = None if draws is None else draws[:, index]
        sums_of_columns.append(_Sum(column.sum(), drawn))

    all_sums: list[_Sums] = []
    for first_column in range(0, len(columns), 4):
        words, num_bytes, tokens, cut = sums_of_columns[first_column : first_column + 4]
        all_sums.append(_Sums(words, num_bytes, tokens, cut))
    return all_sums


def measure(texts: Sequence[LanguageTexts], tokenizers: Sequence[str], seed: int) -> list[TokenizerFigures]:
    """Return the figures by language and tokenizer; InputError if a tokenizer cannot be loaded."""
    figures: list[TokenizerFigures] = []
    with tempfile.TemporaryDirectory() as folder:
        encoders = _open_encoders(tokenizers, Path(folder))
        with progress_of("encoding") as show:
            for language_index, language in enumerate(texts):
                document_words = [Counter(words_of(document)) for document in language.documents]
                counts = []
                for encoder_index, encoder in enumerate(encoders):
                    progress = (language_index + encoder_index / len(encoders)) / len(texts)
                    show(progress, f"encoding {language.name}")
                    counts.append(_count(language, document_words, encoder))
                figures += _estimate_figures(language, document_words, short_names(tokenizers), counts, seed)
    return figures


def _open_encoders(tokenizers: Sequence[str], folder: Path) -> list[TextEncoder]:
    """Save each tokenizer in ``folder`` and open its encoder; InputError with all that cannot be loaded."""
    encoders: list[TextEncoder] = []
    faults: list[str] = []
    for index, name in enumerate(tokenizers):
        tokenizer_dir = folder / str(index)
        try:
            tokenizer = load_tokenizer(name)
            tokenizer.save(tokenizer_dir)
            encoder, _ = open_encoder(tokenizer_dir / "tokenizer.json", tokenizer.special_text_is_plain)
        except InputError as error:
            faults += [fault.replace("--tokenizer_name", "--tokenizer") for fault in error.faults]
            continue
        encoders.append(encoder)
    if faults:
        raise InputError(*faults)
    return encoders


def _count(language: LanguageTexts, document_words: Sequence[Counter[str]], encoder: TextEncoder) -> _Counts:
    """Count the tokens of the documents, and their words that are cut into many tokens.

    ``document_words`` has the words of each document with their counts.
    """
    # Each word is encoded with a space before it, as it is in a text: after "a ", without the tokens of "a".
    (prefix_ids,) = encoder.encode_batch(["a"])
    unique_words = list(set().union(*document_words))
    cut_words: set[str] = set()
    for begin in range(0, len(unique_words), _TEXTS_AT_ONCE):
        words = unique_words[begin : begin + _TEXTS_AT_ONCE]
        encoded = encoder.encode_batch([f"per {word}" for word in words])
        for word, token_ids in zip(words, encoded, strict=True):
            if len(token_ids) - len(prefix_ids) >= MANY_PIECES:
                cut_words.add(word)

    num_tokens: list[int] = []
    for begin in range(0, len(language.documents), _TEXTS_AT_ONCE):
        documents = language.documents[begin : begin + _TEXTS_AT_ONCE]
        num_tokens += map(len, encoder.encode_batch(list(documents)))
    num_cut: list[int] = []
    for word_counts in document_words:
        num_cut.append(sum(count for word, count in word_counts.items() if word in cut_words))
    num_bytes = [len(document.encode()) for document in language.documents]
    num_words = [word_counts.total() for word_counts in document_words]
    return _Counts(
        words=np.array(num_words, dtype=np.float64),
        num_bytes=np.array(num_bytes, dtype=np.float64),
        tokens=np.array(num_tokens, dtype=np.float64),
        cut=np.array(num_cut, dtype=np.float64),
    )


def _estimate_figures(
    language: LanguageTexts,
    document_words: Sequence[Counter[str]],
    tokenizers: Sequence[str],
    counts: Sequence[_Counts],
    seed: int,
) -> list[TokenizerFigures]:
    """Return the figures of each tokenizer for a language, from its counts."""
    num_single_characters = 0  # words of one character, each of a script without spaces
    for word_counts in document_words:
        for word, count in word_counts.items():
            if len(word) == 1 and not word.isascii():
                num_single_characters += count

    all_sums = _sum_up(counts, seed)
    first_sums = all_sums[0]
    figures = []
    for name, sums in zip(tokenizers, all_sums, strict=True):
        saving = None
        if sums is not first_sums:
            saving = sums.tokens.ratio_to(first_sums.tokens, factor=-1.0, offset=1.0)  # 1 - tokens / first tokens
        figures.append(
            TokenizerFigures(
                language=language.name,
                tokenizer=name,
                num_documents=len(language.documents),
                num_words=int(sums.words.total),
                num_tokens=int(sums.tokens.total),
                spaces=bool(num_single_characters < _MAX_SINGLE_CHARACTERS * sums.words.total),
                tokens_per_word=sums.tokens.ratio_to(sums.words),
                bytes_per_token=sums.num_bytes.ratio_to(sums.tokens),
                share_cut_in_many=sums.cut.ratio_to(sums.words),
                words_in_context=sums.words.ratio_to(sums.tokens, factor=CONTEXT),
                saving=saving,
            )
        )
    return figures


def short_names(tokenizers: Sequence[str]) -> list[str]:
    """Return the last component of each name, or of a file's folder; the full names if two would be equal."""
    names: list[str] = []
    for tokenizer in tokenizers:
        path = Path(tokenizer)
        is_file = path.suffix in (".model", ".json")
        names.append(path.parent.name if is_file else path.name)
    are_unique = len(set(names)) == len(names)
    return names if are_unique and all(names) else list(tokenizers)


def recommend(figures: Sequence[TokenizerFigures]) -> list[str]:
    """Return a sentence for each language: keep the first tokenizer, or change it, by the thresholds of this module."""
    figures_by_language: dict[str, list[TokenizerFigures]] = {}
    for tokenizer_figures in figures:
        figures_by_language.setdefault(tokenizer_figures.language, []).append(tokenizer_figures)
    lines = []
    for language, (reference, *alternatives) in figures_by_language.items():
        advice = _advice(reference, alternatives) if alternatives else _advice_alone(reference)
        lines.append(f"{language}: {advice}")
    return lines


def thresholds() -> str:
    """Return, in words, the rule behind :func:`recommend`."""
    return (
        f"below {KEEP_BELOW:.0%} saved, keep the tokenizer; from {CHANGE_FROM:.0%} on, change it; in between, it "
        f"depends on the cost of training new rows. For a single tokenizer, up to {GOOD_UP_TO} tokens per word is "
        f"good; from {BAD_FROM} on, measure what an extension saves"
    )


def _advice(reference: TokenizerFigures, alternatives: Sequence[TokenizerFigures]) -> str:
    """Return whether to keep the first tokenizer, or to change to the alternative with the fewest tokens."""
    best = min(alternatives, key=lambda figures: figures.num_tokens)
    saving = best.saving
    assert saving is not None
    change = f"{reference.tokens_per_word.value:.2f} → {best.tokens_per_word.value:.2f}"
    if saving.value <= 0:
        return f"keep {reference.tokenizer}: no other tokenizer needs fewer tokens ({change} with {best.tokenizer})"
    interval = f" ({saving.interval[0]:.1%} to {saving.interval[1]:.1%})" if saving.interval else ""
    saves = f"{change} with {best.tokenizer} saves {saving.value:.1%}{interval}"
    certain_saving = saving.interval[0] if saving.interval else saving.value
    if saving.value < KEEP_BELOW:
        return f"keep {reference.tokenizer}: {saves}"
    if certain_saving >= CHANGE_FROM:
        return f"change it: {saves}; extend {reference.tokenizer}, or train a model that uses the other tokenizer"
    return f"it depends: {saves}; change it if context length or speed in this language matters most"


def _advice_alone(figures: TokenizerFigures) -> str:
    """Return whether to keep a tokenizer that is compared with no other one."""
    value = figures.tokens_per_word.value
    if not figures.spaces:
        return (
            f"{figures.tokenizer} needs {value:.2f} tokens a character; this script has no spaces, so there is no "
            "threshold: compare with another tokenizer"
        )
    if value <= GOOD_UP_TO:
        return f"keep {figures.tokenizer}: {value:.2f} tokens a word are few"
    measure_it = "vocabulary extend --plan true shows how much new tokens would save"
    if value >= BAD_FROM:
        return f"{figures.tokenizer} needs {value:.2f} tokens a word, which is many: {measure_it}"
    return f"{figures.tokenizer} needs {value:.2f} tokens a word, neither few nor many: {measure_it}"


def print_table(figures: Sequence[TokenizerFigures], console: Console) -> None:
    """Print a row for each language and tokenizer; ± is half of the interval."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "tokenizer"):
        table.add_column(name, overflow="fold")
    cut_in_many = f"cut in ≥{MANY_PIECES}"
    for name in ("tokens/word", "bytes/token", cut_in_many, f"words in {CONTEXT // 1024}k", "saved"):
        table.add_column(name, justify="right")
    previous_language = None
    for row in figures:
        is_new_language = row.language != previous_language
        previous_language = row.language
        table.add_row(
            row.language if is_new_language else "",
            row.tokenizer,
            _show(row.tokens_per_word, ".2f"),
            _show(row.bytes_per_token, ".2f"),
            _show(row.share_cut_in_many, ".1%"),
            _show(row.words_in_context, ",.0f"),
            "" if row.saving is None else _show(row.saving, ".1%"),
        )
    console.print(table)


def _show(estimate: Estimate, number_format: str) -> str:
    """Return a value and half of its interval: ``1.53 ±0.02``, ``12.1% ±0.4``."""
    value = f"{estimate.value:{number_format}}"
    if estimate.interval is None:
        return value
    low, high = estimate.interval
    half = f"{(high - low) / 2:{number_format}}"
    return f"{value} ±{half.removesuffix('%')}"


def write_json(figures: Sequence[TokenizerFigures], notes: Sequence[str], file: Path) -> None:
    """Write all figures, the thresholds and the recommendation."""
    content = {
        "measured": [asdict(tokenizer_figures) for tokenizer_figures in figures],
        "interval_percent": LEVEL,
        "context_tokens": CONTEXT,
        "thresholds": {
            "keep_below": KEEP_BELOW,
            "change_from": CHANGE_FROM,
            "good_up_to": GOOD_UP_TO,
            "bad_from": BAD_FROM,
        },
        "notes": list(notes),
        "recommendation": recommend(figures),
    }
    with open_to_write(file, "w") as opened:
        opened.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def draw(figures: Sequence[TokenizerFigures], picture: Path) -> None:
    """Draw bars of the tokens per word with their intervals, grouped by language."""
    rows: list[dict[str, Any]] = []
    for tokenizer_figures in figures:
        estimate = tokenizer_figures.tokens_per_word
        low, high = estimate.interval or (estimate.value, estimate.value)
        rows.append(
            {
                "language": tokenizer_figures.language,
                "tokenizer": tokenizer_figures.tokenizer,
                "value": estimate.value,
                "low": low,
                "high": high,
            }
        )
    tokenizers = list(dict.fromkeys(row["tokenizer"] for row in rows))
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(tokenizers))]

    # The encodings of a Vega-Lite chart.
    x: dict[str, Any] = {"field": "value", "type": "quantitative", "title": "tokens per word"}
    y: dict[str, Any] = {"field": "language", "title": None, "sort": None, "axis": {"labelAngle": 0}}
    offset = {"field": "tokenizer", "sort": tokenizers}  # the bars of a language are one below the other
    colour = {
        "field": "tokenizer",
        "scale": {"domain": tokenizers, "range": colours},
        "legend": {"title": None},
    }
    bars = {"mark": "bar", "encoding": {"x": x, "y": y, "yOffset": offset, "color": colour}}
    intervals = {
        "mark": {"type": "rule", "color": TEXT, "strokeWidth": 2},
        "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "yOffset": offset},
    }
    chart = {
        "data": {"values": rows},
        "width": 640,
        "height": {"step": _BAR_HEIGHT},
        "layer": [bars, intervals],
    }
    write_png(chart, picture, "Tokens per word, fewer are better")
