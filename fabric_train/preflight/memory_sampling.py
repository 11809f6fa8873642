"""Count the memory and the least time of sampling in a run with ``--prompts``.

In process, one batch of completions after the other has keys, values and activations, which are freed before the rows
are trained. What samples is the model in training, or if that is sharded, a full copy of it on each device, which stays
throughout the run. vLLM takes a share of each GPU of the run while it samples, unless it has GPUs of its own.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabric_train.distributed.precision import compute_dtype, gathered_dtype, weights_dtype
from fabric_train.model.hf_model import ModelShape
from fabric_train.preflight.memory_activations import SamplingBatch, trace_sampling
from fabric_train.preflight.memory_layout import Layout, Units, width_of_keys_and_values
from fabric_train.rollouts.vllm_sampler import REQUESTS_PER_REPLICA, SHARED_GPU_SHARE

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


@dataclass(frozen=True)
class SamplingPlan:
    """What a run samples in a step."""

    num_prompts: int
    """The prompts of a step, of all ranks."""
    group_size: int
    prompt_length: int
    """The tokens of the longest prompt."""
    max_new_tokens: int
    batch_size: int
    """The most completions that a rank samples at once, in process."""


@dataclass(frozen=True)
class SamplingForecast:
    """What sampling takes on each rank."""

    copy_bytes: int = 0
    """The bytes of the copy of the model that samples, throughout the run."""
    gathered_bytes: int = 0
    """The bytes that are gathered at once while the copy takes over the weights."""
    num_rows: int = 0
    """The completions that are sampled at once; 0 if vLLM samples."""
    keys_and_values: int = 0
    """The bytes of the keys and values of a batch."""
    activation_bytes: int = 0
    """The bytes of everything else of a batch."""
    engine_bytes: int = 0
    """The bytes that vLLM may use on each GPU of the run while it samples."""
    engine_weights: int = 0
    """The bytes of the weights in vLLM, on each GPU that it uses."""
    host_bytes: int = 0
    """The bytes in host memory for each rank: the weights of a vLLM that sleeps, and the rank's share of the folder in
    memory through which vLLM gets them."""

    def largest_batch(self, free_bytes: int) -> int:
        """Return how many completions could be sampled at once in ``free_bytes``; all tensors have a row for each."""
        bytes_per_row = (self.keys_and_values + self.activation_bytes) / self.num_rows
        return max(0, int(free_bytes / bytes_per_row))


def forecast_sampling(
    shape: ModelShape,
    arguments: "TrainArguments",
    layout: Layout,
    units: Units,
    plan: SamplingPlan,
    *,
    on_gpu: bool,
    device_memory: int,
) -> SamplingForecast:
    """Forecast what sampling takes.

    Raises:
        TraceError: The model cannot run on fake tensors.
    """
    precision = arguments.model.precision
    if arguments.rollouts.sampler == "vllm":
        weights = compute_dtype(precision).itemsize * shape.num_parameters
        has_own_gpus = arguments.rollouts.sampler_devices is not None
        shares_gpus = on_gpu and not has_own_gpus
        host_bytes = weights // layout.world_size
        if shares_gpus:
            host_bytes += weights
        return SamplingForecast(
            engine_bytes=round(SHARED_GPU_SHARE * device_memory) if shares_gpus else 0,
            engine_weights=weights,
            host_bytes=host_bytes,
        )

    # the copy has the dtype in which the ranks gather weights
    gathered = gathered_dtype(arguments, layout.name)
    dtype = gathered or weights_dtype(precision)
    products_dtype = compute_dtype(precision)
    copy_bytes = 0
    gathered_bytes = 0
    if layout.is_sharded:
        copy_bytes = layout.pass_itemsize * units.total + units.adapter_bytes
        # fsdp gathers all weights at once, and fsdp2 one parameter after the other
        num_gathered = units.total if layout.name == "fsdp" else units.largest_parameter
        gathered_bytes = layout.stored_itemsize * num_gathered
    num_rows = min(plan.batch_size, completions_of_rank(plan, layout.world_size))
    batch = SamplingBatch(
        num_rows=num_rows,
        prompt_length=plan.prompt_length,
        max_new_tokens=plan.max_new_tokens,
        dtype=dtype,
        autocast=products_dtype if gathered is None and products_dtype != dtype else None,
        on_gpu=on_gpu,
        has_copy=layout.is_sharded,
    )
    traced = trace_sampling(shape, arguments, batch)
    return SamplingForecast(
        copy_bytes=copy_bytes,
        gathered_bytes=gathered_bytes,
        num_rows=num_rows,
        keys_and_values=traced.keys_and_values,
        activation_bytes=traced.activations + layout.pass_itemsize * units.dequantized,
    )


def completions_of_rank(plan: SamplingPlan, num_ranks: int) -> int:
    """Return the most completions that a rank samples in a step; the completions of a prompt are sampled together."""
    return math.ceil(plan.num_prompts / num_ranks) * plan.group_size


@dataclass(frozen=True)
class SamplingWork:
    """The bytes and FLOPs of sampling a step's completions of full length on one device."""

    batch_sizes: tuple[int, ...]
    """The completions of each batch."""
    prompt_flops: float
    """The FLOPs of a prompt."""
    token_flops: float
    """The FLOPs of a further token."""
    weight_bytes: int
    """The bytes of the weights that each further token of a batch reads."""
    cached_bytes: int
    """The mean bytes of the keys and values that a further token of a completion reads."""
    num_tokens: int
    """The tokens of a completion."""

    def least_seconds(self, peak: float, bandwidth: float) -> float:
        """Return the least time of the work, by the roofline model (https://doi.org/10.1145/1498765.1498785).

        Prompts take their FLOPs at the ``peak``, in FLOP/s. A further token of a batch takes the time in which its
        bytes are read at ``bandwidth``, in bytes per second, or the time of its FLOPs if that is longer.
        """
        seconds = 0.0
        for batch_size in self.batch_sizes:
            read_seconds = (self.weight_bytes + batch_size * self.cached_bytes) / bandwidth
            token_seconds = max(read_seconds, batch_size * self.token_flops / peak)
            seconds += batch_size * self.prompt_flops / peak + self.num_tokens * token_seconds
        return seconds


def count_work(
    shape: ModelShape, arguments: "TrainArguments", layout: Layout, units: Units, plan: SamplingPlan
) -> SamplingWork:
    """Count the work of sampling a step's completions on one device of the run, or of vLLM."""
    num_devices = layout.world_size
    batch_size = plan.batch_size
    if arguments.rollouts.sampler == "vllm":
        batch_size = REQUESTS_PER_REPLICA
        if arguments.rollouts.sampler_devices is not None:
            num_devices = len(arguments.rollouts.sampler_devices.split(","))
    num_completions = completions_of_rank(plan, num_devices)
    batch_sizes = [batch_size] * (num_completions // batch_size)
    if num_completions % batch_size:
        batch_sizes.append(num_completions % batch_size)

    # at least what a token is multiplied with, which is not the whole model if it has experts
    itemsize = compute_dtype(arguments.model.precision).itemsize
    weight_bytes = min(layout.pass_itemsize * units.total, itemsize * shape.flops.num_used)
    mean_length = plan.prompt_length + plan.max_new_tokens // 2
    return SamplingWork(
        batch_sizes=tuple(batch_sizes),
        prompt_flops=shape.flops.count_forward([plan.prompt_length]),
        token_flops=shape.flops.count_forward([1]),
        weight_bytes=weight_bytes,
        cached_bytes=itemsize * width_of_keys_and_values(shape) * mean_length,
        num_tokens=plan.max_new_tokens,
    )
