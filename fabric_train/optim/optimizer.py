"""The optimizer of a run and its learning rate, which is a pure function of the step.

``OPTIMIZERS`` has optimizers by name; CONTRIBUTING.md says how to add one, also from outside.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fabric_train.cli.errors import first_line
from fabric_train.cli.tables import OPTIMIZERS, resolve_settings
from fabric_train.distributed.sharded_parameters import FlatShard, original_name
from fabric_train.optim.adamw import MOMENTS, AdamW, LocalElements, LowPrecisionAdamW, local_elements
from fabric_train.optim.states import DeclaredStates, TensorTable

if TYPE_CHECKING:
    from fabric_train.arguments import TrainingArguments

SCHEDULES_VERSION = "2"
"""Of the schedules below. In version 1 the last step had ``min_lr``, so it changed nothing if that was 0."""

_STEP_DECAYS = 3
"""The ``step`` schedule falls to ``min_lr`` in this many equal steps, of the logarithm if ``min_lr`` is above 0."""

RATE_ARGUMENTS = ("lr", "min_lr", "lr_decay", "lr_schedule", "warmup_steps", "decay_steps", "decay_share", "decay_form")
"""Those that decide the learning rate."""

_MOST_DIFFERENT = 0.01
"""Share of the numbers that may differ by more than fp32's last bits: those that are rounded to another neighbour."""


def learning_rate(step: int, num_steps: int, arguments: "TrainingArguments") -> float:
    """Return the learning rate of optimizer step ``step``, counted from 1, of a run of ``num_steps``.

    It rises linearly over the warm-up steps and reaches ``lr`` at the last of them, or at step 1 without warm-up. Then
    it decays by the schedule towards ``min_lr``, which it reaches one step after the last: so every step changes the
    weights, also if ``min_lr`` is 0. The cosine schedule follows arXiv:1608.03983, without restarts.

    The ``wsd`` schedule (warm-up, stable, decay) follows arXiv:2404.06395 (MiniCPM), and its form ``1-sqrt``
    arXiv:2405.18392. It stays at ``lr`` up to step N - D, and its decay ends at step N + 1, for N steps with D
    steps of decay. In the formula of that paper, these are N + 1 steps with a decay of D + 1.
    """
    warmup = arguments.warmup_steps
    peak = arguments.lr
    end = arguments.min_lr
    if step <= warmup:
        return peak * (step / warmup)  # in this order, exactly lr at the last warm-up step
    if not arguments.lr_decay or arguments.lr_schedule == "constant":
        return peak
    if step > num_steps:
        return end
    form: str = arguments.lr_schedule
    first = max(warmup, 1)  # the last step at the peak
    if form == "wsd":
        form = decay_form(arguments)
        first = num_steps - num_decay_steps(num_steps, arguments)
        if step <= first:
            return peak
    done = step - first
    total = num_steps + 1 - first
    progress = done / total
    if form == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if form == "1-sqrt":
        return end + (peak - end) * (1 - math.sqrt(progress))
    if form == "exponential":
        return peak * (end / peak) ** progress
    if form == "step":
        progress = done * _STEP_DECAYS // total / _STEP_DECAYS
        return peak * (end / peak) ** progress if end > 0 else peak * (1 - progress)
    return peak + (end - peak) * progress


@dataclass(frozen=True)
class Schedule:
    """The rates of a run, or of its phase after ``starts_after``; after ``num_steps`` the rate stays."""

    num_steps: int
    arguments: "TrainingArguments"
    starts_after: int = 0
    last_step: int | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of the run's optimizer step ``step``."""
        return learning_rate(min(step - self.starts_after, self.num_steps), self.num_steps, self.arguments)

    def takes(self, step: int) -> bool:
        return self.last_step is not None and self.starts_after < step <= self.last_step

    @property
    def decided_by(self) -> dict[str, Any]:
        """The arguments that decide the rates, by name."""
        return {name: getattr(self.arguments, name) for name in RATE_ARGUMENTS}


