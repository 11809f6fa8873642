"""Make a causal language model return its loss, computed in its head without full logits.

Under FSDP, the head's full weight exists only inside the head's forward pass. So the loss is computed there: the head,
a linear layer, gets the targets and returns the loss instead of logits. The model's own ``forward`` stays as it is.
This works only if the model returns the head's output unchanged.

The loss is the cross entropy, or another :class:`TokenLoss`.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

_CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""The most bytes of a chunk's logits and fp32 log-probabilities. Fewer chunks are faster: each one reads the weight."""
_FROZEN_LOGITS_BYTES = 128 << 20
"""The most bytes of a chunk's logits on a GPU if the head is frozen.

Such a chunk reads the weight, but adds to no fp32 gradient of the weight's size. At 128,256 tokens in the vocabulary it
has 523 tokens. An H100 needs about 300 (989 TFLOP/s by 3.35 TB/s) to be limited by arithmetic and not by that read.
"""
_LOG_PROBABILITIES_BYTES = 64 << 20
"""The most bytes of fp32 log-probabilities at a time on a GPU, unless they are written over the logits."""
_TOKEN_LOSS_BYTES = 640 << 20
"""The most bytes that a loss with a ``bytes_per_logit`` takes at a time on a GPU, in addition to the chunk's logits.

A distillation multiplies with the teacher's head for each such slice of a chunk, and so reads it that many times. With
128,256 tokens in the vocabulary, a slice has 163 tokens, and 8,192 tokens have 51 slices.
"""


@dataclass(frozen=True)
class _ChunkSettings:
    """The settings for computing chunks."""

    dtype: torch.dtype
    """The dtype of the matrix products."""
    memory_device: str
    """The type of the device whose memory limits the size of a chunk."""
    is_frozen: bool = False
    """Whether the head does not train."""
    loss_bytes_per_logit: int = 0
    """See ``TokenLoss.bytes_per_logit``."""

    @property
    def saves_memory(self) -> bool:
        """Whether chunks have ``_FROZEN_LOGITS_BYTES``."""
        return self.is_frozen and self.memory_device != "cpu"

    @property
    def works_in_place(self) -> bool:
        """Whether the log-probabilities of the cross entropy are written over the logits."""
        return self.dtype == torch.float32 or (self.memory_device == "cuda" and _has_liger())


@dataclass
class _Gradients:
    """The fp32 sums to which each chunk adds its gradients; None for a gradient that is not needed."""

    hidden: torch.Tensor | None = None  # [positions, H]
    weight: torch.Tensor | None = None  # [V, H]
    bias: torch.Tensor | None = None  # [V]


class TokenLoss(Protocol):
    """A loss of single tokens, computed from the logits of a chunk of them. N is the number of tokens."""

    @property
    def num_values(self) -> int:
        """The number of values of each token: its loss, and figures that are not differentiated."""

    @property
    def bytes_per_logit(self) -> int:
        """The memory that ``compute`` needs for each logit, in bytes; 0 if it is as much as for the cross entropy."""

    def __len__(self) -> int:
        """Return N."""

    def compute(self, logits: torch.Tensor, chunk: slice, needs_gradient: bool) -> torch.Tensor:
        """Return the values of the tokens of a chunk, fp32 [num_values, C], with their losses first.

        Args:
            logits: The logits of the chunk [C, V]. With ``needs_gradient``, the gradient of the sum of the losses is
                written over them; otherwise they have no meaning afterwards.
            chunk: The indices of its C tokens among the N tokens.
            needs_gradient: Whether there will be a backward pass.
        """


