"""Try the Triton kernel of AdamW's step on small parameters, and use it if it gives the results of the other step."""

from collections.abc import Callable

import torch
from torch import nn

from fabric_train.cli.errors import first_line
from fabric_train.optim.low_precision import LocalElements, TensorTable
from fabric_train.optim.low_precision_adamw import MOMENTS, LowPrecisionAdamW

_MOST_DIFFERENT = 0.01
"""Share of the numbers that may differ by more than fp32's last bits: those that are rounded to another neighbour."""


def use_triton(optimizer: LowPrecisionAdamW) -> str | None:
    """Let one Triton kernel update all parameters, if it works on their device.

    It has to give the same results for small parameters that are stored like the optimizer's. This also compiles the
    kernel before the first step.

    Returns:
        None, or why the optimizer is left to update its parameters one by one.
    """
    fault: str | None
    try:
        from fabric_train.optim.triton_adamw import launch

        fault = _difference(optimizer, launch)
    except Exception as error:  # noqa: BLE001 - Triton, the driver and compilers raise much; the other step needs none
        return f"{type(error).__name__}: {first_line(error)}"
    if fault is None:
        optimizer.launch = launch
    return fault


def _difference(optimizer: LowPrecisionAdamW, launch: Callable[[TensorTable], None]) -> str | None:
    """Return what differs after two steps of small parameters, None if nothing does."""
    ours, reference = _small(optimizer), _small(optimizer)
    ours.launch = launch
    for both in zip(*(each.param_groups[0]["params"] for each in (ours, reference)), strict=True):
        for parameter in both:
            angles = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
            parameter.grad = angles.sin().to(parameter.dtype)
    for each in (ours, reference):
        each.step()
        each.step()
    for one, other in zip(*(each.param_groups[0]["params"] for each in (ours, reference)), strict=True):
        kept = {"weights": (one, other)}
        kept |= {key: (ours.moments(one)[key], reference.moments(other)[key]) for key in MOMENTS}
        for name, (found, expected) in kept.items():
            close = torch.isclose(found.float().flatten(), expected.float().flatten(), rtol=1e-6, atol=1e-9)
            share = float((~close).double().mean())
            if share > _MOST_DIFFERENT:
                return f"in a trial, {share:.0%} of its {name} differ from those of torch's kernel"
    return None


def _small(optimizer: LowPrecisionAdamW) -> LowPrecisionAdamW:
    """Return an optimizer like the given one, over a matrix sharded by columns and an unaligned vector."""
    like = optimizer.param_groups[0]["params"][0]
    numbers = torch.cos(torch.arange(3400, device=like.device)).to(like.dtype)
    matrix, vector = nn.Parameter(numbers[:2100].clone().view(3, 700)), nn.Parameter(numbers.clone()[2101:])
    return LowPrecisionAdamW(
        [{"params": [matrix, vector], "weight_decay": 0.1}],
        lr=1e-2,
        betas=(0.9, 0.95),
        moments_dtype=optimizer.moments_dtype,
        in_8bit=[matrix] if optimizer.has_8bit() else [],
        stochastic_rounding=optimizer.rounds_stochastically,
        names={matrix: "matrix", vector: "vector"},
        elements={matrix: LocalElements(700, 700, 1400), vector: LocalElements(0, vector.numel(), vector.numel())},
        seed=0,
    )
