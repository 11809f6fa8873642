"""Find the data sets in another program's file, as sources for ``fabric-train tokenize``."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json
from fabric_train.translate.translation import Translation

_LOADERS = ("json", "csv", "text", "parquet", "arrow")  # the packaged loaders of datasets, which read files
_TEXT_TYPES = ("completion", "pretrain")
_HUB_NAMES_OF_TORCHTUNE = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m",
    "hh_rlhf_helpful_dataset": "RLHFlow/HH-RLHF-Helpful-standard",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "stack_exchange_paired_dataset": "lvwerra/stack-exchange-paired",
    "wikitext_dataset": "EleutherAI/wikitext_document_level:wikitext-103-v1",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail:3.0.0",
}
_TEXTS_OF_TORCHTUNE = {"wikitext_dataset": "page", "cnn_dailymail_articles_dataset": "article"}
_SUPERVISES_ALL = ("alpaca_dataset", "alpaca_cleaned_dataset")
"""torchtune's data sets in which train_on_input is true unless the file says otherwise."""
_RENAME = "rename the column; tokenize reads messages or conversations"
_COLUMNS_OF_LLAMA_FACTORY: dict[str, tuple[str, ...]] = {
    "prompt": ("instruction",),
    "query": ("input",),
    "response": ("output",),
    "messages": ("messages", "conversations"),
}
"""The columns that tokenize reads for the roles in ``columns``; other roles are named like their column."""


@dataclass(frozen=True)
class Source:
    """A source for tokenize."""

    location: str
    """A file, a folder, or OWNER/NAME:SUBSET:SPLIT@REVISION."""
    is_text: bool = False
    """Whether the file says that its rows are plain texts."""
    text_column: str | None = None
    share: float = 1.0
    """The share of the source's rows that an epoch reads."""
    supervises_prompt: bool | None = None
    """Whether prompts are supervised; None if the source does not say."""


@dataclass(frozen=True)
class Sources:
    """The data sets of a file."""

    training: tuple[Source, ...]
    validation: tuple[Source, ...]
    origins: tuple[str, ...]
    """The settings that name the data sets."""


def find_sources(translation: Translation) -> Sources:
    """Return the data sets that a file names; raise an InputError if it names none."""
    finders = {
        "axolotl": _sources_of_axolotl,
        "trl": _sources_of_trl,
        "llama-factory": _sources_of_llama_factory,
        "torchtune": _sources_of_torchtune,
    }
    sources = finders[translation.file.program](translation)
    if not sources.training:
        raise InputError(f"{translation.file.path}: it does not name a dataset to train on")
    return sources


def _sources_of_axolotl(translation: Translation) -> Sources:
    origins = tuple(translation.file.names("datasets", "pretraining_dataset", "test_datasets"))
    training: list[Source] = []
    validation: list[Source] = []
    for name in origins:
        entries = _read_entries(translation, name)
        sources = [_entry_of_axolotl(translation, f"{name}[{index}]", entry) for index, entry in enumerate(entries)]
        if name == "test_datasets":
            validation += sources
        else:
            training += sources
    return Sources(tuple(training), tuple(validation), origins)


def _read_entries(translation: Translation, name: str) -> list[dict[str, Any]]:
    """Return the data sets in a setting as mappings; the setting may have only one, and an entry only a path."""
    value = translation.file.get(name)
    entries = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, str):
            entry = {"path": entry}
        if not isinstance(entry, dict):
            raise InputError(f"{translation.file.path}: {name}: expected a list of datasets")
        entries.append(entry)
    return entries


