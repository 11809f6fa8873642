"""Find tokens that got better or worse between two models with the same tokenizer, by source, frequency, document."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

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
"""The fewest tokens of a ranked document; with fewer, a single token would decide the mean."""
CLEAR_CHANGE = 0.1  # nats
_NUM_BINS = 6
_SHOWN_TOKENS = 1000
_SHADES = (CLEAR_CHANGE, 0.5, 1.0, 2.0)
"""The changes in nats at which a token gets the next darker shade."""


@dataclass(frozen=True)
class TokenGroup:
    """A group of predicted tokens."""

    name: str
    num_tokens: int
    before: float
    """The mean loss of the first model in nats."""
    after: float
    """The mean loss of the last model in nats."""
    better: float
    """The share of tokens whose loss fell by at least ``CLEAR_CHANGE``."""
    worse: float
    """The share of tokens whose loss rose by at least ``CLEAR_CHANGE``."""


@dataclass(frozen=True)
class ChangedDocument:
    """A document whose mean loss changed."""

    source: str
    location: str
    """The file and line of the document."""
    ids: np.ndarray
    """The document's predicted tokens, int32 [N]."""
    losses_before: np.ndarray
    """The tokens' losses under the first model, fp32 [N]."""
    losses_after: np.ndarray
    """The tokens' losses under the last model, fp32 [N]."""

    @property
    def change(self) -> float:
        """The change of the mean loss in nats."""
        return float((self.losses_after.astype(np.float64) - self.losses_before).mean())


@dataclass(frozen=True)
class LossChanges:
    """The texts on which ``last_model`` has a lower or a higher loss than ``first_model``."""

    first_model: str
    last_model: str
    sources: tuple[TokenGroup, ...]
    """The tokens of each source."""
    frequencies: tuple[TokenGroup, ...]
    """The tokens by how often their id is predicted."""
    improved: tuple[ChangedDocument, ...]
    """The documents whose mean loss fell most."""
    damaged: tuple[ChangedDocument, ...]
    """The documents whose mean loss rose most."""


def find_changes(
    first_model: str,
    last_model: str,
    texts: Sequence["EncodedText"],
    losses_before: Sequence[np.ndarray],
    losses_after: Sequence[np.ndarray],
) -> LossChanges:
    """Compare two models token by token.

    Args:
        first_model: The name of the first model.
        last_model: The name of the model that is compared with it.
        texts: The texts, as tokens of both models' tokenizer.
        losses_before: The losses of the first model, fp32 [N] for each text.
        losses_after: The losses of the last model.
    """
    # all tokens of all texts, [N]
    ids = np.concatenate([text.target_ids for text in texts])
    all_before = np.concatenate(losses_before).astype(np.float64)
    all_after = np.concatenate(losses_after).astype(np.float64)
    names_of_tokens = []
    for text in texts:
        names_of_documents = np.array(text.source_names)[text.sources]
        names_of_tokens.append(names_of_documents[text.owners])
    sources = np.concatenate(names_of_tokens)

    source_groups = []
    for source in dict.fromkeys(sources.tolist()):
        source_groups.append(_token_group(source, sources == source, all_before, all_after))
    documents = _rank_documents(texts, losses_before, losses_after)
    fallen = [document for document in documents if document.change < 0]
    risen = [document for document in reversed(documents) if document.change > 0]
    return LossChanges(
        first_model=first_model,
        last_model=last_model,
        sources=tuple(source_groups),
        frequencies=tuple(_group_by_frequency(ids, all_before, all_after)),
        improved=tuple(_load_documents(texts, losses_before, losses_after, fallen[:NUM_DOCUMENTS])),
        damaged=tuple(_load_documents(texts, losses_before, losses_after, risen[:NUM_DOCUMENTS])),
    )


