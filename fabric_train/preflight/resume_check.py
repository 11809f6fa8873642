"""What forbids to go on from a checkpoint with today's data and arguments, and what the user should know of it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.checkpoint import DataOrder, StreamOrder, TrainerState, faults_of_data, read_trainer_json
from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import flatten
from fabric_train.optim.lr_schedule import learning_rate
from fabric_train.preflight.step_plan import Plan

if TYPE_CHECKING:
    from arguments import TrainArguments

# Whoever changes one of these gets other losses from the next step on. Devices, parallelism and micro-batches only cut
# the same windows otherwise; what fixes the data order is compared by what it is and not by its name, see DataOrder.
_DECIDE_THE_LOSSES = (
    *("lr", "min_lr", "lr_decay", "lr_schedule", "warmup_steps", "weight_decay", "beta1", "beta2", "grad_clip"),
    *("precision", "float8", "optimizer_states", "stochastic_rounding"),
    *("attention", "isolate_documents", "seed", "eval_iters"),
)
_OF_THIS_START = ("resume", "checkpoint", "weights_only", "allow_changes", "eval_only", "self_check")


@dataclass(frozen=True)
class Change:
    """An argument that the checkpoint's run had otherwise."""

    name: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.name}: {_said(self.there)} -> {_said(self.here)}"


def check_resumption(
    checkpoint: Path,
    state: TrainerState,
    order: DataOrder | StreamOrder,
    rows_hash: Callable[[int], str] | None,
    arguments: "TrainArguments",
    plan: Plan,
    versions: Mapping[str, str],
) -> list[str]:
    """Return notes for the user.

    Args:
        checkpoint: to go on from.
        state: that it was saved in.
        order: today's.
        rows_hash: hashes the rows of today's order up to a step; None for a stream, whose lanes look themselves.
        arguments: today's.
        plan: today's.
        versions: today's, of the packages that compute.

    Raises:
        InputError: a line for everything by which the steps to come would not be those that would have come.
    """
    saved = read_trainer_json(checkpoint)
    faults = faults_of_data(checkpoint, order)
    if not faults and rows_hash and (here := rows_hash(state.step)) != state.rows_hash:
        faults.append(
            f"{checkpoint}: up to step {state.step} its run took other rows than would be taken here (hash "
            f"{state.rows_hash} there, {here} here); resume with the version of fabric_train and numpy that saved it, "
            "or take its weights alone with --weights_only true"
        )
    changes = list(_changes(saved["arguments"], _told(arguments, plan)))
    deciding = [change for change in changes if _decides(change, arguments) and not _in_data(change, order)]
    if not arguments.checkpoint.allow_changes:
        faults += [
            f"{change} since {checkpoint}, which changes the losses to come; give --{change.name} {_said(change.there)}"
            ", or go on otherwise with --allow_changes true"
            for change in deciding
        ]
    if faults:
        raise InputError(*faults)
    others = [change for change in changes if change not in deciding]
    notes = [f"changed since {checkpoint.name}: {', '.join(map(str, others))}"] if others else []
    if deciding:
        notes.append(
            f"changed since {checkpoint.name}, so that the losses to come are not those that would have come: "
            + ", ".join(map(str, deciding))
        )
    updated = list(_changes(saved["versions"], versions))
    if updated:
        notes.append(
            f"other versions than at {checkpoint.name}, the losses to come may differ: {', '.join(map(str, updated))}"
        )
    return [*notes, *_note_on_steps(saved["arguments"], state, arguments, plan)]


def _told(arguments: "TrainArguments", plan: Plan) -> dict[str, Any]:
    """Return today's arguments as a checkpoint tells them."""
    return flatten(arguments) | {"gradient_accumulation_steps": plan.accumulation}


def _changes(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[Change]:
    """Compare what both know: an argument that only one version of the program has decides nothing in the other."""
    for name, value in here.items():
        if name in there and name not in _OF_THIS_START and there[name] != value:
            yield Change(name, there[name], value)


def _decides(change: Change, arguments: "TrainArguments") -> bool:
    """Whether other losses follow. Validation batches matter only where they are counted instead of all taken."""
    if change.name == "eval_batch_size":
        return arguments.evaluation.eval_iters is not None
    return change.name in _DECIDE_THE_LOSSES


def _in_data(change: Change, order: DataOrder | StreamOrder) -> bool:
    """Whether the comparison of the data has told this change."""
    return change.name == "seed" and isinstance(order, DataOrder)


def _note_on_steps(
    saved: Mapping[str, Any], state: TrainerState, arguments: "TrainArguments", plan: Plan
) -> Iterator[str]:
    """Say where another number of steps gives the learning rate another course."""
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


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
