"""Every row once an epoch, the same rows in a window however many ranks there are, and the same ones after a resume."""

import dataclasses
import itertools
import math
import multiprocessing
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.cli.errors import InputError, RunError
from fabric_train.data.batch import IGNORED_LABEL, Batch, Pieces, count_supervised, find_targets, isolate, pad_rows
from fabric_train.data.step_sampler import TrainBatches, Window, WindowOrder, validation_batches, validation_rows
from fabric_train.data.token_dataset import Rows, open_dataset
from tests.support.forked_runs import ForkedRuns
from tests.support.token_datasets import alter_token

Labels = list[list[int]] | None


def rows_of(rows: list[list[int]], labels: Labels = None) -> Rows:
    columns = {"input_ids": rows}
    if labels:
        columns["labels"] = labels
    return Rows(datasets.Dataset.from_dict(columns))


def numbered(num_rows: int, length: int = 3) -> Rows:
    """Rows that hold nothing but their own number."""
    return rows_of([[row] * length for row in range(num_rows)])


def row_numbers(batch: Batch) -> list[int]:
    """The numbers of a batch's rows; a row without supervised tokens is no row."""
    supervised = (batch.labels != IGNORED_LABEL).all(dim=1)
    return batch.input_ids[supervised, 0].tolist()


def train_windows(
    rows: Rows,
    steps: tuple[int, int],
    *,
    rows_per_window: int = 4,
    micro_batch_size: int = 1,
    world_size: int = 1,
    rank: int = 0,
    seed: int = 0,
    num_workers: int = 0,
) -> list[Window]:
    order = WindowOrder(len(rows), rows_per_window, micro_batch_size, world_size, rank, seed)
    return list(TrainBatches(rows, order, num_workers, pin_memory=False).windows(*steps))


@st.composite
def cuts(draw: st.DrawFn) -> dict[str, Any]:
    """Rows, and the ways a window of them may be cut."""
    micro_batch_size = draw(st.integers(1, 4))
    world_size = draw(st.integers(1, 5))
    accumulation = draw(st.integers(1, 4))
    return {
        "num_rows": draw(st.integers(1, 60)),
        "rows_per_window": micro_batch_size * world_size * accumulation,
        "micro_batch_size": micro_batch_size,
        "world_size": world_size,
        "seed": draw(st.integers(0, 2**32)),
    }


