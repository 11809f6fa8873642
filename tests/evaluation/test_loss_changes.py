"""The page of where tokens got better and worse: groups, ranked documents, colours, and no text that is markup."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.evaluation.loss_changes import (
    CHANGES,
    FEWEST_TOKENS,
    NUM_DOCUMENTS,
    PAGE,
    LossChanges,
    ShownChanges,
    changes_sections,
    find_changes,
    show_changes,
    write_changes,
)
from fabric_train.evaluation.texts import DocumentTexts, WindowedText
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import load_hf_tokenizer

HARD = "<script>alert('x')</script> &amp; \"é\" 你好 😀 \x1b[31m \u202edrawkcab\r\n  end of the text"
TEXTS = ("Short.", HARD, *(f"Document number {number} of the set, and some more words." for number in range(30)))


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_hf_tokenizer(tiny_model_dir)


@pytest.fixture(scope="module")
def text(tokenizer: Any) -> WindowedText:
    documents = DocumentTexts("en", TEXTS, tuple(f"a<b>.jsonl, line {line}" for line in range(1, 33)))
    return WindowedText(documents, tokenizer, max_length=64, overlap=1)


@pytest.fixture(scope="module")
def changes(text: WindowedText) -> LossChanges:
    """Document d of 32 changes by (d - 16) / 8 nats a token, except that the first two tokens of HARD rise by 3."""
    before = np.full(len(text.target_ids), 4.0, dtype=np.float32)
    after = before + ((text.owners - 16) / 8).astype(np.float32)
    after[np.flatnonzero(text.owners == 1)[:2]] = 7.0
    return find_changes("base", "run<1>", [text], [before], [after])


def test_documents_are_ranked_by_their_mean_change(text: WindowedText, changes: LossChanges) -> None:
    lengths = np.bincount(text.owners)
    assert lengths[0] < FEWEST_TOKENS <= lengths[1:].min()  # document 0 is too short to be ranked
    lines = [int(document.location.split()[-1]) for document in changes.damaged]
    assert lines == [32 - rank for rank in range(NUM_DOCUMENTS)]
    falls = [document.change for document in changes.improved]
    assert falls == sorted(falls)
    assert len(falls) == NUM_DOCUMENTS
    assert changes.improved[0].change == pytest.approx(-14 / 8)  # document 2: two tokens of document 1 rise


def test_groups_hold_every_token_once_and_the_rare_ones_first(text: WindowedText, changes: LossChanges) -> None:
    (source,) = changes.sources
    assert (source.name, source.num_tokens, source.before) == ("en", len(text.target_ids), 4.0)
    assert sum(group.num_tokens for group in changes.frequencies) == len(text.target_ids)
    mean = sum(group.after * group.num_tokens for group in changes.frequencies) / len(text.target_ids)
    assert mean == pytest.approx(source.after)

    # their names are the counts of their ids: 3, or 1,000 to 2,000
    lowest_counts = [int(group.name.split(" to ")[0].replace(",", "")) for group in changes.frequencies]
    assert lowest_counts == sorted(lowest_counts)
    assert len(lowest_counts) > 2
    _, counts = np.unique(text.target_ids, return_counts=True)
    assert lowest_counts[0] == counts.min()


class Page(HTMLParser):
    """The tags, the attributes, and each token's class and title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.tokens: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        self.attributes |= attributes.keys()
        if tag == "span" and "title" in attributes:
            self.tokens.append((attributes.get("class") or "", attributes["title"] or ""))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_changes_as_colours_and_text_as_text(
    changes: LossChanges, tokenizer: Any, tmp_path: Path
) -> None:
    shown_changes = show_changes(changes, tokenizer)
    write_changes(tmp_path, shown_changes)
    assert read_json(tmp_path / CHANGES, ShownChanges, "") == shown_changes  # a report of the run reads it
    assert changes_sections(shown_changes)[0].key == "changes"

    # text of the data is text
    page = Page((tmp_path / PAGE).read_text())
    assert page.tags.isdisjoint({"script", "link", "img", "b"})
    assert not {name for name in page.attributes if name.startswith("on")}
    for text in ("<script>alert('x')</script>", "你好", "⟨U+001B⟩", "⟨U+202E⟩", "a<b>.jsonl, line 2", "run<1>"):
        assert text in page.text

    # a token has the shade of its change, which its title ends with
    assert {"better3", "worse3", "worse4"} <= {shade for shade, _ in page.tokens}
    num_ids = 0
    for shade, title in page.tokens:
        first_line, _, losses = title.partition("\n")
        num_ids += len(re.findall(r"\d+", first_line.rpartition("id ")[2]))
        change = float(losses.rpartition(", ")[2])
        level = sum(abs(change) >= limit for limit in (0.1, 0.5, 1, 2))
        if level == 0:
            assert shade == ""
        else:
            direction = "better" if change < 0 else "worse"
            assert shade == f"{direction}{level}"
    assert num_ids == sum(len(document.ids) for document in (*changes.improved, *changes.damaged))
