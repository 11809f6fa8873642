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
_OF_TOKENIZER = (
    "tokenizer_default",
    "llama3",
    "tokenizer_default_fallback_chatml",
    "tokenizer_default_fallback_llama3",
)
"""Names of chat templates that tokenize uses by itself: the tokenizer's own, or Llama-3's if it has none."""


def translate_tokenizing(translation: Translation, objective: str, train_data_dir: str | None) -> None:
    """Translate the data; ``train_data_dir`` is the token dataset where it has been written already."""
    file = translation.file
    sources = find_sources(translation)
    uses_pairs = objective != "sft"
    if _is_streamed(translation, uses_pairs):
        _translate_stream(translation, sources)
        return
    places = _places(translation, sources.training)
    translation.tokenize("dataset", places, *sources.origins)
    _translate_tokenizer(translation)
    folder = train_data_dir or _choose_folder(translation)
    translation.tokenize("output_dir", folder, *file.names("dataset_prepared_path", "tokenized_path"))
    translation.train("train_data_dir", folder, *sources.origins)
    _translate_shares(translation, sources, folder)
    _translate_row_length(translation, uses_pairs)
    _translate_packing(translation, sources, uses_pairs)
    _translate_template(translation)
    _translate_supervision(translation, sources, uses_pairs)
    _translate_validation(translation, sources)
    _translate_further(translation, sources)


def tokenize_command(translation: Translation) -> str | None:
    """Return the command that tokenizes the data; None if the run reads them as a stream."""
    if not translation.tokenizing:
        return None
    words = ["fabric-train", "tokenize"]
    for argument, setting in translation.tokenizing.items():
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        words += [f"--{argument}", *(_word(value) for value in values)]
    return " ".join(words[:2] + [word if word.startswith("--") else shlex.quote(word) for word in words[2:]])


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _choose_folder(translation: Translation) -> str:
    """Return a folder for the token dataset, which must be neither the run's folder, nor in it, nor around it."""
    folder = PurePath("data", run_name_of(translation))
    output_dir = translation.training.get("output_dir")
    if output_dir is None:
        return str(folder)
    run = PurePath(os.path.normpath(output_dir.value))
    if run.is_relative_to(folder) or folder.is_relative_to(run):
        return f"tokens/{folder.name}"
    return str(folder)


def _is_streamed(translation: Translation, uses_pairs: bool) -> bool:
    """Whether a file streams texts for a known number of steps, as --streaming_dataset does."""
    file = translation.file
    streams = file.names("pretraining_dataset") or file.is_on("streaming", "dataset_streaming")
    return bool(streams) and "max_step" in translation.training and not uses_pairs


def _translate_stream(translation: Translation, sources: Sources) -> None:
    file = translation.file
    switches = file.names("streaming", "dataset_streaming")
    places = [source.place for source in sources.training]
    translation.train("streaming_dataset", places, *sources.origins, *switches)
    _translate_text_column(translation, sources, trains=True)
    length = translation.number(*_LENGTHS)
    if length is not None:
        translation.train("max_length", int(length), *file.names(*_LENGTHS))
    else:
        translation.default("max_length", _DEFAULT_LENGTHS[file.program])
    buffer = file.names("buffer_size", "streaming_multipack_buffer_size", "shuffle_buffer_size")
    if buffer:
        translation.train("shuffle_buffer", file.get(*buffer), *buffer)
    ends = ("val_set_size", "val_size", "sample_packing", "packing", "pad_to_sequence_len", "dataset_prepared_path")
    translation.ignore(*file.names(*ends, "eval_sample_packing", "train_on_inputs", "group_by_length"))


def _places(translation: Translation, training: tuple[Source, ...]) -> list[str]:
    """Return the sources' places, each once: a place that is given twice is read once, and counted twice by a share."""
    places = list(dict.fromkeys(source.place for source in training))
    if len(places) < len(training):
        translation.notes.append("a data set that is listed twice is read once; shares: FOLDER=2 reads rows twice")
    return places


