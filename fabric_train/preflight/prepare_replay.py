"""Prepare to train steps of a run again: from which checkpoint, with which arguments, and what differs already."""

import math
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fabric_train import checkpoint as checkpoints
from fabric_train.checkpoint.trainer_json import TrainerJson, find_unreadable
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import flatten
from fabric_train.data.streaming import Stream
from fabric_train.data.token_dataset import Rows, TokenDataset
from fabric_train.data.token_mixture import TokenMixture
from fabric_train.distributed.strategy import count_devices, resolve_accelerator
from fabric_train.model.origin import SPLIT_ARGUMENTS
from fabric_train.preflight import resume_check
from fabric_train.preflight.phases import read_stretches, stretch_of
from fabric_train.preflight.prepare import prepare
from fabric_train.token_dataset.document_index import DocumentIndex, altered_rows, open_index
from fabric_train.training.metrics import Metrics, read_metrics
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.replay_certificate import Replay, RunLayout

if TYPE_CHECKING:
    from fabric_train.arguments import DeviceArguments, FSDPArguments, TrainArguments

_ROWS_PER_READ = 1024
_LISTED_DOCUMENTS = 3
_SKIPPED = "not checked, since something else differs"


def prepare_replay(
    folder: Path, steps: tuple[int, int], given: "TrainArguments", device: "DeviceArguments", temporary: Path
) -> Replay:
    """Prepare the first to the last of ``steps``, and compare arguments, data and rows with the checkpoint's.

    ``given`` are the arguments in the config.yaml of the run in ``folder``, ``device`` the devices of the replay.
    ``temporary`` is an empty folder in place of the run's.
    """
    first, last = steps
    logged = _read_logged(folder / "metrics.csv", first, last)
    start = checkpoints.newest_checkpoint(folder, before_step=first)
    saved_after = checkpoints.checkpoint_from(folder, last)
    witness = saved_after or checkpoints.newest_checkpoint(folder)
    if witness is None:
        raise InputError(f"{folder}: the run has no complete checkpoint that describes it; replay needs one")
    saved = checkpoints.read_trainer_json(witness)
    newest = checkpoints.read_trainer_json(checkpoints.newest_checkpoint(folder) or witness)
    (layout,) = _layouts_there(newest, saved, last, last)
    run = prepare(_arguments(given, device, layout, start, saved, temporary), compares=False)
    if run.start.state.step >= first:
        raise InputError(f"--steps {first}:{last}: the run begins at step {run.start.state.step + 1}; give later steps")
    if last > run.plan.num_steps:
        its = f"{folder / 'config.yaml'} ends at step {run.plan.num_steps} (--max_step, --number_epochs)"
        raise InputError(f"--steps {first}:{last}: {its}; put the file of this run back, or give earlier steps")
    if last > (border := run.last_loop_step):
        raise InputError(
            f"--steps {first}:{last}: other parts of the model train, or other data are read, after step {border}; "
            "give steps up to it, or steps after it, if its checkpoint is still there"
        )
    if checkpoints.data_starts_after(saved.lineage) != run.plan.data_starts_after:
        raise InputError(
            f"--steps {first}:{last}: no checkpoint has their token datasets any more, {witness.name} has others; "
            "give steps after it"
        )
    run = _with_schedules(run, saved_after) if saved_after else resume_check.choose_schedule(run, witness)[0]
    state = replace(run.start.state, unlogged=None)  # nothing of the step before is logged again
    run = replace(run, start=replace(run.start, state=state))
    trained = [row for row in logged if row.step > state.step]
    faults = _faults_of_arguments(given, saved, newest, run, witness, last)
    faults += saved.data_changes(run.order)
    faults += _missing_rows(trained, newest, saved, state.step, last)
    evaluations = _evaluations(folder, state.step, last)
    faults += [
        f"step {row.step}, val_loss: {'empty' if row.val_loss is None else row.val_loss} in metrics.csv, "
        f"{evaluations[row.step]} in the checkpoint of the step"
        for row in trained
        if row.step in evaluations and row.val_loss != evaluations[row.step]
    ]
    wrong, contents = _check_rows(run, trained, last) if not faults else ([], _SKIPPED)
    computed = {"gradient_accumulation_steps": run.plan.accumulation, "parallelism": run.devices.parallelism}
    resolved = flatten(run.arguments) | computed
    split = {name: resolved[name] for name in SPLIT_ARGUMENTS}
    return Replay(
        folder=folder,
        steps=steps,
        run=run,
        logged=trained,
        evaluations=evaluations,
        run_layouts=_layouts_there(newest, saved, state.step + 1, last),
        replay_layout=RunLayout(run.devices.world_size, None, split),
        contents=contents,
        faults=[*faults, *wrong],
        other_versions=[f"{change}" for change in resume_check.find_version_changes(saved.versions, run)],
    )


