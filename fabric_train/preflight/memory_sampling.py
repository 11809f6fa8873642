"""What a plan counts of sampling in a run with ``--prompts``, whichever engine samples; see ``memory_samplers``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fabric_train.distributed.precision import compute_dtype
from fabric_train.model.hf_model import ModelShape
from fabric_train.preflight.memory_layout import Layout, Units, width_of_keys_and_values

if TYPE_CHECKING:
    from fabric_train.arguments import RolloutArguments, TrainArguments


@dataclass(frozen=True)
class PromptTokens:
    """The numbers of tokens of a run's prompts."""

    longest: int
    mean: int


@dataclass(frozen=True)
class SampledRun:
    """A run of which sampling is forecast, with the model of one of its phases."""

    shape: ModelShape
    arguments: "TrainArguments"
    layout: Layout
    units: Units
    prompts: PromptTokens
    on_gpu: bool
    device_memory: int
    """The bytes that a rank may use, see ``memory_forecast.RunRequest``."""

    @property
    def rollouts(self) -> "RolloutArguments":
        return self.arguments.rollouts


class SamplingForecast(Protocol):
    """What sampling takes on each rank."""

    @property
    def work(self) -> "SamplingWork":
        """The work of a step."""

    @property
    def constant_bytes(self) -> Mapping[str, int]:
        """The bytes on the device that stay throughout the run, by kind."""

    @property
    def moments(self) -> tuple[Mapping[str, int], ...]:
        """The bytes on the device at the moments of sampling that may have the most, by kind.

        They come on top of ``constant_bytes``, except those of the same kind, which they replace.
        """

    @property
    def host_bytes(self) -> int:
        """The bytes in host memory."""

    def describe(self, free_bytes: int) -> str:
        """Describe what samples, for the plan; ``free_bytes`` of the device are left for what sampling frees again."""


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
    run: SampledRun, *, num_completions: int, num_prompt_passes: float, most_completions: int
) -> SamplingWork:
    """Count the work of sampling on one device.

    Args:
        run: The run.
        num_completions: The completions of a step that the device samples.
        num_prompt_passes: How many prompts it reads for them.
        most_completions: The most completions that it samples at once.
    """
    batch_sizes = [most_completions] * (num_completions // most_completions)
    if num_completions % most_completions:
        batch_sizes.append(num_completions % most_completions)

    # weights in 4 bits are smaller than those that a token is multiplied with; of experts, a token uses only some
    itemsize = compute_dtype(run.arguments.model.precision).itemsize
    flops = run.shape.flops
    stored_bytes = run.layout.pass_itemsize * run.units.total
    used_bytes = itemsize * flops.num_used
    max_new_tokens = run.rollouts.max_new_tokens
    mean_length = run.prompts.mean + max_new_tokens // 2
    return SamplingWork(
        batch_sizes=tuple(batch_sizes),
        prompt_flops=num_prompt_passes * flops.count_forward([run.prompts.mean]),
        token_flops=flops.count_forward([1]),
        weight_bytes=min(stored_bytes, used_bytes),
        cached_bytes=itemsize * width_of_keys_and_values(run.shape) * mean_length,
        num_further_tokens=max_new_tokens - 1,
    )
