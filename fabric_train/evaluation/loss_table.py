"""Print and write the losses of the compared models; all figures are computed from those in ``documents.jsonl``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from fabric_train.checkpoint import perplexity
from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.files.regular_file import open_regular, write_atomically
from fabric_train.files.typed_json import parse_json
from fabric_train.pages.charts import BETTER, TEXT, WORSE, write_png
from fabric_train.training.statistics import FEWEST_DOCUMENTS, LEVEL, DocumentSums, ModelLoss, compare

if TYPE_CHECKING:
    from fabric_train.evaluation.texts import EncodedText

DOCUMENTS = "documents.jsonl"
Results = Mapping[str, Mapping[str, ModelLoss]]
"""The losses by source and model, in order; a source lacks the models that were not evaluated on it."""
COLUMNS = (
    *("source", "model", "documents", "tokens", "loss", "perplexity", "bits/byte", f"{LEVEL} % interval"),
    *("to the first", f"{LEVEL} % interval", ""),
)
NUM_WORDS = 2
"""The number of columns with words, which come first; the other columns are right-aligned."""
_PANELS_IN_A_ROW = 3


def print_table(results: Results, are_same_tokens: bool, notes: Sequence[str] = ()) -> None:
    """Print the losses of each source and model, notes on how to read them, and then ``notes``."""
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(COLUMNS):
        # names and counts may be wrapped, losses may not
        table.add_column(name, justify="left" if index < NUM_WORDS else "right", no_wrap=index >= NUM_WORDS + 2)
    for source, loss_by_model in results.items():
        for index, (model, loss) in enumerate(loss_by_model.items()):
            source_cell = visible(source) if index == 0 else ""
            is_last = index == len(loss_by_model) - 1
            table.add_row(source_cell, visible(model), *cells(loss), end_section=is_last)
    console = open_console(width=None if open_console().is_terminal else 200)
    console.print(table)
    for line in (*notes_on(results, are_same_tokens), *notes):
        console.print(line, style="dim")


def cells(loss: ModelLoss) -> Iterator[str]:
    """Yield documents, tokens, loss, perplexity, bits per byte and interval, difference and interval, and a verdict."""
    total = loss.total
    yield f"{loss.num_documents:,}"
    yield f"{total.num_tokens:,}"
    yield f"{total.loss:.4f}"
    yield f"{total.perplexity:.2f}"
    yield "" if total.bits_per_byte is None else f"{total.bits_per_byte:.4f}"
    yield "" if loss.bits_per_byte is None else "{:.4f} to {:.4f}".format(*loss.bits_per_byte)
    difference = loss.difference
    if difference is None:
        yield from ("", "", "")
    else:
        yield f"{difference.value:+.4f}"
        yield "{:+.4f} to {:+.4f}".format(*difference.interval)
        yield _verdict(loss)


def _verdict(loss: ModelLoss) -> str:
    """Return whether a model is better or worse than the first one; "" if the interval includes 0."""
    if loss.difference is None or not loss.difference.excludes_0:
        return ""
    return "better" if loss.difference.value < 0 else "worse"


def notes_on(results: Results, are_same_tokens: bool) -> Iterator[str]:
    """Yield notes on how to read a table of these results."""
    yield "loss in nats per token; lower is better"
    if any(len(loss_by_model) > 1 for loss_by_model in results.values()):
        yield "better, worse: the interval of the difference (paired bootstrap over documents) excludes 0"
    if not are_same_tokens:
        yield "the models have different tokenizers: compare bits per byte, not loss or perplexity"
    for source, loss_by_model in results.items():
        loss = next(iter(loss_by_model.values()))
        if loss.num_documents < FEWEST_DOCUMENTS:
            yield f"{visible(source)}: {loss.num_documents} documents are too few for an interval"


@dataclass(frozen=True)
class DocumentLoss:
    """A line of ``documents.jsonl``: the loss of a model on a document."""

    model: str
    weights: str
    """A hash that identifies the model's weights."""
    source: str
    text: str
    """A hash that identifies the document's text, its windows and the kind of device."""
    document: str
    """The file and line of the document."""
    tokens: int
    """The number of predicted tokens."""
    bytes: float | None
    """The bytes of the document's text; None if they are not known."""
    nats: float
    """The sum of the tokens' losses."""


Evaluated = dict[str, dict[str, list[DocumentLoss]]]
"""The losses on documents by model and source, in order."""


