"""Prepare to train steps of a run again: choose checkpoint and arguments, and find what already differs."""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint.trainer_json import TrainerJson
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import flatten
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import Rows, TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.strategy import count_devices, resolve_accelerator
from fabric_train.model.origin import SPLIT_ARGUMENTS
from fabric_train.optim.learning_rate import Schedules
from fabric_train.preflight import resume_check
from fabric_train.preflight.phases import read_stretches, stretch_of
from fabric_train.preflight.prepare import prepare
from fabric_train.token_dataset.document_index import DocumentIndex, altered_rows, open_index
from fabric_train.training.metrics import Metrics, read_metrics
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.replay_comparison import Replay, RunLayout

if TYPE_CHECKING:
    from fabric_train.arguments import DeviceArguments, FSDPArguments, TrainArguments

_ROWS_PER_READ = 1024
_LISTED_DOCUMENTS = 3
_SKIPPED = "not checked, because other things differ"


def prepare_replay(
    folder: Path, steps: tuple[int, int], arguments: "TrainArguments", device: "DeviceArguments", temporary_dir: Path
) -> Replay:
    """Prepare the first to the last of ``steps``, and compare arguments, data and rows with the checkpoint's.

    Args:
        folder: The run's output folder.
        steps: The first and the last step.
        arguments: The arguments in the run's config.yaml.
        device: The devices of the replay.
        temporary_dir: An empty folder that the replay writes to instead of the run's.
    """
    first_step, last_step = steps

    # the records of the run: metrics, the checkpoint to start from, and one that describes the run
    logged = _read_logged(folder / "metrics.csv", first_step, last_step)
    start_checkpoint = checkpoints.newest_checkpoint(folder, before_step=first_step)
    checkpoint_after = checkpoints.checkpoint_from(folder, last_step)
    checkpoint = checkpoint_after or checkpoints.newest_checkpoint(folder)
    if checkpoint is None:
        raise InputError(f"{folder}: the run has no complete checkpoint; replay needs one, since it describes the run")
    saved = checkpoints.read_trainer_json(checkpoint)
    if saved.samples_rows:
        raise InputError(
            f"{folder}: a run with --prompts cannot be replayed, because its rows are sampled; to repeat steps, branch "
            f"from the checkpoint before them (--branch {folder} --output_dir DIR)"
        )
    newest = checkpoints.read_trainer_json(checkpoints.newest_checkpoint(folder) or checkpoint)

    # the run itself, and whether it has these steps
    (last_layout,) = _saved_layouts(newest, saved, last_step, last_step)
    replay_arguments = _arguments_of_replay(
        arguments, device, last_layout, start_checkpoint=start_checkpoint, saved=saved, temporary_dir=temporary_dir
    )
    run = prepare(replay_arguments, compares=False)
    _check_has_steps(run, steps, folder, saved)
    if checkpoint_after:
        run = replace(run, schedules=_with_saved_lengths(run.schedules, saved))
    else:
        run, _ = resume_check.choose_schedule(run, saved)
    state = replace(run.start.state, unlogged=None)  # nothing of the step before is logged again
    run = replace(run, start=replace(run.start, state=state))

    # what differs already, before anything is trained
    replayed_rows = [row for row in logged if row.step > state.step]
    faults = _faults_of_arguments(arguments, saved, newest, run, last_step)
    faults += saved.data_changes(run.order)
    faults += _find_missing_rows(replayed_rows, newest, saved, state.step, last_step)
    validation_losses = _read_validation_losses(folder, state.step, last_step)
    faults += _find_other_losses(replayed_rows, validation_losses)
    row_check = _RowCheck([], _SKIPPED) if faults else _check_rows(run, replayed_rows, last_step)

    resolved = flatten(run.arguments)
    resolved["gradient_accumulation_steps"] = run.plan.accumulation
    resolved["parallelism"] = run.devices.parallelism
    split = {name: resolved[name] for name in SPLIT_ARGUMENTS}
    version_changes = resume_check.find_version_changes(saved.versions, run.versions, run.arguments)
    return Replay(
        folder=folder,
        first_step=first_step,
        last_step=last_step,
        run=run,
        logged=replayed_rows,
        evaluations=validation_losses,
        run_layouts=_saved_layouts(newest, saved, state.step + 1, last_step),
        replay_layout=RunLayout(run.devices.world_size, None, split),
        contents=row_check.summary,
        faults=[*faults, *row_check.faults],
        other_versions=[str(change) for change in version_changes],
    )


