"""Check that documents of one row do not see each other, before a run trains on such rows.

Some model families ignore positions when they build masks, and convolutions and recurrent layers have no mask. So the
check compares the losses of the same document after two different documents. Both rows have the same shape, so a family
that keeps documents apart returns the same losses, in any dtype. Only experts, whose matrix products depend on how
many tokens they get, round differently. How much is measured: the losses of a document that comes first in both rows
differ by rounding alone, because no token sees the ones after it.
"""

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning import Fabric

from fabric_train.cli.errors import InputError
from fabric_train.data.batch import IGNORED_LABEL, isolate
from fabric_train.model.context_parallel import place_batch
from fabric_train.training.objective import losses_at_targets

_SHORTEST = 4
"""Tokens of two documents of which each has a token to predict."""
_MIN_LENGTH = 64
_MAX_ID = 1000
"""Ids of images and other special tokens, which need more than text, are mostly high ones."""
_COMPARED = 32
"""The losses that are compared at the start of a document, and at its end: their logits need little memory."""
_UNITS_OF_LOSS = 2
"""Units in the last place by which an fp32 loss may differ: it is rounded after the logits."""
_TIMES_ROUNDING = 10
"""How many times the measured rounding a difference may be: router decisions that flip are few, and large."""
_SAYS_NOTHING = ("_size", "_dim", "_rank", "_id", "_layers", "_heads", "_embeddings", "_experts", "_token")
"""Ends of names in a configuration that are sizes of tensors, and no lengths of texts."""
_LENGTHS = ("window", "chunk", "block", "kernel", "conv")
"""Words in names that are lengths of texts, also if they end like a size."""


@dataclass(frozen=True)
class _Differences:
    """A mean loss, and root mean squares of differences of losses, in nats."""

    loss: float  # the mean of a document, which has the rounding of its size
    leak: float  # a document after two different documents
    rounding: float  # a document before two different documents
    offset: float  # a document after another document, and the same before it


@torch.no_grad()
def check_isolation(fabric: Fabric, model: Any, source: str, longest_row: int, dtype: torch.dtype) -> None:
    """Raise an InputError unless a model keeps documents of rows of up to ``longest_row`` tokens apart.

    ``dtype`` is the one of its matrix products. All ranks call it. The model is in training mode, before and after.
    """
    fault = _fault(fabric, model, longest_row, dtype)
    if fault:
        raise InputError(
            f"--isolate_documents true: {source} ({model.config.model_type}) cannot keep the documents of a row apart: "
            f"{fault}; give --isolate_documents false"
        )


def _fault(fabric: Fabric, model: Any, longest_row: int, dtype: torch.dtype) -> str | None:
    if "position_ids" not in inspect.signature(model.module.forward).parameters:
        return "it takes no positions"
    if longest_row < _SHORTEST:
        return None
    differences = _measure(fabric, model, checked_length(model.config, longest_row))
    same = _UNITS_OF_LOSS * torch.finfo(torch.float32).eps * differences.loss
    if getattr(model.config, "is_decoder", True) is False and differences.rounding > same:
        return "its tokens see the tokens after them; a model like BERT needs is_decoder true in its config.json"
    if differences.leak > max(same, _TIMES_ROUNDING * differences.rounding):
        return f"the loss of a document depends on the document before it, by {differences.leak:.2g} nats a token"
    by_place = torch.finfo(dtype).eps ** 0.5  # half of the digits: the same sums in another order, in many layers
    if differences.offset > by_place:
        return f"the loss of a document depends on its place in the row, by {differences.offset:.2g} nats a token"
    return None


def checked_length(config: Any, longest_row: int) -> int:
    """Return a length of rows that is enough to see what rows of ``longest_row`` tokens would.

    Sliding windows, chunks of attention and kernels of convolutions count only in rows that are longer. Two documents
    of twice the largest of them share the checked rows, or as much of that as the run's rows have.
    """
    lengths = [_MIN_LENGTH // 4]
    for name, value in config.get_text_config().to_dict().items():
        is_size = name.endswith(_SAYS_NOTHING) or name.startswith(("num_", "n_"))
        if is_size and not any(word in name for word in _LENGTHS):
            continue
        if type(value) is int and value < longest_row:
            lengths.append(value)
    return min(longest_row, 4 * max(lengths))


def _measure(fabric: Fabric, model: Any, length: int) -> _Differences:
    """Compute a document of half a row after and before two other documents."""
    vocab_size = model.config.get_text_config().vocab_size
    generator = np.random.default_rng(0)
    ids = generator.integers(1, min(vocab_size, _MAX_ID), size=2 * length)
    border = length // 2
    document = ids[: length - border]
    first = ids[length : length + border]
    other = ids[length + border :][:border]

    def losses(row: list[np.ndarray], of_last: bool) -> torch.Tensor:
        return _losses(fabric, model, row, of_last)

    model.eval()
    # flex attention is not compiled for these rows, and warns about it
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        after_first = losses([first, document], of_last=True)
        after_other = losses([other, document], of_last=True)
        before_first = losses([document, first], of_last=False)
        before_other = losses([document, other], of_last=False)
    model.train()
    return _Differences(
        loss=float(before_first.mean()),
        leak=_distance(after_first, after_other),
        rounding=_distance(before_first, before_other),
        offset=_distance(after_first, before_first),
    )


def _losses(fabric: Fabric, model: Any, row: list[np.ndarray], of_last: bool) -> torch.Tensor:
    """Return the losses of the first and last targets of one of two documents in a row, fp32 [N].

    A convolution carries the document before into the first ones, and a window counts only at the last ones.
    """
    input_ids = np.concatenate(row)[None]
    border = len(row[0])
    begin, end = (border, input_ids.shape[1]) if of_last else (0, border)
    labels = np.full_like(input_ids, IGNORED_LABEL)
    begin += 1  # the first token of a document is not predicted
    compared = np.r_[begin : min(begin + _COMPARED, end), max(begin, end - _COMPARED) : end]
    labels[:, compared] = input_ids[:, compared]
    batch = place_batch(fabric, isolate(input_ids, labels, [np.array([0, border])]))
    _, losses = losses_at_targets(model, batch)
    return losses.detach().float()


def _distance(losses: torch.Tensor, others: torch.Tensor) -> float:
    return float((losses - others).square().mean().sqrt())
