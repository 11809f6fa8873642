"""Measure the memory of activations: run the real model and loss on fake tensors, which have shapes and no content.

Every layer costs the same. So a model of three and one of two layers are traced, and the rest is extrapolated.
"""

import copy
import weakref
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from fabric_train.data.batch import Targets
from fabric_train.distributed.activation_checkpoint import checkpoint_layers
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.training.loss import summed_loss

if TYPE_CHECKING:
    from arguments import TrainArguments
    from fabric_train.model.hf_model import ModelShape

_TRACED_LAYERS = 3


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass on one device.

    ``dtype`` is the type of the weights in the pass. ``autocast`` is the type that matrix products are cast to, None if
    it is ``dtype``. ``has_borders``: several documents share a row and are isolated.
    """

    num_rows: int
    length: int
    dtype: torch.dtype
    autocast: torch.dtype | None
    has_borders: bool


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one device.

    They include the gradient of one parameter at a time, but not those of embedding and head, which
    ``device_memory.py`` counts. ``kept`` is what all layers keep from the forward to the backward pass. ``most`` is the
    peak, usually at the loss. ``at_end`` is the peak in the backward pass of the first layer.
    """

    kept: int
    most: int
    at_end: int


def trace_activations(shape: "ModelShape", arguments: "TrainArguments", batch: MicroBatch) -> Activations:
    """Trace a micro-batch of the model.

    Selective checkpointing is interpolated between none and full by its budget. Offloaded activations are not counted.

    Raises:
        RuntimeError: the model asks for the content of tensors.
    """
    fsdp = arguments.fsdp
    if fsdp.activation_checkpointing == "selective":
        full, none = (
            trace_activations(shape, replace(arguments, fsdp=replace(fsdp, activation_checkpointing=kind)), batch)
            for kind in ("full", "none")
        )
        return between(full, none, fsdp.activation_memory_budget)
    if fsdp.activation_offload:
        stays = replace(arguments, fsdp=replace(fsdp, activation_offload=False))
        full = trace_activations(shape, stays, batch)
        return Activations(0, full.most - full.kept, full.at_end)
    depth = shape.config.get_text_config().num_hidden_layers
    if depth <= _TRACED_LAYERS:
        return _trace(shape, depth, arguments, batch)
    more, fewer = (_trace(shape, layers, arguments, batch) for layers in (_TRACED_LAYERS, _TRACED_LAYERS - 1))
    left = depth - _TRACED_LAYERS
    kept = more.kept + left * (more.kept - fewer.kept)
    # with few layers the peak may be in the backward pass, with many it is at the loss
    most = max(more.most + left * (more.most - fewer.most), kept)
    return Activations(kept, most, more.at_end)


def between(full: Activations, none: Activations, budget: float) -> Activations:
    """Return the activations with selective checkpointing, from those with full checkpointing and without."""
    pairs = zip(astuple(full), astuple(none), strict=True)
    return Activations(*(round(less + budget * (more - less)) for less, more in pairs))


def _trace(shape: "ModelShape", num_layers: int, arguments: "TrainArguments", batch: MicroBatch) -> Activations:
    with FakeTensorMode():
        # flash, flex and variable-length attention keep the same tensors as sdpa's fused kernel, without its mask
        attention = "eager" if arguments.model.attention == "eager" else "sdpa"
        config = _cut(shape.config, num_layers)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=batch.dtype, attn_implementation=attention)
        model.train()
        layers = [module for module in model.modules() if type(module) in shape.layer_classes]
        live = _LiveBytes(model)
        _freeze_vocabulary(model)
        _drop_gradients(model, layers, live)
        if arguments.model.precision != "16-mixed":  # as model.parallelize.setup_model does
            compute_loss_in_head(model)
        if arguments.fsdp.activation_checkpointing == "full":
            checkpoint_layers(layers)
        ids = torch.zeros(batch.num_rows, batch.length, dtype=torch.int64)
        positions = torch.arange(batch.num_rows * (batch.length - 1))
        targets = Targets(positions, torch.zeros_like(positions))
        _give_mask(model, layers, batch, batch.has_borders and shape.config._attn_implementation == attention)
        with live:
            with torch.autocast("cpu", batch.autocast, enabled=batch.autocast is not None):
                loss = summed_loss(model, ids, ids, targets=targets)
                kept = live.now
            loss.backward()
    return Activations(kept, live.most, live.most_since)


def _cut(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return config


def _freeze_vocabulary(model: Any) -> None:
    """Compute no gradients of embedding and head, but still those of the embedded tokens."""
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            module.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _, args, hidden: hidden.requires_grad_())


def _drop_gradients(model: nn.Module, layers: list[nn.Module], live: "_LiveBytes") -> None:
    """Drop each gradient when it is complete: ``device_memory.py`` counts gradients by strategy.

    Restart the peak when the backward pass reaches the first layer.
    """
    left = {id(parameter) for layer in layers[1:] for parameter in layer.parameters()}

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None
        if id(parameter) in left:
            left.discard(id(parameter))
            if not left:
                live.restart()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)


def _give_mask(model: nn.Module, layers: list[nn.Module], batch: MicroBatch, needs_mask: bool) -> None:
    """Pass the mask that transformers would make from document borders, or remove the one that it makes.

    With fake tensors transformers cannot check whether a mask is needed, so it always makes one.
    """

    def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = torch.ones(batch.num_rows, 1, batch.length, batch.length, dtype=torch.bool)
        return args, {**kwargs, "attention_mask": mask}

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, **dict.fromkeys(kwargs.keys() & {"attention_mask"})}

    if needs_mask:
        model.register_forward_pre_hook(give, with_kwargs=True)
    else:
        for layer in layers:
            layer.register_forward_pre_hook(take, with_kwargs=True)


class _LiveBytes(TorchDispatchMode):
    """A count of the bytes in storages that operations have made and that are still alive."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = self.most_since = 0
        held = [*model.parameters(), *model.buffers()]
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in held}

    def restart(self) -> None:
        """Restart ``most_since`` from here."""
        self.most_since = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.most, self.most_since = max(self.most, self.now), max(self.most_since, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
