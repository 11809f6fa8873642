"""Try AdamW's Triton kernel before a run: it must compile on this device and give the updates of torch's kernel."""

from collections.abc import Callable

import torch
from torch import nn

from fabric_train.cli.errors import first_line
from fabric_train.optim.adamw import MOMENTS, LowPrecisionAdamW
from fabric_train.optim.stochastic_rounding import LocalElements
from fabric_train.optim.tensor_table import TensorTable

_MAX_DIFFERENT_SHARE = 0.01
"""The share of values that may differ by more than fp32's last bits, because they are rounded to another neighbour."""


def use_triton(optimizer: LowPrecisionAdamW) -> str | None:
    """Use one Triton kernel to update all parameters if it works on their device; otherwise return why it does not.

    It must give the same results for small parameters that are stored in the same way. The trial also compiles it
    before the first step.
    """
    fault: str | None
    try:
        from fabric_train.optim.triton_adamw import launch

        fault = _find_difference(optimizer, launch)
    except Exception as error:  # noqa: BLE001 - Triton, the driver and compilers raise much; the fallback needs none
        return f"{type(error).__name__}: {first_line(error)}"
    if fault is None:
        optimizer.launch = launch
    return fault


def _find_difference(optimizer: LowPrecisionAdamW, launch: Callable[[TensorTable], None]) -> str | None:
    """Return what differs after two steps on small parameters, or None if nothing does."""
    tried = _small_optimizer(optimizer)
    tried.launch = launch
    reference = _small_optimizer(optimizer)
    # Two steps with the same gradients: the second one reads the moments that the first one has written.
    for trial_optimizer in (tried, reference):
        for parameter in trial_optimizer.param_groups[0]["params"]:
            angles = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
            parameter.grad = angles.sin().to(parameter.dtype)
        trial_optimizer.step()
        trial_optimizer.step()

    # Few numbers may be rounded to the other neighbour, since the last bit before rounding may differ.
    tried_parameters = tried.param_groups[0]["params"]
    reference_parameters = reference.param_groups[0]["params"]
    for parameter, reference_parameter in zip(tried_parameters, reference_parameters, strict=True):
        results = {"weights": parameter.detach()} | tried.read_states(parameter)
        expected = {"weights": reference_parameter.detach()} | reference.read_states(reference_parameter)
        for name in ("weights", *MOMENTS):
            is_close = torch.isclose(
                results[name].float().flatten(), expected[name].float().flatten(), rtol=1e-6, atol=1e-9
            )
            share = float((~is_close).double().mean())
            if share > _MAX_DIFFERENT_SHARE:
                return f"in a trial, {share:.0%} of its {name} differ from the {name} of torch's kernel"
    return None


def _small_optimizer(optimizer: LowPrecisionAdamW) -> LowPrecisionAdamW:
    """Return an optimizer with the same settings over a matrix sharded by columns and an unaligned vector."""
    example = optimizer.param_groups[0]["params"][0]
    numbers = torch.cos(torch.arange(3400, device=example.device)).to(example.dtype)
    matrix = nn.Parameter(numbers[:2100].clone().view(3, 700))
    vector = nn.Parameter(numbers.clone()[2101:])  # starts in the middle of its storage
    return LowPrecisionAdamW(
        [{"params": [matrix, vector], "weight_decay": 0.1}],
        lr=1e-2,
        betas=(0.9, 0.95),
        moments_dtype=optimizer.moments_dtype,
        in_8bit=[matrix] if optimizer.in_8bit else [],
        stochastic_rounding=optimizer.rounds_stochastically,
        names={matrix: "matrix", vector: "vector"},
        elements={
            matrix: LocalElements(begin=700, width=700, stride=1400),
            vector: LocalElements(begin=0, width=vector.numel(), stride=vector.numel()),
        },
        seed=0,
    )
