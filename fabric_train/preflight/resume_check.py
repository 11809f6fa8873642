"""Compare a run with the checkpoint that it resumes from: data, arguments, versions, number of steps."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.checkpoint import PhaseParts, PhaseSchedule, TrainerJson
from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import global_rank
from fabric_train.cli.parser import flatten
from fabric_train.cli.tables import Component
from fabric_train.data.data_order import DataOrder, PhaseRows
from fabric_train.data.step_sampler import VALIDATION_VERSION
from fabric_train.data.streaming import Stream
from fabric_train.model.attention import VARLEN
from fabric_train.model.context_parallel import CONTEXT_VARLEN
from fabric_train.model.hf_model import ModelShape
from fabric_train.optim.learning_rate import RATE_ARGUMENTS, SCHEDULES_VERSION, Schedule
from fabric_train.rollouts.prompts import Prompts
from fabric_train.training.checkpoint_description import saved_schedules
from fabric_train.training.components import (
    describe_other_component,
    find_other_components,
    notes_on_components,
)
from fabric_train.training.metrics import read_metrics
from fabric_train.training.prepared_run import PreparedRun, TrainingData
from fabric_train.training.reference_model import is_reference_of
from fabric_train.training.step_plan import StepPlan

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_HASHED_AGAIN = 1 << 26  # rows of the steps before a checkpoint; to shuffle so many takes some seconds
_ROPE = ("rope_scaling", "rope_theta")
# A change of one of these changes the losses from the next step on. Devices, parallelism and micro-batches only split
# the same windows in another way. What fixes the data order is compared by content and not by name, see DataOrder.
_DECIDE_THE_LOSSES = (
    *RATE_ARGUMENTS,
    *("weight_decay", "beta1", "beta2", "grad_clip"),
    *("muon_lr", "muon_momentum", "muon_adjust_lr"),
    *("precision", "float8", "optimizer_states", "stochastic_rounding"),
    *("attention", "isolate_documents", "seed", "eval_iters"),
    *("train_only", "freeze", "lr_of", *_ROPE),
    *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "base_weights"),
    *("objective", "dpo_beta", "length_normalised", "label_smoothing", "sft_weight", "simpo_gamma", "reference"),
    *("dpop_lambda", "kto_desirable_weight", "kto_undesirable_weight"),
    *("teacher_weights", "divergence", "jsd_beta", "distill_temperature", "distill_on"),
    *("group_size", "max_new_tokens", "temperature", "rewards", "reward_weights", "reward_settings"),
    *("on_reward_error", "advantage", "refill", "loss_normalisation", "kl_weight"),
)
_DEFAULTS_OF_EARLIER_VERSIONS = dict.fromkeys(("train_only", "freeze", "lr_of", *_ROPE))
"""The values of arguments that checkpoints of earlier versions lack."""
_ATTENTION = "fabric_train attention"
_VALIDATION = "fabric_train validation rows"
_DORA = "fabric_train DoRA"
OWN_VERSIONS = {
    "fabric_train learning rates": SCHEDULES_VERSION,
    _VALIDATION: VALIDATION_VERSION,
    _ATTENTION: "1",
    _DORA: "1",
}
"""The versions of this program's own computations; checkpoints that do not record them have version 1."""

_OF_THIS_START = ("resume", "checkpoint", "branch", "weights_only", "allow_changes", "eval_only", "self_check")
"""Arguments about the start of a run, which do not change its steps."""


def own_versions(model: ModelShape, data: TrainingData) -> dict[str, str]:
    """Return :data:`OWN_VERSIONS` for a model and its data.

    ``sdpa`` with document borders is version 2 of attention. Version 2 of DoRA does not round the ratio of magnitudes
    and norms to bf16. For a single source, see ``VALIDATION_VERSION``.
    """
    versions = dict(OWN_VERSIONS)
    if model.config._attn_implementation in (VARLEN, CONTEXT_VARLEN):
        versions[_ATTENTION] = "2"
    if model.adapter is not None and model.adapter.kind == "dora":
        versions[_DORA] = "2"
    has_several_sources = data.validation is not None and len(data.validation.source_names) > 1
    if not has_several_sources:
        versions[_VALIDATION] = "2"
    return versions


