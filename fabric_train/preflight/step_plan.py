"""Count a run's windows and steps from its arguments, the model's configuration and the data."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_type_hints

from fabric_train.cli import yaml_core
from fabric_train.cli.argument_types import NonNegativeFloat, Shares, WrongValueError, convert
from fabric_train.cli.errors import InputError
from fabric_train.data import PhaseRows
from fabric_train.data.mixture import Mixture, MixtureOrder
from fabric_train.data.streaming import Stream
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.model.hf_model import ModelShape, with_parts
from fabric_train.model.trained_parts import Parts
from fabric_train.optim.lr_schedule import ARGUMENTS, Schedule, num_decay_steps
from fabric_train.preflight.dataset_check import check_dataset, resize_advice
from fabric_train.training.prepared_run import RunPhase, StepPlan, TrainingData

if TYPE_CHECKING:
    from arguments import TrainArguments, TrainingArguments

_SHARES = ("shares", "token_shares")


def plan_steps(
    arguments: "TrainArguments",
    model: ModelShape,
    data: TrainingData,
    world_size: int,
    data_starts_after: int,
    phases: tuple[RunPhase, ...],
) -> StepPlan:
    """Count the windows and steps of a run, whose data begin after the step ``data_starts_after``."""
    training = arguments.training
    dataset = data.held_out if isinstance(data, Stream) else data
    parts = dataset.parts if dataset else ()
    checks = [check_dataset(part, model, arguments.data.isolate_documents) for part in parts]
    faults = [fault for check in checks for fault in check.faults]
    if isinstance(data, Stream):
        faults += _faults_of_stream(data, model, training.max_step)
    elif arguments.evaluation.eval_only and data.validation is None:
        faults.append(
            f"--eval_only true: {data.name} has no validation split; tokenize with --validation_split above 0"
        )
    num_data_ranks = world_size // arguments.fsdp.ranks_of_rows
    together, accumulation = rows_at_once(arguments, world_size)
    if (total := training.total_batch_size) is not None and total % together:
        nearest = " or ".join(map(str, sorted({together * max(accumulation, 1), together * (accumulation + 1)})))
        split = f"--micro_batch_size {training.micro_batch_size} on {num_data_ranks} devices"
        faults.append(f"--total_batch_size {total} is not a multiple of {together}, {split}; nearest: {nearest}")
    if faults:
        raise InputError(*faults)
    num_rows = windows_per_epoch = in_epochs = mixture = None
    if isinstance(data, TokenMixture):
        window = (together * accumulation, arguments.data.seed)
        mixture = order_of_mixture(data, data.rows_per_epoch, *window, phases, data_starts_after)
    if not isinstance(data, Stream):
        num_rows = sum(data.rows_per_epoch) if isinstance(data, TokenMixture) else len(data.train)
        windows_per_epoch = math.ceil(num_rows / (together * accumulation))
        in_epochs = None if phases else data_starts_after + windows_per_epoch * training.number_epochs
    num_steps = min(steps for steps in (training.max_step, in_epochs) if steps is not None)
    if not arguments.evaluation.only_reads and (fault := fault_of_decay(training, num_steps)):
        raise InputError(fault)
    return StepPlan(
        num_rows=num_rows,
        world_size=world_size,
        num_data_ranks=num_data_ranks,
        micro_batch_size=training.micro_batch_size,
        accumulation=accumulation,
        rows_per_window=together * accumulation,
        windows_per_epoch=windows_per_epoch,
        num_steps=num_steps,
        tokens_per_row=data.max_length if isinstance(data, Stream) else data.train.longest(),
        mixture=mixture,
        phases=phases,
        notes=(*(note for check in checks for note in check.notes), *_notes(arguments, num_steps, in_epochs, data)),
        data_starts_after=data_starts_after,
    )


def order_of_mixture(
    data: TokenMixture,
    rows_per_epoch: Sequence[int],
    rows_per_window: int,
    seed: int,
    phases: Iterable[RunPhase | PhaseRows],
    starts_after: int,
) -> MixtureOrder:
    """Return the order of a mixture and its phases, whose data begin after the step ``starts_after``."""
    sizes = tuple(source.num_rows for source in data.sources)
    order = MixtureOrder((Mixture(sizes, tuple(rows_per_epoch), rows_per_window, seed),))
    for phase in phases:
        order = order.followed_by(max(0, phase.first_step - 1 - starts_after), phase.rows_per_epoch)
    return order


def rows_at_once(arguments: "TrainArguments", world_size: int) -> tuple[int, int]:
    """Return the rows of one micro-batch over all ranks, and the number of micro-batches on a rank in a step."""
    training = arguments.training
    together = training.micro_batch_size * (world_size // arguments.fsdp.ranks_of_rows)
    if training.total_batch_size is None:
        return together, training.gradient_accumulation_steps
    return together, training.total_batch_size // together


def _faults_of_stream(stream: Stream, model: ModelShape, max_step: int | None) -> list[str]:
    faults = []
    if max_step is None:
        faults.append("--streaming_dataset has no known length: give --max_step")
    if model.max_positions is not None and stream.max_length > model.max_positions:
        faults.append(f"--max_length {stream.max_length}: {model.source} takes {model.max_positions}; give no more")
    if stream.tokenizer.vocab_size > model.vocab_size:
        faults.append(
            f"{stream.tokenizer.name}: its tokenizer has ids up to {stream.tokenizer.vocab_size - 1}, {model.source} "
            f"has {model.vocab_size} tokens; {resize_advice(model, stream.tokenizer.vocab_size)}"
        )
    return faults


def fault_of_decay(training: "TrainingArguments", num_steps: int, of: str = "the run") -> str | None:
    """Return a fault if a ``wsd`` schedule has no step at its peak between warm-up and decay, else None."""
    if training.lr_schedule != "wsd" or not training.lr_decay:
        return None
    decay, rises = num_decay_steps(num_steps, training), max(training.warmup_steps, 1)
    if decay + rises <= num_steps:
        return None
    given = f"--decay_steps {decay}" if training.decay_steps else f"--decay_share {training.decay_share:g}"
    return (
        f"{given}: {of} has {num_steps} steps, and {rises} {'is' if rises == 1 else 'are'} needed to reach --lr; give "
        f"fewer, at most {max(num_steps - rises, 0)} steps"
    )


def _notes(arguments: "TrainArguments", num_steps: int, in_epochs: int | None, data: TrainingData) -> list[str]:
    notes, training = [], arguments.training
    if training.max_step and in_epochs and training.max_step > in_epochs:
        notes.append(
            f"--max_step {training.max_step} is beyond the data: {training.number_epochs} epochs end at step "
            f"{in_epochs}, where the learning rate ends too; raise --number_epochs to go further"
        )
    elif training.max_step and in_epochs and training.max_step < in_epochs:
        notes.append(
            f"--max_step {training.max_step} ends the run before its {training.number_epochs} epochs, {in_epochs} steps"
        )
    if training.warmup_steps > num_steps:
        notes.append(f"--warmup_steps {training.warmup_steps} is longer than the run's {num_steps} steps")
    if data.validation is None:
        folders = ", ".join(arguments.data.data_dirs)
        lacking = f"{folders} has no validation split" if folders else "--train_data_dir is not given"
        notes.append(f"{lacking}: nothing will be evaluated")
    if isinstance(data, Stream) and data.chat_template:
        notes += data.chat_template.notes
    return notes


@dataclass(frozen=True)
class GivenPhase:
    """A phase as the file has it: ``where`` names it in messages, ``schedule`` has its learning-rate arguments."""

    where: str
    first_step: int
    shares: Shares | None
    schedule: Mapping[str, Any]
    train_only: tuple[str, ...] = ()


def read_phases(arguments: "TrainArguments") -> list[GivenPhase]:
    """Return what ``--phases`` has, in its order; empty without it, and if nothing is trained."""
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
        raise InputError(f"{given[0].where} begins with the run and has shares: leave the command line's out")
    return given


def plan_phases(
    given: Sequence[GivenPhase], training: "TrainingArguments", data: TrainingData, freeze: tuple[str, ...] = ()
) -> tuple[RunPhase, ...]:
    """Return the phases with the rows, the schedule and the parts of each; of ``freeze``, nothing trains in any.

    A phase without shares keeps those before it.
    """
    if not given:
        return ()
    assert isinstance(data, TokenMixture)  # DataArguments.mixes
    assert training.max_step is not None
    rows, phases = data.rows_per_epoch, []
    ends = [*(phase.first_step - 1 for phase in given[1:]), training.max_step]
    for phase, last_step in zip(given, ends, strict=True):
        rows = data.rows_of(phase.shares) if phase.shares else rows
        schedule, parts = _schedule(phase, last_step, training), None
        if phase.train_only:
            parts = Parts(phase.train_only, freeze, f"{phase.where}: train_only")
        phases.append(RunPhase(phase.first_step, last_step, rows, schedule, parts))
    return tuple(phases)


def choose_parts(
    arguments: "TrainArguments", model: ModelShape, phases: Sequence[RunPhase]
) -> tuple[ModelShape, dict[int, ModelShape]]:
    """Return the model with the parts of ``--train_only`` and ``--freeze``, and see ``PreparedRun.models``."""
    given = arguments.model
    option = next((phase.parts.option for phase in phases if phase.parts), None)
    option = "--train_only" if given.train_only else "--freeze" if given.freeze else option
    if option and model.adapter:
        raise InputError(
            f"{option}: beside an adapter all weights are frozen; --train_also names parts that train whole"
        )
    parts = Parts(tuple(given.train_only or ()), tuple(given.freeze or ()))
    if parts and not arguments.evaluation.eval_only:
        model = with_parts(model, parts)
    if not any(phase.parts for phase in phases):
        return model, {}
    models = {1: model}
    for phase in phases:
        present = with_parts(model, phase.parts) if phase.parts else model
        if phase.first_step == 1 or present.trained.keys() != models[max(models)].trained.keys():
            models[phase.first_step] = present
    return model, models


def _read(path: str, training: "TrainingArguments", num_steps: int) -> list[GivenPhase]:
    content = yaml_core.load_file(path, "--phases")
    if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
        raise InputError(f"--phases {path}: expected a list of phases, such as '- {{from: 0.9, shares: [1, 0.5]}}'")
    hints = get_type_hints(type(training), include_extras=True)
    kinds: dict[str, Any] = {"from": NonNegativeFloat}
    kinds |= dict.fromkeys(_SHARES, list[NonNegativeFloat] | list[dict[str, Any]] | list[str])
    kinds |= {name: hints[name] for name in ARGUMENTS} | {"train_only": list[str]}
    phases, faults = [], []
    for number, item in enumerate(content, 1):
        where = f"{path}: phase {number}"
        values: dict[str, Any] = {}
        found = list(_convert_all(item, kinds, values)) or list(_faults_of(values))
        if not found:
            first_step = int(values["from"]) if values["from"] >= 1 else round(values["from"] * num_steps) + 1
            shares = [Shares(f"{where}: {name}", values[name], name != "shares") for name in _SHARES if name in values]
            schedule = {name: values[name] for name in ARGUMENTS if name in values}
            parts = tuple(values.get("train_only", ()))
            phases.append(GivenPhase(where, first_step, shares[0] if shares else None, schedule, parts))
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
        yield "it changes nothing: give shares, token_shares, lr or train_only"


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
