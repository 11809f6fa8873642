"""Rows hold every token as planned, for any lengths, order, packing and overlap."""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fabric_train.cli.errors import InputError
from fabric_train.token_dataset.arrow_folder import write_dataset_dict, write_split
from fabric_train.token_dataset.document_index import row_checksum
from fabric_train.token_dataset.manifest import LAST_INCOMPLETE_ROW
from fabric_train.token_dataset.rows import Packing, RowPlan, best_fit_decreasing, plan_rows
from fabric_train.token_dataset.spooled_documents import SpooledDocuments, SpooledFile
from fabric_train.token_dataset.token_folder import open_splits

PACKINGS: tuple[Packing, ...] = ("concat", "best_fit", "none")
PAD = 999_999
DocumentToken = tuple[int, int]  # document, token in it


@dataclass(frozen=True)
class Task:
    """The arguments of ``plan_rows``."""

    lengths: list[int]
    order: list[int]
    packing: Packing
    max_length: int
    overlap: int

    def plan(self) -> RowPlan:
        lengths = np.array(self.lengths, dtype=np.int64)
        order = np.array(self.order, dtype=np.int64)
        return plan_rows(lengths, order, self.packing, self.max_length, self.overlap)


@st.composite
def tasks(draw: st.DrawFn, *packings: Packing) -> Task:
    lengths = draw(st.lists(st.integers(0, 40), max_size=20))
    documents = range(len(lengths))
    with_repetitions = st.lists(st.sampled_from(documents), max_size=30) if lengths else st.just([])
    order = draw(st.just(documents) | st.permutations(documents) | with_repetitions)
    packing = draw(st.sampled_from(packings or PACKINGS))
    max_length = draw(st.integers(1, 50))
    overlap = draw(st.just(0) | st.integers(0, max_length - 1))
    return Task(lengths, list(order), packing, max_length, overlap)


@dataclass(frozen=True)
class Piece:
    """The tokens of a piece of a plan: the repeated ones, and the new ones after them."""

    repeated: list[DocumentToken]
    new: list[DocumentToken]

    @property
    def tokens(self) -> list[DocumentToken]:
        return self.repeated + self.new


def documents_of(plan: RowPlan) -> np.ndarray:
    return plan.documents(slice(None))


def pieces_of(plan: RowPlan) -> list[Piece]:
    """Return the pieces of all rows."""
    pieces = []
    columns = (documents_of(plan), plan.starts, plan.lengths, plan.repeated)
    for document, start, length, num_repeated in zip(*(column.tolist() for column in columns), strict=True):
        tokens = [(document, start + position) for position in range(length)]
        pieces.append(Piece(repeated=tokens[:num_repeated], new=tokens[num_repeated:]))
    return pieces


def rows_of(plan: RowPlan) -> list[list[Piece]]:
    pieces = pieces_of(plan)
    return [pieces[first:end] for first, end in pairwise(plan.row_offsets.tolist())]


def all_tokens(task: Task) -> list[DocumentToken]:
    tokens = []
    for document in task.order:
        tokens += [(document, token) for token in range(task.lengths[document])]
    return tokens


def new_tokens(plan: RowPlan) -> list[DocumentToken]:
    return list(chain.from_iterable(piece.new for piece in pieces_of(plan)))


@settings(max_examples=60)
@given(task=tasks())
def test_every_token_is_new_in_one_row_or_counted_as_dropped(task: Task) -> None:
    plan = task.plan()
    expected = all_tokens(task)
    if task.packing == "concat":
        num_dropped = plan.tokens_dropped[LAST_INCOMPLETE_ROW]
        assert new_tokens(plan) == expected[: len(expected) - num_dropped]
        assert 0 <= num_dropped < task.max_length
    else:
        assert Counter(new_tokens(plan)) == Counter(expected)
        assert not plan.tokens_dropped


@settings(max_examples=60)
@given(task=tasks())
def test_counts_of_a_plan_balance(task: Task) -> None:
    plan = task.plan()
    assert plan.tokens_in == len(all_tokens(task))
    assert plan.tokens_in_rows == sum(len(piece.tokens) for piece in pieces_of(plan))
    assert plan.tokens_in + plan.tokens_repeated == plan.tokens_in_rows + sum(plan.tokens_dropped.values())
    assert plan.tokens_in_rows + plan.tokens_padding == plan.num_rows * task.max_length
    if task.packing == "concat":
        assert plan.tokens_padding == 0


