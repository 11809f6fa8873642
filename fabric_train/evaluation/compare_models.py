"""Evaluate several models on texts or preference pairs, one model in memory at a time; write and print the results.

For pairs: how often the chosen answer is the likelier one, by how much, and the length bias. Shapes: D pairs.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.table import Table

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.evaluation import loss_table
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.loss_changes import CHANGES, PAGE, find_changes, show_changes, write_changes
from fabric_train.evaluation.models import (
    FOLDER,
    ComparedModel,
    LossCache,
    check_all_evaluated,
    check_tokenizer,
    find_models,
    score_texts,
    scoring_progress,
)
from fabric_train.evaluation.needle import ANSWERS, compare_needles
from fabric_train.evaluation.texts import (
    EncodedText,
    EvaluatedText,
    HeldOutRows,
    PackedText,
    WindowedText,
    open_texts,
    open_validation_of,
)
from fabric_train.files.atomic_folder import check_no_dead_link, wait_for_lock
from fabric_train.files.regular_file import write_atomically
from fabric_train.files.requirements import check_room
from fabric_train.inference.load_model import ModelsInTurn
from fabric_train.reading.sources import split_names
from fabric_train.token_dataset.manifest import FILE_NAME
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.build import build_token_dataset
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.training.statistics import FEWEST_DOCUMENTS, LEVEL, Interval, interval_of, resample

_ROOM_OF_TABLES = 1_000_000
"""Bytes that the tables, pages and pictures of an evaluation take."""
_BYTES_OF_LOSS = 4


def compare_models(arguments: EvaluateArguments, *, prints: bool = True) -> None:
    """Evaluate ``--models`` on ``--texts`` or ``--pairs``, or by ``--needle``; write the results, and print a table.

    A folder with an evaluation is extended. An InputError comes before anything is written, a RunError if a model's
    loss is not finite.
    """
    assert arguments.models is not None  # EvaluateArguments.faults
    assert arguments.output_dir is not None
    folder = Path(arguments.output_dir)
    check_output(folder)
    earlier = loss_table.read_evaluated(folder)
    models, damaged = find_models(arguments.models)
    if arguments.pairs is not None:
        compare_pairs(arguments, models, LossCache(folder / FOLDER), prints=prints)
        check_all_evaluated(damaged)
        return
    if arguments.needle is not None:
        compare_needles(arguments, models, folder / FOLDER / "downloads", prints=prints)
        check_all_evaluated(damaged)
        return
    texts = _open_texts(arguments, models, folder / FOLDER / "downloads")
    encoded = _encode_for(models, texts, arguments)
    weights = {model.name: model.weights for model in models}
    documents: dict[str, list[str]] = {}
    for text in encoded[models[0].name]:
        for number in text.sources.tolist():
            documents.setdefault(text.source_names[number], []).append(text.identity)
    loss_table.check_same_documents(earlier, weights, documents, folder)
    outdated = loss_table.outdated_models(earlier, weights)
    for name in outdated:
        print(f"note: {name} has other weights than in the earlier evaluation, which it replaces", file=sys.stderr)
    cache = LossCache(folder / FOLDER)
    batch_tokens = arguments.batch_tokens
    parts = ((model, part) for model in models for text in encoded[model.name] for part in text.parts())
    num_tokens = sum(len(part.tokens) for model, part in parts if not cache.has(model, part))
    check_room(folder, _ROOM_OF_TABLES + _BYTES_OF_LOSS * num_tokens, "the loss of each token")
    with scoring_progress(num_tokens) as show:
        in_turn = ModelsInTurn()
        losses: dict[str, list[np.ndarray]] = {}
        bases = [model.base for model in models]
        for model in sorted(models, key=lambda model: bases.index(model.base)):  # of one base in a row
            losses[model.name] = score_texts(model, encoded[model.name], cache, batch_tokens, show, in_turn)
        del in_turn
    new = {
        model.name: loss_table.document_losses(model.name, model.weights, encoded[model.name], losses[model.name])
        for model in models
    }
    with wait_for_lock(folder / "evaluation.lock"):
        earlier = loss_table.read_evaluated(folder)  # others may have written meanwhile
        loss_table.check_same_documents(earlier, weights, documents, folder)
        evaluated = loss_table.join_evaluated(earlier, new)
        results = loss_table.compare_evaluated(evaluated, arguments.seed)
        loss_table.write_evaluated(folder, evaluated, results)
        loss_table.draw_losses(folder / "evaluation.png", list(evaluated), results)
    if outdated:
        for name in (CHANGES, PAGE):
            (folder / name).unlink(missing_ok=True)  # it may be of the former weights
    if models[0] is not models[-1] and models[0].tokenizer_id == models[-1].tokenizer_id:
        first = models[0].name
        last = models[-1].name
        changes = find_changes((first, last), encoded[first], losses[first], losses[last])
        write_changes(folder, show_changes(changes, models[0].tokenizer))
    if prints:
        notes = (text.note() for text in encoded[models[0].name] if isinstance(text, PackedText))
        loss_table.print_table(results, loss_table.have_same_tokens(evaluated), [note for note in notes if note])
        print(f"written to {folder}", file=sys.stderr)
    check_all_evaluated(damaged)


def check_output(folder: Path) -> None:
    """Raise an InputError unless ``--output_dir`` is a new folder, or has an evaluation, which is added to."""
    check_no_dead_link(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file; choose another name for the folder")
    is_evaluation = (folder / FOLDER).is_dir() or any(
        (folder / name).is_file() for name in ("scores.csv", "pairs.json", ANSWERS)
    )
    if folder.is_dir() and any(folder.iterdir()) and not is_evaluation:
        raise InputError(f"--output_dir {folder} has other files, and no evaluation; choose another folder")
    parent = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--output_dir {folder}: cannot write to {parent}; choose another folder")
    check_room(folder, _ROOM_OF_TABLES, "an evaluation")


def _open_texts(arguments: EvaluateArguments, models: Sequence[ComparedModel], downloads: Path) -> list[EvaluatedText]:
    """Open ``--texts``, or else the validation split of the first model that is a checkpoint."""
    if arguments.texts is not None:
        return open_texts(arguments.texts, arguments.text_column, downloads)
    if run := next((model for model in models if model.checkpoint), None):
        return open_validation_of(Path(run.source))
    raise InputError("--texts is required: no model of --models is a checkpoint, whose validation split could do")


def _encode_for(
    models: Sequence[ComparedModel], texts: Sequence[EvaluatedText], arguments: EvaluateArguments
) -> dict[str, list[EncodedText]]:
    """Return the texts for each model, encoded once for each tokenizer."""
    by_tokenizer: dict[str, list[EncodedText]] = {}
    faults: list[str] = []
    packed = {text: PackedText(text) for text in texts if isinstance(text, HeldOutRows)}
    for model in models:
        if model.tokenizer_id not in by_tokenizer:
            own = by_tokenizer[model.tokenizer_id] = list[EncodedText]()
            for text in texts:
                if isinstance(text, HeldOutRows):
                    check_tokenizer(model, text.dataset)
                    own.append(packed[text])
                else:
                    own.append(WindowedText(text, model.tokenizer, arguments.max_length, arguments.overlap))
        for one in by_tokenizer[model.tokenizer_id]:
            given = f"--models {model.name}"
            limit = model.max_positions
            if one.highest_id >= model.vocab_size:
                faults.append(f"{given}: its vocabulary ends at {model.vocab_size - 1}, but {one.name} has larger ids")
            elif limit is not None and one.input_tokens > limit:
                kind = "windows"
                fix = f"give --max_length {limit} or less"
                if isinstance(one, PackedText):
                    kind = "rows"
                    fix = "leave that text out"
                has = f"{kind} of {one.name} have {one.input_tokens:,} tokens"
                faults.append(f"{given} has {limit:,} positions, but {has}; {fix}")
    if faults:
        raise InputError(*faults)
    return {model.name: by_tokenizer[model.tokenizer_id] for model in models}


@dataclass(frozen=True)
class Figure:
    """A figure of a model on the pairs of a source, with its interval; none for few pairs."""

    value: float
    ci: Interval | None


@dataclass(frozen=True)
class PairFigures:
    """What a model makes of the pairs of a source.

    ``accuracy`` is the share of pairs whose chosen answer has the higher log-probability; a tie counts one half.
    ``accuracy_per_token`` compares the means over the tokens of each answer. ``margin``, in nats, is the mean of the
    chosen answer's log-probability minus the rejected one's. ``reward_accuracy`` compares how much likelier
    each answer is than with the first model, as DPO does (arXiv:2305.18290, section 4); None for the first model.
    ``length_bias`` is the accuracy on pairs whose chosen answer has more tokens, minus the accuracy on pairs where it
    has fewer; None if one of both does not occur.
    """

    pairs: int
    accuracy: Figure
    accuracy_per_token: Figure
    margin: Figure
    reward_accuracy: Figure | None
    length_bias: Figure | None


@dataclass(frozen=True)
class PairScores:
    """A model's log-probabilities of the answers of D pairs, in nats: ``sums`` fp64 [D, 2], chosen and rejected.

    ``tokens``, int64 [D, 2], are the answers' tokens, with the token that ends them. ``places`` name the pairs.
    """

    sums: np.ndarray
    tokens: np.ndarray
    places: list[str]


def compare_pairs(
    arguments: EvaluateArguments, models: Sequence[ComparedModel], cache: LossCache, *, prints: bool
) -> None:
    """Score the answers of ``--pairs`` with each model, write ``pairs.json`` and ``pairs.jsonl``, and print a table.

    An InputError if a place has no pairs, or if a model cannot read them.
    """
    assert arguments.pairs is not None
    assert arguments.output_dir is not None
    folder = Path(arguments.output_dir)
    results: dict[str, dict[str, PairFigures]] = {}
    with TemporaryDirectory() as made:
        texts = {
            name: _texts_of(name, place, models, arguments, Path(made))
            for name, place in split_names(arguments.pairs, "--pairs")
        }
        scores: dict[str, dict[str, PairScores]] = {name: {} for name in texts}
        in_turn = ModelsInTurn()
        bases = [model.base for model in models]
        of_models = [(model, of_name[model.name]) for of_name in texts.values() for model in models]
        parts = [(model, part) for model, text in of_models for part in text.parts()]
        with scoring_progress(sum(len(part.tokens) for model, part in parts if not cache.has(model, part))) as show:
            for model in sorted(models, key=lambda model: bases.index(model.base)):
                own = [of_name[model.name] for of_name in texts.values()]
                losses = score_texts(model, own, cache, arguments.batch_tokens, show, in_turn)
                for name, text, of_text in zip(texts, own, losses, strict=True):
                    scores[name][model.name] = _scores(text, of_text)
    for name, of_name in scores.items():
        figures = figures_of([of_name[model.name] for model in models], arguments.seed)
        results[name] = dict(zip((model.name for model in models), figures, strict=True))
    lines = [line for name in scores for model in models for line in _lines(name, model, scores[name][model.name])]
    content = {model.name: {name: asdict(of_name[model.name]) for name, of_name in results.items()} for model in models}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pairs.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    write_atomically(folder / "pairs.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if prints:
        _print_table(results)


def figures_of(scores: Sequence[PairScores], seed: int) -> list[PairFigures]:
    """Return the figures of models; the first is the reference, and all have the same pairs in the same order."""
    found = []
    for number, own in enumerate(scores):
        margins = own.sums[:, 0] - own.sums[:, 1]
        right = _wins(margins)
        means = own.sums / own.tokens
        reward = None
        if number:
            first = scores[0].sums[:, 0] - scores[0].sums[:, 1]
            reward = _mean(_wins(margins - first), seed)
        longer = own.tokens[:, 0] - own.tokens[:, 1]
        accuracies = (_mean(right, seed), _mean(_wins(means[:, 0] - means[:, 1]), seed))
        found.append(
            PairFigures(len(right), *accuracies, _mean(margins, seed), reward, _length_bias(right, longer, seed))
        )
    return found


def _wins(margins: np.ndarray) -> np.ndarray:
    return np.where(margins == 0, 0.5, margins > 0)


def _mean(values: np.ndarray, seed: int) -> Figure:
    draws = resample([values], seed)[:, 0] / len(values) if len(values) >= FEWEST_DOCUMENTS else None
    return Figure(float(values.mean()), None if draws is None else interval_of(draws))


def _length_bias(right: np.ndarray, longer: np.ndarray, seed: int) -> Figure | None:
    """Return the difference of the accuracies on pairs whose chosen answer is longer and shorter."""
    of_longer = longer > 0
    of_shorter = longer < 0
    if not (of_longer.any() and of_shorter.any()):
        return None
    value = float(right[of_longer].mean() - right[of_shorter].mean())
    if min(of_longer.sum(), of_shorter.sum()) < FEWEST_DOCUMENTS:
        return Figure(value, None)
    columns = (right * of_longer, of_longer.astype(float), right * of_shorter, of_shorter.astype(float))
    won, all_longer, won_shorter, all_shorter = resample(columns, seed).T
    return Figure(value, interval_of(won / all_longer - won_shorter / all_shorter))


def _texts_of(
    name: str, place: str, models: Sequence[ComparedModel], arguments: EvaluateArguments, folder: Path
) -> dict[str, PackedText]:
    """Return the pairs at a place in the tokens of each model, by name; ``folder`` gets rows that must be tokenized."""
    by_tokenizer: dict[str, PackedText] = {}
    if (Path(place) / FILE_NAME).is_file():
        dataset = _pairs_in(open_dataset(place))
        for model in models:
            check_tokenizer(model, dataset)
        by_tokenizer = dict.fromkeys((model.tokenizer_id for model in models), PackedText(HeldOutRows(name, dataset)))
    for model in models:
        if model.tokenizer_id not in by_tokenizer:
            target = folder / f"{name.replace('/', '_')}-{len(by_tokenizer)}"
            by_tokenizer[model.tokenizer_id] = PackedText(
                HeldOutRows(name, _tokenized(place, model, arguments, target))
            )
        text = by_tokenizer[model.tokenizer_id]
        if text.highest_id >= model.vocab_size:
            raise InputError(
                f"--models {model.name}: its vocabulary ends at {model.vocab_size - 1}, but {name} has larger ids"
            )
        if model.max_positions is not None and text.input_tokens > model.max_positions:
            raise InputError(
                f"--models {model.name} has {model.max_positions:,} positions, but rows of {name} have "
                f"{text.input_tokens:,} tokens; give a smaller --max_length"
            )
    if len({len(text.sources) for text in by_tokenizer.values()}) > 1:
        raise InputError(
            f"--pairs {name}: not every pair fits into a row of {arguments.max_length:,} tokens with each tokenizer; "
            "give a larger --max_length"
        )
    return {model.name: by_tokenizer[model.tokenizer_id] for model in models}


def _pairs_in(dataset: TokenDataset) -> TokenDataset:
    """Return a token dataset with its pairs as validation split: all of them if it has no such split."""
    if dataset.manifest is None or not dataset.manifest.has_pairs:
        raise InputError(f"--pairs {dataset.folder}: a token dataset without preference pairs; give it to --texts")
    return dataset if dataset.validation is not None else replace(dataset, validation=dataset.train)


def _tokenized(place: str, model: ComparedModel, arguments: EvaluateArguments, target: Path) -> TokenDataset:
    tokenizer = Path(model.source, "tokenizer") if model.checkpoint else model.source
    given = TokenizeArguments(
        dataset=[place],
        tokenizer_name=str(tokenizer),
        output_dir=str(target),
        max_length=arguments.max_length,
        data_format="preference",
        too_long="drop",
        validation_split=0.0,
    )
    try:
        with ParityCheck() as check:
            build_token_dataset(given, check)
    except InputError as error:
        advice = "; --on_bad_rows skip leaves such rows out"
        raise InputError(*(f"--pairs {place}: {fault.removesuffix(advice)}" for fault in error.faults)) from None
    return _pairs_in(open_dataset(str(target)))


def _scores(text: PackedText, losses: np.ndarray) -> PairScores:
    """Return the log-probabilities of the answers from the ``losses`` of the predicted tokens, fp32 [N]."""
    tokens = text.num_targets_of_sequences.reshape(-1, 2)
    ends = np.cumsum(tokens)
    sums = -np.add.reduceat(losses.astype(np.float64), ends - tokens.ravel()).reshape(-1, 2)
    places = [text.place(number) for number in range(len(tokens))]
    # rows of another tokenizer hold the pairs in another order
    order = sorted(range(len(places)), key=places.__getitem__)
    return PairScores(sums[order], tokens[order], [places[number] for number in order])


def _lines(name: str, model: ComparedModel, scores: PairScores) -> Iterator[dict[str, object]]:
    columns = zip(scores.places, scores.sums.tolist(), scores.tokens.tolist(), strict=True)
    for place, (chosen, rejected), (of_chosen, of_rejected) in columns:
        line: dict[str, object] = {"model": model.name, "weights": model.weights, "source": name, "pair": place}
        line |= {"chosen": chosen, "rejected": rejected, "chosen_tokens": of_chosen, "rejected_tokens": of_rejected}
        yield line


def _print_table(results: dict[str, dict[str, PairFigures]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("source", "model"):
        table.add_column(column)
    for column in ("pairs", "accuracy", "per token", "margin", "to the first", "length bias"):
        table.add_column(column, justify="right")
    for source, of_models in results.items():
        for number, (model, found) in enumerate(of_models.items()):
            figures = (found.accuracy, found.accuracy_per_token, found.margin, found.reward_accuracy, found.length_bias)
            cells = [_shown(figure, is_share=index != 2) for index, figure in enumerate(figures)]
            table.add_row(visible(source) if number == 0 else "", visible(model), f"{found.pairs:,}", *cells)
    console = open_console(width=None if open_console().is_terminal else 200)
    console.print(table)
    for line in (
        "accuracy: pairs whose chosen answer has the higher log-probability; per token: the higher mean",
        "margin: the chosen answer's log-probability minus the rejected one's, in nats",
        "to the first: pairs whose margin is above the first model's",
        "length bias: accuracy on pairs whose chosen answer is the longer one, minus that on the others",
        f"in brackets: {LEVEL} % intervals (bootstrap over pairs)",
    ):
        console.print(line, style="dim")


def _shown(figure: Figure | None, *, is_share: bool) -> str:
    if figure is None:
        return ""
    form = "{:.1%}" if is_share else "{:.2f}"
    between = "" if figure.ci is None else f" ({form.format(figure.ci[0])} to {form.format(figure.ci[1])})"
    return form.format(figure.value) + between
