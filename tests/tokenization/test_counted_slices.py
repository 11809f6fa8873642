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
class CountedSlices:
    """A folder with ``texts/``, slices in ``counts/``, their repeated lines in ``lines/``, and what was printed."""

    folder: Path
    outputs_of_tasks: list[str]
    output_of_merge: str


def run_line(line: str) -> None:
    """Run a command line as it was printed; a word with * stands for the files that it matches, as in a shell."""
    match = re.match(r"\S+ (?:-m fabric_train\.tokenization\.|\S*/)?(tokenize|merge)\S* (.*)", line)
    assert match, line
    program, arguments = match.groups()
    words: list[str] = []
    for word in shlex.split(arguments):
        if "*" in word:
            words += map(str, Path().glob(word))
        else:
            words.append(word)
    PROGRAMS[program].main(words, SMALL)


def command_after(label: str, printed: str) -> str:
    """Return the command in the line that begins with ``label``."""
    (line,) = (line for line in printed.splitlines() if line.startswith(f"{label} "))
    return line.partition(": ")[2]


def tokenize(tokenizer: Path, words: str) -> None:
    line = f"python tokenize_dataset.py --dataset texts --tokenizer_name {tokenizer} --max_length 16 --num_proc 1"
    run_line(f"{line} --redact email {words}")


