"""Choose the dtypes of weights, matrix products and gradient reduction for each ``--precision``.

Weights keep the dtype they are loaded in (:func:`weights_dtype`). Fabric's own precision plugins would also cast the
rotary frequencies and the gradient reduction. Both stay fp32 here: with Llama 3's base of 5e5, bf16 frequencies are
wrong by 0.9 rad at position 512.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision, XLAPrecision
from torch import nn


def weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the weights and the optimizer's moments: bfloat16 for bf16-true, else float32."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the matrix products."""
    return {"32-true": torch.float32, "16-mixed": torch.float16}.get(precision, torch.bfloat16)


def precision_plugin(parallelism: str, precision: str, accelerator: str) -> Precision:
    """Return Fabric's precision plugin.

    Args:
        parallelism: "fsdp", "fsdp2", "ddp", "single" or "xla".
        precision: as in ``--precision``.
        accelerator: "cuda", "cpu" or "tpu".
    """
    if parallelism == "xla":
        return XLAPrecision("32-true")  # torch-xla's FSDP does the rest
    if parallelism == "fsdp":
        return _FSDPPrecisionAsLoaded("16-mixed" if precision == "16-mixed" else "32-true")
    if parallelism != "fsdp2" and precision in ("bf16-mixed", "16-mixed"):
        return _AutocastPrecision(precision, device=accelerator)  # type: ignore[arg-type]
    return Precision()


def average_in_fp32(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of bf16 gradients over the ranks in fp32 (DDP communication hook)."""
    gradients = bucket.buffer()
    total = gradients.float().div_(dist.get_world_size())
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda reduced: gradients.copy_(reduced.value()[0]))


class _FSDPPrecisionAsLoaded(FSDPPrecision):
    """FSDP precision that casts neither the module nor its output; the strategy's ``MixedPrecision`` does the rest."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_output(self, data: Any) -> Any:
        return data


class _AutocastPrecision(MixedPrecision):
    """Autocast that does not cast the module's output; Fabric's own rounds the summed fp64 loss to fp32."""

    def convert_output(self, data: Any) -> Any:
        return data
