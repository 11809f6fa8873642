"""Describe the parts that a run uses by name, and find how they differ from a checkpoint's.

A run continues with the objective and the optimizer that it began with. Otherwise the default would silently replace
a part that a script had registered, and the loss would change.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabric_train.cli.tables import LOGGERS, METRICS, OBJECTIVES, OPTIMIZERS, PROJECT, Component, resolve_settings
from fabric_train.rollouts.rewards import describe_rewards
from fabric_train.training.objective import Objective

if TYPE_CHECKING:
    from fabric_train.arguments import TrainArguments
    from fabric_train.checkpoint import TrainerJson

_DECIDING_KINDS = ("objective", "optimizer")
"""The kinds of which a run has exactly one part, which decides its losses."""
_REWARD = "reward"
"""The kind of a function of --rewards, which is an argument; only the content of its file is not."""


def components_of(arguments: "TrainArguments", objective: Objective) -> tuple[Component, ...]:
    """Return the objective and the optimizer of a run, its metrics, registered loggers, and rewards in files."""
    preference = arguments.preference
    training = arguments.training

    # A registered objective may keep more settings than the user gave: values that its factory computed.
    settings = resolve_settings(OBJECTIVES, preference.objective, preference.objective_settings)
    if OBJECTIVES.module_of(preference.objective) != PROJECT:
        settings = _plain_attributes(objective) | settings
    components = [OBJECTIVES.describe(preference.objective, settings)]

    optimizer_settings = resolve_settings(OPTIMIZERS, training.optimizer, training.optimizer_settings)
    components.append(OPTIMIZERS.describe(training.optimizer, optimizer_settings))

    components += [METRICS.describe(name) for name in arguments.evaluation.computed_metrics]
    opened_loggers = arguments.logging.opened_loggers
    components += [LOGGERS.describe(name) for name in opened_loggers if name in LOGGERS.registered]
    components += describe_rewards(arguments.rollouts.rewards or ())
    return tuple(components)


def _plain_attributes(objective: Objective) -> dict[str, Any]:
    """Return the attributes of an objective that are numbers or texts."""
    attributes = getattr(objective, "__dict__", {})
    return {name: value for name, value in attributes.items() if isinstance(value, str | int | float | bool)}


def find_other_components(
    saved: "TrainerJson", components: tuple[Component, ...], kinds: tuple[str, ...] = _DECIDING_KINDS
) -> Iterator[tuple[Component, Component]]:
    """Yield the objective and the optimizer of a checkpoint that differ from the run's, each with the run's.

    Two objectives of this project are not compared here, because they are compared as arguments.
    """
    for kind in kinds:
        saved_part = saved.component(kind)
        current_part = component(components, kind)
        is_argument = kind == "objective" and saved_part.is_own and current_part.is_own
        if not is_argument and not saved_part.computes_as(current_part):
            yield saved_part, current_part


def component(components: tuple[Component, ...], kind: str) -> Component:
    """Return the objective or the optimizer among the parts of a run."""
    return next(candidate for candidate in components if candidate.kind == kind)


def describe_other_component(checkpoint: Path, saved_part: Component, current_part: Component, consequence: str) -> str:
    """Return the fault of a run whose part differs from that of the checkpoint that it starts from."""
    return (
        f"{checkpoint} was saved with the {saved_part}, but this run has the {current_part}; {saved_part.advice}, or "
        f"accept {consequence} with --allow_changes true (docs/reference/errors.md#resume-refused)"
    )


def notes_on_components(saved: "TrainerJson", components: tuple[Component, ...], checkpoint: Path) -> list[str]:
    """Return notes on other changes since a checkpoint: the files of registered parts, metrics and loggers."""
    notes = []
    current_parts = {(current.kind, current.name): current for current in components}
    for saved_part in saved.components:
        current_part = current_parts.get((saved_part.kind, saved_part.name))
        if current_part is None:
            if saved_part.kind not in (*_DECIDING_KINDS, _REWARD):
                notes.append(f"{saved_part}, which the run used at {checkpoint.name}, is missing; {saved_part.advice}")
        elif saved_part.source and current_part.source and saved_part.source != current_part.source:
            notes.append(f"the file of the {saved_part} has changed since {checkpoint.name}, so its results may differ")
    return notes
