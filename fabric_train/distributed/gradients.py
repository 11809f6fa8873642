"""Compute the norm of a gradient, clip it and average it, for parameters that may be divided among the ranks.

All functions without an underscore are collective: every rank must call them, in the same order.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from fabric_train.distributed.ranks import to_device_async
from fabric_train.distributed.sharded_parameters import local_part

_ROW = 1024
"""The number of squares that are summed in fp32 on the CPU; the sums of these rows are added in fp64."""


@torch.no_grad()
def average_replicated(model: Any) -> None:
    """Average over all ranks the gradients of parameters that every rank holds in full although the model is sharded.

    A strategy that shards the model ignores these parameters (``model.replicated``, set by ``setup_model``). Call this
    once a step, after the backward passes. The gradients travel as one fp32 vector.
    """
    replicated = getattr(model, "replicated", ())
    if not replicated or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for parameter in replicated:
        if parameter.grad is None:  # no token of this rank came to its layer
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in replicated]
    flat_gradients = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat_gradients)
    flat_gradients /= dist.get_world_size()
    flat_averages = flat_gradients.split([gradient.numel() for gradient in gradients])
    pairs = zip(flat_averages, gradients, strict=True)
    averages = [average.view_as(gradient) for average, gradient in pairs]
    torch._foreach_copy_(gradients, averages)


@torch.no_grad()
def clip_grad_norm(fabric: Fabric, model: Any, optimizer: Any, max_norm: float) -> torch.Tensor:
    """Scale the gradient in place to a 2-norm of at most ``max_norm`` over all parameters; 0 leaves it unchanged.

    Call it after the backward passes of a step.

    Args:
        fabric: The run's Fabric.
        model: The model that Fabric has set up.
        optimizer: Its optimizer, which Fabric has set up.
        max_norm: Largest norm that is not scaled.

    Returns:
        The norm before clipping, fp64 [], the same on all ranks. The host does not wait for it.
    """
    # undo fp16's loss scaling
    fabric.strategy.precision.unscale_gradients(getattr(optimizer, "optimizer", optimizer))
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = _squared_norm(fabric, model, parameters).sqrt()
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()  # as torch.nn.utils.clip_grad_norm_
        _scale([local_part(parameter.grad) for parameter in parameters], factor)
    return norm


def _squared_norm(fabric: Fabric, model: Any, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return the sum of squares of the gradient over all ranks, fp64 []; a part that several ranks hold counts once.

    The gradients are grouped by how they are sharded. Each group's local sum of squares is then summed over those ranks
    that hold different parts of it: for FSDP1 the ranks of the process group, for a ``DTensor`` the mesh dimensions in
    which it is not replicated, for a full gradient none.
    """
    # FSDP1's parameters are plain tensors: their sharding is None, like that of a model that is not sharded
    root = getattr(model, "_forward_module", model)
    is_fsdp1 = isinstance(root, FullyShardedDataParallel) and root.sharding_strategy is not ShardingStrategy.NO_SHARD
    groups_of_plain_tensors = [root.process_group] if is_fsdp1 else []
    process_groups: dict[Hashable, list[dist.ProcessGroup | None]] = {None: groups_of_plain_tensors}
    # the list exists even if it stays empty: a rank whose part has only padding still takes part in the sum
    gradients_by_sharding: dict[Hashable, list[torch.Tensor]] = {None: []}

    replicated_ids = {id(parameter) for parameter in getattr(model, "replicated", ())}
    for parameter in parameters:
        gradient: Any = parameter.grad
        sharding: Hashable = None
        if isinstance(gradient, DTensor):
            sharding = (gradient.device_mesh, gradient.placements)
            process_groups[sharding] = _sharding_groups(gradient)
        elif id(parameter) in replicated_ids:
            sharding = "replicated"
            process_groups[sharding] = []
        gradients_by_sharding.setdefault(sharding, []).append(local_part(gradient))

    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    for sharding, gradients in gradients_by_sharding.items():
        squared_norm = to_device_async(_squared_norms(gradients).sum(), fabric.device)
        for process_group in process_groups[sharding]:
            dist.all_reduce(squared_norm, group=process_group)
        total = total + squared_norm
    return total


def _sharding_groups(tensor: DTensor) -> list[dist.ProcessGroup | None]:
    """Return this rank's process group in each mesh dimension in which the tensor is not replicated."""
    groups: list[dist.ProcessGroup | None] = []
    for dimension, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            groups.append(tensor.device_mesh.get_group(dimension))
    return groups


def _squared_norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a zero and then the sum of squares of each local tensor, fp64 [1 + tensors], on their device.

    The zero is there for a rank without tensors, because torch does not stack an empty list.
    """
    zero = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    if zero.device.type == "cpu":  # where torch would make an fp64 copy of each tensor
        return torch.stack([zero, *(_squared_norm_in_rows(tensor) for tensor in tensors)])
    return torch.stack([zero, *_norms_in_fp64(tensors)]).square()


def _norms_in_fp64(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the norms of the tensors that are not empty, each fp64 [], in a few kernels for all."""
    nonempty_tensors = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty_tensors:  # torch refuses an empty list
        return ()
    return torch._foreach_norm(nonempty_tensors, dtype=torch.float64)


def _squared_norm_in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a tensor, fp64 []: rows of 1024 numbers in fp32, the sum over rows in fp64."""
    flat = tensor.flatten()
    num_in_rows = flat.numel() // _ROW * _ROW
    row_norms = torch.linalg.vector_norm(flat[:num_in_rows].view(-1, _ROW), dim=1, dtype=torch.float32)
    remainder_norm = torch.linalg.vector_norm(flat[num_in_rows:], dtype=torch.float32)
    return row_norms.double().square().sum() + remainder_norm.double().square()


def _scale(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply local tensors in place by ``factor``, fp32 []. On a GPU it is rounded to their dtype first.

    torch rounds it on a GPU also if it multiplies a single tensor. For a list it takes one kernel per tensor unless the
    dtypes agree.
    """
    tensors_by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        tensors_by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, dtype_tensors in tensors_by_dtype.items():
        local_factor = factor.to(dtype_tensors[0].device)
        if local_factor.device.type != "cpu":
            local_factor = local_factor.to(dtype)
        torch._foreach_mul_(dtype_tensors, local_factor)
