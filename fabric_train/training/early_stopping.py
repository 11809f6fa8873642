"""End a run when the validation loss of a source has stopped falling."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fabric_train.checkpoint import Evaluation, LossProgress, TrainerState

_PATIENCE = 3


@dataclass(frozen=True)
class EarlyStopping:
    """``--early_stopping``: a run ends after ``patience`` evaluations in which the loss of ``source`` is no new lowest.

    ``source`` is "all" for the whole. The count is in the trainer state, so a resumed run ends at the same step.
    """

    source: str
    patience: int

    def after(self, before: LossProgress | None, evaluation: Evaluation) -> LossProgress:
        """Return the progress after an evaluation; with another source than before, counting starts at 0."""
        if before is None or before.source != self.source:
            before = LossProgress(self.source)
        return before.after(evaluation)

    def ends(self, state: TrainerState) -> bool:
        """Return whether the run ends after the state's step."""
        progress = state.progress
        return progress is not None and progress.source == self.source and progress.num_since >= self.patience

    def describe(self, state: TrainerState) -> str:
        """Return why the run ends after the state's step."""
        assert state.progress is not None
        name = "the validation loss" if self.source == "all" else f"the validation loss of {self.source}"
        best, step = state.progress.best, state.progress.best_step
        lowest = "is not finite" if best is None else f"has not fallen below {best:.4f}, that of step {step},"
        return (
            f"early stopping after step {state.step}: {name} {lowest} in {state.progress.num_since} evaluations; "
            "a larger patience continues with --resume true"
        )


def parse_early_stopping(given: str, names: Sequence[str]) -> EarlyStopping:
    """Return what ``SOURCE[:patience]`` means; ``names`` are the sources, which may have a colon in their names."""
    found = None if given in names else re.fullmatch(r"(.+):([1-9][0-9]{0,8})", given)
    return EarlyStopping(found[1], int(found[2])) if found else EarlyStopping(given, _PATIENCE)
