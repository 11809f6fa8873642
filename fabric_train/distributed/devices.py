"""``--accelerator`` and ``--devices`` against what this machine has."""

import os

from lightning.fabric.accelerators import CUDAAccelerator

from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import is_launched, under_fabric_run

_PROCESSES_PER_CORE = 16  # more, each with a model of its own, are a slip and not a wish


def resolve_accelerator(accelerator: str) -> str:
    """Return "cuda" or "cpu" for the argument.

    Raises:
        InputError: where a GPU is asked for and none is there.
    """
    if accelerator == "auto":
        return "cuda" if CUDAAccelerator.is_available() else "cpu"
    if accelerator in ("cuda", "gpu") and not CUDAAccelerator.is_available():
        raise InputError(
            f"--accelerator {accelerator}: torch finds no GPU here; use --accelerator cpu, or check the driver"
        )
    return "cpu" if accelerator == "cpu" else "cuda"


def count_devices(devices: int | str, accelerator: str) -> int:
    """Return how many processes ``--devices`` means on one machine.

    Raises:
        InputError: where there are fewer GPUs than asked for, or far fewer CPU cores.
    """
    there = CUDAAccelerator.auto_device_count() if accelerator == "cuda" else 1
    if str(devices) in ("auto", "-1"):
        return there
    cores = os.cpu_count() or 1
    if accelerator == "cpu" and str(devices).isdigit() and int(devices) > _PROCESSES_PER_CORE * cores:
        raise InputError(
            f"--devices {devices}: so many processes would wait for this machine's {cores} CPU cores; "
            f"give {_PROCESSES_PER_CORE * cores} or fewer"
        )
    indices = [int(index) for index in str(devices).split(",")]
    wanted, highest = (len(indices), max(indices) + 1) if len(indices) > 1 else (indices[0], indices[0])
    if accelerator == "cuda" and highest > there:
        raise InputError(f"--devices {devices}: only {there} GPU{'s are' if there > 1 else ' is'} here")
    return wanted


def count_planned(devices: int | str) -> int:
    """Return how many processes ``--devices`` means on a machine that need not be this one.

    Raises:
        InputError: it says auto.
    """
    if str(devices) in ("auto", "-1"):
        raise InputError(
            f"--devices {devices} means those of this machine, and --device_memory plans for others: give a number"
        )
    return len(str(devices).split(",")) if "," in str(devices) else int(devices)


def unused_gpus(devices: int | str, accelerator: str) -> str | None:
    """Return a line for the user where the run leaves GPUs of this machine idle."""
    there = CUDAAccelerator.auto_device_count() if accelerator == "cuda" else 0
    used = count_devices(devices, accelerator)
    if used >= there:
        return None
    return f"{used} of this machine's {there} GPUs are used; fabric run takes one unless told --devices {there}"


def refuse_lone_node(num_nodes: int) -> None:
    """Refuse several machines where nothing says how they find each other: this one would wait for the others.

    Raises:
        InputError: saying how to start such a run.
    """
    if num_nodes > 1 and not (under_fabric_run() or is_launched() or "MASTER_ADDR" in os.environ):
        raise InputError(
            f"--num_nodes {num_nodes}: start the run on every machine, with torchrun --nnodes {num_nodes}, srun, or "
            f"fabric run --num-nodes {num_nodes} --node-rank 0, 1, ... --main-address HOST"
        )


def first_index(devices: int | str) -> int:
    """Return the GPU that a lone process takes: the first of a list, else the first there is."""
    return int(str(devices).split(",")[0]) if "," in str(devices) else 0
