"""Make small token datasets with the program, and read their manifests and documents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import AutoTokenizer

from fabric_train.programs import tokenize_dataset
from fabric_train.token_dataset.manifest import Manifest, read_manifest
from fabric_train.tokenization.shards import SIZES
from tests.support.programs import option_words

TEXTS = [f"Document {index} says  twice: {index} and {index}.\n\n Fin \u00e9 \U0001f600" for index in range(40)]


def tokenize(
    folder: Path, tokenizer: Path, *sources: object, sizes: Any = SIZES, **options: object
) -> dict[str, list[list[int]]]:
    """Make a token dataset with the program, in this process.

    Args:
        folder: the output folder.
        tokenizer: folder or file of the tokenizer.
        sources: files, folders, or ``NAME=FILE``.
        sizes: ``ShardSizes`` of the work; not its type, because callers unpack dictionaries of other options.
        options: other arguments of the program; by default rows have 16 tokens, and no other process is started.

    Returns:
        The rows of each split, as token ids.
    """
    arguments = {
        "dataset": list(sources),
        "tokenizer_name": tokenizer,
        "output_dir": folder,
        "max_length": 16,
        "num_proc": 1,
        **options,
    }
    tokenize_dataset.main(option_words(arguments), sizes)
    return {name: split["input_ids"][:] for name, split in datasets.load_from_disk(folder).items()}


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a token dataset that has one."""
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def write_jsonl(path: Path, texts: Sequence[object] = TEXTS) -> Path:
    """Write texts as JSON Lines, one ``{"text": ...}`` a line; return the path."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def documents_in(rows: list[list[int]], folder: Path) -> list[str]:
    """Return the texts of the complete documents in ``rows``: those between a BOS and an EOS.

    Args:
        rows: token ids, in order: a document may go on in the next row.
        folder: of the token dataset, which has the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ids: list[int] = []
    for row in rows:
        ids.extend(row)
    texts = []
    bos_position = 0
    for position, token in enumerate(ids):
        if token == tokenizer.bos_token_id:
            bos_position = position
        elif token == tokenizer.eos_token_id:
            texts.append(str(tokenizer.decode(ids[bos_position + 1 : position])))
    return texts


def alter_token(folder: Path, split: str, row: int) -> None:
    """Change one token of a row on disk, and nothing else in the file.

    The row is found by its bytes, so no row before it may have the same tokens.
    """
    ids = np.array(datasets.load_from_disk(folder)[split][row]["input_ids"], dtype=np.int32)
    (file,) = (file for file in (folder / split).glob("*.arrow") if ids.tobytes() in file.read_bytes())
    altered_ids = ids.copy()
    # ids 0 and 1 are BOS and EOS, which stay; one less than any other id is still an id of the vocabulary
    last_text_token = np.flatnonzero(ids > 2)[-1]
    altered_ids[last_text_token] -= 1
    content = file.read_bytes().replace(ids.tobytes(), altered_ids.tobytes(), 1)
    file.write_bytes(content)
