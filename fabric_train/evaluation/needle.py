"""The needle test: ask models for facts that are hidden at depths of long texts, and write how many they find."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.haystack import (
    DEPTHS,
    Haystack,
    HiddenFacts,
    find_language,
    invented_text,
    number_in,
)
from fabric_train.evaluation.models import ComparedModel, scoring_progress
from fabric_train.evaluation.texts import DocumentTexts, open_texts
from fabric_train.files.regular_file import read_json_lines, write_atomically
from fabric_train.inference.generate import continuation
from fabric_train.inference.models_in_turn import ModelsInTurn
from fabric_train.pages.charts import write_png
from fabric_train.training.statistics import LEVEL

ANSWERS = "needle.jsonl"
FIGURES = "needle.json"
PICTURE = "needle.png"
_PANELS_IN_A_ROW = 3
# of no fact and of all facts
_LIGHT = "#dbe6f1"
_DARK = "#1f5f99"


@dataclass(frozen=True)
class Answer:
    """A line of ``needle.jsonl``: what a model has answered to a question. ``place`` is the fact's first token."""

    model: str
    weights: str
    source: str
    length: int
    depth: int
    trial: int
    prompt: str  # tells the text with its facts and the kind of device from others
    place: int
    town: str
    number: str
    answer: str
    right: bool


def compare_needles(
    arguments: EvaluateArguments, models: Sequence[ComparedModel], downloads: Path, *, prints: bool
) -> None:
    """Ask each model about the facts of ``--needle``, write the answers and the figures, and print a table.

    An answer that ``needle.jsonl`` has already is not generated again.

    Raises:
        InputError: a model has too few positions, or a text cannot be used.
    """
    assert arguments.needle is not None
    assert arguments.output_dir is not None
    folder = Path(arguments.output_dir)
    lengths = sorted(set(arguments.needle))
    check_positions(models, lengths)
    texts = _texts(arguments, downloads, lengths[-1])
    hidden = _hide(models, texts, lengths, arguments)
    known = {(one.weights, one.prompt, one.depth): one for one in _read(folder / ANSWERS)}
    todo = [
        (model, text)
        for model in models
        for of_source in hidden[model.tokenizer_id].values()
        for text in of_source
        if not _is_known(known, model, text)
    ]
    in_turn = ModelsInTurn()
    bases = [model.base for model in models]
    folder.mkdir(parents=True, exist_ok=True)
    with scoring_progress(sum(text.length for _, text in todo)) as show:
        for model in sorted(models, key=lambda model: bases.index(model.base)):
            loaded: Any = None
            for source, of_source in hidden[model.tokenizer_id].items():
                for text in of_source:
                    if (model, text) not in todo:
                        continue
                    loaded = loaded or in_turn.load(model.source, loss_in_head=False)
                    new = _ask(loaded, model, source, text, arguments.batch_tokens, partial(show, model.name))
                    known |= {(one.weights, one.prompt, one.depth): one for one in new}
                    _write(folder / ANSWERS, known.values())
    answers = {
        model.name: {
            source: [known[model.weights, text.digest, depth] for text in of_source for depth in DEPTHS]
            for source, of_source in hidden[model.tokenizer_id].items()
        }
        for model in models
    }
    figures = {
        name: {source: figures_of(of_source) for source, of_source in of_model.items()}
        for name, of_model in answers.items()
    }
    write_atomically(folder / FIGURES, json.dumps(figures, indent=2, ensure_ascii=False) + "\n")
    draw_needles(folder / PICTURE, figures)
    if prints:
        _print_table(figures, arguments.needle_trials)


def check_positions(models: Sequence[ComparedModel], lengths: Sequence[int]) -> None:
    """Raise an InputError if a model has fewer positions than the longest text."""
    faults = [
        f"--models {model.name} has {model.max_positions:,} positions, but --needle {lengths[-1]} is longer; give "
        f"{model.max_positions} or less, or first train it on longer rows with --rope_scaling"
        for model in models
        if model.max_positions is not None and model.max_positions < lengths[-1]
    ]
    if faults:
        raise InputError(*faults)


