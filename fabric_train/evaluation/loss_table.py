"""Print and write the losses of the compared models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fabric_train.checkpoint import perplexity
from fabric_train.evaluation.bootstrap import FEWEST_DOCUMENTS, LEVEL, Difference, ModelLoss
from fabric_train.evaluation.encoded_text import EncodedText
from fabric_train.files.regular_file import write_atomically
from fabric_train.tokenization.inspect.row_view import visible

Results = Mapping[str, Sequence[ModelLoss]]
"""The losses of the models, in their order, by source."""


def print_table(models: Sequence[str], results: Results, are_same_tokens: bool) -> None:
    """Print the losses of each source and model, and what to know to read them."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (("source", "left"), ("model", "left"), ("documents", "right"), ("tokens", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("loss", "perplexity", "bits/byte", f"{LEVEL} % interval", "to the first", f"{LEVEL} % interval", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for source, of_models in results.items():
        for number, (model, found) in enumerate(zip(models, of_models, strict=True)):
            name = visible(source) if number == 0 else ""
            table.add_row(name, visible(model), *_cells(found), end_section=number == len(models) - 1)
    console = Console(width=None if Console().is_terminal else 200)
    console.print(table)
    for line in _notes(results, are_same_tokens, len(models)):
        console.print(line, style="dim")


def _cells(found: ModelLoss) -> Iterator[str]:
    total, difference = found.total, found.difference
    yield from (f"{found.num_documents:,}", f"{total.num_tokens:,}", f"{total.loss:.4f}", f"{total.perplexity:.2f}")
    yield "" if total.bits_per_byte is None else f"{total.bits_per_byte:.4f}"
    yield _range(found.bits_per_byte)
    yield "" if difference is None else f"{difference.value:+.4f}"
    yield "" if difference is None else f"{difference.interval[0]:+.4f} to {difference.interval[1]:+.4f}"
    yield _mark(difference)


def _range(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def _mark(difference: Difference | None) -> str:
    if difference is None or not difference.excludes_0:
        return ""
    return "better" if difference.value < 0 else "worse"


def _notes(results: Results, are_same_tokens: bool, num_models: int) -> Iterator[str]:
    yield "loss in nats per token; lower is better"
    if num_models > 1:
        yield "better, worse: the interval of the difference (paired bootstrap over documents) is on one side of 0"
    if not are_same_tokens:
        yield "the models have different tokenizers: compare bits per byte, not loss or perplexity"
    for source, of_models in results.items():
        if of_models[0].num_documents < FEWEST_DOCUMENTS:
            yield f"{visible(source)}: {of_models[0].num_documents} documents are too few for an interval"


def write_evaluation(folder: Path, models: Sequence[str], results: Results) -> None:
    """Write ``evaluation.json``: the figures by model and source."""
    content = {
        model: {source: _figures(of_models[number], models[0]) for source, of_models in results.items()}
        for number, model in enumerate(models)
    }
    write_atomically(folder / "evaluation.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _figures(found: ModelLoss, first: str) -> dict[str, Any]:
    figures: dict[str, Any] = {
        **found.total.figures(),
        "tokens": found.total.num_tokens,
        "bytes": _bytes(found.total.num_bytes),
        "documents": found.num_documents,
    }
    if found.loss:
        figures["ci"] = {"loss": found.loss, "perplexity": tuple(map(perplexity, found.loss))}
    if found.bits_per_byte:
        figures["ci"]["bits_per_byte"] = found.bits_per_byte
    if found.difference:
        difference = found.difference
        figures["difference"] = {
            "to": first,
            "of": difference.unit,
            "value": difference.value,
            "ci": difference.interval,
            "excludes_0": difference.excludes_0,
        }
    return figures


def _bytes(number: float | None) -> float | None:
    """Return bytes as an integer, except those of tokens of which only a part is predicted."""
    return int(number) if number is not None and number.is_integer() else number


def write_documents(
    folder: Path,
    models: Sequence[str],
    encoded: Sequence[Sequence[EncodedText]],
    losses: Sequence[Sequence[np.ndarray]],
) -> None:
    """Write ``documents.jsonl``: the summed loss of each document for each model."""
    lines = []
    for model, texts, of_texts in zip(models, encoded, losses, strict=True):
        for text, of_tokens in zip(texts, of_texts, strict=True):
            nats = np.bincount(text.owners, of_tokens.astype(np.float64), len(text.sources)).tolist()
            tokens = np.bincount(text.owners, minlength=len(text.sources)).tolist()
            for number, num_bytes in enumerate(text.num_bytes.tolist()):
                record = {
                    "model": model,
                    "source": text.source_names[text.sources[number]],
                    "document": text.place(number),
                    "tokens": tokens[number],
                    "bytes": _bytes(None if np.isnan(num_bytes) else num_bytes),
                    "nats": nats[number],
                }
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    write_atomically(folder / "documents.jsonl", "".join(lines))
