"""The document index names, for every row, its documents, and for every document the place in the sources."""

import csv
import gzip
import io
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from pyarrow import parquet
from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.inspection import __main__ as inspect
from fabric_train.reading.sources import split_names
from fabric_train.token_dataset.arrow_folder import count_sources, write_index
from fabric_train.token_dataset.document_index import DOCUMENT, DocumentIndex, SourceTable, open_index, row_checksums
from fabric_train.token_dataset.manifest import SourceLedger, SourceRecord
from fabric_train.tokenization import build, encoding, merge
from fabric_train.tokenization.merge_rows import IndexToJoin, join_indexes
from fabric_train.tokenization.shards import ShardSizes
from tests.support.token_datasets import alter_token, manifest_of, tokenize, write_jsonl
from tests.token_dataset.test_rows import Task, rows_of, tasks

PARTS_OF_FILES = ShardSizes(smallest=700, worth_keeping=0)
Texts = dict[tuple[str, int], str]  # file and row → text


def number_of_rows(task: Task, folder: Path, file: int) -> DocumentIndex:
    """Write the index of a plan whose document d is row d + 1 of ``file``, and has 3 d bytes; open it."""
    plan = task.plan()
    documents = np.zeros(len(plan.order), dtype=DOCUMENT)
    documents["file"] = file
    documents["row"] = plan.order + 1
    documents["bytes"] = 3 * plan.order
    documents["tokens"] = np.array(task.lengths, dtype=np.int64)[plan.order]
    folder.mkdir()
    write_index(folder, plan, documents, checksums=np.arange(plan.num_rows, dtype=np.uint64) + 1000 * file)
    found = count_sources(plan, documents, table("a", "b"))
    assert sum(one.tokens_in_rows for one in found.values()) == plan.tokens_in_rows
    assert sum(one.tokens_dropped for one in found.values()) == sum(plan.tokens_dropped.values())
    return DocumentIndex(folder, table("a", "b"), task.max_length, len(documents), plan.num_rows)


def table(*names: str) -> SourceTable:
    return SourceTable([SourceRecord(name, "hub", (), ("train",), None, place=name) for name in names])


def check_pieces(index: DocumentIndex, task: Task, first_row: int, file: int) -> None:
    """Compare the index of the rows from ``first_row`` on with the plan of the task."""
    plan = task.plan()
    chosen = np.arange(plan.num_rows)[::-1]  # any order of rows
    pieces = index.pieces(first_row + chosen)
    found: list[list[tuple[int, ...]]] = [[] for _ in chosen]
    stored = index.documents[pieces.documents]
    assert set(stored["file"].tolist()) <= {file}
    columns = (pieces.rows, pieces.positions, stored["row"], pieces.starts, pieces.lengths, pieces.repeated)
    for row, *piece in zip(*(column.tolist() for column in columns), strict=True):
        found[row].append(tuple(piece))
    for row, its in zip(chosen, found, strict=True):
        expected = []
        position = 0
        for piece in rows_of(plan)[row]:
            tokens = [*piece.repeated, *piece.new]
            expected.append((position, tokens[0][0] + 1, tokens[0][1], len(tokens), len(piece.repeated)))
            position += len(tokens)
        assert its == expected
    new = Counter(zip(pieces.documents.tolist(), (pieces.starts + pieces.repeated).tolist(), strict=True))
    assert max(new.values(), default=1) == 1  # each occurrence of a document has its own pieces
    num_tokens, num_bytes = index.count_by_source(first_row + chosen)
    assert num_tokens.sum() == plan.tokens_in_rows - plan.tokens_repeated
    if not plan.tokens_dropped or not sum(plan.tokens_dropped.values()):
        assert num_bytes.sum() == 3 * plan.order.sum()


