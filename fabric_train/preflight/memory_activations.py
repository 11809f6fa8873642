"""Measure the memory of activations by running the real model and loss on fake tensors, which have no content.

Some models cannot be run like this: they read the content of a tensor, such as a router's choice of experts, or cannot
be built with as few layers as are traced. This raises a :class:`TraceError`, whatever transformers' code raises.

Layers in which the same parts train cost the same, so for each kind of layer a model of three and one of two layers are
traced, and the rest is extrapolated.
"""

import copy
import inspect
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
from transformers import AutoModelForCausalLM, Cache, PretrainedConfig

from fabric_train.cli.errors import first_line
from fabric_train.data.batch import Batch, Targets
from fabric_train.distributed.decoder_layers import checkpoint_layers, shares_kept
from fabric_train.distributed.sharded_parameters import IN_LAYER
from fabric_train.model.adapter import Adapter, attach
from fabric_train.model.divergence_loss import TeacherHead
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.lm_head_loss import compute_loss_in_head
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.model.row_tiles import cut_two_tiles, tile_rows
from fabric_train.model.trained_parts import freeze_other_parts
from fabric_train.preflight.memory_gpu import attention_on_gpu, attention_with_gathered_keys, compile_for_trace
from fabric_train.preflight.memory_objective import TracedPolicy, TracedTeacher, build_traced_objective, make_head
from fabric_train.training.teacher import LiveTeacher

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments, TrainArguments

_TRACED_LAYERS = 3
_READ_LAYERS = 2
"""The layers of a model that is traced without a backward pass."""
LayerKind = frozenset[str] | None
"""The parameters that train in a layer, by their names in the layer; None if all of the model trains, or an adapter."""
BELOW: LayerKind = frozenset(["below all that trains"])


class TraceError(Exception):
    """The activations of a model cannot be traced; the message says why in one line."""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations have made, now and at the peak, without the ``model``'s."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._known_storages = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in self._known_storages:  # a view, or written in place
                continue
            num_bytes = storage.nbytes()
            self._known_storages.add(address)
            weakref.finalize(storage, self._free, address, num_bytes)
            self.now += num_bytes
            self.most = max(self.most, self.now)
        return result

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Do not count a tensor or views of it."""
        self._known_storages.add(tensor.untyped_storage()._cdata)

    def restart(self) -> None:
        """Restart the measurement of the peak."""
        self.most = self.now

    def _free(self, address: int, num_bytes: int) -> None:
        self._known_storages.discard(address)
        self.now -= num_bytes


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass on one device, or its part of rows whose keys ``context_size`` ranks share."""

    num_rows: int
    length: int
    dtype: torch.dtype  # of the weights in the pass
    autocast: torch.dtype | None  # that matrix products are cast to; None if it is ``dtype``
    has_borders: bool  # several documents share a row and are isolated
    on_gpu: bool  # with a GPU's kernels
    by_unit: bool  # the strategy reduces the gradients of a layer together, when all are computed
    context_size: int = 1
    teacher: TracedTeacher | None = None  # of a distillation, or the reference of a policy gradient
    policy: TracedPolicy | None = None  # of a policy gradient


