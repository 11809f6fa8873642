"""The global norm of the gradient, and its clipping, however the gradient is cut among ranks.

torch's own norm adds up fp32 squares in fp32. On CPU, over the embedding of a real vocabulary, that is wrong by far
more than fp32 rounds, and by another amount for each way to shard it (``benchmarks/invariance.py``).
"""

from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

_ROW = 1024
"""Elements whose squares are added up in fp32; the sums of rows are added up in fp64."""


@torch.no_grad()
def clip(fabric: Fabric, model: Any, optimizer: Any, largest: float) -> torch.Tensor:
    """Scale the gradient to a global norm of at most ``largest`` (0: leave it); all ranks call it together.

    Args:
        fabric: that model and optimizer were set up by.
        model: as Fabric gives it, after a backward pass.
        optimizer: as Fabric gives it, or torch's.
        largest: 2-norm over all parameters.

    Returns:
        the norm before, a 0-dim fp64 tensor, the same on all ranks.
    """
    fabric.strategy.precision.unscale_gradients(getattr(optimizer, "optimizer", optimizer))  # what fp16 has scaled
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = _squared_norm(fabric, model, gradients).sqrt()
    if largest:
        factor = (largest / (norm + 1e-6)).clamp(max=1.0).float()  # as torch.nn.utils.clip_grad_norm_
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
    return norm


def _squared_norm(fabric: Fabric, model: Any, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Add up the squares over all ranks, those of a gradient that several ranks hold once."""
    locals_by_cut: dict[Hashable, list[torch.Tensor]] = {}
    groups: dict[Hashable, list[dist.ProcessGroup | None]] = {}
    own_groups = _flat_groups(model)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mesh, placements = gradient.device_mesh, gradient.placements
            cut: Hashable = (mesh, placements)
            groups[cut] = [mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate()]
            locals_by_cut.setdefault(cut, []).append(gradient.to_local())
        else:
            groups[None] = own_groups
            locals_by_cut.setdefault(None, []).append(gradient)
    if not gradients:  # of this rank, whose part of FSDP1's flat parameters may be padding alone
        locals_by_cut[None], groups[None] = [], own_groups
    zero = torch.zeros((), dtype=torch.float64, device=fabric.device)
    total = zero
    for cut, tensors in locals_by_cut.items():
        squared = torch.stack([zero, *(_local_squared_norm(tensor).to(fabric.device) for tensor in tensors)]).sum()
        for group in groups[cut]:
            dist.all_reduce(squared, group=group)
        total = total + squared
    return total


def _local_squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    whole = flat.numel() // _ROW * _ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return norms.double().square().sum() + rest.double().square()


def _flat_groups(model: Any) -> list[dist.ProcessGroup | None]:
    """Return the ranks among which FSDP1 has cut the parameters; nothing under the other strategies."""
    root = getattr(model, "_forward_module", model)
    if not isinstance(root, FullyShardedDataParallel) or root.sharding_strategy is ShardingStrategy.NO_SHARD:
        return []
    return [root.process_group]
