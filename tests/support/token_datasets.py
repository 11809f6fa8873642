"""Make small token datasets with the program, and read their manifests and documents."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer

from fabric_train.programs import tokenize_dataset
from fabric_train.token_dataset.manifest import Manifest, read_manifest
from fabric_train.tokenization.shards import SIZES

TEXTS = [f"Document {number} says  twice: {number} and {number}.\n\n Fin \u00e9 \U0001f600" for number in range(40)]


def tokenize(
    folder: Path, tokenizer: Path, *sources: object, sizes: Any = SIZES, **options: object
) -> dict[str, list[list[int]]]:
    """Run the program on ``sources`` with shards of these ``sizes``, and return each split's rows."""
    flags = [
        part for name, value in {"max_length": 16, "num_proc": 1, **options}.items() for part in (f"--{name}", value)
    ]
    argv = ["--dataset", *sources, "--tokenizer_name", tokenizer, "--output_dir", folder, *flags]
    tokenize_dataset.main([str(part) for part in argv], sizes)
    loaded = datasets.load_from_disk(folder)
    return {name: split["input_ids"][:] for name, split in loaded.items()}


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def write_jsonl(path: Path, texts: list[Any] = TEXTS) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def documents_in(rows: list[list[int]], folder: Path) -> list[str]:
    """Return the texts of the complete documents in ``rows``, which lie between a BOS and an EOS."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids = [token for row in rows for token in row]
    texts = []
    start = 0
    for position, token in enumerate(ids):
        if token == tokenizer.bos_token_id:
            start = position
        elif token == tokenizer.eos_token_id:
            texts.append(str(tokenizer.decode(ids[start + 1 : position])))
    return texts


def alter_token(folder: Path, split: str, row: int) -> None:
    """Change one token of a row of a token dataset on disk, and nothing else; no row before it has its tokens."""
    ids = np.array(datasets.load_from_disk(folder)[split][row]["input_ids"], dtype=np.int32)
    (file,) = (file for file in (folder / split).glob("*.arrow") if ids.tobytes() in file.read_bytes())
    altered = ids.copy()
    altered[np.flatnonzero(ids > 2)[-1]] -= 1  # 0 and 1 are BOS and EOS
    file.write_bytes(file.read_bytes().replace(ids.tobytes(), altered.tobytes(), 1))
