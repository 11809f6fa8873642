"""Read another program's training file, recognise whose it is, and name its settings."""

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fabric_train.cli import yaml_core
from fabric_train.cli.errors import InputError

Program = Literal["axolotl", "trl", "llama-factory", "torchtune"]
PROGRAMS: tuple[Program, ...] = get_args(Program)

_KEYS: dict[Program, tuple[str, ...]] = {
    "axolotl": ("base_model", "sequence_len", "sample_packing", "lora_target_linear", "val_set_size"),
    "llama-factory": ("stage", "finetuning_type", "cutoff_len", "pref_loss", "preprocessing_num_workers"),
    "trl": (
        *("dataset_name", "dataset_mixer", "dataset_mixture", "dataset_train_split", "use_peft", "dataset_num_proc"),
        *("max_seq_length", "lora_target_modules", "model_name_or_path", "per_device_train_batch_size"),
    ),
}
"""Keys by which a file is recognised, the programs in the order in which they are tried. torchtune has _component_."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_LISTED = ("datasets", "test_datasets", "pretraining_dataset", "dataset_mixture", "dataset_mixer", "special_tokens")
"""Mappings and lists that one rule reads as a whole."""
_BRANCHES = ("chat_template_kwargs", "deepspeed", "lr_scheduler_kwargs", "lr_scheduler_args", "optim_args", "env")


@dataclass(frozen=True)
class ForeignFile:
    """The settings of another program's file by name; those in a mapping are named a.b."""

    path: str
    program: Program
    settings: dict[str, Any]

    def get(self, *names: str) -> Any:
        """Return the first of these settings that has a value; None if none has."""
        return next((self.settings[name] for name in names if self.settings.get(name) is not None), None)

    def is_on(self, *names: str) -> bool:
        """Whether one of these settings is true."""
        return any(as_bool(self.get(name)) for name in names)

    def names(self, *names: str) -> list[str]:
        """Return those names that the file gives a value."""
        return [name for name in names if self.settings.get(name) is not None]


def as_bool(value: Any) -> bool:
    """Return whether a value is true in the YAML of other programs, where yes and on are true as well."""
    return value is True or str(value).lower() in ("true", "yes", "on", "1", "auto", "full")


def read_foreign_file(path: str, program: Program | None) -> ForeignFile:
    """Read a file; an InputError if it is not one of the four programs', or cannot be told."""
    content = yaml_core.load_file(path, "FILE")
    if not isinstance(content, dict) or not content:
        raise InputError(f"{path}: expected the lines 'name: value' of a training file")
    if any(not isinstance(name, str) for name in content):
        raise InputError(f"{path}: every name must be text")
    program = program or recognise(content)
    if program is None:
        known = ", ".join(PROGRAMS)
        raise InputError(f"{path}: this is no training file of {known}, as far as its names say; give --from PROGRAM")
    settings: dict[str, Any] = {}
    for name, value in content.items():
        settings.update(_flatten(name, value, program))
    if program == "torchtune":
        settings = {name: _resolve(value, settings) for name, value in settings.items()}
    return ForeignFile(path, program, settings)


def recognise(content: dict[str, Any]) -> Program | None:
    """Return whose file it is by its names; None if they are nobody's."""
    if any(isinstance(value, dict) and "_component_" in value for value in content.values()):
        return "torchtune"
    return next((program for program, keys in _KEYS.items() if any(key in content for key in keys)), None)


def _flatten(name: str, value: Any, program: Program) -> dict[str, Any]:
    is_read_whole = name in _LISTED or name in _BRANCHES
    if not isinstance(value, dict) or not value or (is_read_whole and program != "torchtune"):
        return {name: value}
    flat: dict[str, Any] = {}
    for inner, deeper in value.items():
        flat.update(_flatten(f"{name}.{inner}", deeper, program))
    return flat


def _resolve(value: Any, settings: dict[str, Any]) -> Any:
    """Replace OmegaConf's ${name} by the value of that setting, also inside a text; one level deep is enough here."""
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole:
        return settings.get(whole[1], value)
    return _REFERENCE.sub(lambda found: str(settings.get(found[1], found[0])), value)
