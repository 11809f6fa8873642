"""The samplers of ``--sampler`` by name: how a run checks and opens them.

To add a sampler, write a module in ``rollouts/`` with a class that follows ``rollouts.sampler.Sampler``, and add an
entry to ``SAMPLERS``. Its name and the arguments that only it uses are in ``arguments.SAMPLER_ARGUMENTS``, and what
the plan counts for it is in ``preflight.memory_samplers``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning import Fabric

from fabric_train.distributed.precision import compute_dtype
from fabric_train.rollouts.process_sampler import ProcessSampler
from fabric_train.rollouts.prompts import Prompts
from fabric_train.rollouts.sampler import Sampler, SamplingSettings
from fabric_train.rollouts.vllm_sampler import open_vllm_sampler
from fabric_train.rollouts.vllm_server import check_environment, vllm_python_path
from fabric_train.training.prepared_run import PreparedRun

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments


@dataclass(frozen=True)
class SamplerContext:
    """What a sampler is opened with."""

    fabric: Fabric
    run: PreparedRun
    prompts: Prompts
    settings: SamplingSettings
    open_copy: Callable[[], Any]
    """Returns a model for sampling, see ``ProcessSampler``."""
    on_batch: Callable[[], None]
    """Called before each batch of completions, equally often on all ranks."""


@dataclass(frozen=True)
class SamplerKind:
    """An entry of ``SAMPLERS``."""

    open: Callable[[SamplerContext], Sampler]
    """Opens the sampler; all ranks call this together."""
    check: Callable[["TrainArguments"], None]
    """Raises an InputError, on rank 0 and before the run starts, for what the sampler lacks on this machine."""


def _open_in_process(context: SamplerContext) -> Sampler:
    batch_size = context.run.arguments.rollouts.sampler_batch_size
    return ProcessSampler(context.fabric, context.settings, batch_size, context.open_copy, context.on_batch)


def _open_vllm(context: SamplerContext) -> Sampler:
    run = context.run
    rollouts = run.arguments.rollouts
    devices = None
    if rollouts.sampler_devices is not None:
        devices = tuple(rollouts.sampler_devices.split(","))
    longest_prompt = context.prompts.longest_prompt
    return open_vllm_sampler(
        context.fabric,
        run.model,
        context.settings,
        run_dir=run.folder,
        max_prompt_length=len(longest_prompt.token_ids),
        probe_ids=longest_prompt.token_ids,
        dtype=compute_dtype(run.arguments.model.precision),
        python=vllm_python_path(rollouts.vllm_python),
        devices=devices,
        on_batch=context.on_batch,
    )


def _check_vllm(arguments: "TrainArguments") -> None:
    check_environment(vllm_python_path(arguments.rollouts.vllm_python))


SAMPLERS = {
    "in_process": SamplerKind(
        open=_open_in_process,
        check=lambda arguments: None,  # the packages that train are all that it needs
    ),
    "vllm": SamplerKind(
        open=_open_vllm,
        check=_check_vllm,
    ),
}