@settings(max_examples=60)
@given(task=tasks())
def test_pieces_fit_into_their_row_and_each_has_a_new_token(task: Task) -> None:
    for row in rows_of(task.plan()):
        assert row
        assert sum(len(piece.tokens) for piece in row) <= task.max_length
        assert all(piece.new for piece in row)


@settings(max_examples=60)
@given(task=tasks("concat"))
def test_a_concat_row_repeats_the_end_of_the_row_before(task: Task) -> None:
    previous_row: list[Piece] = []
    for row in rows_of(task.plan()):
        document, first_token = row[0].new[0]
        tokens_before: list[DocumentToken] = []  # of the same document, in the row before
        if first_token > 0:
            tokens_before = previous_row[-1].tokens
        assert all(token[0] == document for token in tokens_before)
        num_repeated = min(task.overlap, len(tokens_before))
        assert row[0].repeated == tokens_before[len(tokens_before) - num_repeated :]
        assert not any(piece.repeated for piece in row[1:])
        previous_row = row


@settings(max_examples=60)
@given(task=tasks("best_fit", "none"))
def test_documents_that_fit_are_whole_and_longer_ones_are_windows(task: Task) -> None:
    plan = task.plan()
    expected_windows = []  # document, first token, tokens, repeated tokens
    for document in task.order:
        num_tokens = task.lengths[document]
        end = 0
        while end < num_tokens:
            num_repeated = task.overlap if end else 0
            start = end - num_repeated
            end = min(start + task.max_length, num_tokens)
            expected_windows.append((document, start, end - start, num_repeated))
    columns = (documents_of(plan), plan.starts, plan.lengths, plan.repeated)
    windows = zip(*(column.tolist() for column in columns), strict=True)
    assert Counter(windows) == Counter(expected_windows)


@given(task=tasks("none"))
def test_packing_none_gives_each_window_a_row_in_order(task: Task) -> None:
    plan = task.plan()
    assert plan.row_offsets.tolist() == list(range(plan.num_rows + 1))
    assert new_tokens(plan) == all_tokens(task)