@dataclass(frozen=True)
class Schedules:
    """The schedule of a run, and the schedules of phases, which replace it in their steps."""

    of_run: Schedule
    of_phases: tuple[Schedule, ...] = ()

    def at(self, step: int) -> Schedule:
        return next((phase for phase in self.of_phases if phase.takes(step)), self.of_run)

    def rate(self, step: int) -> float:
        return self.at(step).rate(step)


def num_decay_steps(num_steps: int, arguments: "TrainingArguments") -> int:
    """Return in how many of a run's last steps the rate of the ``wsd`` schedule is below ``lr``."""
    if arguments.decay_steps is not None:
        return arguments.decay_steps
    assert arguments.decay_share is not None  # one of them is required
    return max(1, round(arguments.decay_share * num_steps))


def decay_form(arguments: "TrainingArguments") -> str:
    """Return how the rate of the ``wsd`` schedule falls; of these forms, arXiv:2405.18392 found 1-sqrt the best."""
    return arguments.decay_form or "1-sqrt"


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set the learning rate of every parameter group, in which a part of the model may have another ``lr_ratio``."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


@dataclass(frozen=True)
class OptimizedParameters:
    """What an optimizer is built over: the parameters that train, and how.

    ``groups`` are parameter groups of ``torch.optim``, with names: ``params`` is a list of (name, parameter). Each has
    its ``weight_decay``, its peak ``lr``, and ``lr_ratio``, by which the rate of each step is multiplied. ``decayed``
    are the names of parameters with weight decay, which are matrices.

    ``fused``: AdamW updates with one kernel; under an fp16 gradient scaler Fabric could not clip its gradients.
    ``seed`` is for stochastic rounding. ``cuts`` are FSDP1's shards, from ``flat_shards``. For ``compiles`` see
    ``LowPrecisionAdamW``.
    """

    groups: list[dict[str, Any]]
    decayed: frozenset[str]
    arguments: "TrainingArguments"
    fused: bool = True
    seed: int = 0
    cuts: Mapping[int, FlatShard] = field(default_factory=dict)
    compiles: bool = False

    @property
    def names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {parameter: name for group in self.groups for name, parameter in group["params"]}


BuildOptimizer = Callable[..., DeclaredStates]
"""Builds an optimizer over :class:`OptimizedParameters`, and of settings: its further parameters, with defaults."""


def decayed_names(model: nn.Module) -> set[str]:
    """Return the parameters with weight decay: of two or more dimensions, before FSDP makes its shards flat."""
    return {name for name, parameter in model.named_parameters() if parameter.dim() >= 2}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    decayed: Collection[str],
    arguments: "TrainingArguments",
    fused: bool = True,
    seed: int = 0,
    cuts: Mapping[int, FlatShard] | None = None,
    compiles: bool = False,
    rates: Mapping[str, float] | None = None,
) -> DeclaredStates:
    """Build the optimizer of ``--optimizer`` over the parameters of a set-up model that train.

    ``rates`` are the peak learning rates of parameters that have another one than ``--lr``. For the others see
    :class:`OptimizedParameters`.
    """
    rates = rates or {}
    grouped: dict[tuple[bool, float, Any], list[tuple[str, nn.Parameter]]] = {}
    for full_name, parameter in named_parameters:
        name = original_name(full_name)
        mesh = getattr(parameter, "device_mesh", None)  # the fused kernel does not accept tensors of several meshes
        key = (name in decayed, rates.get(name, arguments.lr), mesh)
        grouped.setdefault(key, []).append((name, parameter))
    groups = [
        {
            "params": parameters,
            "weight_decay": arguments.weight_decay if has_decay else 0.0,
            "lr": rate,
            "lr_ratio": rate / arguments.lr,
        }
        for (has_decay, rate, _), parameters in grouped.items()
    ]
    parameters = OptimizedParameters(groups, frozenset(decayed), arguments, fused, seed, cuts or {}, compiles)
    settings = resolve_settings(OPTIMIZERS, arguments.optimizer, arguments.optimizer_settings)
    return OPTIMIZERS[arguments.optimizer](parameters, **settings)


