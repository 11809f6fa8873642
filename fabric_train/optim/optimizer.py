"""AdamW over the parameters of a set-up model: its parameter groups, and what its moments are kept in."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric_train.distributed.shards import FlatShard, original_name
from fabric_train.optim.low_precision_adamw import LowPrecisionAdamW
from fabric_train.optim.stochastic_rounding import place_of

if TYPE_CHECKING:
    from arguments import TrainingArguments


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
    seed: int = 0,
    cuts: dict[int, FlatShard] | None = None,
    compiles: bool = False,
) -> torch.optim.AdamW:
    """Build AdamW (arXiv:1711.05101) over the parameters of a set-up model.

    Args:
        named_parameters: of the sharded or replicated model.
        decayed: from :func:`decayed_names`.
        arguments: lr, betas, weight decay, and what the moments are kept in and how.
        fused: one kernel for the whole update; Fabric does not clip for it what an fp16 gradient scaler has scaled.
        seed: of stochastic rounding.
        cuts: FSDP1's, from ``shards.flat_shards``; None under the other strategies.
        compiles: see ``LowPrecisionAdamW``.
    """
    names = {parameter: original_name(name) for name, parameter in named_parameters}
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for parameter, name in names.items():
        mesh = getattr(parameter, "device_mesh", None)  # one kernel does not take tensors of several meshes
        groups.setdefault((name in decayed, mesh), []).append(parameter)
    options = [
        {"params": parameters, "weight_decay": arguments.weight_decay if has_decay else 0.0}
        for (has_decay, _), parameters in groups.items()
    ]
    betas = (arguments.beta1, arguments.beta2)
    weights_dtype, states = next(iter(names)).dtype, arguments.optimizer_states
    in_eight_bits = [parameter for parameter, name in names.items() if name in decayed and states == "8bit"]
    moments_dtype = weights_dtype if states is None else getattr(torch, "float32" if states == "8bit" else states)
    rounds_by_chance = arguments.stochastic_rounding and torch.bfloat16 in (weights_dtype, moments_dtype)
    if moments_dtype == weights_dtype and not rounds_by_chance and not in_eight_bits:
        return torch.optim.AdamW(options, lr=arguments.lr, betas=betas, fused=fused)
    return LowPrecisionAdamW(
        options,
        lr=arguments.lr,
        betas=betas,
        moments_dtype=moments_dtype,
        in_eight_bits=in_eight_bits,
        rounds_by_chance=rounds_by_chance,
        names=names,
        places={parameter: place_of(parameter, cuts or {}) for parameter in names},
        seed=seed,
        compiles=compiles,
    )
