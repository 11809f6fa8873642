"""Train on a teacher's distributions of the next token: the objective of ``--objective distill``.

The loss of a token is the divergence between the distributions of teacher and student (``model.divergences``), plus
``--sft_weight`` times the cross entropy. The loss of a window is the mean over its distilled tokens on all ranks.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning import Fabric

from fabric_train.checkpoint.model_files import resolve_name
from fabric_train.checkpoint.teacher_origin import find_teacher_origin
from fabric_train.cli.errors import InputError, naming_option
from fabric_train.data.batch import Batch, Targets, count_supervised, find_targets
from fabric_train.model.attention import forward_batch
from fabric_train.model.divergence_loss import VALUES, DivergenceLoss, NamedIds, TeacherRows
from fabric_train.model.origin import TeacherModel
from fabric_train.training.objective import BatchLoss
from fabric_train.training.prepared_run import PreparedRun
from fabric_train.training.reference_model import hash_reference
from fabric_train.training.run_log import note, progress
from fabric_train.training.stored_teacher import open_stored_teacher
from fabric_train.training.teacher import check_teacher_isolation, set_up_teacher, teacher_run
from fabric_train.training.teacher_vocabulary import find_named_ids

if TYPE_CHECKING:
    from fabric_train.arguments import PreferenceArguments, TrainArguments

_LIVE = "a teacher that reads the rows"


class Teacher(Protocol):
    """What the loss needs of a teacher, which may be live or stored."""

    def read(self, batch: Batch, targets: Targets) -> TeacherRows:
        """Return the teacher's distributions of the targets of a batch."""


class Distillation:
    """The divergence of the student from its teacher, summed over the targets: all tokens, or the supervised ones."""

    metric_names = VALUES[1:]
    has_token_metrics = True

    def __init__(self, arguments: "PreferenceArguments") -> None:
        self._arguments = arguments
        self._teacher: Teacher | None = None
        self._named_ids: NamedIds | None = None

    def use_teacher(self, teacher: Teacher, named_ids: NamedIds) -> None:
        """Use a teacher, and the token ids that it shares with the student; ``loss`` needs both."""
        self._teacher = teacher
        self._named_ids = named_ids

    def connect(self, fabric: Fabric, run: PreparedRun) -> PreparedRun:
        """Set up the teacher, and return the run with its record; see ``objective.connect_objective``.

        Raises:
            InputError: The teacher's weights have changed since the run began, its vocabulary is not the student's, or
                it does not keep the documents of a row apart.
        """
        progress.info("setting up the teacher")
        states = run.teacher_states
        if states is not None:
            content = states.record.content
            teacher = replace(states.record.teacher, stored_as=content.describe())
            _check_unchanged(fabric, run, teacher, "--teacher_states")
            id_range = content.named_ids
            objective_teacher: Teacher = open_stored_teacher(states, fabric.device)
        else:
            assert self._arguments.teacher is not None  # arguments.py requires one of both
            location = resolve_name(self._arguments.teacher)
            model_run = teacher_run(run, location)
            origin = find_teacher_origin(location)
            teacher = TeacherModel(location, hash_reference(fabric, model_run, location), origin)
            _check_unchanged(fabric, run, teacher, "--teacher")
            id_range = find_named_ids(run, model_run.model)
            with naming_option("--teacher ", instead_of="--model_name "):
                live_teacher = set_up_teacher(fabric, model_run)
            check_teacher_isolation(fabric, run, live_teacher, f"--teacher {location}")
            objective_teacher = live_teacher
        self.use_teacher(objective_teacher, id_range.on_device(fabric.device))
        return replace(run, teacher=teacher)

    def count(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets."""
        return count_supervised(batch.labels)

    def loss(self, model: Any, batch: Batch, scale: torch.Tensor | None = None) -> BatchLoss:
        """Return the loss, 0 if nothing is supervised; see ``Objective.loss``.

        Neither model's logits [B * T, V] exist; ``connect`` or ``use_teacher`` must have been called.
        """
        assert self._teacher is not None
        assert self._named_ids is not None
        targets = batch.targets
        if targets is None:
            targets = find_targets(batch.labels)
        token_loss = DivergenceLoss(
            teacher=self._teacher.read(batch, targets),
            targets=targets.ids,
            named_ids=self._named_ids,
            divergence=self._arguments.divergence,
            jsd_beta=self._arguments.jsd_beta,
            temperature=self._arguments.distill_temperature,
            cross_entropy_weight=self._arguments.sft_weight,
            is_supervised=batch.is_supervised,
        )
        total, values = forward_batch(model, batch, positions=targets.positions, token_loss=token_loss, scale=scale)
        token_losses, *token_metrics = values.detach()
        return BatchLoss(
            total,
            token_losses=token_losses,
            metrics=values[1:].sum(dim=1, dtype=torch.float64),
            token_metrics=torch.stack(token_metrics),
        )


def _check_unchanged(fabric: Fabric, run: PreparedRun, teacher: TeacherModel, option: str) -> None:
    """Raise an InputError if a resumed run has another teacher than the checkpoint's, by its weights or its form.

    A branch may have another teacher, and so may a run with ``--allow_changes``. ``option`` is the argument that names
    the teacher.
    """
    saved = run.start.saved
    if saved is None or saved.teacher is None or not run.start.resumes:
        return
    if saved.teacher.fingerprint != teacher.fingerprint:
        difference = (
            f"{option} {teacher.location}: its weights differ from those of {saved.teacher.location}, the teacher "
            f"when {saved.checkpoint} was saved"
        )
        fix = "restore them"
    elif saved.teacher.stored_as != teacher.stored_as:
        current_form = teacher.stored_as or _LIVE
        saved_form = saved.teacher.stored_as or _LIVE
        difference = (
            f"{option}: the run now learns from {current_form}, but from {saved_form} when {saved.checkpoint} was saved"
        )
        fix = "give the same teacher"
    else:
        return
    if not run.start.branches and not run.arguments.checkpoint.allow_changes:
        raise InputError(
            f"{difference}; {fix}, or accept different losses with --allow_changes true "
            "(docs/reference/errors.md#resume-refused)"
        )
    if fabric.is_global_zero:
        note(f"{difference}, so future losses differ")


def build_distillation(arguments: "TrainArguments") -> Distillation:
    """Build the objective of ``--objective distill``."""
    return Distillation(arguments.preference)
