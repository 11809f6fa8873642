"""Compare a run with the checkpoint that it resumes from: data, arguments, versions, number of steps."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.checkpoint import DataOrder, StreamOrder, TrainerState, find_data_changes, read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import flatten
from fabric_train.data.step_sampler import VALIDATION_VERSION
from fabric_train.data.token_dataset import TokenDataset
from fabric_train.model.hf_model import ModelShape
from fabric_train.model.packed_forward import VARLEN
from fabric_train.optim.lr_schedule import SCHEDULES_VERSION, learning_rate
from fabric_train.training.prepared_run import PreparedRun, StepPlan

if TYPE_CHECKING:
    from arguments import TrainArguments

# A change of one of these changes the losses from the next step on. Devices, parallelism and micro-batches only split
# the same windows in another way. What fixes the data order is compared by content and not by name, see DataOrder.
_DECIDE_THE_LOSSES = (
    *("lr", "min_lr", "lr_decay", "lr_schedule", "warmup_steps", "decay_steps", "decay_share", "decay_form"),
    *("weight_decay", "beta1", "beta2", "grad_clip"),
    *("precision", "float8", "optimizer_states", "stochastic_rounding"),
    *("attention", "isolate_documents", "seed", "eval_iters"),
)
_ATTENTION = "fabric_train attention"
OWN_VERSIONS = {
    "fabric_train learning rates": SCHEDULES_VERSION,
    "fabric_train validation rows": VALIDATION_VERSION,
    _ATTENTION: "1",
}
"""Versions of what this program itself computes; checkpoints from before they were counted have version 1."""

_OF_THIS_START = ("resume", "checkpoint", "weights_only", "allow_changes", "eval_only", "self_check")


def own_versions(model: ModelShape) -> dict[str, str]:
    """Return :data:`OWN_VERSIONS` for a model; ``sdpa`` with the borders of documents is version 2 of attention."""
    return OWN_VERSIONS | ({_ATTENTION: "2"} if model.config._attn_implementation == VARLEN else {})


@dataclass(frozen=True)
class Change:
    """An argument whose value differs from the checkpoint's."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.there)} -> {_shown(self.here)}"


def check_resume(run: PreparedRun, checkpoint: Path) -> list[str]:
    """Check that a resumed run continues with the steps that its checkpoint's run would have taken.

    Args:
        run: the run as it is prepared now.
        checkpoint: that it resumes from.

    Returns:
        Notes for the user.

    Raises:
        InputError: one line for each difference that would change those steps.
    """
    arguments, plan, state = run.arguments, run.plan, run.start.state
    saved = read_trainer_json(checkpoint)
    faults = find_data_changes(checkpoint, run.order) or _faults_of_rows(run, checkpoint)
    changes = list(_changes(saved["arguments"], _as_saved(arguments, plan)))
    deciding = [change for change in changes if _decides(change, arguments) and not _in_data(change, run.order)]
    if not arguments.checkpoint.allow_changes:
        faults += [
            f"{change} since {checkpoint}, which changes the losses to come; give --{change.name} "
            f"{_shown(change.there)}, or accept other losses with --allow_changes true"
            for change in deciding
        ]
    if faults:
        raise InputError(*faults)
    others = [change for change in changes if change not in deciding]
    notes = [f"changed since {checkpoint.name}: {', '.join(map(str, others))}"] if others else []
    if deciding:
        notes.append(
            f"changed since {checkpoint.name}, so the losses to come differ from those of an unchanged run: "
            + ", ".join(map(str, deciding))
        )
    updated = list(_changes(dict.fromkeys(OWN_VERSIONS, "1") | saved["versions"], run.versions))
    updated = [change for change in updated if _concerns(change.name, arguments)]
    if updated:
        notes.append(
            f"other versions than at {checkpoint.name}, the losses to come may differ: {', '.join(map(str, updated))}"
        )
    return [*notes, *_note_on_steps(saved["arguments"], state, arguments, plan)]


def _faults_of_rows(run: PreparedRun, checkpoint: Path) -> list[str]:
    """Compare the hash of the rows up to the checkpoint's step, unless that is beyond the run's last one.

    The lanes of a stream check their own rows.
    """
    if not isinstance(run.data, TokenDataset) or run.start.state.step > run.plan.num_steps:
        return []
    step, saved = run.start.state.step, run.start.state.rows_hash
    here = run.plan.window_order(run.arguments.data.seed).rows_hash(step)
    if here == saved:
        return []
    return [
        f"{checkpoint}: up to step {step} its run took other rows than would be taken here (hash {saved} there, {here} "
        "here); resume with the version of fabric_train and numpy that saved it, or take its weights alone with "
        "--weights_only true"
    ]


def _as_saved(arguments: "TrainArguments", plan: StepPlan) -> dict[str, Any]:
    """Return the arguments of this run as a checkpoint would save them."""
    return flatten(arguments) | {"gradient_accumulation_steps": plan.accumulation}


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Change]:
    """Compare the names that both have: an argument unknown to one version of the program decides nothing there."""
    for name, value in here.items():
        if name in there and name not in _OF_THIS_START and there[name] != value:
            yield Change(name, there[name], value)


def _decides(change: Change, arguments: "TrainArguments") -> bool:
    """Whether the losses change. The size of validation batches matters only if their number is limited."""
    if change.name == "eval_batch_size":
        return arguments.evaluation.eval_iters is not None
    return change.name in _DECIDE_THE_LOSSES


def _concerns(package: str, arguments: "TrainArguments") -> bool:
    """Whether a run uses what another version of a package, or of this program, computes in another way."""
    training = arguments.training
    uses = {
        "fabric_train learning rates": training.lr_decay and training.lr_schedule != "constant",
        "fabric_train validation rows": arguments.evaluation.eval_iters is not None,
    }
    return uses.get(package, True)


def _in_data(change: Change, order: DataOrder | StreamOrder) -> bool:
    """Whether the comparison of the data order already reports this change."""
    return change.name == "seed" and isinstance(order, DataOrder)


def _note_on_steps(
    saved: Mapping[str, Any], state: TrainerState, arguments: "TrainArguments", plan: StepPlan
) -> Iterator[str]:
    """Report a number of steps that changes the learning rate of the next step."""
    epochs, max_step = (saved.get(name, getattr(arguments.training, name)) for name in ("number_epochs", "max_step"))
    in_epochs = epochs * plan.windows_per_epoch if plan.windows_per_epoch else None
    before = min(steps for steps in (max_step, in_epochs) if steps is not None)
    step = state.step + 1
    was, now = (learning_rate(step, num_steps, arguments.training) for num_steps in (before, plan.num_steps))
    if plan.num_steps > state.step and was != now:
        ended = learning_rate(state.step, before, arguments.training)
        yield (
            f"the run has {plan.num_steps} steps now and had {before}, and the learning rate follows from that: "
            f"{ended:g} at step {state.step}, {now:g} at step {step}"
        )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
