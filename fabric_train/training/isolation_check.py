"""Check that documents in a row do not see one another, before a run trains on rows of several documents.

Some model families ignore positions when they build masks, and convolutions and recurrent layers have no mask. So the
check compares the losses of the same document after two different documents. Both rows have the same shape, so a family
that keeps documents apart returns the same losses in any dtype. Only experts, whose matrix products depend on how
many tokens they get, round differently. The check measures this rounding: the losses of a document that comes first in
both rows differ by rounding alone, because no token sees the ones after it.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL, Batch, isolate
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.objective import losses_at_targets

_MIN_ROW_LENGTH = 4
"""The fewest tokens of a row with two documents that each have a token to predict."""
_MIN_CHECKED_LENGTH = 64
_MAX_TOKEN_ID = 1000
"""The highest id used; ids of images and other special tokens, which need more than text, are mostly higher."""
_NUM_COMPARED = 32
"""The number of losses that are compared at each end of a document, so that their logits need little memory."""
_MAX_LOSS_UNITS = 2
"""The units in the last place by which an fp32 loss may differ, because it is rounded after the logits."""
_MAX_TIMES_ROUNDING = 10
"""The largest allowed difference as a multiple of the measured rounding: flipped router decisions are few, but
large."""
_SIZE_SUFFIXES = ("_size", "_dim", "_rank", "_id", "_layers", "_heads", "_embeddings", "_experts", "_token")
"""The ends of names of settings that are sizes of tensors, not lengths of texts."""
_LENGTH_WORDS = ("window", "chunk", "block", "kernel", "conv")
"""Words in names of settings that are lengths of texts, even if the names end like a size."""


BatchLosses: TypeAlias = Callable[[Batch], torch.Tensor]
"""A function that returns the losses of the targets of a batch, [N]."""


@dataclass(frozen=True)
class _Differences:
    """A mean loss, and root mean squares of differences of losses, in nats."""

    loss: float
    """The mean loss of a document, which decides how fp32 rounds."""
    leak: float
    """The difference for a document after two different documents."""
    rounding: float
    """The difference for a document before two different documents."""
    offset: float
    """The difference between a document after another one and the same document before it."""


@torch.no_grad()
def check_isolation(
    fabric: Fabric,
    model: _FabricModule,
    source: str,
    longest_row: int,
    dtype: torch.dtype,
    compute_losses: BatchLosses | None = None,
) -> None:
    """Raise an InputError unless a model keeps documents of rows of up to ``longest_row`` tokens apart.

    All ranks call this together. The model stays in training or evaluation mode.

    Args:
        fabric: The run's Fabric.
        model: The model that ``setup_model`` returned.
        source: The name of the model, for the message.
        longest_row: The number of tokens in the longest row.
        dtype: The dtype of the model's matrix products.
        compute_losses: Computes the model's losses, if its output is neither these nor logits.
    """
    if compute_losses is None:
        compute_losses = functools.partial(_losses_of_model, model)
    fault = _find_fault(fabric, model, longest_row, dtype, compute_losses)
    if fault:
        raise InputError(
            f"--isolate_documents true: {source} ({model.config.model_type}) cannot isolate the documents of a row: "
            f"{fault}; give --isolate_documents false"
        )


def _losses_of_model(model: _FabricModule, batch: Batch) -> torch.Tensor:
    _, losses = losses_at_targets(model, batch)
    return losses


def _find_fault(
    fabric: Fabric, model: _FabricModule, longest_row: int, dtype: torch.dtype, compute_losses: BatchLosses
) -> str | None:
    """Return why a model does not keep documents apart; None if it does."""
    if "position_ids" not in inspect.signature(model.module.forward).parameters:
        return "it does not accept position ids"
    if longest_row < _MIN_ROW_LENGTH:
        return None
    differences = _measure(fabric, model, checked_length(model.config, longest_row), compute_losses)
    loss_rounding = _MAX_LOSS_UNITS * torch.finfo(torch.float32).eps * differences.loss
    is_encoder = getattr(model.config, "is_decoder", True) is False
    if is_encoder and differences.rounding > loss_rounding:
        return "its tokens attend to later tokens (a model like BERT needs is_decoder true in its config.json)"
    if differences.leak > max(loss_rounding, _MAX_TIMES_ROUNDING * differences.rounding):
        return f"the loss of a document depends on the document before it, by {differences.leak:.2g} nats per token"
    # Half of the digits: at another place in the row, the same sums have another order, in many layers.
    max_offset = torch.finfo(dtype).eps ** 0.5
    if differences.offset > max_offset:
        return f"the loss of a document depends on its position in the row, by {differences.offset:.2g} nats per token"
    return None


def checked_length(config: Any, longest_row: int) -> int:
    """Return a row length that is enough to find the faults that rows of ``longest_row`` tokens would have.

    Sliding windows, chunks of attention and kernels of convolutions only matter in rows that are longer. A checked row
    has two documents, each twice as long as the largest of these, if the run's rows are that long.
    """
    lengths = [_MIN_CHECKED_LENGTH // 4]
    for name, value in config.get_text_config().to_dict().items():
        is_size = name.endswith(_SIZE_SUFFIXES) or name.startswith(("num_", "n_"))
        if is_size and not any(word in name for word in _LENGTH_WORDS):
            continue
        if type(value) is int and value < longest_row:
            lengths.append(value)
    return min(longest_row, 4 * max(lengths))


def _measure(fabric: Fabric, model: _FabricModule, length: int, compute_losses: BatchLosses) -> _Differences:
    """Compute the losses of a document of half a row, after and before two other documents."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = np.random.default_rng(0)
    max_id = min(vocab_size, _MAX_TOKEN_ID)
    token_ids = generator.integers(1, max_id, size=2 * length)
    border = length // 2
    document = token_ids[: length - border]
    neighbour_a = token_ids[length : length + border]
    neighbour_b = token_ids[length + border : length + 2 * border]

    was_training = model.training
    model.eval()
    # flex attention is not compiled for these rows, and warns about it
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after_a = _losses_of_document(fabric, compute_losses, [neighbour_a, document], of_last=True)
        after_b = _losses_of_document(fabric, compute_losses, [neighbour_b, document], of_last=True)
        before_a = _losses_of_document(fabric, compute_losses, [document, neighbour_a], of_last=False)
        before_b = _losses_of_document(fabric, compute_losses, [document, neighbour_b], of_last=False)
    model.train(was_training)
    return _Differences(
        loss=float(before_a.mean()),
        leak=_root_mean_square(after_a - after_b),
        rounding=_root_mean_square(before_a - before_b),
        offset=_root_mean_square(after_a - before_a),
    )


