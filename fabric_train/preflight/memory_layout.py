"""How a run shards the model: parameters per FSDP unit, shards per rank, bytes per parameter, and what ranks send."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fabric_train.distributed.precision import gathered_dtype, weights_dtype
from fabric_train.model.adapter import is_adapter_parameter
from fabric_train.model.flops import layer_configs
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.nf4 import NF4Linear, quantize_layers
from fabric_train.model.row_tiles import why_not_tiled
from fabric_train.optim.optimizer import build_optimizer
from fabric_train.preflight.memory_activations import MicroBatch
from fabric_train.training.prepared_run import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

REDUCED_BYTES = 4
"""Gradients are reduced over ranks in fp32, see ``distributed.precision``."""
ADAPTER_BYTES = 4
"""Adapters are fp32, see ``model.adapter``."""


@dataclass(frozen=True)
class Units:
    """Numbers of parameters, without an adapter's except where it is named."""

    parameters: int  # as the model's name counts them
    num_layers: int
    layer: int  # of each layer; weights in 4 bits are as many numbers as store them
    rest: int  # outside of the layers: head, embedding and more
    head: int  # that train
    embedding: int
    is_tied: bool  # head and embedding are the same
    trained: int
    trained_layer: int  # the most that train in a layer
    trained_rest: int  # outside of the layers
    trained_embedding: int
    touched: int  # those that train, and the others of a layer in which something trains
    touched_layer: int
    states: int  # bytes of the optimizer's states
    saved_states: int  # bytes of those in a checkpoint
    adapter: int = 0  # all of them on each rank
    adapter_states: int = 0  # bytes in memory
    saved_adapter_states: int = 0
    dequantized: int = 0  # the largest weight in 4 bits, which is dequantized to be multiplied

    def part(self, num_parts: int) -> "Units":
        """Return the units of one rank if every parameter is split among ``num_parts`` ranks."""
        shared = ("layer", "rest", "head", "embedding", "states", "saved_states")
        trained = ("trained", "trained_layer", "trained_rest", "trained_embedding", "touched", "touched_layer")
        return replace(self, **{name: getattr(self, name) // num_parts for name in (*shared, *trained)})

    def reduced_by(self, parallelism: str) -> "Units":
        """Return the units with what has a gradient as ``trained``: FSDP1 has one for each layer as a whole."""
        if parallelism != "fsdp":
            return self
        return replace(self, trained=self.touched, trained_layer=self.touched_layer)

    @property
    def total(self) -> int:
        """The number of parameters; tied ones count once."""
        return self.num_layers * self.layer + self.rest

    @property
    def adapter_bytes(self) -> int:
        return ADAPTER_BYTES * self.adapter


@dataclass(frozen=True)
class Layout:
    """How ranks share a model.

    It is split among ``world_size // num_gradients`` ranks, then sharded among ``num_shards``, ``num_copies`` times.
    """

    name: str  # the parallelism
    world_size: int
    num_gradients: int  # ranks with different gradients
    num_nodes: int
    num_shards: int
    gathers_at_once: bool  # all weights stay gathered from the forward to the backward pass
    held: int  # bytes of a parameter between steps, as of its gradient
    computed: int  # bytes of a parameter in a pass
    accumulation: int
    reduces_each: bool  # gradients are reduced after each micro-batch, not once a step
    offloads: bool  # sharded weights, gradients and optimizer are in host memory

    @property
    def num_copies(self) -> int:
        """Groups of ranks that each hold the whole model."""
        return self.num_gradients // self.num_shards

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded, and gathered for computing."""
        return self.num_shards > 1


def bytes_of_states(shape: ModelShape, arguments: "TrainArguments") -> tuple[int, int]:
    """Return the bytes of the optimizer's states in memory and in a checkpoint, as it declares them.

    States that are not as large as their parameter, and the scales of 8-bit moments, are not counted.
    """
    dtype = weights_dtype(arguments.model.precision)
    if not shape.trained:
        return 0, 0
    weights = {
        name: nn.Parameter(
            torch.empty(size, dtype=torch.float32 if is_adapter_parameter(name) else dtype, device="meta")
        )
        for name, size in shape.trained.items()
    }
    decayed = {name for name, size in shape.trained.items() if len(size) >= 2}
    optimizer = build_optimizer(weights.items(), decayed, arguments.training, fused=False)
    sizes = [
        (each.numel() * (state.held_bytes or state.dtype.itemsize), each.numel() * state.dtype.itemsize)
        for each in weights.values()
        for state in optimizer.declare_states(each)
        if state.shape is None
    ]
    return sum(held for held, _ in sizes), sum(saved for _, saved in sizes)


def read_units(shape: ModelShape, arguments: "TrainArguments") -> Units:
    """Count a model's parameters per unit, on the meta device."""
    model, layers = _build_on_meta(shape, weights_dtype(arguments.model.precision).itemsize)
    largest = max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)
    inside = sum(_numel(layer) for layer in layers)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    name_of_head = next((name for name, weight in model.named_parameters() if head and weight is head.weight), None)
    of_adapter = replace(
        shape, trained={name: size for name, size in shape.trained.items() if is_adapter_parameter(name)}
    )
    adapter_states, saved_adapter_states = bytes_of_states(of_adapter, arguments)
    # states of whole modules have the dtype that they have beside the adapter
    all_states, all_saved_states = bytes_of_states(shape, arguments)
    states = all_states - adapter_states
    saved_states = all_saved_states - saved_adapter_states
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained_in = [sum(one.numel() for one in layer.parameters() if names[id(one)] in shape.trained) for layer in layers]
    trained = shape.num_trained - of_adapter.num_trained
    touched = [_numel(layer) if number else 0 for layer, number in zip(layers, trained_in, strict=True)]
    trains_embedding = names[id(embedding.weight)] in shape.trained
    in_4bit = [module for layer in layers for module in layer.modules() if isinstance(module, NF4Linear)]
    if arguments.model.precision.endswith("mixed"):
        in_4bit = []  # the activations have the copy that autocast makes of a weight
    return Units(
        parameters=shape.num_parameters,
        dequantized=max((each.in_features * each.out_features for each in in_4bit), default=0),
        num_layers=len(layers),
        layer=largest,
        rest=_numel(model) - inside,
        head=_numel(head) if name_of_head in shape.trained else 0,
        embedding=_numel(embedding),
        is_tied=is_tied,
        trained=trained,
        trained_layer=max(trained_in),
        trained_rest=trained - sum(trained_in),
        trained_embedding=_numel(embedding) if trains_embedding else 0,
        touched=trained - sum(trained_in) + sum(touched),
        touched_layer=max(touched),
        states=states,
        saved_states=saved_states,
        adapter=of_adapter.num_trained,
        adapter_states=adapter_states,
        saved_adapter_states=saved_adapter_states,
    )


def offloaded_bytes(shape: ModelShape, layout: Layout, states: int) -> int:
    """Return the bytes of weights, gradients and optimizer that ``--cpu_offload`` keeps in a rank's host memory.

    ``states`` are the bytes of all ranks' optimizer states. Weights and gradients are pinned: FSDP1's by unit, FSDP2's
    by parameter. torch rounds each such allocation up to a power of two.
    """
    if not layout.offloads:
        return 0
    model, layers = _build_on_meta(shape, layout.held)
    if layout.name == "fsdp2":
        numels = [parameter.numel() for parameter in model.parameters()]
    else:
        numels = [_numel(layer) for layer in layers]
        numels.append(_numel(model) - sum(numels))
    num_parts = layout.num_shards * layout.world_size // layout.num_gradients
    shards = [-(-numel // num_parts) for numel in numels]
    return sum(2 << (layout.held * numel - 1).bit_length() for numel in shards) + states // num_parts


def make_layout(arguments: "TrainArguments", plan: StepPlan, parallelism: str) -> Layout:
    """Return the layout that the arguments of a run ask for."""
    precision = arguments.model.precision
    fsdp = arguments.fsdp
    num_gradients = plan.num_data_ranks * fsdp.context_parallel_size
    num_shards = num_gradients if parallelism in ("fsdp", "fsdp2") else 1
    if parallelism == "fsdp" and fsdp.sharding_strategy == "NO_SHARD":
        num_shards = 1
    elif fsdp.is_hybrid:
        num_shards //= arguments.device.num_nodes
    held = weights_dtype(precision).itemsize
    return Layout(
        name=parallelism,
        world_size=plan.world_size,
        num_gradients=num_gradients,
        num_nodes=arguments.device.num_nodes,
        num_shards=num_shards,
        gathers_at_once=fsdp.keeps_gathered,
        held=held,
        computed=(gathered_dtype(arguments, parallelism) or weights_dtype(precision)).itemsize,
        accumulation=plan.accumulation,
        offloads=fsdp.cpu_offload,
        reduces_each=fsdp.gradient_reduction == "micro_batch",
    )


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    what: str
    num_ranks: int
    sent: int  # bytes of each rank
    leaving_machine: int  # bytes from all ranks of a machine

    def seconds(self, interconnect: float | None, network: float | None) -> float:
        """Return the least time in seconds, from bytes per second in one direction; None does not count.

        ``interconnect`` is from a device to the others of its machine, ``network`` from a machine to the others.
        """
        return max(self.sent / (interconnect or math.inf), self.leaving_machine / (network or math.inf))


def collectives_of_step(units: Units, layout: Layout) -> list[Collective]:
    """Return the collectives of a step, without losses and counts (a few bytes) and without tensor parallelism."""
    units = units.reduced_by(layout.name)
    copies = layout.num_copies
    shards = layout.num_shards
    total = units.total
    if not layout.is_sharded:
        sent = 2 * _ring(REDUCED_BYTES * (units.trained + units.adapter), copies)
        return [Collective("all-reduce of gradients", copies, sent, _leaving(sent, layout))] if sent else []
    again = 0 if layout.gathers_at_once else units.layer * units.num_layers  # the backward pass gathers layers again
    passes = layout.accumulation
    if layout.gathers_at_once and layout.name == "fsdp" and not layout.reduces_each:
        passes = 1  # FSDP1 keeps weights gathered while it accumulates unsharded gradients
    gathered = passes * _ring(layout.computed * (total + again), shards)
    reductions = layout.accumulation if layout.reduces_each else 1
    reduced = reductions * _ring(REDUCED_BYTES * units.trained, shards)
    result = [
        Collective("all-gather of weights", shards, gathered, 0 if copies > 1 else _leaving(gathered, layout)),
        Collective("reduce-scatter of gradients", shards, reduced, 0 if copies > 1 else _leaving(reduced, layout)),
    ]
    if units.adapter:
        result = [each for each in result if each.sent]  # a frozen base has no gradients
        ranks = layout.num_gradients
        sent = 2 * _ring(units.adapter_bytes, layout.num_gradients)
        result.append(Collective("all-reduce of the adapter's gradients", ranks, sent, _leaving(sent, layout)))
    if copies > 1 and units.trained:
        sent = reductions * 2 * _ring(REDUCED_BYTES * units.trained // shards, copies)
        result.append(Collective("all-reduce of gradients between machines", copies, sent, shards * sent))
    return result


def collectives_of_slices(
    shape: ModelShape, arguments: "TrainArguments", layout: Layout, batch: MicroBatch
) -> list[Collective]:
    """Return the exchange of keys and values, and of their gradients in fp32, in a step.

    Layers that are recomputed gather them again. Tensor parallelism divides the heads among the ranks.
    """
    config: Any = shape.config.get_text_config()
    width = 0  # of the keys and values of all layers
    for layer in layer_configs(config):
        head_size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        num_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width += 2 * num_heads // arguments.fsdp.tensor_parallel_size * head_size
    numel = width * batch.length * layout.accumulation * (batch.context_size - 1)
    passes = 1 if arguments.fsdp.activation_checkpointing == "none" else 2
    itemsize = (batch.autocast or batch.dtype).itemsize
    is_inside = layout.world_size // layout.num_nodes % arguments.fsdp.ranks_of_rows == 0
    found = (("all-gather of keys and values", passes * itemsize), ("reduce-scatter of their gradients", REDUCED_BYTES))
    return [
        Collective(what, batch.context_size, num_bytes * numel, 0 if is_inside else _leaving(num_bytes * numel, layout))
        for what, num_bytes in found
    ]


def _leaving(sent: int, layout: Layout) -> int:
    return sent if layout.num_nodes > 1 else 0


def _ring(num_bytes: int, num_ranks: int) -> int:
    return num_bytes * (num_ranks - 1) // num_ranks


def _build_on_meta(shape: ModelShape, itemsize: int) -> tuple[Any, list[nn.Module]]:
    """Return the base model and its layers; weights in 4 bits are as many numbers of ``itemsize`` as store them."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.config)
    layers = [module for module in model.modules() if type(module) in shape.layer_classes]
    if shape.adapter and shape.adapter.base_weights:
        quantize_layers(layers, {2: torch.bfloat16, 4: torch.float32}[itemsize], shape.adapter.train_also)
    return model, layers


def why_no_tiles(shape: ModelShape) -> str | None:
    """Return why ``--mlp_tile_size`` does not work with a model, or None."""
    if shape.adapter and shape.adapter.dropout > 0:
        return f"--lora_dropout {shape.adapter.dropout} would drop other numbers when a tile is computed again"
    return why_not_tiled(_build_on_meta(shape, 4)[1])


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
