"""Read ``--phases``: the parts of a run, each with shares or a learning-rate schedule of its own.

::

    - from: 0.8                 # after 80 % of the run's steps; or a step, the first one of the phase
      token_shares: [0.5, 0.5, 0]     # or by name: [{data/va: 0.5}, {data/es: 0.5}, {"data/all:en": 0}]
    - from: 901
      lr: 1e-5                  # a schedule that begins and ends with the phase
      lr_schedule: linear
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NonNegativeFloat, WrongValueError, convert
from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.optim.lr_schedule import ARGUMENTS, Schedule
from fabric_train.preflight.step_plan import fault_of_decay
from fabric_train.training.prepared_run import RunPhase, TrainingData

if TYPE_CHECKING:
    from arguments import TrainArguments, TrainingArguments

_SHARES = ("shares", "token_shares")


@dataclass(frozen=True)
class GivenPhase:
    """A phase as the file has it: ``where`` names it in messages, ``schedule`` has its learning-rate arguments."""

    where: str
    first_step: int
    shares: Shares | None
    schedule: Mapping[str, Any]


def read_phases(arguments: "TrainArguments") -> list[GivenPhase]:
    """Return what ``--phases`` has, in its order; empty without it, and if nothing is trained.

    Raises:
        InputError: the file cannot be read, or a phase is not one.
    """
    path, num_steps = arguments.data.phases, arguments.training.max_step
    if path is None or arguments.evaluation.only_reads:
        return []
    if num_steps is None:
        raise InputError("--phases divides a run of known length: give --max_step")
    given = _read(path, arguments.training, num_steps)
    previous = 0
    for phase in given:
        if phase.first_step <= previous:
            raise InputError(f"{phase.where} begins at step {phase.first_step}, not after the phase before it")
        if phase.first_step > num_steps:
            raise InputError(
                f"{phase.where} begins at step {phase.first_step}, after the last one, --max_step {num_steps}"
            )
        previous = phase.first_step
    if given[0].first_step == 1 and given[0].shares and arguments.data.shares_of_epochs.given:
        raise InputError(f"{given[0].where} begins with the run and has shares: leave those of the command line out")
    return given


def plan_phases(given: Sequence[GivenPhase], training: "TrainingArguments", data: TrainingData) -> tuple[RunPhase, ...]:
    """Return the phases with the rows and the schedule of each.

    Before the first of them, the run has the shares and the schedule of the command line. A phase without shares keeps
    those before it.

    Raises:
        InputError: shares or schedule of a phase cannot be.
    """
    if not given:
        return ()
    assert isinstance(data, TokenMixture)  # DataArguments.mixes
    assert training.max_step is not None
    rows, phases = data.rows_per_epoch, []
    ends = [*(phase.first_step - 1 for phase in given[1:]), training.max_step]
    for phase, last_step in zip(given, ends, strict=True):
        rows = data.rows_of(phase.shares) if phase.shares else rows
        phases.append(RunPhase(phase.first_step, last_step, rows, _schedule(phase, last_step, training)))
    return tuple(phases)


def _read(path: str, training: "TrainingArguments", num_steps: int) -> list[GivenPhase]:
    """Return what the file has, with the types of the arguments of the same names."""
    try:
        content = yaml_core.load(yaml_core.read_text(path))
    except yaml_core.YamlFault as fault:
        raise InputError(f"--phases {path}: {fault}") from fault
    if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
        raise InputError(f"--phases {path}: expected a list of phases, such as '- {{from: 0.9, shares: [1, 0.5]}}'")
    hints = get_type_hints(type(training), include_extras=True)
    kinds: dict[str, Any] = {"from": NonNegativeFloat}
    kinds |= dict.fromkeys(_SHARES, list[NonNegativeFloat] | list[dict[str, Any]] | list[str])
    kinds |= {name: hints[name] for name in ARGUMENTS}
    phases, faults = [], []
    for number, item in enumerate(content, 1):
        where = f"{path}: phase {number}"
        values: dict[str, Any] = {}
        found = list(_convert_all(item, kinds, values)) or list(_faults_of(values))
        if not found:
            first_step = int(values["from"]) if values["from"] >= 1 else round(values["from"] * num_steps) + 1
            shares = [Shares(f"{where}: {name}", values[name], name != "shares") for name in _SHARES if name in values]
            schedule = {name: values[name] for name in ARGUMENTS if name in values}
            phases.append(GivenPhase(where, first_step, shares[0] if shares else None, schedule))
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
    if len(values) == 1:
        yield "it changes nothing: give shares, token_shares or lr"


def _schedule(phase: GivenPhase, last_step: int, training: "TrainingArguments") -> Schedule | None:
    """Return the schedule of a phase; None if it has none of its own.

    Values that it does not have are those of the command line, but there is no warm-up, and another ``lr_schedule``
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
