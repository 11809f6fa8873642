"""Streamed texts: tokenization's ids, each document once a pass whoever shares it, the same rows after a resume."""

import csv
import itertools
import json
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_train.arguments import DataArguments, TrainArguments, parse
from fabric_train.cli.errors import InputError
from fabric_train.data.batch import Batch, hash_numbers
from fabric_train.data.step_sampler import Window
from fabric_train.data.stream_batches import LaneCursor, LaneOrder, Lanes, StreamBatches, TextPosition, deal
from fabric_train.data.stream_documents import Document, StreamedDocuments, StreamedSource
from fabric_train.data.streaming import DocumentEncoder, Stream, open_stream
from fabric_train.data.token_dataset import Rows
from fabric_train.preflight.prepare import prepare
from fabric_train.reading.documents import EncodedDocument
from fabric_train.reading.hf_datasets import DatasetName, StreamSource
from fabric_train.tokenization.tokenizers.text_encoder import FastEncoder, GigatokenEncoder
from tests.programs.test_training import SETTINGS, timeless
from tests.support.forked_runs import ForkedRun, ForkedRuns
from tests.support.programs import option_words
from tests.support.run_comparison import differences
from tests.support.token_datasets import tokenize


def letters(text: str) -> np.ndarray:
    """A letter is a token, 0 ends the document."""
    return np.array([*map(ord, text), 0], np.int32)


def encode(document: Document) -> EncodedDocument:
    """An encoder for tests."""
    assert isinstance(document.content, str)
    return EncodedDocument(letters(document.content), None, len(document.content), document.num_bytes)


def endless(texts: Sequence[str]) -> Callable[[int], list[Document]]:
    """The same documents in every pass."""
    return lambda epoch: [Document(0, "text", text, len(text.encode()), lambda: "here") for text in texts]


def batches_of(
    texts: Sequence[str],
    order: LaneOrder,
    cursors: Sequence[LaneCursor] | None = None,
    num_workers: int = 0,
    max_length: int = 5,
) -> StreamBatches:
    return StreamBatches(endless(texts), encode, 1, max_length, True, order, cursors, num_workers, pin_memory=False)


def all_ranks(
    texts: Sequence[str],
    num_windows: int,
    rows_per_window: int,
    micro_batch_size: int,
    world_size: int,
    cursors: Sequence[LaneCursor] | None = None,
    num_workers: int = 0,
) -> tuple[list[np.ndarray], list[list[LaneCursor]]]:
    """Every window's rows over all ranks, [rows_per_window, max_length], and the cursors of all lanes after it."""
    ranks: list[list[Window]] = []
    for rank in range(world_size):
        order = LaneOrder(rows_per_window, micro_batch_size, world_size, rank)
        ranks.append(list(batches_of(texts, order, cursors, num_workers).windows(0, num_windows)))
    rows = []
    after = []
    for windows in zip(*ranks, strict=True):
        stacked = np.concatenate([batch.input_ids.numpy() for window in windows for batch in window.batches])
        numbered = np.concatenate([window.cursors for window in windows if window.cursors is not None])
        assert sorted(numbered[:, 0]) == list(range(rows_per_window))
        in_order = np.argsort(numbered[:, 0])
        rows.append(stacked[in_order])
        after.append([LaneCursor.from_numbers(numbers) for numbers in numbered[in_order, 1:]])
    return rows, after


def end_workers(error: pytest.ExceptionInfo[BaseException]) -> None:
    """Let go of the iterator that raised, so that its workers end: torch waits 10 s for workers of a collected one."""
    traceback.clear_frames(error.tb)


def assert_same(batch: Batch, expected: Batch) -> None:
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.labels, expected.labels)
    if expected.documents is None:
        assert batch.documents is None
        return
    assert batch.documents is not None
    assert torch.equal(batch.documents.position_ids, expected.documents.position_ids)


def lanes_by_hand(texts: Sequence[str], num_lanes: int) -> list[list[str]]:
    """The documents of each lane: always to the one that has the fewest bytes."""
    lanes: list[list[str]] = [[] for _ in range(num_lanes)]
    for text in texts:
        sizes = [len("".join(lane).encode()) for lane in lanes]
        lanes[sizes.index(min(sizes))].append(text)
    return lanes


