"""Hold frozen weights in 4 bits: NF4 of bitsandbytes, for adapters on a quantized base (QLoRA, arXiv:2305.14314).

A weight [out, in] is cut into blocks of 64 elements, which never cross a row. Each block has an fp32 scale, its largest
absolute value, and 4 bits for each element: 4.5 bits in all. So any rows of a weight can be quantized alone, and each
rank reads and quantizes its own.

Double quantization (section 3 of the paper) stores a scale in 8 bits: 4.14 bits in all for rows of 4,096. bitsandbytes
subtracts the mean of all scales of a matrix, and cuts them into groups of 256 that cross rows. A rank that reads some
of the rows knows neither. Here, the scales of each row are quantized alone (:func:`_quantize_scales`).

The bytes are stored as tensors of the dtype of the weights: strategies that shard a model send and copy them, and never
compute with them or cast them (``distributed.precision.gathered_dtype``).
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.files.requirements import load_package
from fabric_train.model.weight_files import Weights

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

BLOCK = 64
"""The number of elements of a row that share a scale."""
DOUBLE = "nf4_double"
"""The value of ``--base_weights`` with double quantization; without it, the value is nf4."""
_RANGE_BYTES = 8
"""The bytes of the smallest scale of a row and of the step between two codes, both fp32."""
_LARGEST_CODE = 255
_WEIGHT = "weight"
_SCALES = "weight_scales"
_CPU_LOGGER = "bitsandbytes.backends.cpu.ops"
_NO_KERNEL_FROM_HUB = "Failed to load CPU gemm_4bit_forward"
"""The beginning of a warning that bitsandbytes logs when it is imported on a CPU with AVX512-BF16."""


class NF4Linear(nn.Linear):
    """A linear layer that dequantizes its weight to the dtype of its input, in the forward and in the backward pass.

    ``weight`` has the bytes of [out, in / 2], and ``weight_scales`` those of the scales, both in rows. A row of scales
    is fp32 [in / 64]. With ``has_8bit_scales`` it is fp32 [2], uint8 [in / 64], and zeros up to whole fp32 numbers.
    """

    weight_scales: nn.Parameter
    has_8bit_scales: bool

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` [..., in] times the weight, [..., out] in their dtype, or in autocast's."""
        device_type = inputs.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        output: torch.Tensor = _Product.apply(inputs, self.weight, self.weight_scales, bias, self.has_8bit_scales)
        return output

    def dequantized(self) -> torch.Tensor:
        """Return the weight, fp32 [out, in]."""
        return _dequantize(self.weight, self.weight_scales, torch.float32, has_8bit_scales=self.has_8bit_scales)


class _Product(torch.autograd.Function):
    """The product of inputs and a frozen weight in 4 bits.

    bitsandbytes' own function would keep the fp32 scales that it is given until the backward pass. This one keeps the
    parameters, and computes the scales again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        has_8bit_scales: bool,
    ) -> torch.Tensor:
        """Return ``inputs`` [..., in] times the weight of an ``NF4Linear`` with these parameters, plus a ``bias``."""
        from bitsandbytes import matmul_4bit

        ctx.save_for_backward(packed, scales)
        ctx.has_8bit_scales = has_8bit_scales
        packed_bytes = packed.view(torch.uint8)  # [out, in / 2]
        state = _quant_state(packed_bytes, scales, inputs.dtype, has_8bit_scales=has_8bit_scales)
        column = packed_bytes.reshape(-1, 1)  # as bitsandbytes packs: [out * in / 2, 1]
        with torch.no_grad():
            output: torch.Tensor = matmul_4bit(inputs, column.t(), quant_state=state, bias=bias)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        """Return the gradient of the inputs; the weight and its bias do not train."""
        packed, scales = ctx.saved_tensors
        weight = _dequantize(packed, scales, grad_output.dtype, has_8bit_scales=ctx.has_8bit_scales)
        return grad_output @ weight, None, None, None, None


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module computes the same as a linear layer. Llama 4's router is a subclass that does not."""
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, NF4Linear.forward)