def _token_group(name: str, is_in_group: np.ndarray, losses_before: np.ndarray, losses_after: np.ndarray) -> TokenGroup:
    """Return the group of the tokens for which ``is_in_group``, bool [N], is true; losses are fp64 [N]."""
    group_before = losses_before[is_in_group]
    group_after = losses_after[is_in_group]
    changes = group_after - group_before
    return TokenGroup(
        name=name,
        num_tokens=len(changes),
        before=float(group_before.mean()),
        after=float(group_after.mean()),
        better=float((changes <= -CLEAR_CHANGE).mean()),
        worse=float((changes >= CLEAR_CHANGE).mean()),
    )


def _group_by_frequency(ids: np.ndarray, losses_before: np.ndarray, losses_after: np.ndarray) -> list[TokenGroup]:
    """Group tokens into quantiles of about the same size by how often their id is predicted in these texts."""
    counts = np.bincount(ids)[ids]  # [N]
    quantiles = np.linspace(0, 1, _NUM_BINS + 1)[1:]
    # equal limits are one bin: many tokens may have the same count
    upper_limits = np.unique(np.quantile(counts, quantiles, method="higher"))
    bins = np.searchsorted(upper_limits, counts)
    groups = []
    for bin_index in np.unique(bins):
        is_in_bin = bins == bin_index
        lowest = int(counts[is_in_bin].min())
        highest = int(counts[is_in_bin].max())
        name = f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}"
        groups.append(_token_group(name, is_in_bin, losses_before, losses_after))
    return groups


class _RankedDocument(NamedTuple):
    """A document by the change of its mean loss, by which it is sorted."""

    change: float
    text_index: int
    document: int


def _rank_documents(
    texts: Sequence["EncodedText"], losses_before: Sequence[np.ndarray], losses_after: Sequence[np.ndarray]
) -> list[_RankedDocument]:
    """Return the documents with at least ``FEWEST_TOKENS`` tokens, beginning with those whose mean loss fell most."""
    documents = []
    for text_index, text in enumerate(texts):
        num_documents = len(text.sources)
        counts = np.bincount(text.owners, minlength=num_documents)
        token_changes = losses_after[text_index].astype(np.float64) - losses_before[text_index]
        mean_changes = np.bincount(text.owners, token_changes, num_documents) / np.maximum(counts, 1)
        for document in np.flatnonzero(counts >= FEWEST_TOKENS).tolist():
            documents.append(_RankedDocument(float(mean_changes[document]), text_index, document))
    return sorted(documents)


def _load_documents(
    texts: Sequence["EncodedText"],
    losses_before: Sequence[np.ndarray],
    losses_after: Sequence[np.ndarray],
    documents: Sequence[_RankedDocument],
) -> Iterator[ChangedDocument]:
    """Yield the tokens and losses of documents."""
    for _, text_index, document in documents:
        text = texts[text_index]
        tokens = np.flatnonzero(text.owners == document)
        yield ChangedDocument(
            source=text.source_names[text.sources[document]],
            location=text.location(document),
            ids=text.target_ids[tokens],
            losses_before=losses_before[text_index][tokens],
            losses_after=losses_after[text_index][tokens],
        )


@dataclass(frozen=True)
class ShownToken:
    """The text and ids of one token, or of several that share a character; the losses are sums in nats."""

    text: str
    ids: list[int]
    before: float
    after: float

    @property
    def num_ids(self) -> int:
        return len(self.ids)

    @property
    def shade(self) -> str:
        """The token's class in the page: better or worse, and how much; "" for a small change."""
        change = self.after - self.before
        level = sum(abs(change) >= limit for limit in _SHADES)
        if level == 0:
            return ""
        return f"better{level}" if change < 0 else f"worse{level}"

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
    """The content of ``changes.json``: ``LossChanges`` with texts in place of ids and arrays."""

    first: str
    last: str
    sources: list[TokenGroup]
    frequencies: list[TokenGroup]
    improved: list[ShownDocument]
    damaged: list[ShownDocument]


