"""Build the optimizer of a run over the parameters that train: AdamW, or another one given to ``use_optimizer``."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric_train.cli.errors import first_line
from fabric_train.distributed.ranks import FlatShard, original_name
from fabric_train.optim.adamw import MOMENTS, AdamW, LocalElements, LowPrecisionAdamW, local_elements
from fabric_train.optim.states import DeclaredStates, TensorTable

if TYPE_CHECKING:
    from arguments import TrainingArguments

Groups = list[dict[str, Any]]
Build = Callable[[Groups, "TrainingArguments"], DeclaredStates]
_build_other: Build | None = None
_MOST_DIFFERENT = 0.01
"""Share of the numbers that may differ by more than fp32's last bits: those that are rounded to another neighbour."""


def use_optimizer(build: Build | None) -> None:
    """Train with the optimizer that ``build`` returns instead of AdamW; None: with AdamW.

    ``build`` gets parameter groups, each with its weight decay and peak learning rate, and the run's arguments. A group
    must keep its ``lr_ratio``, by which the rate of each step is multiplied. All ranks must call this before the run is
    prepared, since the memory plan counts the states that the optimizer declares.
    """
    global _build_other
    _build_other = build


def decayed_names(model: nn.Module) -> set[str]:
    """Return the parameters with weight decay: of two or more dimensions, before FSDP makes its shards flat."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    decayed: set[str],
    arguments: "TrainingArguments",
    fused: bool = True,
    seed: int = 0,
    cuts: dict[int, FlatShard] | None = None,
    compiles: bool = False,
    rates: Mapping[str, float] | None = None,
) -> DeclaredStates:
    """Build the optimizer over the parameters of a set-up model that train; ``decayed`` ones with weight decay.

    AdamW is torch's own if moments and weights have the same dtype and are not rounded stochastically. ``fused``: it
    updates with one kernel; under an fp16 gradient scaler Fabric could not clip its gradients. ``seed`` is for
    stochastic rounding. ``cuts`` are FSDP1's shards, from ``ranks.flat_shards``. For ``compiles`` see
    ``LowPrecisionAdamW``. ``rates`` are the peak learning rates of parameters that have another one than ``--lr``.
    """
    names = {parameter: original_name(name) for name, parameter in named_parameters}
    rates = rates or {}
    grouped: dict[tuple[bool, float, Any], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        mesh = getattr(parameter, "device_mesh", None)  # the fused kernel does not accept tensors of several meshes
        key = (name in decayed, rates.get(name, arguments.lr), mesh)
        grouped.setdefault(key, []).append(parameter)
    groups: Groups = [
        {
            "params": parameters,
            "weight_decay": arguments.weight_decay if has_decay else 0.0,
            "lr": rate,
            "lr_ratio": rate / arguments.lr,
        }
        for (has_decay, rate, _), parameters in grouped.items()
    ]
    if _build_other is not None:
        return _build_other(groups, arguments)
    betas = (arguments.beta1, arguments.beta2)
    dtypes, states = {parameter.dtype for parameter in names}, arguments.optimizer_states
    # bf16 modules train beside an fp32 adapter
    weights_dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    in_8bit = [parameter for parameter, name in names.items() if name in decayed and states == "8bit"]
    moments_dtype = weights_dtype if states is None else getattr(torch, "float32" if states == "8bit" else states)
    stochastic_rounding = arguments.stochastic_rounding and torch.bfloat16 in {*dtypes, moments_dtype}
    if moments_dtype == weights_dtype and not stochastic_rounding and not in_8bit:
        return AdamW(groups, lr=arguments.lr, betas=betas, fused=fused)
    return LowPrecisionAdamW(
        groups,
        lr=arguments.lr,
        betas=betas,
        moments_dtype=moments_dtype,
        in_8bit=in_8bit,
        stochastic_rounding=stochastic_rounding,
        names=names,
        elements={parameter: local_elements(parameter, cuts or {}) for parameter in names},
        seed=seed,
        compiles=compiles,
    )


def use_triton(optimizer: LowPrecisionAdamW) -> str | None:
    """Let one Triton kernel update all parameters if it works on their device; else return why it does not.

    It must give the same results for small parameters stored alike, which also compiles it before the first step.
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
        kept |= {key: (ours.read_states(one)[key], reference.read_states(other)[key]) for key in MOMENTS}
        for name, (found, expected) in kept.items():
            close = torch.isclose(found.float().flatten(), expected.float().flatten(), rtol=1e-6, atol=1e-9)
            share = float((~close).double().mean())
            if share > _MOST_DIFFERENT:
                return f"in a trial, {share:.0%} of its {name} differ from the {name} of torch's kernel"
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
        in_8bit=[matrix] if optimizer.in_8bit else [],
        stochastic_rounding=optimizer.rounds_stochastically,
        names={matrix: "matrix", vector: "vector"},
        elements={matrix: LocalElements(700, 700, 1400), vector: LocalElements(0, vector.numel(), vector.numel())},
        seed=0,
    )
