"""Compare an export's configurations, tokenizer and index, everything except the tensors, with its checkpoint."""

import filecmp
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from fabric_train.checkpoint import checkpoint_generation_config
from fabric_train.export.transformers_4 import former_names
from fabric_train.export.weight_writer import INDEX_NAME
from fabric_train.files.typed_json import read_json
from fabric_train.model.generation_config import FILE_NAME, read_generation_config
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.weight_files import CheckpointTensors

TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; 1 + 1 = 2, naïve café, 東京.\n"
    "def main() -> None:\n    print('Hello, world!')\n"
)
_WRITTEN_ANEW = {"transformers_version", "_name_or_path", "_from_model_config", "architectures", "dtype", "use_cache"}


def compare_configurations(
    folder: Path, exported: ModelShape, checkpoint: Path, stored: ModelShape, dtype: torch.dtype
) -> list[str]:
    """Return the settings of config.json and generation_config.json that are not those of the checkpoint.

    An export has its own dtype and architecture, it always uses the cache, and it has names for transformers 4 too.
    """
    expected, found = stored.config.to_dict(), exported.config.to_dict()
    for name, value in former_names(found).items():
        if name not in expected and found.get(name) == value:
            del found[name]
    differences = [f"{name} in config.json" for name in _different(expected, found)]
    if exported.config.dtype != dtype:
        differences.append("dtype in config.json")
    if not (folder / FILE_NAME).is_file():
        return [*differences, FILE_NAME]
    generation = checkpoint_generation_config(checkpoint, stored.config).to_dict()
    of_export = read_generation_config(str(folder), exported.config).to_dict()
    return [*differences, *(f"{name} in {FILE_NAME}" for name in _different(generation, of_export))]


def compare_tokenizers(folder: Path, original: Path) -> list[str] | None:
    """Return what differs between two tokenizers; None if the checkpoint has none.

    Compared are ids, decoded text, special tokens, vocabulary and chat template as transformers reads them, and the
    bytes of all files except tokenizer_config.json.
    """
    if not original.is_dir():
        return None
    expected, found = _traits(original), _traits(folder)
    differences = _different(expected, found)
    for file in sorted(path for path in original.rglob("*") if path.is_file()):
        copy = folder / file.relative_to(original)
        if file.name == "tokenizer_config.json":  # has names for transformers 4
            continue
        if not copy.is_file() or not filecmp.cmp(file, copy, shallow=False):
            differences.append(file.name)
    return differences


def compare_index(folder: Path, files: CheckpointTensors) -> list[str]:
    """Return what is wrong with the index of sharded weights: a tensor in another file, or a file that it lacks."""
    if not (folder / INDEX_NAME).is_file():
        return []
    weight_map = read_json(folder / INDEX_NAME, dict, "convert again").get("weight_map")
    if weight_map != {name: files.file_of(name).name for name in files}:
        return [f"{INDEX_NAME} does not say which file has which tensor"]
    return []


def _traits(source: Path) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    ids = tokenizer(TEXT)["input_ids"]
    return {
        "ids": ids,
        "decoded text": tokenizer.decode(ids),
        "special tokens": tokenizer.special_tokens_map,
        "vocabulary": tokenizer.get_vocab(),
        "chat template": tokenizer.chat_template,
    }


def _different(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    names = sorted({*expected, *found} - _WRITTEN_ANEW)
    return [name for name in names if expected.get(name) != found.get(name)]