def _entry_of_axolotl(translation: Translation, where: str, entry: Mapping[str, Any]) -> Source:
    """Return the source of an entry of ``datasets``, and record which of its settings have no counterpart."""
    row_type = entry.get("type")
    is_text = isinstance(row_type, str) and row_type.split(":")[0] in _TEXT_TYPES
    text_column = None

    # Collect the settings that have a counterpart, or whose value is what tokenize does.
    translated = {"path", "name", "split", "revision", "data_files", "type", "ds_type"}
    translated |= {"conversation", "trust_remote_code"}
    if is_text:
        text_column = str(entry.get("field") or entry.get("text_column") or "text")
        translated |= {"field", "text_column"}
    if entry.get("field_messages") in (None, "messages", "conversations"):
        translated.add("field_messages")
    message_keys = (entry.get("message_property_mappings") or {}).values()
    if all(key in ("role", "content", "from", "value") for key in message_keys):
        translated.add("message_property_mappings")
    if entry.get("roles_to_train") in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        translated.add("roles_to_train")
    if entry.get("train_on_eos") in (None, "turn"):
        translated.add("train_on_eos")
    if entry.get("field_chosen") in (None, "chosen"):
        translated.add("field_chosen")
    if entry.get("field_rejected") in (None, "rejected"):
        translated.add("field_rejected")

    for name, value in entry.items():
        if name not in translated and value not in (None, False, "", [], {}):
            is_column = name.startswith(("field", "message_"))
            advice = _RENAME if is_column else "tokenize has no such setting per source"
            translation.absent[f"{where}.{name}"] = advice
    _describe_row_type(translation, where, row_type)
    return Source(_join_location(translation, where, entry), is_text, text_column)


def _describe_row_type(translation: Translation, where: str, row_type: Any) -> None:
    """Record what the user must do for rows of axolotl's ``type``, if anything."""
    if isinstance(row_type, dict):
        advice = "its own prompt format; write its rows as messages (docs/tokenization.md)"
        translation.absent[f"{where}.type"] = advice
    if not isinstance(row_type, str):
        return
    if row_type.split(".")[0] in ("input_output", "user_defined", "stepwise_supervised"):
        translation.absent[f"{where}.type"] = "write its rows as messages, or as prompt and completion"
    elif row_type.startswith("alpaca"):
        translation.notes.append(f"{where}: type {row_type}: its prompts are rendered by the chat template here")


def _join_location(translation: Translation, where: str, entry: Mapping[str, Any]) -> str:
    """Return the location that ``load_dataset`` would read for an entry, in tokenize's form.

    This is a file, a folder, or OWNER/NAME:SUBSET:SPLIT@REVISION on the hub. A location that tokenize cannot read is
    recorded under the name ``where``.
    """
    path = entry.get("path") or entry.get("id") or entry.get("source")
    files = entry.get("data_files")
    if isinstance(files, Mapping):  # by split
        files = files.get("train") or next(iter(files.values()), None)

    # files of a folder or of a packaged loader
    has_loader = path in _LOADERS or not path
    if files and (has_loader or Path(str(path)).is_dir()):
        file_names = files if isinstance(files, list) else [files]
        if len(file_names) > 1:
            translation.notes.append(f"{where}: data_files: additional files become separate sources: {file_names[1:]}")
        return str(file_names[0]) if has_loader else f"{path}/{file_names[0]}"

    # a file, a folder, or a data set on the hub
    if not isinstance(path, str):
        raise InputError(f"{translation.file.path}: {where}: it has no path")
    if files:
        translation.absent[f"{where}.data_files"] = "download these files, and give them as --dataset"
    subset = entry.get("name") or entry.get("config") or entry.get("subset") or ""
    split = str(entry.get("split") or "")
    slice_match = re.fullmatch(r"([\w.+-]*)\[.*\]", split)  # train[:10%]
    if slice_match:
        translation.absent[f"{where}.split"] = (
            f"{split}: tokenize reads entire splits; --max_documents limits the number of documents"
        )
        split = slice_match[1]
    location = path
    if split:
        location += f":{subset}:{split}"
    elif subset:
        location += f":{subset}"
    if entry.get("revision"):
        location += f"@{entry['revision']}"
    return location


