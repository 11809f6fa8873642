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
from dataclasses import replace
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
TWO_FILES = ("a", "b")  # the names of the sources, of a file each


def write_index_of(task: Task, folder: Path, *, file: int) -> DocumentIndex:
    """Write the index of a plan whose document d is row d + 1 of file 0 or 1, and has 3 d bytes; open it."""
    plan = task.plan()
    documents = np.zeros(len(plan.order), dtype=DOCUMENT)
    documents["file"] = file
    documents["row"] = plan.order + 1
    documents["bytes"] = 3 * plan.order
    documents["tokens"] = np.array(task.lengths, dtype=np.int64)[plan.order]
    folder.mkdir()
    write_index(folder, plan, documents, checksums=np.arange(plan.num_rows, dtype=np.uint64) + 1000 * file)
    counts_by_source = count_sources(plan, documents, source_table(*TWO_FILES)).values()
    assert sum(counts.tokens_in_rows for counts in counts_by_source) == plan.tokens_in_rows
    assert sum(counts.tokens_dropped for counts in counts_by_source) == sum(plan.tokens_dropped.values())
    return DocumentIndex(folder, source_table(*TWO_FILES), task.max_length, len(documents), plan.num_rows)


def source_table(*names: str) -> SourceTable:
    """Return the sources with these names, each of which is one split of a dataset on the hub."""
    return SourceTable([SourceRecord(name, "hub", (), ("train",), None, place=name) for name in names])


def check_pieces(index: DocumentIndex, task: Task, *, first_row: int, file: int) -> None:
    """Compare the index of the rows from ``first_row`` on with the plan of the task, whose documents are of a file."""
    plan = task.plan()
    rows = np.arange(plan.num_rows)[::-1]  # any order of rows
    pieces = index.pieces(first_row + rows)
    documents = index.documents[pieces.documents]
    assert set(documents["file"].tolist()) <= {file}

    # each row has the pieces of the plan: position in the row, row in the file, first token, tokens, repeated tokens
    pieces_of_rows: list[list[tuple[int, ...]]] = [[] for _ in rows]
    columns = (pieces.rows, pieces.positions, documents["row"], pieces.starts, pieces.lengths, pieces.repeated)
    for row_index, *piece in zip(*(column.tolist() for column in columns), strict=True):
        pieces_of_rows[row_index].append(tuple(piece))
    for row, pieces_of_row in zip(rows, pieces_of_rows, strict=True):
        expected = []
        position = 0
        for planned in rows_of(plan)[row]:
            tokens = [*planned.repeated, *planned.new]
            document, first_token = tokens[0]
            expected.append((position, document + 1, first_token, len(tokens), len(planned.repeated)))
            position += len(tokens)
        assert pieces_of_row == expected

    # each occurrence of a document has its own pieces: no two have the same first new token
    first_new_tokens = (pieces.starts + pieces.repeated).tolist()
    occurrences = Counter(zip(pieces.documents.tolist(), first_new_tokens, strict=True))
    assert max(occurrences.values(), default=1) == 1

    # tokens and bytes are those of the whole documents, unless some tokens are in no row
    num_tokens, num_bytes = index.count_by_source(first_row + rows)
    assert num_tokens.sum() == plan.tokens_in_rows - plan.tokens_repeated
    if not sum(plan.tokens_dropped.values()):
        assert num_bytes.sum() == 3 * plan.order.sum()


