"""Make a causal language model return its loss, computed in its head without full logits.

Under FSDP, the head's full weight exists only inside the head's forward pass. So the loss is computed there: the head,
a linear layer, gets the targets and returns the loss instead of logits. The model's own ``forward`` stays as it is.
This works only if the model returns the head's output unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from fabric_train.model.chunked_cross_entropy import summed_cross_entropy


def compute_loss_in_head(model: Any, grad_in_place: bool = False) -> bool:
    """Make ``model(..., positions=, targets=)`` return what ``summed_cross_entropy`` returns.

    ``targets`` [N] int64 are the token ids to predict at ``positions`` [N] int64 of the flattened batch. Other calls of
    the model stay as they are. Call this before the model is wrapped; its weights may still be on the meta device.

    Args:
        model: A causal language model of transformers.
        grad_in_place: Whether to pass ``scale=``, if the model gets it, to ``summed_cross_entropy``. Only if nothing
            wraps the model.

    Returns:
        Whether the model was changed. It is left alone if its logits are not exactly ``head(hidden)``, for example
        because they are capped or scaled, or if this cannot be determined.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        return False
    in_head: Any = _HeadForward(head)
    forward: Callable[..., Any] = model.forward
    head.forward = in_head  # type: ignore[method-assign]
    if not _returns_head_output(model, in_head):
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
        of_tokens: list[torch.Tensor] = []  # the head returns one tensor, which the model takes for logits

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            given = scale if grad_in_place else None
            summed, losses = summed_cross_entropy(hidden, head.weight, head.bias, positions, targets, given)
            of_tokens.append(losses)
            return summed

        in_head.compute = compute
        try:
            return forward(*args, **kwargs).logits, of_tokens[0]
        finally:
            in_head.compute = None

    model.forward = forward_with_loss
    model.has_loss_in_head = True
    return True


def has_loss_in_head(model: Any) -> bool:
    """Return whether ``compute_loss_in_head`` changed a model, wrapped by Fabric or not."""
    return getattr(model, "has_loss_in_head", False)


def use_sparse_embedding_grad(model: Any) -> None:
    """Add the gradient of a tied fp32 embedding only to the rows of the batch's tokens.

    This avoids a gradient matrix [V, H] in addition to the head's, which ``grad_in_place`` has written. Not for a GPU:
    it adds the rows in any order, so the last bits would differ from run to run.
    """
    embedding = model.get_input_embeddings()
    weight = model.get_output_embeddings().weight
    if type(embedding) is nn.Embedding and embedding.weight is weight and weight.dtype == torch.float32:
        embedding.sparse = True  # autograd adds a sparse gradient to a dense one in place


class _HeadForward:
    """A replacement of a head's ``forward``. It calls ``compute`` if that is set, else it returns logits."""

    def __init__(self, head: nn.Linear) -> None:
        self._forward = head.forward
        self.compute: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.compute(hidden) if self.compute else self._forward(hidden)


class _HiddenStates(BaseModelOutputWithPast):
    """The output of a base model, with hidden states only."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _returns_head_output(model: Any, in_head: _HeadForward) -> bool:
    """Return whether the model's logits are the head's output itself, and not computed from it."""
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
