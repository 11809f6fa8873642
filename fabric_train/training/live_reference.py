"""Set up the reference of reinforcement learning: a frozen model that reads the same completions as the policy.

Its log-probabilities cannot be stored before the run, as those of preference pairs are (``reference``): the completions
do not exist yet.

The reference of a new adapter is the adapter's base. The policy computes it itself, without its adapter, so there is no
second model. Any other reference is a model beside the policy.

Shapes: N targets in a batch.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from lightning import Fabric

from fabric_train.cli.errors import naming_option
from fabric_train.data.batch import Batch, Targets
from fabric_train.model.adapter import adapters_off
from fabric_train.model.attention import forward_batch
from fabric_train.model.divergence_loss import FullRows
from fabric_train.model.evaluation_mode import evaluation_mode
from fabric_train.model.lm_head_loss import summed_token_loss
from fabric_train.model.origin import ReferenceModel
from fabric_train.model.policy_loss import TargetLogProbabilities
from fabric_train.model.teacher_head import check_head
from fabric_train.training.prepared_run import FrozenModel, PreparedRun
from fabric_train.training.reference_model import (
    check_unchanged,
    hash_reference,
    is_adapter_path,
    reference_run,
    resolve_reference_path,
    with_saved_reference,
)
from fabric_train.training.run_log import progress
from fabric_train.training.teacher import check_teacher_isolation, frozen_run, set_up_teacher


class Reference(Protocol):
    """The model that the policy should stay close to."""

    def read_log_probabilities(self, policy: Any, batch: Batch, targets: Targets, temperature: float) -> torch.Tensor:
        """Return the log-probabilities of the targets of a batch at a temperature, fp32 [N].

        All ranks that share the model call this together, before the policy's own forward pass.
        """


class RowReader(Protocol):
    """What a :class:`ReferenceBesidePolicy` needs of its model, such as ``teacher.LiveTeacher``."""

    def read(self, batch: Batch, targets: Targets) -> FullRows:
        """Return the model's distributions of the targets of a batch."""


@dataclass(frozen=True)
class ReferenceBesidePolicy:
    """A reference with weights of its own."""

    reader: RowReader
    memory_device: str | None = None
    """The type of the device whose memory limits the size of a chunk, see ``lm_head_loss.summed_cross_entropy``."""

    @torch.no_grad()
    def read_log_probabilities(self, policy: Any, batch: Batch, targets: Targets, temperature: float) -> torch.Tensor:
        """Return the log-probabilities of the targets, see ``Reference``; the logits exist for one chunk only."""
        rows = self.reader.read(batch, targets)
        positions = torch.arange(len(targets.ids), device=rows.hidden.device)
        _, values = summed_token_loss(
            rows.hidden,
            rows.head.weight,
            rows.head.bias,
            positions,
            TargetLogProbabilities(targets.ids, temperature),
            memory_device=self.memory_device,
            is_frozen=True,
        )
        return values[0]


class BaseOfPolicy:
    """The base of the policy's adapter as the reference: the policy without its adapter."""

    @torch.no_grad()
    def read_log_probabilities(self, policy: Any, batch: Batch, targets: Targets, temperature: float) -> torch.Tensor:
        """Return the log-probabilities of the targets, see ``Reference``."""
        token_loss = TargetLogProbabilities(targets.ids, temperature)
        with evaluation_mode(policy), adapters_off(policy):
            _, values = forward_batch(policy, batch, positions=targets.positions, token_loss=token_loss)
        return values[0]


def compares_with_base(run: PreparedRun) -> bool:
    """Return whether a run with a reference compares with the base of its adapter, which the policy computes.

    This is not so if ``--reference`` is given, if the adapter had been trained before the run, or if modules of the
    base train too.
    """
    adapter = run.model.adapter
    if adapter is None or adapter.train_also:
        return False
    run, saved = with_saved_reference(run)
    if run.arguments.preference.reference is not None:
        return False
    location = resolve_reference_path(run) if saved is None else saved.location
    return not is_adapter_path(location)


def find_live_reference(run: PreparedRun) -> FrozenModel | None:
    """Return the model beside the policy that reads the completions of each step; None if there is none.

    A plan reads only its configuration.

    Raises:
        InputError: There is no such model.
    """
    if not run.arguments.rollouts.kl_weight or compares_with_base(run):
        return None
    run, saved = with_saved_reference(run)
    location = resolve_reference_path(run) if saved is None else saved.location
    with naming_option("--reference ", instead_of="--model_name "):
        shape = reference_run(run, location).model
    return FrozenModel("reference", shape, shape.adapter.base_weights if shape.adapter else None)


def find_base_as_reference(run: PreparedRun) -> FrozenModel | None:
    """Return the model without its adapter if this is the reference of ``--kl_weight``; None if it is not."""
    adapter = run.model.adapter
    if adapter is None or not run.arguments.rollouts.kl_weight or not compares_with_base(run):
        return None
    return FrozenModel("reference", run.model, adapter.base_weights)


def set_up_live_reference(fabric: Fabric, run: PreparedRun) -> tuple[PreparedRun, Reference]:
    """Set up the model of ``--reference``, by default the one that the run starts from; all ranks call this together.

    Return the run with the record of its reference, and the reference.

    Raises:
        InputError: The weights of the reference have changed since the run began, its logits are not the output of its
            head, or it does not keep the documents of a row apart.
    """
    progress.info("setting up the reference model")
    policy_computes_it = compares_with_base(run)
    run, saved = with_saved_reference(run)
    location = resolve_reference_path(run) if saved is None else saved.location
    model_run = frozen_run(reference_run(run, location))
    check_head(model_run.model, f"the reference model {location}", "rl")
    fingerprint = hash_reference(fabric, model_run, location)
    if saved is not None:
        check_unchanged(saved, fingerprint)
    recorded_run = replace(run, reference=ReferenceModel(location, fingerprint))
    if policy_computes_it:
        return recorded_run, BaseOfPolicy()

    with naming_option("--reference ", instead_of="--model_name "):
        model = set_up_teacher(fabric, model_run)
    check_teacher_isolation(fabric, run, model, f"the reference model {location}")
    return recorded_run, ReferenceBesidePolicy(model)
