"""Evaluate several models on texts, one model in memory at a time; write and print the results."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fabric_train.cli.errors import InputError, naming_option
from fabric_train.evaluation import loss_table
from fabric_train.evaluation.arguments import EvaluateArguments
from fabric_train.evaluation.loss_changes import CHANGES, PAGE, find_changes, show_changes, write_changes
from fabric_train.evaluation.models import (
    FOLDER,
    ComparedModel,
    LossCache,
    check_all_evaluated,
    check_tokenizer,
    count_unscored_tokens,
    find_model,
    find_models,
    score_models,
)
from fabric_train.evaluation.pairs import compare_pairs
from fabric_train.evaluation.teacher_comparison import compare_with_models, compare_with_teacher
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
from fabric_train.files.requirements import check_room

_ROOM_OF_TABLES = 1_000_000
"""The bytes that the tables, pages and pictures of an evaluation take."""
_BYTES_OF_LOSS = 4


def compare_models(arguments: EvaluateArguments, *, prints: bool = True) -> None:
    """Evaluate ``--models`` on ``--texts`` or ``--pairs``; write the results, and print a table if ``prints``.

    If ``--output_dir`` has an evaluation already, the results are added to it.

    Raises:
        InputError: the arguments, models and texts do not fit together; nothing is written.
        RunError: a model's loss is not finite, or ``RUN/all`` has damaged checkpoints. The results of the other
            checkpoints are written.
    """
    assert arguments.models is not None  # EvaluateArguments.faults
    assert arguments.output_dir is not None
    folder = Path(arguments.output_dir)
    check_output(folder)
    earlier_losses = loss_table.read_evaluated(folder)  # now, because a damaged file is refused
    models, damaged_checkpoints = find_models(arguments.models)
    if arguments.pairs is not None:
        compare_pairs(arguments, models, LossCache(folder / FOLDER), prints=prints)
    else:
        _compare_losses(arguments, models, earlier_losses, folder, prints=prints)
    check_all_evaluated(damaged_checkpoints)


def _compare_losses(
    arguments: EvaluateArguments,
    models: Sequence[ComparedModel],
    earlier_losses: loss_table.Evaluated,
    folder: Path,
    *,
    prints: bool,
) -> None:
    """Compute the models' losses on texts, add them to the earlier losses in ``folder``, and print a table."""
    # read the texts as the tokens of each model
    teacher = None
    if arguments.teacher is not None:
        with naming_option("--teacher", instead_of="--models"):
            teacher = find_model(arguments.teacher)
        id_ranges = compare_with_models(teacher, models)
    texts = _open_texts(arguments, models, folder / FOLDER / "downloads")
    encoded_texts = _encode_texts([*models, teacher] if teacher else models, texts, arguments)
    first_model = models[0]
    last_model = models[-1]

    # refuse to add to losses on other documents, before hours of evaluation
    weights = {model.name: model.weights for model in models}
    documents: dict[str, list[str]] = {}
    for text in encoded_texts[first_model.name]:
        for source in text.sources.tolist():
            documents.setdefault(text.source_names[source], []).append(text.identity)
    loss_table.check_same_documents(earlier_losses, weights, documents, folder)
    outdated_models = loss_table.outdated_models(earlier_losses, weights)
    for name in outdated_models:
        print(
            f"note: the weights of {name} have changed since the earlier evaluation, which is replaced", file=sys.stderr
        )

    # compute the losses of all tokens, and sum them by document
    cache = LossCache(folder / FOLDER)
    num_tokens = count_unscored_tokens(models, encoded_texts, cache)
    check_room(folder, _ROOM_OF_TABLES + _BYTES_OF_LOSS * num_tokens, "the loss of each token")
    losses = score_models(models, encoded_texts, cache, arguments.batch_tokens, num_tokens)
    new_losses: loss_table.Evaluated = {}
    for model in models:
        new_losses[model.name] = loss_table.document_losses(
            model.name, model.weights, encoded_texts[model.name], losses[model.name]
        )

    # write the results together with the earlier ones, which are read again: another evaluation may have added some
    with wait_for_lock(folder / "evaluation.lock"):
        earlier_losses = loss_table.read_evaluated(folder)
        loss_table.check_same_documents(earlier_losses, weights, documents, folder)
        evaluated = loss_table.join_evaluated(earlier_losses, new_losses)
        results = loss_table.compare_evaluated(evaluated, arguments.seed)
        loss_table.write_evaluated(folder, evaluated, results)
        loss_table.draw_losses(folder / "evaluation.png", list(evaluated), results)
    if outdated_models:
        for file_name in (CHANGES, PAGE):
            (folder / file_name).unlink(missing_ok=True)  # it may describe the former weights
    if first_model is not last_model and first_model.tokenizer_id == last_model.tokenizer_id:
        changes = find_changes(
            first_model.name,
            last_model.name,
            encoded_texts[first_model.name],
            losses[first_model.name],
            losses[last_model.name],
        )
        write_changes(folder, show_changes(changes, first_model.tokenizer))

    if prints:
        notes = [text.note() for text in encoded_texts[first_model.name] if isinstance(text, PackedText)]
        are_same_tokens = loss_table.have_same_tokens(evaluated)
        loss_table.print_table(results, are_same_tokens, [note for note in notes if note])
    if teacher is not None:
        compare_with_teacher(
            models,
            teacher,
            id_ranges,
            encoded_texts,
            cache,
            folder,
            batch_tokens=arguments.batch_tokens,
            seed=arguments.seed,
            prints=prints,
        )
    if prints:
        print(f"written to {folder}", file=sys.stderr)