def _texts(arguments: EvaluateArguments, downloads: Path, longest: int) -> list[tuple[DocumentTexts, str]]:
    """Return the texts that hide the facts, each with the language of its facts."""
    if arguments.texts is None:
        return [(invented_text(2 * longest), "en")]
    opened = open_texts(arguments.texts, arguments.text_column, downloads)
    found = [text for text in opened if isinstance(text, DocumentTexts)]
    if len(found) < len(opened):
        raise InputError("--needle hides facts in texts, and a token dataset has none: give its documents to --texts")
    return [(text, find_language(text)) for text in found]


def _hide(
    models: Sequence[ComparedModel],
    texts: Sequence[tuple[DocumentTexts, str]],
    lengths: Sequence[int],
    arguments: EvaluateArguments,
) -> dict[str, dict[str, list[HiddenFacts]]]:
    """Return the prompts by tokenizer and source; a note says which text is repeated to be long enough."""
    hidden: dict[str, dict[str, list[HiddenFacts]]] = {}
    for model in models:
        if model.tokenizer_id in hidden:
            continue
        own = hidden[model.tokenizer_id] = {}
        for text, language in texts:
            haystack = Haystack(text.name, text.texts, language, model.tokenizer, lengths[-1])
            if haystack.num_tokens < lengths[-1]:
                has = f"{text.name} has {haystack.num_tokens:,} tokens, and is repeated"
                print(f"note: {has} in texts of {lengths[-1]:,}", file=sys.stderr)
            own[text.name] = [
                haystack.hide(length, trial, arguments.seed)
                for length in lengths
                for trial in range(arguments.needle_trials)
            ]
    return hidden


def _ask(
    loaded: Any, model: ComparedModel, source: str, text: HiddenFacts, chunk: int, advance: Callable[[int], None]
) -> Iterator[Answer]:
    """Yield a model's answers to the questions about a text."""
    answers = generate_answers(loaded, text, chunk, advance)
    for fact, new_ids in zip(text.facts, answers, strict=True):
        answer = continuation(model.tokenizer, [*text.input_ids[-1:], *fact.question_ids], new_ids)
        place = (model.name, model.weights, source, text.length, fact.depth, text.trial, text.digest, fact.place)
        yield Answer(*place, fact.town, fact.number, answer, number_in(answer) == fact.number)


@torch.inference_mode()
def generate_answers(model: Any, text: HiddenFacts, chunk: int, advance: Callable[[int], None]) -> list[list[int]]:
    """Return the most likely tokens after each question.

    The model reads the text once, ``chunk`` tokens at a time, so that the memory of activations does not grow with the
    text; keys and values stay for all questions. ``advance`` is called with the tokens of each chunk.
    """
    places = getattr(model, "hf_device_map", None)  # weights that wait in host memory are on no device
    device = next(iter(places.values())) if places else model.device  # of the first layer
    cache = DynamicCache()

    def read(ids: Sequence[int]) -> int:
        row = torch.tensor([list(ids)], device=device)
        logits = model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    for begin in range(0, len(text.input_ids), chunk):
        part = text.input_ids[begin : begin + chunk]
        read(part)
        advance(len(part))
    answers = []
    for fact in text.facts:
        new_ids = [read(fact.question_ids)]
        while len(new_ids) < fact.answer_tokens:
            new_ids.append(read(new_ids[-1:]))
        answers.append(new_ids)
        cache.crop(len(text.input_ids) - cache.get_seq_length())  # a negative number, which is removed
    advance(text.length - len(text.input_ids))
    return answers


