"""Sources: compressed files, parts of a file, glob patterns, URLs, streams, and rows that cannot be used."""

import gzip
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from fabric_train.cli.errors import InputError
from fabric_train.reading.documents import BadRowError, text_of
from fabric_train.reading.files import FileReader, split_file
from fabric_train.reading.hf_datasets import DatasetName, StreamSource
from fabric_train.reading.listing import list_file
from fabric_train.reading.sources import open_sources
from fabric_train.tokenization.corpus import DOWNLOADS, unfinished_folder
from fabric_train.tokenization.shards import ShardSizes
from tests.support.token_datasets import documents_in, manifest_of, tokenize

TEXTS = [f"Zeile {number}: \u00e4 \U0001f600\u2028 ende" for number in range(50)]


def lines(texts: list[str] = TEXTS) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def texts_of(names: list[object], folder: Path, part_bytes: int = 1 << 20) -> list[str]:
    """Return the texts of all parts of all sources."""
    sources = open_sources([str(name) for name in names], "--dataset", False, folder / "downloads")
    texts: list[str] = []
    for source in sources:
        for part in source.parts(part_bytes):
            for _, row in source.reader(part, ("text",)):
                assert not isinstance(row, BadRowError), row
                texts.append(row["text"])
    return texts


def compress(data: bytes, codec: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, codec) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000, 1 << 20])
def test_parts_of_a_file_have_every_line_once_and_in_order(tmp_path: Path, part_bytes: int) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbf\n" + lines() + b'  \n{"text": "last, without a line end"}')
    assert texts_of([file], tmp_path, part_bytes) == [*TEXTS, "last, without a line end"]


def test_row_groups_of_parquet_are_parts(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": range(50), "text": TEXTS}), file, row_group_size=3)
    assert len(split_file(list_file(file), 1)) == 17
    assert texts_of([file], tmp_path, 1) == texts_of([file], tmp_path) == TEXTS


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".txt.gz", ".csv.zst", ".json.gz", ".md.zst"])
def test_compressed_files_hold_the_same_documents(tmp_path: Path, suffix: str) -> None:
    kind, compression = suffix.split(".")[1:]
    if kind in ("txt", "md"):
        content = TEXTS[0].encode()
        expected = TEXTS[:1]
    elif kind == "csv":
        content = ("text\n" + "".join(f'"{text}"\n' for text in TEXTS)).encode()
        expected = TEXTS
    elif kind == "json":
        content = json.dumps([{"text": text} for text in TEXTS]).encode()
        expected = TEXTS
    else:
        content = lines()
        expected = TEXTS
    file = tmp_path / f"a{suffix}"
    file.write_bytes(gzip.compress(content) if compression == "gz" else compress(content, "zstd"))
    assert texts_of([file], tmp_path) == expected


def test_files_compressed_in_several_streams_are_read_to_the_end(tmp_path: Path) -> None:
    halves = lines(TEXTS[:25]), lines(TEXTS[25:])
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, halves)))
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(compress(half, "zstd") for half in halves))
    assert texts_of([tmp_path / "*.jsonl.*"], tmp_path) == [*TEXTS, *TEXTS]


