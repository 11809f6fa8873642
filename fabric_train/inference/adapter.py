"""Put an adapter, such as LoRA, on a model with peft."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fabric_train.cli.errors import InputError, first_line, raise_reached_limit
from fabric_train.files.regular_file import check_no_pipes
from fabric_train.files.typed_json import read_json

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADVICE = "save the adapter again with peft's save_pretrained"


def is_adapter(folder: Path) -> bool:
    """Whether this is a folder with an adapter and no model of its own."""
    return (folder / _CONFIG).is_file() and not (folder / "config.json").is_file()


def read_base_name(folder: Path) -> str:
    """Return the name or folder of the model that an adapter was trained on.

    Raises:
        InputError: its configuration is damaged or names none.
    """
    name = read_json(folder / _CONFIG, dict, _ADVICE).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InputError(f"{folder / _CONFIG}: it names no base model; give it by --base_model")
    return name


def add_adapter(model: Any, folder: Path, base: str) -> Any:
    """Return the model with the adapter in ``folder``; the model is changed.

    The adapter's matrices are not merged into the weights, whose dtype could round them away.

    Raises:
        InputError: peft is not installed, the adapter is damaged or pickled, or is of another model.
    """
    read_json(folder / _CONFIG, dict, _ADVICE)
    check_no_pipes(folder)
    if not (folder / _WEIGHTS).is_file():
        pickled = " (adapter_model.bin is a pickle, which is never read)" if any(folder.glob("*.bin")) else ""
        raise InputError(f"{folder}: no {_WEIGHTS} in it{pickled}; {_ADVICE}")
    try:
        from peft import PeftModel
    except ImportError:
        raise InputError(f"{folder} has an adapter, which needs peft: pip install 'fabric-train[peft]'") from None
    try:
        return PeftModel.from_pretrained(model, str(folder)).eval()
    except (KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise_reached_limit(error)
        reason = first_line(error).rstrip(".:")
        raise InputError(
            f"{folder}: this adapter cannot be put on {base}: {reason}; give its base model by --base_model"
        ) from error