def show_changes(changes: LossChanges, tokenizer: Any) -> ShownChanges:
    """Return the changes with the texts of the tokens; both models have the ``tokenizer``."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        vocabulary = load_vocabulary(Path(folder))
    return ShownChanges(
        first=changes.first_model,
        last=changes.last_model,
        sources=list(changes.sources),
        frequencies=list(changes.frequencies),
        improved=[_show_document(document, vocabulary) for document in changes.improved],
        damaged=[_show_document(document, vocabulary) for document in changes.damaged],
    )


def _show_document(document: ChangedDocument, vocabulary: Vocabulary | None) -> ShownDocument:
    """Return a document with the text of its first tokens; without a vocabulary, with their ids."""
    ids = document.ids[:_SHOWN_TOKENS].tolist()
    if vocabulary:
        spans = list(vocabulary.spans(ids))  # number of tokens and their text
    else:
        spans = [(1, f"⟨{token}⟩") for token in ids]
    tokens = []
    start = 0
    for num_tokens, text in spans:
        stop = start + num_tokens
        loss_before = float(document.losses_before[start:stop].sum())
        loss_after = float(document.losses_after[start:stop].sum())
        tokens.append(ShownToken(text, ids[start:stop], loss_before, loss_after))
        start = stop
    return ShownDocument(
        source=document.source,
        place=document.location,
        num_tokens=len(document.ids),
        before=float(document.losses_before.mean()),
        after=float(document.losses_after.mean()),
        tokens=tokens,
    )


def write_changes(folder: Path, changes: ShownChanges) -> None:
    """Write ``changes.json`` and the page ``report.html``."""
    write_atomically(folder / CHANGES, json.dumps(asdict(changes), ensure_ascii=False) + "\n")
    write_atomically(folder / PAGE, to_html("Where tokens got better and worse", changes_sections(changes)))


def changes_sections(changes: ShownChanges) -> list[Section]:
    """Return the sections of a page: tables of the groups of tokens, and documents with coloured tokens."""
    # the models and all tokens
    rows = [
        ("first model", escaped(changes.first)),
        ("last model", escaped(changes.last)),
        ("predicted tokens", sum(group.num_tokens for group in changes.sources)),
    ]
    explanation = (
        "Loss in nats per token. Better and worse are the shares of tokens whose loss fell or rose by at least "
        f"{CLEAR_CHANGE} nats. By frequency, tokens are grouped into groups of about the same size by how often "
        "their id is predicted in these texts."
    )
    sections = [
        Section("changes", "Token changes", f"{table('models | ', rows)}\n\n{explanation}"),
        Section("changes-sources", "Changes by source", _groups_table("source", changes.sources)),
        Section("changes-frequency", "Changes by frequency", _groups_table("times here", changes.frequencies)),
    ]

    # the documents that changed most
    template = page_templates(Path(__file__).with_name("templates")).get_template("changed_documents.html.j2")
    for title, documents in (("improved", changes.improved), ("damaged", changes.damaged)):
        html = template.render(title=title, documents=documents, shades=_SHADES, fewest_tokens=FEWEST_TOKENS)
        text = f"No document is {title}."
        if documents:
            text = _documents_table(documents)
        sections.append(Section(f"changes-{title}", f"Most {title} documents", text, html=html))
    return sections


def _documents_table(documents: Sequence[ShownDocument]) -> Markdown:
    rows = []
    for document in documents:
        losses = (f"{document.before:.3f}", f"{document.after:.3f}")
        rows.append((document.source, document.place, document.num_tokens, *losses))
    return table("source | document | tokens | first | last", rows, 3)


def _groups_table(name: str, groups: Sequence[TokenGroup]) -> Markdown:
    rows = []
    for group in groups:
        losses = (f"{group.before:.4f}", f"{group.after:.4f}", f"{group.after - group.before:+.4f}")
        rows.append((group.name, group.num_tokens, *losses, f"{group.better:.1%}", f"{group.worse:.1%}"))
    return table(f"{name} | tokens | first | last | change | better | worse", rows, 6)
