"""Read the command line that all peers of the training benchmark share: a model, rows in order, and settings."""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, load_from_disk


@dataclass(frozen=True)
class Task:
    """What a peer trains on.

    ``rows`` has ``input_ids`` as torch tensors, all tokens supervised. A micro-batch is one row, an optimizer step
    ``accumulation`` micro-batches, and the learning rate ``lr`` is constant. ``adapter`` is a folder of peft
    with the adapter to begin with; None trains all weights.
    """

    model_name: str
    rows: Dataset
    accumulation: int
    lr: float
    compile: bool
    adapter: str | None

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps in one epoch."""
        return len(self.rows) // self.accumulation


def parse_task() -> Task:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    for name in ("--model_name", "--train_data_dir"):
        parser.add_argument(name, required=True)
    parser.add_argument("--rows", required=True, help="indices of the rows, comma-separated")
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--compile", action="store_true", help="use the peer's own switch for torch.compile")
    parser.add_argument("--adapter", help="folder of peft")
    given = parser.parse_args()
    rows = load_from_disk(given.train_data_dir)["train"].select_columns("input_ids").with_format("torch")
    order = [int(row) for row in given.rows.split(",")]
    return Task(given.model_name, rows.select(order), given.accumulation, given.lr, given.compile, given.adapter)


def adamw_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: matrices with weight decay, vectors without."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
