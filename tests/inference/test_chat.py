"""A chat has a history, ends answers at Ctrl-C and at the end of a turn, and needs a chat template."""

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fabric_train.cli.errors import InputError
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.conversation import Conversation, chat_in_terminal
from fabric_train.inference.generate import TextPrinter
from fabric_train.inference.load_model import load_for_inference
from fabric_train.inference.prompts import PromptEncoder
from tests.support.checkpoint_examples import run_with_two_checkpoints
from tests.support.forked_runs import ForkedRuns


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, forked_runs: ForkedRuns) -> tuple[Any, Any]:
    run = run_with_two_checkpoints(tmp_path_factory.getbasetemp(), tiny_model_dir, forked_runs)
    return load_for_inference(str(run))


class Rendered(PromptEncoder):
    """An encoder that keeps what the model is given."""

    def encode(self, prompt: Any) -> list[int]:
        ids = super().encode(prompt)
        self.texts = [*getattr(self, "texts", []), self._tokenizer.decode(ids)]
        return ids


class _Lines(io.TextIOWrapper):
    """Standard input with the bytes of some lines."""

    def __init__(self, lines: bytes, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(lines), encoding="utf-8")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def _conversation(loaded: tuple[Any, Any], num_tokens: int = 6) -> tuple[Conversation, Rendered]:
    encoder = Rendered(loaded[1], "tiny", prompts_chats=True)
    return Conversation(*loaded, encoder, GenerateArguments("", system="Be kind", num_tokens=num_tokens)), encoder


def test_turns_become_history_until_a_reset(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation, encoder = _conversation(loaded)
    monkeypatch.setattr("sys.stdin", _Lines(b"Hello\n\n/resets\n/reset\nHello\n/exit\nnot read\n"))
    chat_in_terminal(conversation)
    out, err = capsys.readouterr()
    begin = "<system>Be kind\n<user>Hello\n"
    answer = _conversation(loaded)[0].answer("Hello").text
    assert answer
    assert encoder.texts == [begin, f"{begin}<assistant>{answer}\n<user>/resets\n", begin]
    assert out.startswith(f"{answer}\n")
    assert out.endswith(f"{answer}\n")
    assert err == ""


_UNANSWERABLE = [
    ("word " * 260).encode(),
    "¿Qué?".encode("latin-1"),
]


@pytest.mark.parametrize("line", _UNANSWERABLE, ids=["too long", "latin-1"])
def test_a_question_without_an_answer_ends_a_chat_that_no_terminal_holds(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    monkeypatch.setattr("sys.stdin", _Lines(b"Hello\n" + line + b"\nHello\n"))
    with pytest.raises(InputError, match=r"^standard input, line 2: .*; this and later lines are unanswered$"):
        chat_in_terminal(_conversation(loaded)[0])
    assert capsys.readouterr().out == f"{_conversation(loaded)[0].answer('Hello').text}\n"


@pytest.mark.parametrize("line", _UNANSWERABLE, ids=["too long", "latin-1"])
def test_a_question_without_an_answer_is_refused_in_a_terminal_that_goes_on(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    conversation, encoder = _conversation(loaded)
    monkeypatch.setattr("sys.stdin", _Lines(line + b"\nHello\n", is_terminal=True))
    chat_in_terminal(conversation)
    out, err = capsys.readouterr()
    assert err.splitlines()[1].startswith(("error: the conversation has ", "error: byte 0 is not UTF-8"))
    assert encoder.texts[-1] == "<system>Be kind\n<user>Hello\n"
    assert out.startswith("> > ")


def test_a_closed_standard_input_is_named(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # as Python sets it for <&-
    with pytest.raises(InputError, match="--chat: standard input is closed"):
        chat_in_terminal(_conversation(loaded)[0])


def test_ctrl_c_stops_the_answer_and_what_was_said_is_history(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation, encoder = _conversation(loaded, num_tokens=50)
    put = TextPrinter.put

    def interrupt(self: TextPrinter, value: Any) -> None:
        put(self, value)
        if len(self._new_ids) == 3:
            handler = signal.getsignal(signal.SIGINT)  # a signal could also meet handlers of other libraries
            assert callable(handler)
            handler(signal.SIGINT, None)

    monkeypatch.setattr(TextPrinter, "put", interrupt)
    before = signal.getsignal(signal.SIGINT)
    generated = conversation.answer("Hello")
    assert generated.ended_by == "interrupt"
    assert len(generated.new_ids) <= 4
    assert signal.getsignal(signal.SIGINT) == before
    conversation.answer("Again")
    assert f"<assistant>{generated.text}" in encoder.texts[1]


def test_an_answer_ends_at_the_token_that_ends_turns(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    conversation, _ = _conversation(loaded, num_tokens=6)
    third = conversation.answer("Hello").new_ids[2]
    encoder = PromptEncoder(tokenizer, "tiny", prompts_chats=True)
    encoder.end_ids = (third,)
    settings = GenerateArguments("", system="Be kind", num_tokens=6)
    answer = Conversation(model, tokenizer, encoder, settings).answer("Hello")
    assert answer.new_ids[-1] == third
    assert answer.ended_by == "stop"


def test_the_template_says_which_token_ends_turns(chatml_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chatml_dir)
    encoder = PromptEncoder(tokenizer, "chatml", prompts_chats=True)
    assert encoder.end_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_a_base_model_without_a_template_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(InputError, match="models/base has no chat template, because it is a base model"):
        PromptEncoder(AutoTokenizer.from_pretrained(tiny_model_dir), "models/base", prompts_chats=True)
