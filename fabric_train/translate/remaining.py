"""Translate the settings that no rule has read, by the table of names: the same value under our name, or a comment."""

import re
from typing import Any

from fabric_train.cli import argument_types
from fabric_train.cli.foreign_names import instead_of, name_here
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.translate.method import TRAINING_TYPES
from fabric_train.translate.translation import Translation, takes_value

_TOKENIZING_TYPES = argument_types.types_of(TokenizeArguments)
_RENAMED = re.compile(r"--(\w+)(?: ([\w-]+))?")
_IN_TOKENIZE = re.compile(r"(?:tokenize_dataset\.py|fabric-train tokenize) --(\w+)")
_NOTHING: tuple[Any, ...] = (None, False, "", [], {}, 0, "none", "None")
_CONTAINERS = re.compile(
    r"^(fsdp_config|trl|dpo|lora|profiler|model|loss|tokenizer|checkpointer|metric_logger|dataset)\."
)
_UNKNOWN = "unknown here"
_SIZES = ("hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size", "max_context_width")
_OF_CONFIG = "config.json in the folder of model_name says it"


def translate_remaining(translation: Translation) -> None:
    """Give each setting without an outcome one: an argument of ours, a comment, or that it is off."""
    _settle_torchtune(translation)
    for name, value in translation.file.settings.items():
        if name in translation.outcomes:
            continue
        if value in _NOTHING or name.endswith("._component_"):
            translation.ignore(name)
            continue
        _translate_one(translation, name)


def _settle_torchtune(translation: Translation) -> None:
    """Settle what torchtune's files say of things that need no argument here: files of weights, order, profiler."""
    file = translation.file
    if file.program != "torchtune":
        return
    of_weights = [name for name in file.settings if name.startswith("checkpointer.checkpoint_files")]
    translation.ignore(*of_weights)
    if file.is_on("shuffle"):  # rows of a token dataset always are
        translation.ignore("shuffle")
    of_profiler = [name for name in file.settings if name.startswith("profiler.")]
    if file.is_on("profiler.enabled"):
        translation.leave_out("--profile FIRST:LAST traces these steps", *of_profiler)
    else:
        translation.ignore(*of_profiler)


def _translate_one(translation: Translation, name: str) -> None:
    value = translation.file.settings[name]
    plain = _CONTAINERS.sub("", name)
    here = name_here("TrainArguments", name.lower()) or name_here("TrainArguments", plain.lower())
    if here is None and plain in TRAINING_TYPES and plain not in translation.training:
        here = f"--{plain}"
    size = _RENAMED.match(here or "")
    if plain == "vocab_size" or (size is not None and size[1] in _SIZES):
        translation.leave_out(_OF_CONFIG, name)
        return
    in_tokenize = _IN_TOKENIZE.fullmatch(here or "")
    renamed = _RENAMED.fullmatch(here or "")
    if in_tokenize and in_tokenize[1] not in translation.tokenizing and translation.tokenizing:
        translation.tokenize(in_tokenize[1], value, name)
        return
    if renamed and renamed[1] not in translation.training and renamed[1] in TRAINING_TYPES:
        ours = renamed[2] if renamed[2] is not None and value is True else value
        if (renamed[2] is None or value is True) and takes_value(renamed[1], ours):
            translation.train(renamed[1], ours, name)
            return
    advice = instead_of(name.lower()) or instead_of(plain.lower())
    if here is not None:
        advice = f"here it is {here}"
    translation.leave_out(advice or _UNKNOWN, name)
