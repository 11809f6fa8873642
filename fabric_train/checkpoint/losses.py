"""The losses of an evaluation, for all tokens and for each source, and the best loss so far.

trainer.json stores the fields of these classes by name, so a field such as ``further``, ``of_pairs`` or
``whole`` cannot be renamed: earlier versions have saved it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pydantic import NonNegativeInt

from fabric_train.cli.argument_types import REWARD, is_higher_better


@dataclass(frozen=True)
class TokenLoss:
    """The loss of ``num_tokens`` supervised tokens, or of as many preference pairs or unpaired answers.

    Sampled completions have no loss, but a mean reward.
    """

    nats: float
    """The sum of the losses; 0 for completions."""
    num_tokens: NonNegativeInt
    num_bytes: float | None = None
    """The UTF-8 bytes of the tokens' text (``token_dataset.place_pieces``); None without a document index."""
    further: dict[str, float | None] = field(default_factory=dict)
    """Other figures by name: those in ``training.evaluation.METRICS`` and the objective's."""
    of_pairs: bool = False
    """Whether this is a loss of preference pairs; ``num_tokens`` is then the number of pairs."""
    of_answers: bool = False
    """Whether this is a loss of unpaired answers; ``num_tokens`` is then the number of answers."""
    has_own_unit: bool = False
    """Whether the loss comes from a registered objective, which need not be in nats."""
    of_completions: bool = False
    """Whether this is the reward of sampled completions, which ``further`` has under the name ``REWARD``;
    ``num_tokens`` is then the number of completions."""

    @property
    def is_likelihood(self) -> bool:
        """Whether the loss is in nats per token, so that perplexity and bits per byte follow from it."""
        return not (self.of_pairs or self.has_own_unit or self.of_completions)

    @property
    def unit(self) -> str:
        """The unit over which :attr:`loss` or the reward is a mean."""
        if self.of_completions:
            return "completion"
        if self.of_answers:
            return "answer"
        return "pair" if self.of_pairs else "token"

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens and for completions."""
        if self.num_tokens == 0 or self.of_completions:
            return math.nan
        return self.nats / self.num_tokens

    @property
    def deciding_value(self) -> float | None:
        """The value by which evaluations are compared: the loss, or the reward of completions."""
        return self.further[REWARD] if self.of_completions else self.loss

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, comparable between tokenizers; None if not in nats, or if the bytes are not known."""
        if not (self.num_bytes and self.is_likelihood):
            return None
        return self.nats / (math.log(2) * self.num_bytes)

    def figures(self) -> dict[str, float | None]:
        """Return :attr:`further` and the loss, by name; for a loss in nats also perplexity and bits_per_byte.

        Completions have no loss.
        """
        if self.of_completions:
            return dict(self.further)
        figures: dict[str, float | None] = {"loss": self.loss}
        if self.is_likelihood:
            figures["perplexity"] = self.perplexity
            figures["bits_per_byte"] = self.bits_per_byte
        return figures | self.further


@dataclass(frozen=True)
class Evaluation:
    """The losses of a validation after ``step``, for all tokens and for each source that has tokens."""

    whole: TokenLoss
    """The loss of all tokens."""
    sources: dict[str, TokenLoss] = field(default_factory=dict)
    step: NonNegativeInt = 0
    rows: str | None = None
    """``batch.hash_supervised`` of the rows, or a hash of the prompts and rewards; None if an earlier version evaluated
    them."""
    follows_other_rows: bool = False
    """Whether the run evaluated other rows before, whose losses cannot be compared with these."""

    @property
    def parts(self) -> dict[str, TokenLoss]:
        """The loss of all tokens as ``all``, and if there are several sources, the loss of each by its name."""
        losses = dict(self.sources) if len(self.sources) > 1 else {}
        losses["all"] = self.whole
        return losses

    def is_comparable(self, evaluation: "Evaluation") -> bool:
        """Return whether another evaluation has the same rows, or may have them because its rows are not known."""
        return self.rows is None or evaluation.rows is None or self.rows == evaluation.rows

    def loss_of(self, source: str) -> float | None:
        """Return the loss or reward of a source or "all", or the figure FIGURE or FIGURE/SOURCE; None if there is none.

        See ``TokenLoss.deciding_value``.
        """
        losses = {**self.sources, "all": self.whole}
        if source in losses:
            return losses[source].deciding_value
        # a figure of all tokens, or of a source
        figure, _, figure_source = source.partition("/")
        token_loss = losses.get(figure_source or "all")
        return token_loss.further.get(figure) if token_loss else None

    def sign_of(self, source: str) -> int:
        """Return -1 if a higher value of :meth:`loss_of` is better, and otherwise 1."""
        is_figure = source != "all" and source not in self.sources
        if not is_figure:
            return -1 if self.whole.of_completions else 1
        if self.whole.is_likelihood:
            return 1
        figure = source.partition("/")[0]
        return -1 if is_higher_better(figure, of_completions=self.whole.of_completions) else 1


@dataclass(frozen=True)
class LossProgress:
    """The best validation loss so far of a source, of "all", or of a figure; see ``Evaluation.loss_of``."""

    source: str
    best: float | None = None
    best_step: NonNegativeInt = 0
    num_since: NonNegativeInt = 0
    """The number of evaluations since the best one."""

    def after(self, evaluation: Evaluation) -> "LossProgress":
        """Return the progress after another evaluation."""
        loss = evaluation.loss_of(self.source)
        if loss is not None and math.isfinite(loss):
            # of a figure such as accuracy, the highest value is the best
            sign = evaluation.sign_of(self.source)
            is_better = self.best is None or sign * loss < sign * self.best
            if is_better:
                return LossProgress(self.source, loss, evaluation.step)
        return replace(self, num_since=self.num_since + 1)


def name_loss(source: str, evaluation: Evaluation | None) -> str:
    """Return what ``Evaluation.loss_of`` a source is called in messages; ``evaluation`` is one of the run."""
    # --best_by may name a figure, such as accuracy, or a figure of a source, such as accuracy/es
    figure = source.partition("/")[0]
    if evaluation is not None and figure in evaluation.whole.further:
        return f"validation's {source}"
    is_reward = evaluation is not None and evaluation.whole.of_completions
    name = "validation reward" if is_reward else "validation loss"
    return name if source == "all" else f"{name} of {source}"


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinite if that does not fit into a float."""
    return math.exp(loss) if loss < 700 else math.inf  # math.exp raises an OverflowError above 709.78


def compare_evaluations(
    first_evaluation: Evaluation, evaluation: Evaluation
) -> Iterator[tuple[str, TokenLoss | None, TokenLoss]]:
    """Yield for each source, and "all", its name, its loss in the first evaluation or None, and its loss now."""
    for name, loss in evaluation.parts.items():
        first_loss = first_evaluation.whole if name == "all" else first_evaluation.sources.get(name)
        yield name, first_loss, loss