def test_zero_bytes_may_follow_a_gzip_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()) + bytes(512))  # as tar and tapes leave them
    assert texts_of([tmp_path / "a.jsonl.gz"], tmp_path) == TEXTS


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    good = json.dumps({"text": 'a "text": in a "text"', "other": {"text": 1}})
    bad = '{"text": "one", "text": "two"}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n{good}\n")
    (source,) = open_sources([str(tmp_path / "a.jsonl")], "--dataset", False, tmp_path)
    first, second, third = (row for part in source.parts(1 << 20) for _, row in source.reader(part, ("text",)))
    assert first == third == json.loads(good)
    assert str(second) == f"{tmp_path}/a.jsonl, line 2: 2 values are named 'text'; keep one of them"
    (tmp_path / "b.json").write_text(f"[{good}, {bad}]")
    with pytest.raises(InputError, match=r"b.json: 2 values are named 'text'; keep one of them; fix the file"):
        texts_of([tmp_path / "b.json"], tmp_path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_the_error_names_a_truncated_compressed_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"a.jsonl{suffix}"
    whole = gzip.compress(lines()) if suffix == ".gz" else compress(lines(), "zstd")
    for damaged in (whole[: len(whole) // 2], b"not compressed at all"):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=f"{file.name}: incomplete "):
            texts_of([file], tmp_path)


def test_glob_patterns_match_files_in_order_across_folders(tmp_path: Path) -> None:
    for name, text in (("b/2.txt", "two"), ("a/1.txt", "one"), ("a/x.pdf", "no"), ("c.txt", "three")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert texts_of([tmp_path / "**" / "*.txt"], tmp_path) == ["one", "two", "three"]
    with pytest.raises(InputError, match=r"no readable file in this pattern"):
        texts_of([tmp_path / "*.jsonl"], tmp_path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of an HTTP server of the folder ``tmp_path/served``."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_urls_are_downloaded_once(tmp_path: Path, server: str) -> None:
    (tmp_path / "served" / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    assert texts_of([f"{server}/a.jsonl.gz?download=1"], tmp_path) == TEXTS
    (fetched,) = (tmp_path / "downloads").iterdir()
    written = fetched.stat().st_mtime_ns
    assert texts_of([f"{server}/a.jsonl.gz?download=1"], tmp_path) == TEXTS
    assert fetched.stat().st_mtime_ns == written


def test_downloads_are_kept_when_a_run_fails_before_its_first_shard(
    tmp_path: Path,
) -> None:
    def fail(name: str, num_bytes: int) -> None:
        with unfinished_folder(tmp_path / "out", ShardSizes(worth_keeping=100)) as folder:
            (folder / DOWNLOADS).mkdir()
            (folder / DOWNLOADS / name).write_bytes(bytes(num_bytes))
            raise InputError("no document")

    for name, num_bytes in (("whole.jsonl", 200), ("begun.jsonl.part", 200), ("small.jsonl", 20)):
        with pytest.raises(InputError):
            fail(name, num_bytes)
        assert (tmp_path / ".out.unfinished").exists() == (name == "whole.jsonl")
        shutil.rmtree(tmp_path / ".out.unfinished", ignore_errors=True)


def test_bad_urls_are_errors_of_one_line(tmp_path: Path, server: str) -> None:
    for url, reason in [
        (f"{server}/nothing.jsonl", "cannot be downloaded: 404, message='File not found'"),
        (f"{server}/page.html", "no readable file"),
        (
            "http://127.0.0.1:9/a.jsonl",
            "cannot be downloaded: Cannot connect to host 127.0.0.1:9 .*Connect call failed",
        ),
        ("nonsense://a.jsonl", "fabric-train"),
    ]:
        with pytest.raises(InputError, match=reason) as caught:
            texts_of([url], tmp_path)
        assert url in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_list_of_texts_is_joined_by_the_separator_or_refused_with_it(tmp_path: Path, tiny_model_dir: Path) -> None:
    games = [["e4", "e5", "Nf3"], ["d4"], []]
    (tmp_path / "games.jsonl").write_text("".join(json.dumps({"n": 1, "moves": moves}) + "\n" for moves in games))
    parquet.write_table(pyarrow.table({"n": [1, 2, 3], "moves": games}), tmp_path / "games.parquet")
    datasets.Dataset.from_dict({"n": [1, 2, 3], "moves": games}).save_to_disk(tmp_path / "saved")
    sources = [tmp_path / name for name in ("games.jsonl", "games.parquet", "saved")]
    fault = r"1: column 'moves' holds a list of texts; --text_column 'moves: ' joins them with a space, 'moves:\n'"
    for source in open_sources([str(source) for source in sources], "--dataset", False, tmp_path):
        (part,) = source.parts(1 << 20)
        reader = source.reader(part, ("moves",))
        number, row = next(iter(reader))
        with pytest.raises(BadRowError, match=re.escape(fault)):
            text_of(row, "moves", partial(reader.place, number))
    with pytest.raises(InputError, match=re.escape(fault)):
        tokenize(tmp_path / "none", tiny_model_dir, sources[0], text_column="moves")
    out = tmp_path / "out"
    rows = tokenize(out, tiny_model_dir, *sources, text_column="moves:, ", max_length=2, validation_split=0)
    assert documents_in(rows["train"], out) == ["e4, e5, Nf3", "d4"] * 3
    assert manifest_of(out).ledger.documents_skipped == {"empty": 3}
    (tmp_path / "twice.jsonl").write_text('{"moves": ["e4"], "moves": ["d4"]}\n')
    with pytest.raises(InputError, match="line 1: 2 values are named 'moves'; keep one of them"):
        tokenize(tmp_path / "none", tiny_model_dir, tmp_path / "twice.jsonl", text_column="moves: ")
    row = {"moves": ["e4", "e5"], "a:b": "own", "mixed": ["a", 1], "text": "plain"}
    expected = {"moves:": "e4e5", r"moves:\n": "e4\ne5", "moves::": "e4:e5", "a:b": "own", "text: ": "plain"}
    for column, expected_text in expected.items():
        text, _ = text_of(row, column, str)
        assert text == expected_text
    with pytest.raises(BadRowError, match="column 'mixed' holds list, not text"):
        text_of(row, "mixed: ", str)


def test_bad_rows_keep_their_place_and_name_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\nnot\n\n{"text": "\xe9"}\n[1]\n{"text": NaN}\n{"text": "b"}\n')
    for part_bytes in (1 << 20, 1):
        rows_by_place = {}
        for part in split_file(list_file(file), part_bytes):
            reader = FileReader(part, ("text",))
            for number, row in reader:
                rows_by_place[reader.place(number)] = row
        assert [place.removeprefix(f"{file}, ") for place in rows_by_place] == [
            "line 1",
            "line 2",
            "line 4",
            "line 5",
            "line 6",
            "line 7",
        ]
        reasons = [str(row) for row in rows_by_place.values() if isinstance(row, BadRowError)]
        assert [reason.removeprefix(f"{file}") for reason in reasons] == [
            ", line 2: not JSON: Expecting value at column 1",
            ": byte 29 is not UTF-8 (0xe9); convert the file to UTF-8",
            ", line 5: a JSON list, not an object with a column 'text'",
        ]


def test_a_streamed_dataset_gives_its_rows_file_by_file(tmp_path: Path) -> None:
    import datasets

    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(lines(TEXTS[number * 10 : number * 10 + 10]))
    loaded = datasets.load_dataset(
        "json",
        data_files=[str(tmp_path / f"{n}.jsonl") for n in range(3)],
        streaming=True,
        cache_dir=str(tmp_path / "c"),
    )
    source = StreamSource("owner/name", dict(loaded), DatasetName("owner/name", None, None, None))
    parts = list(source.parts(1))
    assert len(parts) == 3
    assert [row["text"] for part in parts for _, row in source.reader(part, ("text",))] == TEXTS[:30]
