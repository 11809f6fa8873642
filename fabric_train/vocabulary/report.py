"""Count the tokens that tokenizers need for the words of languages; recommend to keep or to change the tokenizer.

The intervals are from a bootstrap over documents (``training/statistics.py``), with the same draws for all tokenizers
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
"""The tokens of the context whose words are counted."""
MANY_PIECES = 4
"""A word of so many tokens or more counts as cut into many."""
KEEP_BELOW = 0.10
CHANGE_FROM = 0.25
"""Shares of tokens saved: below the first keep the tokenizer, from the second change it, between them it depends."""
GOOD_UP_TO = 1.6
BAD_FROM = 2.2
"""Tokens a word: up to the first a single tokenizer serves a language well, from the second badly."""
_TEXTS_AT_ONCE = 256
_MOSTLY = 0.5
_BAR_HEIGHT = 14


@dataclass(frozen=True)
class Figure:
    """A figure and its interval, which is None for fewer than ten documents."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class Measured:
    """The figures of a tokenizer for a language.

    ``tokenizer`` is its name by :func:`short_names`. ``saving`` is the share of the first tokenizer's tokens that this
    one saves, negative if it needs more; None for the first one. ``spaces`` says whether most of the language's words
    stand between spaces.
    """

    language: str
    tokenizer: str
    num_documents: int
    num_words: int
    num_tokens: int
    spaces: bool
    tokens_per_word: Figure
    bytes_per_token: Figure
    share_cut_in_many: Figure
    words_in_context: Figure
    saving: Figure | None


@dataclass(frozen=True)
class _Counts:
    """Counts of the documents of a language, fp64 [D] each; with a tokenizer's, ``tokens`` and ``cut`` words."""

    words: np.ndarray
    num_bytes: np.ndarray
    tokens: np.ndarray
    cut: np.ndarray


def measure(texts: Sequence[LanguageTexts], tokenizers: Sequence[str], seed: int) -> list[Measured]:
    """Return the figures by language, and of each language by tokenizer; InputError if one cannot be loaded."""
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        encoders = _open_encoders(tokenizers, Path(folder))
        with progress_of("encoding") as show:
            for number, language in enumerate(texts):
                words = [Counter(words_of(document)) for document in language.documents]
                counts = []
                for place, encoder in enumerate(encoders):
                    show((number + place / len(encoders)) / len(texts), f"encoding {language.name}")
                    counts.append(_count(language, words, encoder))
                measured += _figures(language, words, short_names(tokenizers), counts, seed)
    return measured


def _open_encoders(tokenizers: Sequence[str], folder: Path) -> list[TextEncoder]:
    encoders: list[TextEncoder] = []
    faults: list[str] = []
    for number, name in enumerate(tokenizers):
        try:
            tokenizer = load_tokenizer(name)
            tokenizer.save(folder / str(number))
            file = folder / str(number) / "tokenizer.json"
            encoders.append(open_encoder(file, tokenizer.special_text_is_plain)[0])
        except InputError as error:
            faults += (fault.replace("--tokenizer_name", "--tokenizer") for fault in error.faults)
    if faults:
        raise InputError(*faults)
    return encoders


def _count(language: LanguageTexts, words: Sequence[Counter[str]], encoder: TextEncoder) -> _Counts:
    """Count tokens of the documents, and their words of many tokens: each word with a space before it."""
    (before,) = encoder.encode_batch(["a"])
    unique = list(set().union(*words))
    has_many: set[str] = set()
    for first in range(0, len(unique), _TEXTS_AT_ONCE):
        some = unique[first : first + _TEXTS_AT_ONCE]
        lengths = map(len, encoder.encode_batch([f"a {word}" for word in some]))
        has_many |= {word for word, length in zip(some, lengths, strict=True) if length - len(before) >= MANY_PIECES}
    tokens: list[int] = []
    for first in range(0, len(language.documents), _TEXTS_AT_ONCE):
        tokens += map(len, encoder.encode_batch(list(language.documents[first : first + _TEXTS_AT_ONCE])))
    cut = [sum(number for word, number in counted.items() if word in has_many) for counted in words]
    num_bytes = [len(document.encode()) for document in language.documents]
    num_words = [counted.total() for counted in words]
    return _Counts(*(np.array(each, dtype=np.float64) for each in (num_words, num_bytes, tokens, cut)))


