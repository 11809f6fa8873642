"""Evaluate several models on several texts, one model in memory at a time, and write and print the results."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fabric_train.cli.errors import InputError
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
from fabric_train.evaluation.pairs import compare_pairs
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
from fabric_train.inference.load_model import ModelsInTurn


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
    cache, batch_tokens = LossCache(folder / FOLDER), arguments.batch_tokens
    parts = ((model, part) for model in models for text in encoded[model.name] for part in text.parts())
    with scoring_progress(sum(len(part.tokens) for model, part in parts if not cache.has(model, part))) as show:
        in_turn, losses, bases = ModelsInTurn(), dict[str, list[np.ndarray]](), [model.base for model in models]
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
        first, last = models[0].name, models[-1].name
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
            given, limit = f"--models {model.name}", model.max_positions
            if one.highest_id >= model.vocab_size:
                faults.append(f"{given}: its vocabulary ends at {model.vocab_size - 1}, but {one.name} has larger ids")
            elif limit is not None and one.input_tokens > limit:
                kind, fix = "windows", f"give --max_length {limit} or less"
                if isinstance(one, PackedText):
                    kind, fix = "rows", "leave that text out"
                has = f"{kind} of {one.name} have {one.input_tokens:,} tokens"
                faults.append(f"{given} has {limit:,} positions, but {has}; {fix}")
    if faults:
        raise InputError(*faults)
    return {model.name: by_tokenizer[model.tokenizer_id] for model in models}