def _check_has_steps(run: PreparedRun, steps: tuple[int, int], folder: Path, saved: TrainerJson) -> None:
    """Raise an InputError unless the run has the ``steps``, and the checkpoint ``saved`` describes their data."""
    first_step, last_step = steps
    option = f"--steps {first_step}:{last_step}"
    if run.start.state.step >= first_step:
        raise InputError(f"{option}: the run begins at step {run.start.state.step + 1}; give later steps")
    if last_step > run.plan.num_steps:
        reason = f"{folder / 'config.yaml'} ends at step {run.plan.num_steps} (--max_step, --number_epochs)"
        raise InputError(f"{option}: {reason}; restore this run's file, or give earlier steps")
    if last_step > run.last_loop_step:
        raise InputError(
            f"{option}: after step {run.last_loop_step}, the run trains different parts of the model or reads "
            "different data; give only earlier steps, or only later steps if the checkpoint of that step still exists"
        )
    if checkpoints.data_starts_after(saved.lineage) != run.plan.data_starts_after:
        raise InputError(
            f"{option}: no remaining checkpoint used the token datasets of these steps; {saved.checkpoint.name} used "
            "other datasets; give later steps"
        )


def _find_other_losses(logged: Iterable[Metrics], validation_losses: Mapping[int, float]) -> Iterator[str]:
    """Yield each step whose validation loss in metrics.csv is not the one of the step's checkpoint."""
    for row in logged:
        if row.step in validation_losses and row.val_loss != validation_losses[row.step]:
            logged_loss = "empty" if row.val_loss is None else row.val_loss
            yield (
                f"step {row.step}, val_loss: {logged_loss} in metrics.csv, {validation_losses[row.step]} in the "
                "checkpoint of the step"
            )


def _with_saved_lengths(schedules: Schedules, saved: TrainerJson) -> Schedules:
    """Return the learning-rate schedules with the lengths that a later checkpoint names."""
    if math.isfinite(saved.schedule_steps):
        schedules = schedules.with_length(int(saved.schedule_steps))
    num_steps_by_phase = {phase.first_step: phase.num_steps for phase in saved.phase_schedules}
    for schedule in schedules.phase_schedules:
        first_step = schedule.after_step + 1
        if first_step in num_steps_by_phase:
            schedules = schedules.with_schedule(replace(schedule, num_steps=num_steps_by_phase[first_step]))
    return schedules


def _read_logged(path: Path, first_step: int, last_step: int) -> list[Metrics]:
    """Return the rows of metrics.csv up to the last step; raise an InputError if it does not have the steps."""
    all_rows = read_metrics(path, sys.maxsize)
    rows = [row for row in all_rows if row.step <= last_step]
    if not rows or rows[-1].step < first_step or all_rows[-1].step < last_step:
        logged_steps = f"the steps {all_rows[0].step} to {all_rows[-1].step}" if all_rows else "no steps"
        raise InputError(
            f"--steps {first_step}:{last_step}: {path} has {logged_steps}; give steps that are logged there"
        )
    return rows


