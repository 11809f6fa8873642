"""The forecasts of the samplers of ``--sampler`` by name: the memory and the work of each.

In process, one batch of completions after the other has keys, values and activations, which are freed before the rows
are trained. What samples is the model in training, or if that is sharded, a full copy of it on each device, which stays
throughout the run. vLLM takes a share of each GPU of the run while it samples, unless it has GPUs of its own.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabric_train.cli.argument_types import show_size
from fabric_train.distributed.precision import compute_dtype, gathered_dtype, weights_dtype
from fabric_train.preflight.memory_activations import SamplingBatch, SamplingBytes, trace_sampling
from fabric_train.preflight.memory_sampling import SampledRun, SamplingForecast, SamplingWork, count_work
from fabric_train.rollouts.vllm_sampler import REQUESTS_PER_REPLICA, SHARED_GPU_SHARE

if TYPE_CHECKING:
    from fabric_train.arguments import RolloutArguments

_SLEEPING_BYTES = 2_000_000_000
"""The bytes of a GPU that a vLLM which sleeps keeps for its CUDA context. This is not measured."""


@dataclass(frozen=True)
class InProcessForecast:
    """What sampling in the processes that train takes; see ``SamplingForecast``."""

    work: SamplingWork
    copy_bytes: int
    """The bytes of the copy of the model that samples, throughout the run; 0 if the model in training samples."""
    gathered_bytes: int
    """The bytes that are gathered at once while the copy takes over the weights."""
    num_rows: int
    """The completions that are sampled at once."""
    batch: SamplingBytes
    """The bytes of a batch of so many completions."""
    dequantized_bytes: int
    """The bytes of the largest weight in 4 bits while a batch is multiplied with it."""
    host_bytes = 0

    @property
    def constant_bytes(self) -> Mapping[str, int]:
        return {"copy that samples": self.copy_bytes}

    @property
    def moments(self) -> tuple[Mapping[str, int], ...]:
        while_copying = {"gathered weights": self.gathered_bytes}
        while_sampling = {
            "keys and values": self.batch.keys_and_values,
            "activations": self.batch.activations + self.dequantized_bytes,
        }
        return while_copying, while_sampling

    def describe(self, free_bytes: int) -> str:
        bytes_per_row = self.batch.total / self.num_rows
        num_fitting = max(0, int((free_bytes - self.dequantized_bytes) / bytes_per_row))
        return f"in process, {self.num_rows} completions at once on each device; about {num_fitting:,} would fit"


@dataclass(frozen=True)
class VllmForecast:
    """What sampling with vLLM takes; see ``SamplingForecast``."""

    work: SamplingWork
    on_gpu: bool
    shared_bytes: int
    """The bytes that vLLM may use on each GPU of the run while it samples; 0 if it has GPUs of its own."""
    weight_bytes: int
    """The bytes of the weights in vLLM, on each GPU that it uses, or in the memory of each machine without GPUs."""
    host_bytes: int
    """The bytes in host memory for each rank: the weights of a vLLM that sleeps, and the rank's share of the folder in
    memory through which vLLM gets them."""

    @property
    def constant_bytes(self) -> Mapping[str, int]:
        return {"vLLM": _SLEEPING_BYTES if self.shared_bytes else 0}

    @property
    def moments(self) -> tuple[Mapping[str, int], ...]:
        return ({"vLLM": self.shared_bytes},)

    def describe(self, free_bytes: int) -> str:
        weights = show_size(self.weight_bytes)
        if not self.on_gpu:
            text = (
                f"vLLM on the CPUs of each machine, in memory that this plan does not count: {weights} of weights, as "
                "much again while they are handed over, and "
            )
            cache = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
            if cache:
                return text + f"{cache} GB of keys and values (VLLM_CPU_KVCACHE_SPACE)"
            return text + (
                "keys and values: without VLLM_CPU_KVCACHE_SPACE, which gives their GB, vLLM takes half of the memory "
                "that is free when the run starts"
            )
        if not self.shared_bytes:
            return f"vLLM, whose GPUs each hold {weights} of weights beside keys and values"
        return (
            f"vLLM on the GPUs of the run: {show_size(self.shared_bytes)} of each while it samples, {weights} of them "
            "weights, which wait in host memory while the model trains"
        )


@dataclass(frozen=True)
class PlannedSampler:
    """An entry of ``PLANNED_SAMPLERS``."""

    forecast: Callable[[SampledRun], SamplingForecast]
    """Forecasts what sampling takes; raises a TraceError if the model cannot run on fake tensors."""
    copy_bytes: Callable[[SampledRun], int]
    """Returns the bytes of a copy of the model on each device, without tracing; 0 if there is none."""
    smaller_changes: Callable[["RolloutArguments"], Iterator[dict[str, Any]]]
    """Yields changes of arguments with which sampling takes less memory, the cheapest first."""


def _forecast_in_process(run: SampledRun) -> InProcessForecast:
    rollouts = run.rollouts
    layout = run.layout
    units = run.units
    precision = run.arguments.model.precision

    # a batch of completions; all completions of a prompt are sampled by one rank
    num_completions = math.ceil(rollouts.prompts_per_step / layout.world_size) * rollouts.group_size
    num_rows = min(rollouts.sampler_batch_size, num_completions)
    gathered = gathered_dtype(run.arguments, layout.name)
    dtype = gathered or weights_dtype(precision)
    products_dtype = compute_dtype(precision)
    autocast = None
    if gathered is None and products_dtype != dtype:
        autocast = products_dtype
    batch = SamplingBatch(
        num_rows=num_rows,
        prompt_length=run.prompts.longest,
        max_new_tokens=rollouts.max_new_tokens,
        dtype=dtype,
        autocast=autocast,
        on_gpu=run.on_gpu,
        has_copy=layout.has_sampling_copy,
    )

    # how the copy gets its weights: fsdp gathers all of them at once, and fsdp2 one parameter after the other
    gathered_bytes = 0
    if layout.num_parts > 1:
        num_gathered = units.total if layout.name == "fsdp" else units.largest_parameter
        gathered_bytes = layout.stored_itemsize * num_gathered
    return InProcessForecast(
        work=count_work(
            run,
            num_completions=num_completions,
            num_prompt_passes=num_completions,
            most_completions=rollouts.sampler_batch_size,
        ),
        copy_bytes=_copy_bytes_in_process(run),
        gathered_bytes=gathered_bytes,
        num_rows=num_rows,
        batch=trace_sampling(run.shape, run.arguments, batch),
        dequantized_bytes=layout.pass_itemsize * units.dequantized,
    )


def _copy_bytes_in_process(run: SampledRun) -> int:
    """Return the bytes of the copy, which has the dtype in which the ranks gather weights."""
    if not run.layout.has_sampling_copy:
        return 0
    gathered = gathered_dtype(run.arguments, run.layout.name)
    dtype = gathered or weights_dtype(run.arguments.model.precision)
    return dtype.itemsize * run.units.total + run.units.adapter_bytes


def _smaller_batches(rollouts: "RolloutArguments") -> Iterator[dict[str, Any]]:
    batch_size = rollouts.sampler_batch_size
    while batch_size > 1:
        batch_size = max(1, batch_size // 4)
        yield {"sampler_batch_size": batch_size}


def _forecast_vllm(run: SampledRun) -> VllmForecast:
    rollouts = run.rollouts
    layout = run.layout
    weight_bytes = compute_dtype(run.arguments.model.precision).itemsize * run.shape.num_parameters
    num_devices = layout.world_size
    if rollouts.sampler_devices is not None:
        num_devices = layout.num_nodes * len(rollouts.sampler_devices.split(","))

    shared_bytes = 0
    host_bytes = 0
    if layout.num_nodes == 1:  # the file that the servers of several machines read is on disk
        host_bytes = weight_bytes // layout.world_size
    if run.on_gpu and rollouts.sampler_devices is None:
        shared_bytes = round(SHARED_GPU_SHARE * run.device_memory)
        host_bytes += weight_bytes
    return VllmForecast(
        on_gpu=run.on_gpu,
        # any device completes any prompt, and may read a prompt once for its whole group
        work=count_work(
            run,
            num_completions=math.ceil(rollouts.prompts_per_step * rollouts.group_size / num_devices),
            num_prompt_passes=rollouts.prompts_per_step / num_devices,
            most_completions=REQUESTS_PER_REPLICA,
        ),
        shared_bytes=shared_bytes,
        weight_bytes=weight_bytes,
        host_bytes=host_bytes,
    )


PLANNED_SAMPLERS = {
    "in_process": PlannedSampler(
        forecast=_forecast_in_process,
        copy_bytes=_copy_bytes_in_process,
        smaller_changes=_smaller_batches,
    ),
    "vllm": PlannedSampler(
        forecast=_forecast_vllm,
        copy_bytes=lambda run: 0,  # what is on the GPUs of the run is freed while the model trains
        smaller_changes=lambda rollouts: iter(()),
    ),
}
"""The forecasts of ``training.samplers.SAMPLERS``."""
