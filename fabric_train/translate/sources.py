"""Name the data of another program's file as sources of ``fabric-train tokenize``."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json
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
"""torchtune's data sets whose train_on_input is true unless the file says otherwise."""
_RENAME = "rename the column: tokenize reads messages or conversations"


@dataclass(frozen=True)
class Source:
    """A source of tokenize."""

    place: str
    """A file, a folder, or OWNER/NAME:SUBSET:SPLIT@REVISION."""
    is_text: bool = False
    """Whether its rows are plain texts, as far as the file says."""
    text_column: str | None = None
    share: float = 1.0
    """The share of its rows that an epoch reads."""
    supervises_prompt: bool | None = None
    """Whether prompts are supervised; None if the source does not say."""


@dataclass(frozen=True)
class Sources:
    """The data of a file."""

    training: tuple[Source, ...]
    validation: tuple[Source, ...]
    origins: tuple[str, ...]
    """The settings that name them."""


def find_sources(translation: Translation) -> Sources:
    """Return the data that a file names; an InputError if it names none."""
    finders = {
        "axolotl": _sources_of_axolotl,
        "trl": _sources_of_trl,
        "llama-factory": _sources_of_llama_factory,
        "torchtune": _sources_of_torchtune,
    }
    sources = finders[translation.file.program](translation)
    if not sources.training:
        raise InputError(f"{translation.file.path}: it names no data set, so there is nothing to train on")
    return sources


def _sources_of_axolotl(translation: Translation) -> Sources:
    origins = tuple(translation.file.names("datasets", "pretraining_dataset", "test_datasets"))
    training: list[Source] = []
    validation: list[Source] = []
    for name in origins:
        entries = _entries(translation, name)
        read = [_entry_of_axolotl(translation, f"{name}[{index}]", entry) for index, entry in enumerate(entries)]
        if name == "test_datasets":
            validation += read
        else:
            training += read
    return Sources(tuple(training), tuple(validation), origins)


def _entries(translation: Translation, name: str) -> list[dict[str, Any]]:
    given = translation.file.get(name)
    entries = given if isinstance(given, list) else [given]
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
    if not all(isinstance(entry, dict) for entry in entries):
        raise InputError(f"{translation.file.path}: {name}: expected a list of data sets")
    return entries


def _entry_of_axolotl(translation: Translation, where: str, entry: Mapping[str, Any]) -> Source:
    """Return the source of an entry of ``datasets``, and say which of its settings have no counterpart."""
    kind = entry.get("type")
    known = {"path", "name", "split", "revision", "data_files", "type", "ds_type", "conversation", "trust_remote_code"}
    is_text = isinstance(kind, str) and kind.split(":")[0] in _TEXT_TYPES
    text_column = None
    if is_text:
        text_column = str(entry.get("field") or entry.get("text_column") or "text")
        known |= {"field", "text_column"}
    messages = entry.get("field_messages")
    if messages in (None, "messages", "conversations"):
        known.add("field_messages")
    mapped = entry.get("message_property_mappings") or {}
    if all(value in ("role", "content", "from", "value") for value in mapped.values()):
        known.add("message_property_mappings")
    if entry.get("roles_to_train") in (None, ["assistant"], ["gpt"], ["assistant", "gpt"]):
        known.add("roles_to_train")
    if entry.get("train_on_eos") in (None, "turn"):
        known.add("train_on_eos")
    for column, expected in (("field_chosen", "chosen"), ("field_rejected", "rejected")):
        if entry.get(column) in (None, expected):
            known.add(column)
    for name, value in entry.items():
        if name not in known and value not in (None, False, "", [], {}):
            is_column = name.startswith(("field", "message_"))
            why = _RENAME if is_column else "tokenize has no such setting of one source"
            translation.absent[f"{where}.{name}"] = why
    _say_format_of_axolotl(translation, where, kind)
    return Source(_place(translation, where, entry), is_text, text_column)


def _say_format_of_axolotl(translation: Translation, where: str, kind: Any) -> None:
    if isinstance(kind, dict):
        why = "a prompt format of its own; write its rows as messages (docs/tokenization.md)"
        translation.absent[f"{where}.type"] = why
    elif isinstance(kind, str) and kind.split(".")[0] in ("input_output", "user_defined", "stepwise_supervised"):
        translation.absent[f"{where}.type"] = "write its rows as messages, or as prompt and completion"
    elif isinstance(kind, str) and kind.startswith("alpaca"):
        translation.notes.append(f"{where}: type {kind}: its prompts are rendered by the chat template here")