def windows_of_rank(cut: dict[str, Any], rank: int, epoch: int) -> list[list[list[int]]]:
    """The micro-batches of every window of an epoch on a rank."""
    order = WindowOrder(**cut, rank=rank)
    per_epoch = -(-cut["num_rows"] // cut["rows_per_window"])
    steps = range(epoch * per_epoch + 1, (epoch + 1) * per_epoch + 1)
    assert {order.epoch_of(step) for step in steps} == {epoch}
    batches = order.batches(epoch * per_epoch, (epoch + 1) * per_epoch)
    windows = [[next(batches) for _ in range(order.num_batches(len(order.rows_of(step))))] for step in steps]
    assert next(batches, None) is None
    return windows


@settings(deadline=None)
@given(cuts(), st.integers(0, 3))
def test_every_row_is_seen_once_an_epoch_over_all_ranks(cut: dict[str, Any], epoch: int) -> None:
    seen: list[int] = []
    for rank in range(cut["world_size"]):
        for window in windows_of_rank(cut, rank, epoch):
            seen += itertools.chain.from_iterable(window)
    assert sorted(seen) == list(range(cut["num_rows"]))


@settings(deadline=None)
@given(cuts(), cuts(), st.integers(0, 3))
def test_a_window_holds_the_same_rows_however_it_is_cut(
    first_cut: dict[str, Any], second_cut: dict[str, Any], epoch: int
) -> None:
    # two cuts of the same window: only micro-batches and ranks differ
    second_cut |= {name: first_cut[name] for name in ("num_rows", "rows_per_window", "seed")}
    assert rows_of_windows(first_cut, epoch) == rows_of_windows(second_cut, epoch)


def rows_of_windows(cut: dict[str, Any], epoch: int) -> list[list[int]]:
    """The sorted rows of every window of an epoch over all ranks."""
    ranks = [windows_of_rank(cut, rank, epoch) for rank in range(cut["world_size"])]
    windows: list[list[int]] = []
    for micro_batches_of_ranks in zip(*ranks, strict=True):
        micro_batches = itertools.chain.from_iterable(micro_batches_of_ranks)
        windows.append(sorted(itertools.chain.from_iterable(micro_batches)))
    return windows


@settings(deadline=None)
@given(cuts())
def test_every_rank_has_as_many_micro_batches_and_none_is_too_large(cut: dict[str, Any]) -> None:
    ranks = [windows_of_rank(cut, rank, 0) for rank in range(cut["world_size"])]
    assert len({tuple(len(window) for window in windows) for windows in ranks}) == 1
    sizes = [len(batch) for windows in ranks for window in windows for batch in window]
    assert max(sizes) <= cut["micro_batch_size"]


@settings(deadline=None)
@given(cuts())
def test_the_last_window_holds_what_is_left(cut: dict[str, Any]) -> None:
    order = WindowOrder(**cut, rank=0)
    per_epoch = -(-cut["num_rows"] // cut["rows_per_window"])
    sizes = [len(order.rows_of(step)) for step in range(1, per_epoch + 1)]
    assert sizes[:-1] == [cut["rows_per_window"]] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= cut["rows_per_window"]
    assert sum(sizes) == cut["num_rows"]


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    order = WindowOrder(1000, 8, 1, 1, 0, seed=7)
    same = WindowOrder(1000, 20, 2, 5, 3, seed=7)
    np.testing.assert_array_equal(order.epoch_order(1), same.epoch_order(1))
    orders = {tuple(WindowOrder(1000, 8, 1, 1, 0, seed).epoch_order(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(range(1000)) not in orders


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_at_any_step_yields_the_windows_that_were_left(num_workers: int) -> None:
    rows = numbered(11)
    cut: dict[str, Any] = {"rows_per_window": 4, "micro_batch_size": 2, "world_size": 2, "rank": 1, "seed": 3}
    uninterrupted = train_windows(rows, (0, 8), **cut)
    for step in range(9) if num_workers == 0 else (4,):
        resumed = train_windows(rows, (step, 8), num_workers=num_workers, **cut)
        assert len(resumed) == 8 - step
        for again, window in zip(resumed, uninterrupted[step:], strict=True):
            assert (again.step, again.epoch, again.ends_epoch) == (window.step, window.epoch, window.ends_epoch)
            assert again.num_rows == window.num_rows
            for batch, expected_batch in zip(again.batches, window.batches, strict=True):
                assert torch.equal(batch.input_ids, expected_batch.input_ids)
                assert torch.equal(batch.labels, expected_batch.labels)


def test_windows_carry_the_hash_of_all_rows_for_any_split_and_start() -> None:
    rows = numbered(10)  # windows of 4, 4 and 2
    by_hand = b""
    hashes = []
    for epoch in range(2):
        order = np.random.default_rng([7, epoch]).permutation(10)
        for window in (order[:4], order[4:8], order[8:]):
            by_hand = xxhash.xxh3_128_digest(by_hand + b"".join(int(row).to_bytes(8, "little") for row in window))
            hashes.append(by_hand.hex())
    assert [window.rows_hash for window in train_windows(rows, (0, 6), seed=7)] == hashes
    cut = train_windows(rows, (3, 6), seed=7, world_size=2, rank=1, micro_batch_size=2)
    assert [window.rows_hash for window in cut] == hashes[3:]
    assert WindowOrder(10, 4, 1, 1, 0, seed=7).rows_hash(5) == hashes[4]
    assert train_windows(rows, (0, 1), seed=8)[0].rows_hash != hashes[0]


def test_windows_count_steps_epochs_and_rows_of_all_ranks() -> None:
    rows = numbered(11, length=5)
    for world_size, rank in ((1, 0), (2, 1), (4, 3)):
        windows = train_windows(rows, (0, 7), rows_per_window=4, world_size=world_size, rank=rank)
        assert [window.step for window in windows] == [1, 2, 3, 4, 5, 6, 7]
        assert [window.epoch for window in windows] == [0, 0, 0, 1, 1, 1, 2]
        assert [window.ends_epoch for window in windows] == [False, False, True, False, False, True, False]
        assert [window.num_rows for window in windows] == [4, 4, 3, 4, 4, 3, 4]


def test_batch_has_the_lengths_of_its_rows() -> None:
    rows = rows_of([[row] * (row + 1) for row in range(10)])
    windows = train_windows(rows, (0, 3), rows_per_window=4, micro_batch_size=4)
    for window in windows:
        (batch,) = window.batches
        assert batch.lengths == tuple(number + 1 for number in batch.input_ids[:, 0].tolist())
        assert batch.input_ids.shape == (window.num_rows, max(batch.lengths))
    assert sum(sum(batch.lengths) for window in windows for batch in window.batches) == 55


def test_lengths_exclude_padding_and_separate_isolated_documents() -> None:
    split = datasets.Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 3, 4, 5, 6, 7, 9], [9] * 8, [1, 2, 3, 4, 5, 6, 9, 9]],
            "labels": [
                [-100, 2, 3, 4, 5, -100, -100, -100],
                [1, 2, 3, 4, 5, 6, 7, -100],  # one token without a label may be the document's
                [-100] * 8,
                [1, 2, 3, 4, 5, 6, 9, 9],  # supervised, and so no padding
            ],
            "document_starts": [[0, 2], [3], [], [0, 7]],
        }
    )
    apart = Rows(split)
    together = Rows(split, isolate_documents=False)
    expected = [((2, 3), (5,)), ((3, 5), (8,)), ((0,), (0,)), ((7, 1), (8,))]
    for row, (alone, joined) in enumerate(expected):
        assert apart.__getitems__([row]).lengths == alone
        assert together.__getitems__([row]).lengths == joined
    assert apart.__getitems__([0, 3]).lengths == (2, 3, 7, 1)
    assert apart.__getitems__([]).lengths == ()


def test_rank_without_rows_gets_a_batch_that_supervises_nothing() -> None:
    # the second window has one row, which is rank 0's
    last_batches: list[Batch] = []
    for rank in range(4):
        _, last_window = train_windows(numbered(5), (0, 2), world_size=4, rank=rank)
        last_batches += last_window.batches
    assert len(last_batches) == 4
    assert [len(row_numbers(batch)) for batch in last_batches] == [1, 0, 0, 0]
    assert [int(count_supervised(batch.labels)) for batch in last_batches] == [2, 0, 0, 0]
    assert [tuple(batch.input_ids.shape) for batch in last_batches[1:]] == [(1, 2)] * 3


def test_worker_processes_read_the_same_batches() -> None:
    rows = rows_of([[row] * (1 + row % 4) for row in range(23)])
    cut: dict[str, Any] = {"rows_per_window": 6, "micro_batch_size": 2, "seed": 1}
    alone = train_windows(rows, (0, 8), num_workers=0, **cut)
    helped = train_windows(rows, (0, 8), num_workers=2, **cut)
    for window, helped_window in zip(alone, helped, strict=True):
        for batch, helped_batch in zip(window.batches, helped_window.batches, strict=True):
            assert torch.equal(batch.input_ids, helped_batch.input_ids)
            assert torch.equal(batch.labels, helped_batch.labels)
            assert not helped_batch.input_ids.is_shared()  # a shared tensor would be a file
            assert not helped_batch.labels.is_shared()


def test_a_batch_comes_through_a_pipe_with_all_it_holds() -> None:
    ids = np.array([[1, 2, 3, 4]])
    pipe: Any = multiprocessing.SimpleQueue()
    batch: Any = isolate(ids, ids.copy(), [np.array([2])])
    pieces = Pieces(torch.tensor([1, 1]), torch.tensor([1, 0]), torch.tensor([2.5, torch.nan]).double())
    batch = dataclasses.replace(batch, targets=find_targets(batch.labels), lengths=(2, 2), pieces=pieces)
    pipe.put(batch)
    sent: Any = pipe.get()
    assert sent.lengths == (2, 2)
    assert sent.documents.longest == 2
    for tensor, sent_tensor in (
        (batch.input_ids, sent.input_ids),
        (batch.labels, sent.labels),
        (batch.documents.position_ids, sent.documents.position_ids),
        (batch.documents.borders, sent.documents.borders),
        (batch.targets.positions, sent.targets.positions),
        (batch.targets.ids, sent.targets.ids),
        *((getattr(pieces, field.name), getattr(sent.pieces, field.name)) for field in dataclasses.fields(pieces)),
    ):
        torch.testing.assert_close(sent_tensor, tensor, rtol=0, atol=0, equal_nan=True)  # also of the same dtype
        assert not sent_tensor.is_shared()


def test_short_rows_are_padded_at_the_end_without_supervision() -> None:
    batch = rows_of([[7, 8, 9], [5], []]).__getitems__([0, 1, 2])  # what a DataLoader calls
    assert batch.input_ids.tolist() == [[7, 8, 9], [5, 0, 0], [0, 0, 0]]
    assert batch.labels.tolist() == [[7, 8, 9], [5, IGNORED_LABEL, IGNORED_LABEL], [IGNORED_LABEL] * 3]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert rows_of([[]]).__getitems__([0]).input_ids.shape == (1, 1)
    assert rows_of([[]]).id_range() == (0, 0)


# ------------------------------------------------------------------------------------------------------- validation


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.none() | st.integers(1, 6), st.integers(0, 9))
def test_validation_takes_the_same_rows_once_over_any_number_of_ranks(
    num_rows: int, batch_size: int, world_size: int, limit: int | None, seed: int
) -> None:
    rows = numbered(num_rows)
    seen: list[int] = []
    nums_batches: set[int] = set()
    for rank in range(world_size):
        batches = list(validation_batches(rows, batch_size, world_size, rank, limit, seed, num_workers=0))
        nums_batches.add(len(batches))
        for batch in batches:
            assert len(row_numbers(batch)) <= batch_size
            seen += row_numbers(batch)
    assert len(nums_batches) == 1  # as many on each rank
    max_rows = None if limit is None else limit * batch_size
    assert sorted(seen) == validation_rows(np.zeros(num_rows, int), max_rows, seed).tolist()
    assert len(seen) == (num_rows if max_rows is None else min(num_rows, max_rows))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 200), st.integers(0, 9))
