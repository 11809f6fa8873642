"""tokenize_dataset.py writes a complete token dataset with a balanced ledger, or one error line and nothing."""

import bz2
import gzip
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError, text_of
from fabric_train.reading.sources import open_sources
from fabric_train.token_dataset.manifest import read_manifest
from fabric_train.tokenization.corpus import unfinished_folder
from fabric_train.tokenization.shards import ShardSizes
from fabric_train.tokenization.tokenizers.text_encoder import Borders, GigatokenEncoder
from tests.support.programs import ROOT
from tests.support.token_datasets import TEXTS, documents_in, manifest_of, tokenize, write_jsonl
from tests.support.tokenizing import start, wait_for_shards

Write = Callable[[Path], object]
REAL_OPTIONS: dict[str, object] = {"validation_split": 0.1, "seed": 3, "max_length": 64}


@pytest.fixture(scope="module")
def real_jsonl(tmp_path_factory: pytest.TempPathFactory, shakespeare_jsonl: Path) -> Path:
    """Real text in 100 documents of 1,000 characters."""
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    return write_jsonl(
        tmp_path_factory.mktemp("real") / "real.jsonl", [text[i * 1000 : i * 1000 + 1000] for i in range(100)]
    )


@pytest.fixture(scope="module")
def real_tokens(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, real_jsonl: Path) -> Path:
    """The real text, tokenized by one process; a tenth of its documents is for validation."""
    folder = tmp_path_factory.mktemp("real-tokens") / "1"
    tokenize(folder, tiny_model_dir, real_jsonl, num_proc=1, **REAL_OPTIONS)
    return folder


def rows_of(folder: Path) -> dict[str, list[list[int]]]:
    return {name: split["input_ids"][:] for name, split in datasets.load_from_disk(folder).items()}


KINDS = ("txt", "md", "csv", "json", "jsonl", "lines.json", "parquet", "saved", "saved_dict")


def write_source(folder: Path, kind: str) -> Path:
    """Write ``TEXTS`` as a source of this kind."""
    source = folder / f"source.{kind}"
    if kind in ("txt", "md"):
        for number, text in enumerate(TEXTS):
            file = source / f"{number // 10}" / f"{number:03d}.{kind.upper()}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
    elif kind == "csv":
        quoted = "".join(f'{number},"{text}"\r\n' for number, text in enumerate(TEXTS))
        source.write_bytes(("\ufeffid,text\r\n" + quoted).encode())
    elif kind == "json":
        source.write_text(json.dumps([{"text": text, "id": number} for number, text in enumerate(TEXTS)], indent=1))
    elif kind in ("jsonl", "lines.json"):
        write_jsonl(source)
    elif kind == "parquet":
        parquet.write_table(pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS}), source, row_group_size=7)
    else:
        train = datasets.Dataset.from_dict({"text": TEXTS})
        other = datasets.Dataset.from_dict({"text": ["not this split"]})
        (train if kind == "saved" else datasets.DatasetDict(train=train, test=other)).save_to_disk(source)
    return source


def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path, tiny_model_dir: Path) -> None:
    sources = [write_source(tmp_path, kind) for kind in KINDS]
    rows = tokenize(tmp_path / "out", tiny_model_dir, *sources, validation_split=0)
    assert list(rows) == ["train"]
    found = documents_in(rows["train"], tmp_path / "out")
    for number, kind in enumerate(KINDS[:-1]):
        assert found[number * len(TEXTS) : (number + 1) * len(TEXTS)] == TEXTS, kind
    last = found[(len(KINDS) - 1) * len(TEXTS) :]
    assert last == TEXTS[: len(last)]
    assert len(last) >= len(TEXTS) - 1  # the last may be cut by the last incomplete row
    assert [source.documents for source in manifest_of(tmp_path / "out").sources] == [len(TEXTS)] * len(KINDS)


