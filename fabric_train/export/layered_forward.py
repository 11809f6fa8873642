"""Run a model of transformers with the weights of one decoder layer in memory at a time.

The model is built on the meta device. Hooks read the weights of each decoder layer from the files when its forward pass
begins, and drop them when it ends; likewise for embeddings and norms outside of the layers. The output layer is
computed in blocks of its vocabulary. What runs is the code of the model's own class.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fabric_train.model.load_weights import MetaModel, read_buffers
from fabric_train.model.weight_files import Weights

_VOCABULARY_BLOCK = 8192  # rows of the output layer


@dataclass(frozen=True)
class LayeredOutput:
    """The output [1, T, H] of each decoder layer, in their order, and the logits [1, T, V] in fp32."""

    hidden_states: list[torch.Tensor]
    logits: torch.Tensor


@torch.inference_mode()
def layered_forward(
    meta: MetaModel, layer_classes: frozenset[type[nn.Module]], input_ids: torch.Tensor, advance: Callable[[], object]
) -> LayeredOutput:
    """Return what a model computes for ``input_ids`` [1, T], reading its weights once.

    Args:
        meta: A model on the meta device and its weights; hooks are added to it.
        layer_classes: The classes of the decoder layers.
        input_ids: Ids [1, T].
        advance: Is called after each decoder layer.
    """
    model: Any = meta.model
    assert meta.weights is not None
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # the first name of a tied weight
    read_buffers(model, meta.weights)
    hidden_states: list[torch.Tensor] = []

    def keep_output(module: nn.Module, arguments: object, output: Any) -> None:
        hidden_states.append(output[0] if isinstance(output, tuple) else output)
        advance()

    head = model.get_output_embeddings()
    layers: list[Any] = [module for module in model.modules() if isinstance(module, tuple(layer_classes))]
    within = {inner for layer in layers for inner in layer.modules()}
    for layer in layers:
        layer.register_forward_hook(keep_output)
        _read_while_running(layer, [*layer.modules()], meta.weights, names)
    for module in model.modules():
        if module is head and type(module) is nn.Linear:
            weight, bias = (names.get(id(parameter)) for parameter in (head.weight, head.bias))
            head.forward = _BlockwiseHead(meta.weights, weight or "", head.weight, bias).forward
        elif module._parameters and module not in within:
            _read_while_running(module, [module], meta.weights, names)
    logits = model.eval()(input_ids=input_ids, use_cache=False).logits
    return LayeredOutput(hidden_states, logits.float())


def _read_while_running(unit: nn.Module, modules: list[nn.Module], weights: Weights, names: dict[int, str]) -> None:
    """Give ``modules`` their own parameters during the forward pass of ``unit``, and only then."""
    on_meta = [(module, dict(module._parameters)) for module in modules]

    def read(unit: nn.Module, arguments: object) -> None:
        for module, parameters in on_meta:
            for name, parameter in parameters.items():
                if parameter is not None:
                    full = weights.read_block(names[id(parameter)], (0,) * parameter.dim(), parameter.shape)
                    module._parameters[name] = nn.Parameter(full.to(parameter.dtype), requires_grad=False)

    def drop(unit: nn.Module, arguments: object, output: object) -> None:
        for module, parameters in on_meta:
            module._parameters.update(parameters)

    unit.register_forward_pre_hook(read)
    unit.register_forward_hook(drop)


@dataclass(frozen=True)
class _BlockwiseHead:
    """A linear output layer of shape [V, H] that is read and multiplied in blocks of rows."""

    weights: Weights
    name: str
    matrix: torch.Tensor
    bias: str | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, T, V] of ``hidden`` [1, T, H]."""
        (rows, width), logits = self.matrix.shape, []
        for begin in range(0, rows, _VOCABULARY_BLOCK):
            count = min(_VOCABULARY_BLOCK, rows - begin)
            block = self.weights.read_block(self.name, (begin, 0), (count, width)).to(self.matrix.dtype)
            bias = None
            if self.bias:
                bias = self.weights.read_block(self.bias, (begin,), (count,)).to(self.matrix.dtype)
            logits.append(F.linear(hidden, block, bias))
        return torch.cat(logits, dim=-1)
