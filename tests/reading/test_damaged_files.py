"""Damaged files give rows, or one error that names the file; so does memory that runs out."""

import gzip
import json
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
from pyarrow import parquet

from fabric_train.cli.errors import InputError, describe_os_error
from fabric_train.data.token_dataset import open_dataset
from fabric_train.files.atomic_folder import complete_folder
from fabric_train.files.typed_json import read_json
from fabric_train.model.hf_model import load_hf_tokenizer, read_shape
from fabric_train.model.weight_files import open_weights
from fabric_train.reading.documents import BadRowError
from fabric_train.reading.files import FileReader, split_file
from fabric_train.reading.listing import list_file
from fabric_train.token_dataset.document_index import open_index
from fabric_train.token_dataset.manifest import read_manifest
from fabric_train.token_dataset.token_folder import read_arrow
from tests.support.programs import ROOT
from tests.support.token_datasets import TEXTS, manifest_of, tokenize, write_jsonl
from tests.support.tokenizing import finish, start, wait_for_shards

NESTED = 3_000
ROWS = [{"text": text, "number": number} for number, text in enumerate(TEXTS)]


def write_valid_files(folder: Path) -> list[Path]:
    """Write the same rows as files of every kind that has an inner structure."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = pyarrow.Table.from_pylist(ROWS)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "a.csv").write_text("number,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS)))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.CompressedOutputStream(str(folder / "a.jsonl.zst"), "zstd") as stream:
        stream.write(lines)
    parquet.write_table(table, folder / "snappy.parquet", row_group_size=13)
    parquet.write_table(table, folder / "zstd.parquet", compression="zstd", use_dictionary=False)
    return sorted(folder.iterdir())


def count_good_rows(file: Path, faults: list[str]) -> int:
    """Read a file in one and in many parts; return the number of good rows and add every fault to ``faults``."""
    num_good = 0
    for part_bytes in (1 << 20, 100):
        try:
            for part in split_file(list_file(file), part_bytes):
                for _, row in FileReader(part, ("text",)):
                    if isinstance(row, BadRowError):
                        faults.append(str(row))
                    else:
                        num_good += 1
        except InputError as error:
            faults += error.faults
    return num_good


def damage(content: bytes, chance: random.Random) -> bytes:
    """Cut the content, change some bytes, or remove or repeat a piece of it."""
    kind = chance.choice(["cut", "change", "repeat", "remove"])
    start = chance.randrange(len(content))
    if kind == "cut":
        return content[:start]
    if kind == "change":
        changed = bytearray(content)
        for position in chance.choices(range(len(content)), k=chance.randrange(1, 9)):
            changed[position] = chance.randrange(256)
        return bytes(changed)
    end = start + chance.randrange(1, 200)
    if kind == "repeat":
        return content[:end] + content[start:]
    return content[:start] + content[end:]


def test_a_damaged_file_gives_rows_or_one_line_that_names_it(tmp_path: Path) -> None:
    chance = random.Random(0)
    for file in write_valid_files(tmp_path):
        whole = file.read_bytes()
        faults: list[str] = []
        assert count_good_rows(file, faults) == 2 * len(ROWS)
        assert not faults
        for _ in range(150):
            file.write_bytes(damage(whole, chance))
            faults.clear()
            count_good_rows(file, faults)
            assert all(str(file) in fault and "\n" not in fault for fault in faults), faults


def test_every_cut_of_a_compressed_file_is_noticed(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        write_valid_files(tmp_path)
        whole = (tmp_path / name).read_bytes()
        for length in range(1, len(whole)):
            (tmp_path / name).write_bytes(whole[:length])
            faults: list[str] = []
            count_good_rows(tmp_path / name, faults)
            assert faults, f"{name} of {length} bytes"


ODD_FILES = {
    "nested.json": '[{"text": ' + "[" * NESTED + "]" * NESTED + "}]",
    "nested.jsonl": '{"text": "a", "b": ' + "[" * NESTED + "]" * NESTED + "}\n",
    "objects.json": '{"a": ' * NESTED + "1" + "}" * NESTED,
    "long-integer.json": '[{"text": "a", "n": ' + "9" * 5000 + "}]",
    "long-integer.jsonl": '{"text": "a", "n": ' + "9" * 5000 + "}\n",
    "infinite.jsonl": '{"text": "a", "n": 1e999}\n',
    "zero.jsonl": '{"text": "a\0b"}\n',
    "zero.json": '[{"text": "a\0b"}]',
    "zero.csv": "text\na\0b\n",
    "scalar.json": "3",
    "null.jsonl": "null\n",
    "empty-name.csv": ",\n,\n",
    "only-quote.csv": '"',
    "only-mark.jsonl": "\ufeff",
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_content_gives_rows_or_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(ODD_FILES[name], encoding="utf-8")
    faults: list[str] = []
    num_good = count_good_rows(file, faults)
    assert num_good or faults or name in ("only-mark.jsonl", "empty-name.csv")
    assert all(str(file) in fault and "\n" not in fault and len(fault) < 500 for fault in faults), faults


def test_csv_rows_that_are_not_utf_8_are_left_out_on_request(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.csv"
    rows = [f'{number},"{text}"\n'.encode() for number, text in enumerate(TEXTS)]
    source.write_bytes(b"\xef\xbb\xbfn,text\n" + b"".join(rows[:20]) + b"7,caf\xe9\n" + b"".join(rows[20:]))
    tokenize(tmp_path / "out", tiny_model_dir, source, on_bad_rows="skip", validation_split=0)
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_kept, ledger.documents_skipped) == (40, {"bad_row": 1})
    assert f"{source}, line 62: byte 0xe9 is not UTF-8" in capsys.readouterr().out.replace("\n", " ")
    with pytest.raises(InputError, match=r"a\.csv, line 62: byte 0xe9 is not UTF-8; .*; --on_bad_rows skip skips"):
        tokenize(tmp_path / "strict", tiny_model_dir, source, validation_split=0)


# -------------------------------------------------------------------------------------- memory, processes, descriptors


def run_limited(limit: str, *argv: object) -> "subprocess.CompletedProcess[str]":
    """Run tokenize_dataset.py after ``limit``, a statement of Python."""
    program = (
        "import resource\n"
        "from fabric_train.cli.errors import run_program\n"
        "from fabric_train.programs.tokenize_dataset import main\n"
        f"{limit}\n"
        "run_program(main)"
    )
    command = [sys.executable, "-c", program, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)


@pytest.mark.parametrize("is_first", [True, False])
def test_memory_that_ran_out_names_the_file(tmp_path: Path, tiny_model_dir: Path, is_first: bool) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", TEXTS * 50)
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(6 << 30)  # zero bytes that take no disk
    sources = [large, small] if is_first else [small, large]
    argv = ["--dataset", *sources, "--tokenizer_name", tiny_model_dir, "--output_dir", tmp_path / "out"]
    done = run_limited("resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))", *argv, "--num_proc", 1)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert last.startswith(f"error: {large}: out of memory while reading it")
    assert "micro_batch" not in last
    assert not (tmp_path / "out").exists()


def test_a_killed_process_names_its_file(tmp_path: Path, tiny_model_dir: Path) -> None:
    os.mkdir(tmp_path / "data")
    write_jsonl(tmp_path / "data" / "a.jsonl")
    large = write_jsonl(tmp_path / "data" / "b.jsonl", TEXTS * 2_000)
    process = start(tmp_path, tiny_model_dir, [tmp_path / "data"], "--num_proc", 1)
    wait_for_shards(process, tmp_path / "new", 2)
    children = psutil.Process(process.pid).children()
    # the first child compares the encoder's ids with the tokenizer's, the second one encodes
    _, encoding_child, *_ = sorted(children, key=lambda child: child.create_time())
    encoding_child.send_signal(signal.SIGKILL)
    code, stderr = finish(process)
    assert code == 1
    assert stderr.splitlines()[-1] == (
        f"error: while reading {large}, a tokenizing process was killed by SIGKILL; if memory ran out, use a smaller "
        "--num_proc"
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda tokens, _: open_dataset(str(tokens)),
        lambda tokens, _: open_index(tokens, read_manifest(tokens), "train"),
        lambda tokens, _: list(read_arrow(tokens / "train" / "data-00000-of-00001.arrow")),
        lambda _, model: read_json(model / "config.json", dict, "fetch it again"),
        lambda _, model: read_shape(str(model)),
        lambda _, model: open_weights(model),
        lambda _, model: load_hf_tokenizer(model),
        lambda *_: complete_folder(Path("new")).__enter__(),
    ],
)
def test_too_few_open_files_are_no_damage(
    tiny_tokens_dir: Path,
    tiny_model_dir: Path,
    read: Callable[[Path, Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    read(tiny_tokens_dir, tiny_model_dir)  # imports what it needs
    lowest_free = os.dup(0)  # a limit of this number leaves no descriptor
    os.close(lowest_free)
    _, hard_limit = before
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard_limit))
    try:
        with pytest.raises(OSError, match="Too many open files") as raised:
            read(tiny_tokens_dir, tiny_model_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "raise the limit of open files (ulimit -n)" in describe_os_error(raised.value)


def test_too_few_open_files_are_reported_with_the_limit(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    argv = [
        "--dataset",
        source,
        "--tokenizer_name",
        tiny_model_dir,
        "--max_length",
        16,
        "--num_proc",
        2,
        "--output_dir",
    ]
    for limit in (6, 10, 14):
        done = run_limited(
            f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))", *argv, tmp_path / f"{limit}"
        )
        if done.returncode:
            assert done.returncode == 1
            assert done.stderr.splitlines()[-1].startswith("error: Too many open files")
            assert "raise the limit of open files (ulimit -n)" in done.stderr
            assert "Traceback" not in done.stderr
        else:
            assert (tmp_path / f"{limit}" / "manifest.json").is_file()
