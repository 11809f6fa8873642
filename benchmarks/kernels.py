"""The kernels that an operation launches on a GPU: bytes, FLOPs, and the least time on an H100 (roofline)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fabric_train.model.flops import peak_flops

GPU = "H100"
BANDWIDTH = 3.35e12
"""Bytes per second of the memory of an H100 SXM (NVIDIA's data sheet)."""

_ONLY_WRITE = {"copy_", "zero_", "fill_", "normal_", "uniform_"}
_READ_ROWS = {"embedding", "index_select", "gather", "index"}  # of their first argument, as many as the result has
_VARLEN_PASSES = {"_varlen_attn": 2, "_varlen_attn_backward": 5}
"""The products of variable-length attention; the backward pass computes the scores again."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, and the bytes of the tensors that it reads and writes."""

    read: int
    written: int
    flops: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    """The dtype in which it multiplies."""
    part: str | None = None
    """The part of a step that it belongs to, if it is not its operation's."""

    @property
    def least_seconds(self) -> float:
        """The time for its bytes or its FLOPs on an H100, whichever is longer."""
        seconds = (self.read + self.written) / BANDWIDTH
        peak = peak_flops(GPU, self.dtype)
        assert peak is not None
        return max(seconds, self.flops / peak)


def kernels_of(
    func: Any, args: Any, kwargs: Any, result: Any, is_on_device: Callable[[torch.Tensor], bool]
) -> list[Kernel]:
    """Return the kernels of an operation; none if it only makes a view."""
    name = func.overloadpacket.__name__
    read, written = _traffic(func, name, args, kwargs, result, is_on_device)
    if not written:
        return []
    if name == "gemm_4bit":
        inputs, packed, shape, scales = args[:4]
        return _product_in_4_bits(inputs, packed, shape, scales, result)
    if name == "dequantize_4bit":
        return [Kernel(read, written, part="dequantization")]
    flops = _count_flops(func, name, args, kwargs, result)
    dtype = torch.bfloat16
    if flops:
        # sums, such as the logarithms that attention keeps, may be fp32 beside the matrices
        dtype = min((leaf.dtype for leaf in tree_leaves(args) if _is_matrix(leaf)), key=lambda dtype: dtype.itemsize)
    kernel = Kernel(read, written, flops, dtype)
    if name == "addmm" and args[0].dim() == 2 and func._overloadname == "default":
        # torch first copies the matrix that it adds to into the result, which cuBLAS then reads and writes
        num_bytes = tensor_bytes(args[0])
        return [Kernel(num_bytes, written), kernel]
    return [kernel]


def _product_in_4_bits(
    inputs: torch.Tensor, packed: torch.Tensor, shape: list[int], scales: torch.Tensor, output: torch.Tensor
) -> list[Kernel]:
    """Return the kernels of bitsandbytes' product: for more than 1,536 tokens it dequantizes the weight and multiplies.

    ``inputs`` is [..., in], ``packed`` has the bytes of a weight of ``shape`` (out, in), ``output`` is [..., out].
    """
    num_elements = math.prod(shape)
    weight_bytes = num_elements * inputs.itemsize
    num_tokens = inputs.numel() // inputs.shape[-1]
    dequantization = Kernel(tensor_bytes(packed) + tensor_bytes(scales), weight_bytes, part="dequantization")
    read = tensor_bytes(inputs) + weight_bytes
    product = Kernel(read, tensor_bytes(output), 2.0 * num_tokens * num_elements, inputs.dtype)
    return [dequantization, product]


def _is_matrix(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.dtype.is_floating_point


def _count_flops(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of matrix products and of attention, which computes the causal half of its scores."""
    if name in _VARLEN_PASSES:
        # the borders of fake documents have no content: all documents are as long as the longest
        arguments = _arguments_by_name(func, args, kwargs)
        query = arguments["query"]  # [tokens, heads, head_dim]
        return _VARLEN_PASSES[name] * query.numel() * arguments["max_k"]
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return 0.0
    options = {key: value for key, value in kwargs.items() if key not in ("out", "out_dtype")}
    operands = [value for value in args if not isinstance(value, torch.dtype)]  # formulas take no ``out_dtype``
    flops = float(formula(*operands, **options, out_val=result))
    if _arguments_by_name(func, args, kwargs).get("is_causal"):
        flops /= 2
    return flops


def _arguments_by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _traffic(
    func: Any, name: str, args: Any, kwargs: Any, result: Any, is_on_device: Callable[[torch.Tensor], bool]
) -> tuple[int, int]:
    """Return the bytes that a kernel reads and writes."""
    inputs: dict[int, torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors: dict[int, torch.Tensor] = {}
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and is_on_device(leaf):
                tensors[id(leaf)] = leaf
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            outputs |= tensors
        if not (is_written and (name in _ONLY_WRITE or argument.is_out)):
            inputs |= tensors
    returned = result if isinstance(result, tuple) else (result,)
    for declared, value in zip(func._schema.returns, returned, strict=False):
        if declared.alias_info is None:
            outputs |= {id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    written = sum(map(tensor_bytes, outputs.values()))
    sizes = {key: tensor_bytes(tensor) for key, tensor in inputs.items()}
    if name in _READ_ROWS and id(args[0]) in sizes:
        sizes[id(args[0])] = written
    return sum(sizes.values()), written


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's different elements; an expanded dimension is read once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.itemsize if tensor.numel() else 0
