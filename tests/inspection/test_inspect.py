"""python -m fabric_train.inspection counts the content of rows and reports their faults."""

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.cli.parser import parse_arguments
from fabric_train.inspection import __main__ as inspect
from fabric_train.inspection.__main__ import InspectArguments
from fabric_train.inspection.report import make_report
from fabric_train.inspection.row_view import SHOWN_BEGIN, SHOWN_END, Expectation
from fabric_train.inspection.split_check import SplitCheck
from fabric_train.token_dataset.token_folder import RowBatch, open_splits
from fabric_train.tokenization.tokenizers.vocabulary import load_vocabulary

# of the tiny tokenizer
BOS = 0
EOS = 1
IGNORED = -100
HARD = "<script>alert('x')</script> &amp; \"é\" 你好 😀\t\x1b[31m \u202edrawkcab\r\n  end"


def save(folder: Path, tokenizer: Path | None, **splits: dict[str, list[Any]]) -> Path:
    """Write a token dataset without a manifest, as in older versions."""
    datasets.disable_progress_bars()
    split_datasets = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
    datasets.DatasetDict(split_datasets).save_to_disk(folder)
    if tokenizer:
        shutil.copytree(tokenizer, folder / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def inspected(folder: Path, capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str, list[str]]:
    """Return exit code, output and problems."""
    code = 0
    try:
        inspect.main([str(folder), *map(str, options)])
    except SystemExit as end:
        code = int(end.code or 0)
    output = capsys.readouterr().out
    return code, output, re.findall(r"^✗ (.*)$", output, re.MULTILINE)


@pytest.fixture
def dataset_copy(tmp_path: Path, tiny_tokens_dir: Path) -> Path:
    """A copy of the tiny dataset that a test may damage."""
    return Path(shutil.copytree(tiny_tokens_dir, tmp_path / "copy"))


def test_dataset_from_tokenize_dataset_has_no_problems(tiny_tokens_dir: Path, run_program: Any) -> None:
    finished = run_program("-m", "fabric_train.inspection", tiny_tokens_dir)
    assert (finished.returncode, finished.stderr) == (0, "")
    ledger = json.loads((tiny_tokens_dir / "manifest.json").read_text())["ledger"]
    for name, key in [("tokens in", "tokens_in"), ("supervised", "tokens_supervised"), ("rows", "rows")]:
        counts = [ledger[split][key] for split in ("train", "validation")]
        numbers = " +".join(f"{count:,}" for count in (sum(counts), *counts))
        assert re.search(f"^ +{name} +{numbers} *$", finished.stdout, re.MULTILINE), name
    assert "no problems found" in finished.stdout
    assert "\x1b" not in finished.stdout  # no colours if the output is not a terminal


def test_help_explains_the_exit_code(run_program: Any) -> None:
    finished = run_program("-m", "fabric_train.inspection", "--help")
    assert finished.returncode == 0
    assert "DATASET_DIR" in finished.stdout
    assert "exit with code 0, or 1 if there are problems" in " ".join(finished.stdout.split())


def test_counts_and_lengths_are_those_of_the_rows(tiny_tokens_dir: Path) -> None:
    report = make_report(tiny_tokens_dir, "train", range(0), lambda done, total: None)
    rows = datasets.load_from_disk(tiny_tokens_dir)["train"]["input_ids"][:]
    ids = [token for row in rows for token in row]
    starts = [position for position, token in enumerate(ids) if token == BOS]
    counts = report.counts["train"]
    assert (counts.rows, counts.tokens, counts.padding, counts.supervised) == (len(rows), len(ids), 0, len(ids))

    # a document lasts until the next one begins; rows have 64 tokens
    documents = list(pairwise([*starts, len(ids)]))
    assert counts.lengths == Counter(end - start for start, end in documents)
    assert counts.documents_over_rows == sum(start // 64 != (end - 1) // 64 for start, end in documents)
    assert counts.documents_cut == (ids[-1] != EOS)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    max_length=st.integers(2, 16),
    overlap=st.integers(0, 5),
    batch_rows=st.integers(1, 4),
)
def test_document_lengths_do_not_depend_on_rows_and_batches(
    lengths: list[int], max_length: int, overlap: int, batch_rows: int
) -> None:
    # each document in its own rows, with overlapping windows
    overlap = min(overlap, max_length - 1)
    rows: list[list[int]] = []
    labels_of_rows: list[list[int]] = []
    begins_document: list[bool] = []  # otherwise the row continues one
    for length in lengths:
        document = [*range(10, 10 + length - 1), EOS]
        start = 0
        while start == 0 or start + overlap < length:
            ids = document[start : start + max_length]
            num_repeated = overlap if start else 0
            labels = [IGNORED] * num_repeated + ids[num_repeated:]
            num_padding = max_length - len(ids)
            rows.append(ids + [EOS] * num_padding)
            labels_of_rows.append(labels + [IGNORED] * num_padding)
            begins_document.append(start == 0)
            start += max_length - overlap

    # check them in batches
    expectation = Expectation(
        max_length=max_length,
        overlap=overlap,
        in_sequence=True,
        vocab_size=100,
        bos_token_id=BOS,
        unk_token_id=None,
        end_token_ids=(EOS,),
        is_ended=True,
        padding_token_ids=(EOS,),
    )
    check = SplitCheck("train", expectation)
    for first in range(0, len(rows), batch_rows):
        batch = slice(first, first + batch_rows)
        rows_with_start = np.flatnonzero(begins_document[batch])
        check.add(
            RowBatch(
                first_row=first,
                input_ids=np.concatenate(rows[batch]).astype(np.int32),
                offsets=np.arange(len(rows[batch]) + 1) * max_length,
                labels=np.concatenate(labels_of_rows[batch]).astype(np.int32),
                document_starts=np.zeros(len(rows_with_start), dtype=np.int32),  # at the beginning of their rows
                start_rows=rows_with_start,
            )
        )
    counts, problems = check.finish()
    assert counts.lengths == Counter(lengths)
    assert counts.documents_over_rows == sum(length > max_length for length in lengths)
    assert counts.supervised == sum(lengths)
    assert not counts.documents_cut
    assert all("without any supervised" in problem.text for problem in problems)  # documents of one token


def problems_of(
    rows: list[list[int]], starts_of_rows: list[list[int]], *, overlap: int = 0, in_sequence: bool = True
) -> list[str]:
    """Check rows, each in its own batch, with trailing tokens 9 as padding; documents begin at ``starts_of_rows``."""
    expectation = Expectation(
        max_length=None,
        overlap=overlap,
        in_sequence=in_sequence,
        vocab_size=None,
        bos_token_id=BOS,
        unk_token_id=None,
        end_token_ids=(EOS,),
        is_ended=True,
        padding_token_ids=(9,),
    )
    check = SplitCheck("train", expectation)
    for row, (ids, starts) in enumerate(zip(rows, starts_of_rows, strict=True)):
        input_ids = np.array(ids)
        check.add(
            RowBatch(
                first_row=row,
                input_ids=input_ids,
                offsets=np.array([0, len(ids)]),
                labels=np.where(input_ids == 9, IGNORED, input_ids),
                document_starts=np.array(starts),
                start_rows=np.zeros(len(starts), dtype=int),
            )
        )
    _, problems = check.finish()
    return [str(problem) for problem in problems]


def test_line_break_after_the_last_turn_is_not_a_missing_eos() -> None:
    assert problems_of([[BOS, 5, EOS, 6], [BOS, 5, 5, EOS], [6, BOS, 5, EOS]], [[0], [0], [1]]) == []
    assert len(problems_of([[BOS, 5, 5, 5], [6, BOS, 5, EOS]], [[0], [1]])) == 1


def test_bos_repeated_in_the_next_row_is_not_a_double_bos() -> None:
    rows = [[5, 5, EOS, BOS], [BOS, 5, 5, EOS]]
    starts = [[0, 3], []]
    assert problems_of(rows, starts, overlap=1) == []


def test_best_fit_may_put_parts_of_a_long_document_in_any_rows() -> None:
    rows = [[BOS, 5, 5, 5], [BOS, 6, 6, EOS], [BOS, 7, EOS, 9], [5, 5, EOS, 9]]
    starts = [[0], [0], [0], []]
    assert problems_of(rows, starts, in_sequence=False) == []
    assert problems_of([*rows, [BOS, 5, 9, 9]], [*starts, [0]], in_sequence=False) == [
        "train: documents that do not end with EOS: 1, first in row 4"
    ]


FAULTY: dict[str, tuple[dict[str, list[Any]], str]] = {
    "double BOS": (
        {"input_ids": [[5, EOS, BOS, 6], [8, EOS, BOS, BOS]], "document_starts": [[0, 2], [2]]},
        "documents that begin with two BOS: 1, first in row 1",
    ),
    "no EOS": (
        {"input_ids": [[BOS, 5, EOS, BOS], [6, 8, BOS, 8]], "document_starts": [[0, 3], [2]]},
        "documents that do not end with EOS: 1, first in row 1",
    ),
    "no EOS before padding": (
        {"input_ids": [[5, 6, 2, 2]], "labels": [[5, 6, IGNORED, IGNORED]], "document_starts": [[0]]},
        "documents that do not end with EOS: 1, first in row 0",
    ),
    "nothing supervised": (
        {
            "input_ids": [[5, EOS, 8]] * 3,
            "labels": [[5, EOS, 8], [IGNORED] * 3, [5, IGNORED, IGNORED]],
            "document_starts": [[0]] * 3,
        },
        "rows without any supervised token: 2, first in row 1",
    ),
    "outside the vocabulary": (
        {"input_ids": [[5, EOS], [1000, -1]], "document_starts": [[0], [0]]},
        "ids outside the vocabulary: 2, first in row 1",
    ),
    "labels shifted": (
        {"input_ids": [[5, 6, EOS]], "labels": [[6, EOS, EOS]], "document_starts": [[0]]},
        "labels that differ from the token at their position: 2, first in row 0",
    ),
    "borders": (
        {"input_ids": [[5, EOS], [5, EOS], [5, EOS]], "document_starts": [[0], [0, 2], [0, 0]]},
        "document borders outside their row or out of order: 2, first in row 1",
    ),
    "unknown tokens": (
        {"input_ids": [[5] * 998 + [7, EOS], [5] * 998 + [7, 7]], "document_starts": [[0], [0]]},
        "unknown tokens: 3, 0.15% of all, first in row 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_each_problem_is_one_line_with_its_count_and_first_row(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    columns, problem = FAULTY[fault]
    folder = save(tmp_path / "faulty", tiny_model_dir, train=columns)
    with_roles(folder / "tokenizer", pad_token=2, unk_token=7)
    code, _, problems = inspected(folder, capsys)
    assert (code, problems) == (1, [f"train: {problem}"])


def with_roles(tokenizer: Path, **roles: int) -> None:
    """Give ordinary tokens of the tokenizer roles for which it has no token."""
    vocabulary = load_vocabulary(tokenizer)
    assert vocabulary is not None
    file = tokenizer / "tokenizer_config.json"
    tokens = {role: vocabulary.tokenizer.id_to_token(token) for role, token in roles.items()}
    file.write_text(json.dumps(json.loads(file.read_text()) | tokens))


def test_few_unknown_tokens_are_not_a_problem(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"input_ids": [[5] * 998 + [7, EOS]], "document_starts": [[0]]}
    folder = save(tmp_path / "clean", tiny_model_dir, train=rows)
    with_roles(folder / "tokenizer", unk_token=7)
    assert inspected(folder, capsys)[0] == 0


@pytest.mark.parametrize("field", ["rows", "tokens_in_rows", "tokens_supervised", "tokens_padding", "documents"])
def test_ledger_that_differs_from_the_rows_is_reported(
    dataset_copy: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    manifest = json.loads((dataset_copy / "manifest.json").read_text())
    ledger = manifest["ledger"]["validation"]
    ledger[field] -= 3
    (dataset_copy / "manifest.json").write_text(json.dumps(manifest))
    code, _, problems = inspected(dataset_copy, capsys)
    assert code == 1
    assert any(line.startswith(f"validation: the ledger has {ledger[field]:,}") for line in problems)
    is_term_of_balance = field != "tokens_supervised"
    assert any("does not balance" in line for line in problems) == is_term_of_balance


def test_wrong_row_length_and_changed_tokenizer_are_reported(
    dataset_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((dataset_copy / "manifest.json").read_text())
    manifest["settings"]["max_length"] = 65
    (dataset_copy / "manifest.json").write_text(json.dumps(manifest))
    (dataset_copy / "tokenizer" / "tokenizer_config.json").write_text("{}")
    code, _, problems = inspected(dataset_copy, capsys)
    assert code == 1
    assert "tokenizer: tokenizer_config.json differs from the file in the manifest" in problems
    rows = manifest["ledger"]["train"]["rows"]
    assert f"train: rows that are not 65 tokens long: {rows}, first in row 0" in problems


def test_padding_is_distinguished_from_the_documents_eos(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"input_ids": [[5, EOS, EOS, EOS], [5, 6, 7, EOS]], "document_starts": [[0], [0]]}
    labels = [[5, EOS, IGNORED, IGNORED], [5, 6, 7, EOS]]
    folder = save(tmp_path / "padded", tiny_model_dir, train={**rows, "labels": labels})
    code, output, _ = inspected(folder, capsys)
    assert code == 0
    assert re.search(r"padding +2 +2", output)
    assert "░ 2 × <|end_of_text|>" in output


def test_older_folder_is_reported_as_far_as_possible(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"input_ids": [[5, 6, 7], [8, 9]], "labels": [[5, 6, 7], [IGNORED, 9]], "attention_mask": [[1] * 3, [1] * 2]}
    folder = save(tmp_path / "old", None, train=rows, valid=rows)
    code, output, _ = inspected(folder, capsys, "--split", "validation")
    assert code == 0
    assert "2 train, 2 valid" in output
    assert re.search(r"supervised +8 +4 +4", output)
    assert "does not store where documents begin" in output
    assert "‹⟨8⟩›⟨9⟩" in output  # without a tokenizer, ids are shown


def test_rows_are_shown_with_labels_borders_and_continuation(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    a, b = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "b"))
    rows = {
        "input_ids": [[BOS, a, b, EOS, BOS, a], [b, b, EOS, EOS, EOS, EOS]],
        "labels": [[BOS, IGNORED, b, EOS, BOS, a], [b, b, EOS, IGNORED, IGNORED, IGNORED]],
        "document_starts": [[0, 4], []],
    }
    _, output, _ = inspected(save(tmp_path / "rows", tiny_model_dir, train=rows), capsys)
    assert "┃<|begin_of_text|>‹a›b<|end_of_text|>┃<|begin_of_text|>a┆\n" in output
    assert "┆bb<|end_of_text|>░ 3 × <|end_of_text|>\n" in output
    _, output, _ = inspected(tmp_path / "rows", capsys, "--start", 1, "--rows", 1)
    assert "train, row 1:" in output
    assert "train, row 0:" not in output


class _Page(HTMLParser):
    """A parser that collects the page's elements, attributes and token titles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)
        self.titles += [value or "" for name, value in attrs if name == "title" and tag == "span"]


@pytest.fixture(scope="module")
def hard_dir(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A dataset of one row with text that is dangerous in a page or on a terminal."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    ids = [BOS, *tokenizer.encode(HARD, add_special_tokens=False), EOS]
    rows = {"input_ids": [ids], "document_starts": [[0]]}
    return save(tmp_path_factory.mktemp("hard") / "<b>hard</b>", tiny_model_dir, train=rows)


def test_page_is_self_contained_and_runs_no_text_of_the_dataset(
    tmp_path: Path, hard_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    inspected(hard_dir, capsys, "--html", file)
    text = file.read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert not page.tags.keys() & {"script", "link", "img", "iframe", "object"}
    assert page.attributes.keys() <= {
        "lang",
        "charset",
        "name",
        "content",
        "http-equiv",
        "class",
        "style",
        "title",
        "dir",
    }
    assert not re.search(r"https?:|url\(|@import|<b>hard", text)
    assert "\x1b" not in text
    assert "\u202e" not in text
    ids_of_page: list[int] = []
    for title in page.titles:
        ids_of_token = re.findall(r"id ([\d ]+)", title)[0].split()  # several ids may share a character
        ids_of_page += map(int, ids_of_token)
    assert ids_of_page == list(datasets.load_from_disk(hard_dir)["train"]["input_ids"][0])


def test_dataset_cannot_send_commands_to_the_terminal(hard_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = inspected(hard_dir, capsys)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", output)
    assert "⟨U+001B⟩[31m" in output.replace("\n", "")


@pytest.mark.parametrize("kind", ["chatml", "small_spm"])
def test_texts_of_the_tokens_join_to_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{kind}_dir")
    vocabulary = load_vocabulary(folder)
    assert vocabulary is not None
    ids = vocabulary.tokenizer.encode(HARD + " क्षत्रिय 👩‍👩‍👧", add_special_tokens=False).ids
    spans = list(vocabulary.spans(ids))
    assert sum(count for count, _ in spans) == len(ids)
    assert max(count for count, _ in spans) > 1
    assert "".join(text for _, text in spans).strip() == HARD + " क्षत्रिय 👩‍👩‍👧"


@pytest.mark.parametrize(
    "wrong", ["missing", "not a dataset", "one split", "no file", "cut", "no rows there", "no split"]
)
def test_unreadable_dataset_is_reported_in_one_line(dataset_copy: Path, tmp_path: Path, wrong: str) -> None:
    folder = dataset_copy
    options = ["--rows", "1"]
    rows_file = next((dataset_copy / "validation").glob("*.arrow"))
    if wrong == "missing":
        folder = tmp_path / "none"
        expected = "no such folder"
    elif wrong == "not a dataset":
        folder = tmp_path
        expected = "not a token dataset"
    elif wrong == "one split":
        folder = dataset_copy / "train"
        expected = "give its parent folder"
    elif wrong == "no file":
        rows_file.unlink()
        expected = str(rows_file)
    elif wrong == "cut":
        rows_file.write_bytes(rows_file.read_bytes()[:3000])
        expected = str(rows_file)
    elif wrong == "no rows there":
        options = ["--start", "100000"]
        expected = "rows, numbered from 0"
    else:
        (dataset_copy / "dataset_dict.json").write_text('{"splits": ["train"]}')
        options = ["--split", "validation"]
        expected = "no validation split, only train"
    with pytest.raises(InputError) as error:
        inspect.main([str(folder), *options])
    (fault,) = error.value.faults
    assert expected in fault


def test_batches_are_small_for_any_file_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_train.token_dataset.token_folder._TOKENS_PER_BATCH", 10)
    rows = [list(range(length)) for length in (3, 4, 5, 1, 9, 2)]
    split = open_splits(save(tmp_path / "many", None, train={"input_ids": rows}))["train"]
    batches = list(split.batches())
    assert [batch.first_row for batch in batches] == [0, 2, 4]
    assert np.concatenate([batch.input_ids for batch in batches]).tolist() == [token for row in rows for token in row]


@pytest.mark.parametrize("line", ["DIR --rows 2", "--rows 2 DIR", "--rows=2 DIR", "--dataset_dir DIR --rows 2"])
def test_folder_can_be_anywhere_on_the_command_line(line: str) -> None:
    arguments = parse_arguments(InspectArguments, line.split())
    assert (arguments.dataset_dir, arguments.rows) == ("DIR", 2)


@pytest.mark.parametrize(
    "line, fault",
    [
        ("", "DATASET_DIR is required"),
        ("DIR OTHER", "--dataset_dir: expected text or null, got 'DIR OTHER'; put a value with spaces in quotes"),
        ("DIR --row 2", "--row: no such argument; did you mean --rows?"),
        ("DIR --html nowhere/page.html", "--html nowhere/page.html: expected a file in an existing folder"),
    ],
)
def test_wrong_command_line_is_reported(line: str, fault: str) -> None:
    with pytest.raises(InputError) as error:
        parse_arguments(InspectArguments, line.split())
    assert len(error.value.faults) == 1
    assert fault in error.value.faults[0]


def test_the_middle_of_a_long_row_is_left_out(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    a, b, c = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
    ids = [BOS] + [a] * 9_000 + [EOS, BOS] + [b] * 9_000 + [EOS, BOS] + [c] * 99 + [EOS]
    starts = [0, 9_002, 18_004]
    folder = save(tmp_path / "long", tiny_model_dir, train={"input_ids": [ids], "document_starts": [starts]})
    code, output, _ = inspected(folder, capsys, "--html", tmp_path / "page.html")
    assert code == 0
    assert re.search(rf"supervised +{len(ids):,}", output)
    left_out = len(ids) - SHOWN_BEGIN - SHOWN_END
    gap = f"⋯ {left_out:,} tokens left out here; documents that begin in them: 1 ⋯"
    assert gap in " ".join(output.split())
    page = _Page()
    page.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    shown = [title for title in page.titles if title.startswith("position")]
    assert len(shown) == SHOWN_BEGIN + SHOWN_END
    assert shown[-1].startswith(f"position {len(ids) - 1:,}, id {EOS}, EOS")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert gap in text
    assert re.findall(r"document border at position ([\d,]+)", text) == ["0", "18,004"]
    assert "continued from another row" not in text
