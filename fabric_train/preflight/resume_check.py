"""Compare a run with the checkpoint that it resumes from: data, arguments, versions, number of steps."""

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.checkpoint import PhaseParts, PhaseSchedule, TrainerJson, read_trainer_json
from fabric_train.checkpoint.trainer_json import PROGRAM
from fabric_train.cli.errors import InputError
from fabric_train.cli.launcher import global_rank
from fabric_train.cli.parser import flatten
from fabric_train.data.data_order import DataOrder
from fabric_train.data.step_sampler import VALIDATION_VERSION
from fabric_train.data.streaming import Stream
from fabric_train.model.attention import VARLEN
from fabric_train.model.context_parallel import CONTEXT_VARLEN
from fabric_train.model.hf_model import ModelShape
from fabric_train.optim.learning_rate import RATE_ARGUMENTS, SCHEDULES_VERSION, Schedule
from fabric_train.training.components import (
    describe_other_component,
    find_other_components,
    notes_on_components,
)
from fabric_train.training.metrics import read_metrics
from fabric_train.training.prepared_run import PreparedRun, StepPlan, TrainingData
from fabric_train.training.reference_model import is_reference_of

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments

_HASHED_AGAIN = 1 << 26  # rows of the steps before a checkpoint; to shuffle so many takes some seconds
_ROPE = ("rope_scaling", "rope_theta")
# A change of one of these changes the losses from the next step on. Devices, parallelism and micro-batches only split
# the same windows in another way. What fixes the data order is compared by content and not by name, see DataOrder.
_DECIDE_THE_LOSSES = (
    *RATE_ARGUMENTS,
    *("weight_decay", "beta1", "beta2", "grad_clip"),
    *("precision", "float8", "optimizer_states", "stochastic_rounding"),
    *("attention", "isolate_documents", "seed", "eval_iters"),
    *("train_only", "freeze", "lr_of", *_ROPE),
    *("adapter", "lora_rank", "lora_alpha", "lora_dropout", "lora_rslora", "base_weights"),
    *("objective", "dpo_beta", "length_normalised", "label_smoothing", "sft_weight", "simpo_gamma", "reference"),
    "dpop_lambda",
)
_WITHOUT_PARTS = dict.fromkeys(("train_only", "freeze", "lr_of", *_ROPE))
"""Arguments that earlier versions lack, in whose checkpoints all weights trained at one rate, with the model's RoPE."""
_ATTENTION = "fabric_train attention"
_VALIDATION = "fabric_train validation rows"
OWN_VERSIONS = {"fabric_train learning rates": SCHEDULES_VERSION, _VALIDATION: VALIDATION_VERSION, _ATTENTION: "1"}
"""Versions of what this program itself computes; checkpoints from before they were counted have version 1."""

_OF_THIS_START = ("resume", "checkpoint", "branch", "weights_only", "allow_changes", "eval_only", "self_check")


def own_versions(model: ModelShape, data: TrainingData) -> dict[str, str]:
    """Return :data:`OWN_VERSIONS` for a model and its data.

    ``sdpa`` with the borders of documents is version 2 of attention; for a single source, see ``VALIDATION_VERSION``.
    """
    by_borders = model.config._attn_implementation in (VARLEN, CONTEXT_VARLEN)
    versions = OWN_VERSIONS | ({_ATTENTION: "2"} if by_borders else {})
    has_several = data.validation is not None and len(data.validation.source_names) > 1
    return versions | ({} if has_several else {_VALIDATION: "2"})


@dataclass(frozen=True)
class Change:
    """An argument whose value differs from the checkpoint's. ``option`` is another one that sets it."""

    name: str
    there: Any
    here: Any
    option: str | None = None

    @property
    def place(self) -> str:  # where it is given
        return f"{self.option}, {self.name}" if self.option else f"--{self.name}"

    @property
    def advice(self) -> str:  # how to undo it
        return f"give {_shown(self.there)} there" if self.option else f"give --{self.name} {_shown(self.there)}"

    def __str__(self) -> str:
        return f"{self.option + ', ' if self.option else ''}{self.name}: {_shown(self.there)} -> {_shown(self.here)}"


