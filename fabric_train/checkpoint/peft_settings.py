"""Read the settings of a peft adapter without torch. Those that are not computed here must have peft's default.

The defaults are stored, since peft need not be installed to train, and its versions add settings: one that is not in
this table counts as a default only if it is off (null, false or empty).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
SAVE_ADVICE = "save the adapter again with peft's save_pretrained"

_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save"),
}
"""The settings in ``LoraConfig`` and ``modules_to_save``, with any value that they accept."""

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("megatron_core", "runtime_config", "qalora_group_size"),
    *("lora_dtype", "lorap_emb_lr", "lorap_lr_ratio"),  # which ms-swift adds: a type, and rates of training
}
"""Names, versions, memory, and details of settings that are refused: the adapter computes the same without them."""

_COMPUTED_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    # the others change the base's weights before training, or take them apart
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "task_type": (None, "CAUSAL_LM"),
}
"""The values that are computed of settings whose default is more than off."""


class LoraConfig(BaseModel, extra="allow", frozen=True):
    """The values of an adapter_config.json, with the names in peft's ``LoraConfig``; the rest is ``model_extra``."""

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
        InputError: a file is missing or damaged, or the adapter is of a kind that is not computed here.
    """
    file = folder / CONFIG
    config = read_json(file, LoraConfig, SAVE_ADVICE)
    if config.peft_type != "LORA":
        raise InputError(f"{file}: it is of a {config.peft_type} adapter; give one of LORA")
    if unknown := uncomputed_settings(config.model_extra or {}):
        raise InputError(f"{file}: {', '.join(unknown)} is not supported here; merge that adapter with peft")
    check_weights(folder)
    return config


def check_weights(folder: Path) -> None:
    """Raise an InputError if the adapter in a folder has no weights, or only a pickle."""
    if not (folder / WEIGHTS).is_file():
        pickled = " (adapter_model.bin is a pickle, which is never read)" if any(folder.glob("*.bin")) else ""
        raise InputError(f"{folder}: no {WEIGHTS} in it{pickled}; {SAVE_ADVICE}")


def uncomputed_settings(config: Mapping[str, Any]) -> list[str]:
    """Return the settings in the content of an adapter_config.json that are not computed here, with their values."""
    return [
        f"{name} {_shown(value)}"
        for name, value in config.items()
        if name not in _READ and name not in _WITHOUT_EFFECT and not _is_computed(name, value)
    ]


def depends_on_documents(config: Mapping[str, Any]) -> bool:
    """Return whether an adapter looks for its tokens in a whole row (aLoRA), which may hold several documents."""
    return bool(config.get("alora_invocation_tokens"))


def _is_computed(name: str, value: Any) -> bool:
    if name in _COMPUTED_VALUES:
        # 1 and 0 are not true and false in JSON
        return any(type(value) is type(known) and value == known for known in _COMPUTED_VALUES[name])
    return value is None or value is False or value in ("", [], {})


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