@settings(max_examples=16, deadline=None)
@given(task=tasks(), other=tasks())
def test_the_index_of_any_plan_gives_back_its_pieces_also_joined(task: Task, other: Task) -> None:
    other = Task(other.lengths, other.order, other.packing, task.max_length, min(other.overlap, task.max_length - 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = number_of_rows(task, folder / "first", 0)
        second = number_of_rows(other, folder / "second", 0)
        check_pieces(first, task, 0, 0)
        (folder / "joined").mkdir()
        join_indexes(folder / "joined", [IndexToJoin(first, 0, 0), IndexToJoin(second, 1, 0)])
        num_documents = len(first.documents) + len(second.documents)
        num_rows = len(first.rows) + len(second.rows) - 2
        joined = DocumentIndex(folder / "joined", table("a", "b"), task.max_length, num_documents, num_rows)
        check_pieces(joined, task, 0, 0)
        check_pieces(joined, other, len(first.rows) - 1, 1)
        sums = [index.checksums.tolist() for index in (first, second, joined) if index.checksums is not None]
        assert sums[0] + sums[1] == sums[2]


def write_sources(folder: Path) -> Texts:
    """Write files of every kind, with blank lines, empty documents and a bad row, and return their documents."""
    draw = random.Random(5)
    texts: dict[tuple[str, int], str] = {}

    def text(file: Path, row: int, num_words: int | None = None) -> str:
        words = [draw.choice(["año", "the", "mañana ", "\U0001f600", "of", "\n"]) for _ in range(num_words or 12)]
        texts[str(file), row] = made = f"{file.name} {row}: " + " ".join(words[: num_words or draw.randrange(12)])
        return made

    (folder / "es" / "sub").mkdir(parents=True)
    lines = folder / "es" / "a.jsonl"
    with lines.open("w", encoding="utf-8") as opened:
        for row in range(1, 61):
            if row % 7 == 0:
                opened.write("\n\n" if row == 28 else "not JSON\n" if row == 35 else '{"text": " "}\n')
            else:
                number = row + (row > 28)  # line 29 is blank too
                opened.write(json.dumps({"text": text(lines, number, 150 if row == 9 else None)}) + "\n")
    records = folder / "es" / "b.csv"
    table_of_csv = io.StringIO()
    csv.writer(table_of_csv).writerows([["text"], *([text(records, row)] for row in range(1, 9))])
    records.write_text(table_of_csv.getvalue(), encoding="utf-8", newline="")
    (folder / "es" / "c.txt").write_text(text(folder / "es" / "c.txt", 1, 40), encoding="utf-8")
    groups = folder / "es" / "sub" / "d.parquet"
    parquet.write_table(pyarrow.table({"text": [text(groups, row) for row in range(1, 13)]}), groups, row_group_size=5)
    array = folder / "v=a.json"
    array.write_text(json.dumps([{"text": text(array, row)} for row in range(1, 6)]), encoding="utf-8")
    zipped = folder / "z.jsonl.gz"
    with gzip.open(zipped, "wt", encoding="utf-8") as opened:
        opened.writelines(json.dumps({"text": text(zipped, row)}) + "\n" for row in (1, 2))
    saved = Path(f"{folder}/saved (train)")
    rows = [text(saved, row) for row in range(1, 8)]
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(folder / "saved")
    return texts


def indexes_of(folder: Path) -> dict[str, DocumentIndex]:
    manifest = manifest_of(folder)
    opened = {name: open_index(folder, manifest, name) for name in manifest.ledger.splits}
    return {name: index for name, index in opened.items() if index is not None}


def check_every_row(folder: Path, texts: Texts, rows: dict[str, list[list[int]]]) -> Counter[tuple[str, int]]:
    """Compare each piece of each row with the tokens of the text at its place; count the documents by place."""
    manifest = manifest_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    places: Counter[tuple[str, int]] = Counter()
    for name, index in indexes_of(folder).items():
        ids: dict[int, list[int]] = {}
        by_source: dict[str, Counter[str]] = {}
        for document in range(len(index.documents)):
            origin = index.origin(document)
            text = texts[origin.file, origin.row]
            inner = tokenizer.encode(text, add_special_tokens=False)
            ids[document] = [tokenizer.bos_token_id, *inner, tokenizer.eos_token_id]
            assert (origin.num_tokens, origin.num_bytes) == (len(ids[document]), len(text.encode()))
            places[origin.file, origin.row] += 1
            counts = {"documents": 1, "tokens_in": origin.num_tokens, "bytes": origin.num_bytes}
            by_source.setdefault(origin.source, Counter()).update(counts)
        pieces = index.pieces(np.arange(len(rows[name])))
        filled = [0] * len(rows[name])
        columns = (pieces.rows, pieces.positions, pieces.documents, pieces.starts, pieces.lengths)
        for row, position, document, start, length in zip(*(column.tolist() for column in columns), strict=True):
            assert position == filled[row]
            assert rows[name][row][position : position + length] == ids[document][start : start + length]
            filled[row] += length
        ledger = manifest.ledger.splits[name]
        assert sum(filled) == ledger.tokens_in_rows
        said = {source: (one.documents, one.tokens_in, one.bytes) for source, one in ledger.sources.items()}
        assert said == {source: (one["documents"], one["tokens_in"], one["bytes"]) for source, one in by_source.items()}
        assert sum(one.tokens_in for one in ledger.sources.values()) == ledger.tokens_in
    return places


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Texts]:
    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_sources(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "concat", "num_proc": 2},
        {"packing": "concat", "overlap": 5, "weights": "1 3 1"},
        {"packing": "best_fit", "overlap": 3, "max_length": 48},
        {"packing": "none", "overlap": 2, "max_documents": 30},
    ],
    ids=lambda options: "-".join(map(str, options.values())).replace(" ", ","),
)
def test_every_piece_of_a_row_is_the_text_at_its_file_and_row(
    tmp_path: Path,
    tiny_model_dir: Path,
    corpus: tuple[Path, Texts],
    options: dict[str, Any],
) -> None:
    folder, texts = corpus
    options = {"on_bad_rows": "skip", "validation_split": 0.2, **options}
    weights = options.pop("weights", None)
    sources = [f"es={folder}/es", f"{folder}/v=a.json", f"es={folder}/saved"]
    sources += ["--weights", *weights.split()] if weights else []
    held_out = ["--validation_dataset", f"va={folder}/z.jsonl.gz"] if options["packing"] == "best_fit" else []
    rows = tokenize(tmp_path / "out", tiny_model_dir, *sources, *held_out, sizes=PARTS_OF_FILES, **options)
    places = check_every_row(tmp_path / "out", texts, rows)
    expected = {place for place in texts if held_out or not place[0].endswith(".gz")}
    if weights:
        assert max(places.values()) > 1
        assert set(places) <= expected
    elif "max_documents" in options:
        assert list(places.values()) == [1] * 30
    else:
        assert places == Counter(expected)
    inspect.main([str(tmp_path / "out"), "--rows", "0"])  # exits if there are problems