@dataclass(frozen=True)
class TargetCrossEntropy:
    """The cross entropy of the target tokens, int64 [N]."""

    targets: torch.Tensor
    num_values = 1
    bytes_per_logit = 0

    def __len__(self) -> int:
        return len(self.targets)

    def compute(self, logits: torch.Tensor, chunk: slice, needs_gradient: bool) -> torch.Tensor:
        """Return the losses of a chunk, fp32 [1, C], see ``TokenLoss.compute``."""
        return _token_losses(logits, self.targets[chunk], needs_gradient)[None]


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    targets: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    memory_device: str | None = None,
    is_frozen: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross entropy of ``hidden @ weight.T + bias`` at the given positions, its sum and each token's.

    Under autocast, the matrix products use its dtype, as in a linear layer.

    Args:
        hidden: [..., H], the input of the head.
        weight: [V, H], with a ``bias`` [V] or None.
        positions: [N] int64, indices into ``hidden`` flattened to [positions, H], without repeats.
        targets: [N] int64, the token ids to predict there.
        scale: The factor by which the caller will multiply the sum, 0-dim, on the same device. If it is given, the
            gradient is added to ``weight.grad`` immediately, where autograd would keep a tied weight's gradient in
            memory until the end of the backward pass. Use it only if no strategy (DDP, FSDP) waits for this gradient.
        memory_device: The type of the device whose memory limits the size of a chunk; None: the device of ``hidden``. A
            trace of memory on fake CPU tensors gives the device that it stands for.
        is_frozen: Whether the head does not train. Then chunks on a GPU are smaller.

    Returns:
        The sum of the losses, a 0-dim fp64 tensor that can be differentiated once; and the losses, fp32 [N], which
        cannot be differentiated.
    """
    loss_sum, values = summed_token_loss(
        hidden,
        weight,
        bias,
        positions,
        TargetCrossEntropy(targets),
        scale=scale,
        memory_device=memory_device,
        is_frozen=is_frozen,
    )
    return loss_sum, values[0]


def summed_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    token_loss: TokenLoss,
    *,
    scale: torch.Tensor | None = None,
    memory_device: str | None = None,
    is_frozen: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a loss of ``hidden @ weight.T + bias`` at the given positions, and the values of each token.

    The other arguments are those of :func:`summed_cross_entropy`.

    Returns:
        The sum of the losses, a 0-dim fp64 tensor that can be differentiated once; and the values, fp32
        [num_values, N], which cannot be differentiated.
    """
    settings = _ChunkSettings(
        _product_dtype(hidden), memory_device or hidden.device.type, is_frozen, token_loss.bytes_per_logit
    )
    with torch.autocast(hidden.device.type, enabled=False):
        loss_sum, values = _SummedTokenLoss.apply(
            hidden.flatten(0, -2), weight, bias, positions, token_loss, settings, torch.is_grad_enabled(), scale
        )
    return loss_sum, values