def _with_schedules(run: PreparedRun, checkpoint: Path) -> PreparedRun:
    """Give the learning-rate schedules the lengths that a later checkpoint names."""
    saved = checkpoints.read_trainer_json(checkpoint)
    if math.isfinite(saved.schedule_steps):
        run = run.with_schedule(replace(run.schedules.run_schedule, num_steps=int(saved.schedule_steps)))
    lengths = {phase.first_step: phase.num_steps for phase in saved.phase_schedules}
    for phase in run.plan.phases:
        if phase.schedule and phase.first_step in lengths:
            run = run.with_schedule(replace(phase.schedule, num_steps=lengths[phase.first_step]))
    return run


def _read_logged(table: Path, first: int, last: int) -> list[Metrics]:
    every = read_metrics(table, sys.maxsize)
    rows = [row for row in every if row.step <= last]
    if not rows or rows[-1].step < first or every[-1].step < last:
        has = f"the steps {every[0].step} to {every[-1].step}" if every else "no steps"
        raise InputError(f"--steps {first}:{last}: {table} has {has}; give steps that are logged there")
    return rows


def _arguments(
    given: "TrainArguments",
    device: "DeviceArguments",
    there: RunLayout,
    start: Path | None,
    saved: TrainerJson,
    temporary: Path,
) -> "TrainArguments":
    """Return the run's arguments on these devices: with the same windows, and without outputs of its own."""
    num_devices = count_devices(device.devices, resolve_accelerator(device.accelerator)) * device.num_nodes
    fsdp = given.fsdp if num_devices == there.num_devices else _on_other_devices(given.fsdp, num_devices)
    num_ranks = num_devices // fsdp.ranks_of_rows
    rows = saved.data.rows_per_window
    if rows % num_ranks:
        raise InputError(f"--devices: {num_ranks} devices cannot share the {rows} rows of a step equally; give another")
    sizes = range(1, given.training.micro_batch_size + 1)
    micro_batch_size = max(size for size in sizes if rows // num_ranks % size == 0)
    origin = replace(given.checkpoint, resume=False)
    if start:
        origin = replace(origin, checkpoint=str(start), branch=None, weights_only=False)
    elif trunks := [one for one in saved.lineage if not one.is_border_of(Path(given.save.output_dir))]:
        last = trunks[-1]
        origin = replace(origin, checkpoint=None, branch=f"{last.run}@{last.step}", weights_only=False)
    training = replace(
        given.training, total_batch_size=rows, micro_batch_size=micro_batch_size, on_nonfinite="skip"
    )  # a step that is not finite here is compared like any other
    return replace(
        given,
        device=device,
        fsdp=fsdp,
        checkpoint=origin,
        training=training,
        evaluation=replace(given.evaluation, eval_only=False, self_check=False),
        save=replace(given.save, output_dir=str(temporary)),
        logging=replace(given.logging, loggers=["csv"], log_model="none", log_step_interval=1, profile=None),
        planning=replace(given.planning, plan=False, device_memory=None, interconnect=None, network=None),
    )


def _on_other_devices(fsdp: "FSDPArguments", num_devices: int) -> "FSDPArguments":
    """Return arguments of parallelism that work on another number of devices, as near to the run's as can be."""
    if num_devices == 1:
        alone = replace(fsdp, parallelism="auto", cpu_offload=False, gradient_reduction="step")
        return replace(alone, tensor_parallel_size=1, context_parallel_size=1)
    size = fsdp.tensor_parallel_size if num_devices % fsdp.tensor_parallel_size == 0 else 1
    of_rows = fsdp.context_parallel_size if num_devices // size % fsdp.context_parallel_size == 0 else 1
    parallelism = "auto" if fsdp.parallelism == "single" else fsdp.parallelism
    return replace(fsdp, parallelism=parallelism, tensor_parallel_size=size, context_parallel_size=of_rows)


def _layouts_there(newest: TrainerJson, saved: TrainerJson, first: int, last: int) -> list[RunLayout]:
    """Return how the steps ``first`` to ``last`` were split, by session.

    ``newest`` has all sessions of the run; ``saved``, of the checkpoint after the steps, is for one without arguments.
    """
    ends = [session.after_step for session in newest.sessions[1:]] + [math.inf]
    layouts = []
    for session, end in zip(newest.sessions, ends, strict=True):
        if session.after_step < min(end, last) and end >= first:
            first_step = max(first, session.after_step + 1)
            layout = RunLayout(session.num_devices, session.device, session.arguments, first_step)
            if not session.arguments and [one.after_step for one in saved.sessions[-1:]] == [session.after_step]:
                own = _layout_of_checkpoint(saved)  # an earlier version has the arguments only there
                layout = replace(own, num_devices=session.num_devices, first_step=first_step)
            layouts.append(layout)
    return layouts or [_layout_of_checkpoint(saved)]


def _layout_of_checkpoint(saved: TrainerJson) -> RunLayout:
    """Return how the last steps before a checkpoint were split, from the arguments in its trainer.json."""
    arguments = saved.arguments
    of_rank = arguments["micro_batch_size"] * arguments["gradient_accumulation_steps"]
    of_rows = arguments.get("tensor_parallel_size", 1) * arguments.get("context_parallel_size", 1)
    num_devices = saved.data.rows_per_window // of_rank * of_rows
    split = {name: arguments.get(name) for name in SPLIT_ARGUMENTS}
    if split["parallelism"] == "auto":
        split["parallelism"] = "fsdp" if num_devices > 1 else "single"
    return RunLayout(num_devices, saved.content.get("device"), split)


def _missing_rows(
    logged: list[Metrics], newest: TrainerJson, saved: TrainerJson, after_step: int, last: int
) -> Iterator[str]:
    """Yield a line for each step after ``after_step`` up to ``last`` that the run's interval logs and has no row."""
    there = {row.step for row in logged}
    if newest.state.unlogged:
        there.add(newest.state.step)  # a signal interrupted its evaluation, and the row comes with the next session
    for step in range(after_step + 1, last + 1):
        session = newest.session_of(step)
        given = session.arguments if session and session.arguments else saved.arguments
        if step not in there and step % given.get("log_step_interval", 1) == 0:
            yield f"step {step}: its row is missing in metrics.csv"


def _evaluations(folder: Path, after_step: int, last: int) -> dict[int, float]:
    found = {}
    for step, checkpoint in checkpoints.saved_checkpoints(folder).items():
        if after_step < step <= last and find_unreadable(checkpoint) is None:
            evaluation = checkpoints.read_trainer_json(checkpoint).state.evaluation
            if evaluation is not None and evaluation.step == step:
                found[step] = evaluation.whole.loss
    return found


def _faults_of_arguments(
    given: "TrainArguments", saved: TrainerJson, newest: TrainerJson, run: PreparedRun, witness: Path, last: int
) -> list[str]:
    """Return a line for each argument of config.yaml, which ``newest`` wrote, that makes other losses."""
    stretches = read_stretches(given)
    there = stretches[stretch_of(stretches, last)].arguments
    also = ["total_batch_size"]
    num_devices = {session.num_devices for saved_by in (saved, newest) for session in saved_by.sessions[-1:]}
    if there.training.total_batch_size is None and len(num_devices) < 2:
        also += ["micro_batch_size", "gradient_accumulation_steps"]
    if run.start.checkpoint is None:
        also += [field.name for field in fields(given.model)]
    changes = resume_check.find_changes(saved.arguments, flatten(there), also)
    changes += resume_check.find_changes_of_begun_phases(run, saved, last)
    in_data = () if isinstance(run.data, Stream) else ("seed",)
    return [
        f"{change.place}: {change.there} in {witness.name}/trainer.json, {change.here} in config.yaml"
        for change in changes
        if change.name not in in_data
    ]


def _check_rows(run: PreparedRun, logged: list[Metrics], last: int) -> tuple[list[str], str]:
    """Compare the rows of the steps with the logged hashes and checksums; return faults, and a line on the content."""
    if isinstance(run.data, Stream):
        return [], "not checked: the sources of a stream are compared by name, size and hash"
    order = run.plan.window_order(run.arguments.data.seed)
    before = run.plan.data_starts_after
    state = run.start.state
    rows_hash = order.rows_hash(state.step - before) if state.step >= before else ""
    if state.rows_hash is not None and state.step > before and rows_hash != state.rows_hash:
        return [f"the rows up to step {state.step}: hash {state.rows_hash} there, {rows_hash} here"], _SKIPPED
    there = {row.step: row.rows_hash for row in logged}
    chosen: list[np.ndarray] = []
    for step in range(state.step + 1, last + 1):
        rows = order.rows_of(step - before)
        rows_hash = order.rows_hash_after(step - before, rows, rows_hash)
        if there.get(step) not in (None, rows_hash):
            return [f"step {step}, rows_hash: {there[step]} in metrics.csv, {rows_hash} here"], _SKIPPED
        chosen.append(rows)
    return _check_contents(run, np.unique(np.concatenate(chosen)))


def _check_contents(run: PreparedRun, rows: np.ndarray) -> tuple[list[str], str]:
    """Compare rows, int64 indices into the train split, with the checksums in the document index."""
    data = run.data
    assert isinstance(data, TokenDataset | TokenMixture)
    places = [data.train.locate(row) if isinstance(data, TokenMixture) else (0, row) for row in rows.tolist()]
    faults: list[str] = []
    unknown: list[str] = []
    for number, part in enumerate(data.parts):
        own = [row for of_part, row in places if of_part == number]
        index = open_index(part.folder, part.manifest, "train") if part.manifest else None
        if index is None or index.checksums is None:
            unknown += [part.folder.name] * bool(own)
        else:
            stored = Rows(part.train.split)  # with the borders of documents, also where a run joins them
            for begin in range(0, len(own), _ROWS_PER_READ):
                read = own[begin : begin + _ROWS_PER_READ]
                altered = altered_rows(stored.read(read), index.checksums[read])
                faults += [_describe_row(part.folder, read[place], index) for place in altered]
    if unknown:
        return faults, f"not checked: {', '.join(unknown)} has no checksums, because an older version wrote it"
    return faults, f"{len(rows):,} rows checked, {len(faults):,} altered"


def _describe_row(folder: Path, row: int, index: DocumentIndex) -> str:
    documents = dict.fromkeys(index.pieces(np.array([row])).documents.tolist())
    named = [str(index.origin(document)) for document in list(documents)[:_LISTED_DOCUMENTS]]
    more = f" and {len(documents) - len(named)} more" if len(documents) > len(named) else ""
    return f"{folder / 'train'}, row {row} has changed since it was tokenized; its documents: {'; '.join(named)}{more}"
