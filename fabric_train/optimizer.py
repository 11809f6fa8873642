"""AdamW's parameter groups, and the learning rate as a pure function of the step."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from arguments import TrainingArguments

_STEP_DECAYS = 3
"""The ``step`` schedule falls to ``min_lr`` in this many equal stairs (of the logarithm, where min_lr is above 0)."""


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: the matrices. Norms and biases, of one dimension, have none.

    Asked of the model before it is sharded, since FSDP's shards are all flat.
    """
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    decayed: set[str],
    arguments: "TrainingArguments",
    fused: bool = True,
) -> torch.optim.AdamW:
    """Build AdamW (arXiv:1711.05101) over the parameters of a set-up model.

    Args:
        named_parameters: of the sharded or replicated model.
        decayed: from :func:`decayed_names`.
        arguments: lr, betas and weight decay.
        fused: one kernel for the whole update; Fabric does not clip for it what an fp16 gradient scaler has scaled.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        groups[original_name(name) in decayed].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": arguments.weight_decay if has_decay else 0.0}
            for has_decay, parameters in groups.items()
            if parameters
        ],
        lr=arguments.lr,
        betas=(arguments.beta1, arguments.beta2),
        fused=fused,
    )


def learning_rate(step: int, num_steps: int, arguments: "TrainingArguments") -> float:
    """Return the learning rate of optimizer step ``step``, counted from 1, of a run of ``num_steps``.

    It rises linearly over the warm-up steps, reaches ``lr`` at the last of them (or at step 1), decays by the
    schedule and is exactly ``min_lr`` at the last step. Cosine as in arXiv:1608.03983 without restarts.
    """
    warmup, peak, end = arguments.warmup_steps, arguments.lr, arguments.min_lr
    if step <= warmup:
        return peak * (step / warmup)  # in this order exactly lr at the last
    if not arguments.lr_decay or arguments.lr_schedule == "constant":
        return peak
    first = max(warmup, 1)  # the step at the peak
    if num_steps <= first:  # no room to decay in
        return peak
    if step >= num_steps:
        return end
    progress = (step - first) / (num_steps - first)
    if arguments.lr_schedule == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if arguments.lr_schedule == "exponential":
        return peak * (end / peak) ** progress
    if arguments.lr_schedule == "step":
        progress = math.floor(progress * (_STEP_DECAYS + 1)) / _STEP_DECAYS
        return peak * (end / peak) ** progress if end > 0 else peak * (1 - progress)
    return peak + (end - peak) * progress


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Give every parameter group this rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def original_name(name: str) -> str:
    """Name of a parameter before Fabric, DDP, FSDP and activation checkpointing wrapped the model."""
    wrappers = ("_forward_module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
    for wrapper in wrappers:
        name = name.replace(wrapper, "") if wrapper != "module." else name.removeprefix(wrapper)
    return name
