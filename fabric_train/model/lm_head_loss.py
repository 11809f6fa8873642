"""Make a causal language model return its loss, computed in its head without full logits.

Under FSDP, the head's full weight exists only inside the head's forward pass. So the loss is computed there: the head,
a linear layer, gets the targets and returns the loss instead of logits. The model's own ``forward`` stays as it is.
This works only if the model returns the head's output unchanged.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
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
            is added to ``weight.grad`` at once, where autograd would keep a tied weight's in memory until the end
            of the backward pass. Use it only if no strategy (DDP, FSDP) waits for this gradient.

    Returns:
        The sum of the losses, a 0-dim fp64 tensor that can be differentiated once; and the losses, fp32 [N], which
        cannot be differentiated.
    """
    dtype = _dtype_of_products(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        summed, losses = _SummedCrossEntropy.apply(
            hidden.flatten(0, -2), weight, bias, positions, targets, dtype, torch.is_grad_enabled(), scale
        )
    return summed, losses


class _SummedCrossEntropy(torch.autograd.Function):
    """The autograd function of ``summed_cross_entropy``; ``dtype`` is the type of the matrix products."""

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
        grad_hidden, grad_weight, grad_bias = _zeros((hidden, weight if in_place is None else None, bias), wanted)
        losses = _compute_chunks(
            *(hidden, weight, bias, positions, targets, dtype),
            totals=(grad_hidden, grad_weight if in_place is None else weight.grad, grad_bias),
            of_weight=None if in_place is None else in_place.float().expand(len(targets), 1),
        )
        if scale is not None and grad_weight is not None:  # as autograd adds it
            gradient = grad_weight.mul_(scale).to(weight.dtype)
            grad_weight = None
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.types = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)  # else the backward pass fills a gradient of the losses with zeros
        return losses.sum(dtype=torch.float64), losses

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, _: None) -> Any:
        grads = ctx.grads
        ctx.grads = None
        scaled = (
            None if grad is None else grad.mul_(grad_sum).to(kind) for grad, kind in zip(grads, ctx.types, strict=True)
        )
        return *scaled, None, None, None, None, None


def _dtype_of_products(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def token_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    targets: torch.Tensor,
    adds_in_place: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each token, fp32 [N], which can be differentiated once.

    This is for losses that give each token a weight of its own, which is known only when all are computed. So nothing
    of the chunks is kept: the backward pass computes their logits again. It needs one product with the weight more than
    :func:`summed_cross_entropy`, whose arguments these are. ``adds_in_place`` says that a gradient may be added to
    ``weight.grad`` at once, as for its ``scale``.
    """
    dtype = _dtype_of_products(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenCrossEntropy.apply(hidden.flatten(0, -2), weight, bias, positions, targets, dtype, adds_in_place)


class _TokenCrossEntropy(torch.autograd.Function):
    """The autograd function of ``token_cross_entropy``.

    FSDP gathers the saved weight again before the backward pass, as it does for a linear layer.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        positions: torch.Tensor,
        targets: torch.Tensor,
        dtype: torch.dtype,
        adds_in_place: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, positions, targets)
        is_possible = adds_in_place and ctx.needs_input_grad[1] and weight.dtype == dtype == torch.float32
        ctx.dtype = dtype
        ctx.parameter = weight if is_possible else None
        return _compute_chunks(hidden, weight, bias, positions, targets, dtype)

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> Any:
        hidden, weight, bias, positions, targets = ctx.saved_tensors
        parameter = ctx.parameter
        if parameter is not None and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        inputs = (hidden, weight if parameter is None else None, bias)
        grads = _zeros(inputs, ctx.needs_input_grad[:3])
        total = grads[1] if parameter is None else parameter.grad
        of_tokens = grad_losses.float()[:, None]
        _compute_chunks(
            *(hidden, weight, bias, positions, targets, ctx.dtype),
            totals=(grads[0], total, grads[2]),
            of_hidden=of_tokens,
            of_weight=of_tokens,
        )
        typed = [None if grad is None else grad.to(of.dtype) for grad, of in zip(grads, inputs, strict=True)]
        return *typed, None, None, None, None