def test_limited_validation_takes_equally_many_rows_of_every_source(sizes: list[int], limit: int, seed: int) -> None:
    sources = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    chosen = validation_rows(sources, limit, seed)
    assert len(set(chosen.tolist())) == len(chosen) == min(limit, sum(sizes))
    nums_chosen = np.bincount(sources[chosen], minlength=len(sizes))
    most = max(nums_chosen)
    for num_chosen, size in zip(nums_chosen, sizes, strict=True):
        assert num_chosen in (size, most, most - 1)
    assert np.array_equal(validation_rows(sources, limit, seed), chosen)

    # the rows are from everywhere in the source: one of each interval, so two are less than two intervals apart
    rows_of_first = np.flatnonzero(sources == 0)
    chosen_of_first = chosen[sources[chosen] == 0]
    distances = np.diff(np.searchsorted(rows_of_first, chosen_of_first))
    interval = math.ceil(len(rows_of_first) / max(nums_chosen[0], 1))
    assert np.all(distances <= 2 * interval)


def test_limited_validation_of_one_source_takes_the_rows_of_version_2() -> None:
    assert validation_rows(np.zeros(100, int), 5, 0).tolist() == [17, 32, 50, 65, 86]


def test_the_seed_chooses_the_rows_of_a_limited_validation() -> None:
    assert len({tuple(validation_rows(np.zeros(1000, int), 10, seed).tolist()) for seed in range(20)}) == 20