def figures_of(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Return by length how many answers are right, their share and its interval, and the same numbers by depth.

    ``other_fact`` are wrong answers with the number of another fact in the same text.
    """
    figures: dict[str, dict[str, Any]] = {}
    numbers: dict[str, set[str]] = {}  # by text
    for one in answers:
        numbers.setdefault(one.prompt, set()).add(one.number)
    for length in dict.fromkeys(one.length for one in answers):
        own = [one for one in answers if one.length == length]
        right = sum(one.right for one in own)
        by_depth = {}
        for depth in DEPTHS:
            at_depth = [one.right for one in own if one.depth == depth]
            by_depth[str(depth)] = {"right": sum(at_depth), "questions": len(at_depth)}
        found = {
            "right": right,
            "questions": len(own),
            "share": right / len(own),
            "ci": share_interval(right, len(own)),
        }
        mixed_up = sum(not one.right and number_in(one.answer) in numbers[one.prompt] for one in own)
        figures[str(length)] = {**found, "other_fact": mixed_up, "depths": by_depth}
    return figures


def share_interval(right: int, number: int) -> tuple[float, float]:
    """Return the interval of a share, which holds the true one with a probability of ``LEVEL`` percent.

    It is the score interval (Wilson 1927, doi:10.1080/01621459.1927.10502953).
    """
    z = NormalDist().inv_cdf(0.5 + LEVEL / 200)
    share = right / number
    weight = z * z / number
    middle = share + weight / 2
    half = z * math.sqrt(share * (1 - share) / number + weight / number / 4)
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def draw_needles(file: Path, figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Write a PNG with a panel for each model and source: the share of right answers by length and depth."""
    panels = []
    for model, of_model in figures.items():
        for source, of_source in of_model.items():
            rows = [
                {
                    "length": f"{int(length):,}",
                    "depth": f"{depth} %",
                    **cell,
                    "share": cell["right"] / cell["questions"],
                }
                for length, found in of_source.items()
                for depth, cell in found["depths"].items()
            ]
            panels.append(_panel(f"{model}: {source}", rows))
    title = "Needle test: share of right answers by tokens of the text and depth of the fact"
    write_png({"concat": panels, "columns": _PANELS_IN_A_ROW}, file, title)


def _panel(title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    x = {"field": "length", "type": "ordinal", "sort": None, "title": "tokens", "axis": {"labelAngle": 0}}
    y = {"field": "depth", "type": "ordinal", "sort": None, "title": "depth"}
    colour = {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [_LIGHT, _DARK]}}
    number = {"condition": {"test": "datum.share > 0.5", "value": "white"}, "value": "black"}
    layers = [
        {"mark": "rect", "encoding": {"color": {**colour, "legend": {"title": None, "format": ".0%"}}}},
        {"mark": "text", "encoding": {"text": {"field": "shown"}, "color": number}},
    ]
    shown = [{**row, "shown": f"{row['right']}/{row['questions']}"} for row in rows]
    size = {"width": {"step": 64}, "height": {"step": 30}}
    return {"title": title, **size, "data": {"values": shown}, "encoding": {"x": x, "y": y}, "layer": layers}


def _print_table(figures: Mapping[str, Mapping[str, Mapping[str, Any]]], trials: int) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("source", "model"):
        table.add_column(column)
    for column in ("tokens", *(f"{depth} %" for depth in DEPTHS), "right", f"{LEVEL} % interval", "other fact"):
        table.add_column(column, justify="right", no_wrap=True)
    for source in dict.fromkeys(source for of_model in figures.values() for source in of_model):
        for model, of_model in figures.items():
            for length, found in of_model[source].items():
                cells = (f"{cell['right']}/{cell['questions']}" for cell in found["depths"].values())
                interval = "{:.0%} to {:.0%}".format(*found["ci"])
                words = (visible(source), visible(model), f"{int(length):,}")
                table.add_row(*words, *cells, f"{found['share']:.0%}", interval, str(found["other_fact"]))
    console = open_console(width=None if open_console().is_terminal else 200)
    console.print(table)
    for line in (
        f"right answers by depth of the fact: percent of the text before it; {trials} texts of each length",
        f"right: share of all depths, with its {LEVEL} % interval (Wilson)",
        "other fact: wrong answers with the number of another town in the same text",
    ):
        console.print(line, style="dim")


def _read(file: Path) -> Iterator[Answer]:
    return read_json_lines(file, Answer, "remove it to ask again")


def _write(file: Path, answers: Iterable[Answer]) -> None:
    write_atomically(file, "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in answers))


def _is_known(known: Mapping[tuple[str, str, int], Answer], model: ComparedModel, text: HiddenFacts) -> bool:
    return all((model.weights, text.digest, depth) in known for depth in DEPTHS)
