"""Put an exported adapter on its base model with peft."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fabric_train.checkpoint.adapter_folder import CONFIG, check_files
from fabric_train.checkpoint.peft_settings import SAVE_ADVICE, uncomputed_settings
from fabric_train.cli.errors import InputError, first_line, note, raise_if_limit_reached
from fabric_train.files.regular_file import check_no_pipes
from fabric_train.files.requirements import check_package
from fabric_train.files.typed_json import read_json
from fabric_train.model.adapter import ALL_LINEAR
from fabric_train.model.patterns import NamePattern


def check_adapter(folder: Path) -> None:
    """Raise an InputError if an exported adapter cannot be read, or peft, which opens it, is missing."""
    check_no_pipes(folder)
    check_files(folder)
    check_package("peft", f"{folder} has an adapter, which")


def add_adapter(model: Any, folder: Path, base: str) -> Any:
    """Return the model with the adapter in ``folder``; the model is changed.

    The adapter's matrices are not merged into the weights, whose dtype could round them away.
    """
    check_adapter(folder)
    from peft import PeftModel

    module_names = [name for name, _ in model.named_modules()]
    try:
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers is about to remove
            config = _peft_config(folder, module_names)
            adapted_model = PeftModel.from_pretrained(model, str(folder), config=config).eval()
    except InputError:
        raise
    except ImportError as error:  # such as megatron, which megatron_config asks for
        raise InputError(f"{folder}: its adapter needs a package: {first_line(error)}; install it") from error
    except (KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise_if_limit_reached(error)
        reason = first_line(error).rstrip(".:")
        raise InputError(
            f"{folder}: this adapter does not fit {base}: {reason}; give its base model with --base_model"
        ) from error
    for warning in caught_warnings:
        message = str(warning.message).strip()
        note(f"{folder}: {message.splitlines()[0]}")
    return adapted_model


def _peft_config(folder: Path, module_names: Sequence[str]) -> Any:
    """Return peft's configuration of an adapter, with its regular expressions replaced by the modules that they match.

    ``module_names`` are the base's. peft matches them with ``re``, which a stranger's expression can keep busy for
    years.
    """
    from peft import PeftConfig

    file = folder / CONFIG
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of settings that peft does not know, which are refused below
        config = PeftConfig.from_pretrained(str(folder))
    unknown_settings = _find_unknown_settings(file, config)
    if unknown_settings:
        raise InputError(
            f"{file}: the installed peft {version('peft')} does not support {', '.join(unknown_settings)}; upgrade peft"
        )

    def match_modules(setting: str, pattern: str) -> set[str]:
        return NamePattern(f"{file}: {setting}", pattern, "q_proj").matching_whole(module_names)

    # an expression for the modules with an adapter, or without one
    for setting in ("target_modules", "exclude_modules"):
        pattern = getattr(config, setting, None)
        if isinstance(pattern, str) and pattern != ALL_LINEAR:
            setattr(config, setting, match_modules(setting, pattern))

    # ranks and alphas by expressions for the end of a module's name
    for setting in ("rank_pattern", "alpha_pattern"):
        values_by_pattern = getattr(config, setting, None)
        if not values_by_pattern:
            continue
        values_by_module: dict[str, Any] = {}
        for pattern, value in values_by_pattern.items():
            for name in sorted(match_modules(setting, rf"(?:.*\.)?(?:{pattern})")):
                values_by_module.setdefault(re.escape(name), value)  # of several patterns, the first one counts
        setattr(config, setting, values_by_module)

    # names of modules, of lists of layers and of modules that train whole, which peft puts into an expression
    for setting, example in (("layers_pattern", "layers"), ("modules_to_save", "lm_head")):
        names = getattr(config, setting, None) or []
        if isinstance(names, str):
            names = [names]
        for name in names:
            if not re.fullmatch(r"[\w.]+", str(name)):
                raise InputError(f"{file}: {setting} {name}: not a plain name; give names such as {example}")
    return config


def _find_unknown_settings(file: Path, config: Any) -> list[str]:
    """Return the settings in an adapter_config.json that are not off and that peft's class ``config`` lacks."""
    known_names = {field.name for field in fields(config)}
    content = read_json(file, dict, SAVE_ADVICE)
    unknown_content = {name: value for name, value in content.items() if name not in known_names}
    return uncomputed_settings(unknown_content)