def test_each_document_has_exactly_one_bos_and_one_eos(tmp_path: Path, tiny_model_dir: Path) -> None:
    bos = "<|begin_of_text|>"
    eos = "<|end_of_text|>"
    texts = ["plain", f"{bos}brings its own{eos}", f"{bos}{bos}twice{eos}{eos}"]
    rows = tokenize(
        tmp_path / "out", tiny_model_dir, write_jsonl(tmp_path / "a.jsonl", texts), validation_split=0, max_length=2
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    expected = []
    for text in ["plain", "brings its own", "twice"]:
        inner = tokenizer.encode(text, add_special_tokens=False)
        expected += [tokenizer.bos_token_id, *inner, tokenizer.eos_token_id]
    ids = [token for row in rows["train"] for token in row]
    assert ids == expected[: len(ids)]
    assert len(expected) - len(ids) < 2


def test_a_document_is_never_split_between_train_and_validation(real_tokens: Path, real_jsonl: Path) -> None:
    rows = rows_of(real_tokens)
    texts = [json.loads(line)["text"] for line in real_jsonl.read_text(encoding="utf-8").splitlines()]
    found = {name: documents_in(rows[name], real_tokens) for name in ("train", "validation")}
    assert set(found["train"]).isdisjoint(found["validation"])
    assert set(found["train"]) | set(found["validation"]) <= set(texts)
    assert len(found["train"]) in (89, 90)
    assert len(found["validation"]) in (9, 10)
    for documents in found.values():  # in the order of the source
        of_split = set(documents)
        assert documents == [text for text in texts if text in of_split]


def test_the_output_is_the_same_for_any_number_of_processes(
    tmp_path: Path, tiny_model_dir: Path, real_jsonl: Path, real_tokens: Path
) -> None:
    five = ShardSizes(smallest=20_000)
    rows = tokenize(tmp_path / "3", tiny_model_dir, real_jsonl, num_proc=3, sizes=five, **REAL_OPTIONS)
    assert rows == rows_of(real_tokens)
    assert manifest_of(tmp_path / "3") == manifest_of(real_tokens)


@pytest.fixture(scope="module")
def winter(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A text with the word winter, and ``expected``, the dataset of it that gigatoken encoded."""
    folder = tmp_path_factory.mktemp("winter")
    source = write_jsonl(folder / "a.jsonl", [*TEXTS, "Now is the winter of our discontent"])
    tokenize(folder / "expected", tiny_model_dir, source)
    assert manifest_of(folder / "expected").tokenizer.encoder == "gigatoken"
    return folder


@pytest.mark.parametrize("method", ["encode_batch", "encode_documents"])
def test_an_encoder_with_a_wrong_id_is_not_used(
    tmp_path: Path, tiny_model_dir: Path, winter: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    encode = getattr(GigatokenEncoder, method)

    def encode_one_word_wrong(encoder: GigatokenEncoder, texts: list, *borders: Borders) -> object:
        word, other = ("winter", "summer") if method == "encode_batch" else (b"winter", b"summer")
        return encode(encoder, [text.replace(word, other) for text in texts], *borders)

    monkeypatch.setattr(GigatokenEncoder, method, encode_one_word_wrong)
    assert tokenize(tmp_path / "out", tiny_model_dir, winter / "a.jsonl") == rows_of(winter / "expected")
    assert manifest_of(tmp_path / "out").tokenizer.encoder.startswith("tokenizers: ids differ")


def test_ledger_counts_read_skipped_packed_and_dropped(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [None, *TEXTS[:10], "", " \n\t", *TEXTS[10:]])
    rows = tokenize(tmp_path / "out", tiny_model_dir, source, validation_split=0.25)
    manifest = manifest_of(tmp_path / "out")
    ledger = manifest.ledger
    assert (ledger.documents_read, ledger.documents_kept, ledger.documents_skipped) == (43, 40, {"empty": 3})
    assert (ledger.splits["train"].documents, ledger.splits["validation"].documents) == (30, 10)
    assert sum(split.characters for split in ledger.splits.values()) == sum(map(len, TEXTS))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    num_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) + 2 for text in TEXTS)
    assert sum(split.tokens_in for split in ledger.splits.values()) == num_tokens
    for name, split in ledger.splits.items():
        assert split.rows == len(rows[name])
        assert split.tokens_dropped == {"last_incomplete_row": split.tokens_in % 16}
    assert manifest.ledger.imbalances(16) == []
    assert manifest.settings.seed == 0


@pytest.fixture(scope="module")
def of_a_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[Path, str]:
    """A folder with ``out``, the dataset of the mixed ``folder`` and of one file in it; standard error."""
    place = tmp_path_factory.mktemp("of-a-folder")
    folder = place / "folder"
    for name in ("b", ".git"):
        (folder / name).mkdir(parents=True)
    for name in ("a.pdf", "b.pdf", "c.docx", "LICENSE", ".hidden.txt", ".git/config.txt"):
        (folder / name).write_text("not this")
    write_jsonl(folder / "b" / "z.jsonl")
    write_jsonl(folder / "c.jsonl", TEXTS[:3])
    with redirect_stderr(io.StringIO()) as printed:
        tokenize(place / "out", tiny_model_dir, folder, folder / "c.jsonl")
    return place, printed.getvalue()


def test_unreadable_files_in_a_folder_are_noted_in_one_line(of_a_folder: tuple[Path, str]) -> None:
    folder, printed = of_a_folder
    assert "skipping 4 files of other kinds (1 .docx, 2 .pdf, 1 no suffix)" in printed
    assert [file.path for file in manifest_of(folder / "out").sources[0].files] == ["b/z.jsonl", "c.jsonl"]


def test_manifest_has_the_hashes_of_sources_and_tokenizer(of_a_folder: tuple[Path, str]) -> None:
    place, _ = of_a_folder
    files = [place / "folder" / name for name in ("b/z.jsonl", "c.jsonl")]
    manifest = manifest_of(place / "out")
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert [(file.path, file.sha256, file.bytes) for file in manifest.sources[0].files] == [
        ("b/z.jsonl", hashes[0], files[0].stat().st_size),
        ("c.jsonl", hashes[1], files[1].stat().st_size),
    ]
    assert manifest.sources[1].files[0].path == "c.jsonl"
    folder = place / "out" / "tokenizer"
    assert manifest.tokenizer.sha256 == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()
    }
    assert manifest.tokenizer.vocab_size == len(AutoTokenizer.from_pretrained(folder))
    assert sorted(os.listdir(place / "out")) == sorted(
        ["dataset_dict.json", "manifest.json", "tokenizer", "train", "validation"]
    )


def test_max_documents_counts_documents_with_text(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [TEXTS[0], "", *TEXTS[1:]])
    tokenize(tmp_path / "out", tiny_model_dir, source, max_documents=5)
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_read, ledger.documents_kept) == (6, 5)


def test_a_source_without_a_document_for_validation_is_noted(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = write_jsonl(tmp_path / "es.jsonl")
    one = write_jsonl(tmp_path / "en.jsonl", [f"{TEXTS[0]} {TEXTS[1]}"])
    tokenize(tmp_path / "out", tiny_model_dir, f"es={many}", f"en={one}", validation_split=0.1)
    assert "note       en has no documents in validation/, so runs cannot measure its loss;" in capsys.readouterr().out
    tokenize(tmp_path / "all", tiny_model_dir, f"es={many}", f"en={many}", validation_split=0.5)
    tokenize(tmp_path / "none", tiny_model_dir, f"es={many}", f"en={one}", validation_split=0)
    assert "no documents in validation/" not in capsys.readouterr().out


@pytest.mark.parametrize("max_tokens", [1, 200, 10**6])
def test_max_tokens_stops_after_the_document_that_reaches_it(
    tmp_path: Path, tiny_model_dir: Path, max_tokens: int
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, None])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenize(tmp_path / "out", tiny_model_dir, source, max_tokens=max_tokens, validation_split=0, max_length=4)
    expected = total = 0
    for text in TEXTS:
        expected += 1
        total += len(tokenizer.encode(text, add_special_tokens=False)) + 2
        if total >= max_tokens:
            break
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_kept, ledger.splits["train"].tokens_in) == (expected, total)
    assert ledger.documents_read == (expected if max_tokens < 10**6 else len(TEXTS) + 1)


def test_documents_begin_without_bos_if_the_tokenizer_has_none(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((tiny_model_dir / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"})
    )
    tokenize(tmp_path / "out", folder, write_jsonl(tmp_path / "a.jsonl"), validation_split=0)
    manifest = manifest_of(tmp_path / "out")
    assert (manifest.tokenizer.bos_token_id, manifest.tokenizer.bos_token) == (None, None)
    assert "documents begin without BOS" in capsys.readouterr().out
    starts = datasets.load_from_disk(tmp_path / "out")["train"]["document_starts"][:]
    assert starts[0][0] == 0


def parquet_of(**columns: list[Any]) -> Write:
    return lambda path: parquet.write_table(pyarrow.table(columns), path)


def bytes_of(content: bytes) -> Write:
    return lambda path: path.write_bytes(content)


def two_columns(path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_arrays([["a"], ["b"]], names=["text", "text"]), path)


def damaged_saved_dataset(path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(path)
    next(path.glob("*.arrow")).unlink()


BAD_SOURCES: dict[str, tuple[str, Write, str]] = {
    "gzip called txt": ("a.txt", bytes_of(gzip.compress(b"text")), r"gzip-compressed, not \.txt"),
    "bzip2 called jsonl": ("a.jsonl", bytes_of(bz2.compress(b"text")), r"bzip2-compressed, not \.jsonl"),
    "UTF-16": ("a.csv", bytes_of("text\n".encode("utf-16")), "UTF-16"),
    "binary called txt": ("a.txt", bytes_of(b"abc\0def"), "byte 3 is zero"),
    "Latin-1 txt": ("a.txt", bytes_of(b"caf\xe9"), r"byte 3 is not UTF-8 \(0xe9\)"),
    "Latin-1 with BOM": ("a.txt", bytes_of(b"\xef\xbb\xbfcaf\xe9"), "byte 6 is not UTF-8"),
    "Latin-1 csv": ("a.csv", bytes_of(b"text\n" + b"a\n" * 9000 + b"\xe9\n"), "line 9002: byte 0xe9 is not UTF-8"),
    "jsonl that is not JSON": ("a.jsonl", bytes_of(b'{"text": "a"}\n\nnot\n'), "a.jsonl, line 3: not JSON"),
    "jsonl of strings": ("a.jsonl", bytes_of(b'"a"\n'), "line 1: a JSON str, not an object"),
    "json that is not JSON": ("a.json", bytes_of(b'[{"text": "a"},\n]'), "a.json: not JSON: .* at line 2"),
    "json of numbers": ("a.json", bytes_of(b"[1, 2]"), "record 1: a JSON int"),
    "deeply nested json": ("a.json", bytes_of(b"[" * 100_000), "cannot read JSON"),
    "csv with an open quote": ("a.csv", bytes_of(b'text,n\n"a,1\n'), "line 2: not csv"),
    "Latin-1 header of a csv": ("a.csv", bytes_of(b"text,a\xe9\na,b\n"), "line 1: byte 0xe9 is not UTF-8"),
    "csv with two columns of a name": ("a.csv", bytes_of(b"text,n,text\na,1,b\n"), "2 columns are named 'text';"),
    "parquet with two columns of a name": ("a.parquet", two_columns, "2 columns are named 'text'; rename all but"),
    "text called parquet": ("a.parquet", bytes_of(b"just some text"), "incomplete parquet file"),
    "missing column, jsonl": (
        "a.jsonl",
        bytes_of(b'{"body": "a", "id": 1}\n'),
        "no column 'text'; it has body, id;",
    ),
    "missing column, csv": ("a.csv", bytes_of(b"id;text\n1;a\n"), "no column 'text'; it has id;text;"),
    "missing column, parquet": ("a.parquet", parquet_of(body=["a"], id=[1]), "it has body, id;"),
    "numbers, parquet": ("a.parquet", parquet_of(text=[1, 2]), "column 'text' holds int64, not text"),
    "empty folder": ("a", lambda path: path.mkdir(), "no readable file in this folder"),
    "pdf": ("a.pdf", bytes_of(b"%PDF"), r"cannot read \.pdf; supported formats: \.txt, \.md"),
    "missing file": ("a.jsonl", lambda _path: None, "no such file or folder"),
    "saved, missing column": (
        "a",
        lambda path: datasets.Dataset.from_dict({"body": ["x"]}).save_to_disk(path),
        r"\(train\), row 1: no column 'text'; it has body",
    ),
    "saved, damaged": ("a", damaged_saved_dataset, "incomplete save_to_disk folder"),
}


# found by the reader of a process like "jsonl that is not JSON" and "Latin-1 csv" above, and so reported
BAD_ROWS: dict[str, tuple[str, Write, str]] = {
    "Latin-1 jsonl": ("a.jsonl", bytes_of(b'{"text": "a"}\n{"text": "\xe9"}\n'), "byte 24 is not UTF-8"),
    "cut jsonl": ("a.jsonl", bytes_of(b'{"text": "a"}\n{"text": "a'), "line 2: not JSON"),
    "half a surrogate pair": (
        "a.jsonl",
        bytes_of(b'{"text": "a\\ud800"}\n'),
        "line 1: .* surrogate pair at character 1",
    ),
    "ragged csv": ("a.csv", bytes_of(b"text,n\na,1\nb,1,2\n"), "line 3: 3 fields, but the header has 2"),
    "numbers, jsonl": ("a.jsonl", bytes_of(b'{"text": 3}\n'), "line 1: column 'text' holds int, not text"),
}


def read_texts(file: Path) -> None:
    """Read a small file to its end, or to its first bad row."""
    (source,) = open_sources([str(file)], "--dataset", False, file.parent)
    (part,) = source.parts(1 << 20)
    reader = source.reader(part, ("text",))
    for number, row in reader:
        text_of(row, "text", partial(reader.place, number))


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_a_fault_of_one_line_with_its_place(tmp_path: Path, case: str) -> None:
    name, write, message = BAD_ROWS[case]
    write(tmp_path / name)
    with pytest.raises(BadRowError, match=message) as caught:
        read_texts(tmp_path / name)
    (fault,) = caught.value.fault().faults
    assert name in fault
    assert "\n" not in fault


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_a_bad_source_is_one_error_line_and_nothing_is_written(tmp_path: Path, tiny_model_dir: Path, case: str) -> None:
    name, write, message = BAD_SOURCES[case]
    write(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message) as caught:
        tokenize(tmp_path / "new" / "out", tiny_model_dir, tmp_path / name)
    (fault,) = caught.value.faults
    assert name in fault
    assert "\n" not in fault
    assert sorted(tmp_path.rglob("*")) == before


def test_sources_without_any_text_are_an_error(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.jsonl").write_text('\n{"text": " "}\n{"text": null}\n')
    (tmp_path / "a.csv").touch()
    (tmp_path / "a.json").write_text("[]")
    parquet_of(text=pyarrow.array([], pyarrow.string()))(tmp_path / "a.parquet")
    sources = sorted(tmp_path.iterdir())
    with pytest.raises(InputError) as caught:
        tokenize(tmp_path / "out", tiny_model_dir, *sources)
    assert caught.value.faults == tuple(f"{source}: no document with text" for source in sources)
    assert sorted(tmp_path.iterdir()) == sources


def test_all_missing_sources_are_reported_at_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(InputError) as caught:
        tokenize(tmp_path / "out", tiny_model_dir, tmp_path / "a.txt", "owner/name", "x/y/z")
    assert len(caught.value.faults) == 3
    assert "hub cannot be reached" in caught.value.faults[1]


def test_less_text_than_a_row_is_an_error_with_the_counts(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(InputError) as caught:
        tokenize(tmp_path / "out", tiny_model_dir, write_jsonl(tmp_path / "a.jsonl", ["one"]), max_length=100)
    train, validation = caught.value.faults
    assert "1 documents, less than one row of 100" in train
    assert "--validation_split 0" in validation
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_nonempty_output_folder_is_an_error_before_any_work(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(InputError, match="not empty"):
        tokenize(tmp_path / "out", tiny_model_dir, tmp_path / "not even there")
    assert os.listdir(tmp_path / "out") == ["precious"]


def test_interrupted_runs_leave_no_output_and_a_restart_continues(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 2_500)
    finished: dict[Path, int] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # each run continues the work of the one before
        process = start(tmp_path, tiny_model_dir, [source], "--num_proc", 1)
        wait_for_shards(process, tmp_path / "new", len(finished) + 1)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert "Traceback" not in stderr
        if number != signal.SIGKILL:
            assert process.returncode == 130
            assert stderr.splitlines()[-1] == "error: interrupted"
            assert "run the same command again to continue" in stderr.splitlines()[-2]
        assert not (tmp_path / "new" / "out").exists()
        shards = {file: file.stat().st_mtime_ns for file in tmp_path.glob("new/.out.unfinished/*.npz")}
        assert len(shards) > len(finished)
        assert shards.items() >= finished.items()  # not encoded again
        finished = shards

    process = start(tmp_path, tiny_model_dir, [source], "--num_proc", 2)
    while not list(tmp_path.glob("new/.out.incomplete-*/train")) and process.poll() is None:
        for file, written in finished.items():
            with suppress(FileNotFoundError):  # the run may just have ended
                assert file.stat().st_mtime_ns == written
        time.sleep(0.01)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert manifest_of(tmp_path / "new" / "out").ledger.documents_kept == 100_000
    assert os.listdir(tmp_path / "new") == ["out"]


def test_a_second_run_into_the_same_folder_is_an_error(tmp_path: Path, tiny_model_dir: Path) -> None:
    with (
        unfinished_folder(tmp_path / "new" / "out"),  # as the first run holds it
        pytest.raises(InputError, match="another process is writing to it"),
    ):
        tokenize(tmp_path / "new" / "out", tiny_model_dir, write_jsonl(tmp_path / "b.jsonl"))


def test_a_changed_source_is_encoded_again(tmp_path: Path, tiny_model_dir: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl")
    second = tmp_path / "b.jsonl"
    second.write_text(json.dumps({"text": "short"}) + "\n{not\n")
    with pytest.raises(InputError, match=r"b\.jsonl, line 2"):
        tokenize(tmp_path / "out", tiny_model_dir, first, second, sizes=ShardSizes(worth_keeping=0))
    assert len(list(tmp_path.glob(".out.unfinished/*.npz"))) == 1
    write_jsonl(first, [*TEXTS, "one more"])
    tokenize(tmp_path / "out", tiny_model_dir, first, second, on_bad_rows="skip")
    ledger = manifest_of(tmp_path / "out").ledger
    assert (ledger.documents_read, ledger.documents_skipped) == (len(TEXTS) + 3, {"bad_row": 1})


def test_a_full_disk_ends_the_run_with_one_error_line(tmp_path: Path, tiny_model_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS * 20)
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"  # a write fails as on a full disk
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))\n"
        "from fabric_train.cli.errors import run_program; from fabric_train.programs.tokenize_dataset import main\n"
        "run_program(main)"
    )
    argv = ["--dataset", source, "--tokenizer_name", tiny_model_dir, "--output_dir", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, argv)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: File too large")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.incomplete*"))


def test_the_program_ends_with_the_documented_exit_codes(
    tmp_path: Path, tiny_model_dir: Path, run_program: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl")
    argv = ["tokenize_dataset.py", "--dataset", source, "--tokenizer_name", tiny_model_dir, "--max-length", 16]
    done = run_program(*argv, "--output_dir", tmp_path / "out")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert re.search(r"^next       \S*fabric run fabric_train --devices N", done.stdout, re.MULTILINE)
    assert done.stderr.splitlines() == [f"reading {source}"]
    refused = run_program(*argv, "--output_dir", tmp_path / "out")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "already exists" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_damaged_manifest_is_an_error_and_a_missing_one_is_none(tiny_tokens_dir: Path, tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    whole = (tiny_tokens_dir / "manifest.json").read_text()
    content = json.loads(whole)
    content["ledger"]["train"]["rows"] += 1
    for damaged, message in [
        (whole[:-20], "damaged"),
        (whole.replace('"format": 2', '"format": 3'), "format 3"),
        (json.dumps(content), "is not"),
        (whole.replace('"seed"', '"sead"'), "damaged"),
        ("[]", "damaged"),
    ]:
        (tmp_path / "manifest.json").write_text(damaged)
        with pytest.raises(InputError, match=message):
            read_manifest(tmp_path)


def test_manifest_is_read_without_importing_heavy_libraries() -> None:
    program = (
        "import sys; import fabric_train.token_dataset.manifest, fabric_train.tokenization.encoding\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'pyarrow') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
