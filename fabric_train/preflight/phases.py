"""Read ``--phases``: parts of a run with other shares, learning rates, trained parts or token datasets.

A phase with token datasets of its own, such as longer rows, begins another stretch of the run: the run saves before it
and goes on from there, with the arguments that the phase changes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NonNegativeFloat, Shares, WrongValueError, convert
from fabric_train.cli.errors import InputError
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape, with_parts
from fabric_train.model.trained_parts import TrainedParts
from fabric_train.optim.learning_rate import RATE_ARGUMENTS, Schedule
from fabric_train.preflight.steps import fault_of_decay
from fabric_train.training.prepared_run import RunPhase, TrainingData

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments, TrainingArguments

_SHARES = ("shares", "token_shares")


_OF_DATA = ("train_data_dir", "max_length", "rope_scaling", "rope_theta", "micro_batch_size", "total_batch_size")
"""What a phase may have beside token datasets of its own."""


@dataclass(frozen=True)
class GivenPhase:
    """A phase as the file has it: ``where`` names it in messages, ``schedule`` has its learning-rate arguments.

    ``data`` has its token datasets, and the values of ``_OF_DATA`` that come with them; empty if the datasets stay.
    """

    where: str
    first_step: int
    shares: Shares | None
    schedule: Mapping[str, Any]
    train_only: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stretch:
    """Steps of a run that read the same token datasets: their arguments, and the phases that begin in them.

    ``last_step`` is None if the run ends with it. ``opening`` is the phase that names these token datasets; None if the
    command line does.
    """

    first_step: int
    last_step: int | None
    arguments: "TrainArguments"
    phases: tuple[GivenPhase, ...]
    opening: GivenPhase | None = None

    @property
    def option(self) -> str:
        """The beginning of an argument's name in messages."""
        return f"{self.opening.where}: " if self.opening else "--"

    def check_length(self, rows: set[int]) -> None:
        """Raise an InputError if the phase's ``max_length`` is not the length of its rows, one of ``rows``."""
        stated = self.opening.data.get("max_length") if self.opening else None
        if stated is not None and rows != {stated}:
            folders = ", ".join(self.arguments.data.data_dirs)
            there = ", ".join(f"{one:,}" for one in sorted(rows))
            raise InputError(
                f"{self.option}max_length {stated}: the rows of {folders} have {there} tokens; tokenize with "
                f"--max_length {stated}, or say what they have"
            )


def read_stretches(arguments: "TrainArguments") -> list[Stretch]:
    """Return the stretches of a run in their order, with the phases of ``--phases``."""
    given = read_phases(arguments)
    begin = [0, *(number for number, phase in enumerate(given) if phase.data)]
    stretches = []
    present = arguments
    for place, (first, after) in enumerate(zip(begin, [*begin[1:], len(given)], strict=True)):
        opening = given[first] if place else None
        if opening is not None:
            present = _with_data(present, opening)
        last_step = given[after].first_step - 1 if after < len(given) else None
        first_step = opening.first_step if opening else 1
        stretches.append(Stretch(first_step, last_step, present, tuple(given[first:after]), opening))
    return stretches


def stretch_of(stretches: Sequence[Stretch], step: int) -> int:
    """Return the number of the stretch with a step; the first one for step 0."""
    return max(number for number, stretch in enumerate(stretches) if number == 0 or stretch.first_step <= step)


def _with_data(before: "TrainArguments", phase: GivenPhase) -> "TrainArguments":
    """Return the arguments from a phase with token datasets of its own on."""
    own = {name: value for name, value in phase.data.items() if name != "max_length"}
    changed = before
    for group, names in (
        ("data", ("train_data_dir",)),
        ("model", ("rope_scaling", "rope_theta")),
        ("training", ("micro_batch_size", "total_batch_size")),
    ):
        values: dict[str, Any] = {name: own[name] for name in names if name in own}
        values |= dict.fromkeys(_SHARES) if group == "data" else {}  # of the datasets before
        changed = replace(changed, **{group: replace(getattr(changed, group), **values)})
    faults = [*changed.data.faults(), *changed.model.faults()]
    if faults:
        raise InputError(*(f"{phase.where}: {fault.removeprefix('--')}" for fault in faults))
    return changed