@settings(max_examples=16, deadline=None)
@given(first_task=tasks(), drawn_task=tasks())
def test_the_index_of_any_plan_gives_back_its_pieces_also_joined(first_task: Task, drawn_task: Task) -> None:
    max_length = first_task.max_length  # joined splits have rows of one length
    second_task = replace(drawn_task, max_length=max_length, overlap=min(drawn_task.overlap, max_length - 1))
    with tempfile.TemporaryDirectory() as temporary_folder:
        folder = Path(temporary_folder)
        first = write_index_of(first_task, folder / "first", file=0)
        second = write_index_of(second_task, folder / "second", file=0)
        check_pieces(first, first_task, first_row=0, file=0)

        # file 0 of the second index is file 1 of the joined one
        (folder / "joined").mkdir()
        indexes_to_join = [
            IndexToJoin(first, first_file=0, rows_before=0),
            IndexToJoin(second, first_file=1, rows_before=0),
        ]
        join_indexes(folder / "joined", indexes_to_join)
        joined = DocumentIndex(
            folder / "joined",
            source_table(*TWO_FILES),
            max_length,
            num_documents=len(first.documents) + len(second.documents),
            num_rows=first.num_rows + second.num_rows,
        )
        check_pieces(joined, first_task, first_row=0, file=0)
        check_pieces(joined, second_task, first_row=first.num_rows, file=1)
        assert joined.checksums.tolist() == first.checksums.tolist() + second.checksums.tolist()


def write_sources(folder: Path) -> Texts:
    """Write files of every kind, with blank lines, empty documents and a bad row, and return their documents."""
    draw = random.Random(5)
    texts: dict[tuple[str, int], str] = {}

    def new_text(file: Path, row: int, num_words: int | None = None) -> str:
        """Return a text of so many words, by default of up to 11, and keep it as the one of a row."""
        if num_words is None:
            num_words = draw.randrange(12)
        words = [draw.choice(["año", "the", "mañana ", "\U0001f600", "of", "\n"]) for _ in range(num_words)]
        text = f"{file.name} {row}: {' '.join(words)}"
        texts[str(file), row] = text
        return text

    def new_texts(file: Path, num_rows: int) -> list[str]:
        return [new_text(file, row) for row in range(1, num_rows + 1)]

    # JSON lines, of which two are blank, one is not JSON, several are empty documents, and one is long
    (folder / "es" / "sub").mkdir(parents=True)
    jsonl = folder / "es" / "a.jsonl"
    lines = []
    for number in range(1, 61):
        if number == 28:
            lines += ["", ""]
        elif number == 35:
            lines.append("not JSON")
        elif number % 7 == 0:
            lines.append('{"text": " "}')
        else:
            row = len(lines) + 1
            text = new_text(jsonl, row, num_words=150 if number == 9 else None)
            lines.append(json.dumps({"text": text}))
    jsonl.write_text("\n".join(lines) + "\n", encoding="utf-8")

    # the other kinds of files
    csv_file = folder / "es" / "b.csv"
    csv_text = io.StringIO()
    csv.writer(csv_text).writerows([["text"], *([text] for text in new_texts(csv_file, 8))])
    csv_file.write_text(csv_text.getvalue(), encoding="utf-8", newline="")
    txt = folder / "es" / "c.txt"
    txt.write_text(new_text(txt, 1, num_words=40), encoding="utf-8")
    parquet_file = folder / "es" / "sub" / "d.parquet"
    parquet.write_table(pyarrow.table({"text": new_texts(parquet_file, 12)}), parquet_file, row_group_size=5)
    json_file = folder / "v=a.json"
    json_file.write_text(json.dumps([{"text": text} for text in new_texts(json_file, 5)]), encoding="utf-8")
    gzip_file = folder / "z.jsonl.gz"
    with gzip.open(gzip_file, "wt", encoding="utf-8") as opened:
        opened.writelines(json.dumps({"text": text}) + "\n" for text in new_texts(gzip_file, 2))

    # a dataset that `datasets` has saved; its split is its name in the index
    saved_split = Path(f"{folder}/saved (train)")
    datasets.Dataset.from_dict({"text": new_texts(saved_split, 7)}).save_to_disk(folder / "saved")
    return texts


def indexes_of(folder: Path) -> dict[str, DocumentIndex]:
    manifest = manifest_of(folder)
    indexes = {name: open_index(folder, manifest, name) for name in manifest.ledger.splits}
    return {name: index for name, index in indexes.items() if index is not None}