def test_a_duplicate_is_indexed_at_its_first_place(tmp_path: Path, tiny_model_dir: Path) -> None:
    lines = ["one two", "three", "one two", "four", "three"]
    files = [write_jsonl(tmp_path / name, lines) for name in ("a.jsonl", "b.jsonl")]
    rows = tokenize(tmp_path / "out", tiny_model_dir, *files, deduplicate="true", max_length=4, validation_split=0)
    texts = {(str(file), row): text for file in files for row, text in enumerate(lines, 1)}
    assert set(check_every_row(tmp_path / "out", texts, rows)) == {(str(files[0]), row) for row in (1, 2, 4)}


def test_chats_are_indexed_by_line_with_the_bytes_of_their_messages(tmp_path: Path, chatml_dir: Path) -> None:
    chats = [[("user", f"¿Chat {i}?"), ("assistant", f"answer {i} " * (i % 5 + 1))] for i in range(30)]
    file = tmp_path / "chats.jsonl"
    messages = [[{"role": role, "content": content} for role, content in chat] for chat in chats]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
    rows = tokenize(tmp_path / "out", chatml_dir, file, max_length=96, validation_split=0)
    (index,) = indexes_of(tmp_path / "out").values()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    pieces = index.pieces(np.arange(len(rows["train"])))
    seen = []
    for row, position, document, length in zip(
        pieces.rows, pieces.positions, pieces.documents, pieces.lengths, strict=True
    ):
        origin = index.origin(int(document))
        text = tokenizer.decode(rows["train"][row][position : position + length])
        assert all(content.strip() in text for _, content in chats[origin.row - 1])
        assert origin.num_bytes == sum(len(content.encode()) for _, content in chats[origin.row - 1])
        seen.append(origin.row)
    assert sorted(seen) == list(range(1, 31))


def index_files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.glob("*/index/*"))}


