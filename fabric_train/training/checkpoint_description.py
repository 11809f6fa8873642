"""Describe a run for its checkpoints: data, arguments, versions, base model, lineage and sessions."""

from dataclasses import dataclass, replace
from pathlib import Path

from lightning import Fabric

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint import BranchPoint, PhaseSchedule
from fabric_train.cli.parser import flatten
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.precision import weights_dtype
from fabric_train.distributed.strategy import device_name
from fabric_train.model.origin import (
    SPLIT_ARGUMENTS,
    ModelOrigin,
    TrainingSession,
    TrainingStage,
    find_origin,
    legal_files,
    read_stages,
)
from fabric_train.optim.learning_rate import Schedules
from fabric_train.training.prepared_run import PreparedRun


@dataclass(frozen=True)
class _WeightsOrigin:
    """The origin of a run's weights."""

    base_model: ModelOrigin | None
    """The pretrained model; None for random weights."""
    stages: tuple[TrainingStage, ...]
    """The runs between the pretrained model and this run."""
    legal_files: tuple[Path, ...]
    """The files of the pretrained model's licence."""


def describe_run(run: PreparedRun, fabric: Fabric) -> checkpoints.Description:
    """Return the description of a run for its checkpoints.

    Only rank 0 writes it. On other ranks it lacks the origin of the weights, which needs requests to the hub.
    """
    arguments = run.arguments
    start = run.start
    if fabric.is_global_zero:
        origin = _find_weights_origin(run)
    else:
        origin = _WeightsOrigin(base_model=None, stages=(), legal_files=())

    # Arguments as they were resolved, and how this session splits the work.
    argument_values = flatten(arguments) | {"gradient_accumulation_steps": run.plan.accumulation}
    session_values = argument_values | {"parallelism": run.devices.parallelism}
    session = TrainingSession(
        after_step=start.state.step,
        device=device_name(fabric.device),
        num_devices=fabric.world_size,
        arguments={name: session_values[name] for name in (*SPLIT_ARGUMENTS, "log_step_interval")},
    )
    # Sessions of a checkpoint whose weights alone are used do not belong to this run.
    earlier_sessions: tuple[TrainingSession, ...] = ()
    if start.saved and start.resumes:
        earlier_sessions = start.saved.sessions

    # What --shares names, in the order of the rows.
    mixture_sources: tuple[str, ...] = ()
    mixture_tokens: tuple[dict[str, int], ...] = ()
    if isinstance(run.data, TokenMixture):
        mixture_sources = tuple(source.name for source in run.data.sources)
        mixture_tokens = tuple(run.data.tokens_of(source) for source in run.data.sources)

    return checkpoints.Description(
        state_dict_type=arguments.fsdp.state_dict_type,
        weights_dtype=str(weights_dtype(arguments.model.precision)).removeprefix("torch."),
        data=run.order,
        arguments=argument_values,
        versions=run.versions,
        base_model=origin.base_model,
        attachments=(*run.data.attachments, *origin.legal_files),
        schedule_steps=run.schedules.run_schedule.num_steps,
        lineage=tuple(_movable_branch(branch, run.folder) for branch in start.lineage),
        phase_schedules=saved_schedules(run.schedules),
        phase_parts=run.plan.phase_parts,
        trained_modules=run.model.describe_trained() if run.model.frozen else None,
        device=session.device,
        mixture_sources=mixture_sources,
        mixture_tokens=mixture_tokens,
        sessions=(*earlier_sessions, session),
        stages=origin.stages,
        adapter_base=run.adapter_base,
        reference=run.reference,
        teacher=run.teacher,
        components=run.components,
    )


def saved_schedules(schedules: Schedules) -> tuple[PhaseSchedule, ...]:
    """Return the schedules of phases in the form of trainer.json."""
    phase_schedules = []
    for schedule in schedules.phase_schedules:
        assert schedule.last_step is not None  # only the run's own schedule has no last step
        first_step = schedule.after_step + 1
        phase_schedules.append(PhaseSchedule(first_step, schedule.last_step, schedule.num_steps, schedule.decided_by))
    return tuple(phase_schedules)


def _movable_branch(branch: BranchPoint, run_dir: Path) -> BranchPoint:
    """Return a branch point without the path of the run's own folder, so that the folder can be moved."""
    if branch.is_border_of(run_dir):
        return replace(branch, run=checkpoints.OWN_RUN)
    return branch


def _find_weights_origin(run: PreparedRun) -> _WeightsOrigin:
    """Find the pretrained model that the run's weights come from, the stages since then, and the licence's files.

    An export that is not on the hub is not a base that others could find, so its own base is named instead.
    """
    saved = run.start.saved
    if saved:
        return _WeightsOrigin(saved.base_model, run.start.stages, tuple(legal_files(saved.checkpoint)))
    if run.model.is_new:
        return _WeightsOrigin(base_model=None, stages=(), legal_files=())

    model_name = run.arguments.model.model_name
    origin, licence = find_origin(model_name)
    stages = read_stages(model_name)
    base_model = stages[-1].base_model if stages else None
    if base_model and origin.repository is None:
        origin = replace(origin, name=base_model.name, repository=base_model.repository, revision=base_model.revision)
    return _WeightsOrigin(origin, stages, licence)