@dataclass(frozen=True)
class Activations:
    """The bytes of one micro-batch on one device.

    With ``by_unit``, they include the gradients in ``dtype``: a layer's until all of them are computed, and the others
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
    """Trace a micro-batch without offloaded activations; raise a TraceError if the model cannot run on fake tensors."""
    fsdp = arguments.fsdp
    if fsdp.activation_offload:
        arguments = replace(arguments, fsdp=replace(fsdp, activation_offload=False))
        resident = trace_activations(shape, arguments, batch)
        return replace(
            resident,
            kept=0,
            most=resident.most - resident.kept,
            at_head=max(0, resident.at_head - resident.kept),
            at_last=resident.at_last - resident.kept,
            after_last=resident.after_last - resident.kept,
        )
    kinds = _layer_kinds(shape)
    if len(kinds) <= _TRACED_LAYERS:
        return _trace(shape, kinds, arguments, batch)

    # trace a model of three layers like the last one, and add what each of the other layers costs
    traced = _trace(shape, kinds[-1:] * _TRACED_LAYERS, arguments, batch)
    kept = traced.kept
    most = traced.most
    for kind, num_layers in _count_other_layers(kinds).items():
        three_layers = _trace(shape, (kind,) * _TRACED_LAYERS, arguments, batch)
        two_layers = _trace(shape, (kind,) * (_TRACED_LAYERS - 1), arguments, batch)
        kept += num_layers * (three_layers.kept - two_layers.kept)
        most += num_layers * (three_layers.most - two_layers.most)
    kept_by_others = kept - traced.kept
    return replace(
        traced,
        kept=kept,
        # with few layers the peak may be in a layer's forward pass, with many it is at the loss
        most=max(most, kept),
        at_head=traced.at_head + kept_by_others if traced.at_head else 0,
        at_last=traced.at_last + kept_by_others,
        after_last=traced.after_last + kept_by_others,
    )


def _count_other_layers(kinds: Sequence[LayerKind]) -> Counter[LayerKind]:
    """Count the layers of each kind, minus three of the last layer's kind; negative if it has fewer than three."""
    num_layers = Counter(kinds)
    num_layers[kinds[-1]] -= _TRACED_LAYERS
    num_layers.pop(BELOW, None)  # these keep nothing
    return num_layers


def _layer_kinds(shape: ModelShape) -> tuple[LayerKind, ...]:
    """Return the kind of each layer; layers below the first part that trains have no backward pass."""
    num_layers = shape.config.get_text_config().num_hidden_layers
    if not shape.frozen:
        return (None,) * num_layers
    num_below = sum(attention.num_below for attention in shape.flops.attention)
    trained: dict[int, set[str]] = {}
    for name in shape.trained:
        match = IN_LAYER.fullmatch(name)
        if match:
            layer_index = int(match[2])
            trained.setdefault(layer_index, set()).add(match[3])
    kinds: list[LayerKind] = [BELOW] * num_below
    for layer_index in range(num_below, num_layers):
        kinds.append(frozenset(trained.get(layer_index, ())))
    return tuple(kinds)


@dataclass(frozen=True)
class _TraceInputs:
    """Everything that a trace depends on; ``config_text`` is the content of ``config``, which cannot be compared."""

    config_text: str
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
    preference: "PreferenceArguments | None" = field(compare=False)  # of a distillation
    preference_text: str

    def trains(self, name: str) -> bool:
        """Return whether a parameter trains, if neither all nor an adapter's train."""
        match = IN_LAYER.fullmatch(name)
        if match is None:
            return name in self.trained
        kind = self.kinds[int(match[2])]
        return kind is not None and match[3] in kind


def _trace(
    shape: ModelShape, kinds: tuple[LayerKind, ...], arguments: "TrainArguments", batch: MicroBatch
) -> Activations:
    """Trace a model with layers of these kinds; raise a TraceError if it cannot run on fake tensors."""
    inputs = _trace_inputs(shape, kinds, arguments, batch)
    with _trace_errors():
        return _trace_once(inputs)


def trace_reading(shape: ModelShape, arguments: "TrainArguments", batch: MicroBatch) -> int:
    """Trace the forward pass of a frozen model up to its head, such as a teacher's, and return its most bytes.

    Nothing is kept for a backward pass, so the number of layers does not matter.

    Raises:
        TraceError: The model cannot run on fake tensors.
    """
    fsdp = replace(arguments.fsdp, activation_checkpointing="none", activation_offload=False)
    num_layers = min(_READ_LAYERS, shape.config.get_text_config().num_hidden_layers)
    inputs = _trace_inputs(shape, (None,) * num_layers, replace(arguments, fsdp=fsdp), batch)
    with _trace_errors():
        return _trace_reading_once(inputs)


@dataclass(frozen=True)
class SamplingBatch:
    """The completions that a rank samples at once, with prompts of different lengths, which are padded."""

    num_rows: int
    prompt_length: int
    """The tokens of the longest prompt."""
    max_new_tokens: int
    dtype: torch.dtype
    """Of the weights."""
    autocast: torch.dtype | None
    """The dtype that matrix products are cast to; None if it is ``dtype``."""
    on_gpu: bool
    has_copy: bool
    """Whether a copy of the model samples, and not the model in training itself."""


