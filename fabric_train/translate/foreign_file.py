"""Read another program's training file, recognise the program, and flatten the settings."""

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
"""The keys by which a program's file is recognised, in the order of the attempts. torchtune has _component_."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_UNFLATTENED = (
    *("datasets", "test_datasets", "pretraining_dataset", "dataset_mixture", "dataset_mixer", "special_tokens"),
    *("chat_template_kwargs", "deepspeed", "lr_scheduler_kwargs", "lr_scheduler_args", "optim_args", "env"),
)
"""Mappings and lists that one rule reads in full, except in torchtune's files."""


@dataclass(frozen=True)
class ForeignFile:
    """The settings in another program's file, by name; settings in a mapping are named a.b."""

    path: str
    program: Program
    settings: dict[str, Any]

    def get(self, *names: str) -> Any:
        """Return the value of the first of these settings that has one; None if no setting has a value."""
        for name in names:
            value = self.settings.get(name)
            if value is not None:
                return value
        return None

    def is_on(self, *names: str) -> bool:
        """Return whether any of these settings is true."""
        return any(as_bool(self.get(name)) for name in names)

    def names(self, *names: str) -> list[str]:
        """Return the names that have a value in the file."""
        return [name for name in names if self.settings.get(name) is not None]


def as_bool(value: Any) -> bool:
    """Return whether a value is true in other programs' YAML, where yes and on are also true."""
    return value is True or str(value).lower() in ("true", "yes", "on", "1", "auto", "full")


def read_foreign_file(path: str, program: Program | None) -> ForeignFile:
    """Read a file of ``program``; None recognises the program by the names of the settings.

    Raises:
        InputError: the file cannot be read, or is not recognised.
    """
    content = yaml_core.load_file(path, "FILE")
    if not isinstance(content, dict) or not content:
        raise InputError(f"{path}: expected a training file with lines 'name: value'")
    if any(not isinstance(name, str) for name in content):
        raise InputError(f"{path}: every name must be text")
    program = program or recognise(content)
    if program is None:
        programs = ", ".join(PROGRAMS)
        raise InputError(f"{path}: its names are not those of a training file of {programs}; give --from PROGRAM")
    settings: dict[str, Any] = {}
    for name, value in content.items():
        settings |= _flatten(name, value, program)
    if program == "torchtune":
        settings = {name: _resolve_references(value, settings) for name, value in settings.items()}
    return ForeignFile(path, program, settings)


def recognise(content: dict[str, Any]) -> Program | None:
    """Return the program of a file by the names of its settings; None if no program has them."""
    if any(isinstance(value, dict) and "_component_" in value for value in content.values()):
        return "torchtune"
    for program, keys in _KEYS.items():
        if any(key in content for key in keys):
            return program
    return None


def _flatten(name: str, value: Any, program: Program) -> dict[str, Any]:
    """Return the settings in a mapping by their dotted names a.b, or any other value by its name."""
    is_unflattened = name in _UNFLATTENED and program != "torchtune"
    if not isinstance(value, dict) or not value or is_unflattened:
        return {name: value}
    settings: dict[str, Any] = {}
    for key, inner_value in value.items():
        settings |= _flatten(f"{name}.{key}", inner_value, program)
    return settings


def _resolve_references(value: Any, settings: dict[str, Any]) -> Any:
    """Replace OmegaConf's ${name} by the value of that setting, also within a text.

    References in the replacement are not resolved: torchtune's files have none.
    """
    if not isinstance(value, str):
        return value
    reference = _REFERENCE.fullmatch(value)
    if reference:  # the whole value, which keeps its type
        return settings.get(reference[1], value)
    return _REFERENCE.sub(lambda match: str(settings.get(match[1], match[0])), value)
