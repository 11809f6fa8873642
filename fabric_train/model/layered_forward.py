"""Run a model whose weights are read a decoder layer at a time, so that a 70B needs the memory of one layer."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fabric_train.model.load_weights import MetaModel, read_buffers
from fabric_train.model.weight_files import Weights

_VOCABULARY_BLOCK = 8192  # rows of the output layer that are in memory at once


@dataclass(frozen=True)
class LayeredOutput:
    """The output [1, T, H] of each decoder layer, in their order, and the logits [1, T, V] in fp32."""

    hidden_states: list[torch.Tensor]
    logits: torch.Tensor


@torch.inference_mode()
def layered_forward(
    meta_model: MetaModel,
    layer_classes: frozenset[type[nn.Module]],
    input_ids: torch.Tensor,
    advance: Callable[[], object],
) -> LayeredOutput:
    """Return a model's output for ``input_ids`` [1, T], reading its weights once, a decoder layer at a time.

    Args:
        meta_model: a model with its parameters on the meta device. Hooks are added to it, and its buffers are read.
        layer_classes: the classes of its decoder layers.
        input_ids: int64 [1, T].
        advance: called after each decoder layer.
    """
    model: Any = meta_model.model
    weights = meta_model.weights
    assert weights is not None
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # the first name of a tied weight
    read_buffers(model, weights)

    # Decoder layers: each reads its parameters before its forward pass and drops them after it.
    hidden_states: list[torch.Tensor] = []

    def keep_output(module: nn.Module, arguments: object, output: Any) -> None:
        hidden_states.append(output[0] if isinstance(output, tuple) else output)
        advance()

    modules_in_layers: set[nn.Module] = set()
    layers: list[Any] = [module for module in model.modules() if isinstance(module, tuple(layer_classes))]
    for layer in layers:
        layer.register_forward_hook(keep_output)
        _read_during_forward(layer, list(layer.modules()), weights, names)
        modules_in_layers.update(layer.modules())

    # Modules outside of the layers: the head is the largest, so its matrix is read in blocks of rows.
    head = model.get_output_embeddings()
    for module in model.modules():
        if module is head and type(module) is nn.Linear:
            head.forward = functools.partial(_blockwise_head, weights, names, head.weight, head.bias)
        elif module._parameters and module not in modules_in_layers:
            _read_during_forward(module, [module], weights, names)

    output = model.eval()(input_ids=input_ids, use_cache=False)
    return LayeredOutput(hidden_states, output.logits.float())


def _read_during_forward(unit: nn.Module, modules: list[nn.Module], weights: Weights, names: dict[int, str]) -> None:
    """Give ``modules`` real parameters during the forward pass of ``unit``, and meta parameters after it.

    ``names`` has the name of each meta parameter in ``weights``, by the parameter's ``id``.
    """
    meta_parameters = [(module, dict(module._parameters)) for module in modules]

    def read(unit: nn.Module, arguments: object) -> None:
        for module, parameters in meta_parameters:
            for name, parameter in parameters.items():
                if parameter is not None:
                    tensor = weights.read_block(names[id(parameter)], (0,) * parameter.dim(), parameter.shape)
                    module._parameters[name] = nn.Parameter(tensor.to(parameter.dtype), requires_grad=False)

    def drop(unit: nn.Module, arguments: object, output: object) -> None:
        for module, parameters in meta_parameters:
            module._parameters.update(parameters)

    unit.register_forward_pre_hook(read)
    unit.register_forward_hook(drop)


def _blockwise_head(
    weights: Weights,
    names: dict[int, str],
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Return the logits [1, T, V] of ``hidden`` [1, T, H], reading the head's ``matrix`` [V, H] in blocks of rows.

    ``matrix`` and ``bias`` are on the meta device; ``names`` has their names in ``weights`` by their ``id``.
    """
    vocab_size, width = matrix.shape
    logits: list[torch.Tensor] = []
    for begin in range(0, vocab_size, _VOCABULARY_BLOCK):
        num_rows = min(_VOCABULARY_BLOCK, vocab_size - begin)
        matrix_rows = weights.read_block(names[id(matrix)], (begin, 0), (num_rows, width)).to(matrix.dtype)
        bias_rows = None
        if bias is not None:
            bias_rows = weights.read_block(names[id(bias)], (begin,), (num_rows,)).to(matrix.dtype)
        logits.append(F.linear(hidden, matrix_rows, bias_rows))  # [1, T, num_rows]
    return torch.cat(logits, dim=-1)