def check_output(folder: Path) -> None:
    """Raise an InputError unless ``--output_dir`` is a new folder, or has an evaluation to which results are added."""
    check_no_dead_link(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output_dir {folder} is a file; choose another name for the folder")
    has_results = any((folder / name).is_file() for name in ("scores.csv", "pairs.json"))
    is_evaluation = has_results or (folder / FOLDER).is_dir()
    if folder.is_dir() and any(folder.iterdir()) and not is_evaluation:
        raise InputError(f"--output_dir {folder} has other files but no evaluation; choose another folder")
    path = folder.absolute()
    existing_parent = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing_parent.is_dir() or not os.access(existing_parent, os.W_OK | os.X_OK):
        raise InputError(f"--output_dir {folder}: cannot write to {existing_parent}; choose another folder")
    check_room(folder, _ROOM_OF_TABLES, "an evaluation")


def _open_texts(arguments: EvaluateArguments, models: Sequence[ComparedModel], downloads: Path) -> list[EvaluatedText]:
    """Open ``--texts``, or else the validation split of the first model that is a checkpoint."""
    if arguments.texts is not None:
        return open_texts(arguments.texts, arguments.text_column, downloads)
    for model in models:
        if model.checkpoint:
            return open_validation_of(Path(model.source))
    raise InputError("--texts is required, because --models has no checkpoint with a validation split")


def _encode_texts(
    models: Sequence[ComparedModel], texts: Sequence[EvaluatedText], arguments: EvaluateArguments
) -> Mapping[str, Sequence[EncodedText]]:
    """Return the texts as each model's tokens, by the model's name; they are encoded once for each tokenizer.

    Raises:
        InputError: a model has too few ids or positions, or its tokenizer is not that of a token dataset.
    """
    packed_texts = {text: PackedText(text) for text in texts if isinstance(text, HeldOutRows)}
    texts_by_tokenizer: dict[str, list[EncodedText]] = {}
    faults: list[str] = []
    for model in models:
        if model.tokenizer_id not in texts_by_tokenizer:
            encoded_texts: list[EncodedText] = []
            for text in texts:
                if isinstance(text, HeldOutRows):
                    check_tokenizer(model, text.dataset)
                    encoded_texts.append(packed_texts[text])
                else:
                    encoded_texts.append(WindowedText(text, model.tokenizer, arguments.max_length, arguments.overlap))
            texts_by_tokenizer[model.tokenizer_id] = encoded_texts
        for encoded_text in texts_by_tokenizer[model.tokenizer_id]:
            fault = _fault_of_model(model, encoded_text)
            if fault is not None:
                faults.append(fault)
    if faults:
        raise InputError(*faults)
    return {model.name: texts_by_tokenizer[model.tokenizer_id] for model in models}


def _fault_of_model(model: ComparedModel, text: EncodedText) -> str | None:
    """Return why a model cannot read a text; None if it can."""
    if text.highest_id >= model.vocab_size:
        return f"--models {model.name}: its vocabulary ends at {model.vocab_size - 1}, but {text.name} has larger ids"
    limit = model.max_positions
    if limit is None or text.input_tokens <= limit:
        return None
    if isinstance(text, PackedText):
        sequences = "rows"
        fix = "leave that text out"
    else:
        sequences = "windows"
        fix = f"give --max_length {limit} or less"
    return (
        f"--models {model.name} has {limit:,} positions, but {sequences} of {text.name} have {text.input_tokens:,} "
        f"tokens; {fix}"
    )