@dataclass(frozen=True)
class SamplingBytes:
    """The bytes of a batch of completions at the moment with the most, without the model's."""

    keys_and_values: int
    activations: int

    @property
    def total(self) -> int:
        return self.keys_and_values + self.activations


def trace_sampling(shape: ModelShape, arguments: "TrainArguments", batch: SamplingBatch) -> SamplingBytes:
    """Trace the pass over the prompts and the one for the last token, as ``rollouts.process_sampler`` runs them.

    All layers are traced: each of them keeps keys and values.

    Raises:
        TraceError: The model cannot run on fake tensors.
    """
    # ``generate`` runs the layers as they are, without recomputation or a compiler
    fsdp = replace(arguments.fsdp, activation_checkpointing="none", activation_offload=False, compile=False)
    # the run divides only the model in training into tiles
    if batch.has_copy:
        fsdp = replace(fsdp, mlp_tile_size="none")
    micro_batch = MicroBatch(
        num_rows=batch.num_rows,
        length=batch.prompt_length,
        dtype=batch.dtype,
        autocast=batch.autocast,
        has_borders=False,
        on_gpu=batch.on_gpu,
        by_unit=False,
    )
    kinds = _layer_kinds(shape)
    inputs = _trace_inputs(shape, kinds, replace(arguments, fsdp=fsdp), micro_batch)
    with _trace_errors():
        return _trace_sampling_once(inputs, batch)


@contextmanager
def _trace_errors() -> Iterator[None]:
    """Raise a TraceError for what the code of a model raises on fake tensors."""
    try:
        with _quiet_torch():
            yield
    except _FAULTS_OF_MODELS as error:
        error_name = type(error).__name__
        raise TraceError(f"{error_name}: {first_line(error).rstrip('.')}") from error


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
"""The errors that models' code raises on fake tensors, or if it is built with fewer layers."""


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep torch from logging the traceback of an operation that fails on fake tensors: the error says enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _trace_inputs(
    shape: ModelShape, kinds: tuple[LayerKind, ...], arguments: "TrainArguments", batch: MicroBatch
) -> _TraceInputs:
    """Return the inputs for the trace of a model with layers of these kinds."""
    # flash, flex and variable-length attention keep the same tensors as sdpa's fused kernel, without its mask
    attention = "eager" if arguments.model.attention == "eager" else "sdpa"
    config = _with_layers(shape.config, len(kinds))
    kept, kept_by_compiler = shares_kept(arguments.fsdp)
    tile_size = arguments.fsdp.mlp_tile_size
    trained: frozenset[str] = frozenset()
    if shape.frozen:
        trained = frozenset(name for name in shape.trained if not IN_LAYER.fullmatch(name))
    return _TraceInputs(
        config_text=f"{type(config)} {config.to_json_string(use_diff=False)}",
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
        trained=trained,
        preference=arguments.preference if batch.teacher else None,
        preference_text=repr(arguments.preference) if batch.teacher else "",
    )