def plain_best_fit(lengths: list[int], max_length: int) -> list[int]:
    """Return the tokens in each row, sorted; every row is tried for every piece."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, filled in enumerate(rows) if filled + length <= max_length]
        if fitting:
            rows[max(fitting, key=lambda row: rows[row])] += length
        else:
            rows.append(length)
    return sorted(rows)


def first_fit(lengths: list[int], max_length: int) -> int:
    """Return the number of rows if each piece goes into the first row with room for it."""
    room = np.empty(len(lengths), dtype=np.int64)  # in each row, of which there are num_rows so far
    num_rows = 0
    for length in lengths:
        rows_with_room = np.flatnonzero(room[:num_rows] >= length)
        if len(rows_with_room):
            row = rows_with_room[0]
        else:
            row = num_rows
            num_rows += 1
            room[row] = max_length
        room[row] -= length
    return num_rows


@settings(max_examples=100)
@given(data=st.data(), max_length=st.integers(1, 60))
def test_best_fit_equals_a_plain_implementation_in_any_order(data: st.DataObject, max_length: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, max_length), max_size=60))
    rows = best_fit_decreasing(np.array(lengths, dtype=np.int64), max_length)  # the row of each piece
    tokens_of_rows = np.bincount(rows, weights=lengths).astype(int)
    assert sorted(tokens_of_rows.tolist()) == plain_best_fit(lengths, max_length)
    # rows are numbered in the order of their first pieces
    rows_in_order = list(dict.fromkeys(rows.tolist()))
    assert rows_in_order == list(range(len(tokens_of_rows)))


def test_best_fit_takes_no_memory_for_the_length_of_a_row() -> None:
    assert best_fit_decreasing(np.array([5, 3, 4]), 2**31 - 1).tolist() == [0, 0, 0]


def test_best_fit_rows_are_in_the_order_of_their_first_documents() -> None:
    plan = Task(lengths=[2, 5, 4, 3], order=[0, 1, 2, 3], packing="best_fit", max_length=6, overlap=0).plan()
    assert [[piece.new[0][0] for piece in row] for row in rows_of(plan)] == [[0, 2], [1], [3]]


@settings(deadline=None)
@given(tasks("best_fit"), st.integers(1, 4))
def test_best_fit_packs_each_source_on_its_own(task: Task, num_sources: int) -> None:
    order = np.array(sorted(task.order), dtype=np.int64)
    lengths = np.array(task.lengths, dtype=np.int64)
    sources = np.arange(len(lengths)) * num_sources // max(len(lengths), 1)  # about as many documents in each
    plan = plan_rows(lengths, order, "best_fit", task.max_length, task.overlap, sources)

    rows_of_sources: list[list[Piece]] = []
    num_tokens = 0
    for source in range(num_sources):
        documents = order[sources[order] == source]
        source_plan = plan_rows(lengths, documents, "best_fit", task.max_length, task.overlap)
        rows_of_sources += rows_of(source_plan)
        num_tokens += source_plan.tokens_in
    assert rows_of(plan) == rows_of_sources
    assert plan.tokens_in == num_tokens


@pytest.mark.parametrize(
    "packing, rows",
    [
        ("concat", ["abcde", "efghi", "ijklm"]),
        ("best_fit", ["abcd", "efghi", "ijklm"]),
        ("none", ["abcd", "efghi", "ij", "klm"]),
    ],
)
def test_worked_example_of_plan_rows(packing: Packing, rows: list[str]) -> None:
    texts = ["abcd", "efghij", "klm"]
    plan = Task([len(text) for text in texts], [0, 1, 2], packing, max_length=5, overlap=1).plan()
    planned_rows = []
    for row in rows_of(plan):
        tokens = chain.from_iterable(piece.tokens for piece in row)
        planned_rows.append("".join(texts[document][token] for document, token in tokens))
    assert planned_rows == rows


def test_worked_example_of_row_plan() -> None:
    plan = Task([4, 6, 3], [0, 1, 2], "concat", max_length=5, overlap=1).plan()
    assert plan.row_offsets.tolist() == [0, 2, 3, 5]
    assert documents_of(plan).tolist() == [0, 1, 1, 1, 2]
    assert plan.starts.tolist() == [0, 0, 0, 4, 0]
    assert plan.lengths.tolist() == [4, 1, 5, 2, 3]
    assert plan.repeated.tolist() == [0, 0, 1, 1, 0]


@pytest.fixture(scope="module")
def chat_lengths(chats_jsonl: Path, smollm2_dir: Path) -> np.ndarray:
    """Tokens in each of 500 chats in SmolLM2's template without its system message, int64 [500]."""
    texts = []
    for line in chats_jsonl.read_text(encoding="utf-8").splitlines()[:500]:
        messages = json.loads(line)["messages"]
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        texts.append("".join(turns))
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return np.array([len(encoding) for encoding in tokenizer.encode_batch_fast(texts)], dtype=np.int64)


@pytest.mark.parametrize("max_length", [512, 1024, 2048])
def test_best_fit_fills_rows_of_real_chats_to_97_percent(chat_lengths: np.ndarray, max_length: int) -> None:
    """Check also that first fit needs as many rows or more."""
    plan = plan_rows(chat_lengths, np.arange(len(chat_lengths)), "best_fit", max_length, 0)
    assert plan.tokens_in_rows / (plan.num_rows * max_length) >= 0.97
    window_lengths = []
    for length in chat_lengths.tolist():
        window_lengths += [min(max_length, length - start) for start in range(0, length, max_length)]
    assert plan.num_rows <= first_fit(window_lengths, max_length)


def spool(folder: Path, lengths: list[int], files: list[tuple[int, bool]]) -> SpooledDocuments:
    """Write documents of distinct tokens into files of (number of documents, whether every third token is masked).

    One more file holds the remaining documents.
    """
    starts = list(accumulate(lengths, initial=0))  # of each document among all tokens, and the end
    spooled = []
    first = 0
    for index, (num_documents, is_masked) in enumerate([*files, (len(lengths), False)]):
        end = min(first + num_documents, len(lengths))
        tokens = np.arange(starts[first], starts[end], dtype=np.int32)
        token_file = folder / f"{index}.tokens"
        tokens.tofile(token_file)
        mask_file = None
        if is_masked:
            mask_file = folder / f"{index}.supervised"
            (tokens % 3 > 0).astype(np.uint8).tofile(mask_file)
        spooled.append(SpooledFile(token_file, mask_file))
        first = end
    return SpooledDocuments(np.array(lengths, dtype=np.int64), tuple(spooled))