class _SummedTokenLoss(torch.autograd.Function):
    """The autograd function of ``summed_token_loss``. Its forward pass computes the gradients too.

    The logits of a chunk exist only in the forward pass, so the gradient is computed from them there. The backward pass
    only multiplies the gradients by the gradient of the sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        positions: torch.Tensor,
        token_loss: TokenLoss,
        settings: _ChunkSettings,
        has_backward: bool,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the losses and, if there will be a backward pass, the gradients of their sum.

        ``hidden`` is [positions, H]; the other arguments are those of ``summed_token_loss``.
        """
        needs_hidden, needs_weight, needs_bias = (has_backward and needs for needs in ctx.needs_input_grad[:3])

        # With a scale, chunks add to the gradient of an fp32 weight itself. A 16-bit one would round each sum.
        is_fp32 = weight.dtype == settings.dtype == torch.float32
        adds_to_weight_grad = scale is not None and needs_weight and is_fp32
        gradients = _Gradients()
        weight_scale = None
        if needs_hidden:
            gradients.hidden = torch.zeros_like(hidden, dtype=torch.float32)
        if bias is not None and needs_bias:
            gradients.bias = torch.zeros_like(bias, dtype=torch.float32)
        if adds_to_weight_grad:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients.weight = weight.grad
            assert scale is not None
            weight_scale = scale.float().expand(len(token_loss), 1)
        elif needs_weight:
            gradients.weight = torch.zeros_like(weight, dtype=torch.float32)

        values = _compute_chunks(
            hidden,
            weight,
            bias,
            positions,
            token_loss,
            settings,
            gradients=gradients,
            weight_scale=weight_scale,
        )

        if adds_to_weight_grad:
            gradients.weight = None  # it is in weight.grad
        elif scale is not None and gradients.weight is not None:
            scaled = gradients.weight.mul_(scale).to(weight.dtype)
            gradients.weight = None  # its memory is free now
            if weight.grad is None:
                weight.grad = scaled
            else:
                weight.grad.add_(scaled)  # as autograd adds it
        ctx.gradients = gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden, weight, bias)]
        ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)  # else the backward pass fills a gradient of the values with zeros
        return values[0].sum(dtype=torch.float64), values

    @staticmethod
    def backward(ctx: Any, grad_sum: torch.Tensor, _: None) -> Any:
        """Multiply the gradients by the gradient of the sum, 0-dim; the values of tokens have none."""
        gradients: _Gradients = ctx.gradients
        ctx.gradients = None
        hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_hidden = _scale_and_cast(gradients.hidden, grad_sum, hidden_dtype)
        grad_weight = _scale_and_cast(gradients.weight, grad_sum, weight_dtype)
        grad_bias = _scale_and_cast(gradients.bias, grad_sum, bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _scale_and_cast(
    gradient: torch.Tensor | None, factor: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """Multiply a gradient in place and return it in ``dtype``; None stays None."""
    if gradient is None:
        return None
    return gradient.mul_(factor).to(dtype)


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer would compute: autocast's, or its input's."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return hidden.dtype


def token_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    targets: torch.Tensor,
    *,
    grad_in_place: bool = False,
    memory_device: str | None = None,
    is_frozen: bool = False,
) -> torch.Tensor:
    """Return the cross entropy of each token, fp32 [N], which can be differentiated once.

    This is for losses that weight each token by a factor which is known only when all losses are computed. So nothing
    of the chunks is kept: the backward pass computes their logits again. It needs one more product with the weight than
    :func:`summed_cross_entropy`, which has the same arguments. ``grad_in_place`` says that a gradient may be added to
    ``weight.grad`` immediately, as with ``scale`` there.
    """
    settings = _ChunkSettings(_product_dtype(hidden), memory_device or hidden.device.type, is_frozen)
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenCrossEntropy.apply(
            hidden.flatten(0, -2), weight, bias, positions, targets, settings, grad_in_place
        )


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
        settings: _ChunkSettings,
        grad_in_place: bool,
    ) -> torch.Tensor:
        """Return the losses, fp32 [N], and keep what is needed to compute the logits again."""
        ctx.save_for_backward(hidden, weight, bias, positions, targets)
        ctx.settings = settings
        # the parameter itself, to whose gradient the backward pass adds; None if autograd gets the gradient
        is_fp32 = weight.dtype == settings.dtype == torch.float32
        ctx.parameter = weight if grad_in_place and is_fp32 and ctx.needs_input_grad[1] else None
        return _compute_chunks(hidden, weight, bias, positions, TargetCrossEntropy(targets), settings)[0]

    @staticmethod
    def backward(ctx: Any, grad_losses: torch.Tensor) -> Any:
        """Return the gradients for the losses' gradients, [N]; the weight's may be added to ``weight.grad`` instead."""
        hidden, weight, bias, positions, targets = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        parameter = ctx.parameter

        # With a parameter, its own gradient is the sum to which the chunks add.
        gradients = _Gradients()
        if needs_hidden:
            gradients.hidden = torch.zeros_like(hidden, dtype=torch.float32)
        if needs_bias:
            gradients.bias = torch.zeros_like(bias, dtype=torch.float32)
        if parameter is not None:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.weight = parameter.grad
        elif needs_weight:
            gradients.weight = torch.zeros_like(weight, dtype=torch.float32)

        # Compute the chunks again. The gradient of each token's loss multiplies that token's gradients.
        token_scale = grad_losses.float()[:, None]  # [N, 1]
        _compute_chunks(
            hidden,
            weight,
            bias,
            positions,
            TargetCrossEntropy(targets),
            ctx.settings,
            gradients=gradients,
            hidden_scale=token_scale,
            weight_scale=token_scale,
        )

        grad_hidden = None if gradients.hidden is None else gradients.hidden.to(hidden.dtype)
        grad_bias = None if gradients.bias is None else gradients.bias.to(bias.dtype)
        grad_weight = None
        if parameter is None and gradients.weight is not None:
            grad_weight = gradients.weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _compute_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    positions: torch.Tensor,
    token_loss: TokenLoss,
    settings: _ChunkSettings,
    *,
    gradients: _Gradients | None = None,
    hidden_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values of the tokens, fp32 [num_values, N], and add the gradients of their losses to ``gradients``.

    The logits exist for one chunk only. The other arguments are those of :func:`summed_token_loss`, with ``hidden``
    flattened to [positions, H]. The gradient of each token is multiplied by its ``hidden_scale``, fp32 [N, 1], for the
    hidden states and the bias, and by its ``weight_scale``, fp32 [N, 1], for the weight; None is 1. The gradient of
    each position's hidden state is written, not added to.
    """
    if gradients is None:
        gradients = _Gradients()
    needs_gradient = any(total is not None for total in (gradients.hidden, gradients.weight, gradients.bias))
    vocab_size = len(weight)
    cast_weight = weight.to(settings.dtype)  # [V, H]
    num_tokens = len(token_loss)
    values = torch.empty(token_loss.num_values, num_tokens, dtype=torch.float32, device=hidden.device)
    chunk_size = _chunk_size(num_tokens, vocab_size, settings)
    logits_buffer = torch.empty(chunk_size, vocab_size, dtype=settings.dtype, device=hidden.device)
    for begin in range(0, num_tokens, chunk_size):
        chunk = slice(begin, begin + chunk_size)

        # The values of the chunk; C is its number of tokens.
        inputs = hidden.index_select(0, positions[chunk]).to(settings.dtype)  # [C, H]
        logits = torch.mm(inputs, cast_weight.t(), out=logits_buffer[: len(inputs)])  # [C, V]
        if bias is not None:
            logits += bias
        values[:, chunk] = _chunk_values(logits, token_loss, chunk, needs_gradient, settings)

        # Its gradients. ``_chunk_values`` has written the gradient of the losses over the logits.
        grad_logits = logits
        if gradients.hidden is not None:
            grad_inputs = (grad_logits @ cast_weight).float()  # [C, H]
            if hidden_scale is not None:
                grad_inputs = grad_inputs * hidden_scale[chunk]
            gradients.hidden.index_copy_(0, positions[chunk], grad_inputs)
        if gradients.weight is not None:
            scaled_inputs = inputs
            if weight_scale is not None:
                scaled_inputs = (inputs * weight_scale[chunk]).to(settings.dtype)
            _add_product(gradients.weight, grad_logits.t(), scaled_inputs, settings.memory_device)
        if gradients.bias is not None:
            if hidden_scale is None:
                gradients.bias += grad_logits.sum(0, dtype=torch.float32)
            else:
                gradients.bias += hidden_scale[chunk, 0].to(settings.dtype) @ grad_logits
    return values


def _chunk_size(num_tokens: int, vocab_size: int, settings: _ChunkSettings) -> int:
    """Return the number of tokens in a chunk; chunks have nearly equal sizes."""
    device_type = settings.memory_device
    bytes_per_logit = settings.dtype.itemsize
    chunk_bytes = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cuda"])
    if settings.saves_memory:
        chunk_bytes = _FROZEN_LOGITS_BYTES
    elif not settings.works_in_place or settings.loss_bytes_per_logit:
        bytes_per_logit += 4  # the fp32 log-probabilities
    if device_type == "cpu":  # a GPU cuts the chunk into slices for this
        bytes_per_logit += settings.loss_bytes_per_logit
    max_tokens = max(1, chunk_bytes // (bytes_per_logit * vocab_size))
    num_chunks = max(1, -(-num_tokens // max_tokens))
    return max(1, -(-num_tokens // num_chunks))


def _chunk_values(
    logits: torch.Tensor, token_loss: TokenLoss, chunk: slice, needs_gradient: bool, settings: _ChunkSettings
) -> torch.Tensor:
    """Do what ``TokenLoss.compute`` does, on a GPU for a slice of the chunk at a time.

    Each token is computed by itself, so slices of a chunk have the same values.
    """
    needs_copies = not settings.works_in_place or settings.loss_bytes_per_logit > 0
    if settings.memory_device == "cpu" or not needs_copies:
        return token_loss.compute(logits, chunk, needs_gradient)
    slice_bytes = _TOKEN_LOSS_BYTES if settings.loss_bytes_per_logit else _LOG_PROBABILITIES_BYTES
    bytes_per_logit = 4 + settings.loss_bytes_per_logit
    max_tokens = max(1, slice_bytes // (bytes_per_logit * logits.shape[1]))
    slice_values = []
    for begin in range(0, len(logits), max_tokens):
        slice_logits = logits[begin : begin + max_tokens]
        first_token = chunk.start + begin
        token_slice = slice(first_token, first_token + len(slice_logits))
        slice_values.append(token_loss.compute(slice_logits, token_slice, needs_gradient))
    return torch.cat(slice_values, dim=1)


def _token_losses(logits: torch.Tensor, targets: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    """Return the fp32 losses [N] of logits [N, V], and write the gradient of their sum over the logits.

    The gradient of a token's loss is softmax(logits), minus 1 at the target. Without ``needs_gradient``, the values in
    ``logits`` afterwards have no meaning.
    """
    if logits.is_cuda and _has_liger():
        return _liger_losses(logits, targets, needs_gradient)
    log_probabilities = logits.float()  # the logits themselves if they are fp32
    write_log_softmax(log_probabilities)
    target_indices = targets[:, None]  # [N, 1]
    target_log_probabilities = log_probabilities.gather(1, target_indices)  # [N, 1]
    if needs_gradient:
        torch.exp(log_probabilities, out=logits)  # rounds once, to the logits' dtype
        grad_at_targets = target_log_probabilities.exp() - 1
        logits.scatter_(1, target_indices, grad_at_targets.to(logits.dtype))
    return -target_log_probabilities[:, 0]


def write_log_softmax(logits: torch.Tensor) -> None:
    """Write the logarithms of the softmax of each row over fp32 logits [N, V]."""
    # it works row by row, so it can write over its input
    torch.ops.aten._log_softmax.out(logits, 1, False, out=logits)


@functools.cache
def _has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def _liger_losses(logits: torch.Tensor, targets: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    """Do the same as ``_token_losses`` with liger-kernel's Triton kernel.

    The kernel is called instead of liger's loss for the full head, which waits for the device and sums in fp32.
    """
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    num_tokens, vocab_size = logits.shape
    losses = torch.empty(num_tokens, dtype=torch.float32, device=logits.device)
    # the kernel has no defaults: these are the features that are not used
    unused = dict.fromkeys(("weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr", "softcap"))
    unused |= dict.fromkeys(("token_accuracy_stride", "predicted_tokens_stride"), 0)
    unused |= dict.fromkeys(("weight_sum", "lse_square_scale", "label_smoothing"), 0.0)
    unused |= dict.fromkeys(("RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"), False)
    liger_cross_entropy_kernel[(num_tokens,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=1,
        loss_ptr=losses,
        loss_stride=1,
        n_cols=vocab_size,
        n_non_ignore=1,  # the divisor of a mean
        sum_non_ignore_weight=1,
        ignore_index=-100,
        reduction="sum",
        BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (vocab_size - 1).bit_length()),  # the next power of two
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=needs_gradient,
        num_warps=32,
        **unused,
    )
    return losses


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, memory_device: str) -> None:
    """Add ``left @ right`` to an fp32 total."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif memory_device == "cuda":
        pass  # a trace on fake CPU tensors: takes no memory, and torch 2.11 fails at this product of fake tensors
    else:
        total += left @ right