@dataclass(frozen=True)
class Change:
    """An argument whose value differs from the checkpoint's. ``option`` is another argument that sets it."""

    name: str
    saved_value: Any
    current_value: Any
    option: str | None = None

    @property
    def argument(self) -> str:
        """The argument that sets the value, as messages name it."""
        return f"{self.option}, {self.name}" if self.option else f"--{self.name}"

    @property
    def advice(self) -> str:
        """How to undo the change."""
        saved_value = _format_value(self.saved_value)
        return f"set it to {saved_value} there" if self.option else f"give --{self.name} {saved_value}"

    def __str__(self) -> str:
        prefix = f"{self.option}, " if self.option else ""
        return f"{prefix}{self.name}: {_format_value(self.saved_value)} -> {_format_value(self.current_value)}"


def check_resume(run: PreparedRun, saved: TrainerJson) -> tuple[PreparedRun, list[str]]:
    """Return a run that continues with the same steps as the checkpoint's run would have, and notes for the user.

    Raises:
        InputError: It has a line for each difference that would change these steps.
    """
    arguments = run.arguments
    step = run.start.state.step
    checkpoint = saved.checkpoint

    # the data: the rows of the steps to come, and those of the steps before
    data_advice = (
        "resume with the same data, or load only its weights with --weights_only true "
        "(docs/reference/errors.md#other-data)"
    )
    faults = [f"{checkpoint}: {difference}; {data_advice}" for difference in saved.data_changes(run.order)]
    if not faults:
        faults = _compare_rows(run, checkpoint)

    # the arguments, and the components that they name
    current_arguments = _arguments_to_compare(arguments, run.plan)
    reference = arguments.preference.reference
    if reference is None or is_reference_of(saved, reference):
        # the checkpoint's reference stays the run's, also if it is not given again
        current_arguments["reference"] = saved.arguments.get("reference")
    other_components = list(find_other_components(saved, run.components))
    component_kinds = {saved_component.kind for saved_component, _ in other_components}
    all_changes = _find_changes(_DEFAULTS_OF_EARLIER_VERSIONS | saved.arguments, current_arguments)
    changes = [change for change in all_changes if change.name not in component_kinds]

    # those that change the losses are refused, unless --allow_changes accepts them
    deciding = []
    for change in changes:
        # the comparison of the data order reports the seed, if the order depends on it
        is_reported_seed = change.name == "seed" and run.order.seed is not None
        if _decides(change, arguments) and not is_reported_seed:
            deciding.append(change)
    deciding += find_changes_of_begun_phases(run, saved, step)
    if not arguments.checkpoint.allow_changes:
        for change in deciding:
            faults.append(
                f"{change} since {checkpoint}, which changes future losses; {change.advice}, or accept different "
                "losses with --allow_changes true (docs/reference/errors.md#resume-refused)"
            )
        faults += _faults_of_components(checkpoint, other_components)
    if faults:
        raise InputError(*faults)

    # notes for the user on everything that was accepted
    notes = []
    harmless = [change for change in changes if change not in deciding]
    if harmless:
        notes.append(f"changed since {checkpoint.name}: {_join_changes(harmless)}")
    if deciding:
        notes.append(
            f"changed since {checkpoint.name}, so future losses differ from an unchanged run's: "
            + _join_changes(deciding)
        )
    notes += _notes_on_other_components(other_components)
    notes += notes_on_components(saved, run.components, checkpoint)
    saved_phases = _describe_saved_phases(saved, after_step=step)
    run_phases = _describe_run_phases(run, after_step=step)
    if saved_phases != run_phases:
        notes.append(
            f"the phases after step {step} have changed since {checkpoint.name}: {run_phases}, previously "
            f"{saved_phases}"
        )
    notes += _notes_on_versions(run, checkpoint, saved.versions)
    return run, notes


