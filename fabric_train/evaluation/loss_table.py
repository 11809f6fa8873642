"""Print and write the losses of the compared models; ``documents.jsonl`` has those that all else is computed from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from fabric_train.checkpoint import perplexity
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.files.regular_file import open_regular, parse_json, write_atomically
from fabric_train.pages.charts import BETTER, TEXT, WORSE, write_png
from fabric_train.training.statistics import FEWEST_DOCUMENTS, LEVEL, DocumentSums, ModelLoss, compare

if TYPE_CHECKING:
    from fabric_train.evaluation.texts import EncodedText

DOCUMENTS = "documents.jsonl"
Results = Mapping[str, Mapping[str, ModelLoss]]
"""The losses by source and model, in their order; models that were not evaluated on a source are left out there."""
COLUMNS = (
    *("source", "model", "documents", "tokens", "loss", "perplexity", "bits/byte", f"{LEVEL} % interval"),
    *("to the first", f"{LEVEL} % interval", ""),
)
NUM_WORDS = 2
"""So many columns have words; the others are aligned at the right."""
_PANELS_IN_A_ROW = 3


def print_table(results: Results, are_same_tokens: bool, notes: Sequence[str] = ()) -> None:
    """Print the losses of each source and model, and what to know to read them; ``notes`` are further lines."""
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < NUM_WORDS else "right", no_wrap=number >= NUM_WORDS + 2)
    for source, of_models in results.items():
        for number, (model, found) in enumerate(of_models.items()):
            name = visible(source) if number == 0 else ""
            table.add_row(name, visible(model), *cells(found), end_section=number == len(of_models) - 1)
    console = open_console(width=None if open_console().is_terminal else 200)
    console.print(table)
    for line in (*notes_on(results, are_same_tokens), *notes):
        console.print(line, style="dim")


def cells(found: ModelLoss) -> Iterator[str]:
    """Yield documents, tokens, loss, perplexity, bits per byte and interval, difference and interval, and a verdict."""
    total = found.total
    difference = found.difference
    yield from (f"{found.num_documents:,}", f"{total.num_tokens:,}", f"{total.loss:.4f}", f"{total.perplexity:.2f}")
    yield "" if total.bits_per_byte is None else f"{total.bits_per_byte:.4f}"
    yield "" if found.bits_per_byte is None else "{:.4f} to {:.4f}".format(*found.bits_per_byte)
    if difference is None:
        yield from ("", "", "")
    else:
        yield f"{difference.value:+.4f}"
        yield "{:+.4f} to {:+.4f}".format(*difference.interval)
        yield ("better" if difference.value < 0 else "worse") if difference.excludes_0 else ""


def notes_on(results: Results, are_same_tokens: bool) -> Iterator[str]:
    """Yield what to know to read a table of these results."""
    yield "loss in nats per token; lower is better"
    if any(len(of_models) > 1 for of_models in results.values()):
        yield "better, worse: the interval of the difference (paired bootstrap over documents) is on one side of 0"
    if not are_same_tokens:
        yield "the models have different tokenizers: compare bits per byte, not loss or perplexity"
    for source, of_models in results.items():
        first = next(iter(of_models.values()))
        if first.num_documents < FEWEST_DOCUMENTS:
            yield f"{visible(source)}: {first.num_documents} documents are too few for an interval"


@dataclass(frozen=True)
class DocumentLoss:
    """A line of ``documents.jsonl``: the loss of a model on a document."""

    model: str
    weights: str  # what tells the model's weights from others
    source: str
    text: str  # what tells the text that the document is of, its windows and the kind of device from others
    document: str  # where it is: file and line
    tokens: int  # that are predicted
    bytes: float | None  # of its text; None if they are not known
    nats: float  # the sum of the tokens' losses


Evaluated = dict[str, dict[str, list[DocumentLoss]]]
"""The losses on documents by model and source, in their order."""


def document_losses(
    model: str, weights: str, texts: Sequence["EncodedText"], losses: Sequence[np.ndarray]
) -> dict[str, list[DocumentLoss]]:
    """Return a model's losses on each document by source, from the ``losses`` of each text's tokens, fp32 [N]."""
    found: dict[str, list[DocumentLoss]] = {}
    for text, of_tokens in zip(texts, losses, strict=True):
        nats = np.bincount(text.owners, of_tokens.astype(np.float64), len(text.sources)).tolist()
        tokens = np.bincount(text.owners, minlength=len(text.sources)).tolist()
        for number, num_bytes in enumerate(text.num_bytes.tolist()):
            source = text.source_names[text.sources[number]]
            known = None if np.isnan(num_bytes) else _whole(num_bytes)
            place = (model, weights, source, text.identity, text.place(number))
            found.setdefault(source, []).append(DocumentLoss(*place, tokens[number], known, nats[number]))
    return {source: found[source] for text in texts for source in text.source_names if source in found}


def read_evaluated(folder: Path) -> Evaluated:
    """Return what earlier evaluations have written into a folder, which need not exist."""
    file = folder / DOCUMENTS
    evaluated: Evaluated = {}
    if not file.exists():
        return evaluated
    with open_regular(file, "remove it") as opened:
        for number, line in enumerate(opened, 1):
            try:
                loss = parse_json(line, DocumentLoss)
            except ValueError:
                raise InputError(
                    f"{file}, line {number}: damaged, or written by an earlier version; choose another --output_dir, "
                    "or remove the file and evaluate again"
                ) from None
            evaluated.setdefault(loss.model, {}).setdefault(loss.source, []).append(loss)
    return evaluated


def outdated_models(earlier: Evaluated, weights: Mapping[str, str]) -> list[str]:
    """Return the models of earlier evaluations that have other weights now. ``weights`` has those by model."""
    return [model for model, own in earlier.items() if weights.get(model, _weights(own)) != _weights(own)]


def check_same_documents(
    earlier: Evaluated, weights: Mapping[str, str], documents: Mapping[str, Sequence[str]], folder: Path
) -> None:
    """Raise an InputError if a model in ``folder`` has losses on other documents, windows or another kind of device.

    ``weights`` has the models that are evaluated again, ``documents`` by source the ``DocumentLoss.text`` of each one.
    """
    faults = []
    for source, texts in documents.items():
        others = [
            model
            for model, of_sources in earlier.items()
            if model not in weights and source in of_sources and [line.text for line in of_sources[source]] != texts
        ]
        if others:
            faults.append(
                f"--texts {source}: {folder} has losses of {', '.join(others)} on other documents of that name, or "
                "with another --max_length, --overlap or kind of device; name the text otherwise (NAME=PLACE), give "
                "all these models, or choose another --output_dir"
            )
    if faults:
        raise InputError(*faults)


def join_evaluated(earlier: Evaluated, new: Evaluated) -> Evaluated:
    """Return earlier losses with new ones, which replace losses of the same model and source.

    The first model, with which the others are compared, stays the first unless it is evaluated again at another place.
    """
    outdated = outdated_models(earlier, {model: _weights(own) for model, own in new.items()})
    kept = {model: of_sources for model, of_sources in earlier.items() if model not in outdated}
    names = [*new, *kept] if next(iter(earlier), None) in new else [*kept, *new]
    return {model: {**kept.get(model, {}), **new.get(model, {})} for model in dict.fromkeys(names)}


def compare_evaluated(evaluated: Evaluated, seed: int) -> Results:
    """Return the losses of all models with intervals; within a source, models are compared with its first one."""
    results: dict[str, dict[str, ModelLoss]] = {}
    for source in dict.fromkeys(source for of_sources in evaluated.values() for source in of_sources):
        models = [model for model, of_sources in evaluated.items() if source in of_sources]
        if len({len(evaluated[model][source]) for model in models}) > 1:
            raise InputError(f"{DOCUMENTS}: damaged, models have other documents of {source}; evaluate again")
        sums = [_sums(evaluated[model][source]) for model in models]
        results[source] = dict(zip(models, compare(sums, seed), strict=True))
    return results


def have_same_tokens(evaluated: Evaluated) -> bool:
    """Return whether all models have the same number of tokens in each document."""
    tokens: dict[str, set[tuple[int, ...]]] = {}
    for of_sources in evaluated.values():
        for source, lines in of_sources.items():
            tokens.setdefault(source, set()).add(tuple(line.tokens for line in lines))
    return all(len(one) == 1 for one in tokens.values())


def write_evaluated(folder: Path, evaluated: Evaluated, results: Results) -> None:
    """Write ``documents.jsonl`` and ``evaluation.json``, which has the figures by model and source."""
    lines = (line for of_sources in evaluated.values() for own in of_sources.values() for line in own)
    text = "".join(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    write_atomically(folder / DOCUMENTS, text)
    content = {
        model: {source: _figures(results[source], model) for source in results if source in of_sources}
        for model, of_sources in evaluated.items()
    }
    write_atomically(folder / "evaluation.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _figures(of_models: Mapping[str, ModelLoss], model: str) -> dict[str, Any]:
    found = of_models[model]
    figures: dict[str, Any] = {
        **found.total.figures(),
        "tokens": found.total.num_tokens,
        "bytes": None if found.total.num_bytes is None else _whole(found.total.num_bytes),
        "documents": found.num_documents,
    }
    if found.loss:
        figures["ci"] = {"loss": found.loss, "perplexity": tuple(map(perplexity, found.loss))}
    if found.bits_per_byte:
        figures["ci"]["bits_per_byte"] = found.bits_per_byte
    if found.difference:
        difference = found.difference
        figures["difference"] = {
            "to": next(iter(of_models)),
            "of": difference.unit,
            "value": difference.value,
            "ci": difference.interval,
            "excludes_0": difference.excludes_0,
        }
    return figures


def _sums(lines: Sequence[DocumentLoss]) -> DocumentSums:
    num_bytes = np.array([np.nan if line.bytes is None else line.bytes for line in lines], dtype=np.float64)
    nats, tokens = (np.array([getattr(line, name) for line in lines], dtype=np.float64) for name in ("nats", "tokens"))
    return DocumentSums(nats, tokens, num_bytes)


def _weights(of_sources: Mapping[str, Sequence[DocumentLoss]]) -> str:
    return next(iter(of_sources.values()))[0].weights


def _whole(number: float) -> float:
    return int(number) if number.is_integer() else number  # a fraction is of tokens that are predicted in part


def draw_losses(file: Path, models: Sequence[str], results: Results) -> None:
    """Write a PNG with a panel for each source: bits per byte of each model, or nats per token if bytes are unknown."""
    panels = []
    for source, of_models in results.items():
        in_bits = all(found.total.bits_per_byte is not None for found in of_models.values())
        rows = [_drawn(model, found, in_bits) for model, found in of_models.items()]
        x = {
            "type": "quantitative",
            "scale": {"zero": False},
            "title": "bits per byte" if in_bits else "nats per token",
        }
        y = {"field": "model", "type": "nominal", "sort": list(models), "title": None}
        known = {"domain": ["better", "worse", ""], "range": [BETTER, WORSE, TEXT]}
        encoding = {"y": y, "color": {"field": "verdict", "type": "nominal", "scale": known, "legend": None}}
        interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
        value = {"x": {**x, "field": "value"}}
        shown = {"text": {"field": "value", "format": ".3f"}}
        layers = [
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": interval},
            {"mark": {"type": "circle", "size": 50, "opacity": 1}, "encoding": value},
            {"mark": {"type": "text", "dy": -10}, "encoding": {**value, **shown}},
        ]
        panel = {"title": source, "width": 230, "height": {"step": 36}, "data": {"values": rows}, "layer": layers}
        panels.append({**panel, "encoding": encoding})
    title = f"Loss with {LEVEL} % intervals; lower is better"
    if len(models) > 1:
        title += ". Green, red: the interval of the difference to the first model excludes 0"
    write_png({"concat": panels, "columns": _PANELS_IN_A_ROW}, file, title)


def _drawn(model: str, found: ModelLoss, in_bits: bool) -> dict[str, Any]:
    interval = found.bits_per_byte if in_bits else found.loss
    low, high = interval or (None, None)
    is_known = found.difference is not None and found.difference.excludes_0
    verdict = ("better" if found.difference.value < 0 else "worse") if is_known and found.difference else ""
    value = found.total.bits_per_byte if in_bits else found.total.loss
    return {"model": model, "value": value, "low": low, "high": high, "verdict": verdict}
