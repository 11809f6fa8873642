"""Shard the weight matrices of each layer among the ranks of a tensor-parallel group (arXiv:1909.08053).

The plan comes from the model family in transformers. A column-wise matrix takes the whole input and gives each rank
some of the heads or hidden units. The row-wise matrix after it takes these, and the ranks' outputs are summed: one
all-reduce forward and one backward for attention, and the same for the MLP. Norms, embeddings and head are not sharded.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig

from fabric_train.cli.errors import InputError

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_SHARDED_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def check_tensor_parallel(config: PretrainedConfig, source: str, size: int) -> None:
    """Check that a model's layers can be sharded among ``size`` ranks.

    Args:
        config: of the model.
        source: name or folder of the model, for the error message.
        size: ranks of a tensor-parallel group.

    Raises:
        InputError: the model family has no plan for it, or a size of the model is not a multiple of ``size``.
    """
    if size == 1:
        return
    given, text = f"--tensor_parallel_size {size}: {source}, a {config.model_type},", config.get_text_config()
    plan = _plan(config)
    if not plan or set(plan.values()) - _STYLES.keys():
        raise InputError(f"{given} does not support tensor parallelism here; leave it out")
    for name in _SHARDED_SIZES:
        number = getattr(text, name, None) or size
        if number % size:
            raise InputError(f"{given} has {name} {number}, which is not a multiple of {size}; give a divisor of it")


def parallelize_layers(model: Any, mesh: DeviceMesh) -> None:
    """Shard the layers' matrices in place; each rank keeps its part of what it already holds, nothing is sent.

    Args:
        model: from transformers, possibly with meta parameters.
        mesh: of one dimension.
    """
    styles = {name: _STYLES[style]() for name, style in _plan(model.config).items()}
    parallelize_module(model.base_model, mesh, styles, src_data_rank=None)


def _plan(config: PretrainedConfig) -> dict[str, str]:
    """Return the style of each sharded module, by its name in the base model with * for the layer's number.

    Some versions of transformers add the embedding, which is not sharded here.
    """
    plan: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    return {name: style for name, style in plan.items() if "*" in name}