def _sources_of_trl(translation: Translation) -> Sources:
    """Return the sources of one data set or a list of them, which TRL's files and recipes name differently."""
    file = translation.file
    names = file.names(
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets"),
        *("dataset_mixer", "dataset_mixture", "dataset_splits", "dataset_configs"),
    )
    origins = tuple(names)

    # several data sets
    entries = file.get("datasets")
    mixture = file.get("dataset_mixture")
    if isinstance(mixture, Mapping):
        entries = mixture.get("datasets")
    mixer = file.get("dataset_mixer")
    if isinstance(mixer, Mapping):  # weights by path
        train_splits = [split for split in translation.texts("dataset_splits") if "test" not in split]
        split = train_splits[0] if train_splits else None
        entries = [{"path": path, "split": split, "weight": weight} for path, weight in mixer.items()]
    if entries:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{file.path}: datasets: expected a list of datasets")
        training = tuple(_entry_of_trl(translation, index, entry) for index, entry in enumerate(entries))
        return Sources(training, (), origins)

    # one data set, whose test split is read if the run evaluates
    name = file.get("dataset_name")
    if not isinstance(name, str):
        return Sources((), (), origins)
    subset = file.get("dataset_config") or ""
    text_column = file.get("dataset_text_field")
    is_text = text_column not in (None, "text")  # text is TRL's default, also for chats
    train_entry = {"path": name, "name": subset, "split": file.get("dataset_train_split")}
    source = Source(_join_location(translation, "dataset_name", train_entry), is_text, text_column)
    if str(file.get("eval_strategy", "evaluation_strategy")) not in ("steps", "epoch"):
        return Sources((source,), (), origins)
    test_entry = {"path": name, "name": subset, "split": file.get("dataset_test_split") or "test"}
    test_source = Source(_join_location(translation, "dataset_name", test_entry))
    return Sources((source,), (test_source,), origins)


def _entry_of_trl(translation: Translation, index: int, entry: Mapping[str, Any]) -> Source:
    where = f"datasets[{index}]"
    if entry.get("fraction") is not None:
        translation.absent[f"{where}.fraction"] = "give --weights to tokenize: shares of the tokens"
    weight = entry.get("weight")
    share = 1.0 if weight is None else translation.as_number(f"{where}.weight", weight)
    return Source(_join_location(translation, where, entry), share=share)


def _sources_of_llama_factory(translation: Translation) -> Sources:
    file = translation.file
    if file.get("train_dataset") is not None:
        raise translation.fault("train_dataset", "a file for LLaMA-Factory v1; write it with dataset and stage")
    training = _read_dataset_info(translation, translation.texts("dataset"))
    validation = _read_dataset_info(translation, translation.texts("eval_dataset"))
    return Sources(training, validation, tuple(file.names("dataset", "eval_dataset", "dataset_dir")))


def _read_dataset_info(translation: Translation, names: Iterable[str]) -> tuple[Source, ...]:
    """Return the sources that dataset_info.json describes under these names.

    A name that the file does not have is used unchanged, with a note; so are all names without the file.
    """
    file = translation.file
    dataset_dir = Path(str(file.get("dataset_dir") or "data"))
    info_file = None
    entries: dict[str, Any] = {}
    for folder in (dataset_dir, Path(file.path).parent / dataset_dir):
        if (folder / "dataset_info.json").is_file():
            info_file = folder / "dataset_info.json"
            entries = read_json(info_file, dict, "repair it")
            break

    sources: list[Source] = []
    unknown_names: list[str] = []
    for name in names:
        entry = entries.get(name)
        if isinstance(entry, Mapping) and info_file:
            sources.append(_entry_of_dataset_info(translation, name, entry, info_file.parent))
        else:
            unknown_names.append(name)
            sources.append(Source(name))
    if unknown_names:
        reason = f"{dataset_dir / 'dataset_info.json'} is not here" if info_file is None else f"not in {info_file}"
        listed = ", ".join(unknown_names)
        translation.notes.append(f"dataset: {listed}: {reason}; put files or hub names into the command")
    return tuple(sources)