def check_branch(run: PreparedRun, saved: TrainerJson) -> tuple[PreparedRun, list[str]]:
    """Return a branch, with the arguments that the user has changed in its lineage, and notes for the user."""
    plan = run.plan
    start = run.start
    branch_argument = run.user_arguments.checkpoint.branch
    if plan.num_steps <= start.state.step:
        raise InputError(
            f"--branch {branch_argument}: the checkpoint is at step {start.state.step}, and the branch would end at "
            f"step {plan.num_steps}; give a larger --max_step or --number_epochs"
        )

    # refuse other components, and other rows before the branch if the data go on
    *ancestors, branch = start.lineage
    checkpoint = saved.checkpoint
    other_components = list(find_other_components(saved, run.components))
    if other_components and not run.arguments.checkpoint.allow_changes:
        raise InputError(*_faults_of_components(checkpoint, other_components))
    if branch.continues_data:
        faults = _compare_rows(run, checkpoint)
        if faults:
            raise InputError(*faults)

    # record the changed arguments in the lineage
    changes: dict[str, Change] = {}
    current_arguments = _arguments_to_compare(run.arguments, plan)
    for change in _find_changes(_DEFAULTS_OF_EARLIER_VERSIONS | saved.arguments, current_arguments):
        if change.name not in ("output_dir", "phases"):
            changes[change.name] = change
    saved_phases = _describe_saved_phases(saved)
    run_phases = _describe_run_phases(run)
    if saved_phases != run_phases:
        changes["phases"] = Change("phases", saved_phases, run_phases)
    changed_values = {name: [change.saved_value, change.current_value] for name, change in changes.items()}
    branch = replace(branch, changed=changed_values)
    run = replace(run, start=replace(start, lineage=(*ancestors, branch)))

    change_list = _join_changes(changes.values()) if changes else "nothing"
    notes = [f"branch of {branch.run} after step {branch.step}; changed: {change_list}"]
    if not branch.continues_data:
        causes = "; ".join(saved.data_changes(run.order))
        notes.append(f"the data restart from the first epoch: {causes}")
    notes += _notes_on_other_components(other_components)
    notes += notes_on_components(saved, run.components, checkpoint)
    notes += _notes_on_versions(run, checkpoint, saved.versions)
    return run, notes


def _faults_of_components(checkpoint: Path, pairs: Iterable[tuple[Component, Component]]) -> list[str]:
    return [
        describe_other_component(checkpoint, saved_component, run_component, "different losses")
        for saved_component, run_component in pairs
    ]


def _notes_on_other_components(pairs: Iterable[tuple[Component, Component]]) -> list[str]:
    return [
        f"using the {run_component} instead of the {saved_component}: future losses differ"
        for saved_component, run_component in pairs
    ]


def find_changes_of_begun_phases(run: PreparedRun, saved: TrainerJson, step: int) -> Iterator[Change]:
    """Yield the changed rates and parts of phases that have begun by ``step``; the data order compares the rows."""
    saved_phases = _values_of_phases(saved.phase_schedules, saved.phase_parts)
    run_phases = _values_of_phases(saved_schedules(run.schedules), run.plan.phase_parts)
    for first_step in sorted({*saved_phases, *run_phases}):
        if first_step > step:
            break
        saved_values = saved_phases.get(first_step, {})
        run_values = run_phases.get(first_step, {})
        for name in (*RATE_ARGUMENTS, "train_only"):
            saved_value = saved_values.get(name)
            run_value = run_values.get(name)
            if saved_value != run_value:
                yield Change(name, saved_value, run_value, option=f"--phases from step {first_step}")


def _values_of_phases(
    schedules: Iterable[PhaseSchedule], trained_parts: Iterable[PhaseParts]
) -> dict[int, dict[str, Any]]:
    """Return the learning-rate arguments and the trained parts of each phase, by its first step."""
    values: dict[int, dict[str, Any]] = {schedule.first_step: dict(schedule.arguments) for schedule in schedules}
    for phase_parts in trained_parts:
        phase_values = values.setdefault(phase_parts.first_step, {})
        phase_values["train_only"] = " ".join(phase_parts.train_only)
    return values


def _describe_saved_phases(saved: TrainerJson, *, after_step: int = 0) -> str:
    values_by_step = _values_of_phases(saved.phase_schedules, saved.phase_parts)
    return _describe_phases(saved.phase_rows, values_by_step, after_step)


def _describe_run_phases(run: PreparedRun, *, after_step: int = 0) -> str:
    phase_rows = run.order.phases if isinstance(run.order, DataOrder) else ()
    values_by_step = _values_of_phases(saved_schedules(run.schedules), run.plan.phase_parts)
    return _describe_phases(phase_rows, values_by_step, after_step)


def _describe_phases(
    phase_rows: Sequence[PhaseRows], values_by_step: Mapping[int, Mapping[str, Any]], after_step: int
) -> str:
    """Describe the phases that begin after a step; ``values_by_step`` has their learning rates and trained parts."""
    texts = []
    for phase in phase_rows:
        if phase.first_step <= after_step:
            continue
        text = f"from step {phase.first_step} {' + '.join(map(str, phase.rows_per_epoch))} rows per epoch"
        for name, value in values_by_step.get(phase.first_step, {}).items():
            if value is not None:
                text += f", {name} {value}"
        texts.append(text)
    return "; ".join(texts) if texts else "none"