def _arguments_of_replay(
    arguments: "TrainArguments",
    device: "DeviceArguments",
    saved_layout: RunLayout,
    start_checkpoint: Path | None,
    saved: TrainerJson,
    temporary_dir: Path,
) -> "TrainArguments":
    """Return the run's arguments for these devices, with the same windows and without outputs."""
    # parallelism: the run's own, unless the number of devices differs
    num_devices = count_devices(device.devices, resolve_accelerator(device.accelerator)) * device.num_nodes
    fsdp = arguments.fsdp
    if num_devices != saved_layout.num_devices:
        fsdp = _on_other_devices(fsdp, num_devices)

    # the same rows in a step, in the largest micro-batches that divide them, up to the run's
    num_data_ranks = num_devices // fsdp.ranks_of_rows
    rows_per_window = saved.data.rows_per_window
    if rows_per_window % num_data_ranks:
        raise InputError(
            f"--devices: {num_data_ranks} devices cannot share the {rows_per_window} rows of a step equally; give "
            "another number"
        )
    rows_per_rank = rows_per_window // num_data_ranks
    micro_batch_size = arguments.training.micro_batch_size
    while rows_per_rank % micro_batch_size:
        micro_batch_size -= 1
    training = replace(
        arguments.training,
        total_batch_size=rows_per_window,
        micro_batch_size=micro_batch_size,
        on_nonfinite="skip",  # a step that is not finite here is compared like any other
    )

    # the start: a checkpoint of the run, or the run that it branched off, or step 1
    start_from = replace(arguments.checkpoint, resume=False)
    run_dir = Path(arguments.save.output_dir)
    trunks = [point for point in saved.lineage if not point.is_border_of(run_dir)]
    if start_checkpoint:
        start_from = replace(start_from, checkpoint=str(start_checkpoint), branch=None, weights_only=False)
    elif trunks:
        branch = f"{trunks[-1].run}@{trunks[-1].step}"
        start_from = replace(start_from, checkpoint=None, branch=branch, weights_only=False)

    return replace(
        arguments,
        device=device,
        fsdp=fsdp,
        checkpoint=start_from,
        training=training,
        evaluation=replace(arguments.evaluation, eval_only=False, self_check=False),
        save=replace(arguments.save, output_dir=str(temporary_dir)),
        logging=replace(arguments.logging, loggers=["csv"], log_model="none", log_step_interval=1, profile=None),
        planning=replace(arguments.planning, plan=False, device_memory=None, interconnect=None, network=None),
    )


def _on_other_devices(fsdp: "FSDPArguments", num_devices: int) -> "FSDPArguments":
    """Return arguments of parallelism for another number of devices, as close to the run's as possible."""
    if num_devices == 1:
        return replace(
            fsdp,
            parallelism="auto",
            cpu_offload=False,
            gradient_reduction="step",
            tensor_parallel_size=1,
            context_parallel_size=1,
        )
    # a size that does not divide the number of devices becomes 1
    tensor_parallel_size = fsdp.tensor_parallel_size
    if num_devices % tensor_parallel_size != 0:
        tensor_parallel_size = 1
    context_parallel_size = fsdp.context_parallel_size
    if num_devices // tensor_parallel_size % context_parallel_size != 0:
        context_parallel_size = 1
    return replace(
        fsdp,
        parallelism="auto" if fsdp.parallelism == "single" else fsdp.parallelism,
        tensor_parallel_size=tensor_parallel_size,
        context_parallel_size=context_parallel_size,
    )


def _saved_layouts(newest: TrainerJson, saved: TrainerJson, first_step: int, last_step: int) -> list[RunLayout]:
    """Return how the windows of the steps ``first_step`` to ``last_step`` were split, by session.

    ``newest`` has all sessions of the run. A session from an earlier version has no arguments; then ``saved``,
    the checkpoint after the steps, describes it.
    """
    sessions = newest.sessions
    session_ends = [session.after_step for session in sessions[1:]] + [math.inf]
    layouts = []
    for session, session_end in zip(sessions, session_ends, strict=True):
        has_no_step = session.after_step >= session_end  # the next session began at the same step
        is_outside = session.after_step >= last_step or session_end < first_step
        if has_no_step or is_outside:
            continue
        first_step_of_session = max(first_step, session.after_step + 1)
        is_last_saved = bool(saved.sessions) and saved.sessions[-1].after_step == session.after_step
        if not session.arguments and is_last_saved:
            layout = replace(
                _layout_of_checkpoint(saved), num_devices=session.num_devices, first_step=first_step_of_session
            )
        else:
            layout = RunLayout(
                num_devices=session.num_devices,
                device=session.device,
                split=session.arguments,
                first_step=first_step_of_session,
            )
        layouts.append(layout)
    if not layouts:
        return [_layout_of_checkpoint(saved)]
    return layouts


