"""Which settings of a peft adapter are computed here; every other one must have peft's default.

The defaults are stored, since peft need not be installed to train, and its versions add settings: one that is not in
this table counts as a default only if it is off (null, false or empty).
"""

from collections.abc import Mapping
from typing import Any

_READ = {
    *("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "use_dora", "modules_to_save"),
}
"""The settings that ``adapter_folder.read_adapter`` reads, with any value that it accepts."""

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