def _figures(
    language: LanguageTexts,
    words: Sequence[Counter[str]],
    tokenizers: Sequence[str],
    counts: Sequence[_Counts],
    seed: int,
) -> list[Measured]:
    columns = [array for one in counts for array in (one.words, one.num_bytes, one.tokens, one.cut)]
    enough = len(language.documents) >= FEWEST_DOCUMENTS
    drawn = resample(columns, seed) if enough else None
    totals = np.array([column.sum() for column in columns])

    def figure(upper: int, lower: int, factor: float = 1.0, offset: float = 0.0) -> Figure:
        interval = None if drawn is None else interval_of(offset + factor * drawn[:, upper] / drawn[:, lower])
        return Figure(float(offset + factor * totals[upper] / totals[lower]), interval)

    alone = sum(
        number for counted in words for word, number in counted.items() if len(word) == 1 and not word.isascii()
    )
    found = []
    for place, name in enumerate(tokenizers):
        num_words, num_bytes, tokens, cut = range(4 * place, 4 * place + 4)
        found.append(
            Measured(
                language=language.name,
                tokenizer=name,
                num_documents=len(language.documents),
                num_words=int(totals[num_words]),
                num_tokens=int(totals[tokens]),
                spaces=bool(alone < _MOSTLY * totals[num_words]),
                tokens_per_word=figure(tokens, num_words),
                bytes_per_token=figure(num_bytes, tokens),
                share_cut_in_many=figure(cut, num_words),
                words_in_context=figure(num_words, tokens, CONTEXT),
                saving=figure(tokens, 2, -1.0, 1.0) if place else None,
            )
        )
    return found


def short_names(tokenizers: Sequence[str]) -> list[str]:
    """Return the last part of each name, or of the folder of a file; the whole names if two are then the same."""
    paths = [Path(name) for name in tokenizers]
    short = [path.parent.name if path.suffix in (".model", ".json") else path.name for path in paths]
    return short if len(set(short)) == len(short) and all(short) else list(tokenizers)


def recommend(measured: Sequence[Measured]) -> list[str]:
    """Return a sentence for each language: keep the first tokenizer, or change it, by the thresholds of this module."""
    lines = []
    for language in dict.fromkeys(one.language for one in measured):
        first, *others = (one for one in measured if one.language == language)
        advice = _advice(first, others) if others else _advice_alone(first)
        lines.append(f"{language}: {advice}")
    return lines


def thresholds() -> str:
    """Return the rule behind :func:`recommend` in words."""
    return (
        f"below {KEEP_BELOW:.0%} saved: keep the tokenizer; from {CHANGE_FROM:.0%} on: change it; between: it depends "
        f"on the cost of training new rows. A tokenizer alone: up to {GOOD_UP_TO} tokens a word is good, from "
        f"{BAD_FROM} on measure what an extension saves"
    )


def _advice(first: Measured, others: Sequence[Measured]) -> str:
    best = min(others, key=lambda one: one.num_tokens)
    assert best.saving is not None
    before = first.tokens_per_word.value
    after = best.tokens_per_word.value
    saving = best.saving
    change = f"{before:.2f} → {after:.2f}"
    if saving.value <= 0:
        return f"keep {first.tokenizer}: no other needs fewer tokens ({change} with {best.tokenizer})"
    between = f" ({saving.interval[0]:.1%} to {saving.interval[1]:.1%})" if saving.interval else ""
    saves = f"{change} with {best.tokenizer} saves {saving.value:.1%}{between}"
    certain = saving.interval[0] if saving.interval else saving.value
    if saving.value < KEEP_BELOW:
        return f"keep {first.tokenizer}: {saves}"
    if certain >= CHANGE_FROM:
        return f"change it: {saves}; extend {first.tokenizer}, or train a model that has the other"
    return f"it depends: {saves}; change it if context or speed in this language decide"


