"""Describe how a run shards the model: parameters per FSDP unit, shards per rank, bytes per parameter, traffic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fabric_train.distributed.precision import gathered_dtype, weights_dtype
from fabric_train.model.adapter import is_adapter_parameter
from fabric_train.model.flops import layer_configs
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.nf4 import DOUBLE, NF4Linear, quantize_layers
from fabric_train.model.row_tiles import why_not_tiled
from fabric_train.optim.optimizer import build_optimizer
from fabric_train.optim.states import DeclaredStates
from fabric_train.preflight.memory_activations import MicroBatch
from fabric_train.training.step_plan import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

REDUCED_BYTES = 4
"""The bytes of a gradient that ranks reduce, which is fp32, see ``distributed.precision``."""
ADAPTER_BYTES = 4
"""The bytes of an adapter's parameter, which is fp32, see ``model.adapter``."""


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
    touched: int  # those that train, and the frozen ones of a layer in which something trains
    touched_layer: int
    states: int  # bytes of the optimizer's states
    saved_states: int  # bytes of those in a checkpoint
    updating: int = 0  # the most bytes that the optimizer takes to update a parameter
    exchanged: int = 0  # bytes of the parameters' updates that ranks exchange if they have divided them
    adapter: int = 0  # all of them on each rank
    adapter_states: int = 0  # bytes in memory
    saved_adapter_states: int = 0
    dequantized: int = 0  # the largest weight in 4 bits, which is dequantized to be multiplied
    largest_parameter: int = 0

    def part(self, num_parts: int) -> "Units":
        """Return the units of one rank if every parameter is split among ``num_parts`` ranks.

        The adapter and a dequantized weight are not split.
        """
        return replace(
            self,
            layer=self.layer // num_parts,
            rest=self.rest // num_parts,
            head=self.head // num_parts,
            embedding=self.embedding // num_parts,
            trained=self.trained // num_parts,
            trained_layer=self.trained_layer // num_parts,
            trained_rest=self.trained_rest // num_parts,
            trained_embedding=self.trained_embedding // num_parts,
            touched=self.touched // num_parts,
            touched_layer=self.touched_layer // num_parts,
            states=self.states // num_parts,
            saved_states=self.saved_states // num_parts,
        )

    def reduced_by(self, parallelism: str) -> "Units":
        """Return the units with all that have a gradient as ``trained``: FSDP1 has one gradient for each full layer."""
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

    Tensor parallelism splits the model among ``world_size // num_gradients`` ranks. Each of these parts is sharded
    among ``num_shards`` ranks, and there are ``num_copies`` copies of the full model.
    """

    name: str  # the parallelism
    world_size: int
    num_gradients: int  # ranks with different gradients
    num_nodes: int
    num_shards: int
    gathers_at_once: bool  # all weights stay gathered from the forward to the backward pass
    stored_itemsize: int  # bytes of a parameter between steps, and of its gradient
    pass_itemsize: int  # bytes of a parameter in the forward and backward pass
    accumulation: int
    reduces_each: bool  # gradients are reduced after each micro-batch, not once a step
    offloads: bool  # sharded weights, gradients and optimizer are in host memory

    @property
    def num_copies(self) -> int:
        """The number of groups of ranks that each hold the full model."""
        return self.num_gradients // self.num_shards

    @property
    def num_parts(self) -> int:
        """The number of ranks among which a parameter is divided, by tensor parallelism and by sharding."""
        return self.num_shards * self.tensor_parallel_size

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks among which tensor parallelism divides a parameter before it is sharded."""
        return self.world_size // self.num_gradients

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded, and gathered for computing."""
        return self.num_shards > 1

    @property
    def has_sampling_copy(self) -> bool:
        """Whether a full copy of the model samples in process: one that fsdp wraps does not, also on one device."""
        return self.name in ("fsdp", "fsdp2")


def bytes_of_states(shape: ModelShape, arguments: "TrainArguments") -> tuple[int, int]:
    """Return the bytes of the optimizer's states in memory and in a checkpoint, as it declares them.

    States that are smaller than their parameter, and the scales of 8-bit moments, are not counted.
    """
    if not shape.trained:
        return 0, 0
    optimizer, weights = _build_optimizer_on_meta(shape, arguments)
    memory_bytes = 0
    checkpoint_bytes = 0
    for weight in weights:
        for state in optimizer.declare_states(weight):
            if state.shape is not None:
                continue
            itemsize = state.dtype.itemsize
            memory_bytes += weight.numel() * (state.held_bytes or itemsize)
            checkpoint_bytes += weight.numel() * itemsize
    return memory_bytes, checkpoint_bytes


def bytes_of_update(shape: ModelShape, arguments: "TrainArguments") -> tuple[int, int]:
    """Return the most bytes that the optimizer needs to update a parameter, and those that sharded ranks exchange."""
    if not shape.trained:
        return 0, 0
    optimizer, weights = _build_optimizer_on_meta(shape, arguments)
    working_bytes = max(optimizer.working_bytes(weight) for weight in weights)
    exchanged_bytes = sum(optimizer.exchanged_bytes(weight) for weight in weights)
    return working_bytes, exchanged_bytes


def _build_optimizer_on_meta(
    shape: ModelShape, arguments: "TrainArguments"
) -> tuple[DeclaredStates, list[nn.Parameter]]:
    """Build the optimizer over the parameters that train, on the meta device; return both."""
    weights_type = weights_dtype(arguments.model.precision)
    weights: dict[str, nn.Parameter] = {}
    for name, size in shape.trained.items():
        dtype = torch.float32 if is_adapter_parameter(name) else weights_type
        weights[name] = nn.Parameter(torch.empty(size, dtype=dtype, device="meta"))
    decayed = {name for name, size in shape.trained.items() if len(size) >= 2}  # matrices
    optimizer = build_optimizer(weights.items(), decayed, arguments.training, fused=False)
    return optimizer, list(weights.values())


def read_units(shape: ModelShape, arguments: "TrainArguments") -> Units:
    """Count a model's parameters per unit, on the meta device."""
    precision = arguments.model.precision
    model, layers = _build_on_meta(shape, weights_dtype(precision).itemsize)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    numels = [_numel(layer) for layer in layers]

    # head and embedding
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    trains_head = head is not None and names[id(head.weight)] in shape.trained
    trains_embedding = names[id(embedding.weight)] in shape.trained

    # the adapter, and the optimizer's states: those of whole modules have the dtype that they have beside the adapter
    adapter_weights = {name: size for name, size in shape.trained.items() if is_adapter_parameter(name)}
    adapter_shape = replace(shape, trained=adapter_weights)
    adapter_states, saved_adapter_states = bytes_of_states(adapter_shape, arguments)
    all_states, all_saved_states = bytes_of_states(shape, arguments)
    updating, exchanged = bytes_of_update(shape, arguments)

    # what trains in each layer, and how large the layers are in which something trains
    trained_by_layer: list[int] = []
    for layer in layers:
        trained = [parameter.numel() for parameter in layer.parameters() if names[id(parameter)] in shape.trained]
        trained_by_layer.append(sum(trained))
    touched_by_layer = [numel if trained else 0 for numel, trained in zip(numels, trained_by_layer, strict=True)]
    num_trained = shape.num_trained - adapter_shape.num_trained
    trained_rest = num_trained - sum(trained_by_layer)

    return Units(
        parameters=shape.num_parameters,
        # with mixed precision the activations have the copy that autocast makes of a weight in 4 bits
        dequantized=0 if precision.endswith("mixed") else _largest_nf4_weight(layers),
        largest_parameter=max(parameter.numel() for parameter in model.parameters()),
        num_layers=len(layers),
        layer=max(numels),
        rest=_numel(model) - sum(numels),
        head=_numel(head) if trains_head else 0,
        embedding=_numel(embedding),
        is_tied=head is not None and head.weight is embedding.weight,
        trained=num_trained,
        trained_layer=max(trained_by_layer),
        trained_rest=trained_rest,
        trained_embedding=_numel(embedding) if trains_embedding else 0,
        touched=trained_rest + sum(touched_by_layer),
        touched_layer=max(touched_by_layer),
        states=all_states - adapter_states,
        saved_states=all_saved_states - saved_adapter_states,
        updating=updating,
        exchanged=exchanged,
        adapter=adapter_shape.num_trained,
        adapter_states=adapter_states,
        saved_adapter_states=saved_adapter_states,
    )


