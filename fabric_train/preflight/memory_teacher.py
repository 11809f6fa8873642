"""Count the memory, the traffic and the FLOPs of a frozen model that is sharded like the model in training.

This is a live teacher, or the reference of reinforcement learning. In its forward pass it gathers its weights, and has
activations of its own. Both are freed before the forward pass of the model in training. What the loss has of a teacher
or a reference is traced with the activations of the model in training, see ``memory_objective``.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.adapter import is_adapter_parameter
from fabric_train.preflight.memory_activations import MicroBatch, trace_reading
from fabric_train.preflight.memory_layout import (
    ADAPTER_BYTES,
    Collective,
    FrozenBytes,
    Layout,
    gather_of_frozen,
    read_units,
    weigh_frozen,
)
from fabric_train.training.prepared_run import FrozenModel, FrozenRole
from fabric_train.training.step_plan import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_GATHERED_LAYERS = {"fsdp": 1, "fsdp2": 3}
"""The layers of which a rank has all weights at once. FSDP2 has those that it computes, the buffer in which they were
gathered, and the buffer in which the next ones are gathered."""
_GATHERED_EMBEDDINGS = {"fsdp": 1, "fsdp2": 2}


@dataclass(frozen=True)
class TeacherForecast:
    """What a teacher or a reference takes on each rank."""

    role: FrozenRole
    device_bytes: int
    """The bytes of its weights on the device, throughout the step."""
    host_bytes: int = 0
    """The bytes of its weights in host memory, with ``--cpu_offload``."""
    flops_of_step: float = 0.0
    """The FLOPs of its forward passes in a step."""
    collectives: tuple[Collective, ...] = ()
    """Those of its forward passes in a step."""


@dataclass(frozen=True)
class TeacherPass:
    """The bytes that a teacher or a reference takes at the moment of its forward pass with the most."""

    gathered_bytes: int
    activation_bytes: int


def forecast_teacher(
    model: FrozenModel, arguments: "TrainArguments", layout: Layout, plan: StepPlan
) -> TeacherForecast:
    """Forecast what a frozen model takes, with the arguments, the layout and the steps of the run beside it.

    Each rank has all of its head and of its adapter on its device.
    """
    shape = model.shape
    adapter_bytes = 0
    for name, size in shape.trained.items():
        if is_adapter_parameter(name):
            adapter_bytes += ADAPTER_BYTES * size.numel()
    num_bytes = _weigh(model, arguments).total
    shard_bytes = num_bytes // layout.num_parts
    return TeacherForecast(
        role=model.role,
        device_bytes=_head_bytes(model, arguments) + adapter_bytes + (0 if layout.offloads else shard_bytes),
        host_bytes=shard_bytes if layout.offloads else 0,
        flops_of_step=_flops_of_step(model, plan),
        collectives=_gathers(model, num_bytes, layout),
    )


def forecast_base(base: FrozenModel, arguments: "TrainArguments", layout: Layout, plan: StepPlan) -> TeacherForecast:
    """Forecast the base of the adapter that trains as the reference: its passes, but no weights of its own.

    Its head is sharded like all of the policy.
    """
    num_bytes = _weigh(base, arguments).total
    if not read_units(base.shape, arguments).is_tied:
        num_bytes += _head_bytes(base, arguments)
    return TeacherForecast(
        role=base.role,
        device_bytes=0,
        flops_of_step=_flops_of_step(base, plan),
        collectives=_gathers(base, num_bytes, layout),
    )


def forecast_base_pass(
    base: FrozenModel, arguments: "TrainArguments", layout: Layout, trained_batch: MicroBatch
) -> TeacherPass:
    """Forecast the forward pass of the policy without its adapter, whose layers are then not compiled.

    Raises:
        TraceError: The model cannot run on fake tensors.
    """
    eager = replace(arguments, fsdp=replace(arguments.fsdp, compile=False))
    return forecast_pass(base, eager, layout, trained_batch)


def forecast_pass(
    model: FrozenModel, arguments: "TrainArguments", layout: Layout, trained_batch: MicroBatch
) -> TeacherPass:
    """Forecast the forward pass of a frozen model, which reads the rows of the model in training.

    Raises:
        TraceError: The model cannot run on fake tensors.
    """
    dtype = compute_dtype(arguments.model.precision)
    shape = model.shape
    batch = replace(trained_batch, dtype=dtype, autocast=None, teacher=None, policy=None)
    weights = _weigh(model, arguments)
    activation_bytes = trace_reading(shape, arguments, batch) + weights.dequantized

    gathered_layers = 0
    gathered_embedding = 0
    if layout.is_sharded:
        layer_bytes = weights.layer // layout.tensor_parallel_size
        gathered_layers = min(_GATHERED_LAYERS[layout.name], 2 * weights.num_layers) * layer_bytes
        gathered_embedding = _GATHERED_EMBEDDINGS[layout.name] * weights.embedding
    # the embedding is gathered before there are activations of layers
    num_tokens = batch.num_rows * batch.length
    embedded_bytes = dtype.itemsize * num_tokens * shape.config.get_text_config().hidden_size
    if gathered_embedding + embedded_bytes > gathered_layers + activation_bytes:
        return TeacherPass(gathered_embedding, embedded_bytes)
    return TeacherPass(gathered_layers, activation_bytes)


def _flops_of_step(model: FrozenModel, plan: StepPlan) -> float:
    """Return the FLOPs of a frozen model's forward passes in a step, on each rank."""
    flops_per_row = model.shape.flops.count_forward([plan.tokens_per_row])
    return flops_per_row * plan.most_rows_per_step / plan.world_size


def _gathers(model: FrozenModel, num_bytes: int, layout: Layout) -> tuple[Collective, ...]:
    """Return the all-gathers of a frozen model's sharded weights in a step."""
    name = f"all-gather of the {model.role}'s weights"
    return tuple(gather_of_frozen(name, num_bytes // layout.tensor_parallel_size, layout))


def _head_bytes(model: FrozenModel, arguments: "TrainArguments") -> int:
    """Return the bytes of a frozen model's full head."""
    itemsize = compute_dtype(arguments.model.precision).itemsize
    return itemsize * model.shape.vocab_size * model.shape.config.get_text_config().hidden_size


def _weigh(model: FrozenModel, arguments: "TrainArguments") -> FrozenBytes:
    itemsize = compute_dtype(arguments.model.precision).itemsize
    return weigh_frozen(model.shape, itemsize, model.base_weights)