def _losses_of_document(
    fabric: Fabric, compute_losses: BatchLosses, documents: list[np.ndarray], *, of_last: bool
) -> torch.Tensor:
    """Return the losses of the first and last targets of one of two documents in a row, fp32 [N], on the CPU.

    A convolution carries the previous document into the first targets, and a window only matters at the last ones.
    """
    input_ids = np.concatenate(documents)[None]  # [1, length]
    border = len(documents[0])
    if of_last:
        begin = border
        end = input_ids.shape[1]
    else:
        begin = 0
        end = border
    begin += 1  # the first token of a document is not predicted
    first_positions = np.arange(begin, min(begin + _NUM_COMPARED, end))
    last_positions = np.arange(max(begin, end - _NUM_COMPARED), end)
    compared = np.concatenate([first_positions, last_positions])
    labels = np.full_like(input_ids, IGNORED_LABEL)
    labels[:, compared] = input_ids[:, compared]
    batch = place_batch(fabric, isolate(input_ids, labels, [np.array([0, border])]))
    losses = compute_losses(batch).detach().float().cpu()
    # On XLA every position has a target, and the unsupervised ones have a loss of 0.
    if batch.targets is not None:
        losses = losses[batch.targets.ids.cpu() != IGNORED_LABEL]
    return losses


def _root_mean_square(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
