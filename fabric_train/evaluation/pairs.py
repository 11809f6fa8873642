"""Evaluate models on preference pairs: how often the chosen answer is likelier, by how much, and the length bias.

Shapes: D pairs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.table import Table

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.data.token_dataset import TokenDataset, open_dataset
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.estimates import Estimate, mean_estimate
from fabric_train.evaluation.models import (
    ComparedModel,
    LossCache,
    check_tokenizer,
    count_unscored_tokens,
    score_models,
)
from fabric_train.evaluation.texts import HeldOutRows, PackedText
from fabric_train.files.regular_file import write_atomically
from fabric_train.reading.sources import split_names
from fabric_train.token_dataset.manifest import FILE_NAME
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.build import build_token_dataset
from fabric_train.tokenization.tokenizers.parity_check import ParityCheck
from fabric_train.training.statistics import FEWEST_DOCUMENTS, LEVEL, interval_of, resample


@dataclass(frozen=True)
class PairFigures:
    """The figures of a model on a source's pairs, with the names in ``pairs.json``."""

    pairs: int
    """The number of pairs."""
    accuracy: Estimate
    """The share of pairs whose chosen answer has the higher log-probability; a tie counts one half."""
    accuracy_per_token: Estimate
    """The same with the mean log-probability over the tokens of each answer."""
    margin: Estimate
    """The mean of the chosen answer's log-probability minus the rejected one's, in nats."""
    reward_accuracy: Estimate | None
    """The share of pairs whose chosen answer has gained more log-probability over the first model than the rejected
    one, as DPO's rewards do (arXiv:2305.18290, section 4); None for the first model.
    """
    length_bias: Estimate | None
    """The accuracy on pairs whose chosen answer has more tokens, minus the accuracy on pairs where it has fewer. None
    if there are no pairs of one of both kinds.
    """


@dataclass(frozen=True)
class PairScores:
    """A model's scores of the answers of D pairs; column 0 is the chosen answer, column 1 the rejected one."""

    sums: np.ndarray
    """The log-probabilities of the answers in nats, fp64 [D, 2]."""
    tokens: np.ndarray
    """The number of tokens in the answers, including the token that ends them, int64 [D, 2]."""
    locations: list[str]
    """The file and line of each pair."""

    @property
    def margins(self) -> np.ndarray:
        """The chosen answer's log-probability minus the rejected one's, fp64 [D]."""
        return self.sums[:, 0] - self.sums[:, 1]


def compare_pairs(
    arguments: EvaluateArguments, models: Sequence[ComparedModel], cache: LossCache, *, prints: bool
) -> None:
    """Score the answers of ``--pairs`` with each model, write ``pairs.json`` and ``pairs.jsonl``, and print a table.

    Raises:
        InputError: a source has no pairs, or a model cannot read them.
    """
    assert arguments.pairs is not None
    assert arguments.output_dir is not None

    # read the pairs as the tokens of each model, and score them
    scores: dict[str, dict[str, PairScores]] = {}  # by source and model
    with TemporaryDirectory() as tokenized:
        texts_by_source: dict[str, dict[str, PackedText]] = {}
        for source, location in split_names(arguments.pairs, "--pairs"):
            texts_by_source[source] = _open_pairs(source, location, models, arguments, Path(tokenized))
        texts_by_model = {}
        for model in models:
            texts_by_model[model.name] = [texts[model.name] for texts in texts_by_source.values()]
        num_tokens = count_unscored_tokens(models, texts_by_model, cache)
        losses = score_models(models, texts_by_model, cache, arguments.batch_tokens, num_tokens)
        for index, (source, texts) in enumerate(texts_by_source.items()):
            scores[source] = {}
            for model in models:
                scores[source][model.name] = _pair_scores(texts[model.name], losses[model.name][index])

    # figures by source and model
    results: dict[str, dict[str, PairFigures]] = {}
    for source, scores_by_model in scores.items():
        figures = figures_of(list(scores_by_model.values()), arguments.seed)
        results[source] = dict(zip(scores_by_model, figures, strict=True))

    # write and print
    content: dict[str, dict[str, object]] = {model.name: {} for model in models}
    for source, figures_by_model in results.items():
        for name, pair_figures in figures_by_model.items():
            content[name][source] = asdict(pair_figures)
    lines = []
    for source, scores_by_model in scores.items():
        for model in models:
            for line in _pair_lines(source, model, scores_by_model[model.name]):
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "pairs.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    write_atomically(folder / "pairs.jsonl", "".join(lines))
    if prints:
        _print_table(results)


