"""Make a small random Llama with an adapter whose matrices are not zero, on weights in full or in 4 bits."""

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig

from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.nf4 import NF4Linear, quantize_layers, quantize_rows
from fabric_train.model.trained_parts import freeze_other_parts
from tests.support.tiny_model import random_llama

_ADAPTER_STD = 0.05


def adapted_llama(config: LlamaConfig, adapter: Adapter, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a Llama on the CPU, with the weights of ``random_llama`` in a dtype and a random adapter in fp32.

    Args:
        config: of the model.
        adapter: its weights are random, the same in every call; only they train.
        attention: a name of transformers, or this project's.
        dtype: of the weights; those in 4 bits are quantized from it.
    """
    model: Any = random_llama(config)
    model.to(dtype)
    model.set_attn_implementation(attention)
    if adapter.base_weights:
        _quantize(model, dtype, has_8bit_scales=adapter.has_8bit_scales)
    attach(model, adapter, "the model", "cpu")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            nn.init.ones_(parameter)
        elif "lora_" in name:
            nn.init.normal_(parameter, std=_ADAPTER_STD, generator=generator)
    freeze_other_parts(model, adapter)
    return model.train()


def _quantize(model: Any, dtype: torch.dtype, *, has_8bit_scales: bool) -> None:
    """Hold the matrices of a model's layers in 4 bits, in tensors of a dtype."""
    matrices = {name: module.weight for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantize_layers(list(model.model.layers), dtype, has_8bit_scales=has_8bit_scales)
    for name, module in model.named_modules():
        if isinstance(module, NF4Linear):
            packed, scales = quantize_rows(matrices[name].detach(), has_8bit_scales=has_8bit_scales)
            module.weight = nn.Parameter(packed.view(dtype), requires_grad=False)
            module.weight_scales = nn.Parameter(scales.view(dtype), requires_grad=False)


def adapter_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the gradient of each parameter that trains."""
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()
    return gradients
