"""Find where tokens got better and worse between two models of one tokenizer: by source, by frequency, by document."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from fabric_train.cli.output import visible
from fabric_train.files.regular_file import write_atomically
from fabric_train.pages.markdown import Markdown, Section, escaped, page_templates, table, to_html
from fabric_train.tokenization.tokenizers.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from fabric_train.evaluation.texts import EncodedText

CHANGES = "changes.json"
PAGE = "report.html"
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
    names: tuple[str, str], texts: Sequence["EncodedText"], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> LossChanges:
    """Compare two models of these names token by token; their losses are fp32 [N] for each text."""
    ids = np.concatenate([text.target_ids for text in texts])
    old, new = (np.concatenate(losses).astype(np.float64) for losses in (before, after))
    sources = np.concatenate([np.array(text.source_names)[text.sources][text.owners] for text in texts])
    of_sources = [_group(name, sources == name, old, new) for name in dict.fromkeys(sources.tolist())]
    return LossChanges(*names, tuple(of_sources), tuple(_by_frequency(ids, old, new)), *_extremes(texts, before, after))


def _group(name: str, chosen: np.ndarray, old: np.ndarray, new: np.ndarray) -> TokenGroup:
    before = old[chosen]
    after = new[chosen]
    change = after - before
    better = float((change <= -CLEAR_CHANGE).mean())
    worse = float((change >= CLEAR_CHANGE).mean())
    return TokenGroup(name, len(before), float(before.mean()), float(after.mean()), better, worse)


def _by_frequency(ids: np.ndarray, old: np.ndarray, new: np.ndarray) -> list[TokenGroup]:
    """Group tokens by how often their id is predicted in these texts, into quantiles: about as many tokens in each."""
    counts = np.bincount(ids)[ids]
    limits = np.unique(np.quantile(counts, np.linspace(0, 1, _NUM_BINS + 1)[1:], method="higher"))
    bins = np.searchsorted(limits, counts)
    groups = []
    for number in np.unique(bins):
        chosen = bins == number
        low = int(counts[chosen].min())
        high = int(counts[chosen].max())
        groups.append(_group(f"{low:,}" if low == high else f"{low:,} to {high:,}", chosen, old, new))
    return groups


def _extremes(
    texts: Sequence["EncodedText"], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
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


@dataclass(frozen=True)
class ShownToken:
    """Text and ids of tokens that share a character, mostly one; the losses are sums in nats."""

    text: str
    ids: list[int]
    before: float
    after: float

    @property
    def num_ids(self) -> int:
        return len(self.ids)

    @property
    def shade(self) -> str:
        """Its class in the page: better or worse, and how much; empty for a small change."""
        change = self.after - self.before
        level = sum(abs(change) >= limit for limit in _SHADES)
        return f"{'better' if change < 0 else 'worse'}{level}" * bool(level)

    @property
    def title(self) -> str:
        losses = f"{self.before:.3f} → {self.after:.3f} nats, {self.after - self.before:+.3f}"
        return f"{visible(self.text)!r}, id {' '.join(map(str, self.ids))}\n{losses}"


@dataclass(frozen=True)
class ShownDocument:
    """A document as the page shows it: the mean losses in nats per token, and its first tokens."""

    source: str
    place: str
    num_tokens: int
    before: float
    after: float
    tokens: list[ShownToken]


@dataclass(frozen=True)
class ShownChanges:
    """The content of ``changes.json``; the same as ``LossChanges``, with texts in place of ids and arrays."""

    first: str
    last: str
    sources: list[TokenGroup]
    frequencies: list[TokenGroup]
    improved: list[ShownDocument]
    damaged: list[ShownDocument]


def show_changes(changes: LossChanges, tokenizer: Any) -> ShownChanges:
    """Return the changes with the texts of the tokens; both models have the ``tokenizer``."""
    with TemporaryDirectory() as saved:
        tokenizer.save_pretrained(saved)
        vocabulary = load_vocabulary(Path(saved))
    documents = ([_shown(one, vocabulary) for one in some] for some in (changes.improved, changes.damaged))
    return ShownChanges(changes.first, changes.last, [*changes.sources], [*changes.frequencies], *documents)


def _shown(document: ChangedDocument, vocabulary: Vocabulary | None) -> ShownDocument:
    ids = document.ids[:_SHOWN_TOKENS].tolist()
    tokens = []
    start = 0
    for count, text in vocabulary.spans(ids) if vocabulary else ((1, f"⟨{token}⟩") for token in ids):
        stop = start + count
        losses = (float(values[start:stop].sum()) for values in (document.before, document.after))
        tokens.append(ShownToken(text, ids[start:stop], *losses))
        start = stop
    before, after = (float(values.mean()) for values in (document.before, document.after))
    return ShownDocument(document.source, document.place, len(document.ids), before, after, tokens)


def write_changes(folder: Path, changes: ShownChanges) -> None:
    """Write ``changes.json`` and the page ``report.html``."""
    write_atomically(folder / CHANGES, json.dumps(asdict(changes), ensure_ascii=False) + "\n")
    write_atomically(folder / PAGE, to_html("Where tokens got better and worse", changes_sections(changes)))


def changes_sections(changes: ShownChanges) -> list[Section]:
    """Return what a page shows: tables of the groups of tokens, and the documents with coloured tokens."""
    template = page_templates(Path(__file__).with_name("templates")).get_template("changed_documents.html.j2")
    rows = [("first model", escaped(changes.first)), ("last model", escaped(changes.last))]
    rows.append(("predicted tokens", sum(group.num_tokens for group in changes.sources)))
    about = (
        "Loss in nats per token. Better and worse are the shares of tokens whose loss fell or rose by at least "
        f"{CLEAR_CHANGE} nats. By frequency, tokens are grouped by how often their id is predicted in these texts, "
        "into groups of about the same size."
    )
    sections = [
        Section("changes", "Token changes", f"{table('models | ', rows)}\n\n{about}"),
        Section("changes-sources", "Changes by source", _groups_table("source", changes.sources)),
        Section("changes-frequency", "Changes by frequency", _groups_table("times here", changes.frequencies)),
    ]
    for title, documents in (("improved", changes.improved), ("damaged", changes.damaged)):
        html = template.render(title=title, documents=documents, shades=_SHADES, fewest_tokens=FEWEST_TOKENS)
        found = [(one.source, one.place, one.num_tokens, f"{one.before:.3f}", f"{one.after:.3f}") for one in documents]
        listing = table("source | document | tokens | first | last", found, 3) if found else f"No document is {title}."
        sections.append(Section(f"changes-{title}", f"Most {title} documents", listing, html=html))
    return sections


def _groups_table(name: str, groups: Sequence[TokenGroup]) -> Markdown:
    rows = []
    for group in groups:
        losses = f"{group.before:.4f}", f"{group.after:.4f}", f"{group.after - group.before:+.4f}"
        rows.append((group.name, group.num_tokens, *losses, f"{group.better:.1%}", f"{group.worse:.1%}"))
    return table(f"{name} | tokens | first | last | change | better | worse", rows, 6)
