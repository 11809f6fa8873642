"""Find where tokens got better and worse between two models of one tokenizer: by source, by frequency, by document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fabric_train.evaluation.texts import EncodedText
from fabric_train.tokenization.inspect.page import html_facts, html_page, html_table, marked
from fabric_train.tokenization.inspect.report import TextTable
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
        """The mean change of the loss, in nats per token."""
        return float((self.after.astype(np.float64) - self.before).mean())


@dataclass(frozen=True)
class LossChanges:
    """Where the loss of the model ``last`` is lower and higher than that of ``first``."""

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
    """Return the page, with every text of the documents escaped; ``tokenizer`` is that of both models."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        vocabulary = load_vocabulary(Path(folder))
        return html_page("Where tokens got better and worse", _body(changes, vocabulary), _STYLE)


def _body(changes: LossChanges, vocabulary: Vocabulary | None) -> Iterator[str]:
    num_tokens = sum(group.num_tokens for group in changes.sources)
    names = (("first model", changes.first), ("last model", changes.last), ("predicted tokens", f"{num_tokens:,}"))
    yield from html_facts(names)
    yield "<h2>By source</h2>"
    yield from html_table(_groups("source", changes.sources))
    yield "<h2>By frequency of the token</h2>"
    yield from html_table(_groups("times in these texts", changes.frequencies))
    yield (
        "<p class=note>Loss in nats per token. Better and worse: tokens whose loss fell or rose by at least "
        f"{CLEAR_CHANGE} nats. Tokens are grouped by how often their id is predicted in these texts, into groups of "
        "about the same size.</p>"
    )
    for title, documents in (("improved", changes.improved), ("damaged", changes.damaged)):
        yield f"<h2>The {len(documents)} most {title} documents</h2>" if documents else f"<h2>No document {title}</h2>"
        if documents:
            yield _LEGEND
        for document in documents:
            yield from _document(document, vocabulary)


def _groups(name: str, groups: Sequence[TokenGroup]) -> TextTable:
    columns = (name, "tokens", "first", "last", "change", "better", "worse")
    lines = [
        (
            group.name,
            f"{group.num_tokens:,}",
            f"{group.before:.4f}",
            f"{group.after:.4f}",
            f"{group.after - group.before:+.4f}",
            f"{group.better:.1%}",
            f"{group.worse:.1%}",
        )
        for group in groups
    ]
    return TextTable(columns, tuple(lines), (0,) * len(lines))


def _document(document: ChangedDocument, vocabulary: Vocabulary | None) -> Iterator[str]:
    means = f"{document.before.mean():.3f} → {document.after.mean():.3f} nats per token"
    place = escape(visible(f"{document.source}: {document.place}"))
    yield f'<section class="row"><h3>{document.change:+.3f} <small>{place} · {len(document.ids):,} tokens · {means}'
    yield f'</small></h3><p class="tokens changes" dir="auto">{"".join(_tokens(document, vocabulary))}</p>'
    if len(document.ids) > _SHOWN_TOKENS:
        yield f'<div class="border">{len(document.ids) - _SHOWN_TOKENS:,} more tokens are not shown</div>'
    yield "</section>"


def _tokens(document: ChangedDocument, vocabulary: Vocabulary | None) -> Iterator[str]:
    """Yield the tokens as spans; those that share a character are one, with the sum of their losses."""
    ids = document.ids[:_SHOWN_TOKENS].tolist()
    start = 0
    for count, text in vocabulary.spans(ids) if vocabulary else ((1, f"⟨{token}⟩") for token in ids):
        stop = start + count
        before, after = (float(losses[start:stop].sum()) for losses in (document.before, document.after))
        title = f"{visible(text)!r}, id {' '.join(map(str, ids[start:stop]))}\n{before:.3f} → {after:.3f} nats"
        title += f", {after - before:+.3f}"
        yield f'<span{_shade(after - before)} title="{escape(title)}">{marked(text)}</span>'
        start = stop


def _shade(change: float) -> str:
    level = sum(abs(change) >= limit for limit in _SHADES)
    return f' class="{"better" if change < 0 else "worse"}{level}"' if level else ""


def _swatches() -> str:
    limits = [f"{limit:g}" for limit in _SHADES]
    names = [*(f"{low} to {high}" for low, high in pairwise(limits)), f"{limits[-1]} or more"]
    return "\n".join(
        f'<span class="{kind}{level}">{kind} by {name}</span>'
        for kind in ("better", "worse")
        for level, name in enumerate(names, start=1)
    )


_LEGEND = f"""<p class="legend tokens changes">
{_swatches()}
</p><p class="note">Changes of a token's loss from the first to the last model, in nats; hover over a token for both
losses. Documents are ranked by the mean change of their tokens; those of fewer than {FEWEST_TOKENS} tokens are left
out.</p>"""


_STYLE = """
:root { --better: 42, 140, 70; --worse: 200, 60, 40; }
@media (prefers-color-scheme: dark) { :root { --better: 80, 200, 120; --worse: 240, 100, 80; } }
.changes span { border-radius: .15em; }
.changes .better1 { background: rgba(var(--better), .14); } .changes .worse1 { background: rgba(var(--worse), .14); }
.changes .better2 { background: rgba(var(--better), .28); } .changes .worse2 { background: rgba(var(--worse), .28); }
.changes .better3 { background: rgba(var(--better), .46); } .changes .worse3 { background: rgba(var(--worse), .46); }
.changes .better4 { background: rgba(var(--better), .68); } .changes .worse4 { background: rgba(var(--worse), .68); }
.legend.changes span { padding: .12em .35em; }
"""
