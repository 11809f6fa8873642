"""Translate how data become rows: sources, row length, packing, chat template, supervision and validation."""

import os
import shlex
from pathlib import PurePath
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.translate.method import run_name_of
from fabric_train.translate.sources import Source, Sources, find_sources, read_template
from fabric_train.translate.translation import Translation

_LENGTHS = ("sequence_len", "cutoff_len", "max_length", "max_seq_length", "tokenizer.max_seq_len", "max_seq_len")
_DEFAULT_LENGTHS = {"axolotl": 512, "trl": 1024, "llama-factory": 2048, "torchtune": 8192}
_LONGEST = 2**24
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_TEMPLATE_KEYS = ("chat_template_jinja", "chat_template", "chat_template_path", "template")
"""The settings with a chat template; the first one with a value applies."""
_NAMES_OF_TOKENIZERS_TEMPLATE = (
    "tokenizer_default",
    "llama3",
    "tokenizer_default_fallback_chatml",
    "tokenizer_default_fallback_llama3",
)
"""Names of chat templates that tokenize uses by default: the tokenizer's, or Llama-3's if it has none."""


def translate_tokenizing(translation: Translation, objective: str, train_data_dir: str | None) -> None:
    """Translate the data; ``train_data_dir`` is the token dataset if it has already been written."""
    file = translation.file
    sources = find_sources(translation)
    uses_pairs = objective != "sft"
    if _is_streamed(translation, uses_pairs):
        _translate_stream(translation, sources)
        return
    translation.set_tokenizing("dataset", _list_locations(translation, sources.training), *sources.origins)
    _translate_tokenizer(translation)
    dataset_dir = train_data_dir or _choose_dataset_dir(translation)
    translation.set_tokenizing("output_dir", dataset_dir, *file.names("dataset_prepared_path", "tokenized_path"))
    translation.set_training("train_data_dir", dataset_dir, *sources.origins)
    _translate_shares(translation, sources, dataset_dir)
    _translate_row_length(translation, uses_pairs)
    _translate_packing(translation, sources, uses_pairs)
    _translate_template(translation)
    _translate_supervision(translation, sources, uses_pairs)
    _translate_validation(translation, sources)
    _translate_limits(translation, sources)


def tokenize_command(translation: Translation) -> str | None:
    """Return the command that tokenizes the data; None if the run reads the data as a stream."""
    if not translation.tokenizing:
        return None
    words = ["fabric-train", "tokenize"]
    for argument, setting in translation.tokenizing.items():
        words.append(f"--{argument}")
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        for value in values:
            word = _format_value(value)
            words.append(word if word.startswith("--") else shlex.quote(word))
    return " ".join(words)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _choose_dataset_dir(translation: Translation) -> str:
    """Return a folder for the token dataset that is not the run's folder, in it, or above it."""
    dataset_dir = PurePath("data", run_name_of(translation))
    output_dir = translation.training.get("output_dir")
    if output_dir is None:
        return str(dataset_dir)
    run_dir = PurePath(os.path.normpath(output_dir.value))
    if run_dir.is_relative_to(dataset_dir) or dataset_dir.is_relative_to(run_dir):
        return f"tokens/{dataset_dir.name}"
    return str(dataset_dir)


def _is_streamed(translation: Translation, uses_pairs: bool) -> bool:
    """Return whether a file streams texts for a known number of steps, as --streaming_dataset does."""
    file = translation.file
    streams = bool(file.names("pretraining_dataset")) or file.is_on("streaming", "dataset_streaming")
    return streams and "max_step" in translation.training and not uses_pairs


def _translate_stream(translation: Translation, sources: Sources) -> None:
    file = translation.file
    switches = file.names("streaming", "dataset_streaming")
    locations = [source.location for source in sources.training]
    translation.set_training("streaming_dataset", locations, *sources.origins, *switches)
    _translate_text_column(translation, sources, trains=True)
    length = translation.number(*_LENGTHS)
    if length is not None:
        translation.set_training("max_length", int(length), *file.names(*_LENGTHS))
    else:
        translation.set_default("max_length", _DEFAULT_LENGTHS[file.program])
    buffer_names = file.names("buffer_size", "streaming_multipack_buffer_size", "shuffle_buffer_size")
    if buffer_names:
        translation.set_training("shuffle_buffer", file.get(*buffer_names), *buffer_names)
    # A stream is always packed, has no validation split, and writes no token dataset.
    translation.ignore(*file.names("val_set_size", "val_size", "dataset_prepared_path"))
    translation.ignore(*file.names("sample_packing", "packing", "pad_to_sequence_len", "eval_sample_packing"))
    translation.ignore(*file.names("train_on_inputs", "group_by_length"))