def check_every_row(folder: Path, texts: Texts, rows_of_splits: dict[str, list[list[int]]]) -> Counter[tuple[str, int]]:
    """Compare each piece of each row with the tokens of the text that the index names.

    Returns:
        The number of documents by file and row.
    """
    manifest = manifest_of(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    num_documents: Counter[tuple[str, int]] = Counter()
    for name, index in indexes_of(folder).items():
        # the documents of the index have the sizes of the texts
        ids_of_documents: list[list[int]] = []
        counts_by_source: dict[str, Counter[str]] = {}
        for document in range(len(index.documents)):
            origin = index.origin(document)
            text = texts[origin.file, origin.row]
            text_ids = tokenizer.encode(text, add_special_tokens=False)
            ids = [tokenizer.bos_token_id, *text_ids, tokenizer.eos_token_id]
            ids_of_documents.append(ids)
            assert (origin.num_tokens, origin.num_bytes) == (len(ids), len(text.encode()))
            num_documents[origin.file, origin.row] += 1
            counts = {"documents": 1, "tokens_in": origin.num_tokens, "bytes": origin.num_bytes}
            counts_by_source.setdefault(origin.source, Counter()).update(counts)

        # the pieces fill the rows without gaps, and have the documents' tokens
        rows = rows_of_splits[name]
        pieces = index.pieces(np.arange(len(rows)))
        num_filled = [0] * len(rows)
        columns = (pieces.rows, pieces.positions, pieces.documents, pieces.starts, pieces.lengths)
        for row, position, document, start, length in zip(*(column.tolist() for column in columns), strict=True):
            assert position == num_filled[row]
            piece_ids = ids_of_documents[document][start : start + length]
            assert rows[row][position : position + length] == piece_ids
            num_filled[row] += length

        # so does the ledger
        ledger = manifest.ledger.splits[name]
        assert sum(num_filled) == ledger.tokens_in_rows
        assert ledger.sources.keys() == counts_by_source.keys()
        for source, source_ledger in ledger.sources.items():
            counts = counts_by_source[source]
            assert source_ledger.documents == counts["documents"]
            assert source_ledger.tokens_in == counts["tokens_in"]
            assert source_ledger.bytes == counts["bytes"]
        assert sum(source_ledger.tokens_in for source_ledger in ledger.sources.values()) == ledger.tokens_in
    return num_documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Texts]:
    folder = tmp_path_factory.mktemp("corpus")
    return folder, write_sources(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "concat", "num_proc": 2},
        {"packing": "concat", "overlap": 5, "weights": [1, 3, 1]},
        {"packing": "best_fit", "overlap": 3, "max_length": 48},
        {"packing": "none", "overlap": 2, "max_documents": 30},
    ],
    ids=["concat", "overlap-weights", "best_fit", "none"],
)
def test_every_piece_of_a_row_is_the_text_at_its_file_and_row(
    tmp_path: Path,
    tiny_model_dir: Path,
    corpus: tuple[Path, Texts],
    options: dict[str, Any],
) -> None:
    folder, texts = corpus
    sources = [f"es={folder}/es", f"{folder}/v=a.json", f"es={folder}/saved"]
    arguments = {"on_bad_rows": "skip", "validation_split": 0.2, **options}
    reads_gzip = options["packing"] == "best_fit"
    if reads_gzip:
        arguments["validation_dataset"] = [f"va={folder}/z.jsonl.gz"]
    rows = tokenize(tmp_path / "out", tiny_model_dir, *sources, sizes=PARTS_OF_FILES, **arguments)
    num_documents = check_every_row(tmp_path / "out", texts, rows)

    expected = {(file, row) for file, row in texts if reads_gzip or not file.endswith(".gz")}
    if "weights" in options:  # documents are repeated, and others left out
        assert max(num_documents.values()) > 1
        assert set(num_documents) <= expected
    elif "max_documents" in options:
        assert list(num_documents.values()) == [1] * options["max_documents"]
    else:
        assert num_documents == Counter(expected)
    inspect.main([str(tmp_path / "out"), "--rows", "0"])  # exits if there are problems