def build_adamw(parameters: OptimizedParameters) -> DeclaredStates:
    """Build AdamW; torch's own if moments and weights have the same dtype and are not rounded stochastically."""
    arguments = parameters.arguments
    names = parameters.names
    betas = (arguments.beta1, arguments.beta2)
    dtypes = {parameter.dtype for parameter in names}
    states = arguments.optimizer_states
    # bf16 modules train beside an fp32 adapter
    weights_dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
    in_8bit = [parameter for parameter, name in names.items() if name in parameters.decayed and states == "8bit"]
    moments_dtype = weights_dtype if states is None else getattr(torch, "float32" if states == "8bit" else states)
    stochastic_rounding = arguments.stochastic_rounding and torch.bfloat16 in {*dtypes, moments_dtype}
    if moments_dtype == weights_dtype and not stochastic_rounding and not in_8bit:
        return AdamW(parameters.groups, lr=arguments.lr, betas=betas, fused=parameters.fused)
    return LowPrecisionAdamW(
        parameters.groups,
        lr=arguments.lr,
        betas=betas,
        moments_dtype=moments_dtype,
        in_8bit=in_8bit,
        stochastic_rounding=stochastic_rounding,
        names=names,
        elements={parameter: local_elements(parameter, parameters.cuts) for parameter in names},
        seed=parameters.seed,
        compiles=parameters.compiles,
    )


def use_triton(optimizer: LowPrecisionAdamW) -> str | None:
    """Let one Triton kernel update all parameters if it works on their device; else return why it does not.

    It must give the same results for small parameters stored alike, which also compiles it before the first step.
    """
    fault: str | None
    try:
        from fabric_train.optim.triton_adamw import launch

        fault = _difference(optimizer, launch)
    except Exception as error:  # noqa: BLE001 - Triton, the driver and compilers raise much; the other step needs none
        return f"{type(error).__name__}: {first_line(error)}"
    if fault is None:
        optimizer.launch = launch
    return fault


def _difference(optimizer: LowPrecisionAdamW, launch: Callable[[TensorTable], None]) -> str | None:
    """Return what differs after two steps of small parameters, None if nothing does."""
    ours = _small(optimizer)
    reference = _small(optimizer)
    ours.launch = launch
    for both in zip(*(each.param_groups[0]["params"] for each in (ours, reference)), strict=True):
        for parameter in both:
            angles = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
            parameter.grad = angles.sin().to(parameter.dtype)
    for each in (ours, reference):
        each.step()
        each.step()
    for one, other in zip(*(each.param_groups[0]["params"] for each in (ours, reference)), strict=True):
        kept = {"weights": (one, other)}
        kept |= {key: (ours.read_states(one)[key], reference.read_states(other)[key]) for key in MOMENTS}
        for name, (found, expected) in kept.items():
            close = torch.isclose(found.float().flatten(), expected.float().flatten(), rtol=1e-6, atol=1e-9)
            share = float((~close).double().mean())
            if share > _MOST_DIFFERENT:
                return f"in a trial, {share:.0%} of its {name} differ from the {name} of torch's kernel"
    return None


def _small(optimizer: LowPrecisionAdamW) -> LowPrecisionAdamW:
    """Return an optimizer like the given one, over a matrix sharded by columns and an unaligned vector."""
    like = optimizer.param_groups[0]["params"][0]
    numbers = torch.cos(torch.arange(3400, device=like.device)).to(like.dtype)
    matrix = nn.Parameter(numbers[:2100].clone().view(3, 700))
    vector = nn.Parameter(numbers.clone()[2101:])
    return LowPrecisionAdamW(
        [{"params": [matrix, vector], "weight_decay": 0.1}],
        lr=1e-2,
        betas=(0.9, 0.95),
        moments_dtype=optimizer.moments_dtype,
        in_8bit=[matrix] if optimizer.in_8bit else [],
        stochastic_rounding=optimizer.rounds_stochastically,
        names={matrix: "matrix", vector: "vector"},
        elements={matrix: LocalElements(700, 700, 1400), vector: LocalElements(0, vector.numel(), vector.numel())},
        seed=0,
    )