def stored_widths(in_features: int, dtype: torch.dtype, *, has_8bit_scales: bool) -> dict[str, int]:
    """Return how many elements of ``dtype`` hold the bytes of one row, by the name of the parameter.

    A row of ``in_features`` weights takes half as many bytes. For its scales see ``NF4Linear``.
    """
    weight_bytes = in_features // 2
    num_blocks = in_features // BLOCK
    scale_bytes = num_blocks * 4
    if has_8bit_scales:
        num_numbers = -(-(_RANGE_BYTES + num_blocks) // 4)  # whole fp32 numbers, since the range is read as fp32
        scale_bytes = num_numbers * 4
    return {_WEIGHT: weight_bytes // dtype.itemsize, _SCALES: scale_bytes // dtype.itemsize}


def _dequantize(
    packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, has_8bit_scales: bool
) -> torch.Tensor:
    """Return rows of a weight, [rows, in] in ``dtype``, from the same rows of both parameters of an ``NF4Linear``."""
    from bitsandbytes.functional import dequantize_4bit

    packed_bytes = packed.view(torch.uint8)  # [rows, in / 2]
    state = _quant_state(packed_bytes, scales, dtype, has_8bit_scales=has_8bit_scales)
    if not len(packed_bytes):  # bitsandbytes refuses an empty tensor
        return torch.empty(state.shape, dtype=dtype, device=packed.device)
    rows: torch.Tensor = dequantize_4bit(packed_bytes.reshape(-1, 1), state)
    return rows


def _quant_state(
    packed_bytes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, has_8bit_scales: bool
) -> "QuantState":
    """Return bitsandbytes' description of rows of a quantized weight, for computing with them in ``dtype``.

    ``packed_bytes`` is uint8 [rows, in / 2]; for ``scales``, see ``NF4Linear``.
    """
    from bitsandbytes.functional import QuantState

    num_rows, row_bytes = packed_bytes.shape
    in_features = 2 * row_bytes  # two values in a byte
    num_blocks = in_features // BLOCK
    fp32_scales = _dequantize_scales(scales, num_blocks) if has_8bit_scales else scales.view(torch.float32)
    return QuantState(
        absmax=fp32_scales.reshape(-1),
        shape=torch.Size((num_rows, in_features)),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


def _quantize_scales(scales: torch.Tensor) -> torch.Tensor:
    """Quantize the scales of rows to 8 bits, each row alone.

    A row is stored as its smallest scale, a step, and a code for each scale: ``scale ≈ smallest + code · step``. The
    step is rounded up to 16 significant bits. Its product with an 8-bit code is then exact in fp32, so a compiler that
    fuses product and sum into one operation gets the same scale.

    Args:
        scales: fp32 [rows, blocks].

    Returns:
        uint8 [rows, width], see ``NF4Linear``.
    """
    num_rows, num_blocks = scales.shape
    smallest = scales.amin(dim=1, keepdim=True)  # [rows, 1]
    steps = (scales.amax(dim=1, keepdim=True) - smallest) / _LARGEST_CODE
    steps = ((steps.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)  # fp32 has 24 significant bits
    divisors = steps.clamp(min=torch.finfo(torch.float32).tiny)  # the step is 0 if all scales are equal
    codes = ((scales - smallest) / divisors).round()  # [rows, blocks]

    width = stored_widths(num_blocks * BLOCK, torch.uint8, has_8bit_scales=True)[_SCALES]
    stored = torch.zeros(num_rows, width, dtype=torch.uint8)
    stored[:, :_RANGE_BYTES] = torch.cat([smallest, steps], dim=1).view(torch.uint8)
    stored[:, _RANGE_BYTES : _RANGE_BYTES + num_blocks] = codes.to(torch.uint8)
    return stored


def _dequantize_scales(stored: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return the scales, fp32 [rows, blocks], from the bytes that ``_quantize_scales`` returns, in any dtype."""
    numbers = stored.view(torch.float32)
    smallest = numbers[:, 0:1]
    steps = numbers[:, 1:2]
    codes = stored.view(torch.uint8)[:, _RANGE_BYTES : _RANGE_BYTES + num_blocks]
    return smallest + codes.float() * steps


def read_dequantized_rows(weights: Weights, name: str, layer: NF4Linear, begin: int, end: int) -> torch.Tensor:
    """Read rows ``begin`` to ``end`` of the weight of the layer ``name``, and return them in fp32 [rows, in]."""
    stored: dict[str, torch.Tensor] = {}
    # the layer's own parameters may be sharded
    widths = stored_widths(layer.in_features, layer.weight.dtype, has_8bit_scales=layer.has_8bit_scales)
    for parameter, width in widths.items():
        stored[parameter] = weights.read_block(f"{name}.{parameter}", (begin, 0), (end - begin, width))
    return _dequantize(stored[_WEIGHT], stored[_SCALES], torch.float32, has_8bit_scales=layer.has_8bit_scales)


def quantize_layers(
    layers: Collection[nn.Module], dtype: torch.dtype, skipped: Collection[str] = (), *, has_8bit_scales: bool = False
) -> None:
    """Make the linear layers in decoder layers ``NF4Linear``, with parameters on the meta device.

    Args:
        layers: the decoder layers; their linear layers change their class.
        dtype: the dtype of the tensors that store the bytes.
        skipped: names of linear layers that are not quantized, such as ``mlp.down_proj``.
        has_8bit_scales: whether the scales are quantized too.

    Raises:
        InputError: the rows of a weight cannot be cut into whole blocks.
    """
    for layer in layers:
        for name, module in layer.named_modules():
            is_skipped = any(f".{name}".endswith(f".{suffix}") for suffix in skipped)
            if is_skipped or not is_linear(module):
                continue
            if module.in_features % BLOCK:
                value = DOUBLE if has_8bit_scales else "nf4"
                raise InputError(
                    f"--base_weights {value}: {name} has rows of {module.in_features} values, which is not a multiple "
                    f"of {BLOCK}; leave out --base_weights"
                )
            quantized: Any = module
            quantized.__class__ = NF4Linear  # its name, hooks and bias stay
            quantized.has_8bit_scales = has_8bit_scales
            widths = stored_widths(module.in_features, dtype, has_8bit_scales=has_8bit_scales)
            for parameter, width in widths.items():
                empty = torch.empty(module.out_features, width, dtype=dtype, device="meta")
                setattr(quantized, parameter, nn.Parameter(empty, requires_grad=False))


@dataclass(frozen=True)
class _QuantizedParameter:
    """The layer of a parameter of an ``NF4Linear``, and the name of the weight from which it is made."""

    weight_name: str
    layer: NF4Linear
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
                for parameter in (_WEIGHT, _SCALES):
                    self._quantized[f"{name}.{parameter}"] = _QuantizedParameter(
                        f"{name}.{_WEIGHT}", module, is_scales=parameter == _SCALES
                    )

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``Weights``. A block of a quantized weight has whole rows."""
        parameter = self._quantized.get(name)
        if parameter is None:
            return self._weights.read_block(name, offsets, shape)
        layer = parameter.layer
        rows = self._weights.read_block(parameter.weight_name, (offsets[0], 0), (shape[0], layer.in_features))
        packed, scales = quantize_rows(rows.to(self._dtype), has_8bit_scales=layer.has_8bit_scales)
        stored_bytes = scales if parameter.is_scales else packed
        return stored_bytes.view(layer.weight.dtype)


def quantize_rows(rows: torch.Tensor, *, has_8bit_scales: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [rows, in] of a weight.

    Returns:
        the bytes of both parameters of an ``NF4Linear``, uint8 [rows, in / 2] and uint8 [rows, width].
    """
    from bitsandbytes.functional import quantize_4bit

    num_rows, in_features = rows.shape
    if not num_rows:  # bitsandbytes refuses an empty tensor
        widths = stored_widths(in_features, torch.uint8, has_8bit_scales=has_8bit_scales)
        empty = [torch.empty((0, width), dtype=torch.uint8) for width in widths.values()]
        return empty[0], empty[1]
    packed, state = quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type="nf4")
    scales = state.absmax.view(num_rows, -1)
    stored_scales = _quantize_scales(scales) if has_8bit_scales else scales.view(torch.uint8)
    return packed.view(num_rows, -1), stored_scales


def check_installed(option: str = "--base_weights") -> None:
    """Check that bitsandbytes, which an option needs, is installed, and import it.

    Raises:
        InputError: it is not installed.
    """
    with _without_kernel_warning():
        load_package("bitsandbytes", option)


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
