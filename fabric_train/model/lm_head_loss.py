"""A causal language model that returns its loss: computed inside its head, where alone the head's weight is whole under
FSDP, and without logits.

A family's own ``forward`` stays what it is. Only its head, a linear layer, is told what is to be predicted, and gives
the loss back in the place of logits; so whatever a family does to its logits must be nothing at all.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from fabric_train.model.chunked_cross_entropy import summed_cross_entropy


def let_head_compute_loss(model: Any, at_once: bool = False) -> bool:
    """Let ``model(..., positions=, targets=)`` return the summed cross entropy of ``targets`` [N] int64 at
    ``positions`` [N] int64 of the flattened batch, a 0-dim fp64 tensor, and leave other calls as they are.

    Call it before the model is wrapped; its weights need not be there. Under FSDP the head may be a unit or the root's.

    Args:
        model: see above.
        at_once: whether a ``scale`` that is given too goes to ``summed_cross_entropy``; where nothing wraps the model.

    Returns:
        Whether it is so: not where the logits are not just ``head(hidden)``, because they are capped or scaled, or
        where that cannot be found out. The model is left alone then.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        return False
    in_head: Any = _InHead(head)
    forward: Callable[..., Any] = model.forward
    head.forward = in_head  # type: ignore[method-assign]
    if not _returns_what_head_returns(model, in_head):
        del head.forward
        return False

    @functools.wraps(forward)
    def forward_with_loss(
        *args: Any,
        positions: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if positions is None or targets is None:
            return forward(*args, **kwargs)
        in_head.compute = lambda hidden: summed_cross_entropy(
            hidden, head.weight, head.bias, positions, targets, scale if at_once else None
        )
        try:
            return forward(*args, **kwargs).logits
        finally:
            in_head.compute = None

    model.forward = forward_with_loss
    model.returns_loss = True
    return True


def returns_loss(model: Any) -> bool:
    """Whether a model, wrapped by Fabric or not, has been changed by ``let_head_compute_loss``."""
    return getattr(model, "returns_loss", False)


def add_rows_of_tokens(model: Any) -> None:
    """Have the gradient of an fp32 embedding that is also the head, which computes its own ``at_once``, added to the
    head's in the rows of a batch's tokens alone, without a matrix of the vocabulary's size.

    On a GPU the rows would be added in any order, so that the last bits would not be the same twice.
    """
    embedding = model.get_input_embeddings()
    weight = model.get_output_embeddings().weight
    if type(embedding) is nn.Embedding and embedding.weight is weight and weight.dtype == torch.float32:
        embedding.sparse = True  # autograd adds a sparse gradient to a dense one in place


class _InHead:
    """Stands in for a head's ``forward``; ``compute`` is what it does instead in this call, None for logits."""

    def __init__(self, head: nn.Linear) -> None:
        self._forward = head.forward
        self.compute: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute(hidden) if self.compute else self._forward(hidden)


class _HiddenStates(BaseModelOutputWithPast):
    """What a base model returns, of which nothing but the hidden states is there."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _returns_what_head_returns(model: Any, in_head: _InHead) -> bool:
    """Whether the model's logits are its head's result itself, and not computed from it."""
    base, weight = model.base_model, model.get_output_embeddings().weight
    if base is model:
        return False
    marker = weight.new_zeros(())
    hidden = weight.new_zeros(1, 2, weight.shape[1])
    in_head.compute = lambda _: marker
    base.forward = lambda *_, **__: _HiddenStates(last_hidden_state=hidden)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
        return model(input_ids=ids, use_cache=False).logits is marker
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # it needs more than hidden states
        return False
    finally:
        del base.forward
        in_head.compute = None
