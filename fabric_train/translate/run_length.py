"""Compute the number of steps of a run from the rows of a token dataset and the size of a step."""

import math
from dataclasses import dataclass
from pathlib import Path

from fabric_train.cli.errors import InputError, missing_folder
from fabric_train.token_dataset.manifest import load_manifest


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run, and how it is known."""

    steps: int
    words: str


def length_by_epochs(num_rows: int, rows_per_step: int, num_epochs: float) -> RunLength:
    """Return the length of a run that reads all rows ``num_epochs`` times; an epoch's last step may be smaller."""
    steps_per_epoch = math.ceil(num_rows / rows_per_step)
    steps = max(1, math.ceil(num_epochs * steps_per_epoch))
    words = f"{steps:,} steps: {num_epochs:g} × ceil({num_rows:,} rows / {rows_per_step:,})"
    return RunLength(steps, words)


def count_rows(folder: str) -> int:
    """Return the number of rows in train/ of a token dataset."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise InputError(f"--train_data_dir {folder}: {missing_folder(path)}")
    manifest = load_manifest(path)
    if manifest is None or "train" not in manifest.ledger.splits:
        raise InputError(f"--train_data_dir {folder}: not a token dataset; write one with fabric-train tokenize")
    return manifest.ledger.splits["train"].rows
