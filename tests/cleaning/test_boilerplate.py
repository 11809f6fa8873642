"""Lines that --boilerplate removes because many documents have them."""

import json
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_train.cleaning.boilerplate import Boilerplate, hash_lines
from fabric_train.cleaning.results import Dropped
from fabric_train.cli.errors import InputError
from fabric_train.tokenization import build, line_counts
from fabric_train.tokenization.arguments import TokenizeArguments
from fabric_train.tokenization.shards import ShardSizes
from tests.support.token_datasets import documents_in, manifest_of, tokenize, write_jsonl

HEADER = "The Daily News of Sueca"
FOOTER = "(c) 2021 Daily News. All rights reserved."
OFTEN = "Share this page with friends"
SELDOM = "Nine documents have this line"
REFRAIN = "And the river runs to the sea"


def clean(text: str, *repeated: str) -> str | Dropped:
    hashes = sorted(hashed for _, hashed in hash_lines(list(repeated)))
    return Boilerplate(2, np.array(hashes, dtype=np.uint64)).clean(text, Counter())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{HEADER}\n\nBody\n\nEnd\n\n{FOOTER}", "Body\n\nEnd"),
        (f"Body\n{HEADER}\nEnd\n", "Body\nEnd\n"),
        (f"Body\n\n{HEADER}\n\n{FOOTER}\n\nEnd", "Body\n\nEnd"),
        (f"  The Daily\tNews of  Sueca \r\nBody\r\n{FOOTER}\r\n", "Body\r"),
        (f"\n\n Body\n\n\n\nwith {HEADER} inside \n", f"\n\n Body\n\n\n\nwith {HEADER} inside \n"),
    ],
)
def test_lines_go_with_the_blank_lines_around_them(text: str, expected: str) -> None:
    assert clean(text, HEADER, FOOTER) == expected


def test_a_document_of_boilerplate_alone_is_dropped() -> None:
    assert clean(f"\n{HEADER}\n\n{FOOTER}\n", HEADER, FOOTER) == Dropped("only_boilerplate", "2 lines")


def test_short_lines_braces_and_rules_do_not_count() -> None:
    code = ["{", "    }", "", "else:", "return False", "-" * 40, "_" * 40, "NORTHUMBERLAND.", "1234 5678 9012 34"]
    assert list(hash_lines(code)) == []
    assert len(list(hash_lines([HEADER, "我们的新闻网站版权所有不得转载谢谢大家"]))) == 2


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """31 documents with header and footer, of which 10 and 9 have other lines, one a refrain, and one nothing else."""
    texts = []
    for number in range(30):
        lines = [HEADER, "", f"This is report number {number} of the season", "if (a) {", "}"]
        if number < 10:
            lines.append(OFTEN)
        if number < 9:
            lines.append(SELDOM)
        if number == 20:
            lines += [REFRAIN] * 50
        lines.append("")
        if number % 2:
            lines.append(FOOTER)
        else:
            lines.append(FOOTER.replace(" ", "  "))
        texts.append("\n".join(lines))
    return [*texts, f"{HEADER}\n{FOOTER}"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> list[Path]:
    folder = tmp_path_factory.mktemp("sources")
    return [write_jsonl(folder / "a.jsonl", texts[:7]), write_jsonl(folder / "b.jsonl", texts[7:])]


def run(out: Path, tokenizer: Path, files: list[Path], **options: Any) -> list[str]:
    rows = tokenize(out, tokenizer, *files, boilerplate=10, validation_split=0, max_length=2, **options)
    return documents_in(rows["train"], out)


@dataclass(frozen=True)
class Whole:
    """A token dataset made by one process in one go, its documents, and the output."""

    folder: Path
    documents: list[str]
    printed: str


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, files: list[Path]) -> Whole:
    folder = tmp_path_factory.mktemp("whole") / "out"
    with redirect_stdout(StringIO()) as printed:
        documents = run(folder, tiny_model_dir, files)
    return Whole(folder, documents, printed.getvalue())


def test_lines_of_many_documents_are_removed_and_counted(whole: Whole) -> None:
    bodies = [f"This is report number {number} of the season\nif (a) {{\n}}" for number in range(30)]
    with_seldom = [f"{body}\n{SELDOM}" for body in bodies[:9]]
    expected = [*with_seldom, *bodies[9:20], *bodies[21:]]  # document 20 has the refrain
    assert [document for document in whole.documents if REFRAIN not in document] == expected
    manifest = manifest_of(whole.folder)
    assert manifest.ledger.documents_skipped == {"only_boilerplate": 1}
    assert manifest.ledger.edits == {"boilerplate lines": 70}
    assert manifest.cleaning["boilerplate"]["lines"] == 3
    shown = manifest.cleaning["boilerplate"]["most_frequent"]
    assert sorted(shown) == [f"{FOOTER} (31 documents)", f"{OFTEN} (10 documents)", f"{HEADER} (31 documents)"]
    assert manifest.settings.boilerplate == 10
    assert "left out: 1 only boilerplate; changed: 70 boilerplate lines" in whole.printed
    (sample,) = map(json.loads, (whole.folder / "dropped.jsonl").read_text().splitlines())
    assert (sample["reason"], sample["detail"], sample["place"][-10:]) == ("only_boilerplate", "2 lines", "b.jsonl:24")


def test_processes_ranges_and_a_restart_remove_the_same_lines(
    tmp_path: Path, tiny_model_dir: Path, files: list[Path], whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_counts, "_LINES_AT_ONCE", 7)
    sizes = ShardSizes(smallest=500, worth_keeping=0)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(build, "encode_sources", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out", tiny_model_dir, files, num_proc=2, sizes=sizes)
    assert len(list((tmp_path / ".out.unfinished").glob("*.lines"))) > 5
    monkeypatch.setattr(line_counts, "_count_shard", interrupt)  # no shard is counted again
    run(tmp_path / "out", tiny_model_dir, files, num_proc=2, sizes=sizes)
    expected = manifest_of(whole.folder)
    restarted = manifest_of(tmp_path / "out")
    assert (restarted.ledger, restarted.cleaning) == (expected.ledger, expected.cleaning)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_bad_row_ends_the_count_or_is_left_out(tmp_path: Path, tiny_model_dir: Path, texts: list[str]) -> None:
    file = write_jsonl(tmp_path / "bad.jsonl", texts)
    file.write_text('{"text": 1}\n' + file.read_text())
    with pytest.raises(InputError, match=r"bad\.jsonl.*1: column 'text' holds int, not text.*--on_bad_rows skip"):
        run(tmp_path / "out", tiny_model_dir, [file])
    assert len(run(tmp_path / "out", tiny_model_dir, [file], on_bad_rows="skip")) == 30


def test_values_that_cannot_work_are_refused() -> None:
    arguments = TokenizeArguments(
        dataset=["a"], tokenizer_name="tokenizer", output_dir="out", boilerplate=1, stream=True
    )
    assert arguments.faults() == [
        "--boilerplate 1 removes every line; give 2 or more",
        "--boilerplate 1 reads sources twice, so --stream would download them twice; leave out --stream, or give a "
        "folder of repeated lines (docs/cleaning.md)",
    ]
    assert replace(arguments, boilerplate="lines").faults() == []
