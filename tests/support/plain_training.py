"""Train in plain PyTorch, as a reference for our runs."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

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
_SEED = 0

TokenizedRow: TypeAlias = dict[str, list[int]]
"""The columns ``input_ids``, ``labels`` and ``document_starts`` of a row."""
RowLosses: TypeAlias = Callable[[torch.nn.Module, TokenizedRow], torch.Tensor]
"""A function of a model and a row that returns the losses of the row's supervised tokens, fp32 [N]."""


@functools.cache
def plain_pytorch(
    model_dir: Path, tokens_dir: Path, rows_per_window: int, num_steps: int
) -> tuple[list[float], list[float]]:
    """Train a model from a folder in fp32, as :func:`train_plainly` does.

    Returns:
        The loss of each step, and the gradient norm of each step before clipping.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    return train_plainly(model, tokens_dir, rows_per_window, num_steps)


def build_plain_adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's AdamW; vectors (norms, biases) do not decay."""
    matrices = []
    vectors = []
    for parameter in parameters:
        if parameter.dim() > 1:
            matrices.append(parameter)
        else:
            vectors.append(parameter)
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def train_plainly(
    model: torch.nn.Module,
    tokens_dir: Path,
    rows_per_window: int,
    num_steps: int,
    num_ranks: int = 1,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    row_losses: RowLosses | None = None,
) -> tuple[list[float], list[float]]:
    """Train the parameters of a model that require gradients: on one device, one document at a time.

    Args:
        model: is changed.
        tokens_dir: a token dataset without a manifest.
        rows_per_window: rows of an optimizer step.
        num_steps: optimizer steps.
        num_ranks: dropout draws the numbers of so many ranks, with micro-batches of one row.
        optimizers: step together, instead of AdamW; a group's ``lr_ratio`` multiplies its learning rate.
        row_losses: computes the losses of a row, instead of :func:`document_losses`.

    Returns:
        The loss of each step, and the gradient norm of each step before clipping.
    """
    model.train()
    if row_losses is None:
        row_losses = document_losses
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizers is None:
        optimizers = [build_plain_adamw(parameters)]
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        groups.extend(optimizer.param_groups)

    rows = open_dataset(str(tokens_dir)).train.split
    windows = islice(_windows(len(rows), rows_per_window), num_steps)
    losses = []
    norms = []
    for step, window in enumerate(windows, 1):
        for group in groups:
            group["lr"] = learning_rate(step, num_steps, TrainingArguments(lr=LR)) * group.get("lr_ratio", 1.0)
        # one mean over all supervised tokens of the window: rows with more of them count more
        losses_by_row = []
        for rank in range(num_ranks):
            _seed_dropout(step, rank)
            for row in window[rank::num_ranks]:
                losses_by_row.append(row_losses(model, rows[row]))
        loss = torch.cat(losses_by_row).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def document_losses(model: torch.nn.Module, row: TokenizedRow) -> torch.Tensor:
    """Return the losses of a row's supervised tokens, fp32 [N], with a forward pass for each document.

    The row goes to torch's default device.
    """
    losses = []
    for document_ids, document_labels in split_documents(row):
        logits = model(document_ids[None]).logits[0, :-1].float()  # [length - 1, vocab]
        targets = document_labels[1:]
        token_losses = F.cross_entropy(logits, targets, ignore_index=IGNORED_LABEL, reduction="none")
        losses.append(token_losses[targets != IGNORED_LABEL])
    return torch.cat(losses)


def split_documents(row: TokenizedRow) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the token ids and the labels of each document of a row, int64 [length]."""
    starts = row["document_starts"][1:]
    documents = torch.tensor(row["input_ids"]).tensor_split(starts)
    labels = torch.tensor(row["labels"]).tensor_split(starts)
    yield from zip(documents, labels, strict=True)


def _windows(num_rows: int, rows_per_window: int) -> Iterator[list[int]]:
    """Yield the rows of each optimizer step, without end.

    An epoch has an order of its own, and its last window may be short.
    """
    for epoch in count():
        order = np.random.default_rng([_SEED, epoch]).permutation(num_rows)
        for start in range(0, num_rows, rows_per_window):
            yield order[start : start + rows_per_window].tolist()


def _seed_dropout(step: int, rank: int) -> None:
    seed_sequence = np.random.SeedSequence([_SEED, step, rank])
    torch.manual_seed(int(seed_sequence.generate_state(1)[0]))