def _layout_of_checkpoint(saved: TrainerJson) -> RunLayout:
    """Return how the windows before a checkpoint were split, from the arguments in its trainer.json."""
    arguments = saved.arguments
    rows_per_data_rank = arguments["micro_batch_size"] * arguments["gradient_accumulation_steps"]
    num_data_ranks = saved.data.rows_per_window // rows_per_data_rank
    ranks_of_rows = arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    num_devices = num_data_ranks * ranks_of_rows
    split = {name: arguments.get(name) for name in SPLIT_ARGUMENTS}
    if split["parallelism"] == "auto":
        split["parallelism"] = "fsdp" if num_devices > 1 else "single"
    return RunLayout(num_devices, saved.content.get("device"), split)


def _find_missing_rows(
    logged: list[Metrics], newest: TrainerJson, saved: TrainerJson, after_step: int, last_step: int
) -> Iterator[str]:
    """Yield a line for each step after ``after_step`` that the run should have logged and that metrics.csv lacks."""
    logged_steps = {row.step for row in logged}
    if newest.state.unlogged:
        # a signal interrupted its evaluation, and the row comes with the next session
        logged_steps.add(newest.state.step)
    for step in range(after_step + 1, last_step + 1):
        session = newest.session_of(step)
        arguments = session.arguments if session and session.arguments else saved.arguments
        if step not in logged_steps and step % arguments.get("log_step_interval", 1) == 0:
            yield f"step {step}: its row is missing from metrics.csv"


def _read_validation_losses(folder: Path, after_step: int, last_step: int) -> dict[int, float]:
    """Return the validation losses in the checkpoints of the steps, by step."""
    losses = {}
    for step, checkpoint in checkpoints.saved_checkpoints(folder).items():
        if step <= after_step or step > last_step:
            continue
        try:
            evaluation = checkpoints.read_trainer_json(checkpoint).state.evaluation
        except InputError:  # a damaged checkpoint is not compared
            continue
        if evaluation is not None and evaluation.step == step:  # not that of an earlier step
            losses[step] = evaluation.whole.loss
    return losses


def _faults_of_arguments(
    arguments: "TrainArguments",
    saved: TrainerJson,
    newest: TrainerJson,
    run: PreparedRun,
    last_step: int,
) -> list[str]:
    """Return a line for each argument in config.yaml that differs from ``newest`` and changes the losses."""
    stretches = read_stretches(arguments)
    stretch_arguments = stretches[stretch_of(stretches, last_step)].arguments

    # the rows of a window decide as well; another number of devices splits the same rows by other arguments
    names = ["total_batch_size"]
    last_sessions = [*saved.sessions[-1:], *newest.sessions[-1:]]
    device_counts = {session.num_devices for session in last_sessions}
    has_same_devices = len(device_counts) < 2
    if stretch_arguments.training.total_batch_size is None and has_same_devices:
        names += ["micro_batch_size", "gradient_accumulation_steps"]
    if run.start.checkpoint is None:  # the model of step 1, which may be a new one
        names += [field.name for field in fields(arguments.model)]

    changes = resume_check.find_changes(saved.arguments, flatten(stretch_arguments), names)
    changes += resume_check.find_changes_of_begun_phases(run, saved, last_step)
    if not isinstance(run.data, Stream):  # the comparison of the data order reports the seed
        changes = [change for change in changes if change.name != "seed"]
    return [
        f"{change.argument}: {change.saved_value} in {saved.checkpoint.name}/trainer.json, {change.current_value} in "
        "config.yaml"
        for change in changes
    ]