def _list_locations(translation: Translation, training: tuple[Source, ...]) -> list[str]:
    """Return the locations of the sources, without repetitions, for which a note is recorded."""
    locations = list(dict.fromkeys(source.location for source in training))
    if len(locations) < len(training):
        translation.notes.append(
            "a dataset that is listed twice is read once; use shares: FOLDER=2 to read its rows twice"
        )
    return locations


def _translate_tokenizer(translation: Translation) -> None:
    file = translation.file
    names = file.names("tokenizer_config", "tokenizer_name_or_path")
    model = translation.training["model_name"].value
    tokenizer = file.get(*names) if names else model
    translation.set_tokenizing("tokenizer_name", tokenizer, *names)
    # torchtune's tokenizer is a class and a path, which the model's folder replaces
    for name in file.settings:
        is_tokenizer_setting = name.startswith("tokenizer.") and name not in _LENGTHS
        if is_tokenizer_setting and name.rpartition(".")[2] in ("_component_", "path"):
            translation.ignore(name)


def _translate_shares(translation: Translation, sources: Sources, dataset_dir: str) -> None:
    shares_by_location = {source.location: source.share for source in sources.training if source.share != 1}
    if not shares_by_location:
        return
    shares = [f"{dataset_dir}:{location}={share:g}" for location, share in shares_by_location.items()]
    comment = "an epoch reads this share of the rows, and the next epoch different rows"
    translation.set_training("shares", shares, *sources.origins, comment=comment)


def _translate_row_length(translation: Translation, uses_pairs: bool) -> None:
    """Translate the length of rows; here a row has both sequences of a document, and in the other programs only one."""
    file = translation.file
    names = file.names(*_LENGTHS)
    length = translation.number(*_LENGTHS)
    comment = ""
    if length is None:
        length = _DEFAULT_LENGTHS[file.program]
        comment = f"the default of {file.program}"
        if file.program == "torchtune":
            translation.notes.append(f"tokenizer.max_seq_len: no limit there; rows have {length:g} tokens here")
    if length < 1 or length > _LONGEST or length != int(length):
        raise InputError(f"{file.path}: {names[0]}: expected a number of tokens, got {length:g}")
    if uses_pairs:
        comment = f"{int(length)} for each of the two sequences of a document"
        length = 2 * length
    translation.set_tokenizing("max_length", int(length), *names, comment=comment)
    translation.ignore(*file.names("max_prompt_length", "max_prompt_len"))


def _translate_packing(translation: Translation, sources: Sources, uses_pairs: bool) -> None:
    """Translate how documents share rows, whether they attend to one another, and what happens to long ones."""
    file = translation.file
    names = file.names("sample_packing", "packing", "packing_strategy", "neat_packing", "dataset.packed", "packed")

    # how documents share rows
    packing = "none"
    isolates_documents = True
    if file.names("pretraining_dataset"):
        packing = "concat"
    elif file.is_on("sample_packing", "dataset.packed", "packed"):
        packing = "concat" if file.is_on("dataset.split_across_pack") else "best_fit"
    elif file.program == "llama-factory":
        is_pretraining = file.get("stage") == "pt"
        packs_by_default = is_pretraining and file.get("packing") is None
        if file.is_on("neat_packing", "packing") or packs_by_default:
            packing = "concat" if is_pretraining else "best_fit"
            isolates_documents = file.is_on("neat_packing")
    elif file.is_on("packing"):
        strategy = file.get("packing_strategy") or "bfd"
        packing = "best_fit" if strategy == "bfd" else "concat"
        isolates_documents = strategy != "wrapped"
    translation.set_tokenizing("packing", packing, *names)
    if not isolates_documents:
        comment = "there, documents of a row attend to each other; true isolates them"
        translation.set_training("isolate_documents", False, *names, comment=comment)
    translation.ignore(*file.names("pad_to_sequence_len", "eval_sample_packing", "padding_free", "eval_packing"))

    # documents that are longer than a row
    if file.program == "axolotl" and packing != "concat":
        too_long = "cut_end" if file.get("excess_length_strategy") == "truncate" else "drop"
        translation.set_tokenizing("too_long", too_long, *file.names("excess_length_strategy"))
    elif file.get("truncation_mode") == "keep_end":
        translation.set_tokenizing("too_long", "cut_start", "truncation_mode")
    elif uses_pairs:
        translation.notes.append("a document that is too long is left out here, because answers are never cut")
    translation.ignore(*file.names("truncation_mode", "excess_length_strategy"))


def _translate_template(translation: Translation) -> None:
    """Copy the file's chat template as Jinja text; leave it out if it is only a name that is not known here."""
    file = translation.file
    names = file.names(*_TEMPLATE_KEYS)
    template = file.get(*_TEMPLATE_KEYS)
    if not isinstance(template, str):
        translation.ignore(*names)
        return
    jinja_text = CHATML if template == "chatml" else read_template(template)
    if jinja_text is not None:
        translation.templates["jinja"] = jinja_text
        translation.outcomes.update(dict.fromkeys(names, "tokenizing"))
    elif template in _NAMES_OF_TOKENIZERS_TEMPLATE:
        translation.ignore(*names)
    else:
        advice = (
            "the tokenizer's chat template is used; give another template as a Jinja file with --chat_template FILE"
        )
        translation.leave_out(advice, *names)
        translation.notes.append(f"{names[0]}: {template}: {advice}")


