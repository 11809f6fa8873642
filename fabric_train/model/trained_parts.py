"""Which parameters of a model train: all of them, an adapter's, or the ones that ``train_only`` chose.

``choose_trained`` decides, for ``ModelShape.trained``. Before the model is sharded, ``freeze_other_parts`` applies it,
and ``requires_grad`` carries it on. A frozen parameter is in a checkpoint, but not in the optimizer's files.
"""

from collections.abc import Callable

import torch
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.distributed.ranks import named_parameters, original_name
from fabric_train.model.adapter import Adapter

_trains: Callable[[str], bool] | None = None


def train_only(trains: Callable[[str], bool] | None) -> None:
    """Train only the parameters for whose names ``trains`` is true; None: all.

    All ranks must call this before the run is prepared. A name is as in transformers' model, such as
    ``model.layers.0.mlp.up_proj.weight``. A tied weight has the name of the embedding.
    """
    global _trains
    _trains = trains


def choose_trained(model: nn.Module, adapter: Adapter | None = None) -> dict[str, torch.Size]:
    """Return names and shapes of what trains, an adapter and modules beside it included; the model may be on meta."""
    trains = adapter.trains if adapter else _trains
    trained = {name: each.shape for name, each in model.named_parameters() if trains is None or trains(name)}
    if not trained:
        raise InputError("no parameter of the model would train; choose others with train_only")
    return trained


def freeze_other_parts(model: nn.Module, adapter: Adapter | None = None) -> None:
    """Let only the chosen parameters train. Call it before anything wraps the model.

    The model is asked, and not ``ModelShape.trained``: a head that is stored beside the embedding is a parameter of its
    own, although the configuration ties them.
    """
    trained = choose_trained(model, adapter)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a set-up model that train, sharded, under the names that they had before any wrapper."""
    return [(original_name(name), parameter) for name, parameter in named_parameters(model) if parameter.requires_grad]