some_texts = st.lists(st.text("abcdé", min_size=1, max_size=12), min_size=8, max_size=20)
cuts = st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 2), (8, 1), (1, 8)])  # of windows of 8 rows


@settings(deadline=None, max_examples=20)
@given(some_texts, cuts)
def test_each_document_is_in_one_lane_once_a_pass_in_order(texts: list[str], cut: tuple[int, int]) -> None:
    rows, after = all_ranks(texts, 12, 8, *cut)
    lanes = lanes_by_hand(texts, 8)
    assert sorted(itertools.chain(*lanes)) == sorted(texts)
    for lane in range(8):
        taken = np.concatenate([window[lane] for window in rows])
        one_pass = np.concatenate([letters(text) for text in lanes[lane]])
        endless = np.tile(one_pass, len(taken) // len(one_pass) + 1)
        np.testing.assert_array_equal(taken, endless[: len(taken)])
        assert after[-1][lane].next_row.epoch in (len(taken) // len(one_pass), (len(taken) - 1) // len(one_pass))


@settings(deadline=None, max_examples=20)
@given(some_texts, cuts, cuts, st.integers(0, 7))
def test_other_ranks_resume_with_the_same_windows_at_any_step(
    texts: list[str], cut: tuple[int, int], resumed_cut: tuple[int, int], step: int
) -> None:
    rows, after = all_ranks(texts, 8, 8, *cut)
    cursors = after[step - 1] if step else None
    resumed, resumed_after = all_ranks(texts, 8 - step, 8, *resumed_cut, cursors=cursors)
    for window, same in zip(rows[step:], resumed, strict=True):
        np.testing.assert_array_equal(window, same)
    assert after[step:] == resumed_after


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("num_workers", [1, 2, 4])  # 4 do not divide a window: 3 are taken
def test_workers_make_the_batches_that_the_loop_alone_would_make(num_workers: int) -> None:
    texts = [chr(97 + number % 26) * (1 + number * 7 % 11) for number in range(40)]
    for rank in range(2):
        order = LaneOrder(rows_per_window=12, micro_batch_size=1, world_size=2, rank=rank)  # 6 micro-batches a window
        alone = list(batches_of(texts, order).windows(3, 8))
        helped = list(batches_of(texts, order, num_workers=num_workers).windows(3, 8))
        assert [window.step for window in helped] == [4, 5, 6, 7, 8]
        for window, same in zip(alone, helped, strict=True):
            np.testing.assert_array_equal(window.cursors, same.cursors)
            for batch, helped_batch in zip(window.batches, same.batches, strict=True):
                assert_same(helped_batch, batch)


def test_a_window_says_what_it_holds() -> None:
    order = LaneOrder(rows_per_window=4, micro_batch_size=2, world_size=2, rank=0)
    windows = list(batches_of(["a", "b", "c", "d"], order).windows(0, 3))  # a lane has 2 tokens a pass, a row 5
    assert [(window.num_rows, window.ends_epoch) for window in windows] == [(4, False)] * 3
    assert [window.epoch for window in windows] == [2, 4, 7]
    assert windows[0].batches[0].input_ids.tolist() == [[97, 0, 97, 0, 97], [98, 0, 98, 0, 98]]
    assert windows[0].batches[0].lengths == (2, 2, 1) * 2
    documents = windows[1].batches[0].documents
    assert documents is not None
    assert documents.position_ids.tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1]]  # begins within a document


def test_rows_say_where_documents_begin_and_lanes_where_they_go_on() -> None:
    lanes = Lanes(endless(["abc", "d", "efghij"]), encode, 1, {0: TextPosition()}, max_length=6, num_sources=1)
    rows = [lanes.next_row(0) for _ in range(4)]
    assert ["".join(chr(token or 46) for token in row.input_ids) for row in rows] == [
        "abc.d.",
        "efghij",
        ".abc.d",
        ".efghi",
    ]
    assert [row.document_starts for row in rows] == [[0, 4], [0], [1, 5], [1]]
    assert [row.cursor.next_row for row in rows] == [(0, 2, 0), (0, 2, 6), (1, 1, 1), (1, 2, 5)]
    assert [row.cursor.last_row for row in rows] == [(0, 0, 0), (0, 2, 0), (0, 2, 6), (1, 1, 1)]