@dataclass(frozen=True)
class _RowCheck:
    """The result of comparing the rows of the steps."""

    faults: list[str]
    summary: str
    """Whether the content of the rows was checked, and how many are altered."""


def _check_rows(run: PreparedRun, logged: list[Metrics], last_step: int) -> _RowCheck:
    """Compare the rows of the steps with the logged hashes, and their content with checksums."""
    if isinstance(run.data, Stream):
        return _RowCheck([], "not checked: the sources of a stream are compared by name, size and hash")
    order = run.plan.window_order(run.arguments.data.seed)
    data_starts_after = run.plan.data_starts_after
    state = run.start.state

    # the rows up to the start
    num_earlier_windows = state.step - data_starts_after
    rows_hash = ""
    if num_earlier_windows >= 0:
        rows_hash = order.rows_hash(num_earlier_windows)
    if num_earlier_windows > 0 and state.rows_hash is not None and rows_hash != state.rows_hash:
        fault = f"the rows up to step {state.step}: hash {state.rows_hash} in the checkpoint, {rows_hash} here"
        return _RowCheck([fault], _SKIPPED)

    # the rows of each step; the hash of a step continues that of the step before
    logged_hashes = {row.step: row.rows_hash for row in logged}
    rows_of_steps: list[np.ndarray] = []
    for step in range(state.step + 1, last_step + 1):
        rows = order.rows_of(step - data_starts_after)
        rows_hash = order.rows_hash_after(step - data_starts_after, rows, rows_hash)
        logged_hash = logged_hashes.get(step)
        if logged_hash is not None and logged_hash != rows_hash:
            return _RowCheck([f"step {step}, rows_hash: {logged_hash} in metrics.csv, {rows_hash} here"], _SKIPPED)
        rows_of_steps.append(rows)
    return _check_contents(run, np.unique(np.concatenate(rows_of_steps)))


def _check_contents(run: PreparedRun, rows: np.ndarray) -> _RowCheck:
    """Compare rows, int64 indices into the train split, with the checksums in the document index."""
    data = run.data
    assert isinstance(data, TokenDataset | TokenMixture)
    rows_of_datasets: list[list[int]] = [[] for _ in data.parts]
    for row in rows.tolist():
        if isinstance(data, TokenMixture):
            dataset_index, dataset_row = data.train.locate(row)
            rows_of_datasets[dataset_index].append(dataset_row)
        else:
            rows_of_datasets[0].append(row)

    faults: list[str] = []
    without_checksums: list[str] = []
    for dataset, dataset_rows in zip(data.parts, rows_of_datasets, strict=True):
        index = open_index(dataset.folder, dataset.manifest, "train") if dataset.manifest else None
        if index is None or index.checksums is None:
            if dataset_rows:
                without_checksums.append(dataset.folder.name)
            continue
        stored_rows = Rows(dataset.train.split)  # with the borders of documents, also where a run joins them
        for begin in range(0, len(dataset_rows), _ROWS_PER_READ):
            chunk = dataset_rows[begin : begin + _ROWS_PER_READ]
            altered = altered_rows(stored_rows.read(chunk), index.checksums[chunk])
            faults += [_describe_row(dataset.folder, chunk[position], index) for position in altered]
    if without_checksums:
        names = ", ".join(without_checksums)
        return _RowCheck(faults, f"not checked: {names} has no checksums, because an older version wrote it")
    return _RowCheck(faults, f"{len(rows):,} rows checked, {len(faults):,} altered")


def _describe_row(folder: Path, row: int, index: DocumentIndex) -> str:
    """Return the fault for an altered row, with its first documents."""
    documents = list(dict.fromkeys(index.pieces(np.array([row])).documents.tolist()))
    origins = "; ".join(str(index.origin(document)) for document in documents[:_LISTED_DOCUMENTS])
    num_unlisted = len(documents) - _LISTED_DOCUMENTS
    suffix = f" and {num_unlisted} more" if num_unlisted > 0 else ""
    return f"{folder / 'train'}, row {row} has changed since it was tokenized; its documents: {origins}{suffix}"