def check_resume(run: PreparedRun, checkpoint: Path) -> tuple[PreparedRun, list[str]]:
    """Return a run that continues with the steps that its checkpoint's run would have taken, and notes for the user.

    An InputError has one line for each difference that would change those steps.
    """
    arguments = run.arguments
    plan = run.plan
    saved = read_trainer_json(checkpoint)
    advice = (
        "resume with the same, or take only its weights with --weights_only true (docs/reference/errors.md#other-data)"
    )
    faults = [f"{checkpoint}: {change}; {advice}" for change in saved.data_changes(run.order)]
    faults = faults or _faults_of_rows(run, checkpoint)
    given = _as_saved(arguments, plan)
    reference = arguments.preference.reference
    if reference is None or is_reference_of(saved, reference):
        given["reference"] = saved.arguments.get("reference")  # it is the run's, also if it is not given again
    other_parts = list(find_other_components(saved, run.components))
    compared_as_parts = {there.kind for there, _ in other_parts}
    changed = _changes(_WITHOUT_PARTS | saved.arguments, given)
    changes = [change for change in changed if change.name not in compared_as_parts]
    in_data = () if run.order.seed is None else ("seed",)  # the comparison of the data order reports it
    deciding = [change for change in changes if _decides(change, arguments) and change.name not in in_data]
    deciding += find_changes_of_begun_phases(run, saved, run.start.state.step)
    if not arguments.checkpoint.allow_changes:
        faults += [
            f"{change} since {checkpoint}, which changes the losses to come; {change.advice}, or accept other losses "
            "with --allow_changes true (docs/reference/errors.md#resume-refused)"
            for change in deciding
        ]
        faults += [describe_other_component(checkpoint, *pair, "other losses") for pair in other_parts]
    if faults:
        raise InputError(*faults)
    others = [change for change in changes if change not in deciding]
    notes = [f"changed since {checkpoint.name}: {_joined(others)}"] if others else []
    if deciding:
        notes.append(
            f"changed since {checkpoint.name}, so the losses to come differ from an unchanged run's: "
            + _joined(deciding)
        )
    notes += [f"the {here} instead of the {there}: the losses to come differ" for there, here in other_parts]
    notes += notes_on_components(saved, run.components, checkpoint)
    step = run.start.state.step
    there, here = _phases_in_words(saved, run, step)
    if there != here:
        notes.append(
            f"the phases that begin after step {step} are others than at {checkpoint.name}: {here}, not {there}"
        )
    return run, [*notes, *_notes_on_versions(run, checkpoint, saved.versions)]


def check_branch(run: PreparedRun, checkpoint: Path) -> tuple[PreparedRun, list[str]]:
    """Return a branch with the arguments in its lineage that the user has changed, and notes for the user."""
    plan = run.plan
    start = run.start
    given = run.user_arguments.checkpoint.branch
    if plan.num_steps <= start.state.step:
        raise InputError(
            f"--branch {given}: the checkpoint is at step {start.state.step}, and the branch would end at step "
            f"{plan.num_steps}; give a larger --max_step or --number_epochs"
        )
    *before, branch = start.lineage
    saved = read_trainer_json(checkpoint)
    other_parts = list(find_other_components(saved, run.components))
    if other_parts and not run.arguments.checkpoint.allow_changes:
        raise InputError(*(describe_other_component(checkpoint, *pair, "other losses") for pair in other_parts))
    if branch.continues_data and (faults := _faults_of_rows(run, checkpoint)):
        raise InputError(*faults)
    changes = _changes(_WITHOUT_PARTS | saved.arguments, _as_saved(run.arguments, plan))
    changed = {change.name: change for change in changes if change.name not in ("output_dir", "phases")}
    there, here = _phases_in_words(saved, run)
    if there != here:
        changed["phases"] = Change("phases", there, here)
    branch = replace(branch, changed={name: [change.there, change.here] for name, change in changed.items()})
    notes = [f"branch of {branch.run} after step {branch.step}; changed: {_joined(changed.values()) or 'nothing'}"]
    if not branch.continues_data:
        causes = "; ".join(saved.data_changes(run.order))
        notes.append(f"the data begin at their first epoch: {causes}")
    notes += [f"the {here} instead of the {there}: the losses to come differ" for there, here in other_parts]
    notes += notes_on_components(saved, run.components, checkpoint)
    run = replace(run, start=replace(start, lineage=(*before, branch)))
    return run, [*notes, *_notes_on_versions(run, checkpoint, saved.versions)]