def read_phases(arguments: "TrainArguments") -> list[GivenPhase]:
    """Return what ``--phases`` has, in its order; empty without it, and if nothing is trained."""
    path = arguments.data.phases
    num_steps = arguments.training.max_step
    if path is None or arguments.evaluation.only_reads:
        return []
    if num_steps is None:
        raise InputError("--phases divides a run of known length: give --max_step")
    given = _read(path, arguments, num_steps)
    previous = 0
    for phase in given:
        if phase.first_step <= previous:
            raise InputError(f"{phase.where} begins at step {phase.first_step}, not after the phase before it")
        if phase.first_step > num_steps:
            raise InputError(
                f"{phase.where} begins at step {phase.first_step}, after the last one, --max_step {num_steps}"
            )
        previous = phase.first_step
    if given[0].first_step == 1 and given[0].data:
        raise InputError(f"{given[0].where} begins with the run: give its train_data_dir on the command line")
    if given[0].first_step == 1 and given[0].shares and arguments.data.shares_of_epochs.values:
        raise InputError(f"{given[0].where} begins with the run and has shares: leave the command line's out")
    return given


def plan_phases(stretch: Stretch, data: TrainingData) -> tuple[RunPhase, ...]:
    """Return the phases of a stretch, with the rows, the schedule and the parts of each.

    A phase without shares keeps those before it.
    """
    given = stretch.phases
    training = stretch.arguments.training
    if not given:
        return ()
    assert isinstance(data, TokenMixture)  # DataArguments.mixes
    assert training.max_step is not None
    rows = data.rows_per_epoch
    phases: list[RunPhase] = []
    freeze = tuple(stretch.arguments.model.freeze or ())
    ends = [*(phase.first_step - 1 for phase in given[1:]), stretch.last_step or training.max_step]
    for phase, last_step in zip(given, ends, strict=True):
        rows = data.rows_of(phase.shares) if phase.shares else rows
        schedule = _schedule(phase, last_step, training)
        parts = None
        if phase.train_only:
            parts = TrainedParts(phase.train_only, freeze, f"{phase.where}: train_only")
        phases.append(RunPhase(phase.first_step, last_step, rows, schedule, parts))
    return tuple(phases)


def choose_parts(
    stretch: Stretch, model: ModelShape, phases: Sequence[RunPhase]
) -> tuple[ModelShape, dict[int, ModelShape]]:
    """Return the model with the parts of ``--train_only`` and ``--freeze``, and see ``PreparedRun.models``."""
    given = stretch.arguments.model
    first_step = stretch.first_step
    option = next((phase.parts.option for phase in phases if phase.parts), None)
    option = "--train_only" if given.train_only else "--freeze" if given.freeze else option
    if option and model.adapter:
        raise InputError(
            f"{option}: beside an adapter all weights are frozen; --train_also names parts that train whole"
        )
    parts = TrainedParts(tuple(given.train_only or ()), tuple(given.freeze or ()))
    if parts and not stretch.arguments.evaluation.eval_only:
        model = with_parts(model, parts)
    if not any(phase.parts for phase in phases):
        return model, {}
    models = {first_step: model}
    for phase in phases:
        present = with_parts(model, phase.parts) if phase.parts else model
        if phase.first_step == first_step or present.trained.keys() != models[max(models)].trained.keys():
            models[phase.first_step] = present
    return model, models


