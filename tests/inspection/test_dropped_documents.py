"""python -m fabric_train.inspection shows what cleaning dropped and changed."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fabric_train.cleaning.dropped import DROPPED_FILE, DroppedText, write_sample
from fabric_train.cli.errors import InputError
from fabric_train.inspection import __main__ as inspect
from fabric_train.token_dataset.document_index import SourceTable
from fabric_train.tokenization import merge
from tests.support.token_datasets import manifest_of

HARD = "<script>alert('x')</script>\n\x1b[31m \u202edrawkcab <b>"


@pytest.fixture
def cleaned(tmp_path: Path, tiny_tokens_dir: Path) -> Path:
    """The tiny dataset as if cleaning had dropped 25 and 2 documents, and changed 7 places."""
    folder = shutil.copytree(tiny_tokens_dir, tmp_path / "cleaned")
    file = folder / "manifest.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["ledger"] |= {
        "documents_skipped": {"other_language": 25, "low_quality: few_words": 2},
        "edits": {"redacted email": 7},
    }
    content["ledger"]["documents_read"] += 27
    content["sources"][0]["documents_skipped"] = content["ledger"]["documents_skipped"]
    content["cleaning"] = {"language": {"languages": ["es", "ca"], "threshold": 0.65}, "redact": {"kinds": ["email"]}}
    file.write_text(json.dumps(content), encoding="utf-8")

    # their texts, each with its file and row
    dropped = []
    for reason, detail, count in (("other_language", "en 0.99", 25), ("low_quality: few_words", "12 words", 2)):
        for number in range(count):
            text = DroppedText(reason, detail, f"{reason} number {number} {HARD}")
            dropped.append((text, (0, number + 1)))
    write_sample(folder, dropped, SourceTable(manifest_of(folder).sources))
    return folder


def inspected(folder: Path, capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str, list[str]]:
    """Return exit code, output and problems."""
    code = 0
    try:
        inspect.main([str(folder), "--rows", "0", *map(str, options)])
    except SystemExit as end:
        code = int(end.code or 0)
    output = capsys.readouterr().out
    return code, output, re.findall(r"^✗ (.*)$", output, re.MULTILINE)


def test_merge_joins_the_samples_of_dropped_documents(
    cleaned: Path, tiny_tokens_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = shutil.copytree(cleaned, cleaned.parent / "second")
    target = cleaned.parent / "merged"
    merge.main([str(cleaned), str(tiny_tokens_dir), str(second), "--output_dir", str(target)])
    reasons = [json.loads(line)["reason"] for line in (target / DROPPED_FILE).read_bytes().splitlines()]
    assert Counter(reasons) == {"low_quality: few_words": 4, "other_language": 20}  # at most 20 of a reason
    _, _, problems = inspected(target, capsys)
    assert problems == []
    (second / DROPPED_FILE).write_text('{"reason": "duplicate"}\n["duplicate"]\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"second/dropped\.jsonl: line 2 is damaged; "):
        merge.main([str(cleaned), str(second), "--output_dir", str(cleaned.parent / "none")])


def test_dropped_documents_are_shown_with_place_and_reason(
    cleaned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    code, output, problems = inspected(cleaned, capsys, "--html", cleaned.parent / "page.html")
    assert (code, problems) == (0, [])
    assert re.search(r"^ +skipped: other language +25 ", output, re.MULTILINE)
    assert re.search(r"^ +changed by cleaning: redacted email +7 ", output, re.MULTILINE)
    assert re.search(r"^--language +languages es ca, threshold 0.65 *$", output, re.MULTILINE)
    assert "other language: 20 of 25 documents" in output
    assert "low quality: few words: 2 of 2 documents" in output
    source = manifest_of(cleaned).sources[0]
    assert output.count("other_language number") == 3
    assert f"  {source.name}: {source.file_name(0)}:1: en 0.99\n" in output
    assert "\x1b" not in output
    assert "\u202e" not in output
    page = (cleaned.parent / "page.html").read_text(encoding="utf-8")
    assert page.count("other_language number") == 20
    assert page.count("<h3>12 words <small>") == 2
    assert "low_quality: few_words number 1 &lt;script&gt;alert" in page
    assert not re.search("<script|<b>|\x1b|\u202e", page)


def test_dataset_without_dropped_documents_shows_no_section(
    tiny_tokens_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, output, problems = inspected(tiny_tokens_dir, capsys, "--html", tmp_path / "page.html")
    assert not problems
    for text in (output, (tmp_path / "page.html").read_text(encoding="utf-8")):
        assert "left out" not in text
        assert "cleaning" not in text


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda lines: [*lines[:3], '{"reason": "other_language"}'], "line 4 is damaged: detail: Field required"),
        (lambda lines: ["[" * 10_000], "line 1 is damaged: "),
        (
            lambda lines: [lines[0].replace("few_words", "many_words")] * 2,
            "2 documents are listed as skipped (low_quality: ",
        ),
    ],
    ids=["a missing field", "nested", "not in the ledger"],
)
def test_damaged_sample_is_a_problem(
    change: Any, problem: str, cleaned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cleaned / DROPPED_FILE
    file.write_text("\n".join(change(file.read_text(encoding="utf-8").splitlines())), encoding="utf-8")
    code, _, problems = inspected(cleaned, capsys)
    assert code == 1
    assert len(problems) == 1
    assert problems[0].startswith(f"{DROPPED_FILE}: {problem}")
