"""Show the figures of ``report.py``: a table on the terminal, JSON, and a picture of the tokens per word."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fabric_train.files.regular_file import open_to_write
from fabric_train.pages.charts import COLOURS, TEXT, write_png
from fabric_train.training.bootstrap import LEVEL
from fabric_train.vocabulary import report
from fabric_train.vocabulary.report import Figure, Measured

_BAR_HEIGHT = 14


def print_table(measured: Sequence[Measured], console: Console) -> None:
    """Print a row for each language and tokenizer; ± is half of the interval."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "tokenizer"):
        table.add_column(name, overflow="fold")
    many = f"cut in ≥{report.MANY_PIECES}"
    for name in ("tokens/word", "bytes/token", many, f"words in {report.CONTEXT // 1024}k", "saved"):
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
        "context_tokens": report.CONTEXT,
        "thresholds": {
            "keep_below": report.KEEP_BELOW,
            "change_from": report.CHANGE_FROM,
            "good_up_to": report.GOOD_UP_TO,
            "bad_from": report.BAD_FROM,
        },
        "notes": list(notes),
        "recommendation": report.recommend(measured),
    }
    with open_to_write(file, "w") as opened:
        opened.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def draw(measured: Sequence[Measured], picture: Path) -> None:
    """Draw bars of the tokens per word with their intervals, grouped by language. Raises DrawError."""
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
