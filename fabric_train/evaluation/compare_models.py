"""Evaluate several models on several texts, one model in memory at a time, and write and print the results."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train.cli.errors import InputError
from fabric_train.evaluation.bootstrap import DocumentSums, compare
from fabric_train.evaluation.changes_page import changes_page
from fabric_train.evaluation.compared_model import ComparedModel, check_tokenizer, find_model
from fabric_train.evaluation.encoded_text import EncodedText, PackedText, WindowedText
from fabric_train.evaluation.loss_changes import find_changes
from fabric_train.evaluation.loss_picture import draw_losses
from fabric_train.evaluation.loss_table import print_table, write_documents, write_evaluation
from fabric_train.evaluation.scoring_progress import scoring_progress
from fabric_train.evaluation.texts import EvaluatedText, HeldOutRows, open_texts, open_validation_of
from fabric_train.evaluation.token_losses import FOLDER, LossCache, score_texts
from fabric_train.files.atomic_folder import check_no_dead_link

if TYPE_CHECKING:
    from arguments import EvaluateArguments


def compare_models(arguments: "EvaluateArguments") -> None:
    """Evaluate ``--models`` on ``--texts``, print a table, and write what ``--output_dir`` gets.

    Raises:
        InputError: a model or text cannot be used, or the folder is taken; nothing has been written.
        RunError: a model's loss is not finite.
    """
    assert arguments.models is not None  # EvaluateArguments.faults
    assert arguments.output_dir is not None
    folder = Path(arguments.output_dir)
    _check_folder(folder)
    models = [find_model(name) for name in arguments.models]
    texts = _open_texts(arguments, models, folder)
    encoded = _encode_for(models, texts, arguments)
    losses = _score(models, encoded, LossCache(folder / FOLDER), arguments.batch_tokens)
    sums = [_sums_by_source(encoded[model.name], losses[model.name]) for model in models]
    results = {source: compare([of[source] for of in sums], arguments.seed) for source in sums[0]}
    names = [model.name for model in models]
    write_evaluation(folder, names, results)
    write_documents(folder, names, [encoded[name] for name in names], [losses[name] for name in names])
    draw_losses(folder / "evaluation.png", names, results)
    _write_page(folder / "report.html", models[0], models[-1], encoded[names[0]], losses)
    print_table(names, results, are_same_tokens=len({model.tokenizer_id for model in models}) == 1)
    print(f"written to {folder}", file=sys.stderr)


def _check_folder(folder: Path) -> None:
    check_no_dead_link(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file; choose another name for the folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FOLDER).is_dir():
        raise InputError(f"--output_dir {folder} has other files, and no evaluation; choose another folder")
    parent = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--output_dir {folder}: cannot write to {parent}; choose another folder")


def _open_texts(arguments: "EvaluateArguments", models: Sequence[ComparedModel], folder: Path) -> list[EvaluatedText]:
    if arguments.texts is not None:
        return open_texts(arguments.texts, arguments.text_column, folder / FOLDER / "downloads")
    run = next((model for model in models if model.checkpoint), None)
    if run is None:
        raise InputError("--texts is required: no model of --models is a checkpoint, whose validation split could do")
    return open_validation_of(Path(run.source))


def _encode_for(
    models: Sequence[ComparedModel], texts: Sequence[EvaluatedText], arguments: "EvaluateArguments"
) -> dict[str, list[EncodedText]]:
    """Return the texts for each model, encoded once for each tokenizer.

    Raises:
        InputError: a model has too few positions, or another tokenizer than a token dataset.
    """
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
        faults += filter(None, (_fault_of(model, text) for text in by_tokenizer[model.tokenizer_id]))
    if faults:
        raise InputError(*faults)
    return {model.name: by_tokenizer[model.tokenizer_id] for model in models}


def _fault_of(model: ComparedModel, text: EncodedText) -> str | None:
    """Return why a model cannot be evaluated on a text, or None."""
    if text.highest_id >= model.vocab_size:
        return f"--models {model.name}: its vocabulary ends at {model.vocab_size - 1}, but {text.name} has larger ids"
    if model.max_positions is not None and text.input_tokens > model.max_positions:
        of_rows = isinstance(text, PackedText)
        fix = "leave that text out" if of_rows else f"give --max_length {model.max_positions} or less"
        kind = "rows" if of_rows else "windows"
        return (
            f"--models {model.name} has {model.max_positions:,} positions, but {kind} of {text.name} have "
            f"{text.input_tokens:,} tokens; {fix}"
        )
    return None


def _score(
    models: Sequence[ComparedModel], encoded: dict[str, list[EncodedText]], cache: LossCache, batch_tokens: int
) -> dict[str, list[np.ndarray]]:
    """Return for each model the losses of the predicted tokens of each text, fp32 [N]."""
    total = sum(
        len(part.tokens)
        for model in models
        for text in encoded[model.name]
        for part in text.parts()
        if not cache.has(model, part)
    )
    with scoring_progress(total) as show:
        return {model.name: score_texts(model, encoded[model.name], cache, batch_tokens, show) for model in models}


def _write_page(
    file: Path,
    first: ComparedModel,
    last: ComparedModel,
    texts: Sequence[EncodedText],
    losses: dict[str, list[np.ndarray]],
) -> None:
    """Write the page of where tokens got better and worse; remove it if the two models have different tokens."""
    if first is last or first.tokenizer_id != last.tokenizer_id:
        file.unlink(missing_ok=True)
        return
    changes = find_changes((first.name, last.name), texts, losses[first.name], losses[last.name])
    file.write_text(changes_page(changes, first.tokenizer), encoding="utf-8")


def _sums_by_source(texts: Sequence[EncodedText], losses: Sequence[np.ndarray]) -> dict[str, DocumentSums]:
    """Return the sums of each document by the name of its source; sources of one name are one."""
    parts: dict[str, list[DocumentSums]] = {}
    for text, of_tokens in zip(texts, losses, strict=True):
        num_documents = len(text.sources)
        nats = np.bincount(text.owners, of_tokens.astype(np.float64), num_documents)
        tokens = np.bincount(text.owners, minlength=num_documents).astype(np.float64)
        for number, name in enumerate(text.source_names):
            own = text.sources == number
            if own.any():
                parts.setdefault(name, []).append(DocumentSums(nats[own], tokens[own], text.num_bytes[own]))
    return {
        name: DocumentSums(
            *(np.concatenate([getattr(sums, field) for sums in of]) for field in ("nats", "tokens", "num_bytes"))
        )
        for name, of in parts.items()
    }