def _translate_tokenizer(translation: Translation) -> None:
    file = translation.file
    names = file.names("tokenizer_config", "tokenizer_name_or_path")
    model = translation.training["model_name"].value
    tokenizer = file.get(*names) if names else model
    translation.tokenize("tokenizer_name", tokenizer, *names)
    of_torchtune = [name for name in file.settings if name.startswith("tokenizer.") and name not in _LENGTHS]
    translation.ignore(*[name for name in of_torchtune if name.rpartition(".")[2] in ("_component_", "path")])


def _translate_shares(translation: Translation, sources: Sources, folder: str) -> None:
    shares = {source.place: source.share for source in sources.training if source.share != 1}
    if not shares:
        return
    named = [f"{folder}:{place}={share:g}" for place, share in shares.items()]
    words = "an epoch reads this share of the rows, the next epoch another one"
    translation.train("shares", named, *sources.origins, comment=words)


def _translate_row_length(translation: Translation, uses_pairs: bool) -> None:
    """Translate the length of rows; a row has both sequences of a pair, where the other programs count one."""
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
        comment = f"{int(length)} for each of the two sequences of a pair"
        length = 2 * length
    translation.tokenize("max_length", int(length), *names, comment=comment)
    translation.ignore(*file.names("max_prompt_length", "max_prompt_len"))


def _translate_packing(translation: Translation, sources: Sources, uses_pairs: bool) -> None:
    """Translate how documents share rows, and whether they see each other there."""
    file = translation.file
    names = file.names("sample_packing", "packing", "packing_strategy", "neat_packing", "dataset.packed", "packed")
    isolates = True
    packing = "none"
    if file.names("pretraining_dataset"):
        packing = "concat"
    elif file.is_on("sample_packing", "dataset.packed", "packed"):
        packing = "concat" if file.is_on("dataset.split_across_pack") else "best_fit"
    elif file.program == "llama-factory":
        is_pretraining = file.get("stage") == "pt"
        packs = file.is_on("neat_packing", "packing") or (is_pretraining and file.get("packing") is None)
        if packs:
            packing = "concat" if is_pretraining else "best_fit"
            isolates = file.is_on("neat_packing")
    elif file.is_on("packing"):
        strategy = file.get("packing_strategy") or "bfd"
        packing = "best_fit" if strategy == "bfd" else "concat"
        isolates = strategy != "wrapped"
    translation.tokenize("packing", packing, *names)
    if not isolates:
        words = "documents of a row see each other there; true keeps them apart"
        translation.train("isolate_documents", False, *names, comment=words)
    translation.ignore(*file.names("pad_to_sequence_len", "eval_sample_packing", "padding_free", "eval_packing"))
    strategy = file.get("excess_length_strategy")
    truncation = file.get("truncation_mode")
    if file.program == "axolotl" and packing != "concat":
        cuts = strategy == "truncate"
        translation.tokenize("too_long", "cut_end" if cuts else "drop", *file.names("excess_length_strategy"))
    elif truncation == "keep_end":
        translation.tokenize("too_long", "cut_start", "truncation_mode")
    elif uses_pairs:
        translation.notes.append("a pair that is too long is left out here, for an answer is never cut")
    translation.ignore(*file.names("truncation_mode", "excess_length_strategy"))


def _translate_template(translation: Translation) -> None:
    file = translation.file
    names = file.names("chat_template", "chat_template_jinja", "chat_template_path", "template")
    given = file.get("chat_template_jinja", "chat_template", "chat_template_path", "template")
    if not isinstance(given, str):
        translation.ignore(*names)
        return
    text = CHATML if given == "chatml" else read_template(given)
    if text is not None:
        translation.templates["jinja"] = text
        translation.outcomes.update(dict.fromkeys(names, "tokenizing"))
    elif given in _OF_TOKENIZER:
        translation.ignore(*names)
    else:
        advice = "the tokenizer's own chat template is used; another one is a Jinja file: --chat_template FILE"
        translation.leave_out(advice, *names)
        translation.notes.append(f"{names[0]}: {given}: {advice}")


