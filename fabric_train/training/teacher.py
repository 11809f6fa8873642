"""Set up the teacher of a distillation: a frozen model that is sharded like the student.

The teacher's head is not part of the sharded model. Each rank has all of its weight, because the loss needs it in the
student's head, where the teacher's shards are not gathered. The model returns the inputs of the head instead of logits.

Shapes: N targets in a batch, H the teacher's hidden size, V the rows of its head.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric
from lightning.fabric.wrappers import _FabricModule
from torch import nn

from fabric_train.checkpoint.model_files import resolve_name
from fabric_train.cli.errors import naming_option
from fabric_train.data.batch import Batch, Targets, find_targets
from fabric_train.distributed.precision import compute_dtype, weights_dtype
from fabric_train.model.attention import forward_batch
from fabric_train.model.attention_choice import check_counted_from_rows
from fabric_train.model.divergence_loss import FullRows, TeacherHead
from fabric_train.model.hf_model import ModelShape, check_readable
from fabric_train.model.nf4 import check_installed
from fabric_train.model.parallelize import setup_model
from fabric_train.model.teacher_head import check_head, read_head
from fabric_train.teacher_states.teacher import check_adapted_teacher, hold_teacher
from fabric_train.training.build_run import has_many_lengths, open_model
from fabric_train.training.isolation_check import check_isolation
from fabric_train.training.prepared_run import FrozenModel, PreparedRun
from fabric_train.training.reference_model import check_positions, run_of_model
from fabric_train.training.teacher_vocabulary import find_named_ids


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher that reads the same rows as the student, in the same step."""

    model: _FabricModule
    """The model in evaluation mode; its logits are the inputs of its head, [B, T, H]."""
    head: TeacherHead

    @torch.no_grad()
    def read(self, batch: Batch, targets: Targets) -> FullRows:
        """Return the teacher's distributions of the targets of a batch."""
        hidden = forward_batch(self.model, batch).logits.flatten(0, 1)  # [B * T, H]
        selected = hidden.index_select(0, targets.positions)
        return FullRows(selected.to(self.head.weight.dtype), self.head)  # Fabric returns fp32

    def compute_losses(self, batch: Batch) -> torch.Tensor:
        """Return the teacher's cross entropy of the targets of a batch with few of them, fp32 [N]."""
        targets = batch.targets
        if targets is None:
            targets = find_targets(batch.labels)
        logits = self.read(batch, targets).compute_logits(slice(None))
        return torch.nn.functional.cross_entropy(logits.float(), targets.ids, reduction="none")


def find_teacher(run: PreparedRun) -> FrozenModel | None:
    """Return the model that ``--teacher`` names; None if it is not given. A plan reads only its configuration.

    Raises:
        InputError: There is no such model, or the run's model cannot learn from it.
    """
    teacher = run.arguments.preference.teacher
    if teacher is None:
        return None
    shape = teacher_run(run, resolve_name(teacher)).model
    if not run.arguments.planning.plan:
        _check_teacher(run, shape, teacher)
    teacher_weights = run.arguments.preference.teacher_weights
    base_weights: str | None = None
    if shape.adapter is not None:
        base_weights = shape.adapter.base_weights
    elif teacher_weights != "16bit":
        base_weights = teacher_weights
    return FrozenModel("teacher", shape, base_weights)


def _check_teacher(run: PreparedRun, shape: ModelShape, teacher: str) -> None:
    """Raise an InputError if the run's model cannot learn from the ``teacher`` of this shape."""
    if not (Path(shape.source) / "trainer.json").is_file():
        with naming_option("--teacher ", instead_of="--model_name "):
            check_readable(shape.source)
    check_positions(run, shape, f"--teacher {teacher}")
    if run.data.isolates and shape.longest_row is not None:
        check_counted_from_rows(shape, shape.longest_row)
    if run.arguments.preference.teacher_weights != "16bit":
        check_installed("--teacher_weights")
    find_named_ids(run, shape)
    check_head(run.model, f"--model_name {run.model.source}")
    check_head(shape, f"--teacher {teacher}")


def set_up_teacher(fabric: Fabric, run: PreparedRun) -> LiveTeacher:
    """Set up the model of a run as a teacher; all ranks call this together.

    Args:
        fabric: The Fabric of the student's run.
        run: The :func:`teacher_run`, which :func:`find_teacher` has accepted.
    """
    meta_model = open_model(run)
    model: Any = meta_model.model
    dtype = compute_dtype(run.arguments.model.precision)
    head = read_head(meta_model, fabric.device, dtype)
    stored_dtype = weights_dtype(run.arguments.model.precision)
    meta_model = hold_teacher(meta_model, run.model, stored_dtype, run.arguments.preference.teacher_weights)
    model.set_output_embeddings(nn.Identity())
    model.requires_grad_(False)
    wrapped = setup_model(
        fabric,
        model,
        run.model.layer_classes,
        run.arguments,
        meta_model.weights,
        any_length=has_many_lengths(run),
    )
    return LiveTeacher(wrapped.eval(), head)


def check_teacher_isolation(fabric: Fabric, run: PreparedRun, teacher: LiveTeacher, source: str) -> None:
    """Raise an InputError unless a run's teacher keeps the documents of a row apart, or need not; all ranks call this.

    ``source`` names the teacher in the message.
    """
    row_lengths = [0]
    for successive_run in run.successive_runs:
        longest_row = successive_run.model.longest_row
        if successive_run.data.isolates and longest_row is not None:
            row_lengths.append(longest_row)
    if max(row_lengths) == 0:
        return
    dtype = teacher.head.weight.dtype
    check_isolation(fabric, teacher.model, source, max(row_lengths), dtype, teacher.compute_losses)


def teacher_run(run: PreparedRun, location: str) -> PreparedRun:
    """Return a run whose model is the teacher at ``location``, for :func:`set_up_teacher`.

    Raises:
        InputError: There is no such model.
    """
    with naming_option("--teacher ", instead_of="--model_name "):
        model_run = frozen_run(run_of_model(run, location, "--teacher"))
    teacher_weights = run.arguments.preference.teacher_weights
    if model_run.adapter_base is not None:
        check_adapted_teacher(teacher_weights, location)
        return model_run
    # for ``precision.gathered_dtype``: bytes of weights in 4 bits are not cast
    base_weights = None if teacher_weights == "16bit" else teacher_weights
    arguments = model_run.arguments
    adapter = replace(arguments.adapter, adapter=None, lora_rank=None, init_adapter=None, base_weights=base_weights)
    return replace(model_run, arguments=replace(arguments, adapter=adapter))


def frozen_run(run: PreparedRun) -> PreparedRun:
    """Return a run whose model only reads rows, for :func:`set_up_teacher`.

    It has no backward pass, so it keeps neither activations nor gathered weights. Its weights have the dtype in which
    the model that trains computes.
    """
    arguments = run.arguments
    precision = arguments.model.precision
    if precision == "bf16-mixed":
        precision = "bf16-true"
    fsdp = replace(arguments.fsdp, activation_checkpointing="none", activation_offload=False)
    if fsdp.keeps_gathered:
        fsdp = replace(fsdp, sharding_strategy="HYBRID_SHARD" if fsdp.is_hybrid else "FULL_SHARD")
    model = replace(arguments.model, precision=precision, float8=False)
    return replace(run, arguments=replace(arguments, model=model, fsdp=fsdp))