def test_an_interrupted_run_continues_to_the_same_index(
    tmp_path: Path,
    tiny_model_dir: Path,
    corpus: tuple[Path, Texts],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = corpus[0] / "es"
    options = {"on_bad_rows": "skip", "max_length": 16}
    tokenize(tmp_path / "whole", tiny_model_dir, source, **options)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(build, "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path / "out", tiny_model_dir, source, sizes=PARTS_OF_FILES, **options)
    finished = sorted((tmp_path / ".out.unfinished").glob("*.npz"))
    assert len(finished) > 5
    with np.load(finished[0]) as stored:  # as an older version wrote it
        arrays = {name: stored[name] for name in stored.files if name != "unused"}
    np.savez(finished[0], **arrays)
    encoded: list[object] = []
    whole = encoding.unfinished_shards
    monkeypatch.setattr(encoding, "unfinished_shards", lambda *given: listed(whole(*given), encoded))
    tokenize(tmp_path / "out", tiny_model_dir, source, sizes=PARTS_OF_FILES, **options)
    assert "1 shards that an older version finished are encoded again" in capsys.readouterr().err
    assert len(encoded) == 1
    assert index_files(tmp_path / "out") == index_files(tmp_path / "whole")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def listed(items: Iterator[Any], into: list[Any]) -> Iterator[Any]:
    for item in items:
        into.append(item)
        yield item


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[Path, Path, Texts]:
    """Two token datasets with a source of the same name, and the texts of both."""
    folder = tmp_path_factory.mktemp("pair")
    texts: dict[tuple[str, int], str] = {}
    for name in ("a", "b"):
        file = write_jsonl(folder / f"{name}.jsonl", [f"{name}: text {i} " * (i % 9 + 1) for i in range(20)])
        texts |= {(str(file), row): f"{name}: text {row - 1} " * ((row - 1) % 9 + 1) for row in range(1, 21)}
        sources = (f"es={file}", write_jsonl(folder / f"only-{name}.jsonl", [f"only {name}"] * 4))
        texts |= {(str(sources[1]), row): f"only {name}" for row in range(1, 5)}
        tokenize(folder / name, tiny_model_dir, *sources, overlap=2 if name == "b" else 0, validation_split=0.2)
    return folder / "a", folder / "b", texts


def test_merge_keeps_the_index_and_joins_sources_of_one_name(tmp_path: Path, pair: tuple[Path, Path, Texts]) -> None:
    first, second, texts = pair
    merge.main([str(first), str(second), "--output_dir", str(tmp_path / "out")])
    loaded = datasets.load_from_disk(tmp_path / "out")
    rows = {name: split["input_ids"][:] for name, split in loaded.items()}
    assert check_every_row(tmp_path / "out", texts, rows) == Counter(texts.keys())
    only = [str(first.parent / f"only-{name}.jsonl") for name in ("a", "b")]
    assert indexes_of(tmp_path / "out")["train"].sources.names == ("es", only[0], only[1])
    inspect.main([str(tmp_path / "out"), "--rows", "0"])


def as_older_version(folder: Path) -> Path:
    """Turn a token dataset into one that was written before there was an index."""
    for index in folder.glob("*/index"):
        shutil.rmtree(index)
    content = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    del content["has_index"]
    for name in ("train", "validation"):
        del content["ledger"][name]["sources"]
    for source in content["sources"]:
        del source["place"], source["folder"]
    (folder / "manifest.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_dataset_without_index_is_read_and_merged_with_a_note(
    tmp_path: Path, pair: tuple[Path, Path, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    older = as_older_version(Path(shutil.copytree(pair[0], tmp_path / "older")))
    inspect.main([str(older), "--rows", "1"])
    assert "none: an older version wrote this dataset" in capsys.readouterr().out
    merge.main([str(pair[1]), str(older), "--output_dir", str(tmp_path / "out")])
    assert f"note     {older} has no document index, because an older version wrote it" in capsys.readouterr().out
    assert not indexes_of(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*/index"))
    inspect.main([str(tmp_path / "out"), "--rows", "0"])


def test_inspect_names_the_documents_of_a_row(
    tmp_path: Path, pair: tuple[Path, Path, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    inspect.main([str(pair[0]), "--rows", "1", "--html", str(tmp_path / "page.html")])
    output = capsys.readouterr().out
    line = f"position 0: es: {pair[0].parent / 'a.jsonl'}:1, tokens 0 to "
    assert line in output
    assert line in (tmp_path / "page.html").read_text(encoding="utf-8")


def move_border(documents: np.ndarray) -> None:
    documents["tokens"][:2] += np.array([1, -1], dtype="i4").astype("u4")


def move_to_other_source(documents: np.ndarray) -> None:
    documents["file"][0] = 1


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (move_border, "document index: documents begin elsewhere in 2 rows, first in row 0"),
        (move_to_other_source, "documents of es, the document index"),
    ],
)
def test_inspect_finds_an_index_that_is_not_that_of_the_rows(
    tmp_path: Path, pair: tuple[Path, Path, Texts], spoil: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(pair[0], tmp_path / "spoiled"))
    spoil(np.load(folder / "train" / "index" / "documents.npy", mmap_mode="r+"))
    with pytest.raises(SystemExit):
        inspect.main([str(folder), "--rows", "0"])
    assert problem in " ".join(capsys.readouterr().out.split())


def test_inspect_names_a_row_whose_content_has_changed(
    tmp_path: Path, pair: tuple[Path, Path, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(pair[0], tmp_path / "altered"))
    alter_token(folder, "train", 3)
    with pytest.raises(SystemExit):
        inspect.main([str(folder), "--rows", "0"])
    problem = "document index: the content has changed since it was written in 1 rows, first in row 3"
    assert problem in " ".join(capsys.readouterr().out.split())
    for file in folder.glob("*/index/checksums.npy"):  # as a version before them wrote it
        file.unlink()
    inspect.main([str(folder), "--rows", "0"])


def test_checksums_do_not_depend_on_labels_that_repeat_the_tokens() -> None:
    ids = np.arange(12, dtype=np.int32)
    starts = np.array([0, 2, 1], dtype=np.int32)
    offsets = np.array([0, 2, 3])
    first, second = row_checksums(ids, None, starts, offsets).tolist()
    assert row_checksums(ids, ids.copy(), starts, offsets).tolist() == [first, second]
    masked = np.where(ids == 8, np.int32(-100), ids)
    others = (
        row_checksums(ids, masked, starts, offsets).tolist(),
        row_checksums(ids, None, starts + 1, offsets).tolist(),
    )
    assert others[0][0] == first
    assert len({first, second, others[0][1], *others[1]}) == 5


def test_a_damaged_index_is_one_line(
    tmp_path: Path, pair: tuple[Path, Path, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(pair[0], tmp_path / "damaged"))
    documents = np.load(folder / "train" / "index" / "documents.npy", mmap_mode="r+")
    documents["file"][0] = 99
    with pytest.raises(InputError, match=r"manifest\.json does not list"):
        inspect.main([str(folder)])
    documents["file"][0] = 0
    file = folder / "train" / "index" / "rows.npy"
    whole = np.load(file)
    faults = {
        "not the index of these rows and this manifest.json": lambda: np.save(file, whole[:-1]),
        "rows.npy: damaged": lambda: file.write_bytes(file.read_bytes()[:50]),
        "rows.npy: the file is missing": file.unlink,
    }
    for fault, spoil in faults.items():
        spoil()
        with pytest.raises(SystemExit):
            inspect.main([str(folder), "--rows", "0"])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
        assert fault in line
        with pytest.raises(InputError, match=fault):
            merge.main([str(folder), str(pair[1]), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_name_before_an_equals_sign_names_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://me:secret@x.org/?a=b"
    expected = {
        "es=corpus/es/": ("es", "corpus/es/"),
        "./lang=es/": ("./lang=es/", "./lang=es/"),
        "va=./a=b.txt": ("va", "./a=b.txt"),
        url: ("https://x.org/?***", url),
        f"en={url}": ("en", url),
        "c": ("c", "c"),
    }
    assert split_names(list(expected), "--dataset") == list(expected.values())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lang=es").mkdir()
    with pytest.raises(InputError, match=r"lang=es: a path, and also es with the name lang; give \./lang=es"):
        split_names(["lang=es"], "--dataset")
    with pytest.raises(InputError, match=r"--dataset all=corpus: losses of all sources .* give NAME=corpus"):
        split_names(["all=corpus"], "--dataset")


def test_a_file_after_the_last_one_has_no_source() -> None:
    sources = table("es", "ca")
    assert sources.sources_of(np.array([0, 1])).tolist() == [0, 1]
    with pytest.raises(InputError, match=r"manifest\.json does not list"):
        sources.sources_of(np.array([2]))


def test_the_ledger_of_the_sources_must_balance(pair: tuple[Path, Path, Texts]) -> None:
    ledger = manifest_of(pair[0]).ledger
    assert ledger.imbalances(16) == []
    ledger.splits["train"].sources["es"] = SourceLedger(1, 2, 3, 0, 3, 0)
    assert any(line.startswith("documents of the sources of train: ") for line in ledger.imbalances(16))


def test_a_document_takes_at_most_32_bytes_and_the_rest_is_by_row(pair: tuple[Path, Path, Texts]) -> None:
    manifest = manifest_of(pair[0])
    size = sum(file.stat().st_size - 128 for file in pair[0].glob("train/index/*.npy"))  # without numpy's headers
    ledger = manifest.ledger.splits["train"]
    assert size <= 32 * ledger.documents + 44 * ledger.rows