# --------------------------------------------------------------------------------------------------- folders on disk


def save(folder: Path, **splits: datasets.Dataset) -> str:
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    return str(folder)


def test_a_token_dataset_is_read_as_it_was_written(tiny_tokens_dir: Path) -> None:
    dataset = open_dataset(str(tiny_tokens_dir))
    assert dataset.validation is not None
    raw = datasets.load_from_disk(str(tiny_tokens_dir))
    for rows, split in ((dataset.train, raw["train"]), (dataset.validation, raw["validation"])):
        assert len(rows) == split.num_rows
        assert rows.longest() == 64
        assert rows.id_range() == (min(map(min, split["input_ids"])), max(map(max, split["input_ids"])))
        batch = rows.__getitems__([2, 0])
        assert batch.input_ids.tolist() == [split[2]["input_ids"], split[0]["input_ids"]]
        assert torch.equal(batch.labels, batch.input_ids)
    assert {path.name for path in dataset.attachments} == {"manifest.json", "tokenizer"}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_row_that_has_changed_ends_training_and_evaluation(
    tmp_path: Path, tiny_tokens_dir: Path, split: str, num_workers: int
) -> None:
    folder = Path(shutil.copytree(tiny_tokens_dir, tmp_path / "tokens"))
    alter_token(folder, split, 3)
    dataset = open_dataset(str(folder))
    assert dataset.validation is not None
    evaluation = validation_batches(dataset.validation, 4, 1, 0, None, 0, num_workers)
    read: dict[str, Callable[[], object]] = {
        "train": lambda: train_windows(dataset.train, (0, 69), rows_per_window=8, num_workers=num_workers),
        "validation": lambda: list(evaluation),
    }
    with pytest.raises(RunError) as ended:
        read[split]()
    traceback.clear_frames(ended.tb)  # ends the worker: torch waits 10 s for workers of a collected iterator
    (file,) = (folder / split).glob("*.arrow")
    advice = "replace it with an intact copy, or tokenize again"
    assert str(ended.value) == f"{file}: row 3 has changed since it was written; {advice}"