def _read(path: str, arguments: "TrainArguments", num_steps: int) -> list[GivenPhase]:
    content = yaml_core.load_file(path, "--phases")
    if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
        raise InputError(f"--phases {path}: expected a list of phases, such as '- {{from: 0.9, shares: [1, 0.5]}}'")
    groups = (arguments.data, arguments.model, arguments.training)
    hints = {name: kind for group in groups for name, kind in get_type_hints(type(group), include_extras=True).items()}
    kinds: dict[str, Any] = {"from": NonNegativeFloat}
    kinds |= dict.fromkeys(_SHARES, list[NonNegativeFloat] | list[dict[str, Any]] | list[str])
    kinds |= {name: hints[name] for name in (*RATE_ARGUMENTS, *_OF_DATA)} | {"train_only": list[str]}
    phases = []
    faults = []
    for number, item in enumerate(content, 1):
        where = f"{path}: phase {number}"
        values: dict[str, Any] = {}
        found = list(_convert_all(item, kinds, values)) or list(_faults_of(values))
        if not found:
            first_step = int(values["from"]) if values["from"] >= 1 else round(values["from"] * num_steps) + 1
            shares = [
                Shares(f"{where}: {name}", values[name], counts_tokens=name != "shares")
                for name in _SHARES
                if name in values
            ]
            schedule = {name: values[name] for name in RATE_ARGUMENTS if name in values}
            parts = tuple(values.get("train_only", ()))
            data = {name: values[name] for name in _OF_DATA if values.get(name) is not None}
            phases.append(GivenPhase(where, first_step, shares[0] if shares else None, schedule, parts, data))
        faults += [f"{where}: {fault}" for fault in found]
    if faults:
        raise InputError(*faults)
    return phases


def _convert_all(item: Mapping[Any, Any], kinds: Mapping[str, Any], values: dict[str, Any]) -> Iterator[str]:
    """Fill ``values`` with what has its type, and yield a fault for each of the others."""
    if "from" not in item:
        yield "'from' is missing: the first step of the phase, or the share of the run before it"
    for name, value in item.items():
        if name not in kinds:
            yield f"{name!r}: no such value; a phase has {', '.join(kinds)}"
            continue
        if name == "from" and isinstance(value, float) and value == 1:
            yield "from: 1.0 is a step or a share of the run; write 1 for the first step, a share is below 1"
            continue
        try:
            values[name] = convert(kinds[name], value)
        except WrongValueError as error:
            yield f"{name}: expected {error}, got {value!r}"


def _faults_of(values: Mapping[str, Any]) -> Iterator[str]:
    if values["from"] > 1 and not values["from"].is_integer():
        yield f"from: expected a step, or a share of the run below 1; got {values['from']:g}"
    if all(name in values for name in _SHARES):
        yield "shares and token_shares contradict each other: give one of them"
    if values.get("train_only") == []:
        yield "train_only names nothing: give parts, or leave it out"
    if len(values) == 1:
        yield "it changes nothing: give shares, token_shares, lr, train_only or train_data_dir"
    if not values.get("train_data_dir"):
        for name in _OF_DATA:
            if values.get(name) is not None:
                yield f"{name} is of a phase with token datasets of its own: give train_data_dir too"


def _schedule(phase: GivenPhase, last_step: int, training: "TrainingArguments") -> Schedule | None:
    """Return the schedule of a phase; None if it has none of its own.

    Values that it does not have are the command line's, but there is no warm-up, and another ``lr_schedule``
    has a decay of its own.
    """
    own = phase.schedule
    if not own:
        return None
    defaults: dict[str, Any] = {"warmup_steps": 0}
    if "lr_schedule" in own:
        defaults |= {"lr_decay": True, "decay_steps": None, "decay_share": None, "decay_form": None}
    num_steps = last_step - phase.first_step + 1
    changed = replace(training, **(defaults | dict(own)), max_step=num_steps)
    faults = changed.faults() or [fault for fault in [fault_of_decay(changed, num_steps, "the phase")] if fault]
    if faults:
        raise InputError(*(f"{phase.where} of {num_steps} steps: {fault}" for fault in faults))
    return Schedule(num_steps, changed, phase.first_step - 1, last_step)
