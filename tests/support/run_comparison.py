"""Compare a run with one that nobody interrupted, bit for bit: metrics, counters of checkpoints, and tensors."""

import csv
import json
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors.torch import load_file

MEASURED_COLUMNS = (
    "tokens_per_second",
    "samples_per_second",
    "step_time",
    "data_wait",
    "weights_time",
    "sampling_time",
    "rewards_time",
    "mfu",
    "peak_memory_gb",
    "slowest_rank",
    "rank_lag",
)
"""Columns of metrics.csv that differ in every repetition."""
_COUNTERS = ("step", "epoch", "num_tokens", "num_samples", "skipped_steps", "rows_hash", "train_loss", "val_loss")


def differences(run: Path, uninterrupted_run: Path) -> list[str]:
    """Return the differences between a finished run and one that nobody interrupted, one line each.

    All metrics that are not measured, the counters of all checkpoints and the tensors of the last one are compared.
    """
    return [
        *_differences_of_metrics(run, uninterrupted_run),
        *_differences_of_checkpoints(run / "checkpoints", uninterrupted_run / "checkpoints"),
    ]


def metrics(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without ``MEASURED_COLUMNS``."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in MEASURED_COLUMNS:
            row.pop(column, None)
    return rows


def counters(checkpoint: Path) -> dict[str, object]:
    """Return the counters, row hash and losses of trainer.json, and the positions of a stream's lanes."""
    content = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
    counters_by_name = {name: content[name] for name in _COUNTERS}
    stream = checkpoint / "stream.json"
    counters_by_name["stream"] = stream.read_text() if stream.exists() else None
    return counters_by_name


def _differences_of_metrics(run: Path, uninterrupted_run: Path) -> list[str]:
    lines = []
    row_pairs = zip_longest(metrics(run), metrics(uninterrupted_run), fillvalue="no row")
    for row_number, (row, expected_row) in enumerate(row_pairs, 1):
        if row != expected_row:
            lines.append(f"metrics.csv, row {row_number}: {row} instead of {expected_row}")
    return lines


def _differences_of_checkpoints(folder: Path, expected_folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    expected_names = sorted(path.name for path in expected_folder.iterdir())
    if names != expected_names:
        return [f"checkpoints: {names} instead of {expected_names}"]
    lines = []
    for name in names:
        checkpoint_counters = counters(folder / name)
        expected_counters = counters(expected_folder / name)
        if checkpoint_counters != expected_counters:
            lines.append(f"{name}: {checkpoint_counters} instead of {expected_counters}")
    last_name = names[-1]
    lines += _differences_of_tensors(folder / last_name, expected_folder / last_name)
    return lines


def _differences_of_tensors(checkpoint: Path, expected_checkpoint: Path) -> list[str]:
    lines = []
    for expected_file in sorted(expected_checkpoint.rglob("*.safetensors")):
        name = expected_file.relative_to(expected_checkpoint)
        tensors = load_file(checkpoint / name)
        expected_tensors = load_file(expected_file)
        if tensors.keys() != expected_tensors.keys():
            lines.append(f"{expected_checkpoint.name}/{name}: tensors of other names")
            continue
        for key, tensor in tensors.items():
            if not torch.equal(tensor, expected_tensors[key]):
                lines.append(f"{expected_checkpoint.name}/{name}: {key} has other values")
    return lines
