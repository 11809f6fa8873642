"""Resolve ``--accelerator``, ``--devices`` and ``--num_nodes``, and check them against this machine."""

import os
import re

import torch
from lightning.fabric.accelerators import CUDAAccelerator

from fabric_train.cli.errors import InputError
from fabric_train.distributed.xla import check_xla_device

_MAX_PROCESSES_PER_CORE = 16  # each process has a model of its own, so a larger number is a mistake
_MIN_BF16_CAPABILITY = (8, 0)  # Ampere; V100 has 7.0 and T4 has 7.5


def resolve_accelerator(accelerator: str) -> str:
    """Return "cuda", "cpu" or "tpu" for ``--accelerator``."""
    if accelerator == "tpu":
        check_xla_device()
        return accelerator
    if accelerator == "auto":
        return "cuda" if CUDAAccelerator.is_available() else "cpu"
    if accelerator in ("cuda", "gpu") and not CUDAAccelerator.is_available():
        raise InputError(
            f"--accelerator {accelerator}: torch finds no GPU here; use --accelerator cpu, or check the driver"
        )
    return "cpu" if accelerator == "cpu" else "cuda"


def count_devices(devices: int | str, accelerator: str) -> int:
    """Return the number of processes on this machine that ``--devices`` means."""
    available = CUDAAccelerator.auto_device_count() if accelerator == "cuda" else 1
    if str(devices) in ("auto", "-1"):
        return available
    cores = os.cpu_count() or 1
    if accelerator == "cpu" and str(devices).isdigit() and int(devices) > _MAX_PROCESSES_PER_CORE * cores:
        raise InputError(
            f"--devices {devices} is too many for this machine's {cores} CPU cores; "
            f"give {_MAX_PROCESSES_PER_CORE * cores} or fewer"
        )
    indices = [int(index) for index in str(devices).split(",")]
    requested, highest = (len(indices), max(indices) + 1) if len(indices) > 1 else (indices[0], indices[0])
    if accelerator == "cuda" and highest > available:
        raise InputError(
            f"--devices {devices}: this machine has only {available} GPU{'s' if available > 1 else ''}; give fewer"
        )
    return requested


def check_bf16(precision: str, parallelism: str, devices: int | str) -> None:
    """Check that the GPUs of a run compute in bf16, if ``--precision`` asks for it; torch would emulate it, slowly."""
    if not precision.startswith("bf16"):
        return
    indices = map(int, str(devices).split(",")) if "," in str(devices) else range(count_devices(devices, "cuda"))
    for index in indices:
        capability = torch.cuda.get_device_capability(index)
        if capability < _MIN_BF16_CAPABILITY:
            others = "32-true" if parallelism == "fsdp2" else "16-mixed or 32-true"
            raise InputError(
                f"--precision {precision}: {torch.cuda.get_device_name(index)} does not support bf16 "
                f"(compute capability {capability[0]}.{capability[1]}, it needs 8.0); use {others}"
            )


def count_planned_devices(devices: int | str) -> int:
    """Return the number of processes on a machine that ``--devices`` means, without looking at this machine."""
    if str(devices) in ("auto", "-1"):
        raise InputError(
            f"--devices {devices} counts this machine's, and --device_memory plans for another machine; give a number"
        )
    return len(str(devices).split(",")) if "," in str(devices) else int(devices)


def note_on_unused_gpus(devices: int | str, accelerator: str) -> str | None:
    """Return a line for the user if the run leaves GPUs of this machine idle, else None."""
    available = CUDAAccelerator.auto_device_count() if accelerator == "cuda" else 0
    used = count_devices(devices, accelerator)
    if used >= available:
        return None
    return f"{used} of this machine's {available} GPUs are used; fabric run uses one unless given --devices {available}"


def single_gpu_index(devices: int | str) -> int:
    """Return the index of the GPU that a single process uses: the first of a list like "2,3", else 0."""
    return int(str(devices).split(",")[0]) if "," in str(devices) else 0


def device_name(device: torch.device) -> str:
    """Return a GPU's name, or the instructions and threads of a CPU: what else decides the last digits of a result."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU, {torch.backends.cpu.get_cpu_capability()}, threads {torch.get_num_threads()}"
    return device.type


def use_threads_of(name: str | None) -> None:
    """Let this CPU compute with as many threads as the device that has this name, see :func:`device_name`."""
    found = re.fullmatch(r"CPU, .*, threads ([1-9][0-9]{0,4})", name or "")
    if found:
        torch.set_num_threads(int(found[1]))
