"""Choose the checkpoint that a run begins with, without torch: a wrong choice is reported before it is imported."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabric_train import checkpoint as checkpoints
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.cli.launcher import num_restarts
from fabric_train.files.atomic_folder import check_not_inside

if TYPE_CHECKING:
    from fabric_train.arguments import CheckpointArguments, TrainArguments


def choose_beginning(
    arguments: "TrainArguments", folder: Path, damages: checkpoints.Damages | None
) -> tuple["TrainArguments", "CheckpointArguments", Path | None]:
    """Return the arguments, its part about the start, and the checkpoint: the run's own, a named one, or a branch's.

    A restart by torchrun resumes from the run's newest checkpoint, if there is one. A ``--model_name`` that is a
    checkpoint or a run gives the weights of a run that neither begins with another checkpoint nor continues.
    """
    start_from = arguments.checkpoint
    model = arguments.model
    if num_restarts():
        start_from = replace(start_from, resume=True)
        if checkpoints.newest_checkpoint(folder, damages):
            start_from = replace(start_from, checkpoint=None, branch=None, weights_only=False)
    start_from = _continue_branch(start_from, folder, damages)
    is_elsewhere = model.family or start_from.checkpoint or start_from.branch
    takes_weights = not is_elsewhere and checkpoints.means_checkpoint(Path(model.model_name))
    if takes_weights and not (start_from.resume and checkpoints.newest_checkpoint(folder, damages)):
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
    if checkpoint:
        check_not_inside(folder, checkpoint)
    return arguments, start_from, checkpoint


def _with_adapter_of_run(arguments: "TrainArguments", damages: checkpoints.Damages | None) -> "TrainArguments":
    """Replace a run, or a name such as RUN/best, in ``--init_adapter`` by the checkpoint that it means."""
    given = arguments.adapter.init_adapter
    if given is None or not checkpoints.means_checkpoint(Path(given)):
        return arguments
    with naming_option(f"--init_adapter {given}", instead_of=given):
        checkpoint = checkpoints.find_checkpoint(Path(given), damages)
    return replace(arguments, adapter=replace(arguments.adapter, init_adapter=str(checkpoint)))


def named_checkpoint(start_from: "CheckpointArguments") -> str | None:
    """Return what the user calls the checkpoint to start from; None for the newest of the run."""
    return str(checkpoints.branch_point(start_from.branch)) if start_from.branch else start_from.checkpoint


def _continue_branch(
    given: "CheckpointArguments", folder: Path, damages: checkpoints.Damages | None
) -> "CheckpointArguments":
    """Return what a run starts from: a branch that has begun continues in its own folder with ``--resume true``."""
    if given.branch is None:
        return given
    trunk, step = checkpoints.split_branch(given.branch)
    if os.path.realpath(trunk) in (os.path.realpath(folder), os.path.realpath(folder / "checkpoints")):
        raise InputError(f"--branch {given.branch}: --output_dir {folder} is that run; give another --output_dir")
    newest = checkpoints.newest_checkpoint(folder, damages) if given.resume else None
    if newest is None:
        return given
    begun = [one for one in checkpoints.read_trainer_json(newest).lineage if not one.is_border_of(folder)][-1:]
    if not any(one.run == os.path.abspath(trunk) and step in (str(one.step), "latest", "best") for one in begun):
        origin = f"a branch of {begun[0].run}@{begun[0].step}" if begun else "no branch"
        raise InputError(
            f"--branch {given.branch}: the run in --output_dir {folder} is {origin}; leave --branch out to resume it, "
            "or give another --output_dir"
        )
    return replace(given, branch=None)
