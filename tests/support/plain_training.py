"""Train in plain PyTorch, as a reference for our runs."""

import functools
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from fabric_train.arguments import TrainingArguments
from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.token_dataset import open_dataset
from fabric_train.optim.learning_rate import learning_rate

LR = 1e-3
GRAD_CLIP = 0.4
WEIGHT_DECAY = 1.0
"""So large that the losses show which weights decay."""


@functools.cache
def plain_pytorch(
    model_dir: Path, tokens: Path, rows_per_window: int, num_steps: int
) -> tuple[list[float], list[float]]:
    """Train on one device, one document at a time; return the losses and the gradient norms before clipping."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return train_plainly(model, tokens, rows_per_window, num_steps)


def train_plainly(
    model: torch.nn.Module, tokens: Path, rows_per_window: int, num_steps: int, num_ranks: int = 1
) -> tuple[list[float], list[float]]:
    """Do as :func:`plain_pytorch` does with the parameters of a model that train.

    Dropout draws the numbers of ``num_ranks`` ranks with micro-batches of one row.
    """
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    rows = open_dataset(str(tokens)).train.split
    windows = (
        order[first : first + rows_per_window].tolist()
        for order in (np.random.default_rng([0, epoch]).permutation(len(rows)) for epoch in count())  # seed, epoch
        for first in range(0, len(rows), rows_per_window)
    )
    losses = []
    norms = []
    for step, window in zip(range(1, num_steps + 1), windows, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, TrainingArguments(lr=LR))
        of_rows = []
        for rank in range(num_ranks):
            torch.manual_seed(int(np.random.SeedSequence([0, step, rank]).generate_state(1)[0]))  # seed, step, rank
            of_rows += [document_losses(model, rows[row]) for row in window[rank::num_ranks]]
        loss = torch.cat(of_rows).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, GRAD_CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def document_losses(model: torch.nn.Module, row: dict[str, list[int]]) -> torch.Tensor:
    """Return the losses of a row's supervised tokens, with a forward pass for each document."""
    starts = row["document_starts"][1:]
    documents = torch.tensor(row["input_ids"]).tensor_split(starts)
    labels = torch.tensor(row["labels"]).tensor_split(starts)
    losses = [
        F.cross_entropy(model(ids[None]).logits[0, :-1], wanted[1:], ignore_index=IGNORED_LABEL, reduction="none")
        for ids, wanted in zip(documents, labels, strict=True)
    ]
    return torch.cat(losses)[torch.cat([wanted[1:] != IGNORED_LABEL for wanted in labels])]
