"""Read ``--phases``: parts of a run with other shares, learning rates, trained parts or token datasets.

A phase with different token datasets, such as longer rows, begins a new stretch of the run: the run saves before it
and continues from there, with the arguments that the phase changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NonNegativeFloat, WrongValueError, convert
from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape, with_parts
from fabric_train.model.trained_parts import TrainedParts
from fabric_train.optim.learning_rate import RATE_ARGUMENTS, Schedule
from fabric_train.preflight.steps import fault_of_decay
from fabric_train.training.prepared_run import PhaseModels, TrainingData
from fabric_train.training.step_plan import RunPhase

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments, TrainingArguments

_SHARES = ("shares", "token_shares")


_OF_DATA = ("train_data_dir", "max_length", "rope_scaling", "rope_theta", "micro_batch_size", "total_batch_size")
"""The token datasets of a phase, and the values that a phase may only have together with them."""

_GROUPS_OF_DATA = {
    "data": ("train_data_dir",),
    "model": ("rope_scaling", "rope_theta"),
    "training": ("micro_batch_size", "total_batch_size"),
}
"""The groups of ``TrainArguments`` that a phase with token datasets changes, and the changed arguments."""


@dataclass(frozen=True)
class PhaseSettings:
    """The settings of a phase in the file of ``--phases``."""

    label: str
    """The phase's name in messages."""
    first_step: int
    shares: Shares | None
    schedule: Mapping[str, Any]
    """The learning-rate arguments."""
    train_only: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """The values of ``_OF_DATA``; empty if the token datasets stay the same."""


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that read the same token datasets, with their arguments and the phases that begin in them."""

    first_step: int
    last_step: int | None
    """The last step; None if the run ends with the stretch."""
    arguments: "TrainArguments"
    phases: tuple[PhaseSettings, ...]
    opening: PhaseSettings | None = None
    """The phase that names the token datasets; None if the command line does."""

    @property
    def option(self) -> str:
        """The beginning of an argument's name in messages."""
        return f"{self.opening.label}: " if self.opening else "--"

    def check_length(self, row_lengths: set[int]) -> None:
        """Raise an InputError if the phase's ``max_length`` is not the length of its rows."""
        if self.opening is None:
            return
        max_length = self.opening.data.get("max_length")
        if max_length is None or row_lengths == {max_length}:
            return
        folders = ", ".join(self.arguments.data.data_dirs)
        lengths = ", ".join(f"{length:,}" for length in sorted(row_lengths))
        raise InputError(
            f"{self.option}max_length {max_length}: the rows of {folders} have {lengths} tokens; tokenize with "
            f"--max_length {max_length}, or give their length"
        )


def read_stretches(arguments: "TrainArguments") -> list[Stretch]:
    """Return the stretches of a run in order, with the phases of ``--phases``.

    Each phase with token datasets begins a new stretch. Its arguments are the previous stretch's, with the values
    that the phase changes.
    """
    phases = read_phases(arguments)
    opening_indices = [index for index, phase in enumerate(phases) if phase.data]

    # the first stretch has the token datasets of the command line, and the phases up to the first opening one
    begins = [0, *opening_indices]
    ends = [*opening_indices, len(phases)]
    stretches: list[Stretch] = []
    for begin, end in zip(begins, ends, strict=True):
        is_first_stretch = not stretches
        opening: PhaseSettings | None = None
        first_step = 1
        if not is_first_stretch:  # a phase with token datasets opens it
            opening = phases[begin]
            first_step = opening.first_step
            arguments = _with_data(arguments, opening)
        last_step: int | None = None  # up to the end of the run
        if end < len(phases):  # up to the phase that opens the next stretch
            last_step = phases[end].first_step - 1
        stretch = Stretch(
            first_step=first_step,
            last_step=last_step,
            arguments=arguments,
            phases=tuple(phases[begin:end]),
            opening=opening,
        )
        stretches.append(stretch)
    return stretches


def stretch_of(stretches: Sequence[Stretch], step: int) -> int:
    """Return the index of the stretch with a step; step 0 belongs to the first one."""
    return max(index for index, stretch in enumerate(stretches) if index == 0 or stretch.first_step <= step)


def _with_data(arguments: "TrainArguments", phase: PhaseSettings) -> "TrainArguments":
    """Return the arguments that apply from a phase with token datasets on."""
    for group, names in _GROUPS_OF_DATA.items():
        values: dict[str, Any] = {name: phase.data[name] for name in names if name in phase.data}
        if group == "data":
            values |= dict.fromkeys(_SHARES)  # the shares so far belong to the earlier datasets
        changed_group = replace(getattr(arguments, group), **values)
        arguments = replace(arguments, **{group: changed_group})
    faults = [*arguments.data.faults(), *arguments.model.faults()]
    if faults:
        raise InputError(*(f"{phase.label}: {fault.removeprefix('--')}" for fault in faults))
    return arguments


