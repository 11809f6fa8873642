"""Compare two tokenizers, as transformers reads them and by the bytes of their files."""

import filecmp
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig

from fabric_train.export.source import ExportSource

FIXED_TEXT = (
    "Now is the winter of our discontent made glorious summer by this sun of York; 1 + 1 = 2, naïve café, 東京.\n"
    "def main() -> None:\n    print('Hello, world!')\n"
)
"""The text whose tokens and logits are compared: prose, numbers, accents, another script and code."""


def compare_tokenizers(export_dir: Path, source: ExportSource) -> list[str] | None:
    """Return the properties and files of an export's tokenizer that differ from its source's.

    None if the source has no tokenizer.
    """
    files = source.tokenizer_files()
    if not files:
        return None
    differences = _different_properties(source.tokenizer, export_dir)
    for name, file in files.items():
        if name == "tokenizer_config.json":  # an export adds names for transformers 4
            continue
        if not (export_dir / name).is_file() or not filecmp.cmp(file, export_dir / name, shallow=False):
            differences.append(file.name)
    return differences


def tokenizer_changed_by_config(tokenizer_dir: Path, config: PretrainedConfig) -> list[str]:
    """Return what changes in a tokenizer if transformers reads it next to a model's config.json, as in an export.

    transformers also chooses a tokenizer's class by the type of the model, which it does not know without config.json.
    """
    with TemporaryDirectory() as folder:
        model_dir = Path(folder)
        for file in tokenizer_dir.iterdir():
            if file.is_file():
                shutil.copyfile(file, model_dir / file.name)
        config.save_pretrained(model_dir)
        return _different_properties(tokenizer_dir, model_dir)


def _different_properties(tokenizer_dir: Path, other_dir: Path) -> list[str]:
    """Return the names of the properties in which two tokenizers differ, in alphabetical order."""
    properties = _read_properties(tokenizer_dir)
    other_properties = _read_properties(other_dir)
    return [name for name in sorted(properties) if properties[name] != other_properties[name]]


def _read_properties(tokenizer_dir: Path) -> dict[str, Any]:
    """Return a tokenizer's ids for a fixed text, and its properties."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True, trust_remote_code=False)
    ids = tokenizer(FIXED_TEXT)["input_ids"]
    return {
        "ids": ids,
        "decoded text": tokenizer.decode(ids),
        "special tokens": tokenizer.special_tokens_map,
        "vocabulary": tokenizer.get_vocab(),
        "chat template": tokenizer.chat_template,
    }