@cache  # a choice of ``auto`` and the plan of it take the same trace, which takes seconds
def _trace_once(inputs: _TraceInputs) -> Activations:
    """Run a micro-batch on fake tensors, and record the bytes at the moments in ``Activations``."""
    batch = inputs.batch
    with _traced_model(inputs) as (model, layers):
        _replace_mask(model, layers, batch, needs_mask=inputs.masks)
        head = make_head(batch.teacher, batch.autocast or batch.dtype)
        vocab_size = inputs.config.get_text_config().vocab_size
        memory_device = "cuda" if batch.on_gpu else "cpu"
        objective = build_traced_objective(
            inputs.preference, batch.policy, batch.teacher, head, vocab_size, memory_device
        )
        live = _LiveBytes(model)
        if head is not None:
            live.leave_out(head.weight)
        input_batch = _make_batch(batch)

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", batch.autocast, enabled=batch.autocast is not None):
                return objective.loss(model, input_batch).total

        if 0 < inputs.kept < 1 or inputs.kept_by_compiler is not None:
            forward()  # the first pass chooses the tensors to keep
        peaks = _BackwardPeaks()
        if batch.by_unit:
            _drop_gradients_of_units(model, layers, live, peaks)
        else:
            _drop_gradients_of_parameters(model, layers, live, peaks)
        with live:
            loss = forward()
            kept = live.now
            forward_peak = live.most
            live.restart()
            loss.backward()
    if not batch.by_unit:
        return Activations(
            kept=kept,
            most=max(forward_peak, live.most, peaks.before_first_layer),
            at_head=0,
            at_last=0,
            after_last=0,
            at_end=live.most,
            after_end=0,
        )
    return Activations(
        kept=kept,
        most=forward_peak,
        at_head=peaks.at_head,
        at_last=peaks.at_last,
        after_last=peaks.after_last,
        at_end=peaks.at_end,
        after_end=peaks.after_end,
    )


@cache
def _trace_reading_once(inputs: _TraceInputs) -> int:
    """Run the forward pass of a frozen model on fake tensors, as a live teacher does, and return its most bytes."""
    with _traced_model(inputs) as (model, layers):
        _replace_mask(model, layers, inputs.batch, needs_mask=inputs.masks)
        head = TeacherHead(model.get_output_embeddings().weight, bias=None)
        model.set_output_embeddings(nn.Identity())
        model.requires_grad_(False)
        teacher = LiveTeacher(model.eval(), head)
        input_batch = _make_batch(inputs.batch)
        assert input_batch.targets is not None
        if inputs.kept_by_compiler is not None:
            teacher.read(input_batch, input_batch.targets)  # traces the graphs
        with _LiveBytes(model) as live:
            teacher.read(input_batch, input_batch.targets)
    return live.most


@cache
def _trace_sampling_once(inputs: _TraceInputs, batch: SamplingBatch) -> SamplingBytes:
    """Sample the first and the last token of a batch on fake tensors, and return the bytes of the larger moment."""
    num_rows = batch.num_rows
    with _traced_model(inputs) as (model, _):
        model.eval()
        if batch.has_copy:
            model.requires_grad_(False)  # autocast keeps a cast copy of weights that train
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters

        def sample_token(num_seen: int, cached: Cache | None = None) -> Cache:
            """Read those of ``num_seen`` tokens that are not cached, draw the next one, and return the cache."""
            mask = torch.ones(num_rows, num_seen, dtype=torch.int64)
            num_cached = cached.get_seq_length() if cached is not None else 0
            input_ids = torch.zeros(num_rows, num_seen - num_cached, dtype=torch.int64)
            options: dict[str, Any] = {"attention_mask": mask, "past_key_values": cached}
            if takes_positions:  # prompts are padded, so each row has other ones
                options["position_ids"] = torch.zeros_like(input_ids)
            output = model(input_ids, use_cache=True, logits_to_keep=1, **options)
            scores = output.logits[:, -1].to(copy=True, dtype=torch.float32)
            _draw_tokens(scores)
            cache: Cache = output.past_key_values
            return cache

        autocast = torch.autocast("cpu", batch.autocast, enabled=batch.autocast is not None)
        with _LiveBytes(model) as live, torch.no_grad(), autocast:
            cached = sample_token(batch.prompt_length)
            bytes_of_prompts = _sampling_bytes(cached, live)
            if batch.max_new_tokens == 1:
                return bytes_of_prompts
            # The last token is drawn, but never read. The pass that draws it reads the token before.
            num_seen = batch.prompt_length + batch.max_new_tokens - 1
            num_read_before = num_seen - 1
            _extend_cache(cached, num_read_before - batch.prompt_length)
            live.restart()
            cached = sample_token(num_seen, cached)
            bytes_of_last_token = _sampling_bytes(cached, live)
    return max(bytes_of_prompts, bytes_of_last_token, key=lambda moment: moment.total)


def _sampling_bytes(cache: Cache, live: _LiveBytes) -> SamplingBytes:
    """Divide the most bytes of a pass into those of its keys and values and all others."""
    keys_and_values = _bytes_of_cache(cache)
    return SamplingBytes(keys_and_values, live.most - keys_and_values)


