"""Train on one XLA device, a TPU core or XLA's CPU device, with Fabric's ``XLAFSDPStrategy``.

torch-xla works with only one release of torch. So it has a separate environment (install/xla-requirements.txt), and
it is imported only when a run uses it. docs/contributing/launchers.md lists what several devices would need.
"""

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.accelerators import XLAAccelerator
from lightning.fabric.strategies import XLAFSDPStrategy
from lightning.fabric.strategies.parallel import ParallelStrategy
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.distributed.precision import compute_dtype

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

NOTE = (
    "XLA: the loss is computed from logits, not in the head, and at every position, so that its shape is always the "
    "same; AdamW is torch's own, not fused; weights are fp32, so the default of --precision is bf16-mixed"
)


def check_xla_device() -> None:
    """Check that torch-xla is installed and has a device: a TPU, or the kind of device that ``PJRT_DEVICE`` names."""
    if importlib.util.find_spec("torch_xla") is None:
        raise InputError(
            "--accelerator tpu: torch-xla is not installed in this environment; run make install-xla to create one "
            "that has it, and start .cache/xla/bin/python -m fabric_train"
        )
    from torch_xla._internal import tpu

    if os.environ.setdefault("PJRT_DEVICE", "TPU") == "TPU" and not tpu.num_available_chips():
        raise InputError("--accelerator tpu: no TPU found; set PJRT_DEVICE=CPU to try it on XLA's CPU device")


def check_xla_arguments(arguments: "TrainArguments", num_processes: int) -> None:
    """Check that a run on XLA uses no option that does not work there or was never tried."""
    if num_processes > 1:
        raise InputError(
            f"--accelerator tpu only works with one device, not {num_processes}; give --devices 1 --num_nodes 1"
        )
    fsdp = arguments.fsdp
    precision = arguments.model.precision
    if precision not in ("32-true", "bf16-mixed"):
        raise InputError(f"--precision {precision}: torch-xla's FSDP keeps weights in fp32; use bf16-mixed or 32-true")
    is_given_by_option = {
        "compile": fsdp.compile is True,
        "cpu_offload": fsdp.cpu_offload,
        "activation_offload": fsdp.activation_offload,
        "mlp_tile_size": isinstance(fsdp.mlp_tile_size, int),
        "float8": arguments.model.float8,
        "adapter": arguments.adapter.is_given,
        "train_only": bool(arguments.model.train_only),
        "freeze": bool(arguments.model.freeze),
        "plan": bool(arguments.planning.plan),
        "optimizer": arguments.training.orthogonalizes,
        "optimizer_states": arguments.training.optimizer_states in ("bfloat16", "8bit"),
        "activation_checkpointing": fsdp.activation_checkpointing not in ("auto", "none"),
        "sharding_strategy": fsdp.sharding_strategy != "FULL_SHARD",
    }
    for option, is_given in is_given_by_option.items():
        if is_given:
            raise InputError(f"--{option} does not work with --accelerator tpu; leave out --{option}")


class OneXLADevice(XLAAccelerator):
    """One XLA device of any kind, because Fabric's class accepts only TPUs."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xla", 0)]

    @staticmethod
    def auto_device_count() -> int:  # type: ignore[override]
        return 1

    @staticmethod
    def is_available() -> bool:  # type: ignore[override]
        """Return True: :func:`check_xla_device` has already checked for a device."""
        return True


class OneDeviceXLAStrategy(XLAFSDPStrategy):
    """Fabric's ``XLAFSDPStrategy`` on one device in this process, which Fabric's class refuses.

    Every parameter is sharded by its rows, so on one device a shard has the parameter's own shape. The optimizer then
    sees one tensor for each parameter, and checkpoints have the usual format. Each module of ``layer_classes`` is an
    FSDP unit. Weights and gradients are fp32, and ``precision`` is 32-true or bf16-mixed.
    """

    def __init__(self, layer_classes: set[type[nn.Module]], precision: str) -> None:
        super().__init__(
            auto_wrap_policy=layer_classes,
            compute_dtype=compute_dtype(precision),
            buffer_dtype=torch.float32,  # the rotary frequencies
            fp32_reduce_scatter=True,
            shard_param_on_dim_0=True,
            _shard_size_multiple=1,  # no padding
        )

    def _configure_launcher(self) -> None:
        self._launcher = None  # the base class would fork

    def setup_environment(self) -> None:
        """Set up the device without the base class's process group."""
        self._launched = True
        ParallelStrategy.setup_environment(self)

    def backward(self, tensor: torch.Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, and run the micro-batch as a separate XLA program."""
        super().backward(tensor, module, *args, **kwargs)
        run_pending(self.root_device)


def run_pending(device: torch.device) -> None:
    """Let XLA run the operations that it has recorded; do nothing on other devices.

    Without this, XLA would record more operations until Python reads a number.
    """
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def seed_xla(seed: int) -> None:
    """Seed XLA's random stream, which ``torch.manual_seed`` does not reach."""
    import torch_xla

    torch_xla.manual_seed(seed)