def find_changes_of_begun_phases(run: PreparedRun, there: TrainerJson, step: int) -> Iterator[Change]:
    """Yield the changes of rates and parts of phases that have begun by ``step``; rows are in the data order."""
    saved, current = (_values_of_phases(one.phase_schedules, one.phase_parts) for one in (there, run))
    for first_step in sorted(first for first in {*saved, *current} if first <= step):
        then = saved.get(first_step, {})
        now = current.get(first_step, {})
        for name in (*RATE_ARGUMENTS, "train_only"):
            if then.get(name) != now.get(name):
                yield Change(name, then.get(name), now.get(name), option=f"--phases from step {first_step}")


def _values_of_phases(schedules: Iterable[PhaseSchedule], parts: Iterable[PhaseParts]) -> dict[int, dict[str, Any]]:
    """Return the values of each phase beside its rows, by its first step."""
    found: dict[int, dict[str, Any]] = {phase.first_step: dict(phase.arguments) for phase in schedules}
    for phase in parts:
        found.setdefault(phase.first_step, {})["train_only"] = " ".join(phase.train_only)
    return found


def _phases_in_words(saved: TrainerJson, run: PreparedRun, after_step: int = 0) -> list[str]:
    here = run.order.phases if isinstance(run.order, DataOrder) else ()
    texts = []
    for rows, record in ((saved.phase_rows, saved), (here, run)):
        own = _values_of_phases(record.phase_schedules, record.phase_parts)
        phases = [
            f"from step {phase.first_step} {' + '.join(map(str, phase.rows_per_epoch))} rows an epoch"
            + "".join(f", {name} {value}" for name, value in own.get(phase.first_step, {}).items() if value is not None)
            for phase in rows
            if phase.first_step > after_step
        ]
        texts.append("; ".join(phases) or "none")
    return texts


def _notes_on_versions(run: PreparedRun, checkpoint: Path, saved: dict[str, str]) -> list[str]:
    updated = _joined(find_version_changes(saved, run))
    return [f"other versions than at {checkpoint.name}, the losses to come may differ: {updated}"] if updated else []


def find_version_changes(saved: dict[str, str], run: PreparedRun) -> list[Change]:
    """Return the packages that a run uses in another version than the saved one."""
    training = run.arguments.training
    is_used = {
        "fabric_train learning rates": training.lr_decay and training.lr_schedule != "constant",
        _VALIDATION: run.arguments.evaluation.eval_iters is not None,
        PROGRAM: False,  # what its commits change in the losses is in OWN_VERSIONS
    }
    updated = _changes(dict.fromkeys(OWN_VERSIONS, "1") | saved, run.versions)
    return [change for change in updated if is_used.get(change.name, True)]


def find_changes(saved: Mapping[str, Any], here: Mapping[str, Any], also: Collection[str]) -> list[Change]:
    """Return the changes of arguments that decide the losses of training, and of those that ``also`` names."""
    names = {*_DECIDE_THE_LOSSES, *also} - {"eval_iters"}
    return [change for change in _changes(saved, here) if change.name in names]


def choose_schedule(run: PreparedRun, checkpoint: Path) -> tuple[PreparedRun, list[str]]:
    """Choose the length of the learning-rate schedule that a run which resumes or branches is in; return notes, too.

    It is the length of the run, or of its phase, unless the learning rate would jump only because that has another
    number of steps than before. Then the schedule keeps its length, and the rate stays as at its last step; with
    ``--allow_changes``, or another schedule, it follows the run.
    """
    step = run.start.state.step
    now = run.schedules.at(run.start.state.step)
    saved = read_trainer_json(checkpoint)
    had_steps, kept, is_same = _schedule_there(run, now, saved)
    # a later phase may go on in the schedule of the run
    if now.last_step is not None and saved.schedule_steps != saved.num_steps:
        run = run.with_schedule(replace(run.schedules.run_schedule, num_steps=int(saved.schedule_steps)))
    last_step = now.last_step or run.plan.num_steps
    num_steps = now.num_steps
    if not is_same:
        rate = run.schedules.rate(step + 1)
        return run, [f"the schedule has changed: the learning rate is {rate:g} at step {step + 1}"]
    if not math.isfinite(kept) or kept == num_steps:
        return run, []
    then = replace(now, num_steps=int(kept))
    keeps = then.rate(step) != now.rate(step) and not run.arguments.checkpoint.allow_changes
    run = run.with_schedule(then) if keeps else run
    if last_step <= step or (keeps and num_steps == had_steps):  # nothing to train, or noted by the start before
        return run, []
    of = "run" if now.last_step is None else "phase"
    lengths = f"the {of} has {num_steps} steps now and had {had_steps:g}"
    if keeps:
        end = then.starts_after + then.num_steps
        stays = f", and from step {end} on stays at {then.rate(end):g}" if last_step > end else ""
        return run, [
            f"{lengths}: so that the learning rate does not jump, it follows its {then.arguments.lr_schedule} "
            f"schedule of {kept} steps{stays}; --allow_changes true stretches the schedule to {num_steps} steps: "
            f"{now.rate(step + 1):g} instead of {then.rate(step + 1):g} at step {step + 1}"
        ]
    if then.rate(step + 1) == now.rate(step + 1):
        return run, []
    return run, [
        f"{lengths}, and the learning rate follows from that: {then.rate(step):g} at step {step}, "
        f"{now.rate(step + 1):g} at step {step + 1}"
    ]


