"""Write a model of 2 layers and rows with very different numbers of supervised tokens; train on them."""

import csv
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fabric_train.data.batch import IGNORED_LABEL

VOCABULARY = 300
NUM_ROWS = 51
LENGTH = 24
ROWS_PER_WINDOW = 8  # the last window of an epoch has 3


def write_model(folder: Path, spoiled_token: int | None = None, **sizes: int) -> Path:
    """Write a seeded random Llama, untied; the embedding of ``spoiled_token`` is infinite."""
    given: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, **sizes}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        **given,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    if spoiled_token is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[spoiled_token] = torch.inf
    model.save_pretrained(folder)
    return folder


def write_rows(
    folder: Path,
    spoiled_rows: tuple[int, ...] = (),
    spoiled_token: int = 0,
    num_rows: int = NUM_ROWS,
    packed_every: int = 3,
) -> Path:
    """Write a token dataset: of every four rows one has no supervised token, one has one, one has all, one has half.

    Every ``packed_every``-th row holds three documents, the others one. ``spoiled_rows`` have ``spoiled_token``
    in their middle.
    """
    random = np.random.default_rng(0)
    input_ids = random.integers(3, VOCABULARY, (num_rows, LENGTH))
    input_ids[list(spoiled_rows), LENGTH // 2] = spoiled_token
    labels = input_ids.copy()
    for row in range(num_rows):
        unsupervised = [
            np.ones(LENGTH, bool),
            np.arange(LENGTH) != 7,
            np.zeros(LENGTH, bool),
            random.random(LENGTH) < 0.5,
        ]
        labels[row, unsupervised[row % 4]] = IGNORED_LABEL
    columns = {
        "input_ids": input_ids.tolist(),
        "labels": labels.tolist(),
        "document_starts": [[0, 5, 11] if row % packed_every == 0 else [0] for row in range(num_rows)],
    }
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk(str(folder))
    return folder


def argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    """Return the arguments of a run on CPU in fp32, with ``ROWS_PER_WINDOW`` rows a window."""
    settings: dict[str, Any] = {
        "model_name": model,
        "train_data_dir": tokens,
        "output_dir": run,
        "accelerator": "cpu",
        "precision": "32-true",
        "number_epochs": 99,
        "total_batch_size": ROWS_PER_WINDOW,
        "micro_batch_size": 1,
        "lr": 1e-3,
        "num_workers": 0,
        "loggers": "csv",
        **options,
    }
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def metrics(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
