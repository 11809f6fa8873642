"""Store reference log-probabilities in files next to the rows, and find them again.

The files are in ``DATASET/reference/HASH``, or in the run's folder if the token dataset cannot be written:
``train.npy`` and ``validation.npy``, fp64 [pairs, 2] of chosen and rejected answers in the order of the document index,
and ``reference.json``, which says what was hashed.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from fabric_train.checkpoint.model_files import hash_file
from fabric_train.cli.errors import InputError
from fabric_train.data.token_dataset import Rows
from fabric_train.files.regular_file import check_no_link, write_atomically
from fabric_train.files.typed_json import read_json
from fabric_train.token_dataset.manifest import REFERENCE

_FILE_NAME = "reference.json"


@dataclass(frozen=True)
class ReferenceContent:
    """The content of ``reference.json``."""

    made_of: dict[str, str]
    """The values that decide the log-probabilities, by their names in messages."""
    model: str
    """The location from which the reference model was read."""
    files: dict[str, str] = field(default_factory=dict)
    """The XXH3-128 of each split's file."""


@dataclass(frozen=True)
class ReferenceFiles:
    """The folder with the log-probabilities of a token dataset, and the splits that it still lacks."""

    folder: Path
    missing_splits: Sequence[str]


def find_files(
    dataset_dir: Path, run_dir: Path, content: ReferenceContent, splits: Mapping[str, Rows]
) -> ReferenceFiles:
    """Return the files of a token dataset; the folder need not exist yet.

    Raises:
        InputError: A file belongs to something else, or is damaged.
    """
    name = hashlib.sha256(json.dumps(content.made_of, sort_keys=True).encode()).hexdigest()[:16]
    beside_rows = dataset_dir / REFERENCE / name
    in_run = run_dir / REFERENCE / name
    for folder in (beside_rows, in_run):
        if (folder / _FILE_NAME).is_file():
            return ReferenceFiles(folder, _find_missing(folder, content, splits))
    parent = dataset_dir / REFERENCE
    if not parent.is_dir():
        parent = dataset_dir
    folder = beside_rows if os.access(parent, os.W_OK) else in_run
    return ReferenceFiles(folder, list(splits))


def _find_missing(folder: Path, content: ReferenceContent, splits: Mapping[str, Rows]) -> list[str]:
    """Return the splits without a file; raise an InputError if a file belongs to something else, or is damaged."""
    file = folder / _FILE_NAME
    fix = f"remove {folder} to compute it again"
    saved = read_json(file, ReferenceContent, fix)
    for name, value in content.made_of.items():
        if saved.made_of.get(name) != value:
            model = content.model or "this run"
            raise InputError(f"{file}: computed with a different {name} ({saved.model}) than {model}; {fix}")
    missing = []
    for name, rows in splits.items():
        array = folder / f"{name}.npy"
        if name not in saved.files or not array.is_file():
            missing.append(name)
            continue
        is_damaged = hash_file(array) != saved.files[name]
        if is_damaged or len(np.load(array, mmap_mode="r")) != count_pairs(rows):
            raise InputError(f"{array}: damaged (its content has changed since it was written); {fix}")
    return missing


def count_pairs(rows: Rows) -> int:
    """Return the number of preference pairs of a split."""
    assert rows.index is not None  # every token dataset with pairs has an index
    return rows.index.num_documents_in_rows


def write_files(folder: Path, content: ReferenceContent, values: Mapping[str, np.ndarray]) -> None:
    """Add the log-probabilities of splits, fp64 [pairs, 2] by the name of the split."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / _FILE_NAME
    hashes: dict[str, str] = {}
    if file.is_file():
        hashes.update(read_json(file, ReferenceContent, f"remove {folder}").files)
    for name, logps in values.items():
        array = folder / f"{name}.npy"
        temporary = folder / f".{name}.{os.getpid()}.npy"
        check_no_link(array)
        with temporary.open("xb") as opened:
            np.save(opened, logps, allow_pickle=False)
            opened.flush()
            os.fsync(opened.fileno())
        hashes[name] = hash_file(temporary)
        temporary.replace(array)
    # last, because it says which files are complete
    record = replace(content, files=hashes)
    write_atomically(file, json.dumps(asdict(record), indent=2) + "\n")
