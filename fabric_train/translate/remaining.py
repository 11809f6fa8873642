"""Translate the settings that no rule has read, by the table of names: the value under our name, or a comment."""

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
_OF_CONFIG = "config.json in the folder of model_name sets this"


def translate_remaining(translation: Translation) -> None:
    """Record an outcome for each setting without one: an argument of ours, a comment, or that it is off."""
    _settle_torchtune(translation)
    for name, value in translation.file.settings.items():
        if name in translation.outcomes:
            continue
        if value in _NOTHING or name.endswith("._component_"):
            translation.ignore(name)
            continue
        _translate_setting(translation, name)


def _settle_torchtune(translation: Translation) -> None:
    """Record the settings of torchtune's files that need no argument here: files of weights, shuffling, profiler."""
    file = translation.file
    if file.program != "torchtune":
        return
    weight_files = [name for name in file.settings if name.startswith("checkpointer.checkpoint_files")]
    translation.ignore(*weight_files)
    if file.is_on("shuffle"):  # rows of a token dataset are always shuffled
        translation.ignore("shuffle")
    profiler_names = [name for name in file.settings if name.startswith("profiler.")]
    if file.is_on("profiler.enabled"):
        translation.leave_out("--profile FIRST:LAST traces these steps", *profiler_names)
    else:
        translation.ignore(*profiler_names)


def _translate_setting(translation: Translation, name: str) -> None:
    """Translate a setting by the table, which has its name with or without the name of its mapping."""
    value = translation.file.settings[name]
    bare_name = _CONTAINERS.sub("", name)
    translated_name = name_here("TrainArguments", name.lower()) or name_here("TrainArguments", bare_name.lower())
    if translated_name is None and bare_name in TRAINING_TYPES and bare_name not in translation.training:
        translated_name = f"--{bare_name}"  # the name is the same here

    # A size of the model, which its own folder has.
    option = _RENAMED.match(translated_name or "")
    if bare_name == "vocab_size" or (option is not None and option[1] in _SIZES):
        translation.leave_out(_OF_CONFIG, name)
        return

    # An argument of tokenizing that nothing has set.
    tokenize_option = _IN_TOKENIZE.fullmatch(translated_name or "")
    if tokenize_option and translation.tokenizing and tokenize_option[1] not in translation.tokenizing:
        translation.set_tokenizing(tokenize_option[1], value, name)
        return

    # An argument of training that nothing has set. The table's "--argument value" stands for a switch that is on.
    option = _RENAMED.fullmatch(translated_name or "")
    if option and option[1] in TRAINING_TYPES and option[1] not in translation.training:
        argument, switch_value = option.groups()
        is_translatable = switch_value is None or value is True
        argument_value = value if switch_value is None else switch_value
        if is_translatable and takes_value(argument, argument_value):
            translation.set_training(argument, argument_value, name)
            return

    # No counterpart.
    if translated_name is not None:
        advice = f"here it is {translated_name}"
    else:
        advice = instead_of(name.lower()) or instead_of(bare_name.lower()) or _UNKNOWN
    translation.leave_out(advice, name)
