"""Read the settings of a peft adapter without torch. Settings that this program ignores must have peft's default.

The defaults are in a table here, since peft need not be installed to train. A setting that is not in the table, such as
one that a later version of peft adds, counts as default if it is off (null, false or empty).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from fabric_train.cli.errors import InputError
from fabric_train.files.typed_json import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
SAVE_ADVICE = "save the adapter again with peft's save_pretrained"
_MAX_SHOWN = 40  # characters of a value in an error

_READ_SETTINGS = {
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "use_rslora",
    "use_dora",
    "modules_to_save",
}
"""The settings that are read: the fields of ``LoraConfig``, and ``modules_to_save``. Their type limits the values."""

_SETTINGS_WITHOUT_EFFECT = {
    # names and versions
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    # memory, and details of settings that are refused
    "megatron_core",
    "runtime_config",
    "qalora_group_size",
    # ms-swift adds these: a dtype and learning rates
    "lora_dtype",
    "lorap_emb_lr",
    "lorap_lr_ratio",
}
"""The settings that do not change what the adapter computes."""

_COMPUTED_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # other initializations change the base's weights before training, or decompose them
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "task_type": (None, "CAUSAL_LM"),
}
"""The only values that are computed here, for settings whose default is not off."""


class LoraConfig(BaseModel, extra="allow", frozen=True):
    """The values in an adapter_config.json, by their names in peft's ``LoraConfig``; others are in ``model_extra``."""

    peft_type: str
    r: Annotated[int, Field(gt=0)]
    lora_alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    target_modules: list[str] | str
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    use_rslora: bool = False
    use_dora: bool = False


def read_lora_config(folder: Path) -> LoraConfig:
    """Read the settings of the adapter in a folder, and check that its weights are there.

    Raises:
        InputError: a file is missing or damaged, or this program cannot compute this kind of adapter.
    """
    file = folder / CONFIG
    config = read_json(file, LoraConfig, SAVE_ADVICE)
    if config.peft_type != "LORA":
        raise InputError(f"{file}: this is a {config.peft_type} adapter; give a LORA adapter")
    unsupported_settings = uncomputed_settings(config.model_extra or {})
    if unsupported_settings:
        settings = ", ".join(unsupported_settings)
        raise InputError(f"{file}: {settings} is not supported; merge this adapter with peft")
    check_weights(folder)
    return config


def check_weights(folder: Path) -> None:
    """Raise an InputError if the adapter in a folder has no weights, or only a pickle."""
    if (folder / WEIGHTS).is_file():
        return
    has_pickle = any(folder.glob("*.bin"))
    pickle_note = " (adapter_model.bin is a pickle, which is never read)" if has_pickle else ""
    raise InputError(f"{folder}: it has no {WEIGHTS}{pickle_note}; {SAVE_ADVICE}")


def uncomputed_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of an adapter_config.json that this program cannot compute, with their values."""
    settings = []
    for name, value in config.items():
        if name in _READ_SETTINGS or name in _SETTINGS_WITHOUT_EFFECT or _is_computed(name, value):
            continue
        settings.append(f"{name} {_shorten(value)}")
    return settings


def depends_on_documents(config: Mapping[str, Any]) -> bool:
    """Return whether an adapter looks for its tokens in the full row (aLoRA), which may hold several documents."""
    return bool(config.get("alora_invocation_tokens"))


def _is_computed(name: str, value: Any) -> bool:
    """Return whether a setting's value is computed here: a value in the table, or else one that means off."""
    if name in _COMPUTED_VALUES:
        for computed_value in _COMPUTED_VALUES[name]:
            # 1 and 0 equal True and False in Python, not in JSON
            if type(value) is type(computed_value) and value == computed_value:
                return True
        return False
    return value is None or value is False or value in ("", [], {})


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