def compute_loss_in_head(model: Any, *, grad_in_place: bool = False, memory_device: str | None = None) -> bool:
    """Make ``model(..., positions=, targets=)`` return what ``summed_cross_entropy`` returns.

    ``targets`` [N] int64 are the token ids to predict at ``positions`` [N] int64 of the flattened batch. With
    ``by_token=True`` the model returns what ``token_cross_entropy`` returns, and with ``token_loss=`` instead of
    targets, what ``summed_token_loss`` returns. With ``returns_hidden=True`` it returns the inputs of the head at the
    positions, [N, H]. Calls without ``positions`` stay as they are.
    Call this before the model is wrapped; its weights may still be on the meta device.

    Args:
        model: a causal language model of transformers. Its ``forward`` and that of its head are replaced.
        grad_in_place: pass ``scale=`` on, so that the head adds its gradient to ``weight.grad`` immediately. Only if
            nothing wraps the model.
        memory_device: see ``summed_cross_entropy``.

    Returns:
        whether the model was changed. It is left alone if its logits are not exactly ``head(hidden)``, for example
        because they are capped or scaled, or if this cannot be determined.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is not nn.Linear:
        return False
    # asked now: a trace of memory freezes a head that trains afterwards
    is_frozen = not head.weight.requires_grad
    head_forward: Any = _HeadForward(head)
    forward: Callable[..., Any] = model.forward
    head.forward = head_forward  # type: ignore[method-assign]
    if not _returns_head_output(model, head_forward):
        del head.forward
        return False

    @functools.wraps(forward)
    def forward_with_loss(
        *args: Any,
        positions: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        token_loss: TokenLoss | None = None,
        scale: torch.Tensor | None = None,
        by_token: bool = False,
        returns_hidden: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the model; with positions and what to compute there, its head's loss comes back instead of the logits."""
        if positions is None:
            return forward(*args, **kwargs)
        memory_options: Any = {"memory_device": memory_device, "is_frozen": is_frozen}
        token_values: list[torch.Tensor] = []  # the head returns one tensor, which the model takes for logits

        def select_hidden(hidden: torch.Tensor) -> torch.Tensor:
            return hidden.flatten(0, -2).index_select(0, positions)

        def compute_by_token(hidden: torch.Tensor) -> torch.Tensor:
            assert targets is not None
            inputs = (hidden, head.weight, head.bias, positions, targets)
            return token_cross_entropy(*inputs, grad_in_place=grad_in_place, **memory_options)

        def compute_sum(hidden: torch.Tensor) -> torch.Tensor:
            summed_loss = token_loss
            if summed_loss is None:
                assert targets is not None
                summed_loss = TargetCrossEntropy(targets)
            scale_in_place = scale if grad_in_place else None
            inputs = (hidden, head.weight, head.bias, positions, summed_loss)
            loss_sum, values = summed_token_loss(*inputs, scale=scale_in_place, **memory_options)
            token_values.append(values)
            return loss_sum

        if returns_hidden:
            head_forward.compute_loss = select_hidden
        elif by_token:
            head_forward.compute_loss = compute_by_token
        else:
            head_forward.compute_loss = compute_sum
        try:
            loss = forward(*args, **kwargs).logits
        finally:
            head_forward.compute_loss = None
        if by_token or returns_hidden:
            return loss
        values = token_values[0]
        return loss, values[0] if token_loss is None else values

    model.forward = forward_with_loss
    model.has_loss_in_head = True
    return True


