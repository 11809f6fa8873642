"""Measure the memory of activations: run the real model and loss on fake tensors, which have shapes and no content.

Some models cannot be run so: they read the content of a tensor, such as a router's choice of experts, or are not built
with as few layers as are traced. That is a :class:`TraceError`, whatever transformers' code raises there.

Layers in which the same parts train cost the same, so for each kind of layer a model of three and one of two layers are
traced, and the rest is extrapolated.
"""

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from fabric_train.cli.errors import first_line
from fabric_train.data.batch import Batch, Targets
from fabric_train.distributed.decoder_layers import checkpoint_layers, shares_kept
from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.model.row_tiles import cut_two_tiles, tile_rows
from fabric_train.model.trained_parts import IN_LAYER, freeze_other_parts
from fabric_train.preflight.memory_gpu import attention_of_slices, attention_on_gpu, compile_for_trace
from fabric_train.training.objective import CrossEntropy

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_TRACED_LAYERS = 3
LayerKind = frozenset[str] | None
"""The parameters that train in a layer, by their names in it; None: all of the model, or an adapter."""
BELOW: LayerKind = frozenset(["below all that trains"])


class TraceError(Exception):
    """The activations of a model cannot be traced; the message says why in one line."""


class _LiveBytes(TorchDispatchMode):
    """The bytes of live storages that operations have made, without the ``model``'s, now and at the peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                key = storage._cdata
                size = storage.nbytes()
                self._known.add(key)
                weakref.finalize(storage, self._free, key, size)
                self.now += size
                self.most = max(self.most, self.now)
        return result

    def restart(self) -> None:
        self.most = self.now

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass on one device, or its part of them, whose keys ``context_size`` ranks share."""

    num_rows: int
    length: int
    dtype: torch.dtype  # of the weights in the pass
    autocast: torch.dtype | None  # that matrix products are cast to; None if it is ``dtype``
    has_borders: bool  # several documents share a row and are isolated
    on_gpu: bool  # with a GPU's kernels
    by_unit: bool  # the strategy reduces the gradients of a layer together, when all are computed
    context_size: int = 1


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one device.

    With ``by_unit`` they include the gradients in ``dtype``: a layer's until all are computed, and the others
    until the end, except the input embedding's. Otherwise they include the gradient of one parameter at a time, but not
    the gradients of embedding and head, which ``memory_forecast.py`` counts.
    """

    kept: int  # by all layers from the forward to the backward pass
    most: int  # the peak of the forward pass, usually at the loss
    at_head: int  # the peak in the head's backward pass; 0 without ``by_unit``, or if the head is also the embedding
    at_last: int  # the peak in the backward pass of the last layer, which is the first in it
    after_last: int  # the bytes at its end
    at_end: int  # the peak in the backward pass of the first layer
    after_end: int  # the bytes at its end


def trace_activations(shape: ModelShape, arguments: "TrainArguments", batch: MicroBatch) -> Activations:
    """Trace a micro-batch; offloaded activations do not count. A TraceError if the model cannot run on fake tensors."""
    fsdp = arguments.fsdp
    if fsdp.activation_offload:
        stays = replace(arguments, fsdp=replace(fsdp, activation_offload=False))
        full = trace_activations(shape, stays, batch)
        return replace(
            full,
            kept=0,
            most=full.most - full.kept,
            at_head=max(0, full.at_head - full.kept),
            at_last=full.at_last - full.kept,
            after_last=full.after_last - full.kept,
        )
    kinds = _kinds(shape)
    if len(kinds) <= _TRACED_LAYERS:
        return _trace(shape, kinds, arguments, batch)

    def trace(kind: LayerKind, num_layers: int) -> Activations:
        return _trace(shape, (kind,) * num_layers, arguments, batch)

    more = trace(kinds[-1], _TRACED_LAYERS)
    left = _further_layers(kinds)
    kept = more.kept
    most = more.most
    for kind, number in left.items():
        one_more = trace(kind, _TRACED_LAYERS)
        fewer = trace(kind, _TRACED_LAYERS - 1)
        kept += number * (one_more.kept - fewer.kept)
        most += number * (one_more.most - fewer.most)
    further = kept - more.kept
    return replace(
        more,
        kept=kept,
        # with few layers the peak may be in a layer's forward pass, with many it is at the loss
        most=max(most, kept),
        at_head=more.at_head and more.at_head + further,
        at_last=more.at_last + further,
        after_last=more.after_last + further,
    )


def _further_layers(kinds: Sequence[LayerKind]) -> Counter[LayerKind]:
    """Return the layers of each kind besides three that are like the last one; fewer than none if it has less."""
    left = Counter(kinds)
    left[kinds[-1]] -= _TRACED_LAYERS
    left.pop(BELOW, None)  # these keep nothing
    return left


def _kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """Return the kind of each layer; layers below the first part that trains have no backward pass."""
    depth = shape.config.get_text_config().num_hidden_layers
    below = sum(one.num_below for one in shape.flops.attention)
    if not shape.frozen:
        return (None,) * depth
    trained: dict[int, set[str]] = {}
    for inside in filter(None, map(IN_LAYER.fullmatch, shape.trained)):
        trained.setdefault(int(inside[2]), set()).add(inside[3])
    return tuple(BELOW if layer < below else frozenset(trained.get(layer, ())) for layer in range(depth))


@dataclass(frozen=True)
class _Traced:
    """All that a trace depends on; ``described`` is the content of ``config``, which cannot be compared itself."""

    described: str
    config: PretrainedConfig = field(compare=False)
    longest_row: int | None
    layer_classes: frozenset[type[nn.Module]]
    attention: str
    masks: bool
    loss_in_head: bool
    kept: float  # see ``decoder_layers.shares_kept``
    kept_by_compiler: float | None
    tile_size: int | None  # see ``row_tiles.tile_rows``
    batch: MicroBatch
    adapter: Adapter | None
    kinds: tuple[LayerKind, ...]
    trained: frozenset[str]  # outside of the layers

    def trains(self, name: str) -> bool:
        """Return whether a parameter trains, if not all or an adapter's do."""
        inside = IN_LAYER.fullmatch(name)
        return inside[3] in (self.kinds[int(inside[2])] or ()) if inside else name in self.trained