def _translate_supervision(translation: Translation, sources: Sources, uses_pairs: bool) -> None:
    """Translate which tokens of a chat are supervised; of a text all are, of a pair the answers."""
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
            translation.tokenize("train_on", "assistant", *names)
        else:
            words = "TRL supervises whole chats; of prompt and completion, the completion: there, write assistant"
            translation.tokenize("train_on", "all", *names)
            translation.notes.append(f"train_on all: {words}")
        return
    if file.is_on("mask_history"):
        translation.tokenize("train_on", "last", *names)
        return
    of_sources = {source.supervises_prompt for source in sources.training}
    all_tokens = file.is_on("train_on_inputs", "train_on_prompt") or of_sources == {True}
    translation.tokenize("train_on", "all" if all_tokens else "assistant", *names)
    if len(of_sources) > 1:
        translation.notes.append("train_on: the sources differ in what is supervised; here it is one choice for all")


def _translate_validation(translation: Translation, sources: Sources) -> None:
    file = translation.file
    names = file.names("val_set_size", "val_size", "test_split_size")
    size = translation.number("val_set_size", "val_size", "test_split_size")
    mixture = file.get("dataset_mixture")
    if size is None and isinstance(mixture, dict) and isinstance(mixture.get("test_split_size"), int | float):
        size = float(mixture["test_split_size"])
    if sources.validation:
        places = [source.place for source in sources.validation]
        if places == [source.place for source in sources.training]:
            translation.notes.append("the validation set is a part of the same split: --validation_split makes one")
            translation.tokenize("validation_split", 0.05, *names)
        else:
            translation.tokenize("validation_dataset", places, *sources.origins, *names)
    elif size and size < 1:
        translation.tokenize("validation_split", size, *names)
    elif size:
        why = f"a share is needed: --validation_split {size:g} / (number of documents)"
        translation.leave_out(why, *names)
        translation.notes.append(f"validation of {size:g} documents: {why}")
        translation.tokenize("validation_split", 0.01, comment="until the number of documents is known")
    else:
        translation.tokenize("validation_split", 0.0, *names)


def _translate_further(translation: Translation, sources: Sources) -> None:
    """Translate limits, deduplication, processes and the column of the text."""
    file = translation.file
    _translate_text_column(translation, sources, trains=False)
    limits = file.names("max_samples")
    if limits and len(sources.training) == 1:
        translation.tokenize("max_documents", file.get("max_samples"), "max_samples")
    elif limits:
        translation.leave_out("it is of each data set there, and --max_documents of all together", "max_samples")
    processes = file.names("dataset_num_proc", "preprocessing_num_workers", "dataset_processes")
    if processes:
        translation.tokenize("num_proc", file.get(*processes), *processes)
    if file.is_on("dataset_exact_deduplication"):
        translation.tokenize("deduplicate", True, "dataset_exact_deduplication")
    workers = file.names("dataloader_num_workers", "dataloader.num_workers")
    if workers:
        translation.train("num_workers", file.get(*workers), *workers)
    if file.is_on("streaming", "dataset_streaming"):
        translation.tokenize("stream", True, *file.names("streaming", "dataset_streaming"))


def _translate_text_column(translation: Translation, sources: Sources, *, trains: bool) -> None:
    columns = {source.text_column for source in sources.training if source.text_column}
    origins = translation.file.names("dataset_text_field")
    if len(columns) > 1:
        raise InputError(
            f"{translation.file.path}: texts in the columns {', '.join(sorted(columns))}; tokenize takes one"
        )
    column = next(iter(columns), None)
    if column in (None, "text"):
        translation.ignore(*origins)
    elif trains:
        translation.train("text_column", column, *origins)
    else:
        translation.tokenize("text_column", column, *origins)
