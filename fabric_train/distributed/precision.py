"""Choose the dtypes of weights, matrix products and gradient reduction for each ``--precision``, and ``--float8``.

Weights keep the dtype they are loaded in (:func:`weights_dtype`). Fabric's own precision plugins would also cast the
rotary frequencies and the gradient reduction. Both stay fp32 here: with Llama 3's base of 5e5, bf16 frequencies are
wrong by 0.9 rad at position 512.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import FSDPPrecision, MixedPrecision, Precision, XLAPrecision
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.files.requirements import check_package

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_MIN_FLOAT8_CAPABILITY = (8, 9)  # Ada, the first with float8 units
_FLOAT8_MULTIPLE = 16  # torch's scaled product needs both dimensions of a matrix to be multiples of it


def weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the weights and the optimizer's moments: bfloat16 for bf16-true, else float32."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the matrix products."""
    if precision == "32-true":
        return torch.float32
    if precision == "16-mixed":
        return torch.float16
    return torch.bfloat16


def gathered_dtype(arguments: "TrainArguments", parallelism: str) -> torch.dtype | None:
    """Return the dtype that fsdp and fsdp2 cast gathered weights to; None if only autocast casts anything.

    Weights in 4 bits are stored in tensors of the other weights' dtype. A cast would destroy them.
    """
    precision = arguments.model.precision
    if parallelism not in ("fsdp", "fsdp2"):
        return None
    has_4bit_weights = arguments.adapter.base_weights is not None
    if has_4bit_weights and precision.endswith("mixed"):
        return None
    return compute_dtype(precision)


def precision_plugin(arguments: "TrainArguments", parallelism: str, accelerator: str) -> Precision:
    """Return Fabric's precision plugin; for ``parallelism`` and ``accelerator`` see ``prepared_run.DevicePlan``."""
    precision = arguments.model.precision
    if parallelism == "xla":
        return XLAPrecision("32-true")  # torch-xla's FSDP casts to the dtype of the products itself
    autocasts = precision.endswith("mixed") and gathered_dtype(arguments, parallelism) is None
    if parallelism == "fsdp":
        if autocasts:
            return _FSDPAutocastPrecision(precision, accelerator)
        # "16-mixed" brings fp16's loss scaling
        return _FSDPPrecisionAsLoaded("16-mixed" if precision == "16-mixed" else "32-true")
    if autocasts:
        return _AutocastPrecision(precision, device=accelerator)  # type: ignore[arg-type]
    return Precision()


def average_in_fp32(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of bf16 gradients over the ranks in fp32 (DDP communication hook)."""
    gradients = bucket.buffer()
    total = gradients.float().div_(dist.get_world_size())
    future = dist.all_reduce(total, async_op=True).get_future()
    return future.then(lambda reduced: gradients.copy_(reduced.value()[0]))


class _FSDPPrecisionAsLoaded(FSDPPrecision):
    """FSDP precision that casts neither the module nor its output; the strategy's ``MixedPrecision`` does all casts."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_output(self, data: Any) -> Any:
        return data


class _FSDPAutocastPrecision(_FSDPPrecisionAsLoaded):
    """Autocast with an FSDP1 that casts nothing."""

    def __init__(self, precision: str, device: str) -> None:
        super().__init__(precision)  # type: ignore[arg-type]
        self._device = device

    def forward_context(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device, compute_dtype(self.precision))


class _AutocastPrecision(MixedPrecision):
    """Autocast that does not cast the module's output: Fabric's would round the summed fp64 loss to fp32."""

    def convert_output(self, data: Any) -> Any:
        return data


def check_float8(arguments: "TrainArguments", accelerator: str) -> None:
    """Check that ``--float8`` can be used, as far as this is known without a device."""
    if accelerator == "cpu":
        raise InputError("--float8 true needs a GPU (L40S, RTX 4090, H100 or newer); leave out --float8 on CPU")
    if not arguments.model.precision.startswith("bf16"):
        raise InputError(f"--float8 true needs bf16-mixed or bf16-true, not --precision {arguments.model.precision}")
    if isinstance(arguments.fsdp.mlp_tile_size, int):
        raise InputError(
            f"--float8 true does not work with --mlp_tile_size {arguments.fsdp.mlp_tile_size}; leave one of them out"
        )
    if not arguments.fsdp.compile:
        raise InputError("--float8 true is slower than bf16 without compiled layers; add --compile true")
    check_package("torchao", "--float8 true")


def check_gpu_has_float8(device: torch.device) -> None:
    """Check that a GPU multiplies float8 matrices."""
    if torch.cuda.get_device_capability(device) < _MIN_FLOAT8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise InputError(f"--float8 true: {name} does not support float8; leave out --float8")


def convert_to_float8(layers: Iterable[nn.Module], *, emulate: bool = False) -> None:
    """Make each linear layer compute its three products, the output and the two gradients, in float8 (e4m3).

    Each row and column has its own scale, a power of two (torchao's recipe "rowwise"), so an outlier costs precision
    only in its own row. The head, the embeddings and matrices with a dimension that is not a multiple of 16 stay in
    bf16. With ``emulate``, compute what float8 would in higher precision, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_convertible(module: nn.Module, _: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        return all(size % _FLOAT8_MULTIPLE == 0 for size in module.weight.shape)

    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=is_convertible)
