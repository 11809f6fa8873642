"""Documents and their rows are found in any index as a scan over all rows finds them."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from fabric_train.token_dataset import document_index
from fabric_train.token_dataset.document_index import SourceTable
from fabric_train.token_dataset.document_search import files_named, find_documents, find_rows, num_records
from fabric_train.token_dataset.manifest import SourceFile, SourceRecord
from tests.token_dataset.test_document_index import number_of_rows
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
        index = number_of_rows(task, Path(folder) / "split", 0)
        pieces = index.pieces(np.arange(len(index.rows) - 1))
        of_pieces = index.documents["row"][pieces.documents].tolist()
        tokens = Counter[tuple[int, int]]()
        repeated = Counter[tuple[int, int]]()
        columns = (of_pieces, pieces.rows.tolist(), pieces.lengths.tolist(), pieces.repeated.tolist())
        for document, row, length, again in zip(*columns, strict=True):
            tokens[document, row] += length
            repeated[document, row] += again
        for row in range(1, len(task.lengths) + 1):
            searched.clear()
            documents = find_documents(index, [0], row, searched.append)
            assert documents == np.flatnonzero(index.documents["row"] == row).tolist()
            assert find_documents(index, [1], row, lambda count: None) == []
            found = find_rows(index, documents, searched.append)
            assert sum(searched) == num_records(index)
            expected = {place: (tokens[row, place], repeated[row, place]) for own, place in tokens if own == row}
            assert found == expected


def test_a_file_is_found_by_its_name_or_the_end_of_it() -> None:
    records = [
        SourceRecord(
            "es", "files", tuple(SourceFile(name, 1, "") for name in ("a.jsonl", "sub/b.txt")), (), None, folder="x/es"
        ),
        SourceRecord("va", "files", (SourceFile("a.jsonl", 1, ""),), (), None, folder="x/va"),
        SourceRecord("both", "files", (SourceFile("x/va/a.jsonl", 1, ""),), (), None, folder="."),
        SourceRecord("hub", "hub", (), ("train",), None, place="o/n"),
    ]
    sources = SourceTable(records)
    assert files_named(sources, "x/es/a.jsonl") == {"x/es/a.jsonl": [0]}
    assert files_named(sources, "b.txt") == {"x/es/sub/b.txt": [1]}
    assert files_named(sources, "./sub/b.txt") == {"x/es/sub/b.txt": [1]}
    assert files_named(sources, "a.jsonl") == {"x/es/a.jsonl": [0], "x/va/a.jsonl": [2, 3]}
    assert files_named(sources, "o/n (train)") == {"o/n (train)": [4]}
    assert files_named(sources, ".txt") == {}