def document_losses(
    model: str, weights: str, texts: Sequence["EncodedText"], losses: Sequence[np.ndarray]
) -> dict[str, list[DocumentLoss]]:
    """Return a model's losses on each document by source, from the ``losses`` of each text's tokens, fp32 [N]."""
    lines_by_source: dict[str, list[DocumentLoss]] = {}
    for text, token_losses in zip(texts, losses, strict=True):
        num_documents = len(text.sources)
        nats = np.bincount(text.owners, token_losses.astype(np.float64), num_documents).tolist()
        num_tokens = np.bincount(text.owners, minlength=num_documents).tolist()
        for document, num_bytes in enumerate(text.num_bytes.tolist()):
            source = text.source_names[text.sources[document]]
            line = DocumentLoss(
                model=model,
                weights=weights,
                source=source,
                text=text.identity,
                document=text.location(document),
                tokens=num_tokens[document],
                bytes=None if np.isnan(num_bytes) else _int_if_whole(num_bytes),
                nats=nats[document],
            )
            lines_by_source.setdefault(source, []).append(line)

    # in the order of the names, which may be another than that of the documents
    names = chain.from_iterable(text.source_names for text in texts)
    return {name: lines_by_source[name] for name in names if name in lines_by_source}


def read_evaluated(folder: Path) -> Evaluated:
    """Return the losses that earlier evaluations have written to a folder, which need not exist."""
    file = folder / DOCUMENTS
    evaluated: Evaluated = {}
    if not file.exists():
        return evaluated
    with open_regular(file, "remove it") as lines:
        for line_number, line in enumerate(lines, 1):
            try:
                loss = parse_json(line, DocumentLoss)
            except ValueError:
                raise InputError(
                    f"{file}, line {line_number}: damaged, or written by an earlier version; choose another "
                    "--output_dir, or remove the file and evaluate again"
                ) from None
            evaluated.setdefault(loss.model, {}).setdefault(loss.source, []).append(loss)
    return evaluated


def outdated_models(earlier: Evaluated, weights: Mapping[str, str]) -> list[str]:
    """Return the models of earlier evaluations whose weights differ from their current ``weights``."""
    names = []
    for model, lines_by_source in earlier.items():
        earlier_weights = _weights_of(lines_by_source)
        if weights.get(model, earlier_weights) != earlier_weights:
            names.append(model)
    return names


def check_same_documents(
    earlier: Evaluated, weights: Mapping[str, str], documents: Mapping[str, Sequence[str]], folder: Path
) -> None:
    """Raise an InputError if a model in ``folder`` has losses on other documents or windows, or another kind of device.

    Args:
        earlier: The losses in ``folder``.
        weights: The weights of the models that are evaluated again.
        documents: The ``DocumentLoss.text`` of each document by source.
        folder: The ``--output_dir``.
    """
    faults = []
    for source, texts in documents.items():
        conflicting_models = []
        for model, lines_by_source in earlier.items():
            if model in weights or source not in lines_by_source:
                continue
            if [line.text for line in lines_by_source[source]] != texts:
                conflicting_models.append(model)
        if conflicting_models:
            faults.append(
                f"--texts {source}: {folder} already has losses of {', '.join(conflicting_models)} for this name on "
                "different documents, or with a different --max_length, --overlap or device type; rename the text "
                "(NAME=PATH), evaluate all of these models again, or choose another --output_dir"
            )
    if faults:
        raise InputError(*faults)


def join_evaluated(earlier: Evaluated, new: Evaluated) -> Evaluated:
    """Return earlier losses with new ones, which replace losses of the same model and source.

    The first model, with which the others are compared, stays first unless it is evaluated again in another position.
    """
    # earlier losses of other weights do not count
    new_weights = {model: _weights_of(lines_by_source) for model, lines_by_source in new.items()}
    outdated = outdated_models(earlier, new_weights)
    current = {model: lines_by_source for model, lines_by_source in earlier.items() if model not in outdated}

    # the order of the models is the new one if it has the first model; if not, the new models follow the others
    first_model = next(iter(earlier), None)
    names = [*new, *current] if first_model in new else [*current, *new]

    joined: Evaluated = {}
    for name in dict.fromkeys(names):  # each once, where it occurs first
        joined[name] = {**current.get(name, {}), **new.get(name, {})}
    return joined


def compare_evaluated(evaluated: Evaluated, seed: int) -> Results:
    """Return the losses of all models with intervals; within a source, models are compared with the first one."""
    results: dict[str, dict[str, ModelLoss]] = {}
    sources = dict.fromkeys(chain.from_iterable(evaluated.values()))  # of all models, each once
    for source in sources:
        models = [model for model, lines_by_source in evaluated.items() if source in lines_by_source]
        # the bootstrap pairs the documents of the models by their position
        if len({len(evaluated[model][source]) for model in models}) > 1:
            raise InputError(
                f"{DOCUMENTS}: damaged (models were not evaluated on the same documents from {source}); evaluate again"
            )
        sums = [_document_sums(evaluated[model][source]) for model in models]
        results[source] = dict(zip(models, compare(sums, seed), strict=True))
    return results


def have_same_tokens(evaluated: Evaluated) -> bool:
    """Return whether all models have the same number of tokens in each document."""
    counts_by_source: dict[str, list[int]] = {}
    for lines_by_source in evaluated.values():
        for source, lines in lines_by_source.items():
            counts = [line.tokens for line in lines]
            if counts_by_source.setdefault(source, counts) != counts:
                return False
    return True