def _notes_on_versions(run: PreparedRun, checkpoint: Path, saved_versions: dict[str, str]) -> list[str]:
    changes = find_version_changes(saved_versions, run.versions, run.arguments)
    if not changes:
        return []
    return [f"versions have changed since {checkpoint.name}, so future losses may differ: {_join_changes(changes)}"]


def find_version_changes(
    saved_versions: dict[str, str], versions: dict[str, str], arguments: "TrainArguments"
) -> list[Change]:
    """Return the packages of a run whose version differs from the saved one."""
    training = arguments.training
    is_used = {
        "fabric_train learning rates": training.lr_decay and training.lr_schedule != "constant",
        _VALIDATION: arguments.evaluation.eval_iters is not None,
        PROGRAM: False,  # what its commits change in the losses is in OWN_VERSIONS
    }
    changes = _find_changes(dict.fromkeys(OWN_VERSIONS, "1") | saved_versions, versions)
    return [change for change in changes if is_used.get(change.name, True)]


def find_changes(saved: Mapping[str, Any], current: Mapping[str, Any], also: Collection[str]) -> list[Change]:
    """Return the changes of arguments that decide the training losses, and of the arguments in ``also``."""
    names = {*_DECIDE_THE_LOSSES, *also} - {"eval_iters"}
    return [change for change in _find_changes(saved, current) if change.name in names]


def choose_schedule(run: PreparedRun, saved: TrainerJson) -> tuple[PreparedRun, list[str]]:
    """Choose the length of the learning-rate schedule of a run that resumes or branches; also return notes.

    This is the length of the run, or of its phase, unless the learning rate would jump only because the run or phase
    has a different number of steps now. Then the schedule keeps its length, and afterwards the rate stays at its last
    value; with ``--allow_changes``, or a new schedule, the length follows the run.
    """
    step = run.start.state.step
    run_schedule = run.schedules.at(step)
    is_phase = run_schedule.last_step is not None
    saved_lengths = _read_saved_lengths(run, run_schedule, saved)
    # a later phase may go on in the schedule of the run
    if is_phase and saved.schedule_steps != saved.num_steps:
        run = replace(run, schedules=run.schedules.with_length(int(saved.schedule_steps)))
    last_step = run_schedule.last_step or run.plan.num_steps
    num_steps = run_schedule.num_steps
    if not saved_lengths.is_same_schedule:
        rate = run.schedules.rate(step + 1)
        return run, [f"the schedule has changed: the learning rate is {rate:g} at step {step + 1}"]
    if saved_lengths.schedule_steps == num_steps:  # so the rates are the same
        return run, []
    if not math.isfinite(saved_lengths.schedule_steps):  # the checkpoint's run had no last step: no length to keep
        return run, []

    # the saved schedule is kept if the rate at the checkpoint would be another one with the new length
    saved_schedule = replace(run_schedule, num_steps=int(saved_lengths.schedule_steps))
    jumps = saved_schedule.rate(step) != run_schedule.rate(step)
    keeps = jumps and not run.arguments.checkpoint.allow_changes
    if keeps:
        run = replace(run, schedules=run.schedules.with_schedule(saved_schedule))
    if last_step <= step:  # nothing to train
        return run, []
    if keeps and num_steps == saved_lengths.num_steps:  # the start before has noted it
        return run, []

    # a note on the rates of the next step, with the saved length and with the new one
    saved_rate = saved_schedule.rate(step + 1)
    run_rate = run_schedule.rate(step + 1)
    unit = "phase" if is_phase else "run"
    cause = f"the {unit} now has {num_steps} steps instead of {saved_lengths.num_steps:g}"
    if keeps:
        end = saved_schedule.after_step + saved_schedule.num_steps
        constant_rate = f" and stays at {saved_schedule.rate(end):g} from step {end} on" if last_step > end else ""
        return run, [
            f"{cause}: to avoid a jump, the learning rate keeps following its {saved_schedule.arguments.lr_schedule} "
            f"schedule of {saved_lengths.schedule_steps} steps{constant_rate}; --allow_changes true stretches the "
            f"schedule to {num_steps} steps: {run_rate:g} instead of {saved_rate:g} at step {step + 1}"
        ]
    if saved_rate == run_rate:
        return run, []
    return run, [
        f"{cause}, and the learning rate changes with it: {saved_schedule.rate(step):g} at step {step}, {run_rate:g} "
        f"at step {step + 1}"
    ]