def _entry_of_dataset_info(translation: Translation, name: str, entry: Mapping[str, Any], folder: Path) -> Source:
    """Return the source of an entry in dataset_info.json, and record columns that must be renamed."""
    where = f"dataset_info.json: {name}"
    columns = entry.get("columns") or {}
    is_text = list(columns) == ["prompt"]
    if not is_text:
        for role, column in columns.items():
            expected_columns = _COLUMNS_OF_LLAMA_FACTORY.get(role, (role,))
            if column not in expected_columns:
                advice = f"rename the column {column} to {expected_columns[0]}"
                translation.absent[f"{where}.columns.{role}"] = advice
    text_column = columns["prompt"] if is_text else None
    if "file_name" in entry:
        return Source(str(folder / str(entry["file_name"])), is_text, text_column)
    hub_entry = {"path": entry.get("hf_hub_url"), "name": entry.get("subset"), "split": entry.get("split")}
    return Source(_join_location(translation, where, hub_entry), is_text, text_column)


def _sources_of_torchtune(translation: Translation) -> Sources:
    names = [name for name in translation.file.settings if re.match(r"(dataset|dataset_val)(\.|$)", name)]
    training = _datasets_of_torchtune(translation, "dataset")
    validation = _datasets_of_torchtune(translation, "dataset_val")
    return Sources(training, validation, tuple(names))


def _datasets_of_torchtune(translation: Translation, name: str) -> tuple[Source, ...]:
    """Return the sources of a list of data sets, or of the only one, whose settings are part of the file's."""
    file = translation.file
    entries = file.settings.get(name)
    if isinstance(entries, list):
        if not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{file.path}: {name}: expected a list of datasets")
        return tuple(_entry_of_torchtune(translation, f"{name}[{index}]", entry) for index, entry in enumerate(entries))
    prefix = f"{name}."
    entry = {key.removeprefix(prefix): value for key, value in file.settings.items() if key.startswith(prefix)}
    return (_entry_of_torchtune(translation, name, entry),) if entry else ()


def _entry_of_torchtune(translation: Translation, where: str, entry: Mapping[str, Any]) -> Source:
    """Return the source of one of torchtune's data sets, and record what must be changed in its rows."""
    qualified_component = str(entry.get("_component_", ""))
    component = qualified_component.rpartition(".")[2]
    if "multimodal" in qualified_component:
        raise InputError(f"{translation.file.path}: {where}: only text is supported")
    path = entry.get("source") or _HUB_NAMES_OF_TORCHTUNE.get(component)
    location = _join_location(translation, where, {**entry, "path": path})

    # the columns
    is_text = component in ("text_completion_dataset", *_TEXTS_OF_TORCHTUNE)
    text_column = None
    if is_text:
        text_column = entry.get("column") or _TEXTS_OF_TORCHTUNE.get(component, "text")
    if entry.get("conversation_column") not in (None, "messages", "conversations"):
        translation.absent[f"{where}.conversation_column"] = _RENAME
    for key, value in entry.items():
        if key.startswith("column_map") and value is not None:
            translation.absent[f"{where}.{key}"] = f"rename the column {value}"
        if key in ("new_system_prompt", "filter_fn", "max_seq_len") and value is not None:
            translation.absent[f"{where}.{key}"] = "put it into the rows"
    if component == "stack_exchange_paired_dataset":
        advice = "rename the columns response_j and response_k to chosen and rejected"
        translation.absent[f"{where}._component_"] = advice

    train_on_input = entry.get("train_on_input")
    if train_on_input is None and component in _SUPERVISES_ALL:
        train_on_input = True
    return Source(location, is_text, text_column, supervises_prompt=train_on_input)


def read_template(value: str) -> str | None:
    """Return the Jinja text of a chat template: ``value`` itself, or the file that it names; None for other names."""
    if "{%" in value or "{{" in value:
        return value
    path = Path(value)
    if path.suffix in (".jinja", ".jinja2", ".j2") and path.is_file():
        try:
            return yaml_core.read_text(value)
        except yaml_core.YamlFault as fault:
            raise InputError(f"{value}: {fault}") from None
    return None
