"""The parts that a run uses by name, as its checkpoints have them, and what differs from another checkpoint's.

A run goes on with the objective and the optimizer that it began with: a part that a script had registered would
otherwise give way to the default without a word, and the loss with it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.tables import LOGGERS, METRICS, OBJECTIVES, OPTIMIZERS, PROJECT, Component, resolve_settings
from fabric_train.training.objective import Objective

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.checkpoint import TrainerJson

_DECIDING = ("objective", "optimizer")
"""Kinds of parts of which a run has one, and which decide its losses."""


def components_of(arguments: "TrainArguments", objective: Objective) -> tuple[Component, ...]:
    """Return the objective and the optimizer of a run, and the metrics and loggers that were registered."""
    chosen = arguments.preference
    training = arguments.training
    own_values = _plain_values(objective) if OBJECTIVES.module_of(chosen.objective) != PROJECT else {}
    settings = own_values | resolve_settings(OBJECTIVES, chosen.objective, chosen.objective_settings)
    of_optimizer = resolve_settings(OPTIMIZERS, training.optimizer, training.optimizer_settings)
    registered = [METRICS.describe(name) for name in arguments.evaluation.computed_metrics]
    opened = arguments.logging.opened_loggers
    registered += [LOGGERS.describe(name) for name in opened if name in LOGGERS.registered]
    return (
        OBJECTIVES.describe(chosen.objective, settings),
        OPTIMIZERS.describe(training.optimizer, of_optimizer),
        *registered,
    )


def _plain_values(objective: Objective) -> dict[str, Any]:
    """Return the numbers and texts that a registered objective keeps: settings that its factory has filled in."""
    plain = (str, int, float, bool)
    return {name: value for name, value in getattr(objective, "__dict__", {}).items() if isinstance(value, plain)}


def find_other_components(
    saved: "TrainerJson", here: tuple[Component, ...], kinds: tuple[str, ...] = _DECIDING
) -> Iterator[tuple[Component, Component]]:
    """Yield the objective and the optimizer of a checkpoint, each with the one here, where they differ.

    Objectives that are both this project's own are compared as arguments.
    """
    for kind in kinds:
        there = saved.component(kind)
        now = component(here, kind)
        is_argument = kind == "objective" and there.is_own and now.is_own
        if not is_argument and not there.computes_as(now):
            yield there, now


def component(components: tuple[Component, ...], kind: str) -> Component:
    """Return the objective or the optimizer among the parts of a run."""
    return next(one for one in components if one.kind == kind)


def describe_other_component(checkpoint: Path, there: Component, here: Component, consequence: str) -> str:
    """Return the fault of a run that uses another part than the checkpoint that it starts from."""
    return (
        f"{checkpoint} is of a run with the {there}, and this one has the {here}: {there.advice}, or accept "
        f"{consequence} with --allow_changes true (docs/reference/errors.md#resume-refused)"
    )


def notes_on_components(saved: "TrainerJson", here: tuple[Component, ...], checkpoint: Path) -> list[str]:
    """Return what else has changed of the parts since a checkpoint: files with their code, metrics and loggers."""
    notes = []
    now = {(one.kind, one.name): one for one in here}
    for there in saved.components:
        same = now.get((there.kind, there.name))
        if same is None and there.kind not in _DECIDING:
            notes.append(f"{there}, which the run had at {checkpoint.name}, is missing now; {there.advice}")
        elif same is not None and there.source and same.source and there.source != same.source:
            notes.append(f"the file of the {there} has changed since {checkpoint.name}: what it computes may differ")
    return notes
