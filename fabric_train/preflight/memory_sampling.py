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
    mean_prompt_length: int
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
    dequantized_bytes: int = 0
    """The bytes of the largest weight in 4 bits while a batch is multiplied with it."""
    engine_bytes: int = 0
    """The bytes that vLLM may use on each GPU of the run while it samples."""
    engine_weights: int = 0
    """The bytes of the weights in vLLM, on each GPU that it uses."""
    host_bytes: int = 0
    """The bytes in host memory for each rank: the weights of a vLLM that sleeps, and the rank's share of the folder in
    memory through which vLLM gets them."""

    def largest_batch(self, free_bytes: int) -> int:
        """Return how many completions could be sampled at once in ``free_bytes``."""
        bytes_per_row = (self.keys_and_values + self.activation_bytes) / self.num_rows
        return max(0, int((free_bytes - self.dequantized_bytes) / bytes_per_row))


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

    gathered = gathered_dtype(arguments, layout.name)
    dtype = gathered or weights_dtype(precision)
    products_dtype = compute_dtype(precision)
    autocast = None
    if gathered is None and products_dtype != dtype:
        autocast = products_dtype
    gathered_bytes = 0
    if layout.num_parts > 1:
        # fsdp gathers all weights at once, and fsdp2 one parameter after the other
        num_gathered = units.total if layout.name == "fsdp" else units.largest_parameter
        gathered_bytes = layout.stored_itemsize * num_gathered
    num_rows = min(plan.batch_size, completions_of_rank(plan, layout.world_size))
    batch = SamplingBatch(
        num_rows=num_rows,
        prompt_length=plan.prompt_length,
        max_new_tokens=plan.max_new_tokens,
        dtype=dtype,
        autocast=autocast,
        on_gpu=on_gpu,
        has_copy=layout.has_sampling_copy,
    )
    traced = trace_sampling(shape, arguments, batch)
    return SamplingForecast(
        copy_bytes=bytes_of_copy(units, arguments, layout),
        gathered_bytes=gathered_bytes,
        num_rows=num_rows,
        keys_and_values=traced.keys_and_values,
        activation_bytes=traced.activations,
        dequantized_bytes=layout.pass_itemsize * units.dequantized,
    )


def bytes_of_copy(units: Units, arguments: "TrainArguments", layout: Layout) -> int:
    """Return the bytes of the copy that samples in process, 0 if the model in training does.

    The copy has the dtype in which the ranks gather weights.
    """
    if arguments.rollouts.sampler != "in_process" or not layout.has_sampling_copy:
        return 0
    dtype = gathered_dtype(arguments, layout.name) or weights_dtype(arguments.model.precision)
    return dtype.itemsize * units.total + units.adapter_bytes


def completions_of_rank(plan: SamplingPlan, num_ranks: int) -> int:
    """Return the most completions that a rank samples in a step; the completions of a prompt are sampled together."""
    return math.ceil(plan.num_prompts / num_ranks) * plan.group_size


@dataclass(frozen=True)
class SamplingWork:
    """The bytes and FLOPs of sampling a step's completions of full length on one device."""

    batch_sizes: tuple[int, ...]
    """The completions of each batch."""
    prompt_flops: float
    """The FLOPs of all prompts of the device."""
    token_flops: float
    """The FLOPs of a further token."""
    weight_bytes: int
    """The bytes of the weights that each further token of a batch reads."""
    cached_bytes: int
    """The mean bytes of the keys and values that a further token of a completion reads."""
    num_further_tokens: int
    """The tokens of a completion after the first one, which the pass over the prompt gives."""

    def least_seconds(self, peak: float, bandwidth: float) -> float:
        """Return the least time of the work, by the roofline model (https://doi.org/10.1145/1498765.1498785).

        Prompts take their FLOPs at the ``peak``, in FLOP/s. A further token of a batch takes the time in which its
        bytes are read at ``bandwidth``, in bytes per second, or the time of its FLOPs if that is longer.
        """
        seconds = self.prompt_flops / peak
        for batch_size in self.batch_sizes:
            read_seconds = (self.weight_bytes + batch_size * self.cached_bytes) / bandwidth
            token_seconds = max(read_seconds, batch_size * self.token_flops / peak)
            seconds += self.num_further_tokens * token_seconds
        return seconds


def count_work(
    shape: ModelShape, arguments: "TrainArguments", layout: Layout, units: Units, plan: SamplingPlan
) -> SamplingWork:
    """Count the work of sampling a step's completions on one device of the run, or of vLLM."""
    if arguments.rollouts.sampler == "vllm":
        batch_size = REQUESTS_PER_REPLICA
        num_devices = layout.world_size
        if arguments.rollouts.sampler_devices is not None:
            num_devices = len(arguments.rollouts.sampler_devices.split(","))
        # any device completes any prompt, and may read a prompt once for its whole group
        num_completions = math.ceil(plan.num_prompts * plan.group_size / num_devices)
        num_prompt_passes = plan.num_prompts / num_devices
    else:
        batch_size = plan.batch_size
        num_completions = completions_of_rank(plan, layout.world_size)
        num_prompt_passes = num_completions
    batch_sizes = [batch_size] * (num_completions // batch_size)
    if num_completions % batch_size:
        batch_sizes.append(num_completions % batch_size)

    # weights in 4 bits are smaller than those that a token is multiplied with; of experts, a token uses only some
    itemsize = compute_dtype(arguments.model.precision).itemsize
    stored_bytes = layout.pass_itemsize * units.total
    used_bytes = itemsize * shape.flops.num_used
    mean_length = plan.mean_prompt_length + plan.max_new_tokens // 2
    return SamplingWork(
        batch_sizes=tuple(batch_sizes),
        prompt_flops=num_prompt_passes * shape.flops.count_forward([plan.mean_prompt_length]),
        token_flops=shape.flops.count_forward([1]),
        weight_bytes=min(stored_bytes, used_bytes),
        cached_bytes=itemsize * width_of_keys_and_values(shape) * mean_length,
        num_further_tokens=plan.max_new_tokens - 1,
    )