def _place(translation: Translation, where: str, entry: Mapping[str, Any]) -> str:
    """Return the place of a data set that ``load_dataset`` would be told to read."""
    path = entry.get("path") or entry.get("id") or entry.get("source")
    files = entry.get("data_files")
    if isinstance(files, Mapping):
        files = files.get("train") or next(iter(files.values()), None)
    if files and (path in _LOADERS or not path or Path(str(path)).is_dir()):
        listed = files if isinstance(files, list) else [files]
        folder = "" if path in _LOADERS or not path else f"{path}/"
        if len(listed) > 1:
            translation.notes.append(f"{where}: data_files: further files are sources of their own: {listed[1:]}")
        return f"{folder}{listed[0]}"
    if not isinstance(path, str):
        raise InputError(f"{translation.file.path}: {where}: it has no path")
    if files:
        translation.absent[f"{where}.data_files"] = "download these files, and give them as --dataset"
    subset = entry.get("name") or entry.get("config") or entry.get("subset") or ""
    split = str(entry.get("split") or "")
    part = re.fullmatch(r"([\w.+-]*)\[.*\]", split)
    if part:
        translation.absent[f"{where}.split"] = f"{split}: tokenize reads whole splits; --max_documents takes the first"
        split = part[1]
    revision = entry.get("revision") or ""
    place = path
    if subset or split:
        place = f"{place}:{subset}:{split}" if split else f"{place}:{subset}"
    return f"{place}@{revision}" if revision else place


def _sources_of_trl(translation: Translation) -> Sources:
    file = translation.file
    names = file.names(
        *("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets"),
        *("dataset_mixer", "dataset_mixture", "dataset_splits", "dataset_configs"),
    )
    mixture = file.get("dataset_mixture")
    mixer = file.get("dataset_mixer")
    listed = file.get("datasets")
    evaluates = str(file.get("eval_strategy", "evaluation_strategy")) in ("steps", "epoch")
    if isinstance(mixture, Mapping):
        listed = mixture.get("datasets")
    if isinstance(mixer, Mapping):
        splits = [split for split in translation.texts("dataset_splits") if "test" not in split]
        listed = [
            {"path": path, "split": splits[0] if splits else None, "weight": weight} for path, weight in mixer.items()
        ]
    if listed:
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise InputError(f"{file.path}: datasets: expected a list of data sets")
        training = tuple(_entry_of_trl(translation, index, entry) for index, entry in enumerate(listed))
        return Sources(training, (), tuple(names))
    name = file.get("dataset_name")
    if not isinstance(name, str):
        return Sources((), (), tuple(names))
    subset = file.get("dataset_config") or ""
    text_column = file.get("dataset_text_field")
    train = {"path": name, "name": subset, "split": file.get("dataset_train_split")}
    test = {"path": name, "name": subset, "split": file.get("dataset_test_split") or "test"}
    source = Source(_place(translation, "dataset_name", train), text_column not in (None, "text"), text_column)
    validation = (Source(_place(translation, "dataset_name", test)),) if evaluates else ()
    return Sources((source,), validation, tuple(names))


def _entry_of_trl(translation: Translation, index: int, entry: Mapping[str, Any]) -> Source:
    where = f"datasets[{index}]"
    weight = entry.get("weight")
    if entry.get("fraction") is not None:
        translation.absent[f"{where}.fraction"] = "give --weights to tokenize: shares of the tokens"
    share = 1.0 if weight is None else translation.as_number(f"{where}.weight", weight)
    return Source(_place(translation, where, entry), share=share)


def _sources_of_llama_factory(translation: Translation) -> Sources:
    file = translation.file
    if file.get("train_dataset") is not None:
        raise translation.fault("train_dataset", "a file for LLaMA-Factory v1; write it with dataset and stage")
    training = _named_in_dataset_info(translation, translation.texts("dataset"))
    validation = _named_in_dataset_info(translation, translation.texts("eval_dataset"))
    return Sources(training, validation, tuple(file.names("dataset", "eval_dataset", "dataset_dir")))