def _trace(
    shape: ModelShape, kinds: tuple[LayerKind, ...], arguments: "TrainArguments", batch: MicroBatch
) -> Activations:
    # flash, flex and variable-length attention keep the same tensors as sdpa's fused kernel, without its mask
    attention = "eager" if arguments.model.attention == "eager" else "sdpa"
    try:
        with _quiet_torch():
            return _trace_once(_describe(shape, kinds, arguments, batch, attention))
    except _FAULTS_OF_MODELS as error:
        kind = type(error).__name__
        raise TraceError(f"{kind}: {first_line(error).rstrip('.')}") from error


_FAULTS_OF_MODELS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)
"""What the code of models raises on fake tensors, or when it is built with fewer layers."""


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Let torch not log an operation that fails on fake tensors with its traceback: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _describe(
    shape: ModelShape, kinds: tuple[LayerKind, ...], arguments: "TrainArguments", batch: MicroBatch, attention: str
) -> "_Traced":
    """Return all that a trace depends on."""
    config = _cut(shape.config, len(kinds))
    kept, kept_by_compiler = shares_kept(arguments.fsdp)
    tile_size = arguments.fsdp.mlp_tile_size
    return _Traced(
        described=f"{type(config)} {config.to_json_string(use_diff=False)}",
        config=config,
        longest_row=shape.longest_row,
        layer_classes=shape.layer_classes,
        attention=attention,
        masks=batch.has_borders and shape.config._attn_implementation == attention,
        loss_in_head=arguments.model.precision != "16-mixed",  # as model.parallelize.setup_model does
        kept=kept,
        kept_by_compiler=kept_by_compiler,
        tile_size=tile_size if isinstance(tile_size, int) else None,
        batch=batch,
        adapter=shape.adapter,
        kinds=kinds,
        trained=frozenset(name for name in shape.trained if shape.frozen and not IN_LAYER.fullmatch(name)),
    )