def read_phases(arguments: "TrainArguments") -> list[PhaseSettings]:
    """Return the phases of ``--phases`` in order; empty without it, or if nothing is trained."""
    path = arguments.data.phases
    num_steps = arguments.training.max_step
    if path is None or arguments.evaluation.only_reads:
        return []
    if num_steps is None:
        raise InputError("--phases needs a run of known length; give --max_step")
    phases = _read_phase_file(path, arguments, num_steps)

    # the phases are in order and within the run
    previous_step = 0
    for phase in phases:
        if phase.first_step <= previous_step:
            raise InputError(
                f"{phase.label} begins at step {phase.first_step}, which is not after the previous phase begins; "
                "list phases in ascending order"
            )
        if phase.first_step > num_steps:
            raise InputError(
                f"{phase.label} begins at step {phase.first_step}, after the last step, --max_step {num_steps}"
            )
        previous_step = phase.first_step

    # what a phase from step 1 would have belongs on the command line
    first_phase = phases[0]
    if first_phase.first_step == 1 and first_phase.data:
        raise InputError(f"{first_phase.label} begins with the run; give its train_data_dir on the command line")
    if first_phase.first_step == 1 and first_phase.shares and arguments.data.shares_of_epochs.values:
        raise InputError(
            f"{first_phase.label} begins with the run and has shares; leave out the shares on the command line"
        )
    return phases


def plan_phases(stretch: Stretch, data: TrainingData) -> tuple[tuple[RunPhase, ...], tuple[Schedule, ...]]:
    """Return the phases of a stretch, with the rows, the trained parts and the learning-rate schedule of each.

    A phase without shares keeps the previous ones.
    """
    if not stretch.phases:
        return (), ()
    training = stretch.arguments.training
    assert isinstance(data, TokenMixture)  # --phases is one of the arguments with which the data are a mixture
    assert training.max_step is not None
    frozen_parts = tuple(stretch.arguments.model.freeze or ())
    rows_per_epoch = data.rows_per_epoch
    last_steps = [phase.first_step - 1 for phase in stretch.phases[1:]]
    last_steps.append(stretch.last_step or training.max_step)
    run_phases: list[RunPhase] = []
    schedules: list[Schedule] = []
    for phase, last_step in zip(stretch.phases, last_steps, strict=True):
        if phase.shares:
            rows_per_epoch = data.rows_of(phase.shares)
        schedule = _phase_schedule(phase, last_step, training)
        if schedule is not None:
            schedules.append(schedule)
        trained_parts = None
        if phase.train_only:
            trained_parts = TrainedParts(phase.train_only, frozen_parts, f"{phase.label}: train_only")
        run_phase = RunPhase(
            first_step=phase.first_step,
            last_step=last_step,
            rows_per_epoch=rows_per_epoch,
            parts=trained_parts,
        )
        run_phases.append(run_phase)
    return tuple(run_phases), tuple(schedules)


def choose_parts(stretch: Stretch, model: ModelShape, phases: Sequence[RunPhase]) -> PhaseModels:
    """Return the model with the parts of ``--train_only`` and ``--freeze``, and the parts of the phases."""
    arguments = stretch.arguments.model
    has_parts = any(phase.parts for phase in phases)
    if model.adapter:
        option = next((phase.parts.option for phase in phases if phase.parts), None)
        if arguments.freeze:
            option = "--freeze"
        if arguments.train_only:
            option = "--train_only"
        if option:
            raise InputError(
                f"{option} does not work with an adapter, which freezes all other weights; use --train_also for "
                "parts to train in full"
            )
    trained_parts = TrainedParts(tuple(arguments.train_only or ()), tuple(arguments.freeze or ()))
    if trained_parts and not stretch.arguments.evaluation.eval_only:
        model = with_parts(model, trained_parts)
    models = {stretch.first_step: model}
    if not has_parts:
        return PhaseModels(models)

    # one model for each step at which the trained parameters change
    trained = model.trained
    for phase in phases:
        phase_model = with_parts(model, phase.parts) if phase.parts else model
        begins_stretch = phase.first_step == stretch.first_step  # then it replaces the model of the command line
        if begins_stretch or phase_model.trained.keys() != trained.keys():
            models[phase.first_step] = phase_model
            trained = phase_model.trained
    return PhaseModels(models)