def test_few_texts_wait_also_where_long_and_short_ones_take_turns() -> None:
    texts = ["long " * 20, "short"] * 500
    begins = {lane: TextPosition() for lane in range(2)}
    lanes = Lanes(endless(texts), encode, 2, begins, max_length=64, num_sources=1)
    most = 0
    for _, lane in itertools.product(range(700), range(2)):
        lanes.next_row(lane)
        most = max(most, *(len(part.waiting) for part in lanes.lanes.values()))
    assert most <= 25  # as many short texts as are dealt for a long one, and some for what a token is in bytes


def test_only_a_ranks_own_documents_are_encoded() -> None:
    encoded: list[str] = []

    def encode_noted(document: Document) -> EncodedDocument:
        encoded.append(str(document.content))
        return encode(document)

    texts = [chr(97 + number) * 9 for number in range(8)]
    order = LaneOrder(rows_per_window=4, micro_batch_size=1, world_size=4, rank=1)
    made = StreamBatches(endless(texts), encode_noted, 1, 10, True, order, None, 0, pin_memory=False)
    list(made.windows(0, 2))
    assert encoded == [texts[1], texts[5]]
    encoded.clear()
    cursors = [LaneCursor(TextPosition(0, 2, 0), TextPosition(0, 1, 0), hash_numbers(letters(texts[1])))] * 4
    list(StreamBatches(endless(texts), encode_noted, 1, 10, True, order, cursors, 0, pin_memory=False).windows(1, 2))
    assert encoded == [texts[1], texts[5]]  # of what lies behind, only the last row is encoded again, to compare it


@pytest.mark.parametrize("num_workers", [0, 2])
def test_texts_that_have_changed_since_are_refused_before_a_row_is_made(num_workers: int) -> None:
    order = LaneOrder(rows_per_window=2, micro_batch_size=1, world_size=1, rank=0)
    texts = ["abcd", "efgh", "ijkl", "mnop"]
    _, after = all_ranks(texts, 2, 2, 1, 1)
    beyond = [*texts[:3], "MNOP"]  # the row that is compared ends before it
    assert len(list(batches_of(beyond, order, after[0], num_workers).windows(1, 2))) == 1
    with pytest.raises(InputError, match=r"^--streaming_dataset: row 1 of the checkpoint's last step differs") as error:
        list(batches_of(["abcd", "efgX", *texts[2:]], order, after[0], num_workers).windows(1, 2))
    end_workers(error)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fewer_documents_than_rows_in_a_step_are_refused(num_workers: int) -> None:
    order = LaneOrder(rows_per_window=4, micro_batch_size=1, world_size=1, rank=0)
    with pytest.raises(InputError, match=r"^--streaming_dataset has 3 documents with text, fewer than the 4") as error:
        list(batches_of(["a", "b", "c"], order, num_workers=num_workers).windows(0, 2))
    end_workers(error)
    assert "\n" not in str(error.value)


def test_dealing_begins_at_a_pass() -> None:
    dealt = list(itertools.islice(deal(endless(["a", "bb"]), 1, epoch=3), 3))
    assert [text[:3] for text in dealt] == [(3, 0, 0), (3, 1, 0), (4, 0, 0)]


# ----------------------------------------------------------------------------------------------------- real sources


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory, shakespeare_jsonl: Path) -> list[str]:
    """Pieces of Shakespeare of very unequal lengths."""
    with shakespeare_jsonl.open(encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    ends = list(itertools.accumulate(150 + (number * 7919) % 2500 for number in range(40)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *ends])]