def has_loss_in_head(model: Any) -> bool:
    """Return whether ``compute_loss_in_head`` changed a model, wrapped by Fabric or not."""
    return getattr(model, "has_loss_in_head", False)


class _HeadForward:
    """A replacement for a head's ``forward``: it calls ``compute_loss`` if that is set, or else returns logits."""

    def __init__(self, head: nn.Linear) -> None:
        self._compute_logits = head.forward
        self.compute_loss: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.compute_loss is None:
            return self._compute_logits(hidden)
        return self.compute_loss(hidden)


class _HiddenStates(BaseModelOutputWithPast):
    """The output of a base model, with hidden states only."""

    def __getattr__(self, name: str) -> None:
        return None


@torch.no_grad()
def _returns_head_output(model: Any, head_forward: _HeadForward) -> bool:
    """Return whether the model's logits are the head's output itself, and not computed from it.

    The base model is replaced by one that returns zeros, and the head by one that returns a marker. The model runs once
    on two tokens: its logits must be the marker.
    """
    base = model.base_model
    weight = model.get_output_embeddings().weight
    if base is model:
        return False
    marker = weight.new_zeros(())
    hidden = weight.new_zeros(1, 2, weight.shape[1])  # [batch, length, H]
    head_forward.compute_loss = lambda _: marker
    base.forward = lambda *_, **__: _HiddenStates(last_hidden_state=hidden)
    try:
        input_ids = torch.zeros(1, 2, dtype=torch.int64, device=weight.device)
        return model(input_ids=input_ids, use_cache=False).logits is marker
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # it needs more than hidden states
        return False
    finally:
        del base.forward
        head_forward.compute_loss = None