def figures_of(scores: Sequence[PairScores], seed: int) -> list[PairFigures]:
    """Return the figures of models; the first is the reference, and all have the same pairs in the same order."""
    reference_margins = scores[0].margins
    figures = []
    for index, model_scores in enumerate(scores):
        margins = model_scores.margins
        wins = _wins(margins)
        log_probs_per_token = model_scores.sums / model_scores.tokens
        margins_per_token = log_probs_per_token[:, 0] - log_probs_per_token[:, 1]
        reward_accuracy = None
        if index > 0:
            reward_accuracy = mean_estimate(_wins(margins - reference_margins), seed)
        extra_tokens = model_scores.tokens[:, 0] - model_scores.tokens[:, 1]
        figures.append(
            PairFigures(
                pairs=len(wins),
                accuracy=mean_estimate(wins, seed),
                accuracy_per_token=mean_estimate(_wins(margins_per_token), seed),
                margin=mean_estimate(margins, seed),
                reward_accuracy=reward_accuracy,
                length_bias=_length_bias(wins, extra_tokens, seed),
            )
        )
    return figures


def _wins(margins: np.ndarray) -> np.ndarray:
    """Return 1 for each margin above 0, 0.5 for each 0, and otherwise 0."""
    return np.where(margins == 0, 0.5, margins > 0)


def _length_bias(wins: np.ndarray, extra_tokens: np.ndarray, seed: int) -> Estimate | None:
    """Return the accuracy on pairs whose chosen answer is longer, minus that on pairs where it is shorter.

    Args:
        wins: Whether the chosen answer is the likelier one, fp64 [D].
        extra_tokens: How many more tokens the chosen answer has, int64 [D].
        seed: The seed of the bootstrap.
    """
    is_longer = extra_tokens > 0
    is_shorter = extra_tokens < 0
    if not (is_longer.any() and is_shorter.any()):
        return None
    bias = float(wins[is_longer].mean() - wins[is_shorter].mean())
    if min(is_longer.sum(), is_shorter.sum()) < FEWEST_DOCUMENTS:
        return Estimate(bias, None)

    # each draw has another number of pairs of both kinds, so accuracies are ratios of resampled sums
    columns = (wins * is_longer, is_longer.astype(float), wins * is_shorter, is_shorter.astype(float))
    longer_wins, longer_pairs, shorter_wins, shorter_pairs = resample(columns, seed).T
    return Estimate(bias, interval_of(longer_wins / longer_pairs - shorter_wins / shorter_pairs))


def _open_pairs(
    source: str, location: str, models: Sequence[ComparedModel], arguments: EvaluateArguments, folder: Path
) -> dict[str, PackedText]:
    """Return a source's pairs as the tokens of each model, by the model's name.

    Rows that are not tokenized yet are tokenized in ``folder``, once for each tokenizer.
    """
    # open or tokenize
    texts_by_tokenizer: dict[str, PackedText] = {}
    if (Path(location) / FILE_NAME).is_file():
        dataset = _with_all_pairs(open_dataset(location))
        for model in models:
            check_tokenizer(model, dataset)
        text = PackedText(HeldOutRows(source, dataset))
        texts_by_tokenizer = {model.tokenizer_id: text for model in models}
    for model in models:
        if model.tokenizer_id not in texts_by_tokenizer:
            target = folder / f"{source.replace('/', '_')}-{len(texts_by_tokenizer)}"
            dataset = _tokenize_pairs(location, model, arguments, target)
            texts_by_tokenizer[model.tokenizer_id] = PackedText(HeldOutRows(source, dataset))

        # check that the model can read them
        text = texts_by_tokenizer[model.tokenizer_id]
        if text.highest_id >= model.vocab_size:
            raise InputError(
                f"--models {model.name}: its vocabulary ends at {model.vocab_size - 1}, but {source} has larger ids"
            )
        if model.max_positions is not None and text.input_tokens > model.max_positions:
            raise InputError(
                f"--models {model.name} has {model.max_positions:,} positions, but rows of {source} have "
                f"{text.input_tokens:,} tokens; give a smaller --max_length"
            )

    num_pairs = {len(text.sources) for text in texts_by_tokenizer.values()}
    if len(num_pairs) > 1:
        raise InputError(
            f"--pairs {source}: some pairs do not fit into a row of {arguments.max_length:,} tokens with every "
            "tokenizer; give a larger --max_length"
        )
    return {model.name: texts_by_tokenizer[model.tokenizer_id] for model in models}


