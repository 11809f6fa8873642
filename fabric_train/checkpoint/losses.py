"""Losses as trainer.json has them: of tokens or pairs, of an evaluation by source, and the best one so far."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pydantic import NonNegativeInt

from fabric_train.cli.argument_types import HIGHER_IS_BETTER


@dataclass(frozen=True)
class TokenLoss:
    """The loss of ``num_tokens`` supervised tokens: ``nats`` is its sum. ``of_pairs``: it is of so many pairs instead.

    ``num_bytes`` are the UTF-8 bytes of text that the tokens stand for (``token_dataset.place_pieces``); None without a
    document index. ``further`` are other figures by name, of ``training.evaluation.METRICS`` and of the objective.
    """

    nats: float
    num_tokens: NonNegativeInt
    num_bytes: float | None = None
    further: dict[str, float | None] = field(default_factory=dict)
    of_pairs: bool = False

    @property
    def unit(self) -> str:
        """What the loss is a mean of."""
        return "pair" if self.of_pairs else "token"

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which can be compared between tokenizers; None if the bytes are not known."""
        return self.nats / (math.log(2) * self.num_bytes) if self.num_bytes else None

    def figures(self) -> dict[str, float | None]:
        """Return loss, perplexity, bits_per_byte and the further figures by name; of pairs, only loss and these."""
        if self.of_pairs:
            return {"loss": self.loss, **self.further}
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte} | self.further


@dataclass(frozen=True)
class Evaluation:
    """The losses of a validation after ``step``: of all tokens, and of each source that has some.

    ``rows`` is ``batch.hash_supervised`` of the rows; None if an earlier version evaluated them.
    ``follows_other_rows``: the run evaluated other rows before, whose losses cannot be compared with these.
    """

    whole: TokenLoss
    sources: dict[str, TokenLoss] = field(default_factory=dict)
    step: NonNegativeInt = 0
    rows: str | None = None
    follows_other_rows: bool = False

    @property
    def parts(self) -> dict[str, TokenLoss]:
        """The loss of each source by its name, if there are several, and of the whole as ``all``."""
        return {**(self.sources if len(self.sources) > 1 else {}), "all": self.whole}

    def is_comparable(self, other: "Evaluation") -> bool:
        """Whether another evaluation is of the same rows, as far as that is known."""
        return self.rows is None or other.rows is None or self.rows == other.rows

    def loss_of(self, source: str) -> float | None:
        """Return the loss of a source or "all", or the figure FIGURE or FIGURE/SOURCE; None if there is none."""
        losses = {**self.sources, "all": self.whole}
        if source in losses:
            return losses[source].loss
        figure, _, of_source = source.partition("/")
        found = losses.get(of_source or "all")
        return found.further.get(figure) if found else None

    def sign_of(self, source: str) -> int:
        """Return -1 if a higher value of what ``loss_of`` returns is the better one, else 1."""
        is_figure = source not in self.sources and self.whole.of_pairs
        return -1 if is_figure and source.partition("/")[0] in HIGHER_IS_BETTER else 1


@dataclass(frozen=True)
class LossProgress:
    """The validation loss of a source, or "all", or a figure: ``best`` after ``best_step``, ``num_since`` evaluations
    ago.
    """

    source: str
    best: float | None = None
    best_step: NonNegativeInt = 0
    num_since: NonNegativeInt = 0

    def after(self, evaluation: Evaluation) -> "LossProgress":
        loss, sign = evaluation.loss_of(self.source), evaluation.sign_of(self.source)
        if loss is not None and math.isfinite(loss) and (self.best is None or sign * loss < sign * self.best):
            return LossProgress(self.source, loss, evaluation.step)
        return replace(self, num_since=self.num_since + 1)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinite if that does not fit into a float."""
    return math.exp(loss) if loss < 700 else math.inf


def compare_evaluations(first: Evaluation, now: Evaluation) -> Iterator[tuple[str, TokenLoss | None, TokenLoss]]:
    """Yield the name of each source, or "all", and its loss in both evaluations; None if the first had none."""
    for name, loss in now.parts.items():
        yield name, first.whole if name == "all" else first.sources.get(name), loss