def _zeros(
    tensors: tuple[torch.Tensor | None, ...], wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return fp32 zeros like each of three tensors that is there and wanted, else None."""
    first, second, third = (
        torch.zeros_like(tensor, dtype=torch.float32) if is_wanted and tensor is not None else None
        for tensor, is_wanted in zip(tensors, wanted, strict=True)
    )
    return first, second, third


def _compute_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype,
    totals: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    of_hidden: torch.Tensor | None = None,
    of_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the losses, fp32 [N], and add their gradients to fp32 ``totals`` of hidden states, weight and bias.

    ``totals`` that are None are not computed. The gradient of each token is multiplied by its ``of_hidden``, fp32
    [N, 1], for the hidden states and the bias, and by its ``of_weight`` for the weight; None is 1. Each position's
    hidden state is written, not added to.
    """
    grad_hidden, grad_weight, grad_bias = totals
    wants_gradient = any(total is not None for total in totals)
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
        losses[chunk] = _token_losses(logits, targets[chunk], wants_gradient)
        grad_logits = logits
        if grad_hidden is not None:
            product = (grad_logits @ cast_weight).float()
            grad_hidden.index_copy_(0, positions[chunk], product if of_hidden is None else product * of_hidden[chunk])
        if grad_weight is not None:
            scaled = inputs if of_weight is None else (inputs * of_weight[chunk]).to(dtype)
            _add_product(grad_weight, grad_logits.t(), scaled)
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0) if of_hidden is None else of_hidden[chunk, 0].to(dtype) @ grad_logits
    return losses


def _chunk_size(num_tokens: int, vocab_size: int, device_type: str, dtype: torch.dtype) -> int:
    """Return the tokens of a chunk; chunks have nearly equal sizes."""
    works_in_place = dtype == torch.float32 or (device_type == "cuda" and _has_liger())
    bytes_per_logit = dtype.itemsize if works_in_place else dtype.itemsize + 4
    most = max(1, _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cuda"]) // (bytes_per_logit * vocab_size))
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks))


def _token_losses(logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool) -> torch.Tensor:
    """Return the fp32 losses [N] of logits [N, V], and write the gradient of their sum over the logits.

    Without ``wants_gradient``, the values in ``logits`` afterwards have no meaning.
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

    ``targets`` [N] int64 are the token ids to predict at ``positions`` [N] int64 of the flattened batch. With
    ``by_token=True`` the model returns what ``token_cross_entropy`` returns. Other calls of the model stay as they are.
    Call this before the model is wrapped; its weights may still be on the meta device. With ``grad_in_place``, only if
    nothing wraps the model, ``scale=`` is passed on.

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
        by_token: bool = False,
        **kwargs: Any,
    ) -> Any:
        if positions is None or targets is None:
            return forward(*args, **kwargs)
        of_tokens: list[torch.Tensor] = []  # the head returns one tensor, which the model takes for logits

        def compute(hidden: torch.Tensor) -> torch.Tensor:
            of_head = (hidden, head.weight, head.bias, positions, targets)
            if by_token:
                return token_cross_entropy(*of_head, adds_in_place=grad_in_place)
            summed, losses = summed_cross_entropy(*of_head, scale if grad_in_place else None)
            of_tokens.append(losses)
            return summed

        in_head.compute = compute
        try:
            loss = forward(*args, **kwargs).logits
            return loss if by_token else (loss, of_tokens[0])
        finally:
            in_head.compute = None

    model.forward = forward_with_loss
    model.has_loss_in_head = True
    return True


def has_loss_in_head(model: Any) -> bool:
    """Whether ``compute_loss_in_head`` changed a model, wrapped by Fabric or not."""
    return getattr(model, "has_loss_in_head", False)


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
    base = model.base_model
    weight = model.get_output_embeddings().weight
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