def write_evaluated(folder: Path, evaluated: Evaluated, results: Results) -> None:
    """Write ``documents.jsonl`` and ``evaluation.json``, which has the figures by model and source."""
    lines = []
    content: dict[str, dict[str, Any]] = {}
    for model, lines_by_source in evaluated.items():
        for source_lines in lines_by_source.values():
            lines += [json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in source_lines]
        content[model] = {}
        for source, loss_by_model in results.items():
            if source in lines_by_source:
                reference = next(iter(loss_by_model))
                content[model][source] = _figures(loss_by_model[model], reference)
    write_atomically(folder / DOCUMENTS, "".join(lines))
    write_atomically(folder / "evaluation.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _figures(loss: ModelLoss, reference: str) -> dict[str, Any]:
    """Return a model's figures for ``evaluation.json``; its loss is compared with the ``reference``'s."""
    total = loss.total
    figures: dict[str, Any] = {
        **total.figures(),
        "tokens": total.num_tokens,
        "bytes": None if total.num_bytes is None else _int_if_whole(total.num_bytes),
        "documents": loss.num_documents,
    }
    if loss.loss:
        figures["ci"] = {"loss": loss.loss, "perplexity": tuple(map(perplexity, loss.loss))}
    if loss.bits_per_byte:
        figures["ci"]["bits_per_byte"] = loss.bits_per_byte
    if loss.difference:
        figures["difference"] = {
            "to": reference,
            "of": loss.difference.unit,
            "value": loss.difference.value,
            "ci": loss.difference.interval,
            "excludes_0": loss.difference.excludes_0,
        }
    return figures


def _document_sums(lines: Sequence[DocumentLoss]) -> DocumentSums:
    """Return the losses, tokens and bytes of documents as arrays, fp64 [D]; NaN for bytes that are not known."""
    nats = [line.nats for line in lines]
    num_tokens = [line.tokens for line in lines]
    num_bytes = [np.nan if line.bytes is None else line.bytes for line in lines]
    return DocumentSums(
        np.array(nats, dtype=np.float64),
        np.array(num_tokens, dtype=np.float64),
        np.array(num_bytes, dtype=np.float64),
    )


def _weights_of(lines_by_source: Mapping[str, Sequence[DocumentLoss]]) -> str:
    """Return the hash of a model's weights, which all of its lines have."""
    lines = next(iter(lines_by_source.values()))
    return lines[0].weights


def _int_if_whole(count: float) -> float:
    """Return a number of bytes as int, unless it has a fraction because a document is predicted only in part."""
    return int(count) if count.is_integer() else count


def draw_losses(file: Path, models: Sequence[str], results: Results) -> None:
    """Write a PNG with a panel for each source: bits per byte of each model, or nats per token if bytes are unknown."""
    panels = []
    for source, loss_by_model in results.items():
        has_bytes = all(loss.total.bits_per_byte is not None for loss in loss_by_model.values())
        rows = [_picture_row(model, loss, in_bits=has_bytes) for model, loss in loss_by_model.items()]
        panels.append(_panel(source, list(models), rows, unit="bits per byte" if has_bytes else "nats per token"))
    title = f"Loss with {LEVEL} % intervals; lower is better"
    if len(models) > 1:
        title += ". Green, red: the interval of the difference to the first model excludes 0"
    write_png({"concat": panels, "columns": _PANELS_IN_A_ROW}, file, title)


def _picture_row(model: str, loss: ModelLoss, *, in_bits: bool) -> dict[str, Any]:
    """Return the data of a model in a panel."""
    value = loss.total.bits_per_byte if in_bits else loss.total.loss
    interval = loss.bits_per_byte if in_bits else loss.loss
    low, high = interval or (None, None)
    return {"model": model, "value": value, "low": low, "high": high, "verdict": _verdict(loss)}


def _panel(source: str, models: list[str], rows: list[dict[str, Any]], unit: str) -> dict[str, Any]:
    """Return a panel of Vega-Lite: for each model a line for the interval, a point and the number above it."""
    x = {"type": "quantitative", "scale": {"zero": False}, "title": unit}
    y = {"field": "model", "type": "nominal", "sort": models, "title": None}
    colors = {"domain": ["better", "worse", ""], "range": [BETTER, WORSE, TEXT]}
    color = {"field": "verdict", "type": "nominal", "scale": colors, "legend": None}
    interval = {"x": {**x, "field": "low"}, "x2": {"field": "high"}}
    value = {"x": {**x, "field": "value"}}
    value_text = {"text": {"field": "value", "format": ".3f"}}
    return {
        "title": source,
        "width": 230,
        "height": {"step": 36},
        "data": {"values": rows},
        "layer": [
            {"mark": {"type": "rule", "strokeWidth": 2}, "encoding": interval},
            {"mark": {"type": "circle", "size": 50, "opacity": 1}, "encoding": value},
            {"mark": {"type": "text", "dy": -10}, "encoding": {**value, **value_text}},
        ],
        "encoding": {"y": y, "color": color},
    }
