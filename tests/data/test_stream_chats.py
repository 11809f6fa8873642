"""Streamed chats: tokenization's ids and labels, cut at the ends of rows, and refused where it refuses them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from fabric_train.data.batch import IGNORED_LABEL
from fabric_train.data.step_sampler import Window
from fabric_train.data.stream_batches import LaneCursor, LaneOrder
from fabric_train.data.token_dataset import open_dataset
from tests.data.test_streaming import ONE_LANE, refusal, stream_of, windows_of
from tests.support.token_datasets import tokenize

NUM = 12
FOUR_LANES = LaneOrder(rows_per_window=4, micro_batch_size=1, world_size=1, rank=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def said(number: int) -> str:
    return f"Number {number} says <|im_end|> and {'so on, ' * (number * 5 % 17)}é {number}."


ROWS: dict[str, list[dict[str, Any]]] = {
    "texts": [{"text": said(number)} for number in range(NUM)],
    "messages": [
        {"messages": [user(said(n)), assistant(said(n + 1)), user("And?"), assistant(said(n + 2))], "id": n}
        for n in range(NUM)
    ]
    + [
        {"messages": [user(" "), assistant("")]},
        {"messages": [user("Nobody answers.")]},
        {"messages": [{"role": "system", "content": "Be brief."}, user("Hi"), assistant("Hi!")]},
    ],
    "conversations": [
        {"conversations": [{"from": "human", "value": said(n)}, {"from": "gpt", "value": said(n + 5)}]}
        for n in range(NUM)
    ],
    "alpaca": [{"instruction": said(n), "input": "more" * (n % 2), "output": said(n + 1)} for n in range(NUM)],
    "prompts": [
        {"prompt": [user("?"), assistant(said(n)), user("!")], "completion": [assistant("Yes.")]} for n in range(3)
    ]
    + [{"prompt": said(n), "completion": said(n + 1)} for n in range(NUM)],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("chats")
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    datasets.Dataset.from_list(ROWS["messages"][:NUM]).to_parquet(str(folder / "messages.parquet"))
    return {file.name: file for file in folder.iterdir()}


def labels_of(windows: Sequence[Window]) -> list[list[int]]:
    return [row for window in windows for batch in window.batches for row in batch.labels.tolist()]


def test_rows_of_chats_are_those_of_tokenization(files: dict[str, Path], chatml_dir: Path, tmp_path: Path) -> None:
    places = [files[f"{name}.jsonl"] for name in ("messages", "texts", "alpaca", "prompts", "conversations")]
    places.append(files["messages.parquet"])
    tokenize(tmp_path / "tokens", chatml_dir, *places, max_length=48, packing="concat", validation_split=0)
    rows = open_dataset(str(tmp_path / "tokens")).train
    stream = stream_of(places, chatml_dir, tmp_path, max_length=48)
    windows = windows_of(stream, len(rows), ONE_LANE, num_workers=1)
    for number, window in enumerate(windows):
        (batch,) = window.batches
        offline = rows.__getitems__([number])
        assert torch.equal(batch.input_ids, offline.input_ids)
        assert torch.equal(batch.labels, offline.labels)
        assert (batch.documents is None) == (offline.documents is None)
        if batch.documents is not None and offline.documents is not None:
            assert torch.equal(batch.documents.borders, offline.documents.borders)
        pieces = batch.pieces
        expected = offline.pieces
        assert pieces is not None
        assert expected is not None
        assert torch.equal(pieces.sources, expected.sources)
        assert torch.equal(pieces.num_targets, expected.num_targets)
        torch.testing.assert_close(pieces.num_bytes, expected.num_bytes, rtol=1e-12, atol=0)
    assert stream.source_names == rows.source_names
    assert 0.1 < np.mean(np.array(labels_of(windows)) == IGNORED_LABEL) < 0.9
    saved = (tmp_path / "tokens" / "tokenizer" / "chat_template.jinja").read_text(encoding="utf-8")
    assert (stream.tokenizer_folder / "chat_template.jinja").read_text(encoding="utf-8") == saved
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text(encoding="utf-8"))["tokenizer"]
    assert set(manifest["turn_end_token_ids"]) <= set(stream.stop_token_ids)


def test_chats_are_mixed_and_shuffled_like_texts(files: dict[str, Path], chatml_dir: Path, tmp_path: Path) -> None:
    places = [f"chats={files['messages.jsonl']}", f"texts={files['texts.jsonl']}"]
    stream = stream_of(places, chatml_dir, tmp_path, max_length=48, shares=[1.0, 0.5], shuffle_buffer=4)
    order = [document.source for document in stream.documents.read(0)]
    assert order.count(0) == NUM + 1  # neither the blank chat nor that without an answer
    assert order.count(1) == pytest.approx(NUM / 2, abs=1)
    assert len(set(order[:8])) == 2
    windows = windows_of(stream, 30, FOUR_LANES)
    for step in (7, 20):  # within chats, in the first pass and in a later one
        saved = windows[step - 1].cursors
        assert saved is not None
        cursors = [LaneCursor.from_numbers(numbers) for _, *numbers in saved.tolist()]
        assert any(cursor.next_row.offset for cursor in cursors)
        resumed = windows_of(stream, 30 - step, FOUR_LANES, cursors=cursors)
        assert labels_of(resumed) == labels_of(windows[step:])


def test_chats_that_cannot_be_used_are_refused_with_their_place(
    files: dict[str, Path], chatml_dir: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:

    def fault_of(file: Path, tokenizer: Path) -> str:
        return refusal(lambda: windows_of(stream_of([file], tokenizer, tmp_path), 40, ONE_LANE))

    assert fault_of(files["messages.jsonl"], tiny_model_dir).startswith("the tokenizer has no chat template; ")
    bad = tmp_path / "bad.jsonl"
    lines = [json.dumps({"messages": [user("Hi"), assistant("Hello")]})] * 2
    bad.write_text("\n".join([*lines, json.dumps({"messages": [{"role": "bot", "content": "Hi"}]})]))
    fault = fault_of(bad, chatml_dir)
    assert fault.startswith(f'{bad}, line 3: role "bot" of turn 1 is not one of system, user, ')
    assert fault.endswith("; fix it, or skip such rows with fabric-train tokenize --on_bad_rows skip")
    tools = {"messages": [user("Hi"), assistant("Hello")], "tools": [{"type": "function"}]}
    bad.write_text("\n".join([*lines, json.dumps(tools)]))  # found when it is encoded, not when it is read
    assert fault_of(bad, chatml_dir).startswith(f"{bad}, line 3: the chat template drops its tools; ")


def test_columns_of_which_nothing_is_made_are_named_at_the_start(tmp_path: Path, chatml_dir: Path) -> None:
    file = tmp_path / "chats.jsonl"
    rows = [
        {"system": "Be brief.", "conversations": [user("Hi"), {**assistant("Hello"), "weight": 0}], "id": 1},
        {"system": "Be brief.", "conversations": [user("Hi"), {**assistant("Hello"), "model": "x"}], "id": 1},
        {"conversations": [user("Hi"), assistant("")], "topic": "greetings"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = stream_of([file], chatml_dir, tmp_path, max_length=48)
    assert stream.chat_template is not None
    named = f"{file}: columns not used (in its first rows): id, model of the assistant's turns"
    assert named in stream.chat_template.notes
    assert len(list(stream.documents.read(0))) == 1  # neither the masked answer nor the empty one


def test_columns_that_come_later_are_named_when_they_are_read(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [{"messages": [user("Hi"), assistant("Hello")], "id": number} for number in range(30)]
    texts = [{"text": "Hello.", "id": number} for number in range(30)]
    for name, rows in (("chats", chats), ("texts", texts)):
        rows += [{**rows[0], "topic": "a", "url": ""}, {**rows[0], "topic": "b"}]
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        stream = stream_of([file], chatml_dir, tmp_path / name, max_length=48)
        notes = [*stream.notes, *(stream.chat_template.notes if stream.chat_template else ())]
        assert f"{file}: columns not used (in its first rows): id" in notes
        list(stream.documents.read(0))
        assert capsys.readouterr().err.splitlines() == [f"note: {file}, line 31: columns not used from here on: topic"]