def test_damage_that_would_abort_the_process_is_a_row_that_has_changed(tmp_path: Path, tiny_tokens_dir: Path) -> None:
    folder = Path(shutil.copytree(tiny_tokens_dir, tmp_path / "tokens"))
    (file,) = (folder / "train").glob("*.arrow")
    starts = open_dataset(str(folder)).train.split.data.column("document_starts").chunks[0]
    offsets = bytes(starts.buffers()[1])
    content = bytearray(file.read_bytes())
    place = content.rindex(offsets[: 4 * len(starts)])
    content[place + 4 * 7 + 2] ^= 1  # the list of row 7 begins 65,536 values later
    file.write_bytes(content)
    rows = open_dataset(str(folder)).train
    assert len(rows.read([5, 9])) == 2
    with pytest.raises(RunError, match=r"arrow: row [67] has changed since it was written"):
        rows.read([5, 6, 7, 9])
    content[place + 4 * len(starts) + 2] ^= 1  # and the last list ends there
    file.write_bytes(content)
    assert refusal(str(folder)).startswith("train has a damaged column document_starts")


def test_older_folder_with_a_valid_split_and_labels_works(tmp_path: Path) -> None:
    train = datasets.Dataset.from_dict(
        {
            "input_ids": [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
            "attention_mask": [[1, 1, 1], [1, 1], [1, 1, 1, 1]],
            "labels": [[-100, 2, 3], [4, -100], [-100, -100, 8, 9]],
        }
    )
    valid = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "labels": [[1, 2]]})
    dataset = open_dataset(save(tmp_path / "old", train=train, valid=valid))
    assert dataset.validation is not None
    assert (len(dataset.train), len(dataset.validation)) == (3, 1)
    assert (dataset.train.longest(), dataset.train.id_range()) == (4, (1, 9))
    batch = dataset.train.__getitems__([2, 1])
    assert batch.input_ids.tolist() == [[6, 7, 8, 9], [4, 5, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 8, 9], [4, -100, -100, -100]]
    assert dataset.attachments == ()
    (window,) = train_windows(dataset.train, (0, 1), rows_per_window=3, micro_batch_size=3)
    assert (window.num_rows, sorted(window.batches[0].lengths)) == (3, [2, 3, 4])


def test_fingerprint_tells_datasets_apart(tmp_path: Path) -> None:
    first = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    second = datasets.Dataset.from_dict({"input_ids": [[1, 3]]})
    folders = [save(tmp_path / "a", train=first), save(tmp_path / "b", train=second)]
    first_fingerprint, second_fingerprint = (open_dataset(folder).fingerprint for folder in folders)
    assert first_fingerprint != second_fingerprint
    assert open_dataset(folders[0]).fingerprint == first_fingerprint
    opened = [open_dataset(folder) for folder in folders]
    for dataset in opened:  # with a manifest, its content decides
        (dataset.folder / "manifest.json").write_text("{}")
    assert opened[0].fingerprint == opened[1].fingerprint != first_fingerprint


def test_a_folder_without_validation_split_has_no_validation(tmp_path: Path) -> None:
    train = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    assert open_dataset(save(tmp_path / "tokens", train=train)).validation is None


