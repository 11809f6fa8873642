"""Find where tokens got better and worse between two models of one tokenizer: by source, by frequency, by document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fabric_train.cli.output import open_templates
from fabric_train.evaluation.texts import EncodedText
from fabric_train.tokenization.inspect.page import html_page, marked
from fabric_train.tokenization.inspect.row_view import visible
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

NUM_DOCUMENTS = 10
FEWEST_TOKENS = 16
"""Documents with fewer tokens are not ranked: a single token would decide their mean."""
CLEAR_CHANGE = 0.1  # nats
_NUM_BINS = 6
_SHOWN_TOKENS = 1000
_SHADES = (CLEAR_CHANGE, 0.5, 1.0, 2.0)
"""Changes in nats from which on a token has the next darker shade."""


@dataclass(frozen=True)
class TokenGroup:
    """Some predicted tokens: their mean losses in nats, and the shares that changed by at least ``CLEAR_CHANGE``."""

    name: str
    num_tokens: int
    before: float
    after: float
    better: float
    worse: float


@dataclass(frozen=True)
class ChangedDocument:
    """A document's predicted tokens: ``ids`` int32 [N], and their losses ``before`` and ``after``, fp32 [N]."""

    source: str
    place: str
    ids: np.ndarray
    before: np.ndarray
    after: np.ndarray

    @property
    def change(self) -> float:
        return float((self.after.astype(np.float64) - self.before).mean())


@dataclass(frozen=True)
class LossChanges:
    """Where the model ``last`` has a lower and a higher loss than ``first``."""

    first: str
    last: str
    sources: tuple[TokenGroup, ...]
    frequencies: tuple[TokenGroup, ...]
    improved: tuple[ChangedDocument, ...]
    damaged: tuple[ChangedDocument, ...]


def find_changes(
    names: tuple[str, str], texts: Sequence[EncodedText], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> LossChanges:
    """Compare two models of these names token by token; their losses are fp32 [N] for each text."""
    ids = np.concatenate([text.target_ids for text in texts])
    old, new = (np.concatenate(losses).astype(np.float64) for losses in (before, after))
    sources = np.concatenate([np.array(text.source_names)[text.sources][text.owners] for text in texts])
    of_sources = [_group(name, sources == name, old, new) for name in dict.fromkeys(sources.tolist())]
    return LossChanges(*names, tuple(of_sources), tuple(_by_frequency(ids, old, new)), *_extremes(texts, before, after))


def _group(name: str, chosen: np.ndarray, old: np.ndarray, new: np.ndarray) -> TokenGroup:
    before, after = old[chosen], new[chosen]
    change = after - before
    better, worse = float((change <= -CLEAR_CHANGE).mean()), float((change >= CLEAR_CHANGE).mean())
    return TokenGroup(name, len(before), float(before.mean()), float(after.mean()), better, worse)


def _by_frequency(ids: np.ndarray, old: np.ndarray, new: np.ndarray) -> list[TokenGroup]:
    """Group tokens by how often their id is predicted in these texts, into quantiles: about as many tokens in each."""
    counts = np.bincount(ids)[ids]
    limits = np.unique(np.quantile(counts, np.linspace(0, 1, _NUM_BINS + 1)[1:], method="higher"))
    bins = np.searchsorted(limits, counts)
    groups = []
    for number in np.unique(bins):
        chosen = bins == number
        low, high = int(counts[chosen].min()), int(counts[chosen].max())
        groups.append(_group(f"{low:,}" if low == high else f"{low:,} to {high:,}", chosen, old, new))
    return groups


def _extremes(
    texts: Sequence[EncodedText], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> tuple[tuple[ChangedDocument, ...], tuple[ChangedDocument, ...]]:
    """Return the documents whose mean loss fell most, and those whose mean loss rose most."""
    ranked = []
    for number, (text, old, new) in enumerate(zip(texts, before, after, strict=True)):
        counts = np.bincount(text.owners, minlength=len(text.sources))
        changes = np.bincount(text.owners, new.astype(np.float64) - old, len(text.sources)) / np.maximum(counts, 1)
        long_enough = np.flatnonzero(counts >= FEWEST_TOKENS)
        ranked += [(float(changes[document]), number, int(document)) for document in long_enough]
    ranked.sort()

    def take(number: int, document: int) -> ChangedDocument:
        text = texts[number]
        own = np.flatnonzero(text.owners == document)
        source = text.source_names[text.sources[document]]
        losses = before[number][own], after[number][own]
        return ChangedDocument(source, text.place(document), text.target_ids[own], *losses)

    fallen = [entry for entry in ranked if entry[0] < 0][:NUM_DOCUMENTS]
    risen = [entry for entry in reversed(ranked) if entry[0] > 0][:NUM_DOCUMENTS]
    improved, damaged = (tuple(take(*entry[1:]) for entry in entries) for entries in (fallen, risen))
    return improved, damaged


def changes_page(changes: LossChanges, tokenizer: Any) -> str:
    """Return the page, with every text of the documents escaped; both models have the ``tokenizer``."""
    folder = Path(__file__).with_name("templates")
    templates = open_templates(folder)
    templates.filters |= {"visible": visible, "marked": marked}
    with TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        vocabulary = load_vocabulary(Path(saved))
        body = templates.get_template("loss_changes.html.j2").render(
            changes=changes,
            tokens=lambda document: _tokens(document, vocabulary),
            shades=_SHADES,
            fewest_tokens=FEWEST_TOKENS,
            shown_tokens=_SHOWN_TOKENS,
        )
    style = (folder / "loss_changes.css").read_text(encoding="utf-8")
    return html_page("Where tokens got better and worse", [body], style)


def _tokens(document: ChangedDocument, vocabulary: Vocabulary | None) -> Iterator[tuple[str, str, str]]:
    """Yield class, title and text of tokens; those that share a character are one, with the sum of their losses."""
    ids = document.ids[:_SHOWN_TOKENS].tolist()
    start = 0
    for count, text in vocabulary.spans(ids) if vocabulary else ((1, f"⟨{token}⟩") for token in ids):
        stop = start + count
        before, after = (float(losses[start:stop].sum()) for losses in (document.before, document.after))
        change = after - before
        level = sum(abs(change) >= limit for limit in _SHADES)
        title = f"{visible(text)!r}, id {' '.join(map(str, ids[start:stop]))}\n{before:.3f} → {after:.3f} nats"
        yield f"{'better' if change < 0 else 'worse'}{level}" * bool(level), f"{title}, {change:+.3f}", text
        start = stop
