"""Lines counted by tasks with --shard I/N, added up by a merge, and removed by tasks that get the folder."""

import io
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fabric_train.cleaning import boilerplate
from fabric_train.cleaning.boilerplate import (
    Boilerplate,
    hash_lines,
    open_boilerplate,
    write_repeated_lines,
)
from fabric_train.cli.errors import InputError
from fabric_train.programs import tokenize_dataset
from fabric_train.tokenization import line_counts, merge, slice_folder
from fabric_train.tokenization.shards import ShardSizes
from tests.support.token_datasets import manifest_of, write_jsonl

NUM_TASKS = 3
HEADER = "The Daily News of Sueca"
CONTACT = "Write to ana.perez@example.com to answer"
SMALL = ShardSizes(smallest=700, worth_keeping=0)
PROGRAMS = {"tokenize": tokenize_dataset, "merge": merge}


@dataclass(frozen=True)
class Made:
    """A folder with ``texts/``, slices in ``counts/``, their repeated lines in ``lines/``, and the output."""

    folder: Path
    by_tasks: list[str]
    by_merge: str


def run_line(line: str) -> None:
    """Run a command line as it was printed."""
    found = re.match(r"\S+ (?:-m fabric_train\.tokenization\.|\S*/)?(tokenize|merge)\S* (.*)", line)
    assert found, line
    words = shlex.split(found[2])
    given = [one for word in words for one in (map(str, Path().glob(word)) if "*" in word else [word])]
    PROGRAMS[found[1]].main(given, SMALL)


def command_after(label: str, printed: str) -> str:
    """Return the command in the line that begins with ``label``."""
    (line,) = (line for line in printed.splitlines() if line.startswith(f"{label} "))
    return line.split(": ", 1)[1]


def tokenize(tokenizer: Path, words: str) -> None:
    line = f"python tokenize_dataset.py --dataset texts --tokenizer_name {tokenizer} --max_length 16 --num_proc 1"
    run_line(f"{line} --redact email {words}")


