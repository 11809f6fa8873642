"""Choose the checkpoint that a run begins with, without torch, so that a wrong choice is reported immediately."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train import checkpoint as checkpoints
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.cli.launcher import num_restarts
from fabric_train.files.atomic_folder import check_not_inside

if TYPE_CHECKING:
    from fabric_train.arguments import CheckpointArguments, TrainArguments


@dataclass(frozen=True)
class Beginning:
    """The start of a run."""

    arguments: "TrainArguments"
    """The user's arguments, with ``--model_name`` and ``--init_adapter`` resolved to checkpoints."""
    start_from: "CheckpointArguments"
    """The arguments about the start that apply, also after a restart."""
    saved: checkpoints.TrainerJson | None
    """The trainer.json of the run's own checkpoint, a named one, or a branch's; None if the run begins with step 1."""


def choose_beginning(arguments: "TrainArguments", folder: Path, damages: checkpoints.Damages | None) -> Beginning:
    """Choose the checkpoint that a run in an output folder begins with.

    A restart by torchrun resumes from the run's newest checkpoint, if there is one. If ``--model_name`` is a
    checkpoint or a run, its weights are used by a run that neither begins with another checkpoint nor continues.
    """
    start_from = arguments.checkpoint
    model = arguments.model

    # a restart continues what the first start has begun
    if num_restarts():
        start_from = replace(start_from, resume=True)
        if checkpoints.newest_checkpoint(folder, damages):
            start_from = replace(start_from, checkpoint=None, branch=None, weights_only=False)
    start_from = _continue_branch(start_from, folder, damages)

    # a --model_name that is a checkpoint, and an --init_adapter that is a run
    has_other_start = bool(model.family or start_from.checkpoint or start_from.branch)
    names_checkpoint = not has_other_start and checkpoints.means_checkpoint(Path(model.model_name))
    if names_checkpoint:
        continues_run = start_from.resume and checkpoints.newest_checkpoint(folder, damages) is not None
        if not continues_run:
            start_from = replace(start_from, checkpoint=model.model_name, weights_only=True)
            arguments = replace(arguments, checkpoint=start_from)
    arguments = _with_adapter_of_run(arguments, damages)

    checkpoint = checkpoints.choose_checkpoint(
        folder,
        named_checkpoint(start_from),
        resume=start_from.resume,
        weights_only=start_from.weights_only,
        read_only=arguments.evaluation.only_reads,
        damages=damages,
    )
    if checkpoint is None:
        return Beginning(arguments, start_from, saved=None)
    check_not_inside(folder, checkpoint)
    return Beginning(arguments, start_from, checkpoints.read_trainer_json(checkpoint))


def _with_adapter_of_run(arguments: "TrainArguments", damages: checkpoints.Damages | None) -> "TrainArguments":
    """Replace a run, or a name such as RUN/best, in ``--init_adapter`` by the checkpoint that it means."""
    init_adapter = arguments.adapter.init_adapter
    if init_adapter is None or not checkpoints.means_checkpoint(Path(init_adapter)):
        return arguments
    with naming_option(f"--init_adapter {init_adapter}", instead_of=init_adapter):
        checkpoint = checkpoints.find_checkpoint(Path(init_adapter), damages)
    return replace(arguments, adapter=replace(arguments.adapter, init_adapter=str(checkpoint)))


def named_checkpoint(start_from: "CheckpointArguments") -> str | None:
    """Return the user's name for the checkpoint to start from; None for the newest of the run."""
    if start_from.branch:
        return str(checkpoints.branch_point(start_from.branch))
    return start_from.checkpoint


def _continue_branch(
    start_from: "CheckpointArguments", folder: Path, damages: checkpoints.Damages | None
) -> "CheckpointArguments":
    """Return the arguments about the start: a branch that has begun resumes in its folder with ``--resume true``."""
    if start_from.branch is None:
        return start_from
    trunk, step = checkpoints.split_branch(start_from.branch)
    if os.path.realpath(trunk) in (os.path.realpath(folder), os.path.realpath(folder / "checkpoints")):
        raise InputError(
            f"--branch {start_from.branch}: --output_dir {folder} is the run to branch from; give another --output_dir"
        )
    newest = checkpoints.newest_checkpoint(folder, damages) if start_from.resume else None
    if newest is None:
        return start_from

    # the run in the folder must be the branch that is named
    lineage = checkpoints.read_trainer_json(newest).lineage
    branch_points = [point for point in lineage if not point.is_border_of(folder)]
    origin = "no branch"
    if branch_points:
        branch_point = branch_points[-1]
        if branch_point.run == os.path.abspath(trunk) and step in (str(branch_point.step), "latest", "best"):
            return replace(start_from, branch=None)
        origin = f"a branch of {branch_point.run}@{branch_point.step}"
    raise InputError(
        f"--branch {start_from.branch}: the run in --output_dir {folder} is {origin}; leave --branch out to resume it, "
        "or give another --output_dir"
    )
