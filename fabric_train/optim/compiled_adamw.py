"""A step of AdamW whose weights or moments are kept in bfloat16, as one kernel: it reads and writes each number once,
where the same in separate operations goes over fp32 copies some thirty times.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from fabric_train.optim.stochastic_rounding import random_bits, round_by_chance


def factors(step: int, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> list[float]:
    """Return what ``take_step`` computes with in step ``step``, counted from 1 (arXiv:1711.05101): what stays of the
    weights, the first moment's gain, what stays of the second moment, its gain, rate, scale and epsilon.
    """
    beta1, beta2 = betas
    scale = (1 - beta2**step) ** -0.5
    return [1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), scale, eps]


@functools.cache
def compiled_step() -> Callable[..., None]:
    """Return :func:`take_step`, compiled when it is first called, for any length."""
    return torch.compile(take_step, dynamic=True)


def take_step(
    kept: Sequence[torch.Tensor],
    gradient: torch.Tensor,
    by: torch.Tensor,
    numbers: torch.Tensor | None,
    key: torch.Tensor,
) -> None:
    """Change weights, first and second moment in place, computing in fp32.

    Args:
        kept: the three, flat, in fp32 or bfloat16.
        gradient: of the weights, flat.
        by: fp32 [7], :func:`factors`.
        numbers: int32, of the elements, see ``stochastic_rounding``; None to round to the nearest.
        key: 0-dim int32, the step's and the parameter's.
    """
    decay, first_gain, second_stays, second_gain, rate, scale, epsilon = by.unbind()
    weights, first, second = (tensor.float() for tensor in kept)
    slope = gradient.float()
    first = first + (slope - first) * first_gain
    second = second * second_stays + slope * slope * second_gain
    weights = weights * decay - rate * first / (second.sqrt() * scale + epsilon)
    bits = None if numbers is None else random_bits(numbers, key)
    for tensor, values, shift in zip(kept, (weights, first, second), (16, 0, 0), strict=True):
        if bits is not None and tensor.dtype != torch.float32:
            values = round_by_chance(values, (bits >> shift) & 0xFFFF)
        tensor.copy_(values)
