"""Packing and splitting: nothing lost, nothing doubled, whatever the lengths."""

from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.corpus.encoder import with_borders
from fabric_train.corpus.packing import pack_rows, write_dataset_dict, write_split
from fabric_train.corpus.spool import draw_validation

BOS, EOS = 1, 2
LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """Return documents of distinct tokens, so that a lost, doubled or moved one shows."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end, dtype=np.int32) for length, end in zip(lengths, ends, strict=True)]


@given(lengths=LENGTHS, max_length=st.integers(1, 50))
def test_rows_hold_every_token_once_and_in_order_but_the_last_incomplete_row(
    lengths: list[int], max_length: int
) -> None:
    rows = list(pack_rows(documents_of(lengths), max_length))
    assert all(row.input_ids.shape == (max_length,) and row.input_ids.dtype == np.int32 for row in rows)
    total = sum(lengths)
    assert [token for row in rows for token in row.input_ids] == list(range(total - total % max_length))


@given(lengths=LENGTHS, max_length=st.integers(1, 50))
def test_document_starts_are_where_documents_begin(lengths: list[int], max_length: int) -> None:
    rows = list(pack_rows(documents_of(lengths), max_length))
    found = [start + index * max_length for index, row in enumerate(rows) for start in row.document_starts]
    begins = [int(end - length) for length, end in zip(lengths, np.cumsum(lengths), strict=True)]
    assert found == [begin for begin in begins if begin < len(rows) * max_length]


def test_the_worked_example_of_the_docstring() -> None:
    documents = [np.array(tokens, dtype=np.int32) for tokens in ([1, 10, 11, 2], [1, 12, 13, 14, 15, 2], [1, 16, 2])]
    rows = list(pack_rows(documents, 5))
    assert [row.input_ids.tolist() for row in rows] == [[1, 10, 11, 2, 1], [12, 13, 14, 15, 2]]
    assert [row.document_starts.tolist() for row in rows] == [[0, 4], []]


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), max_length=st.integers(1, 20))
def test_what_is_written_is_what_datasets_loads(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], max_length: int
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    rows = list(pack_rows(documents_of(lengths), max_length))
    if not rows:
        return
    write_split(folder / "train", rows, len(rows), max_length)
    write_dataset_dict(folder, ["train"])
    loaded = datasets.load_from_disk(folder)
    assert isinstance(loaded, datasets.DatasetDict)
    assert loaded["train"].features["input_ids"] == datasets.List(datasets.Value("int32"), length=max_length)
    assert loaded["train"]["input_ids"][:] == [row.input_ids.tolist() for row in rows]
    assert loaded["train"]["document_starts"][:] == [row.document_starts.tolist() for row in rows]


def test_rows_go_on_in_further_files_when_one_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_train.corpus.packing._TOKENS_PER_BATCH", 8)
    monkeypatch.setattr("fabric_train.corpus.packing._BATCHES_PER_FILE", 2)
    rows = list(pack_rows([np.arange(44, dtype=np.int32)], 4))
    write_split(tmp_path / "train", rows, len(rows), 4)
    assert sorted(path.name for path in tmp_path.glob("train/*.arrow")) == [
        f"data-0000{index}-of-00003.arrow" for index in range(3)
    ]
    assert np.concatenate(datasets.load_from_disk(tmp_path / "train")["input_ids"][:]).tolist() == list(range(44))


@given(ids=st.lists(st.sampled_from([BOS, EOS, 3, 4])), bos=st.sampled_from([BOS, None]))
def test_bos_and_eos_stand_at_the_ends_exactly_once(ids: list[int], bos: int | None) -> None:
    bordered = with_borders(ids, bos, EOS)
    inner = bordered[0 if bos is None else 1 : -1]
    assert bordered[-1] == EOS
    assert bos is None or bordered[0] == bos
    assert not inner or (inner[-1] != EOS and (bos is None or inner[0] != bos))
    assert [token for token in inner if token > EOS] == [token for token in ids if token > EOS]


@given(num_documents=st.integers(0, 500), share=st.floats(0, 0.99), seed=st.integers(0, 9))
def test_validation_gets_its_exact_share_of_the_documents(num_documents: int, share: float, seed: int) -> None:
    chosen = draw_validation(num_documents, share, seed)
    assert chosen.shape == (num_documents,)
    if share == 0 or num_documents < 2:
        assert chosen.sum() == 0
    else:
        assert 1 <= chosen.sum() <= num_documents - 1
        assert chosen.sum() in (1, num_documents - 1) or abs(chosen.sum() - share * num_documents) <= 0.5


def test_the_seed_decides_which_documents_are_held_out() -> None:
    draws = [draw_validation(1000, 0.1, seed).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