def refusal(folder: Path | str) -> str:
    with pytest.raises(InputError) as error:
        open_dataset(str(folder))
    (fault,) = error.value.faults
    assert "\n" not in fault
    assert fault.startswith(f"--train_data_dir {folder}: ")
    return fault.removeprefix(f"--train_data_dir {folder}: ")


def test_a_folder_that_is_no_token_dataset_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "missing").startswith("no such folder; write a token dataset with fabric-train tokenize")
    assert refusal(tmp_path).startswith("the folder has no dataset_dict.json; write a token dataset with")
    good = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    assert refusal(save(tmp_path / "a", test=good)) == "no train split, only test; write one with fabric-train tokenize"
    text = datasets.Dataset.from_dict({"text": ["a"]})
    assert refusal(save(tmp_path / "b", train=text)).startswith("train has no column input_ids, only text; ")
    assert refusal(save(tmp_path / "c", train=good, valid=text)).startswith("validation has no column input_ids")
    empty = datasets.Dataset.from_dict({"input_ids": []}, features=good.features)
    for number, splits in enumerate(({"train": empty}, {"train": good, "validation": empty})):
        assert "split has no rows" in refusal(save(tmp_path / f"empty{number}", **splits))


def test_columns_that_hold_no_tokens_are_refused(tmp_path: Path) -> None:
    for name, ids in (("text", ["1 2"]), ("numbers", [1]), ("floats", [[0.5]]), ("words", [["a"]])):
        wrong = datasets.Dataset.from_dict({"input_ids": ids})
        assert refusal(save(tmp_path / name, train=wrong)).startswith("train has a column input_ids of ")
    labelled = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3, 4]]})
    assert refusal(save(tmp_path / "labels", train=labelled)) == (
        "train has rows with a different number of labels than input_ids, first in row 1; tokenize again with "
        "fabric-train tokenize"
    )


def test_a_damaged_dataset_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokens", train=datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 100}))
    arrow = next(Path(folder).rglob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert refusal(folder).startswith("damaged, ")
    arrow.unlink()
    assert refusal(folder).startswith("damaged, ")


FULL_DEV_SHM = """
import ctypes, subprocess, sys
from fabric_train.data.step_sampler import WorkerLoader

CLONE_NEWNS = 0x20000
commands = ["mount --make-rprivate /", "mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs /dev/shm"]
if ctypes.CDLL(None).unshare(CLONE_NEWNS) or any(subprocess.call(command.split()) for command in commands):
    sys.exit(77)
iter(WorkerLoader(range(4), num_workers=1))
"""


def test_a_full_dev_shm_is_named(forked_runs: ForkedRuns) -> None:
    done = forked_runs.start([], 1, before=FULL_DEV_SHM)
    (code,) = done.wait()
    if code == 77:
        pytest.skip("mounting is not permitted here")
    assert code == 1
    assert done.stderr().startswith(
        "error: /dev/shm is full, but data workers need it for their semaphores; make it larger"
    )


def test_rows_that_predict_all_tokens_have_every_token_but_the_first_of_a_document_as_target() -> None:
    ids = [np.array([5, 6, 7, 8, 9, 2, 2, 2]), np.array([10, 11, 12, 13, 14, 15, 16, 17])]
    labels = [np.array([-100, 6, 7, -100, 9, -100, -100, -100]), ids[1]]
    starts = [np.array([0, 3]), np.array([0])]

    batch = pad_rows(ids, labels, starts, predicts_all=True)

    assert batch.targets is not None
    assert batch.targets.ids.tolist() == [6, 7, 9, 11, 12, 13, 14, 15, 16, 17]  # neither 5, 8 and 10 nor the padding
    assert batch.targets.positions.tolist() == [0, 1, 3, 8, 9, 10, 11, 12, 13, 14]
    assert batch.is_supervised is not None
    assert batch.is_supervised.tolist() == [True] * 10
    labels[0][2] = -100
    unsupervised = pad_rows(ids, labels, starts, predicts_all=True).is_supervised
    assert unsupervised is not None
    assert unsupervised.tolist() == [True, False] + [True] * 8
    usual = pad_rows(ids, labels, starts)
    assert usual.is_supervised is None
    assert count_supervised(usual.labels) == 9
    assert count_supervised(batch.labels) == 10
