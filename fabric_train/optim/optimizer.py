"""Build the optimizer of a run: its parameter groups, and AdamW, which is the default.

``OPTIMIZERS`` has the optimizers by name. CONTRIBUTING.md says how to add one, here or in a module of your own.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric_train.cli.tables import OPTIMIZERS, resolve_settings
from fabric_train.distributed.sharded_parameters import FlatShard, original_name
from fabric_train.optim.adamw import AdamW, LowPrecisionAdamW
from fabric_train.optim.states import DeclaredStates
from fabric_train.optim.stochastic_rounding import local_elements

if TYPE_CHECKING:
    from fabric_train.arguments import TrainingArguments


@dataclass(frozen=True)
class OptimizedParameters:
    """The parameters that an optimizer trains, and settings for building it."""

    groups: list[dict[str, Any]]
    """Parameter groups of ``torch.optim``, with names: ``params`` is a list of (name, parameter). Each has its
    ``weight_decay``, its peak ``lr``, and ``lr_ratio``, by which the rate of each step is multiplied.
    """
    decayed: frozenset[str]
    """The names of parameters with weight decay, which are matrices."""
    arguments: "TrainingArguments"
    fused: bool = True
    """Whether AdamW updates with one kernel; with an fp16 gradient scaler, Fabric could not clip its gradients then."""
    seed: int = 0
    """The seed of stochastic rounding."""
    flat_shards: Mapping[int, FlatShard] = field(default_factory=dict)
    """FSDP1's shards, from ``sharded_parameters.flat_shards``."""
    compiles: bool = False
    """See ``LowPrecisionAdamW``."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Peak learning rates of the parameters to which ``--lr_of`` gives one, by name."""

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        names: dict[nn.Parameter, str] = {}
        for group in self.groups:
            names.update({parameter: name for name, parameter in group["params"]})
        return names


BuildOptimizer = Callable[..., DeclaredStates]
"""A function that builds an optimizer from :class:`OptimizedParameters`, and from settings, which have defaults."""


def decayed_names(model: nn.Module) -> set[str]:
    """Return the parameters with weight decay: of two or more dimensions, before FSDP makes its shards flat."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    decayed: Collection[str],
    arguments: "TrainingArguments",
    *,
    fused: bool = True,
    seed: int = 0,
    flat_shards: Mapping[int, FlatShard] | None = None,
    compiles: bool = False,
    rates: Mapping[str, float] | None = None,
) -> DeclaredStates:
    """Build the optimizer of ``--optimizer`` over the parameters of a set-up model that train.

    Args:
        named_parameters: The parameters, by any of their names.
        decayed: Names of parameters with weight decay.
        arguments: Learning rate, weight decay and the optimizer's name and settings.
        fused: See :class:`OptimizedParameters`, as for the next three.
        seed: The seed of stochastic rounding.
        flat_shards: FSDP1's shards.
        compiles: Whether to update with compiled kernels.
        rates: Peak learning rates of parameters whose rate is not ``--lr``, by name.
    """
    rates = rates or {}

    # Group parameters by weight decay and rate. The fused kernel does not accept tensors of several device meshes.
    grouped: dict[tuple[bool, float, Any], list[tuple[str, nn.Parameter]]] = {}
    for wrapped_name, parameter in named_parameters:
        name = original_name(wrapped_name)
        mesh = getattr(parameter, "device_mesh", None)
        key = (name in decayed, rates.get(name, arguments.lr), mesh)
        grouped.setdefault(key, []).append((name, parameter))
    groups = []
    for (has_decay, rate, _), group_parameters in grouped.items():
        group = {
            "params": group_parameters,
            "weight_decay": arguments.weight_decay if has_decay else 0.0,
            "lr": rate,
            "lr_ratio": rate / arguments.lr,
        }
        groups.append(group)

    # The factory of the table; settings are its parameters with defaults.
    parameters = OptimizedParameters(
        groups,
        frozenset(decayed),
        arguments,
        fused=fused,
        seed=seed,
        flat_shards=flat_shards or {},
        compiles=compiles,
        rates=rates,
    )
    settings = resolve_settings(OPTIMIZERS, arguments.optimizer, arguments.optimizer_settings)
    return OPTIMIZERS[arguments.optimizer](parameters, **settings)


def build_adamw(parameters: OptimizedParameters) -> DeclaredStates:
    """Build AdamW: torch's own if moments and weights have the same dtype and are not rounded stochastically."""
    arguments = parameters.arguments
    names = parameters.names
    betas = (arguments.beta1, arguments.beta2)

    # bf16 modules train beside an fp32 adapter: their moments are fp32 by default.
    weights_dtypes = {parameter.dtype for parameter in names}
    weights_dtype = torch.float32
    if len(weights_dtypes) == 1:
        (weights_dtype,) = weights_dtypes

    # Moments have the dtype of the weights by default. With 8 bits, only matrices have them; others have fp32 moments.
    in_8bit = []
    if arguments.optimizer_states is None:
        moments_dtype = weights_dtype
    elif arguments.optimizer_states == "8bit":
        moments_dtype = torch.float32
        in_8bit = [parameter for parameter, name in names.items() if name in parameters.decayed]
    else:
        moments_dtype = getattr(torch, arguments.optimizer_states)

    stores_bfloat16 = torch.bfloat16 in {*weights_dtypes, moments_dtype}
    stochastic_rounding = arguments.stochastic_rounding and stores_bfloat16
    if moments_dtype == weights_dtype and not stochastic_rounding and not in_8bit:
        return AdamW(parameters.groups, lr=arguments.lr, betas=betas, fused=parameters.fused)
    return LowPrecisionAdamW(
        parameters.groups,
        lr=arguments.lr,
        betas=betas,
        moments_dtype=moments_dtype,
        in_8bit=in_8bit,
        stochastic_rounding=stochastic_rounding,
        names=names,
        elements={parameter: local_elements(parameter, parameters.flat_shards) for parameter in names},
        seed=parameters.seed,
        compiles=parameters.compiles,
    )
