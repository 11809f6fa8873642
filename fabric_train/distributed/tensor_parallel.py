"""Tensor parallelism (arXiv:1909.08053): the matrices of each layer are cut among the ranks of a group.

The plan is the model family's own in transformers. A matrix cut by columns takes the whole input and gives each rank
some of the heads or hidden units; the one after it, cut by rows, takes those, and the ranks' outputs are added up: one
all-reduce forward and one backward for attention, and as many for the MLP. Norms, embeddings and head stay whole.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig

from fabric_train.cli.errors import InputError

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def refuse_uncuttable(config: PretrainedConfig, source: str, size: int) -> None:
    """Refuse a model whose layers cannot be cut among ``size`` ranks.

    Raises:
        InputError: saying what stands against it.
    """
    if size == 1:
        return
    given, text = f"--tensor_parallel_size {size}: {source}, a {config.model_type},", config.get_text_config()
    plan = _plan(config)
    if not plan or set(plan.values()) - _STYLES.keys():
        raise InputError(f"{given} cannot be cut so; leave it out")
    for name in _DIVIDED:
        number = getattr(text, name, None) or size
        if number % size:
            raise InputError(f"{given} has {number} {name}, no multiple of {size}; give one that divides it")


def cut_layers(model: Any, mesh: DeviceMesh) -> None:
    """Cut the layers' matrices in place among the ranks of a mesh of one dimension.

    Each rank takes its part of what it holds already; nothing is sent.
    """
    styles = {name: _STYLES[style]() for name, style in _plan(model.config).items()}
    parallelize_module(model.base_model, mesh, styles, src_data_rank=None)


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """The names of modules of the base model, with * for the number of a layer, and how each is cut."""
    return config.get_text_config().base_model_tp_plan or {}
