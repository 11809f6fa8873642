"""Documents and their rows are found in any index as a scan over all rows finds them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from fabric_train.token_dataset import document_index
from fabric_train.token_dataset.document_index import SourceTable
from fabric_train.token_dataset.document_search import files_named, find_documents, find_rows, num_records
from fabric_train.token_dataset.manifest import SourceFile, SourceRecord
from tests.token_dataset.test_document_index import write_index_of
from tests.token_dataset.test_rows import Task, tasks


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_index, "_RECORDS_PER_CHUNK", 3)
        yield


@settings(max_examples=20, deadline=None)
@given(task=tasks())
def test_rows_of_a_document_are_those_that_have_its_pieces(task: Task) -> None:
    searched: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        index = write_index_of(task, Path(folder) / "split", file=0)

        # scan all rows: the tokens of each document in each row, by its line in file 0
        pieces = index.pieces(np.arange(index.num_rows))
        lines_of_pieces = index.documents["row"][pieces.documents].tolist()
        counts_by_line: dict[int, dict[int, tuple[int, int]]] = {}  # line → row → tokens, repeated tokens
        columns = (lines_of_pieces, pieces.rows.tolist(), pieces.lengths.tolist(), pieces.repeated.tolist())
        for line, row, length, num_repeated in zip(*columns, strict=True):
            counts_by_row = counts_by_line.setdefault(line, {})
            earlier_length, earlier_repeated = counts_by_row.get(row, (0, 0))
            counts_by_row[row] = (earlier_length + length, earlier_repeated + num_repeated)

        # the search finds the same, and reports all of its progress
        for line in range(1, len(task.lengths) + 1):
            searched.clear()
            documents = find_documents(index, [0], line, searched.append)
            assert documents == np.flatnonzero(index.documents["row"] == line).tolist()
            assert find_documents(index, [1], line, lambda count: None) == []
            rows = find_rows(index, documents, searched.append)
            assert sum(searched) == num_records(index)
            counts_by_row = {row: (tokens.num_tokens, tokens.num_repeated) for row, tokens in rows.items()}
            assert counts_by_row == counts_by_line.get(line, {})


def test_a_file_is_found_by_its_name_or_the_end_of_it() -> None:
    def file_source(name: str, folder: str, *paths: str) -> SourceRecord:
        files = tuple(SourceFile(path, 1, "") for path in paths)
        return SourceRecord(name, "files", files, (), None, folder=folder)

    records = [
        file_source("es", "x/es", "a.jsonl", "sub/b.txt"),  # files 0 and 1
        file_source("va", "x/va", "a.jsonl"),  # file 2
        file_source("both", ".", "x/va/a.jsonl"),  # file 3, the same file
        SourceRecord("hub", "hub", (), ("train",), None, place="o/n"),  # file 4
    ]
    sources = SourceTable(records)
    assert files_named(sources, "x/es/a.jsonl") == {"x/es/a.jsonl": [0]}
    assert files_named(sources, "b.txt") == {"x/es/sub/b.txt": [1]}
    assert files_named(sources, "./sub/b.txt") == {"x/es/sub/b.txt": [1]}
    assert files_named(sources, "a.jsonl") == {"x/es/a.jsonl": [0], "x/va/a.jsonl": [2, 3]}
    assert files_named(sources, "o/n (train)") == {"o/n (train)": [4]}
    assert files_named(sources, ".txt") == {}
