"""Set up the reference of reinforcement learning: a frozen model that reads the same completions as the policy.

Its log-probabilities cannot be stored before the run, as those of preference pairs are (``reference``): the completions
do not exist yet.
"""

from dataclasses import replace

from lightning import Fabric

from fabric_train.cli.errors import naming_option
from fabric_train.model.origin import ReferenceModel
from fabric_train.model.teacher_head import check_head
from fabric_train.training.prepared_run import FrozenModel, PreparedRun
from fabric_train.training.reference_model import (
    check_unchanged,
    hash_reference,
    reference_run,
    resolve_reference_path,
    with_saved_reference,
)
from fabric_train.training.run_log import progress
from fabric_train.training.teacher import LiveTeacher, check_teacher_isolation, frozen_run, set_up_teacher


def find_live_reference(run: PreparedRun) -> FrozenModel | None:
    """Return the reference that reads the completions of each step; None without ``--kl_weight``.

    A plan reads only its configuration.

    Raises:
        InputError: There is no such model.
    """
    if not run.arguments.rollouts.kl_weight:
        return None
    run, saved = with_saved_reference(run)
    location = resolve_reference_path(run) if saved is None else saved.location
    with naming_option("--reference ", instead_of="--model_name "):
        shape = reference_run(run, location).model
    return FrozenModel("reference", shape, shape.adapter.base_weights if shape.adapter else None)


def set_up_live_reference(fabric: Fabric, run: PreparedRun) -> tuple[PreparedRun, LiveTeacher]:
    """Set up the model of ``--reference``, by default the one that the run starts from; all ranks call this together.

    Return the run with its reference, and the model.

    Raises:
        InputError: The weights of the reference have changed since the run began, its logits are not the output of its
            head, or it does not keep the documents of a row apart.
    """
    progress.info("setting up the reference model")
    run, saved = with_saved_reference(run)
    location = resolve_reference_path(run) if saved is None else saved.location
    model_run = frozen_run(reference_run(run, location))
    check_head(model_run.model, f"the reference model {location}", "rl")
    fingerprint = hash_reference(fabric, model_run, location)
    if saved is not None:
        check_unchanged(saved, fingerprint)
    with naming_option("--reference ", instead_of="--model_name "):
        model = set_up_teacher(fabric, model_run)
    check_teacher_isolation(fabric, run, model, f"the reference model {location}")
    return replace(run, reference=ReferenceModel(location, fingerprint)), model
