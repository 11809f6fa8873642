"""End a run early, after evaluations without a new best loss."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fabric_train.checkpoint import Evaluation, LossProgress, TrainerState, name_loss

_DEFAULT_PATIENCE = 3


@dataclass(frozen=True)
class EarlyStopping:
    """``--early_stopping``: a run ends after ``patience`` evaluations without a new best value of ``source``."""

    source: str
    patience: int

    def after(self, progress: LossProgress | None, evaluation: Evaluation) -> LossProgress:
        """Return the progress after an evaluation; if it belongs to another source, counting starts at 0."""
        if progress is None or progress.source != self.source:
            progress = LossProgress(self.source)
        return progress.after(evaluation)

    def ends(self, state: TrainerState) -> bool:
        """Return whether the run ends at a state."""
        progress = state.progress
        return progress is not None and progress.source == self.source and progress.num_since >= self.patience

    def describe(self, state: TrainerState) -> str:
        """Return why the run has ended at a state."""
        assert state.progress is not None
        first_evaluation = state.first_evaluation
        name = f"the {name_loss(self.source, first_evaluation)}"

        # what it has not done
        best = state.progress.best
        if best is None:
            observation = "is not finite"
        else:
            higher_is_better = first_evaluation is not None and first_evaluation.sign_of(self.source) < 0
            verb = "risen above" if higher_is_better else "fallen below"
            observation = f"has not {verb} {best:.4f}, its value at step {state.progress.best_step},"
        return (
            f"early stopping after step {state.step}: {name} {observation} in {state.progress.num_since} evaluations; "
            "a larger patience continues with --resume true"
        )


def parse_early_stopping(text: str, source_names: Sequence[str]) -> EarlyStopping:
    """Parse ``SOURCE[:PATIENCE]``. The name of a source may itself have a colon."""
    if text in source_names:
        return EarlyStopping(text, _DEFAULT_PATIENCE)
    match = re.fullmatch(r"(.+):([1-9][0-9]{0,8})", text)
    if match is None:
        return EarlyStopping(text, _DEFAULT_PATIENCE)
    return EarlyStopping(source=match[1], patience=int(match[2]))
