"""Name settings of an export as transformers 4 reads them too.

transformers 5 writes its own names only. Version 4 takes a default for each name that it does not find, without a
word: it would rotate positions with another base. It also stops at the class of tokenizers that 5 writes. The names
below are those of version 4; version 5 reads them as its own.
"""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from fabric_train.files.typed_json import read_json

_ADVICE = "convert again"
_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}


def add_former_names(folder: Path) -> None:
    """Add the former names to ``config.json`` and ``tokenizer_config.json`` of an export."""
    _add_to_config(folder / "config.json")
    if (folder / "tokenizer_config.json").is_file():
        _add_to_tokenizer_config(folder / "tokenizer_config.json")


def _add_to_config(file: Path) -> None:
    """Add the former names, unless transformers 5 would read one of the settings differently then."""
    written = file.read_bytes()
    settings = _read_config(file)
    config = read_json(file, dict, _ADVICE)
    _write_json(file, {**former_names(config), **config})
    found = _read_config(file)
    if any(found.get(name) != value for name, value in settings.items()):
        file.write_bytes(written)


def _read_config(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = AutoConfig.from_pretrained(file.parent, trust_remote_code=False).to_dict()
    return settings


def former_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the former names of the dtype and of rotary positions in config.json, with their values."""
    former = {"torch_dtype": config["dtype"]}
    rope = dict(config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in rope.values()):
        return former  # one set for each type of layer, for which there was no common form
    renamed = _GPT_NEOX if config["model_type"].startswith("gpt_neox") else {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            former[renamed.get(name, name)] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        former["rope_scaling"] = rope
    return former


def _add_to_tokenizer_config(file: Path) -> None:
    config = read_json(file, dict, _ADVICE)
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config.get("chat_template", "") is None:
        del config["chat_template"]  # llama.cpp's converter would take it, and not chat_template.jinja
    _write_json(file, config)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