def _read_phase_file(path: str, arguments: "TrainArguments", num_steps: int) -> list[PhaseSettings]:
    """Return the phases of a file in order; raise an InputError with a line for each fault."""
    content = yaml_core.load_file(path, "--phases")
    if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
        raise InputError(f"--phases {path}: expected a list of phases, such as '- {{from: 0.9, shares: [1, 0.5]}}'")
    types = _types_of_values(arguments)
    phases = []
    faults = []
    for phase_number, item in enumerate(content, 1):
        label = f"{path}: phase {phase_number}"
        values: dict[str, Any] = {}
        phase_faults = list(_convert_values(item, types, values))
        if not phase_faults:
            phase_faults = list(_faults_of_values(values))
        if phase_faults:
            faults += [f"{label}: {fault}" for fault in phase_faults]
        else:
            phases.append(_make_phase(label, values, num_steps))
    if faults:
        raise InputError(*faults)
    return phases


def _types_of_values(arguments: "TrainArguments") -> dict[str, Any]:
    """Return the type of each value that a phase may have, in the order in which messages list them."""
    argument_types: dict[str, Any] = {}
    for group in (arguments.data, arguments.model, arguments.training):
        argument_types |= get_type_hints(type(group), include_extras=True)
    types: dict[str, Any] = {"from": NonNegativeFloat}
    types |= dict.fromkeys(_SHARES, list[NonNegativeFloat] | list[dict[str, Any]] | list[str])
    types |= {name: argument_types[name] for name in (*RATE_ARGUMENTS, *_OF_DATA)}
    types["train_only"] = list[str]
    return types


def _make_phase(label: str, values: Mapping[str, Any], num_steps: int) -> PhaseSettings:
    """Return the phase with these checked values, in a run of ``num_steps`` steps."""
    start = values["from"]
    if start >= 1:  # a step
        first_step = int(start)
    else:  # the share of the run before the phase
        first_step = round(start * num_steps) + 1
    shares = None
    for name in _SHARES:  # at most one of them is given
        if name in values:
            shares = Shares(f"{label}: {name}", values[name], counts_tokens=name != "shares")
    return PhaseSettings(
        label=label,
        first_step=first_step,
        shares=shares,
        schedule={name: values[name] for name in RATE_ARGUMENTS if name in values},
        train_only=tuple(values.get("train_only", ())),
        data={name: values[name] for name in _OF_DATA if values.get(name) is not None},
    )


def _convert_values(item: Mapping[Any, Any], types: Mapping[str, Any], values: dict[str, Any]) -> Iterator[str]:
    """Add the values of a phase that have the right type to ``values``, and yield a fault for each other value."""
    if "from" not in item:
        yield "'from' is missing; give the first step of the phase, or the share of the run before it"
    for name, value in item.items():
        if name not in types:
            yield f"{name!r}: unknown name; a phase can have {', '.join(types)}"
            continue
        if name == "from" and isinstance(value, float) and value == 1:
            yield "from: 1.0 is ambiguous; write 1 for the first step, or a share below 1"
            continue
        try:
            values[name] = convert(types[name], value)
        except WrongValueError as error:
            yield f"{name}: expected {error}, got {value!r}"


def _faults_of_values(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the values of a phase, which all have the right type."""
    if values["from"] > 1 and not values["from"].is_integer():
        yield f"from: expected a step, or a share of the run below 1; got {values['from']:g}"
    if all(name in values for name in _SHARES):
        yield "shares and token_shares contradict each other; give only one of them"
    if values.get("train_only") == []:
        yield "train_only is empty; give parts of the model, or leave it out"
    if len(values) == 1:  # `from` alone
        yield "it changes nothing; give shares, token_shares, lr, train_only or train_data_dir"
    if not values.get("train_data_dir"):
        for name in _OF_DATA:
            if values.get(name) is not None:
                yield f"{name} needs a phase with its own token datasets; add train_data_dir"


def _phase_schedule(phase: PhaseSettings, last_step: int, training: "TrainingArguments") -> Schedule | None:
    """Return the schedule of a phase; None if it keeps the previous schedule.

    Missing values are the command line's, except that there is no warm-up, and that a new ``lr_schedule`` has its
    own decay.
    """
    if not phase.schedule:
        return None
    values: dict[str, Any] = {"warmup_steps": 0}
    if "lr_schedule" in phase.schedule:
        values |= {"lr_decay": True, "decay_steps": None, "decay_share": None, "decay_form": None}
    values |= phase.schedule
    num_steps = last_step - phase.first_step + 1
    training = replace(training, **values, max_step=num_steps)
    faults = list(training.faults())
    if not faults:
        decay_fault = fault_of_decay(training, num_steps, "the phase")
        if decay_fault is not None:
            faults.append(decay_fault)
    if faults:
        raise InputError(*(f"{phase.label} of {num_steps} steps: {fault}" for fault in faults))
    return Schedule(num_steps, training, after_step=phase.first_step - 1, last_step=last_step)
