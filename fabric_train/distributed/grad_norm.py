"""Clip the gradient by its global norm, however the gradient is sharded among ranks.

torch's own norm adds fp32 squares in fp32. On CPU, over the embedding of a real vocabulary, its error is far above fp32
rounding and differs between shardings (``benchmarks/invariance.py``).
"""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

_ROW = 1024
"""Squares added in fp32; the sums of these rows are added in fp64."""


@torch.no_grad()
def clip_grad_norm(fabric: Fabric, model: Any, optimizer: Any, max_norm: float) -> torch.Tensor:
    """Scale the gradient in place to a global norm of at most ``max_norm``. All ranks must call it.

    Args:
        fabric: that model and optimizer were set up with.
        model: as returned by Fabric, after the backward passes of a step.
        optimizer: as returned by Fabric, or torch's.
        max_norm: 2-norm over all parameters; 0 leaves the gradient unchanged.

    Returns:
        The norm before clipping, fp64 [], the same on all ranks.
    """
    fabric.strategy.precision.unscale_gradients(getattr(optimizer, "optimizer", optimizer))  # undo fp16's loss scaling
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = _squared_norm(fabric, model, gradients).sqrt()
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
    return norm


def _squared_norm(fabric: Fabric, model: Any, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares over all ranks, fp64 []; a gradient that several ranks hold counts once."""
    by_sharding: dict[Hashable, list[torch.Tensor]] = {}
    groups: dict[Hashable, list[dist.ProcessGroup | None]] = {}
    flat_groups = _flat_groups(model)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            sharding: Hashable = (mesh, placements)
            groups[sharding] = [
                mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate()
            ]
            by_sharding.setdefault(sharding, []).append(gradient.to_local())
        else:
            groups[None] = flat_groups
            by_sharding.setdefault(None, []).append(gradient)
    if not gradients:  # this rank's part of FSDP1's flat parameters may be only padding
        by_sharding[None], groups[None] = [], flat_groups
    zero = torch.zeros((), dtype=torch.float64, device=fabric.device)
    total = zero
    for sharding, tensors in by_sharding.items():
        squared = torch.stack([zero, *(_local_squared_norm(tensor).to(fabric.device) for tensor in tensors)]).sum()
        for group in groups[sharding]:
            dist.all_reduce(squared, group=group)
        total = total + squared
    return total


def _local_squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of a local tensor, fp64 []."""
    flat = tensor.flatten()
    whole = flat.numel() // _ROW * _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return norms.double().square().sum() + rest.double().square()


def _flat_groups(model: Any) -> list[dist.ProcessGroup | None]:
    """Return the group that FSDP1 shards the parameters among, in a list; an empty list under other strategies."""
    root = getattr(model, "_forward_module", model)
    if not isinstance(root, FullyShardedDataParallel) or root.sharding_strategy is ShardingStrategy.NO_SHARD:
        return []
    return [root.process_group]