def printed_by(run: Callable[..., None], *given: object) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        run(*given)
    return printed.getvalue()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Made:
    """30 documents with one line, and 10 of them with another, so that no slice alone has that one ten times."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "texts").mkdir()
    texts = [f"{HEADER}\n\nThis is report number {number} of the season" for number in range(30)]
    texts = [f"{text}\n{CONTACT}" if number % 3 == 0 else text for number, text in enumerate(texts)]
    write_jsonl(folder / "texts" / "a.jsonl", texts[:13])
    write_jsonl(folder / "texts" / "b.jsonl", texts[13:])
    by_tasks = []
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for number in range(1, NUM_TASKS + 1):
            words = f"--boilerplate 10 --shard {number}/{NUM_TASKS} --output_dir counts/{number}"
            by_tasks.append(printed_by(tokenize, tiny_model_dir, words))
        by_merge = printed_by(run_line, command_after("next", by_tasks[0]))
    return Made(folder, by_tasks, by_merge)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_printed_commands_give_the_rows_of_one_run(
    tmp_path: Path, made: Made, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    for printed in made.by_tasks:
        said = printed_by(run_line, command_after("then", printed))
    run_line(command_after("next", said).replace("DIR", str(tmp_path / "merged")))
    tokenize(tiny_model_dir, f"--boilerplate 10 --output_dir {tmp_path / 'one'}")
    tokenize(tiny_model_dir, f"--boilerplate lines --output_dir {tmp_path / 'lines'}")
    one, merged, lines = (content(tmp_path / name) for name in ("one", "merged", "lines"))
    assert lines == merged
    assert one.pop("manifest.json") != merged.pop("manifest.json")
    assert one == merged
    manifest = manifest_of(tmp_path / "merged")
    assert manifest.ledger.edits == {"boilerplate lines": 40}
    assert manifest.settings.boilerplate == "lines"
    assert replace(manifest, settings=replace(manifest.settings, boilerplate=10)) == manifest_of(tmp_path / "one")


def test_the_merge_shows_lines_without_personal_data(made: Made) -> None:
    shown = ["The Daily News of Sueca (30 documents)", "Write to <EMAIL> to answer (10 documents)"]
    assert "lines    2 are in 10 documents or more; look at the most frequent:" in made.by_merge
    assert [line.strip() for line in made.by_merge.splitlines() if "documents)" in line] == shown
    assert "ana.perez" not in (made.folder / "lines" / "lines.json").read_text()
    assert command_after("next", made.by_merge) == command_after("then", made.by_tasks[0])


def test_lines_counted_without_redact_are_redacted_where_they_are_removed(tmp_path: Path, tiny_model_dir: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", [f"Text {number}\n{CONTACT}" for number in range(30)])
    (tmp_path / "lines").mkdir()
    hashes = np.array([hashed for _, hashed in hash_lines([CONTACT])], np.uint64)
    write_repeated_lines(tmp_path / "lines", Boilerplate(2, hashes, ((CONTACT, 30),)), "text")
    tokenize(
        tiny_model_dir,
        f"--dataset {tmp_path / 'texts.jsonl'} --boilerplate {tmp_path / 'lines'} --output_dir {tmp_path / 'out'}",
    )
    cleaning = manifest_of(tmp_path / "out").cleaning["boilerplate"]
    assert cleaning["most_frequent"] == ["Write to <EMAIL> to answer (30 documents)"]


def test_a_merge_of_counted_slices_needs_each_of_one_run_once(
    tmp_path: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folder)
    first, second, third, twice, cut = (tmp_path / name for name in ("1", "2", "3", "twice", "cut"))
    other = tmp_path / "other"
    encoded = tmp_path / "encoded"
    for copy, number in {first: 1, second: 2, third: 3, twice: 3, cut: 3, other: 3, encoded: 3}.items():
        shutil.copytree(made.folder / "counts" / str(number), copy)
    for copy, value in {other: "9", encoded: "lines"}.items():
        config = (copy / "config.yaml").read_text(encoding="utf-8")
        (copy / "config.yaml").write_text(config.replace("boilerplate: 10", f"boilerplate: {value}"), encoding="utf-8")
    lines = max(cut.glob("*.lines"), key=lambda file: file.stat().st_size)
    os.truncate(lines, lines.stat().st_size - 12)
    faults = {
        (first, third): "of 3 slices these are missing: 2; run their tasks, such as --shard 2/3, to their end, and",
        (first, second, third, twice): f"{twice} and {third} are both slice 3/3; leave one of them out",
        (first, second, other): f"{first} was made with --boilerplate 10, and {other} not; remove it, and run its task",
        (first, second, encoded): f"{second} has counted lines, and {encoded} is encoded; merge each kind by itself",
        (first, second, cut): f"{cut}: {lines.name} has ",
    }
    for folders, fault in faults.items():
        check_refused(folders, tmp_path / "lines", fault)
    (made.folder / "texts" / "c.jsonl").write_text('{"text": "new"}\n', encoding="utf-8")
    check_refused((first, second, third), tmp_path / "lines", "texts/c.jsonl has changed since the tasks ran; remove ")
    (made.folder / "texts" / "c.jsonl").unlink()
    monkeypatch.setattr(boilerplate, "FORMAT", 2)
    check_refused((first, second, third), tmp_path / "lines", f"{first}: the tokenizer, or a package or file that")
    assert not (tmp_path / "lines").exists()


def check_refused(folders: tuple[Path, ...], target: Path, fault: str) -> None:
    with pytest.raises(InputError) as raised:
        merge.main([*map(str, folders), "--output_dir", str(target)], SMALL)
    assert str(raised.value).startswith(fault)


def test_a_stopped_counting_task_continues_and_a_finished_one_does_nothing(
    tmp_path: Path, made: Made, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(made.folder)
    words = f"--boilerplate 10 --shard 2/3 --output_dir {tmp_path / '2'}"
    with monkeypatch.context() as stopped:
        stopped.setattr(slice_folder, "dump", interrupt)  # when the lines are counted
        with pytest.raises(KeyboardInterrupt):
            tokenize(tiny_model_dir, words)
    assert os.listdir(tmp_path) == [".2.unfinished"]
    monkeypatch.setattr(line_counts, "_count_shard", interrupt)  # no shard is counted again
    tokenize(tiny_model_dir, words)
    finished = content(tmp_path / "2")
    expected = content(made.folder / "counts" / "2")
    assert finished.pop("config.yaml") != expected.pop("config.yaml")  # it has the folder's name
    assert finished == expected
    assert "has slice 2/3 already: nothing to do" in printed_by(tokenize, tiny_model_dir, words)
    with pytest.raises(InputError, match="2 was made with --boilerplate 10; choose another folder, or remove it"):
        tokenize(tiny_model_dir, words.replace("--boilerplate 10", "--boilerplate lines"))


def test_a_folder_that_has_no_lines_of_this_column_and_version_is_refused(tmp_path: Path, made: Made) -> None:
    folder = Path(shutil.copytree(made.folder / "lines", tmp_path / "lines"))
    expected = open_boilerplate(str(folder), "text")
    assert (expected.num_documents, len(expected.hashes)) == (10, 2)
    record = json.loads((folder / "lines.json").read_text(encoding="utf-8"))
    faults = {f"--boilerplate {folder} has lines of the column 'text', not 'body'; give --text_column text, or": folder}
    faults[f"--boilerplate {tmp_path}: no lines.json there; give a number of documents, or a folder"] = tmp_path
    for name, changed in {"old": {**record, "format": 0}, "wrong": {**record, "sha256": ""}}.items():
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "lines.json").write_text(json.dumps(changed), encoding="utf-8")
    faults[f"{tmp_path}/old/lines.json has format 0, this version reads 1; count the lines again"] = tmp_path / "old"
    faults[f"{tmp_path}/wrong/hashes: damaged; count the lines again, with --shard"] = tmp_path / "wrong"
    for fault, given in faults.items():
        with pytest.raises(InputError) as raised:
            open_boilerplate(str(given), "body" if given == folder else "text")
        assert str(raised.value).startswith(fault)
