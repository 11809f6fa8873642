"""Make a causal language model return its loss, computed in its head without full logits.

Under FSDP, the head's full weight exists only inside the head's forward pass. So the loss is computed there: the head,
a linear layer, gets the targets and returns the loss instead of logits. The model's own ``forward`` stays as it is.
This works only if the model returns the head's output unchanged.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""The most bytes of a chunk's logits and fp32 log-probabilities. Few are faster, because each reads the weight."""
_traced_device: str | None = None


@contextmanager
def traced_as(device_type: str) -> Iterator[None]:
    """Let fake CPU tensors take the memory that tensors on a device of this type would take."""
    global _traced_device
    _traced_device = device_type
    try:
        yield
    finally:
        _traced_device = None


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of ``hidden @ weight.T + bias`` at the given positions, its sum and each token's.

    Under autocast, the matrix products use its dtype, as in a linear layer.

    Args:
        hidden: [..., H], the input of the head.
        weight: [V, H], with a ``bias`` [V] or None.
        positions: [N] int64, indices into ``hidden`` flattened to [positions, H], without repeats.
        targets: [N] int64, the token ids to predict there.
        scale: The factor by which the caller will multiply the sum, 0-dim, on the same device. If given, the gradient
            is added to ``weight.grad`` at once, where autograd would keep that of a tied weight in memory until the end
            of the backward pass. Use it only if no strategy (DDP, FSDP) waits for this gradient.

    Returns:
        The sum of the losses, a 0-dim fp64 tensor that can be differentiated once; and the losses, fp32 [N], which
        cannot be differentiated.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        summed, losses = _SummedCrossEntropy.apply(
            hidden.flatten(0, -2), weight, bias, positions, targets, dtype, torch.is_grad_enabled(), scale
        )
    return summed, losses


class _SummedCrossEntropy(torch.autograd.Function):
    """The autograd function of ``summed_cross_entropy``; ``dtype`` is that of the matrix products."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        positions: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        has_backward: bool,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [has_backward and needed for needed in ctx.needs_input_grad[:3]]
        in_place = scale if wanted[1] and weight.dtype == dtype == torch.float32 else None
        if in_place is not None and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=torch.float32) if is_wanted and tensor is not None else None
            for tensor, is_wanted in zip((hidden, weight if in_place is None else None, bias), wanted, strict=True)
        )
        total = grad_weight if in_place is None else weight.grad
        cast_weight = weight.to(dtype)
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        chunk_size = _chunk_size(len(targets), len(weight), _traced_device or hidden.device.type, dtype)
        buffer = torch.empty(chunk_size, len(weight), dtype=dtype, device=hidden.device)
        for begin in range(0, len(targets), chunk_size):
            chunk = slice(begin, begin + chunk_size)
            inputs = hidden.index_select(0, positions[chunk]).to(dtype)
            logits = torch.mm(inputs, cast_weight.t(), out=buffer[: len(inputs)])
            if bias is not None:
                logits += bias
            losses[chunk] = _token_losses(logits, targets[chunk], any(wanted))
            grad_logits = logits
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, positions[chunk], (grad_logits @ cast_weight).float())
            if total is not None:
                _add_product(total, grad_logits.t(), inputs if in_place is None else inputs * in_place)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        if scale is not None and grad_weight is not None:  # as autograd adds it
            gradient, grad_weight = grad_weight.mul_(scale).to(weight.dtype), None
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.types = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)  # else the backward pass fills a gradient of the losses with zeros
        return losses.sum(dtype=torch.float64), losses

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, _: None) -> Any:
        grads, ctx.grads = ctx.grads, None
        scaled = (
            None if grad is None else grad.mul_(grad_sum).to(kind) for grad, kind in zip(grads, ctx.types, strict=True)
        )
        return *scaled, None, None, None, None, None


def _chunk_size(num_tokens: int, vocab_size: int, device_type: str, dtype: torch.dtype) -> int:
    """Return the tokens of a chunk; chunks have nearly equal sizes."""
    works_in_place = dtype == torch.float32 or (device_type == "cuda" and _has_liger())
    bytes_per_logit = dtype.itemsize if works_in_place else dtype.itemsize + 4
    most = max(1, _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cuda"]) // (bytes_per_logit * vocab_size))
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks))


def _token_losses(logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
    """Return the fp32 losses [N] of logits [N, V], and write the gradient of their sum over the logits.

    Without ``wants_gradient``, what is in ``logits`` afterwards has no meaning.
    """
    if logits.is_cuda and _has_liger():
        return _liger_losses(logits, targets, wants_gradient)
    log_probabilities = logits.float()
    # it works row by row, so it can write over its input
    torch.ops.aten._log_softmax.out(log_probabilities, 1, False, out=log_probabilities)
    at_targets = targets[:, None]
    of_targets = log_probabilities.gather(1, at_targets)
    if wants_gradient:
        torch.exp(log_probabilities, out=logits)  # rounds once, to the logits' dtype
        logits.scatter_(1, at_targets, (of_targets.exp() - 1).to(logits.dtype))
    return -of_targets[:, 0]


@functools.cache
def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _liger_losses(logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
    """Do as ``_token_losses`` does. liger-kernel's loss of the whole head waits for the device, and sums in fp32."""
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    unused = dict.fromkeys(("weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr", "softcap"))
    unused |= dict.fromkeys(("token_accuracy_stride", "predicted_tokens_stride"), 0)
    unused |= dict.fromkeys(("weight_sum", "lse_square_scale", "label_smoothing"), 0.0)
    unused |= dict.fromkeys(("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"), False)
    liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=1,
        loss_ptr=losses,
        loss_stride=1,
        n_cols=logits.shape[1],
        n_non_ignore=1,  # the divisor of a mean
        sum_non_ignore_weight=1,
        ignore_index=-100,
        reduction="sum",
        BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (logits.shape[1] - 1).bit_length()),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=wants_gradient,
        num_warps=32,
        **unused,
    )
    return losses


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to an fp32 total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _traced_device == "cuda":
        pass  # takes no memory; torch 2.11 fails at this product of fake tensors
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def compute_loss_in_head(model: Any, grad_in_place: bool = False) -> bool:
    """Make ``model(..., positions=, targets=)`` return what ``summed_cross_entropy`` returns.

    ``targets`` [N] int64 are the token ids to predict at ``positions`` [N] int64 of the flattened batch. Other calls of
    the model stay as they are. Call this before the model is wrapped; its weights may still be on the meta device. With
    ``grad_in_place``, only if nothing wraps the model, ``scale=`` is passed on.

    Return whether the model was changed. It is left alone if its logits are not exactly ``head(hidden)``, for example
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
    """Whether ``compute_loss_in_head`` changed a model, wrapped by Fabric or not."""
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