def _draw_tokens(scores: torch.Tensor) -> None:
    """Take as much memory as drawing tokens by their scores, fp32 [rows, V]; see ``rollouts.process_sampler``."""
    temperature = 1.0
    log_probabilities = torch.log_softmax(scores / temperature, dim=1)
    log_probabilities.double().exp_().cumsum_(dim=1)


def _bytes_of_cache(cache: Cache) -> int:
    """Return the bytes of the keys and values of all layers."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in _cached_layers(cache))


def _extend_cache(cache: Cache, num_tokens: int) -> None:
    """Add keys and values without content for more tokens to each layer."""
    for layer in _cached_layers(cache):
        rows, heads, _, key_size = layer.keys.shape
        value_size = layer.values.shape[-1]
        new_keys = layer.keys.new_empty(rows, heads, num_tokens, key_size)
        new_values = layer.values.new_empty(rows, heads, num_tokens, value_size)
        layer.update(new_keys, new_values)


def _cached_layers(cache: Cache) -> list[Any]:
    """Return the layers of a cache that hold keys and values; a layer with a recurrent state holds none."""
    return [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]


@contextmanager
def _traced_model(inputs: _TraceInputs) -> Iterator[tuple[Any, list[nn.Module]]]:
    """Build a model on fake tensors in the order in which a run prepares it, and yield it with its layers.

    Within the block, tensors are fake, and attention takes as much memory as on the device.
    """
    batch = inputs.batch
    with ExitStack() as kernels, FakeTensorMode():
        # attention: the GPU's kernels, and the keys of all ranks that share rows
        if batch.on_gpu:
            kernels.enter_context(patch.object(F, "scaled_dot_product_attention", attention_on_gpu))
        if batch.context_size > 1:
            attention = attention_with_gathered_keys(F.scaled_dot_product_attention, batch.context_size)
            kernels.enter_context(patch.object(F, "scaled_dot_product_attention", attention))

        # the weights, and what trains
        config = copy.deepcopy(inputs.config)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=batch.dtype, attn_implementation=inputs.attention)
        if inputs.longest_row is not None:
            choose_frequencies(model, inputs.longest_row)
        if inputs.adapter:
            attach(model, inputs.adapter, source="the model", device="cpu")
            freeze_other_parts(model, inputs.adapter)
        model.train()
        layers = [module for module in model.modules() if type(module) in inputs.layer_classes]
        if inputs.kinds[0] is not None:  # only some parts train
            _freeze(model, inputs)

        # each of these replaces ``forward``
        if inputs.loss_in_head:
            compute_loss_in_head(model, memory_device="cuda" if batch.on_gpu else "cpu")
        if inputs.tile_size:
            tile_rows(model, layers, inputs.tile_size, cut_two_tiles)
        if inputs.kept_by_compiler is not None:
            # the graphs of a layer do not depend on the rest of the model
            operations_key = replace(inputs, config_text="", kinds=(), trained=frozenset(), kept=1.0)
            compile_for_trace(layers, inputs.kept_by_compiler, operations_key)
        if inputs.kept < 1:
            checkpoint_layers(layers, inputs.kept)
        yield model, layers


def _make_batch(batch: MicroBatch) -> Batch:
    """Return a batch in which every token but the last of a row predicts the next one."""
    input_ids = torch.zeros(batch.num_rows, batch.length, dtype=torch.int64)  # [rows, length]
    positions = torch.arange(batch.num_rows * (batch.length - 1))
    return Batch(input_ids, input_ids, targets=Targets(positions, torch.zeros_like(positions)))


def _freeze(model: Any, inputs: _TraceInputs) -> None:
    """Freeze the parameters that do not train; frozen layers above a part that trains still pass a gradient on."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(inputs.trains(name))
    if not inputs.kinds[0]:
        model.get_input_embeddings().register_forward_hook(lambda _, args, hidden: hidden.requires_grad_())


