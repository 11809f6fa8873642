"""--prompts: reading, encoding, and what is refused or left out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from fabric_train.cli.errors import InputError
from fabric_train.cli.shares import Shares
from fabric_train.model.hf_model import load_hf_tokenizer
from fabric_train.rollouts.prompts import PromptLengths, Prompts, open_prompts

LENGTHS = PromptLengths(row_length=64, max_new_tokens=16)
NO_SHARES = Shares("--shares", None)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def open_file(entry: str, model: Path, tmp_path: Path, lengths: PromptLengths = LENGTHS) -> Prompts:
    return open_prompts([entry], str(model), lengths, tmp_path / "tokenizer", NO_SHARES)


def test_a_prompt_has_one_bos_and_its_other_columns_go_to_the_rewards(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "To be", "answer": "or not", "level": 3},
        {"prompt": "Enter", "answer": "Ghost"},
    ]
    prompts = open_file(write_rows(tmp_path / "p.jsonl", rows), tiny_model_dir, tmp_path)
    tokenizer = load_hf_tokenizer(tiny_model_dir)
    first = prompts.train.prompts[0]
    assert list(first.token_ids) == [
        tokenizer.bos_token_id,
        *tokenizer.encode("To be", add_special_tokens=False),
    ]
    assert first.columns == {"answer": "or not", "level": 3}
    assert prompts.column_names == {"answer"}  # those that every prompt has
    assert prompts.notes == (
        "--prompts: 1 of 2 prompts have no level, so rewards do not receive this column; give each prompt a value, "
        "null if there is none",
    )
    assert prompts.stop_token_ids == (tokenizer.eos_token_id,)


def test_a_note_says_which_columns_the_sources_have(tmp_path: Path, tiny_model_dir: Path) -> None:
    math = write_rows(tmp_path / "math.jsonl", [{"prompt": "To be", "answer": "or not", "level": 3}])
    chat = write_rows(tmp_path / "chat.jsonl", [{"prompt": "Enter", "answer": "Ghost"}])
    entries = [f"math={math}", f"chat={chat}"]
    prompts = open_prompts(entries, str(tiny_model_dir), LENGTHS, tmp_path / "tokenizer", NO_SHARES)
    assert prompts.columns_by_source == {"math": {"answer", "level"}, "chat": {"answer"}}
    assert prompts.notes == (
        "--prompts: the sources have different columns: math has answer, level; chat has answer; rewards receive only "
        "columns of all prompts: answer",
    )


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [{"prompt": "To be", "answer": "or not"}, {"prompt": "Enter", "answer": "Ghost"}]
    of_lines = open_file("play=" + write_rows(tmp_path / "p.jsonl", rows), tiny_model_dir, tmp_path)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    of_parquet = open_file(f"play={tmp_path / 'p.parquet'}", tiny_model_dir, tmp_path)
    assert of_lines.train.prompts == of_parquet.train.prompts
    assert of_lines.fingerprint == of_parquet.fingerprint
    assert [prompt.prompt_id for prompt in of_lines.train.prompts] == ["play:1", "play:2"]


def test_a_changed_answer_changes_the_fingerprint(tmp_path: Path, tiny_model_dir: Path) -> None:
    before = open_file(write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1"}]), tiny_model_dir, tmp_path)
    after = open_file(write_rows(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "2"}]), tiny_model_dir, tmp_path)
    assert before.fingerprint != after.fingerprint


def test_a_file_in_another_place_has_the_same_fingerprint(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [{"prompt": "To be", "answer": "or not"}]
    before = open_file(write_rows(tmp_path / "before.jsonl", rows), tiny_model_dir, tmp_path)
    moved = open_file(write_rows(tmp_path / "moved.jsonl", rows), tiny_model_dir, tmp_path)
    assert before.fingerprint == moved.fingerprint


def test_long_prompts_are_left_out_with_their_number(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [{"prompt": "short"}, {"prompt": "long " * 100}, {"prompt": "long " * 90}]
    prompts = open_file(write_rows(tmp_path / "p.jsonl", rows), tiny_model_dir, tmp_path)
    assert len(prompts.train) == 1
    assert "2 prompts of 3 with more than 48 tokens" in prompts.notes[0]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"text": "no prompt"}], 'line 1: expected a column "prompt"'),
        ([{"prompt": ""}], 'expected a column "prompt"'),
        ([], "p.jsonl: there is no row"),
        ([{"prompt": "long " * 100}], "no prompt has at most 48 tokens"),
        ([{"prompt": [{"role": "user", "content": "Hi"}]}], "has no chat template"),
    ],
)
def test_rows_that_are_no_prompts_are_refused(
    tmp_path: Path, tiny_model_dir: Path, rows: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        open_file(write_rows(tmp_path / "p.jsonl", rows), tiny_model_dir, tmp_path)


def test_completions_as_long_as_a_row_leave_no_room(tmp_path: Path, tiny_model_dir: Path) -> None:
    entry = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}])
    with pytest.raises(InputError, match="leaves no room for a prompt"):
        open_file(entry, tiny_model_dir, tmp_path, PromptLengths(64, 64))


def test_messages_of_parquet_are_a_chat(tmp_path: Path, tiny_model_dir: Path) -> None:
    chat_model = tmp_path / "chat-model"
    tokenizer = load_hf_tokenizer(tiny_model_dir)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}!{% endfor %}"
    tokenizer.save_pretrained(chat_model)
    rows = [{"prompt": [{"role": "user", "content": "To be"}], "answer": "or not"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    prompts = open_file(f"play={tmp_path / 'p.parquet'}", chat_model, tmp_path)
    of_lines = open_file("play=" + write_rows(tmp_path / "p.jsonl", rows), chat_model, tmp_path)
    assert prompts.train.prompts == of_lines.train.prompts
    assert tokenizer.decode(prompts.train.prompts[0].token_ids) == "To be!"
