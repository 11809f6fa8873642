"""Kernels of bitsandbytes for the pretended devices: the CPU's, on copies in host memory.

Without any for CUDA, bitsandbytes would compile its formulas with Inductor, which cannot write code for these devices.
"""

from functools import partial
from typing import Any

_OPERATORS = ("quantize_4bit", "dequantize_4bit")


def add_kernels() -> None:
    """Register a kernel for CUDA for each operator that weights in 4 bits need."""
    import torch

    for name in _OPERATORS:
        torch.library.register_kernel(f"bitsandbytes::{name}", "cuda", partial(_run_on_host, name))


def _run_on_host(name: str, *arguments: Any) -> Any:
    """Return the results of an operator on the device of its first tensor."""
    import torch
    from torch.utils._pytree import tree_map_only

    device = arguments[0].device
    host_arguments = tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments)
    results = getattr(torch.ops.bitsandbytes, name)(*host_arguments)
    return tree_map_only(torch.Tensor, lambda result: result.to(device), results)