def _with_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the configuration of the same model with fewer layers."""
    config = copy.deepcopy(config)
    text_config: Any = config.get_text_config()
    text_config.num_hidden_layers = num_layers
    is_computed = isinstance(getattr(type(text_config), "layer_types", None), property)  # of num_hidden_layers: Jamba
    if getattr(text_config, "layer_types", None) and not is_computed:
        text_config.layer_types = text_config.layer_types[:num_layers]
    return config


@dataclass
class _BackwardPeaks:
    """The bytes that hooks record in the backward pass; for fields that :class:`Activations` also has, see there."""

    before_first_layer: int = 0  # the peak until all other layers have their gradients
    at_head: int = 0
    at_last: int = 0
    after_last: int = 0
    at_end: int = 0
    after_end: int = 0


def _drop_gradients_of_parameters(model: Any, layers: list[nn.Module], live: _LiveBytes, peaks: _BackwardPeaks) -> None:
    """Drop each parameter's gradient when it is computed, and record the peak; embedding and head get no gradients."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if embedding.weight.requires_grad:  # no gradient of this one, but still one of the embedded tokens
        embedding.register_forward_hook(lambda _, args, hidden: hidden.requires_grad_())
    embedding.requires_grad_(requires_grad=False)
    if head is not None:
        head.requires_grad_(requires_grad=False)

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)

    def note_peak() -> None:
        peaks.before_first_layer = live.most
        live.restart()

    parameters: list[nn.Parameter] = []
    for layer in layers[1:]:
        parameters += layer.parameters()
    _call_when_all_have_gradients(parameters, note_peak)


def _drop_gradients_of_units(model: Any, layers: list[nn.Module], live: _LiveBytes, peaks: _BackwardPeaks) -> None:
    """Drop a layer's gradients when all of them are computed, as a sharding strategy does, and record the peaks."""

    def end_layer(index: int, parameters: list[nn.Parameter]) -> None:
        if index == len(layers) - 1:
            peaks.at_last = live.most
            peaks.after_last = live.now
        # the first layer is the last in the pass, so its bytes stay
        peaks.at_end = live.most
        peaks.after_end = live.now
        for parameter in parameters:
            parameter.grad = None
        live.restart()

    for index, layer in enumerate(layers):
        parameters = list(layer.parameters())
        end_this_layer = partial(end_layer, index, parameters)
        if any(parameter.requires_grad for parameter in parameters):
            _call_when_all_have_gradients(parameters, end_this_layer)
        else:
            _call_at_input_gradient(layer, end_this_layer)

    def note_head() -> None:
        peaks.at_head = live.most
        live.restart()

    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        _call_when_all_have_gradients([head.weight], note_head)


def _call_when_all_have_gradients(parameters: list[nn.Parameter], function: Callable[[], None]) -> None:
    """Call a function when all parameters that train have their gradients."""
    without_gradient = {id(parameter) for parameter in parameters if parameter.requires_grad}

    def count(parameter: nn.Parameter) -> None:
        without_gradient.discard(id(parameter))
        if not without_gradient:
            function()

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(count)


def _call_at_input_gradient(layer: nn.Module, function: Callable[[], None]) -> None:
    """Call a function when the gradient of a frozen layer's input is computed, if it has a gradient."""

    def register(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and args[0].requires_grad:
            args[0].register_hook(lambda _: function())

    layer.register_forward_pre_hook(register)


def _replace_mask(model: nn.Module, layers: list[nn.Module], batch: MicroBatch, *, needs_mask: bool) -> None:
    """Pass the mask that transformers would make from document borders, or remove the mask that it makes.

    On fake tensors, transformers cannot check whether a mask is needed, so it always makes one.
    """

    def add_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = torch.ones(batch.num_rows, 1, batch.length, batch.length, dtype=torch.bool)
        return args, {**kwargs, "attention_mask": mask}

    def remove_mask(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "attention_mask" in kwargs:
            kwargs = {**kwargs, "attention_mask": None}
        return args, kwargs

    if needs_mask:
        model.register_forward_pre_hook(add_mask, with_kwargs=True)
    else:
        for layer in layers:
            layer.register_forward_pre_hook(remove_mask, with_kwargs=True)
