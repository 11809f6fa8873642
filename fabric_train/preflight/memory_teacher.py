"""Count the memory and the FLOPs of a distillation's teacher, which is frozen and sharded like the student.

Its activations are freed before the student's are at their most, except its last hidden states of the distilled tokens,
which the loss reads. The loss computes chunks of the same size with a teacher as without one.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.hf_model import ModelShape
from fabric_train.preflight.memory_layout import Layout, bytes_outside_head
from fabric_train.training.step_plan import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


@dataclass(frozen=True)
class TeacherForecast:
    """What a teacher takes on each rank."""

    device_bytes: int
    """The bytes of its weights and hidden states on the device."""
    host_bytes: int
    """The bytes of its weights in host memory, with ``--cpu_offload``."""
    flops_of_step: float
    """The FLOPs of its forward passes in a step."""


def forecast_teacher(shape: ModelShape, arguments: "TrainArguments", layout: Layout, plan: StepPlan) -> TeacherForecast:
    """Forecast what a teacher takes, with the arguments, the layout and the steps of the student's run.

    Each rank has all of its head on its device.
    """
    itemsize = compute_dtype(arguments.model.precision).itemsize
    hidden_size = shape.config.get_text_config().hidden_size
    head_bytes = itemsize * shape.vocab_size * hidden_size
    teacher_weights = arguments.preference.teacher_weights
    base_weights = None if teacher_weights == "16bit" else teacher_weights
    shard_bytes = bytes_outside_head(shape, itemsize, base_weights) // layout.num_shards
    tokens_per_batch = arguments.training.micro_batch_size * plan.tokens_per_row
    hidden_bytes = itemsize * tokens_per_batch * hidden_size
    flops_per_row = shape.flops.count_forward([plan.tokens_per_row])
    return TeacherForecast(
        device_bytes=head_bytes + hidden_bytes + (0 if layout.offloads else shard_bytes),
        host_bytes=shard_bytes if layout.offloads else 0,
        flops_of_step=flops_per_row * plan.most_rows_per_step / plan.world_size,
    )