def expected_rows(task: Task, masked_documents: set[int], *, with_labels: bool) -> list[dict[str, list[int]]]:
    """Return the rows as ``datasets`` loads them, built token by token."""
    first_ids = list(accumulate(task.lengths, initial=0))  # of each document, see ``spool``
    rows = []
    for pieces in rows_of(task.plan()):
        input_ids: list[int] = []
        labels: list[int] = []
        starts = []
        for piece in pieces:
            _, first_token = piece.new[0]
            if input_ids or first_token == 0:  # at the beginning of a row, a document may be continued
                starts.append(len(input_ids))
            for document, token in piece.tokens:
                token_id = first_ids[document] + token
                is_masked = document in masked_documents and token_id % 3 == 0
                is_target = (document, token) in piece.new and not is_masked
                input_ids.append(token_id)
                labels.append(token_id if is_target else -100)
        num_padding = task.max_length - len(input_ids)
        row = {"input_ids": input_ids + [PAD] * num_padding, "document_starts": starts}
        if with_labels:
            row["labels"] = labels + [-100] * num_padding
        rows.append(row)
    return rows


@settings(max_examples=30, deadline=None)
@given(task=tasks(), files=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=4))
def test_datasets_loads_exactly_the_planned_rows(
    tmp_path_factory: pytest.TempPathFactory, task: Task, files: list[tuple[int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    documents = spool(folder, task.lengths, files)
    plan = task.plan()
    num_supervised, _ = write_split(folder / "train", documents, plan, PAD)
    write_dataset_dict(folder, ["train"])
    loaded = datasets.load_from_disk(folder)
    assert isinstance(loaded, datasets.DatasetDict)

    # the documents of the masked files
    masked_documents: set[int] = set()
    first = 0
    for num_documents, is_masked in files:
        end = first + num_documents
        if is_masked:
            masked_documents |= set(range(first, end))
        first = end
    with_labels = documents.has_masks or plan.tokens_repeated > 0 or plan.tokens_padding > 0
    rows = loaded["train"].to_list()
    assert rows == expected_rows(task, masked_documents, with_labels=with_labels)

    # a token is a target at most once for each occurrence of its document
    labels = chain.from_iterable(row.get("labels", row["input_ids"]) for row in rows)
    targets = [label for label in labels if label != -100]
    assert num_supervised == len(targets)
    document_ends = np.cumsum(task.lengths)
    for token_id, num_targets in Counter(targets).items():
        document = int(np.searchsorted(document_ends, token_id, side="right"))
        assert num_targets <= task.order.count(document)


def test_more_files_are_read_than_may_be_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fabric_train.token_dataset.spooled_documents._MAX_OPEN_FILES", 1)
    documents = spool(tmp_path, [4] * 6, [(2, False), (2, False)])
    order = np.array([5, 0, 3, 1, 4, 2])
    write_split(tmp_path / "train", documents, plan_rows(documents.lengths, order, "concat", 4, 0), PAD)
    assert [row[0] // 4 for row in datasets.load_from_disk(tmp_path / "train")["input_ids"][:]] == order.tolist()


def test_worked_example_of_write_split(tmp_path: Path) -> None:
    # B and E are 1 and 2, the letters from 10 on
    tokens = np.array([1, 10, 11, 2, 1, 12, 13, 14, 15, 16, 2], dtype=np.int32)
    tokens.tofile(tmp_path / "tokens")
    np.array([0, 0] + [1] * 9, dtype=np.uint8).tofile(tmp_path / "supervised")
    file = SpooledFile(tmp_path / "tokens", tmp_path / "supervised")
    documents = SpooledDocuments(np.array([4, 7]), (file,))
    plan = plan_rows(documents.lengths, np.arange(2), "best_fit", 5, 1)
    assert write_split(tmp_path / "train", documents, plan, pad_token_id=0)[0] == 9
    assert datasets.load_from_disk(tmp_path / "train").to_list() == [
        {"input_ids": [1, 10, 11, 2, 0], "labels": [-100, -100, 11, 2, -100], "document_starts": [0]},
        {"input_ids": [1, 12, 13, 14, 15], "labels": [1, 12, 13, 14, 15], "document_starts": [0]},
        {"input_ids": [15, 16, 2, 0, 0], "labels": [-100, 16, 2, -100, -100], "document_starts": []},
    ]


def test_a_window_after_another_document_is_a_document_start(tmp_path: Path) -> None:
    documents = spool(tmp_path, [2, 7], [])
    write_split(tmp_path / "train", documents, plan_rows(documents.lengths, np.arange(2), "best_fit", 5, 0), PAD)
    rows = datasets.load_from_disk(tmp_path / "train").to_list()
    assert [row["input_ids"] for row in rows] == [[0, 1, 7, 8, PAD], [2, 3, 4, 5, 6]]
    assert [row["document_starts"] for row in rows] == [[0, 2], [0]]


@pytest.mark.parametrize("overlap", [0, 2])
def test_files_equal_those_that_datasets_writes(tmp_path: Path, overlap: int) -> None:
    documents = spool(tmp_path, [20], [])
    write_split(tmp_path / "ours", documents, plan_rows(documents.lengths, np.arange(1), "concat", 8, overlap), PAD)
    row = datasets.List(datasets.Value("int32"), length=8)
    columns = {"input_ids": row, "document_starts": datasets.List(datasets.Value("int32"))}
    features = datasets.Features({**columns, "labels": row} if overlap else columns)
    ours = datasets.load_from_disk(tmp_path / "ours")
    assert ours.features == features
    assert ours.data.schema.equals(features.arrow_schema, check_metadata=True)
    datasets.Dataset.from_list(ours.to_list(), features=features).save_to_disk(tmp_path / "theirs")
    assert read_json(tmp_path / "ours" / "dataset_info.json") == read_json(tmp_path / "theirs" / "dataset_info.json")
    states = []
    for name in ("ours", "theirs"):
        state = read_json(tmp_path / name / "state.json")
        del state["_fingerprint"]
        del state["_split"]
        states.append(state)
    assert states[0] == states[1]


def read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def row_checksums_of(split: Path) -> list[int]:
    rows = datasets.load_from_disk(split).to_list()
    return [row_checksum(np.int32(row["input_ids"]), None, np.int32(row["document_starts"])) for row in rows]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_rows_continue_in_the_next_file_when_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_proc: int
) -> None:
    monkeypatch.setattr("fabric_train.token_dataset.arrow_folder._TOKENS_PER_BATCH", 8)
    monkeypatch.setattr("fabric_train.token_dataset.arrow_folder._BYTES_PER_FILE", 64)
    documents = spool(tmp_path, [44], [])
    plan = plan_rows(documents.lengths, np.arange(1), "concat", 4, 0)
    num_supervised, checksums = write_split(tmp_path / "train", documents, plan, PAD, num_proc)
    assert (num_supervised, checksums.tolist()) == (44, row_checksums_of(tmp_path / "train"))
    names = [f"data-0000{index}-of-00003.arrow" for index in range(3)]
    assert sorted(path.name for path in tmp_path.glob("train/*.arrow")) == names
    assert np.concatenate(datasets.load_from_disk(tmp_path / "train")["input_ids"][:]).tolist() == list(range(44))


def test_fingerprint_depends_on_the_content(tmp_path: Path) -> None:
    fingerprints = []
    for name, lengths in (("a", [9, 9]), ("b", [9, 9]), ("c", [10, 8])):
        folder = tmp_path / name
        folder.mkdir()
        documents = spool(folder, lengths, [])
        write_split(folder / "train", documents, plan_rows(documents.lengths, np.arange(2), "concat", 6, 0), PAD)
        fingerprints.append(json.loads((folder / "train" / "state.json").read_text())["_fingerprint"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_split_without_documents_loads_with_no_rows(tmp_path: Path, packing: Packing) -> None:
    documents = spool(tmp_path, [], [])
    plan = plan_rows(documents.lengths, np.arange(0), packing, 8, 2)
    assert write_split(tmp_path / "train", documents, plan, PAD)[0] == 0
    assert datasets.load_from_disk(tmp_path / "train").num_rows == 0


def test_a_row_with_other_labels_than_tokens_is_named(tmp_path: Path) -> None:
    rows = {"input_ids": [[1, 2], [3, 4], [5, 6]], "labels": [[1, 2], [3, 4, 4], [5, 6]]}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(str(tmp_path / "tokens"))
    with pytest.raises(InputError, match=r": row 1 has more or fewer labels than input_ids; tokenize again$"):
        list(open_splits(tmp_path / "tokens")["train"].batches())