def printed_by(run: Callable[..., None], *arguments: object) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        run(*arguments)
    return printed.getvalue()


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> CountedSlices:
    """30 documents with one line, and 10 of them with another, so that no slice alone has that one ten times."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "texts").mkdir()
    texts = []
    for number in range(30):
        text = f"{HEADER}\n\nThis is report number {number} of the season"
        if number % 3 == 0:
            text += f"\n{CONTACT}"
        texts.append(text)
    write_jsonl(folder / "texts" / "a.jsonl", texts[:13])
    write_jsonl(folder / "texts" / "b.jsonl", texts[13:])
    outputs_of_tasks = []
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        for task in range(1, NUM_TASKS + 1):
            words = f"--boilerplate 10 --shard {task}/{NUM_TASKS} --output_dir counts/{task}"
            outputs_of_tasks.append(printed_by(tokenize, tiny_model_dir, words))
        output_of_merge = printed_by(run_line, command_after("next", outputs_of_tasks[0]))
    return CountedSlices(folder, outputs_of_tasks, output_of_merge)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_printed_commands_give_the_rows_of_one_run(
    tmp_path: Path, counted: CountedSlices, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(counted.folder)

    # encode each slice with the counted lines, and merge the slices
    for output in counted.outputs_of_tasks:
        output_of_encoding = printed_by(run_line, command_after("then", output))
    run_line(command_after("next", output_of_encoding).replace("DIR", str(tmp_path / "merged")))

    # one run that counts by itself, and one that is given the counted lines
    tokenize(tiny_model_dir, f"--boilerplate 10 --output_dir {tmp_path / 'counting'}")
    tokenize(tiny_model_dir, f"--boilerplate lines --output_dir {tmp_path / 'given_lines'}")

    # they differ only in the setting
    merged = content(tmp_path / "merged")
    assert content(tmp_path / "given_lines") == merged
    counting = content(tmp_path / "counting")
    assert counting.pop("manifest.json") != merged.pop("manifest.json")
    assert counting == merged
    manifest = manifest_of(tmp_path / "merged")
    assert manifest.ledger.edits == {"boilerplate lines": 40}
    assert manifest.settings.boilerplate == "lines"
    counting_settings = replace(manifest.settings, boilerplate=10)
    assert replace(manifest, settings=counting_settings) == manifest_of(tmp_path / "counting")


def test_the_merge_shows_lines_without_personal_data(counted: CountedSlices) -> None:
    output = counted.output_of_merge
    assert "lines    2 occur in 10 documents or more; check the most frequent ones:" in output
    assert [line.strip() for line in output.splitlines() if "documents)" in line] == [
        "The Daily News of Sueca (30 documents)",
        "Write to <EMAIL> to answer (10 documents)",
    ]
    assert "ana.perez" not in (counted.folder / "lines" / "lines.json").read_text()
    assert command_after("next", output) == command_after("then", counted.outputs_of_tasks[0])


def test_lines_counted_without_redact_are_redacted_where_they_are_removed(tmp_path: Path, tiny_model_dir: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", [f"Text {number}\n{CONTACT}" for number in range(30)])
    (tmp_path / "lines").mkdir()
    hashes = np.array([line_hash for _, line_hash in hash_lines([CONTACT])], np.uint64)
    write_repeated_lines(tmp_path / "lines", Boilerplate(2, hashes, ((CONTACT, 30),)), "text")
    words = f"--dataset {tmp_path / 'texts.jsonl'} --boilerplate {tmp_path / 'lines'} --output_dir {tmp_path / 'out'}"
    tokenize(tiny_model_dir, words)
    cleaning = manifest_of(tmp_path / "out").cleaning["boilerplate"]
    assert cleaning["most_frequent"] == ["Write to <EMAIL> to answer (30 documents)"]


def test_a_merge_of_counted_slices_needs_each_of_one_run_once(
    tmp_path: Path, counted: CountedSlices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(counted.folder)

    def copied_slice(task: int, name: str, boilerplate_setting: str = "10") -> Path:
        folder = Path(shutil.copytree(counted.folder / "counts" / str(task), tmp_path / name))
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        changed_config = config.replace("boilerplate: 10", f"boilerplate: {boilerplate_setting}")
        (folder / "config.yaml").write_text(changed_config, encoding="utf-8")
        return folder

    # the three slices, and others in place of the third
    first = copied_slice(1, "1")
    second = copied_slice(2, "2")
    third = copied_slice(3, "3")
    twice = copied_slice(3, "twice")
    with_limit_9 = copied_slice(3, "with_limit_9", boilerplate_setting="9")
    encoded = copied_slice(3, "encoded", boilerplate_setting="lines")
    cut = copied_slice(3, "cut")
    lines_file = max(cut.glob("*.lines"), key=lambda file: file.stat().st_size)
    os.truncate(lines_file, lines_file.stat().st_size - 12)
    faults = {
        (first, third): "missing slices (of 3): 2; run their tasks to completion (such as --shard 2/3), and",
        (first, second, third, twice): f"{twice} and {third} are both slice 3/3; leave one of them out",
        (
            first,
            second,
            with_limit_9,
        ): f"{first} was written with --boilerplate 10, but {with_limit_9} was not; remove it ",
        (first, second, encoded): f"{second} contains line counts, but {encoded} contains tokens; merge each kind",
        (first, second, cut): f"{cut}: {lines_file.name} has ",
    }
    for folders, fault in faults.items():
        check_refused(folders, tmp_path / "lines", fault)

    # a new file, and another version of the program
    new_file = counted.folder / "texts" / "c.jsonl"
    new_file.write_text('{"text": "new"}\n', encoding="utf-8")
    check_refused((first, second, third), tmp_path / "lines", "texts/c.jsonl has changed since the tasks ran; remove ")
    new_file.unlink()
    monkeypatch.setattr(boilerplate, "FORMAT", 2)
    check_refused((first, second, third), tmp_path / "lines", f"{first}: the tokenizer, or a package or file that")
    assert not (tmp_path / "lines").exists()


def check_refused(folders: tuple[Path, ...], target: Path, fault: str) -> None:
    with pytest.raises(InputError) as raised:
        merge.main([*map(str, folders), "--output_dir", str(target)], SMALL)
    assert str(raised.value).startswith(fault)


def test_a_stopped_counting_task_continues_and_a_finished_one_does_nothing(
    tmp_path: Path, counted: CountedSlices, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(counted.folder)
    words = f"--boilerplate 10 --shard 2/3 --output_dir {tmp_path / '2'}"
    with monkeypatch.context() as stopped:
        stopped.setattr(slice_folder, "dump", interrupt)  # when the lines are counted
        with pytest.raises(KeyboardInterrupt):
            tokenize(tiny_model_dir, words)
    assert os.listdir(tmp_path) == [".2.unfinished"]
    monkeypatch.setattr(line_counts, "_count_shard", interrupt)  # no shard is counted again
    tokenize(tiny_model_dir, words)
    finished = content(tmp_path / "2")
    expected = content(counted.folder / "counts" / "2")
    assert finished.pop("config.yaml") != expected.pop("config.yaml")  # it has the folder's name
    assert finished == expected
    assert "already has slice 2/3; nothing to do" in printed_by(tokenize, tiny_model_dir, words)
    with pytest.raises(InputError, match="2 was written with --boilerplate 10; choose another folder, or remove it"):
        tokenize(tiny_model_dir, words.replace("--boilerplate 10", "--boilerplate lines"))


def test_a_folder_that_has_no_lines_of_this_column_and_version_is_refused(
    tmp_path: Path, counted: CountedSlices
) -> None:
    folder = Path(shutil.copytree(counted.folder / "lines", tmp_path / "lines"))
    expected = open_boilerplate(str(folder), "text")
    assert (expected.num_documents, len(expected.hashes)) == (10, 2)
    record = json.loads((folder / "lines.json").read_text(encoding="utf-8"))
    faults = {
        f"--boilerplate {folder} has lines from the column 'text', not 'body'; give --text_column text, or": folder
    }
    faults[f"--boilerplate {tmp_path}: it has no lines.json; give a number of documents, or a folder"] = tmp_path
    for name, changed in {"old": {**record, "format": 0}, "wrong": {**record, "sha256": ""}}.items():
        shutil.copytree(folder, tmp_path / name)
        (tmp_path / name / "lines.json").write_text(json.dumps(changed), encoding="utf-8")
    faults[f"{tmp_path}/old/lines.json has format 0, but this version reads 1; count the lines again"] = (
        tmp_path / "old"
    )
    faults[f"{tmp_path}/wrong/hashes: damaged; count the lines again with --shard"] = tmp_path / "wrong"
    for fault, given in faults.items():
        with pytest.raises(InputError) as raised:
            open_boilerplate(str(given), "body" if given == folder else "text")
        assert str(raised.value).startswith(fault)