def _advice_alone(first: Measured) -> str:
    value = first.tokens_per_word.value
    if not first.spaces:
        return (
            f"{first.tokenizer} needs {value:.2f} tokens a character; this script has no spaces, so there is no "
            "threshold: compare with another tokenizer"
        )
    if value <= GOOD_UP_TO:
        return f"keep {first.tokenizer}: {value:.2f} tokens a word are few"
    measure_it = "vocabulary extend --plan true says what new tokens save"
    if value >= BAD_FROM:
        return f"{first.tokenizer} needs {value:.2f} tokens a word, which is many: {measure_it}"
    return f"{first.tokenizer} needs {value:.2f} tokens a word, neither few nor many: {measure_it}"


def print_table(measured: Sequence[Measured], console: Console) -> None:
    """Print a row for each language and tokenizer; ± is half of the interval."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "tokenizer"):
        table.add_column(name, overflow="fold")
    many = f"cut in ≥{MANY_PIECES}"
    for name in ("tokens/word", "bytes/token", many, f"words in {CONTEXT // 1024}k", "saved"):
        table.add_column(name, justify="right")
    for place, one in enumerate(measured):
        table.add_row(
            one.language if not place or measured[place - 1].language != one.language else "",
            one.tokenizer,
            _shown(one.tokens_per_word, ".2f"),
            _shown(one.bytes_per_token, ".2f"),
            _shown(one.share_cut_in_many, ".1%"),
            _shown(one.words_in_context, ",.0f"),
            "" if one.saving is None else _shown(one.saving, ".1%"),
        )
    console.print(table)


def _shown(figure: Figure, form: str) -> str:
    if figure.interval is None:
        return f"{figure.value:{form}}"
    half = f"{(figure.interval[1] - figure.interval[0]) / 2:{form}}"
    return f"{figure.value:{form}} ±{half.removesuffix('%')}"


def write_json(measured: Sequence[Measured], notes: Sequence[str], file: Path) -> None:
    """Write all figures, the thresholds and the recommendation."""
    content = {
        "measured": [asdict(one) for one in measured],
        "interval_percent": LEVEL,
        "context_tokens": CONTEXT,
        "thresholds": {
            "keep_below": KEEP_BELOW,
            "change_from": CHANGE_FROM,
            "good_up_to": GOOD_UP_TO,
            "bad_from": BAD_FROM,
        },
        "notes": list(notes),
        "recommendation": recommend(measured),
    }
    with open_to_write(file, "w") as opened:
        opened.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def draw(measured: Sequence[Measured], picture: Path) -> None:
    """Draw bars of the tokens per word with their intervals, grouped by language."""
    tokenizers = list(dict.fromkeys(one.tokenizer for one in measured))
    rows = [
        {
            "language": one.language,
            "tokenizer": one.tokenizer,
            "value": one.tokens_per_word.value,
            "low": one.tokens_per_word.interval[0] if one.tokens_per_word.interval else one.tokens_per_word.value,
            "high": one.tokens_per_word.interval[1] if one.tokens_per_word.interval else one.tokens_per_word.value,
        }
        for one in measured
    ]
    colour = {
        "field": "tokenizer",
        "scale": {"domain": tokenizers, "range": [COLOURS[place % len(COLOURS)] for place in range(len(tokenizers))]},
        "legend": {"title": None},
    }
    order = {"sort": None, "axis": {"labelAngle": 0}}
    x: dict[str, Any] = {"field": "value", "type": "quantitative", "title": "tokens per word"}
    y: dict[str, Any] = {"field": "language", "title": None, **order}
    offset = {"field": "tokenizer", "sort": tokenizers}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "yOffset": offset}
    line = {"type": "rule", "color": TEXT, "strokeWidth": 2}
    specified = {
        "data": {"values": rows},
        "width": 640,
        "height": {"step": _BAR_HEIGHT},
        "layer": [
            {"mark": "bar", "encoding": {"x": x, "y": y, "yOffset": offset, "color": colour}},
            {"mark": line, "encoding": interval},
        ],
    }
    write_png(specified, picture, "Tokens per word, fewer are better")
