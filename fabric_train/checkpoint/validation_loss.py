"""The result of a validation: the loss of the whole split and of each source, as checkpoints keep it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class TokenLoss:
    """The loss of ``num_tokens`` supervised tokens: ``nats`` is its sum.

    ``num_bytes`` are the UTF-8 bytes of text that the tokens stand for (``token_dataset.place_pieces``); None if they
    are not known, because a token dataset has no document index.
    """

    nats: float
    num_tokens: Count
    num_bytes: float | None = None

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """Return :func:`perplexity` of the loss."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which can be compared between tokenizers; None if the bytes are not known."""
        return self.nats / (math.log(2) * self.num_bytes) if self.num_bytes else None

    def figures(self) -> dict[str, float | None]:
        """Return loss, perplexity and bits_per_byte by name."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True)
class Evaluation:
    """The losses of a validation after ``step``: of all tokens, and of each source that has some.

    ``rows`` is a hash of the rows, see ``row_hash.hash_supervised``; None if an earlier version evaluated them.
    ``follows_other_rows``: the run evaluated other rows before, whose losses cannot be compared with these.
    """

    whole: TokenLoss
    sources: dict[str, TokenLoss] = field(default_factory=dict)
    step: Count = 0
    rows: str | None = None
    follows_other_rows: bool = False

    @property
    def parts(self) -> dict[str, TokenLoss]:
        """The loss of each source by its name, if there are several, and that of the whole as ``all``."""
        return {**(self.sources if len(self.sources) > 1 else {}), "all": self.whole}

    def is_comparable(self, other: "Evaluation") -> bool:
        """Return whether another evaluation is of the same rows, as far as that is known."""
        return self.rows is None or other.rows is None or self.rows == other.rows

    def loss_of(self, source: str) -> float | None:
        """Return the loss of a source, or of the whole for "all"; None if the source has no supervised token."""
        losses = {**self.sources, "all": self.whole}
        return losses[source].loss if source in losses else None


@dataclass(frozen=True)
class LossProgress:
    """How the validation loss of a source has gone, for ``--early_stopping``.

    ``best`` is its lowest value so far, after ``best_step``, None if no value was finite; since then there were
    ``num_since`` evaluations. ``source`` is "all" for the whole.
    """

    source: str
    best: float | None = None
    best_step: Count = 0
    num_since: Count = 0

    def after(self, evaluation: Evaluation) -> "LossProgress":
        """Return the progress after a further evaluation."""
        loss = evaluation.loss_of(self.source)
        if loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best):
            return LossProgress(self.source, loss, evaluation.step)
        return replace(self, num_since=self.num_since + 1)


def perplexity(loss: float) -> float:
    """Return exp of a loss in nats per token; infinite if that does not fit into a float."""
    return math.exp(loss) if loss < 700 else math.inf


def compare_evaluations(first: Evaluation, now: Evaluation) -> Iterator[tuple[str, TokenLoss | None, TokenLoss]]:
    """Yield the name of each source, or "all" for the whole, and its loss in both evaluations; None if it had none."""
    for name, loss in now.parts.items():
        yield name, first.whole if name == "all" else first.sources.get(name), loss