def _schedule_there(run: PreparedRun, now: Schedule, saved: TrainerJson) -> tuple[float, float, bool]:
    """Return the steps of a checkpoint's run or phase and its schedule's, and whether it began as ``now`` does."""
    step = run.start.state.step
    there = next((one for one in saved.phase_schedules if one.first_step <= step <= one.last_step), None)
    here = next((one for one in run.phase_schedules if one.first_step == now.starts_after + 1), None)
    if there is None or here is None or now.last_step is None:
        changes = _changes(saved.arguments, flatten(run.arguments))
        has_changed = any(change.name in RATE_ARGUMENTS for change in changes)
        is_same = there is None and now.last_step is None and not has_changed
        return saved.num_steps, saved.schedule_steps, is_same
    is_same = (there.first_step, there.arguments) == (here.first_step, here.arguments)
    return there.last_step - there.first_step + 1, there.num_steps, is_same


def _faults_of_rows(run: PreparedRun, checkpoint: Path) -> list[str]:
    """Compare the hash of the rows up to the checkpoint's step; the lanes of a stream check their own rows.

    Rank 0 does so for all. In a long run it begins at the last step that ``metrics.csv`` has before the checkpoint.
    """
    if isinstance(run.data, Stream) or run.start.state.step > run.plan.num_steps or global_rank():
        return []
    step = run.start.state.step
    saved = run.start.state.rows_hash
    before = run.plan.data_starts_after
    known_step = 0
    known_hash = ""
    if (step - before) * run.plan.rows_per_window > _HASHED_AGAIN:
        logged = read_metrics(run.folder / "metrics.csv", step - 1)
        if logged and logged[-1].rows_hash and logged[-1].step > before:
            known_step = logged[-1].step - before
            known_hash = logged[-1].rows_hash
    here = run.plan.window_order(run.arguments.data.seed).rows_hash(step - before, known_step, known_hash)
    if here == saved:
        return []
    return [
        f"{checkpoint}: up to step {step} its run took other rows than would be taken here (hash {saved} there, {here} "
        "here); resume with the version of fabric_train and numpy that saved it, or take its weights alone with "
        "--weights_only true"
    ]


def _as_saved(arguments: "TrainArguments", plan: StepPlan) -> dict[str, Any]:
    return flatten(arguments) | {"gradient_accumulation_steps": plan.accumulation}


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Change]:
    """Compare the names that both have: an argument unknown to one version of the program decides nothing there."""
    for name, value in here.items():
        if name in there and name not in _OF_THIS_START and there[name] != value:
            yield Change(name, there[name], value)


def _decides(change: Change, arguments: "TrainArguments") -> bool:
    """Whether the losses change: without ``--rope_scaling``, a checkpoint's configuration counts, which has it.

    The size of validation batches matters only if their number is limited.
    """
    if change.name in _ROPE:
        return change.here is not None
    if change.name == "eval_batch_size":
        return arguments.evaluation.eval_iters is not None
    return change.name in _DECIDE_THE_LOSSES


def _joined(changes: Iterable[Change]) -> str:
    return ", ".join(map(str, changes))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
