"""Write a model of 2 layers and rows with very different numbers of supervised tokens; train on them."""

import csv
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from transformers import LlamaConfig

from fabric_train.data.batch import IGNORED_LABEL
from tests.support.programs import option_words
from tests.support.tiny_model import random_llama

VOCABULARY = 300
NUM_ROWS = 51
LENGTH = 24
ROWS_PER_WINDOW = 8  # the last window of an epoch has 3


def write_model(folder: Path, spoiled_token: int | None = None, **sizes: int) -> Path:
    """Write a seeded random Llama in fp32 whose head is not its embedding; return its folder.

    Args:
        folder: of the model.
        spoiled_token: a token whose embedding is infinite.
        sizes: ``hidden_size``, ``intermediate_size`` and other fields of ``LlamaConfig``.
    """
    size_settings: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, **sizes}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        **size_settings,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        dtype="float32",
    )
    model = random_llama(config)
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
    vocabulary: int = VOCABULARY,
) -> Path:
    """Write a token dataset of rows of ``LENGTH`` tokens, without a manifest; return its folder.

    Of every four rows, one has one supervised token, one has all, one has about half, and one has none.

    Args:
        folder: of the token dataset.
        spoiled_rows: rows that have ``spoiled_token`` in their middle.
        spoiled_token: see ``write_model``.
        num_rows: of the training split, the only one.
        packed_every: every so many rows, one holds three documents; the others hold one.
        vocabulary: the ids are below it.
    """
    random = np.random.default_rng(0)
    input_ids = random.integers(3, vocabulary, (num_rows, LENGTH))
    input_ids[list(spoiled_rows), LENGTH // 2] = spoiled_token
    labels = input_ids.copy()
    document_starts = []
    for row in range(num_rows):
        is_supervised_by_kind = [
            np.zeros(LENGTH, bool),
            np.arange(LENGTH) == 7,
            np.ones(LENGTH, bool),
            random.random(LENGTH) >= 0.5,
        ]
        is_supervised = is_supervised_by_kind[row % 4]
        labels[row, ~is_supervised] = IGNORED_LABEL
        document_starts.append([0, 5, 11] if row % packed_every == 0 else [0])
    columns = {"input_ids": input_ids.tolist(), "labels": labels.tolist(), "document_starts": document_starts}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk(str(folder))
    return folder


def argv(model: Path, tokens: Path, run: Path, **options: object) -> list[str]:
    """Return the arguments of a run on CPU in fp32, with ``ROWS_PER_WINDOW`` rows a window.

    Args:
        model: Hugging Face folder of the model.
        tokens: token dataset.
        run: output folder.
        options: other arguments, or other values of these.
    """
    arguments = {
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
    return option_words(arguments)


def metrics(run: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
