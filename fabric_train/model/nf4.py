"""Hold frozen weights in 4 bits: NF4 of bitsandbytes, for adapters on a quantized base (QLoRA, arXiv:2305.14314).

A weight [out, in] is cut into blocks of 64 elements, which never cross a row. Each block has an fp32 scale, its largest
absolute value, and 4 bits for each element: 4.5 bits in all. So any rows of a weight can be quantized alone, and each
rank reads and quantizes its own.

The bytes are stored as tensors of the dtype of the weights: strategies that shard a model send and copy them, and never
compute with them or cast them (``distributed.precision.gathered_dtype``).
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.files.requirements import load_package
from fabric_train.model.weight_files import Weights

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

BLOCK = 64
"""The number of elements of a row that share a scale."""
_WEIGHT = "weight"
_SCALES = "weight_scales"
_CPU_LOGGER = "bitsandbytes.backends.cpu.ops"
_NO_KERNEL_FROM_HUB = "Failed to load CPU gemm_4bit_forward"
"""The beginning of a warning that bitsandbytes logs when it is imported on a CPU with AVX512-BF16."""


class NF4Linear(nn.Linear):
    """A linear layer that dequantizes its weight to the dtype of its input, in the forward and in the backward pass.

    ``weight`` has the bytes of [out, in / 2], and ``weight_scales`` the bytes of fp32 [out, in / 64], both in rows.
    """

    weight_scales: nn.Parameter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` [..., in] times the weight, [..., out] in their dtype, or in autocast's."""
        from bitsandbytes import matmul_4bit

        device_type = inputs.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        state = _quant_state(self.weight_scales, (self.out_features, self.in_features), inputs.dtype)
        packed = self.weight.view(torch.uint8).reshape(-1, 1)  # as bitsandbytes packs: [out * in / 2, 1]
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        output: torch.Tensor = matmul_4bit(inputs, packed.t(), quant_state=state, bias=bias)
        return output

    def dequantized(self) -> torch.Tensor:
        """Return the weight, fp32 [out, in]."""
        return dequantize(self.weight, self.weight_scales, self.in_features)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes the same as a linear layer. Llama 4's router is a subclass that does not."""
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, NF4Linear.forward)