@cache  # a choice of ``auto`` and the plan of it take the same trace, which takes seconds
def _trace_once(given: _Traced) -> Activations:
    batch = given.batch
    with ExitStack() as kernels, FakeTensorMode():
        if batch.on_gpu:
            kernels.enter_context(patch.object(F, "scaled_dot_product_attention", attention_on_gpu))
        if batch.context_size > 1:
            attention = attention_of_slices(F.scaled_dot_product_attention, batch.context_size)
            kernels.enter_context(patch.object(F, "scaled_dot_product_attention", attention))
        config = copy.deepcopy(given.config)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=batch.dtype, attn_implementation=given.attention)
        if given.longest_row is not None:
            choose_frequencies(model, given.longest_row)
        if given.adapter:
            attach(model, given.adapter, "the model", "cpu")
            freeze_other_parts(model, given.adapter)
        model.train()
        layers = [module for module in model.modules() if type(module) in given.layer_classes]
        if given.kinds[0] is not None:
            _freeze(model, given)
        live = _LiveBytes(model)
        if given.loss_in_head:
            compute_loss_in_head(model, memory_device="cuda" if batch.on_gpu else "cpu")
        if given.tile_size:
            tile_rows(model, layers, given.tile_size, cut_two_tiles)
        if given.kept_by_compiler is not None:
            same = replace(given, described="", kinds=(), trained=frozenset(), kept=1.0)
            compile_for_trace(layers, given.kept_by_compiler, same)
        if given.kept < 1:
            checkpoint_layers(layers, given.kept)
        ids = torch.zeros(batch.num_rows, batch.length, dtype=torch.int64)
        positions = torch.arange(batch.num_rows * (batch.length - 1))
        targets = Targets(positions, torch.zeros_like(positions))
        _give_mask(model, layers, batch, given.masks)

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", batch.autocast, enabled=batch.autocast is not None):
                return CrossEntropy().loss(model, Batch(ids, ids, targets=targets)).total

        if 0 < given.kept < 1 or given.kept_by_compiler is not None:
            forward()  # the first pass chooses the tensors to keep
        peaks = _drop_gradients(model, layers, live, batch.by_unit)
        with live:
            loss = forward()
            kept = live.now
            most = live.most
            live.restart()
            loss.backward()
    if not batch.by_unit:
        end = live.most
        return Activations(kept, max(most, end, peaks.get("most", 0)), 0, 0, 0, end, 0)
    return Activations(kept, most, *(peaks.get(name, 0) for name in _PEAKS))


def _freeze(model: Any, given: _Traced) -> None:
    """Freeze what does not train; frozen layers above a part that trains pass a gradient on."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(given.trains(name))
    if not given.kinds[0]:
        model.get_input_embeddings().register_forward_hook(lambda _, args, hidden: hidden.requires_grad_())


def _cut(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    return config


_PEAKS = ("at_head", "at_last", "after_last", "at_end", "after_end")


def _drop_gradients(model: Any, layers: list[nn.Module], live: _LiveBytes, by_unit: bool) -> dict[str, int]:
    """Drop gradients as a strategy takes them away, and return a dict that gets the peaks of the backward pass."""
    peaks: dict[str, int] = {}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()

    def note_peak(name: str) -> None:
        peaks[name] = live.most
        live.restart()

    if not by_unit:
        if embedding.weight.requires_grad:  # no gradient of this one, but still one of the embedded tokens
            embedding.register_forward_hook(lambda _, args, hidden: hidden.requires_grad_())
        for module in filter(None, (embedding, head)):
            module.requires_grad_(False)

        def drop(parameter: nn.Parameter) -> None:
            parameter.grad = None

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(drop)
        of_first_pass = [parameter for layer in layers[1:] for parameter in layer.parameters()]
        _call_at_last(of_first_pass, partial(note_peak, "most"))
        return peaks

    def end_of_layer(index: int, parameters: list[nn.Parameter]) -> None:
        if index == len(layers) - 1:
            peaks.update({"at_last": live.most, "after_last": live.now})
        peaks.update({"at_end": live.most, "after_end": live.now})  # it stays of the last layer in the pass
        for parameter in parameters:
            parameter.grad = None
        live.restart()

    for index, layer in enumerate(layers):
        parameters = list(layer.parameters())
        end = partial(end_of_layer, index, parameters)
        if any(parameter.requires_grad for parameter in parameters):
            _call_at_last(parameters, end)
        else:
            layer.register_forward_pre_hook(partial(_call_with_gradient, end))
    if head is not None and head.weight is not embedding.weight:
        _call_at_last([head.weight], partial(note_peak, "at_head"))
    return peaks


def _call_at_last(parameters: list[nn.Parameter], function: Callable[[], None]) -> None:
    """Call a function when all of the parameters that train have their gradients."""
    left = {id(parameter) for parameter in parameters if parameter.requires_grad}

    def count(parameter: nn.Parameter) -> None:
        left.discard(id(parameter))
        if not left:
            function()

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count)


def _call_with_gradient(function: Callable[[], None], _: nn.Module, args: tuple[Any, ...]) -> None:
    """Call a function when the gradient of a frozen layer's input is there; not if it has none."""
    if args and args[0].requires_grad:
        args[0].register_hook(lambda _: function())


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
