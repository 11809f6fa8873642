"""A file of prompts becomes a file of texts, in batches, that a killed program continues."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fabric_train.cli.errors import InputError
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.load_model import load_for_inference
from fabric_train.inference.prompt_file import read_prompts
from fabric_train.inference.prompts import (
    PromptEncoder,
    PromptLimits,
    encode_prompts,
    limits_of,
)
from fabric_train.inference.text_file import OutputFile
from tests.support.checkpoint_examples import run_with_two_checkpoints
from tests.support.forked_runs import ForkedRun, ForkedRuns

ROWS: list[dict[str, Any]] = [
    {"prompt": "To be, or not"},
    {"messages": [{"role": "user", "content": "Who is there?"}]},
    {"prompt": "Now"},
    {"prompt": "If music be the food of love"},
    {"prompt": "Once more"},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> Path:
    return run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir, forked_runs)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    return file


def _start(runs: ForkedRuns, run: Path, prompts: Path, output: Path, *more: object) -> ForkedRun:
    argv = ["--model_name", run, "--prompts", prompts, "--output", output, "--num_tokens", 8, "--temperature", 1, *more]
    return runs.start(argv, 1, program="fabric_train.programs.generate")


def test_texts_are_in_order_resumed_and_the_same_for_any_batch_size(
    tmp_path: Path, run: Path, prompts: Path, forked_runs: ForkedRuns
) -> None:
    files = [tmp_path / f"{size}.jsonl" for size in (1, 3)]
    for program in [_start(forked_runs, run, prompts, file, "--batch_size", file.stem) for file in files]:
        program.finish()
    whole = files[0].read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["line"] for row in rows] == [1, 3, 5, 7, 9]
    assert [{name: row[name] for name in given} for row, given in zip(rows, ROWS, strict=True)] == ROWS
    assert len({row["text"] for row in rows}) == 5
    assert rows[0]["ended_by"] == "length"
    assert rows[0]["num_tokens"] == 8
    assert files[1].read_text() == whole

    files[1].write_text(whole[: whole.find("\n", len(whole) // 2) - 5])  # as a kill leaves it
    found = files[1].read_text().count("\n")
    again = _start(forked_runs, run, prompts, files[1], "--batch_size", 2)
    again.finish()
    assert files[1].read_text() == whole
    assert f"{5 - found} texts, {found} already done: " in again.stderr()


def test_an_output_of_other_work_is_refused_and_stays(tmp_path: Path, prompts: Path) -> None:
    settings = GenerateArguments("", num_tokens=8)
    output = tmp_path / "out.jsonl"
    given = read_prompts(prompts)
    row = {"line": 1, **ROWS[0], "text": "", "model": "a", "settings": OutputFile(output, given, settings)._settings}
    for change, fault in (
        ({}, None),
        ({"prompt": "Another"}, r"out.jsonl, line 1: does not belong to .*prompts.jsonl, line 1;"),
        ({"settings": {"num_tokens": 9}}, "line 1: generated with different settings;"),
    ):
        output.write_text(json.dumps(row | change) + "\n")
        if fault is None:
            with pytest.raises(InputError, match="texts from a, not from b;"):
                OutputFile(output, given, settings).check_model("b")
        else:
            with pytest.raises(InputError, match=fault):
                OutputFile(output, given, settings)
    output.write_text("{}\n" * 6)
    with pytest.raises(InputError, match="6 lines for 5 prompts"):
        OutputFile(output, given, settings)
    with pytest.raises(InputError, match="is not a folder"):
        OutputFile(tmp_path / "absent" / "out.jsonl", given, settings)
    assert output.read_text() == "{}\n" * 6


def test_every_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [
        '{"prompt": "good"}',
        '{"prompt": ""}',
        "no json",
        '{"text": "x"}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "robot", "content": "x"}]}',
        '{"prompt": "x", "messages": []}',
    ]
    file.write_bytes("\n".join(lines).encode() + b'\n{"prompt": "\xff"}')
    with pytest.raises(InputError) as caught:
        read_prompts(file)
    assert [fault.split(": ")[0].removeprefix(f"{file}, line ") for fault in caught.value.faults] == [*"2345678"]
    for name, content in (("empty.txt", "\n \n"), ("prompts.csv", "x")):
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match="it has no prompts"):
        read_prompts(tmp_path / "empty.txt")
    with pytest.raises(InputError, match=r"unknown file type; give a \.txt"):
        read_prompts(tmp_path / "prompts.csv")
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "absent.txt")


def test_text_lines_become_turns_of_a_chat_with_a_system_turn(tmp_path: Path, run: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Hello\n\nAgain\n")
    model, tokenizer = load_for_inference(str(run))
    prompts = read_prompts(file, chat=True, system="Be kind")
    encoder = PromptEncoder(tokenizer, "tiny", prompts_chats=True)
    encoded = encode_prompts(encoder, prompts, limits_of(model), 8)
    assert [tokenizer.decode(ids) for ids in encoded] == [
        "<system>Be kind\n<user>Hello\n",
        "<system>Be kind\n<user>Again\n",
    ]
    with pytest.raises(InputError, match=r"prompts.txt, line 3 has \d+ tokens, which with --num_tokens 250 exceed"):
        encode_prompts(encoder, prompts, limits_of(model), 250)


def test_a_chat_in_a_file_of_prompts_loses_nothing_without_a_word(
    tmp_path: Path, chatml_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [{"from": "human", "value": "Hi", "id": 3}]
    rows = [{"messages": turns, "system": "Be kind.", "topic": "x"}, {"prompt": "Once", "title": "A tale"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read_prompts(file)
    assert "columns not used: title, topic" in capsys.readouterr().err
    tokenizer = PreTrainedTokenizerFast.from_pretrained(chatml_dir)
    encoder = PromptEncoder(tokenizer, "tiny", prompts_chats=True)
    lost = {"role": "assistant", "content": "Ho", "reasoning": "They greet."}
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}, lost, *turns], "system": "Be kind."}))
    (ids,) = encode_prompts(encoder, read_prompts(file), PromptLimits(49_152, None), 8)
    assert "Be kind." in tokenizer.decode(ids)
    shown = capsys.readouterr().err
    assert "the chat template does not show id of the user's turns, reasoning of turns that are not supervised" in shown
    file.write_text(json.dumps({"messages": turns, "tools": [{"type": "function", "function": {"name": "find"}}]}))
    with pytest.raises(InputError, match="line 1: the chat template drops its tools"):
        encoder.encode(read_prompts(file)[0])