@dataclass(frozen=True)
class _SavedLengths:
    """The lengths of a checkpoint's run, or of its phase, and of the learning-rate schedule in it."""

    num_steps: float
    schedule_steps: float
    is_same_schedule: bool
    """Whether the schedule began at the same step as the run's, and with the same arguments."""


def _read_saved_lengths(run: PreparedRun, run_schedule: Schedule, saved: TrainerJson) -> _SavedLengths:
    """Return the lengths at the step of a checkpoint, at which the run now follows ``run_schedule``."""
    step = run.start.state.step
    saved_phases = (phase for phase in saved.phase_schedules if phase.first_step <= step <= phase.last_step)
    saved_phase = next(saved_phases, None)
    first_step = run_schedule.after_step + 1
    run_phases = saved_schedules(run.schedules)
    run_phase = next((phase for phase in run_phases if phase.first_step == first_step), None)
    follows_phase = run_schedule.last_step is not None

    # then and now in a phase with a schedule of its own
    if saved_phase is not None and run_phase is not None and follows_phase:
        is_same = saved_phase.first_step == run_phase.first_step and saved_phase.arguments == run_phase.arguments
        num_steps = saved_phase.last_step - saved_phase.first_step + 1
        return _SavedLengths(num_steps, saved_phase.num_steps, is_same)

    # then, now, or both times in the schedule of the run
    changes = _find_changes(saved.arguments, flatten(run.arguments))
    has_changed = any(change.name in RATE_ARGUMENTS for change in changes)
    is_same = saved_phase is None and not follows_phase and not has_changed
    return _SavedLengths(saved.num_steps, saved.schedule_steps, is_same)


def _compare_rows(run: PreparedRun, checkpoint: Path) -> list[str]:
    """Compare the hash of the rows up to the checkpoint's step; a stream and sampled rows are checked elsewhere.

    Rank 0 does this for all ranks. In a long run, it begins at the last step before the checkpoint in ``metrics.csv``.
    """
    step = run.start.state.step
    if isinstance(run.data, Stream | Prompts) or step > run.plan.num_steps or global_rank():
        return []
    saved_hash = run.start.state.rows_hash
    data_starts_after = run.plan.data_starts_after
    num_windows = step - data_starts_after
    # hashing every row again would take too long in a long run: begin at a logged hash
    logged_windows = 0
    logged_hash = ""
    if num_windows * run.plan.rows_per_window > _HASHED_AGAIN:
        rows = read_metrics(run.folder / "metrics.csv", step - 1)
        if rows and rows[-1].rows_hash and rows[-1].step > data_starts_after:
            logged_windows = rows[-1].step - data_starts_after
            logged_hash = rows[-1].rows_hash
    order = run.plan.window_order(run.arguments.data.seed)
    run_hash = order.rows_hash(num_windows, logged_windows, logged_hash)
    if run_hash == saved_hash:
        return []
    return [
        f"{checkpoint}: up to step {step}, its run read different rows than this run would (hash {saved_hash} there, "
        f"{run_hash} here); resume with the versions of fabric_train and numpy that saved it, or load only its "
        "weights with --weights_only true"
    ]


def _arguments_to_compare(arguments: "TrainArguments", plan: StepPlan) -> dict[str, Any]:
    """Return the arguments to compare with those in trainer.json, without one that means nothing with --prompts."""
    values = flatten(arguments)
    if arguments.data.prompts is not None:
        del values["gradient_accumulation_steps"]  # a step has as many micro-batches as its completions need
        return values
    return values | {"gradient_accumulation_steps": plan.accumulation}


def _find_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Change]:
    """Compare the arguments that are in both: one that a version of the program does not know decides nothing there."""
    for name, value in current.items():
        if name in saved and name not in _OF_THIS_START and saved[name] != value:
            yield Change(name, saved[name], value)


def _decides(change: Change, arguments: "TrainArguments") -> bool:
    """Return whether a change of an argument changes the losses."""
    if change.name in _ROPE:  # without --rope_scaling, the checkpoint's configuration applies, which has it
        return change.current_value is not None
    if change.name == "eval_batch_size":  # matters only if the number of validation batches is limited
        return arguments.evaluation.eval_iters is not None
    return change.name in _DECIDE_THE_LOSSES


def _join_changes(changes: Iterable[Change]) -> str:
    return ", ".join(map(str, changes))


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