def _largest_nf4_weight(layers: Sequence[nn.Module]) -> int:
    """Return the number of values of the largest 4-bit weight; 0 if there is none."""
    largest = 0
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, NF4Linear):
                largest = max(largest, module.in_features * module.out_features)
    return largest


def offloaded_bytes(shape: ModelShape, layout: Layout, states: int) -> int:
    """Return the bytes of weights, gradients and optimizer that ``--cpu_offload`` keeps in a rank's host memory.

    ``states`` are the bytes of all ranks' optimizer states. Weights and gradients are pinned: FSDP1's by unit, FSDP2's
    by parameter. torch rounds each such allocation up to a power of two.
    """
    if not layout.offloads:
        return 0
    model, layers = _build_on_meta(shape, layout.stored_itemsize)
    if layout.name == "fsdp2":
        numels = [parameter.numel() for parameter in model.parameters()]
    else:
        numels = [_numel(layer) for layer in layers]
        numels.append(_numel(model) - sum(numels))
    num_bytes = 0
    for numel in numels:
        shard_bytes = layout.stored_itemsize * -(-numel // layout.num_parts)  # rounded up
        allocated = 1 << (shard_bytes - 1).bit_length()
        num_bytes += 2 * allocated  # a weight and its gradient
    return num_bytes + states // layout.num_parts


def make_layout(arguments: "TrainArguments", plan: StepPlan, parallelism: str) -> Layout:
    """Return the layout that the arguments of a run ask for."""
    precision = arguments.model.precision
    fsdp = arguments.fsdp
    num_gradients = plan.num_data_ranks * fsdp.context_parallel_size
    num_shards = num_gradients if parallelism in ("fsdp", "fsdp2") else 1  # ddp and single hold whole copies
    if parallelism == "fsdp" and fsdp.sharding_strategy == "NO_SHARD":
        num_shards = 1
    elif fsdp.is_hybrid:
        num_shards //= arguments.device.num_nodes
    stored_dtype = weights_dtype(precision)
    pass_dtype = gathered_dtype(arguments, parallelism) or stored_dtype
    return Layout(
        name=parallelism,
        world_size=plan.world_size,
        num_gradients=num_gradients,
        num_nodes=arguments.device.num_nodes,
        num_shards=num_shards,
        gathers_at_once=fsdp.keeps_gathered,
        stored_itemsize=stored_dtype.itemsize,
        pass_itemsize=pass_dtype.itemsize,
        accumulation=plan.accumulation,
        offloads=fsdp.cpu_offload,
        reduces_each=fsdp.gradient_reduction == "micro_batch",
    )


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step."""

    name: str
    num_ranks: int
    sent: int  # bytes of each rank
    leaving_machine: int  # bytes from all ranks of a machine

    def seconds(self, interconnect: float | None, network: float | None) -> float:
        """Return the shortest time in seconds, from bytes per second in one direction; a bandwidth of None is left out.

        ``interconnect`` is from a device to the others of its machine, ``network`` from a machine to the others.
        """
        return max(self.sent / (interconnect or math.inf), self.leaving_machine / (network or math.inf))


def collectives_of_step(units: Units, layout: Layout) -> list[Collective]:
    """Return the collectives of a step, except losses and counts (a few bytes) and those of tensor parallelism."""
    units = units.reduced_by(layout.name)
    num_copies = layout.num_copies
    num_shards = layout.num_shards

    # ranks with the whole model only send their gradients
    if not layout.is_sharded:
        sent = _all_reduce_bytes(REDUCED_BYTES * (units.trained + units.adapter), num_copies)
        if not sent:
            return []
        return [Collective("all-reduce of gradients", num_copies, sent, _leaving(sent, layout))]

    # each micro-batch gathers the weights for the forward pass, and the layers again for the backward pass
    num_gathered = units.total
    if not layout.gathers_at_once:
        num_gathered += units.layer * units.num_layers
    num_passes = layout.accumulation
    if layout.gathers_at_once and layout.name == "fsdp" and not layout.reduces_each:
        num_passes = 1  # FSDP1 keeps weights gathered while it accumulates unsharded gradients
    gathered = num_passes * _ring(layout.pass_itemsize * num_gathered, num_shards)
    num_reductions = layout.accumulation if layout.reduces_each else 1
    reduced = num_reductions * _ring(REDUCED_BYTES * units.trained, num_shards)

    # with copies of the model, shards are within a machine
    is_inside = num_copies > 1
    gathered_leaving = 0 if is_inside else _leaving(gathered, layout)
    reduced_leaving = 0 if is_inside else _leaving(reduced, layout)
    collectives = [
        Collective("all-gather of weights", num_shards, gathered, gathered_leaving),
        Collective("reduce-scatter of gradients", num_shards, reduced, reduced_leaving),
    ]
    if units.adapter:
        collectives = [collective for collective in collectives if collective.sent]  # a frozen base has no gradients
        num_ranks = layout.num_gradients
        sent = _all_reduce_bytes(units.adapter_bytes, num_ranks)
        name = "all-reduce of the adapter's gradients"
        collectives.append(Collective(name, num_ranks, sent, _leaving(sent, layout)))
    if num_copies > 1 and units.trained:
        sent = num_reductions * _all_reduce_bytes(REDUCED_BYTES * units.trained // num_shards, num_copies)
        collectives.append(Collective("all-reduce of gradients between machines", num_copies, sent, num_shards * sent))
    if units.exchanged:
        collectives.append(_exchange_of_updates(units.exchanged, layout))
    return collectives


def _exchange_of_updates(exchanged: int, layout: Layout) -> Collective:
    """Return the all-to-all in which each rank sends its share of ``exchanged`` bytes, evenly among the ranks."""
    num_shards = layout.num_shards
    sent_to_each = exchanged // num_shards**2
    ranks_per_machine = layout.world_size // layout.num_nodes
    ranks_elsewhere = max(0, num_shards - ranks_per_machine)
    leaving = ranks_per_machine * ranks_elsewhere * sent_to_each
    return Collective("all-to-all of updates", num_shards, (num_shards - 1) * sent_to_each, leaving)


def collectives_of_slices(
    shape: ModelShape, arguments: "TrainArguments", layout: Layout, batch: MicroBatch
) -> list[Collective]:
    """Return the exchange of keys and values, and of their gradients in fp32, in a step.

    Recomputed layers gather the keys and values again. Tensor parallelism divides the heads among the ranks.
    """
    fsdp = arguments.fsdp
    width = width_of_keys_and_values(shape, fsdp.tensor_parallel_size)
    numel = width * batch.length * layout.accumulation * (batch.context_size - 1)

    # recomputed layers gather twice; the gradients are in fp32
    num_passes = 1 if fsdp.activation_checkpointing == "none" else 2
    itemsize = (batch.autocast or batch.dtype).itemsize
    gathered = num_passes * itemsize * numel
    reduced = REDUCED_BYTES * numel

    ranks_per_machine = layout.world_size // layout.num_nodes
    is_inside = ranks_per_machine % fsdp.ranks_of_rows == 0  # the ranks that share rows are on one machine
    gathered_leaving = 0 if is_inside else _leaving(gathered, layout)
    reduced_leaving = 0 if is_inside else _leaving(reduced, layout)
    return [
        Collective("all-gather of keys and values", batch.context_size, gathered, gathered_leaving),
        Collective("reduce-scatter of their gradients", batch.context_size, reduced, reduced_leaving),
    ]


def width_of_keys_and_values(shape: ModelShape, tensor_parallel_size: int = 1) -> int:
    """Return how many numbers a token's keys and values have in all layers, on each of the ranks that share heads."""
    config: Any = shape.config.get_text_config()
    width = 0
    for layer in layer_configs(config):
        head_size = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        num_heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        width += 2 * num_heads // tensor_parallel_size * head_size
    return width


def _leaving(sent: int, layout: Layout) -> int:
    """Return the bytes that leave a machine if its ranks form one ring with those of the others."""
    return sent if layout.num_nodes > 1 else 0


def _ring(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-gather or reduce-scatter of ``num_bytes`` in total."""
    return num_bytes * (num_ranks - 1) // num_ranks


def _all_reduce_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * _ring(num_bytes, num_ranks)


def _build_on_meta(shape: ModelShape, itemsize: int) -> tuple[Any, list[nn.Module]]:
    """Return the base model on the meta device and its layers; 4-bit weights are values of ``itemsize`` bytes."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape.config)
    layers = [module for module in model.modules() if type(module) in shape.layer_classes]
    if shape.adapter and shape.adapter.base_weights:
        _quantize_on_meta(layers, itemsize, shape.adapter.base_weights, shape.adapter.train_also)
    return model, layers


def _quantize_on_meta(
    layers: Sequence[nn.Module], itemsize: int, base_weights: str, skipped: Sequence[str] = ()
) -> None:
    """Hold layers in 4 bits; see ``nf4.quantize_layers``."""
    storage_dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    quantize_layers(layers, storage_dtype, skipped, has_8bit_scales=base_weights == DOUBLE)


@dataclass(frozen=True)
class FrozenBytes:
    """The bytes of a frozen model without an untied head."""

    total: int
    layer: int
    """The largest layer."""
    num_layers: int
    embedding: int
    dequantized: int
    """The largest weight in 4 bits, which is dequantized to be multiplied; 0 if there is none."""


def weigh_frozen(shape: ModelShape, itemsize: int, base_weights: str | None) -> FrozenBytes:
    """Return the bytes of a frozen model.

    Weights have ``itemsize`` bytes, except those in 4 bits if ``base_weights`` is a value of ``--base_weights``.
    """
    model, layers = _build_on_meta(replace(shape, adapter=None), itemsize)
    if base_weights is not None:
        _quantize_on_meta(layers, itemsize, base_weights)
    embedding = model.get_input_embeddings()
    model.set_output_embeddings(nn.Identity())
    return FrozenBytes(
        total=itemsize * _numel(model),
        layer=itemsize * max(_numel(layer) for layer in layers),
        num_layers=len(layers),
        embedding=itemsize * _numel(embedding),
        dequantized=itemsize * _largest_nf4_weight(layers),
    )


def gather_of_frozen(name: str, num_bytes: int, layout: Layout) -> list[Collective]:
    """Return the all-gather of a frozen model's weights for the forward pass of each micro-batch, if it is sharded."""
    if not layout.is_sharded:
        return []
    sent = layout.accumulation * _ring(num_bytes, layout.num_shards)
    leaving = 0 if layout.num_copies > 1 else _leaving(sent, layout)  # with copies, shards are within a machine
    return [Collective(name, layout.num_shards, sent, leaving)]


def why_no_tiles(shape: ModelShape) -> str | None:
    """Return why ``--mlp_tile_size`` does not work with a model, or None."""
    if shape.adapter and shape.adapter.dropout > 0:
        return f"--lora_dropout {shape.adapter.dropout} would drop different values when a tile is recomputed"
    _, layers = _build_on_meta(shape, itemsize=4)
    return why_not_tiled(layers)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