def test_a_duplicate_is_indexed_at_its_first_place(tmp_path: Path, tiny_model_dir: Path) -> None:
    lines = ["one two", "three", "one two", "four", "three"]
    files = [write_jsonl(tmp_path / name, lines) for name in ("a.jsonl", "b.jsonl")]
    rows = tokenize(tmp_path / "out", tiny_model_dir, *files, deduplicate="true", max_length=4, validation_split=0)
    texts = {(str(file), row): text for file in files for row, text in enumerate(lines, 1)}
    assert set(check_every_row(tmp_path / "out", texts, rows)) == {(str(files[0]), row) for row in (1, 2, 4)}


def test_chats_are_indexed_by_line_with_the_bytes_of_their_messages(tmp_path: Path, chatml_dir: Path) -> None:
    contents_of_chats = [(f"¿Chat {number}?", f"answer {number} " * (number % 5 + 1)) for number in range(30)]
    lines = []
    for question, answer in contents_of_chats:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(lines))
    rows = tokenize(tmp_path / "out", chatml_dir, file, max_length=96, validation_split=0)["train"]

    (index,) = indexes_of(tmp_path / "out").values()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    pieces = index.pieces(np.arange(len(rows)))
    lines_with_pieces = []
    for row, position, document, length in zip(
        pieces.rows, pieces.positions, pieces.documents, pieces.lengths, strict=True
    ):
        origin = index.origin(int(document))
        contents = contents_of_chats[origin.row - 1]
        text = tokenizer.decode(rows[row][position : position + length])
        assert all(content.strip() in text for content in contents)
        assert origin.num_bytes == sum(len(content.encode()) for content in contents)
        lines_with_pieces.append(origin.row)
    assert sorted(lines_with_pieces) == list(range(1, 31))  # each chat is one piece


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

    # interrupted after all shards are encoded; one of them is then as an older version wrote it
    with monkeypatch.context() as interrupted:
        interrupted.setattr(build, "collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path / "out", tiny_model_dir, source, sizes=PARTS_OF_FILES, **options)
    shard_files = sorted((tmp_path / ".out.unfinished").glob("*.npz"))
    assert len(shard_files) > 5
    with np.load(shard_files[0]) as stored:
        arrays = {name: stored[name] for name in stored.files if name != "unused"}
    np.savez(shard_files[0], **arrays)

    # only that shard is encoded again
    encoded_shards: list[object] = []
    unfinished_shards = encoding.unfinished_shards

    def recorded_shards(*arguments: Any) -> Iterator[Any]:
        for shard in unfinished_shards(*arguments):
            encoded_shards.append(shard)
            yield shard

    monkeypatch.setattr(encoding, "unfinished_shards", recorded_shards)
    tokenize(tmp_path / "out", tiny_model_dir, source, sizes=PARTS_OF_FILES, **options)
    assert "re-encoding 1 shards that were finished by an older version" in capsys.readouterr().err
    assert len(encoded_shards) == 1
    assert index_files(tmp_path / "out") == index_files(tmp_path / "whole")


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> tuple[Path, Path, Texts]:
    """Two token datasets with a source of the same name, and the texts of both."""
    folder = tmp_path_factory.mktemp("pair")
    texts: Texts = {}
    for name, overlap in (("a", 0), ("b", 2)):
        contents = {
            folder / f"{name}.jsonl": [f"{name}: text {number} " * (number % 9 + 1) for number in range(20)],
            folder / f"only-{name}.jsonl": [f"only {name}"] * 4,
        }
        for file, file_texts in contents.items():
            write_jsonl(file, file_texts)
            for row, text in enumerate(file_texts, 1):
                texts[str(file), row] = text
        shared_file, own_file = contents
        sources = (f"es={shared_file}", own_file)
        tokenize(folder / name, tiny_model_dir, *sources, overlap=overlap, validation_split=0.2)
    return folder / "a", folder / "b", texts


def test_merge_keeps_the_index_and_joins_sources_of_one_name(tmp_path: Path, pair: tuple[Path, Path, Texts]) -> None:
    first, second, texts = pair
    merge.main([str(first), str(second), "--output_dir", str(tmp_path / "out")])
    loaded = datasets.load_from_disk(tmp_path / "out")
    rows = {name: split["input_ids"][:] for name, split in loaded.items()}
    assert check_every_row(tmp_path / "out", texts, rows) == Counter(texts.keys())
    own_files = [str(first.parent / f"only-{name}.jsonl") for name in ("a", "b")]
    assert indexes_of(tmp_path / "out")["train"].sources.names == ("es", *own_files)
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
    assert f"note     {older} has no document index because an older version wrote it" in capsys.readouterr().out
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
        (move_border, "document index: documents begin at other positions in 2 rows, first in row 0"),
        (move_to_other_source, "documents of es, but the document index has"),
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

    # a masked label changes the checksum of its row alone, other borders those of both rows
    labels = np.where(ids == 8, np.int32(-100), ids)
    first_unmasked, second_masked = row_checksums(ids, labels, starts, offsets).tolist()
    assert first_unmasked == first
    moved_borders = row_checksums(ids, None, starts + 1, offsets).tolist()
    assert len({first, second, second_masked, *moved_borders}) == 5


def test_a_damaged_index_is_one_line(
    tmp_path: Path, pair: tuple[Path, Path, Texts], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(pair[0], tmp_path / "damaged"))
    documents = np.load(folder / "train" / "index" / "documents.npy", mmap_mode="r+")
    documents["file"][0] = 99
    with pytest.raises(InputError, match=r"manifest\.json does not list"):
        inspect.main([str(folder)])
    documents["file"][0] = 0

    # the same fault in one line of the inspector and in the error of a merge
    rows_file = folder / "train" / "index" / "rows.npy"
    rows = np.load(rows_file)
    damages = {
        "does not match the rows and manifest.json": lambda: np.save(rows_file, rows[:-1]),
        "rows.npy: damaged": lambda: rows_file.write_bytes(rows_file.read_bytes()[:50]),
        "rows.npy: the file is missing": rows_file.unlink,
    }
    for fault, damage in damages.items():
        damage()
        with pytest.raises(SystemExit):
            inspect.main([str(folder), "--rows", "0"])
        (problem,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
        assert fault in problem
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
    with pytest.raises(
        InputError,
        match=r"lang=es: ambiguous, since it is a path and could also be es with the name lang; give \./lang=es",
    ):
        split_names(["lang=es"], "--dataset")
    with pytest.raises(InputError, match=r"--dataset all=corpus: the name all is reserved .* give another NAME=corpus"):
        split_names(["all=corpus"], "--dataset")


def test_a_file_after_the_last_one_has_no_source() -> None:
    sources = source_table("es", "ca")
    assert sources.sources_of(np.array([0, 1])).tolist() == [0, 1]
    with pytest.raises(InputError, match=r"manifest\.json does not list"):
        sources.sources_of(np.array([2]))


def test_the_ledger_of_the_sources_must_balance(pair: tuple[Path, Path, Texts]) -> None:
    ledger = manifest_of(pair[0]).ledger
    assert ledger.imbalances(16) == []
    ledger.splits["train"].sources["es"] = SourceLedger(1, 2, 3, 0, 3, 0)
    assert any(line.startswith("documents of the sources of train: ") for line in ledger.imbalances(16))


def test_a_document_takes_at_most_32_bytes_and_the_rest_is_by_row(pair: tuple[Path, Path, Texts]) -> None:
    header_bytes = 128  # of a file of numpy
    num_bytes = sum(file.stat().st_size - header_bytes for file in pair[0].glob("train/index/*.npy"))
    ledger = manifest_of(pair[0]).ledger.splits["train"]
    assert num_bytes <= 32 * ledger.documents + 44 * ledger.rows
