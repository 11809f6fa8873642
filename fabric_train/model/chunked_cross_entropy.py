"""Cross entropy of a linear head, a chunk of tokens at a time, so that no more than a chunk's logits ever exist.

The gradients are computed along with the loss, while a chunk's logits are at hand: three matrix products in all, as
with whole logits, where computing them in the backward pass would take a fourth (as in arXiv:2410.10989). They are
those of the plain sum, and the backward pass only multiplies them by what that sum weighs.
"""

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""Of a chunk's logits in fp32, at most. Every chunk reads the weight and reads and writes its gradient once more; so
few large ones are faster, until their logits are what memory is short of.
"""


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of ``hidden @ weight.T + bias`` at some positions, summed over them.

    Under autocast the products are computed in its type, as a linear layer's are.

    Args:
        hidden: [..., H], what enters the head.
        weight: [V, H].
        bias: [V], or None.
        positions: [N] int64, in ``hidden`` flattened to [positions, H], each at most once.
        targets: [N] int64, the ids to predict there.
        scale: what the caller is going to multiply the sum by, 0-dim, on the same device. With it the gradient is
            added to ``weight.grad`` here and now, and not by the backward pass: autograd would hold back that of a
            weight which is also the embedding's until the embedding's is there, at the end. Only for a parameter
            that no strategy waits for the gradient of.

    Returns:
        A 0-dim fp64 tensor, the sum of fp32 losses. It can be differentiated once.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    with torch.autocast(kind, enabled=False):
        summed: torch.Tensor = _SummedCrossEntropy.apply(
            hidden.flatten(0, -2), weight, bias, positions, targets, dtype, torch.is_grad_enabled(), scale
        )
    return summed


class _SummedCrossEntropy(torch.autograd.Function):
    """See ``summed_cross_entropy``; ``dtype`` is that of the products, and ``has_backward`` says whether gradients are
    asked for at all.
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
        has_backward: bool,
        scale: torch.Tensor | None,
    ) -> torch.Tensor:
        wanted = [has_backward and needed for needed in ctx.needs_input_grad[:3]]
        in_place = scale if wanted[1] and weight.dtype == dtype == torch.float32 else None
        if in_place is not None and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        grad_hidden, grad_weight, grad_bias = (
            torch.zeros_like(tensor, dtype=torch.float32) if is_wanted and tensor is not None else None
            for tensor, is_wanted in zip((hidden, weight if in_place is None else None, bias), wanted, strict=True)
        )
        total = grad_weight if in_place is None else weight.grad
        factors = weight.to(dtype)
        losses = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        rows = _rows_of_chunk(len(targets), len(weight), hidden.device.type)
        buffer = torch.empty(rows, len(weight), dtype=dtype, device=hidden.device)
        for begin in range(0, len(targets), rows):
            chunk = slice(begin, begin + rows)
            inputs = hidden.index_select(0, positions[chunk]).to(dtype)
            logits = torch.mm(inputs, factors.t(), out=buffer[: len(inputs)])
            if bias is not None:
                logits += bias
            losses[chunk], grad_logits = _token_losses(logits, targets[chunk], any(wanted))
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, positions[chunk], (grad_logits @ factors).float())
            if total is not None:
                _add_product(total, grad_logits.t(), inputs if in_place is None else inputs * in_place)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        if scale is not None and grad_weight is not None:
            _accumulate(weight, grad_weight.mul_(scale).to(weight.dtype))
            grad_weight = None
        ctx.grads = grad_hidden, grad_weight, grad_bias
        ctx.types = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        return losses.sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        scaled = (
            None if grad is None else grad.mul_(grad_sum).to(kind) for grad, kind in zip(grads, ctx.types, strict=True)
        )
        return *scaled, None, None, None, None, None


def _rows_of_chunk(num_rows: int, vocabulary: int, kind: str) -> int:
    """Rows of a chunk, so that chunks are nearly equal."""
    most = max(1, _CHUNK_BYTES.get(kind, _CHUNK_BYTES["cuda"]) // (4 * vocabulary))
    num_chunks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_chunks))


def _accumulate(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add to a weight's gradient as autograd does."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


def _token_losses(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses, fp32 [N], of logits [N, V], and the gradient of their sum in the logits' type, which may be
    written over them; without ``wants_gradient``, the logits or anything else.
    """
    if logits.is_cuda and _has_liger():
        return _liger_losses(logits, targets, wants_gradient)
    if logits.dtype == torch.float32:  # row by row, so that it can be written over what it reads
        log_probabilities = torch.ops.aten._log_softmax.out(logits, 1, False, out=logits)
    else:
        log_probabilities = F.log_softmax(logits, dim=1, dtype=torch.float32)
    at_targets = targets[:, None]
    losses = -log_probabilities.gather(1, at_targets)[:, 0]
    if not wants_gradient:
        return losses, logits
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, at_targets, gradient.new_full(at_targets.shape, -1))
    return losses, gradient.to(logits.dtype)


@functools.cache
def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _liger_losses(
    logits: torch.Tensor, targets: torch.Tensor, wants_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by liger-kernel's Triton kernel, which reads the logits twice and writes the gradient over them. Its own
    function for the whole head waits for the device in every call, and sums the losses in fp32.
    """
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=1,
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=logits.shape[1],
        n_non_ignore=1,  # what a mean would be divided by, read on the host
        sum_non_ignore_weight=1,
        weight_sum=0.0,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="sum",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (logits.shape[1] - 1).bit_length()),
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=wants_gradient,
        num_warps=32,
    )
    return losses, logits


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to a total in fp32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
