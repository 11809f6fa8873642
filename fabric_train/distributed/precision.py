"""Precision: the types that weights are held in, products are computed in and gradients are reduced in.

Weights stay in the type they are loaded in (:func:`weights_dtype`). Fabric's own precision names would also cast the
rotary frequencies and the reduction of gradients. Both stay fp32 here: at Llama-3's base of 5e5, bf16 frequencies are
wrong by 0.9 rad at position 512.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision
from torch import nn


def weights_dtype(precision: str) -> torch.dtype:
    """Type of the weights and the optimizer's moments: bfloat16 for bf16-true, else float32."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """Type that the matrix products run in."""
    return {"32-true": torch.float32, "16-mixed": torch.float16}.get(precision, torch.bfloat16)


def precision_plugin(parallelism: str, precision: str, accelerator: str) -> Precision:
    """Return Fabric's plugin for a precision under a parallelism, "fsdp", "fsdp2", "ddp" or "single"."""
    if parallelism == "fsdp":
        return _AsLoaded("16-mixed" if precision == "16-mixed" else "32-true")
    if parallelism != "fsdp2" and precision in ("bf16-mixed", "16-mixed"):
        return _Autocast(precision, device=accelerator)  # type: ignore[arg-type]
    return Precision()


def average_in_fp32(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: average a bucket of bf16 gradients over the ranks in fp32."""
    gradients = bucket.buffer()
    total = gradients.float().div_(dist.get_world_size())
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda reduced: gradients.copy_(reduced.value()[0]))


class _AsLoaded(FSDPPrecision):
    """FSDP precision that leaves the module in the types it was loaded in, and what it returns in its own; the
    strategy's MixedPrecision does the rest.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_output(self, data: Any) -> Any:
        return data


class _Autocast(MixedPrecision):
    """Autocast that leaves what the module returns in its type; Fabric's own rounds a summed loss to fp32."""

    def convert_output(self, data: Any) -> Any:
        return data