def write_jsonl(file: Path, texts: Sequence[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def stream_of(names: Sequence[object], tokenizer: Path, folder: Path, **options: Any) -> Stream:
    arguments = DataArguments(streaming_dataset=[str(name) for name in names], **{"max_length": 64, **options})
    stream = open_stream(arguments, str(tokenizer), None, folder / "tokenizer", None)
    stream.save_tokenizer()
    return stream


def windows_of(
    stream: Stream,
    num_windows: int,
    order: LaneOrder,
    num_workers: int = 0,
    cursors: Sequence[LaneCursor] | None = None,
) -> list[Window]:
    made = StreamBatches(
        stream.documents.read,
        stream.open_encoder(),
        len(stream.source_names),
        stream.max_length,
        stream.isolates,
        order,
        cursors,
        num_workers,
        pin_memory=False,
    )
    return list(made.windows(0, num_windows))


ONE_LANE = LaneOrder(rows_per_window=1, micro_batch_size=1, world_size=1, rank=0)


@pytest.mark.parametrize("kind", ["tiny_model_dir", "small_spm_dir/tokenizer.model"])
def test_streamed_rows_are_those_of_tokenization(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, slices: list[str]
) -> None:
    fixture, _, file_name = kind.partition("/")
    tokenizer: Path = request.getfixturevalue(fixture) / file_name
    texts = [*slices[:12], "  \n", "<s> and </s> within a text, <|end_of_text|> too", *slices[12:]]
    file = write_jsonl(tmp_path / "texts.jsonl", texts)
    tokenize(tmp_path / "tokens", tokenizer, file, max_length=64, validation_split=0)
    split = datasets.load_from_disk(str(tmp_path / "tokens"))["train"]
    rows = Rows(split)
    streamed = windows_of(stream_of([file], tokenizer, tmp_path), len(rows), ONE_LANE, num_workers=1)
    for number, window in enumerate(streamed):
        (batch,) = window.batches
        offline = rows.__getitems__([number])
        assert_same(batch, offline)


def test_every_kind_of_source_gives_the_same_rows_also_in_workers(
    tmp_path: Path, slices: list[str], tiny_model_dir: Path
) -> None:
    table = datasets.Dataset.from_dict({"text": slices, "other": list(range(len(slices)))})
    plain = write_jsonl(tmp_path / "plain.jsonl", slices)
    table.to_parquet(str(tmp_path / "texts.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_csv(str(tmp_path / "texts.csv"), index=False)
    for number, start in enumerate(range(0, len(slices), 10)):
        write_jsonl(tmp_path / "folder" / f"{number}.jsonl", slices[start : start + 10])
    order = LaneOrder(rows_per_window=4, micro_batch_size=2, world_size=1, rank=0)

    def rows(*names: Path, num_workers: int = 0) -> list[list[int]]:
        windows = windows_of(stream_of(names, tiny_model_dir, tmp_path), 40, order, num_workers)
        return [row for window in windows for batch in window.batches for row in batch.input_ids.tolist()]

    expected = rows(plain)
    for name in ("texts.parquet", "saved", "texts.csv", "folder"):
        assert rows(tmp_path / name, num_workers=2) == expected, name
    hub = stream_of([plain], tiny_model_dir, tmp_path)
    loaded = datasets.load_dataset("json", data_files=str(plain), streaming=True, cache_dir=str(tmp_path / "cache"))
    source = StreamSource("hub:en", {"train": loaded["train"]}, DatasetName("hub", "en", None, "c0ffee"))
    streamed = replace(
        hub, documents=StreamedDocuments([StreamedSource("hub:en", source, "text", ("text",))], None, 0, 0)
    )
    assert streamed.documents.identities() == [["hub, subset en, train, commit c0ffee"]]
    windows = windows_of(streamed, 40, order, num_workers=2)
    assert [row for window in windows for batch in window.batches for row in batch.input_ids.tolist()] == expected
    first = write_jsonl(tmp_path / "first.jsonl", slices[:3])
    rest = write_jsonl(tmp_path / "rest.jsonl", slices[3:])
    assert rows(first, rest) == expected


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as error:
        call()
    end_workers(error)
    (fault,) = error.value.faults
    assert "\n" not in fault
    return fault


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_ends_the_run_with_its_place(
    tmp_path: Path, slices: list[str], tiny_model_dir: Path, num_workers: int
) -> None:
    file = write_jsonl(tmp_path / "texts.jsonl", slices[:20])
    file.write_text(file.read_text(encoding="utf-8") + '{"text": 5}\n', encoding="utf-8")
    stream = stream_of([file], tiny_model_dir, tmp_path)
    fault = refusal(lambda: windows_of(stream, 1000, ONE_LANE, num_workers))
    assert fault.startswith(f"{file}, line 21: column 'text' holds int, not text")


def test_sources_without_text_are_refused_before_the_run(
    tmp_path: Path, tiny_model_dir: Path, chats_jsonl: Path
) -> None:
    fault = refusal(lambda: stream_of([chats_jsonl], tiny_model_dir, tmp_path))
    assert fault.startswith("the tokenizer has no chat template; give the tokenizer of an instruct model, or ")
    assert fault.endswith("with --chat_template of fabric-train tokenize")
    file = write_jsonl(tmp_path / "a.jsonl", ["text"])
    fault = refusal(lambda: stream_of([file], tiny_model_dir, tmp_path, text_column="body"))
    assert "no column 'body'; it has text" in fault
    fault = refusal(lambda: stream_of([file], tmp_path, tmp_path))
    assert fault.startswith(f"--model_name {tmp_path}: it has neither tokenizer.json")
    fault = refusal(lambda: stream_of([tmp_path / "missing.jsonl"], tiny_model_dir, tmp_path))
    assert fault.startswith(f"--streaming_dataset {tmp_path / 'missing.jsonl'}: no such file or folder; ")


def test_training_rows_have_one_kind_of_source() -> None:
    def parsed(*line: str) -> TrainArguments:
        return parse(TrainArguments, [*line, "--output_dir", "run"])

    assert refusal(parsed) == "--train_data_dir, --streaming_dataset or --prompts is required"
    shuffled = refusal(lambda: parsed("--train_data_dir", "a", "--shuffle_buffer", "9"))
    assert shuffled.startswith("--shuffle_buffer only applies to --streaming_dataset; ")
    assert parsed("--streaming_dataset", "a.jsonl").data.streaming_dataset == ["a.jsonl"]
    both = parsed("--streaming_dataset", "a.jsonl", "b.txt", "--train_data_dir", "tokens").data
    assert (both.streaming_dataset, both.train_data_dir) == (["a.jsonl", "b.txt"], "tokens")
    assert "cannot stream a URL" in refusal(lambda: parsed("--streaming_dataset", "https://example.org/a.jsonl"))
    assert refusal(lambda: parsed("--streaming_dataset", "a", "--max_length", "1")).startswith("--max_length 1 leaves")


def test_a_stream_is_known_by_content_and_not_by_place_or_time(
    tmp_path: Path, slices: list[str], tiny_model_dir: Path
) -> None:
    def identities(file: Path) -> list[list[str]]:
        return stream_of([file], tiny_model_dir, tmp_path).documents.identities()

    original = write_jsonl(tmp_path / "original" / "texts.jsonl", slices)
    older_copy = write_jsonl(tmp_path / "older" / "texts.jsonl", slices)
    os.utime(older_copy, (1, 1))
    edited = write_jsonl(tmp_path / "edited" / "texts.jsonl", [*slices[:-1], f"{slices[-1][:-5]}other"])
    assert identities(older_copy) == identities(original)
    assert identities(edited) != identities(original)


def test_an_encoder_with_other_ids_is_found_out_and_replaced(
    tmp_path: Path, slices: list[str], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of([write_jsonl(tmp_path / "texts.jsonl", slices)], tiny_model_dir, tmp_path)
    assert isinstance(stream.open_encoder().encoder, GigatokenEncoder)
    encode_batch = GigatokenEncoder.encode_batch

    def wrong_in_one_document(encoder: GigatokenEncoder, texts: list[str]) -> list[np.ndarray]:
        return [ids[text == slices[1] :] for text, ids in zip(texts, encode_batch(encoder, texts), strict=True)]

    monkeypatch.setattr(GigatokenEncoder, "encode_batch", wrong_in_one_document)
    assert isinstance(stream.open_encoder().encoder, FastEncoder)


def test_a_saved_tokenizer_is_the_same_one(tmp_path: Path, slices: list[str], small_spm_dir: Path) -> None:
    file = write_jsonl(tmp_path / "texts.jsonl", slices)
    stream = stream_of([file], small_spm_dir / "tokenizer.model", tmp_path)
    arguments = DataArguments(streaming_dataset=[str(file)])
    again = open_stream(arguments, str(tmp_path / "tokenizer"), True, tmp_path / "tokenizer", None)
    assert again.tokenizer_hash == stream.tokenizer_hash
    assert isinstance(again.open_encoder(), DocumentEncoder)


# ------------------------------------------------------------------------------------------------------- whole runs


class Run:
    """Starts runs of the tiny model on a stream of two sources in shares, shuffled."""

    def __init__(self, folder: Path, model: Path, files: Sequence[Path], tokens: Path, runs: ForkedRuns) -> None:
        self.folder = folder
        self.runs = runs
        self.places = [f"a={files[0]}", f"b={files[1]}"]
        self.defaults = {**SETTINGS, "model_name": model, "streaming_dataset": self.places, "train_data_dir": tokens}
        self.defaults |= {"shares": [0.5, 2], "shuffle_buffer": 6, "seed": 3}
        self.defaults |= {"max_length": 64, "max_step": 8, "save_step_interval": 3, "num_workers": 2}
        self.defaults |= {"eval_at_start": "false"}

    def line(self, name: str, options: dict[str, object]) -> list[str]:
        arguments = {**self.defaults, "accelerator": "cpu", "output_dir": self.folder / name, **options}
        return option_words(arguments)

    def faults(self, name: str, **options: object) -> tuple[str, ...]:
        """What forbids the run before it begins."""
        with pytest.raises(InputError) as error:
            prepare(parse(TrainArguments, self.line(name, options)))
        assert not any("\n" in fault for fault in error.value.faults)
        return error.value.faults

    def start(self, name: str, num_ranks: int = 1, **options: object) -> ForkedRun:
        return self.runs.start(self.line(name, options), num_ranks, cwd=self.folder)

    def __call__(self, name: str, num_ranks: int = 1, **options: object) -> Path:
        self.start(name, num_ranks, **options).finish(200)
        return self.folder / name


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_dir: Path,
    tiny_tokens_dir: Path,
    slices: list[str],
    forked_runs: ForkedRuns,
) -> Run:
    folder = tmp_path_factory.mktemp("streams")
    files = [write_jsonl(folder / "a.jsonl", slices[:30]), write_jsonl(folder / "b.jsonl", slices[30:])]
    return Run(folder, tiny_model_dir, files, tiny_tokens_dir, forked_runs)


@pytest.fixture(scope="module")
def uninterrupted(run: Run) -> Path:
    return run("uninterrupted")


@pytest.mark.slow
def test_killed_run_resumes_with_the_uninterrupted_metrics(run: Run, uninterrupted: Path) -> None:
    started = run.start("killed")
    wanted = run.folder / "killed" / "checkpoints" / "step-00000003"
    assert started.wait_until(wanted.is_dir)
    started.kill()
    assert started.wait() == [-9]
    assert not (run.folder / "killed" / "checkpoints" / "step-00000008").exists()
    resumed = run("killed", resume="true", num_workers=0)
    assert timeless(resumed) == timeless(uninterrupted)
    assert differences(resumed, uninterrupted) == []
    assert len(timeless(resumed)) == 8
    with (resumed / "metrics.csv").open(encoding="utf-8") as file:
        logged = list(csv.DictReader(file))
    assert all(float(row[f"train_loss/{name}"]) > 0 for row in logged for name in "ab")
    assert cursors_of(resumed) == cursors_of(uninterrupted)
    assert len(cursors_of(resumed)) == SETTINGS["total_batch_size"]


def cursors_of(run: Path) -> list[list[int]]:
    """The state of the lanes after the last step, with the tokens read of each source."""
    content = (run / "checkpoints" / "step-00000008" / "stream.json").read_text(encoding="utf-8")
    cursors: list[list[int]] = json.loads(content)["cursors"]
    return cursors


def sources_in(run: Path) -> list[list[str]]:
    """The lines of the sources in the table at the end of the run."""
    table = (run / "run.log").read_text(encoding="utf-8").rpartition("Stream\n")[2]
    return [line.split() for line in table.splitlines()[1:]]


@pytest.mark.slow
def test_stream_resumes_on_two_ranks_and_without_the_models_name(run: Run, uninterrupted: Path) -> None:
    checkpoint = uninterrupted / "checkpoints" / "step-00000003"
    resumed = run("two-ranks", 2, checkpoint=checkpoint, parallelism="fsdp", model_name="no/such-model")
    assert cursors_of(resumed) == cursors_of(uninterrupted)
    read = np.sum([cursor[8:] for cursor in cursors_of(resumed)], axis=0)
    assert sources_in(resumed) == sources_in(uninterrupted)
    assert [[*line[:1], *line[3:5]] for line in sources_in(resumed)] == [
        [name, share, f"{tokens:,}"] for name, share, tokens in zip("ab", ("0.5", "2"), read, strict=True)
    ]
    assert read.sum() == 8 * 64 * SETTINGS["total_batch_size"]  # type: ignore[operator]
    ours, theirs = ([row[:1] + row[2:4] + row[7:] for row in timeless(folder)] for folder in (resumed, uninterrupted))
    assert [row[0] for row in ours] == ["4", "5", "6", "7", "8"]
    for row, same in zip(ours, theirs[3:], strict=True):
        assert [float(cell or 0) for cell in row] == pytest.approx([float(cell or 0) for cell in same], abs=1e-5)


@pytest.mark.slow
def test_another_stream_is_refused_by_name(run: Run, uninterrupted: Path, slices: list[str]) -> None:
    changed = [f"a={write_jsonl(run.folder / 'changed' / 'a.jsonl', [*slices[:29], 'changed'])}", run.places[1]]
    checkpoint = uninterrupted / "checkpoints" / "step-00000003"
    options: dict[str, object] = {"max_length": 32, "shares": [0.5, 1], "shuffle_buffer": 7, "seed": 4}
    faults = run.faults("other", checkpoint=checkpoint, streaming_dataset=changed, **options)
    assert len(faults) == 5
    for fault, expected in zip(
        faults,
        [
            "--streaming_dataset reads different files, or its files have changed: a.jsonl, ",
            "--max_length differs: 64 there, 32 here; ",
            "--shares differ: 2.0 there, 1.0 here; ",
            "--shuffle_buffer differs: 6 there, 7 here; ",
            "--seed differs: 3 there, 4 here; ",
        ],
        strict=True,
    ):
        assert expected in fault
    without_shares = run.faults("one", checkpoint=checkpoint, streaming_dataset=run.folder / "*.jsonl", shares="null")
    assert [fault.split(": ")[1] for fault in without_shares] == ["--shares differ"]
    token_dataset: dict[str, object] = {"streaming_dataset": "null", "shares": "null", "shuffle_buffer": 0}
    (unlike,) = run.faults("unlike", checkpoint=checkpoint, **token_dataset)
    assert "its run read --streaming_dataset, not --train_data_dir" in unlike


@pytest.mark.slow
def test_fault_found_in_a_worker_ends_the_run_in_one_line(run: Run) -> None:
    started = run.start("few", total_batch_size=64, micro_batch_size=2)
    assert started.wait(100) == [1]  # it is found when the run has begun, and has written files
    output = started.stdout() + started.stderr()
    assert "error: --streaming_dataset has 34 documents with text, fewer than the 64 rows of a step" in output
    assert "Traceback" not in output


def test_a_stream_without_end_or_too_long_for_the_model_is_refused(run: Run) -> None:
    endless, long = run.faults("refused", max_step="null", max_length=512)
    assert endless == "--streaming_dataset has no known length; give --max_step"
    assert long.startswith("--max_length 512: ")
    assert " has 256 positions; give a smaller --max_length, or extend the positions: --rope_scaling llama3:2 " in long


def test_to_evaluate_alone_a_token_dataset_is_needed(run: Run) -> None:
    (fault,) = run.faults("evaluated", eval_only="true", train_data_dir="null")
    assert fault.startswith("--eval_only true needs --train_data_dir")
