"""Build the optimizer of a run over the parameters that train: AdamW, or another one given to ``use_optimizer``."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric_train.distributed.ranks import FlatShard, original_name
from fabric_train.optim.adamw import AdamW, LowPrecisionAdamW
from fabric_train.optim.low_precision import local_elements
from fabric_train.optim.states import DeclaredStates

if TYPE_CHECKING:
    from arguments import TrainingArguments

Groups = list[dict[str, Any]]
Build = Callable[[Groups, "TrainingArguments"], DeclaredStates]
_build_other: Build | None = None


def use_optimizer(build: Build | None) -> None:
    """Train with the optimizer that ``build`` returns instead of AdamW; None: with AdamW.

    ``build`` gets parameter groups, each with its weight decay, and the run's arguments. All ranks must call this
    before the run is prepared, since the memory plan counts the states that the optimizer declares.
    """
    global _build_other
    _build_other = build


def decayed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: those of two or more dimensions, not norms and biases.

    Call it before the model is sharded, because FSDP's shards are flat.
    """
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    decayed: set[str],
    arguments: "TrainingArguments",
    fused: bool = True,
    seed: int = 0,
    cuts: dict[int, FlatShard] | None = None,
    compiles: bool = False,
) -> DeclaredStates:
    """Build the optimizer over the parameters of a set-up model that train.

    AdamW is torch's own if moments and weights have the same dtype and are not rounded stochastically.

    Args:
        named_parameters: From ``trained_parts.trained_parameters``.
        decayed: The parameters with weight decay, from :func:`decayed_names`.
        arguments: Learning rate, betas, weight decay, and the storage of the moments.
        fused: Whether torch's AdamW updates with one kernel. Fabric cannot clip its gradients under an fp16 gradient
            scaler.
        seed: The seed of stochastic rounding.
        cuts: FSDP1's shards, from ``ranks.flat_shards``; None under the other strategies.
        compiles: See ``LowPrecisionAdamW``.
    """
    names = {parameter: original_name(name) for name, parameter in named_parameters}
    grouped: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        mesh = getattr(parameter, "device_mesh", None)  # the fused kernel does not accept tensors of several meshes
        grouped.setdefault((name in decayed, mesh), []).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": arguments.weight_decay if has_decay else 0.0}
        for (has_decay, _), parameters in grouped.items()
    ]
    if _build_other is not None:
        return _build_other(groups, arguments)
    betas = (arguments.beta1, arguments.beta2)
    weights_dtype, states = next(iter(names)).dtype, arguments.optimizer_states
    in_8bit = [parameter for parameter, name in names.items() if name in decayed and states == "8bit"]
    moments_dtype = weights_dtype if states is None else getattr(torch, "float32" if states == "8bit" else states)
    stochastic_rounding = arguments.stochastic_rounding and torch.bfloat16 in (weights_dtype, moments_dtype)
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