def _with_all_pairs(dataset: TokenDataset) -> TokenDataset:
    """Return a token dataset with pairs as its validation split: all pairs if it has no such split."""
    if dataset.manifest is None or not dataset.manifest.has_pairs:
        raise InputError(f"--pairs {dataset.folder}: this token dataset has no preference pairs; give it to --texts")
    if dataset.validation is not None:
        return dataset
    return replace(dataset, validation=dataset.train)


def _tokenize_pairs(location: str, model: ComparedModel, arguments: EvaluateArguments, target: Path) -> TokenDataset:
    """Tokenize a source's pairs for a model, and write them to ``target``."""
    tokenizer = Path(model.source, "tokenizer") if model.checkpoint else model.source
    tokenize_arguments = TokenizeArguments(
        dataset=[location],
        tokenizer_name=str(tokenizer),
        output_dir=str(target),
        max_length=arguments.max_length,
        data_format="preference",
        too_long="drop",
        validation_split=0.0,
    )
    try:
        with ParityCheck() as check:
            build_token_dataset(tokenize_arguments, check)
    except InputError as error:
        advice = "; --on_bad_rows skip skips such rows"  # which evaluate.py does not have
        raise InputError(*(f"--pairs {location}: {fault.removesuffix(advice)}" for fault in error.faults)) from None
    return _with_all_pairs(open_dataset(str(target)))


def _pair_scores(text: PackedText, losses: np.ndarray) -> PairScores:
    """Return the log-probabilities of the answers from the ``losses`` of the predicted tokens, fp32 [N]."""
    # sum the tokens of each answer; the answers alternate, chosen and rejected
    tokens_of_answers = text.num_targets_of_sequences
    first_tokens = np.cumsum(tokens_of_answers) - tokens_of_answers
    nats_of_answers = np.add.reduceat(losses.astype(np.float64), first_tokens)
    log_probs = -nats_of_answers.reshape(-1, 2)
    num_tokens = tokens_of_answers.reshape(-1, 2)

    # rows of another tokenizer hold the pairs in another order
    locations = [text.location(pair) for pair in range(len(num_tokens))]
    order = sorted(range(len(locations)), key=lambda pair: locations[pair])
    return PairScores(
        sums=log_probs[order],
        tokens=num_tokens[order],
        locations=[locations[pair] for pair in order],
    )


def _pair_lines(source: str, model: ComparedModel, scores: PairScores) -> Iterator[dict[str, object]]:
    """Yield the lines of ``pairs.jsonl`` for the pairs of a source."""
    for location, log_probs, num_tokens in zip(
        scores.locations, scores.sums.tolist(), scores.tokens.tolist(), strict=True
    ):
        yield {
            "model": model.name,
            "weights": model.weights,
            "source": source,
            "pair": location,
            "chosen": log_probs[0],
            "rejected": log_probs[1],
            "chosen_tokens": num_tokens[0],
            "rejected_tokens": num_tokens[1],
        }


def _print_table(results: dict[str, dict[str, PairFigures]]) -> None:
    """Print the figures of each source and model, and what they mean."""
    table = Table(box=None, pad_edge=False)
    for column in ("source", "model"):
        table.add_column(column)
    for column in ("pairs", "accuracy", "per token", "margin", "to the first", "length bias"):
        table.add_column(column, justify="right")
    for source, figures_by_model in results.items():
        for index, (model, figures) in enumerate(figures_by_model.items()):
            table.add_row(
                visible(source) if index == 0 else "",
                visible(model),
                f"{figures.pairs:,}",
                figures.accuracy.show("{:.1%}"),
                figures.accuracy_per_token.show("{:.1%}"),
                figures.margin.show("{:.2f}"),
                figures.reward_accuracy.show("{:.1%}") if figures.reward_accuracy else "",
                figures.length_bias.show("{:.1%}") if figures.length_bias else "",
            )
    console = open_console(width=None if open_console().is_terminal else 200)
    console.print(table)
    for line in (
        "accuracy: share of pairs whose chosen answer has the higher log-probability; per token: the higher mean",
        "margin: the chosen answer's log-probability minus the rejected one's, in nats",
        "to the first: share of pairs with a larger margin than the first model's",
        "length bias: accuracy on pairs whose chosen answer is longer, minus the accuracy on the others",
        f"in brackets: {LEVEL} % intervals (bootstrap over pairs)",
    ):
        console.print(line, style="dim")