def _named_in_dataset_info(translation: Translation, names: Iterable[str]) -> tuple[Source, ...]:
    """Return the sources of names in dataset_info.json, or with their bare names where that file is not found."""
    file = translation.file
    folder = Path(str(file.get("dataset_dir") or "data"))
    folders = [folder, Path(file.path).parent / folder]
    info_file = next((one / "dataset_info.json" for one in folders if (one / "dataset_info.json").is_file()), None)
    entries = read_json(info_file, dict, "repair it") if info_file else {}
    sources: list[Source] = []
    unknown: list[str] = []
    for name in names:
        entry = entries.get(name)
        if isinstance(entry, Mapping) and info_file:
            sources.append(_entry_of_dataset_info(translation, name, entry, info_file.parent))
        else:
            unknown.append(name)
            sources.append(Source(name))
    if unknown:
        where = f"{folder / 'dataset_info.json'} is not here" if info_file is None else f"not in {info_file}"
        translation.notes.append(f"dataset: {', '.join(unknown)}: {where}; put files or hub names into the command")
    return tuple(sources)


def _entry_of_dataset_info(translation: Translation, name: str, entry: Mapping[str, Any], folder: Path) -> Source:
    where = f"dataset_info.json: {name}"
    columns = entry.get("columns") or {}
    defaults = {
        "prompt": "instruction",
        "query": "input",
        "response": "output",
        "history": "history",
        "system": "system",
        "tools": "tools",
        "chosen": "chosen",
        "rejected": "rejected",
    }
    is_text = columns == {"prompt": columns.get("prompt")} and "prompt" in columns
    for part, column in columns.items():
        expected = ("messages", "conversations") if part == "messages" else (defaults.get(part, part),)
        if column not in expected and not is_text:
            translation.absent[f"{where}.columns.{part}"] = f"rename the column {column} to {expected[0]}"
    text_column = columns.get("prompt") if is_text else None
    if "file_name" in entry:
        return Source(str(folder / str(entry["file_name"])), is_text, text_column)
    place = {"path": entry.get("hf_hub_url"), "name": entry.get("subset"), "split": entry.get("split")}
    return Source(_place(translation, where, place), is_text, text_column)


def _sources_of_torchtune(translation: Translation) -> Sources:
    names = [name for name in translation.file.settings if re.match(r"(dataset|dataset_val)(\.|$)", name)]
    training = _datasets_of_torchtune(translation, "dataset")
    validation = _datasets_of_torchtune(translation, "dataset_val")
    return Sources(training, validation, tuple(names))


def _datasets_of_torchtune(translation: Translation, name: str) -> tuple[Source, ...]:
    file = translation.file
    listed = file.settings.get(name)
    if isinstance(listed, list):
        if not all(isinstance(entry, dict) for entry in listed):
            raise InputError(f"{file.path}: {name}: expected a list of data sets")
        return tuple(_entry_of_torchtune(translation, f"{name}[{i}]", one) for i, one in enumerate(listed))
    prefix = f"{name}."
    entry = {key.removeprefix(prefix): value for key, value in file.settings.items() if key.startswith(prefix)}
    return (_entry_of_torchtune(translation, name, entry),) if entry else ()


def _entry_of_torchtune(translation: Translation, where: str, entry: Mapping[str, Any]) -> Source:
    component = str(entry.get("_component_", "")).rpartition(".")[2]
    if "multimodal" in str(entry.get("_component_", "")):
        raise InputError(f"{translation.file.path}: {where}: only text is trained on here")
    source = entry.get("source") or _HUB_NAMES_OF_TORCHTUNE.get(component)
    place = _place(translation, where, {**entry, "path": source})
    is_text = component in ("text_completion_dataset", *_TEXTS_OF_TORCHTUNE)
    text_column = entry.get("column") or _TEXTS_OF_TORCHTUNE.get(component, "text") if is_text else None
    column = entry.get("conversation_column")
    if column not in (None, "messages", "conversations"):
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
    return Source(place, is_text, text_column, supervises_prompt=train_on_input)


def read_template(value: str) -> str | None:
    """Return the Jinja text of a chat template that a file has in itself or names; None for the name of one."""
    if "{%" in value or "{{" in value:
        return value
    path = Path(value)
    if path.suffix in (".jinja", ".jinja2", ".j2") and path.is_file():
        try:
            return yaml_core.read_text(value)
        except yaml_core.YamlFault as fault:
            raise InputError(f"{value}: {fault}") from None
    return None
