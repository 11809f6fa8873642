"""Compare models with a teacher on texts: how far their distributions are apart, and how often they agree.

A model and the teacher are in memory together. Both read the same windows, and the divergence is computed in the
model's head as in training (``model.divergence_loss``).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from fabric_train.cli.errors import InputError
from fabric_train.cli.output import open_console, visible
from fabric_train.data.batch import Batch
from fabric_train.evaluation.estimates import Estimate, ratio_estimate
from fabric_train.evaluation.models import (
    ComparedModel,
    LossCache,
    ShowScored,
    count_unscored_tokens,
    scoring_progress,
)
from fabric_train.evaluation.texts import EncodedText, TextChunk
from fabric_train.files.regular_file import write_atomically
from fabric_train.inference.models_in_turn import ModelsInTurn
from fabric_train.model.attention import forward_batch
from fabric_train.model.divergence_loss import VALUES, DivergenceLoss, FullRows, NamedIds, TeacherHead
from fabric_train.model.lm_head_loss import has_loss_in_head
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.teacher_states.vocabulary import NamedIdRange, check_rows_of_head, compare_vocabularies
from fabric_train.training.statistics import LEVEL

FILE = "teacher.json"
_FIGURES = ("divergence", "agreement")
"""The ``divergence_loss.VALUES`` that are kept for each token."""


@dataclass(frozen=True)
class TeacherFigures:
    """The figures of a model on a source, with the names in ``teacher.json``."""

    tokens: int
    divergence: Estimate
    """KL(teacher ‖ model) in nats per token."""
    agreement: Estimate
    """The share of tokens where both models find the same token likeliest."""


def compare_with_teacher(
    models: Sequence[ComparedModel],
    teacher: ComparedModel,
    id_ranges: Mapping[str, NamedIdRange],
    texts: Mapping[str, Sequence[EncodedText]],
    cache: LossCache,
    folder: Path,
    *,
    batch_tokens: int,
    seed: int,
    prints: bool,
) -> None:
    """Compute the figures of each model, write them to ``teacher.json``, and print a table.

    Args:
        models: The models.
        teacher: The teacher.
        id_ranges: The result of :func:`compare_with_models`.
        texts: The texts as the tokens of each model, by its name.
        cache: The finished chunks, to which new ones are added.
        folder: The ``--output_dir``.
        batch_tokens: The tokens of a forward pass.
        seed: The seed of the bootstrap.
        prints: Whether to print the table.
    """
    results: dict[str, dict[str, TeacherFigures]] = {}  # by model and source
    num_tokens = 0
    for model in models:
        agreement_model = _cached_models(model, teacher)[-1]  # the figure that is written last
        num_tokens += count_unscored_tokens([agreement_model], texts, cache)
    with scoring_progress(num_tokens) as show:
        scorer = _Scorer(teacher, cache, batch_tokens, show)
        for model in models:
            values = scorer.score(model, id_ranges[model.name], texts[model.name])
            results[model.name] = _figures_by_source(texts[model.name], values, seed)

    content = {}
    for name, figures_by_source in results.items():
        content[name] = {source: asdict(figures) for source, figures in figures_by_source.items()}
    text = json.dumps({"teacher": teacher.name, "models": content}, indent=2, ensure_ascii=False)
    write_atomically(folder / FILE, text + "\n")
    if prints:
        _print_table(teacher, results)


def compare_with_models(teacher: ComparedModel, models: Sequence[ComparedModel]) -> dict[str, NamedIdRange]:
    """Return the token ids that the teacher and each model compare, by the model's name.

    Raises:
        InputError: The teacher has another tokenizer than one of the models, or a head has too few rows.
    """
    id_ranges = {}
    for model in models:
        id_range = compare_vocabularies(model.tokenizer, teacher.tokenizer, teacher.name)
        check_rows_of_head(model.vocab_size, id_range, f"--models {model.name}")
        check_rows_of_head(teacher.vocab_size, id_range, f"--teacher {teacher.name}")
        id_ranges[model.name] = id_range
    return id_ranges


def _cached_models(model: ComparedModel, teacher: ComparedModel) -> list[ComparedModel]:
    """Return a model for each of the ``_FIGURES``, whose identity says what the cache keeps under it."""
    models = []
    for figure in _FIGURES:
        models.append(replace(model, identity=f"{model.identity}\n{figure}\n{teacher.identity}"))
    return models


class _Scorer:
    """Computes the figures of single tokens, with the teacher and one model at a time in memory."""

    def __init__(self, teacher: ComparedModel, cache: LossCache, batch_tokens: int, show: ShowScored) -> None:
        self._teacher = teacher
        self._cache = cache
        self._batch_tokens = batch_tokens
        self._show = show
        self._loaded_teacher: Any = None
        self._head: TeacherHead | None = None
        self._models_in_turn = ModelsInTurn()

    def score(self, model: ComparedModel, id_range: NamedIdRange, texts: Sequence[EncodedText]) -> list[np.ndarray]:
        """Return the ``_FIGURES`` of each predicted token of texts, fp32 [2, N] for each text."""
        cached_models = _cached_models(model, self._teacher)
        loaded_model: Any = None
        values_of_texts = []
        for text in texts:
            values_of_chunks = [np.zeros((len(_FIGURES), 0), dtype=np.float32)]
            for chunk in text.chunks():
                cached = [self._cache.read(cached_model, chunk) for cached_model in cached_models]
                if any(values is None for values in cached):
                    if loaded_model is None:
                        loaded_model = self._load(model)
                    named_ids = id_range.on_device(loaded_model.device)
                    chunk_values = self._score_chunk(loaded_model, text, chunk, named_ids, model.name)
                    for cached_model, figure_values in zip(cached_models, chunk_values, strict=True):
                        self._cache.write(cached_model, chunk, figure_values)
                else:
                    chunk_values = np.stack([values for values in cached if values is not None])
                values_of_chunks.append(chunk_values)
            values_of_texts.append(np.concatenate(values_of_chunks, axis=1))
        return values_of_texts

    def _load(self, model: ComparedModel) -> Any:
        """Load a model, and the teacher unless it is in memory."""
        loaded_model = self._models_in_turn.load(model.source)
        if self._loaded_teacher is None:
            # a ModelsInTurn of its own: loading a model ends the use of the one before
            self._loaded_teacher = ModelsInTurn().load(self._teacher.source)
        for compared, loaded in ((model, loaded_model), (self._teacher, self._loaded_teacher)):
            if not has_loss_in_head(loaded):
                raise InputError(
                    f"{compared.name}: it does not fit on one device, is an adapter of peft (merge it first), or "
                    "changes the output of its head, for example by a cap on the logits; leave out --teacher"
                )
        return loaded_model

    @torch.no_grad()
    def _score_chunk(
        self, model: Any, text: EncodedText, chunk: TextChunk, named_ids: NamedIds, name: str
    ) -> np.ndarray:
        """Return the ``_FIGURES`` of each predicted token of a chunk, fp32 [2, its tokens]."""
        rows = [VALUES.index(figure) for figure in _FIGURES]
        values = np.zeros((len(_FIGURES), len(chunk.tokens)), dtype=np.float32)
        teacher = self._loaded_teacher
        for loaded in (model, teacher):
            choose_frequencies(loaded, text.input_tokens)
        advance = partial(self._show, name)
        for predicted in text.batches(chunk, self._batch_tokens):
            input_ids = predicted.input_ids.to(model.device)
            targets = predicted.targets.to(model.device)
            batch = Batch(
                input_ids=input_ids,
                labels=input_ids,  # not read, since the targets are given
                documents=predicted.documents.to(model.device) if predicted.documents else None,
                targets=targets,
            )
            hidden = forward_batch(teacher, batch, positions=targets.positions, returns_hidden=True)
            if self._head is None:
                self._head = _head_of(teacher, hidden.dtype)
            token_loss = DivergenceLoss(FullRows(hidden, self._head), targets.ids, named_ids, "forward_kl")
            _, token_values = forward_batch(model, batch, positions=targets.positions, token_loss=token_loss)
            values[:, predicted.token_indices - chunk.tokens.start] = token_values[rows].cpu().numpy()
            advance(len(predicted.token_indices))
        return values


def _head_of(model: Any, dtype: torch.dtype) -> TeacherHead:
    """Return the head of a model in the dtype of its inputs, which ``ModelsInTurn`` casts to fp32."""
    head = model.get_output_embeddings()
    bias = None if head.bias is None else head.bias.to(dtype)
    return TeacherHead(head.weight.to(dtype), bias)


def _figures_by_source(
    texts: Sequence[EncodedText], values: Sequence[np.ndarray], seed: int
) -> dict[str, TeacherFigures]:
    """Return the figures of each source from the ``_FIGURES`` of the tokens of each text, fp32 [2, N]."""
    sums_by_source: dict[str, list[np.ndarray]] = {}  # [tokens, divergence, agreement] of each document
    for text, token_values in zip(texts, values, strict=True):
        num_documents = len(text.sources)
        columns: list[np.ndarray] = [np.bincount(text.owners, minlength=num_documents).astype(np.float64)]
        for figure_values in token_values:
            columns.append(np.bincount(text.owners, figure_values.astype(np.float64), num_documents))
        sums = np.stack(columns, axis=1)
        for index, source in enumerate(text.source_names):
            sums_by_source.setdefault(source, []).append(sums[text.sources == index])
    figures = {}
    for source, document_sums in sums_by_source.items():
        counts, divergences, agreements = np.concatenate(document_sums).T
        if counts.sum() == 0:
            continue
        figures[source] = TeacherFigures(
            tokens=int(counts.sum()),
            divergence=ratio_estimate(divergences, counts, seed),
            agreement=ratio_estimate(agreements, counts, seed),
        )
    return figures


def _print_table(teacher: ComparedModel, results: Mapping[str, Mapping[str, TeacherFigures]]) -> None:
    """Print the figures of each source and model, and what they mean."""
    table = Table(box=None, pad_edge=False)
    for column in ("source", "model"):
        table.add_column(column)
    for column in ("tokens", "divergence", "agreement"):
        table.add_column(column, justify="right", no_wrap=True)
    sources = dict.fromkeys(chain.from_iterable(results.values()))  # of all models, each once
    for source in sources:
        source_cell = visible(source)
        for model, figures_by_source in results.items():
            figures = figures_by_source.get(source)
            if figures is None:
                continue
            table.add_row(
                source_cell,
                visible(model),
                f"{figures.tokens:,}",
                figures.divergence.show("{:.4f}"),
                figures.agreement.show("{:.1%}"),
            )
            source_cell = ""
    console = open_console(width=None if open_console().is_terminal else 200)
    console.print(table)
    for line in (
        f"divergence: from the teacher {visible(teacher.name)}, KL(teacher ‖ model) in nats per token; lower is closer",
        "agreement: share of tokens where both models find the same token likeliest",
        f"in brackets: {LEVEL} % intervals (bootstrap over documents)",
    ):
        console.print(line, style="dim")