def _translate_supervision(translation: Translation, sources: Sources, uses_pairs: bool) -> None:
    """Translate which tokens of a chat are supervised; in texts these are all tokens, in pairs the answers."""
    file = translation.file
    names = file.names(
        *("train_on_inputs", "train_on_prompt", "mask_history", "assistant_only_loss", "completion_only_loss"),
        *("dataset.train_on_input",),
    )
    if uses_pairs or all(source.is_text for source in sources.training):
        translation.ignore(*names)
        return
    if file.program == "trl":
        if file.is_on("assistant_only_loss", "completion_only_loss"):
            translation.set_tokenizing("train_on", "assistant", *names)
        else:
            words = (
                "TRL supervises entire chats, but only the completion of rows with prompt and completion; for such "
                "rows, write assistant"
            )
            translation.set_tokenizing("train_on", "all", *names)
            translation.notes.append(f"train_on all: {words}")
        return
    if file.is_on("mask_history"):
        translation.set_tokenizing("train_on", "last", *names)
        return
    choices = {source.supervises_prompt for source in sources.training}
    supervises_all = file.is_on("train_on_inputs", "train_on_prompt") or choices == {True}
    translation.set_tokenizing("train_on", "all" if supervises_all else "assistant", *names)
    if len(choices) > 1:
        translation.notes.append("train_on: the sources differ in what is supervised; here, one choice applies to all")


def _translate_validation(translation: Translation, sources: Sources) -> None:
    """Translate the validation sources, or the share of the documents that is held out."""
    file = translation.file
    names = file.names("val_set_size", "val_size", "test_split_size")
    size = translation.number("val_set_size", "val_size", "test_split_size")
    mixture = file.get("dataset_mixture")
    if size is None and isinstance(mixture, dict) and isinstance(mixture.get("test_split_size"), int | float):
        size = float(mixture["test_split_size"])
    if sources.validation:
        locations = [source.location for source in sources.validation]
        if locations == [source.location for source in sources.training]:
            translation.notes.append("the validation set is part of the same split; --validation_split creates one")
            translation.set_tokenizing("validation_split", 0.05, *names)
        else:
            translation.set_tokenizing("validation_dataset", locations, *sources.origins, *names)
    elif size and size < 1:
        translation.set_tokenizing("validation_split", size, *names)
    elif size:
        advice = f"a share is needed: --validation_split {size:g} / (number of documents)"
        translation.leave_out(advice, *names)
        translation.notes.append(f"validation of {size:g} documents: {advice}")
        translation.set_tokenizing("validation_split", 0.01, comment="until the number of documents is known")
    else:
        translation.set_tokenizing("validation_split", 0.0, *names)


def _translate_limits(translation: Translation, sources: Sources) -> None:
    """Translate the text column, the largest number of documents, deduplication and numbers of processes."""
    file = translation.file
    _translate_text_column(translation, sources, trains=False)
    if file.names("max_samples"):
        if len(sources.training) == 1:
            translation.set_tokenizing("max_documents", file.get("max_samples"), "max_samples")
        else:
            advice = "there, it applies to each dataset; --max_documents applies to all together"
            translation.leave_out(advice, "max_samples")
    process_names = file.names("dataset_num_proc", "preprocessing_num_workers", "dataset_processes")
    if process_names:
        translation.set_tokenizing("num_proc", file.get(*process_names), *process_names)
    if file.is_on("dataset_exact_deduplication"):
        translation.set_tokenizing("deduplicate", True, "dataset_exact_deduplication")
    worker_names = file.names("dataloader_num_workers", "dataloader.num_workers")
    if worker_names:
        translation.set_training("num_workers", file.get(*worker_names), *worker_names)
    if file.is_on("streaming", "dataset_streaming"):
        translation.set_tokenizing("stream", True, *file.names("streaming", "dataset_streaming"))


def _translate_text_column(translation: Translation, sources: Sources, *, trains: bool) -> None:
    columns = {source.text_column for source in sources.training if source.text_column}
    origins = translation.file.names("dataset_text_field")
    if len(columns) > 1:
        raise InputError(
            f"{translation.file.path}: texts in the columns {', '.join(sorted(columns))}; tokenize supports one"
        )
    column = next(iter(columns), None)
    if column in (None, "text"):
        translation.ignore(*origins)
    elif trains:
        translation.set_training("text_column", column, *origins)
    else:
        translation.set_tokenizing("text_column", column, *origins)