def stored_widths(in_features: int, dtype: torch.dtype) -> dict[str, int]:
    """Return how many elements of ``dtype`` hold the bytes of one row, by the name of the parameter.

    A row of ``in_features`` weights takes half as many bytes, and its scales take 4 bytes per block.
    """
    weight_bytes = in_features // 2
    scale_bytes = in_features // BLOCK * 4
    return {_WEIGHT: weight_bytes // dtype.itemsize, _SCALES: scale_bytes // dtype.itemsize}


def dequantize(packed: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
    """Return rows of a weight, fp32 [rows, in], from the same rows of both parameters of an ``NF4Linear``."""
    from bitsandbytes.functional import dequantize_4bit

    state = _quant_state(scales, (len(packed), in_features), torch.float32)
    rows: torch.Tensor = dequantize_4bit(packed.view(torch.uint8).reshape(-1, 1), state)
    return rows


def _quant_state(scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> "QuantState":
    """Return bitsandbytes' description of a quantized weight of ``shape``, for computing with it in ``dtype``."""
    from bitsandbytes.functional import QuantState

    return QuantState(
        absmax=scales.view(torch.float32).reshape(-1),
        shape=torch.Size(shape),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


def read_dequantized_rows(weights: Weights, name: str, layer: NF4Linear, begin: int, end: int) -> torch.Tensor:
    """Read rows ``begin`` to ``end`` of the weight of the layer ``name``, and return them in fp32 [rows, in]."""
    stored: dict[str, torch.Tensor] = {}
    for parameter, width in stored_widths(layer.in_features, layer.weight.dtype).items():
        stored[parameter] = weights.read_block(f"{name}.{parameter}", (begin, 0), (end - begin, width))
    return dequantize(stored[_WEIGHT], stored[_SCALES], layer.in_features)


def quantize_layers(layers: Collection[nn.Module], dtype: torch.dtype, skipped: Collection[str] = ()) -> None:
    """Make the linear layers in decoder layers ``NF4Linear``, with parameters on the meta device.

    Args:
        layers: the decoder layers; their linear layers change their class.
        dtype: the dtype of the tensors that store the bytes.
        skipped: names of linear layers that are not quantized, such as ``mlp.down_proj``.

    Raises:
        InputError: the rows of a weight cannot be cut into whole blocks.
    """
    for layer in layers:
        for name, module in layer.named_modules():
            is_skipped = any(f".{name}".endswith(f".{suffix}") for suffix in skipped)
            if is_skipped or not is_linear(module):
                continue
            if module.in_features % BLOCK:
                raise InputError(
                    f"--base_weights nf4: {name} has rows of {module.in_features} values, which is not a multiple of "
                    f"{BLOCK}; leave out --base_weights"
                )
            module.__class__ = NF4Linear  # its name, hooks and bias stay
            for parameter, width in stored_widths(module.in_features, dtype).items():
                empty = torch.empty(module.out_features, width, dtype=dtype, device="meta")
                setattr(module, parameter, nn.Parameter(empty, requires_grad=False))


@dataclass(frozen=True)
class _QuantizedParameter:
    """The weight from which a parameter of an ``NF4Linear`` is made, the length of its rows, and the stored dtype."""

    weight_name: str
    in_features: int
    dtype: torch.dtype
    is_scales: bool


class QuantizedWeights:
    """The weights of a model with ``NF4Linear`` layers, quantized a block of rows at a time as they are read.

    Implements ``weight_files.Weights``.
    """

    def __init__(self, model: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        """Quantize ``weights`` of the original model; they are cast to ``dtype`` first, as transformers does."""
        self._weights = weights
        self._dtype = dtype
        self._quantized: dict[str, _QuantizedParameter] = {}
        for name, module in model.named_modules():
            if isinstance(module, NF4Linear):
                weight_name = f"{name}.{_WEIGHT}"
                for parameter in (_WEIGHT, _SCALES):
                    self._quantized[f"{name}.{parameter}"] = _QuantizedParameter(
                        weight_name, module.in_features, module.weight.dtype, is_scales=parameter == _SCALES
                    )

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``Weights``. A block of a quantized weight has whole rows."""
        parameter = self._quantized.get(name)
        if parameter is None:
            return self._weights.read_block(name, offsets, shape)
        rows = self._weights.read_block(parameter.weight_name, (offsets[0], 0), (shape[0], parameter.in_features))
        packed, scales = quantize_rows(rows.to(self._dtype))
        stored_bytes = scales.view(torch.uint8) if parameter.is_scales else packed
        return stored_bytes.view(parameter.dtype)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [rows, in] of a weight.

    Returns:
        the bytes, uint8 [rows, in / 2], and the scales of the blocks, fp32 [rows, in / 64].
    """
    from bitsandbytes.functional import quantize_4bit

    num_rows, in_features = rows.shape
    if not num_rows:  # bitsandbytes refuses an empty tensor
        return torch.empty((0, in_features // 2), dtype=torch.uint8), torch.empty((0, in_features // BLOCK))
    packed, state = quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return packed.view(num_rows, -1), state.absmax.view(num_rows, -1)


def check_installed() -> None:
    """Check that bitsandbytes is installed, and import it.

    Raises:
        InputError: it is not installed.
    """
    with _without_kernel_warning():
        load_package("bitsandbytes", "--base_weights nf4")


@contextmanager
def _without_kernel_warning() -> Iterator[None]:
    """Drop bitsandbytes' warning about a missing kernel; its other warnings are logged.

    The kernel would be downloaded from the hub, and multiplies in bf16. It is only for weights in the layout that
    bitsandbytes gives them for inference on a CPU, which an ``NF4Linear`` never has.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(_NO_KERNEL_FROM_HUB)

    logger = logging.getLogger(_CPU_LOGGER)
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)
