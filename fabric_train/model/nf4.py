"""Linear layers whose frozen weights are in 4 bits: NF4 of bitsandbytes (QLoRA, arXiv:2305.14314).

A weight [out, in] is cut into blocks of 64 numbers, which lie within its rows. Each block has an fp32 scale, its
largest absolute value, and 4 bits for each number: 4.5 bits in all. So any rows of a weight can be quantized alone, and
each rank reads and quantizes its own. The bytes are stored as numbers of the dtype of the weights: strategies that
shard a model send and copy them, and never compute with them or cast them (``distributed.precision.gathered_dtype``).
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from fabric_train.cli.errors import InputError
from fabric_train.model.weight_files import Weights

BLOCK = 64
_SCALES = "weight_scales"


class NF4Linear(nn.Linear):
    """A linear layer that dequantizes its weight to the dtype of its input, in the forward and in the backward pass.

    ``weight`` has the bytes of [out, in / 2], and ``weight_scales`` the bytes of fp32 [out, in / 64], both in rows.
    """

    weight_scales: nn.Parameter

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``inputs`` [..., in] times the weight, [..., out] in their dtype, or in autocast's."""
        from bitsandbytes import matmul_4bit

        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        state = _state(self.weight_scales, (self.out_features, self.in_features), inputs.dtype)
        packed = self.weight.view(torch.uint8).reshape(-1, 1)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        result: torch.Tensor = matmul_4bit(inputs, packed.t(), quant_state=state, bias=bias)
        return result

    def dequantized(self) -> torch.Tensor:
        """Return the weight, fp32 [out, in]."""
        return dequantize(self.weight, self.weight_scales, self.in_features)


def _state(scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    from bitsandbytes.functional import QuantState

    return QuantState(
        absmax=scales.view(torch.float32).reshape(-1),
        shape=torch.Size(shape),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )


def stored_rows(row: int, dtype: torch.dtype) -> dict[str, int]:
    """Return how many numbers of a dtype store a row of ``row`` weights, and its scales, by the parameter's name."""
    return {"weight": row // 2 // dtype.itemsize, _SCALES: row // BLOCK * 4 // dtype.itemsize}


def dequantize(packed: torch.Tensor, scales: torch.Tensor, row: int) -> torch.Tensor:
    """Return rows of a weight, fp32 [rows, ``row``], from both parameters of an ``NF4Linear``."""
    from bitsandbytes.functional import dequantize_4bit

    state = _state(scales, (len(packed), row), torch.float32)
    rows: torch.Tensor = dequantize_4bit(packed.view(torch.uint8).reshape(-1, 1), state)
    return rows


def quantize_layers(layers: Collection[nn.Module], dtype: torch.dtype, but: Collection[str] = ()) -> None:
    """Make the linear layers in decoder layers ``NF4Linear``, with parameters on the meta device.

    ``dtype`` is the type of the numbers that store the bytes. Linear layers whose name ends with one of
    ``but`` stay as they are.

    Raises:
        InputError: the rows of a weight are no whole blocks.
    """
    for layer in layers:
        for name, module in layer.named_modules():
            if not isinstance(module, nn.Linear) or any(f".{name}".endswith(f".{one}") for one in but):
                continue
            if module.in_features % BLOCK:
                raise InputError(
                    f"--base_weights nf4: {name} has rows of {module.in_features} numbers, which are no blocks of "
                    f"{BLOCK}; leave it out"
                )
            module.__class__ = NF4Linear
            for of_parameter, number in stored_rows(module.in_features, dtype).items():
                empty = torch.empty(module.out_features, number, dtype=dtype, device="meta")
                setattr(module, of_parameter, nn.Parameter(empty, requires_grad=False))


class QuantizedWeights:
    """The weights of a model with ``NF4Linear`` layers, quantized block by block as they are read."""

    def __init__(self, model: nn.Module, weights: Weights, dtype: torch.dtype) -> None:
        """``weights`` of the model before are cast to ``dtype`` first, as transformers does."""
        self._weights, self._dtype = weights, dtype
        self._stored: dict[str, tuple[str, int, torch.dtype]] = {}  # parameter → weight, its row length, stored dtype
        for name, module in model.named_modules():
            if isinstance(module, NF4Linear):
                for kind in ("weight", _SCALES):
                    self._stored[f"{name}.{kind}"] = (f"{name}.weight", module.in_features, module.weight.dtype)

    def read_block(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a block of a weight; see ``Weights``. Of a quantized one it has whole rows."""
        if name not in self._stored:
            return self._weights.read_block(name, offsets, shape)
        weight, row, dtype = self._stored[name]
        rows = self._weights.read_block(weight, (offsets[0], 0), (shape[0], row))
        packed, scales = quantize_rows(rows.to(self._dtype))
        return (packed if name == weight else scales.view(torch.uint8)).view(dtype)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes [rows, in / 2] uint8, and the scales of the blocks, fp32 [rows, in / 64], of rows [rows, in]."""
    from bitsandbytes.functional import quantize_4bit

    if not len(rows):
        return torch.empty((0, rows.shape[1] // 2), dtype=torch.uint8), torch.empty((0, rows.shape[1] // BLOCK))
    packed, state = quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return packed.view(len(rows), -1), state.absmax.view(len(rows), -1)


def check_installed() -> None:
    """Check that bitsandbytes is installed.

    Raises:
        InputError: it is not.
    """
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise InputError("--base_weights nf4 needs bitsandbytes: pip install 'fabric-train[bitsandbytes]'") from None
