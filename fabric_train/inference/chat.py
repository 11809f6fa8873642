"""Chat with a model in a terminal: several turns with their history."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import GeneratedText, TextPrinter, generate
from fabric_train.inference.prompts import Prompt, PromptEncoder, chat_turn, encode_prompts, limits_of
from fabric_train.tokenization.documents import Chat, Message

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"


class Conversation:
    """A chat with a model. Each answer has a random stream of its own."""

    def __init__(self, model: Any, tokenizer: Any, encoder: PromptEncoder, settings: GenerateArguments) -> None:
        self._model, self._tokenizer, self._encoder, self._settings = model, tokenizer, encoder, settings
        self._num_answers = 0
        self._history: list[Message] = []

    def reset(self) -> None:
        self._history = []

    def answer(self, text: str) -> GeneratedText:
        """Print the answer to a user's turn as it is generated; Ctrl-C stops it. Both turns become history.

        An InputError if the conversation is too long for the model, or its template refuses it; the turn is dropped.
        """
        turn = chat_turn(text, None if self._history else self._settings.system).messages
        messages = [*self._history, *turn]
        prompt = Prompt(Chat(messages), "the conversation")
        (ids,) = encode_prompts(self._encoder, [prompt], limits_of(self._model), self._settings.num_tokens)
        with _counted_interrupts() as interrupts:
            (generated,) = generate(
                self._model,
                self._tokenizer,
                [ids],
                self._settings,
                end_ids=self._encoder.end_ids,
                numbers=[self._num_answers],
                printer=TextPrinter(self._tokenizer, self._settings.stop),
                is_interrupted=lambda: bool(interrupts),
            )
        self._num_answers += 1
        self._history = [*messages, {"role": "assistant", "content": generated.text}]
        return generated


def chat_in_terminal(conversation: Conversation) -> None:
    """Answer the lines of standard input until its end or /exit. Only answers are written to standard output.

    If it is no terminal, a line that cannot be answered ends the program.
    """
    if sys.stdin is None:
        raise InputError("--chat: standard input is closed, so there is no question; give one there or by --prompt")
    is_terminal = sys.stdin.isatty()
    for number, line in enumerate(_typed_lines() if is_terminal else sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            if text == "/exit":
                return
            if text == "/reset":
                conversation.reset()
            elif text:
                conversation.answer(text)
            continue
        except UnicodeDecodeError as error:
            fault = f"byte {error.start} is not UTF-8"
        except InputError as error:
            fault = f"{error}; /reset forgets the conversation"
        if not is_terminal:  # nobody is there to ask again
            raise InputError(f"standard input, line {number}: {fault}; this and later lines are unanswered")
        print(f"error: {fault}", file=sys.stderr)


def _typed_lines() -> Iterator[bytes]:
    """Ask for lines on the terminal until Ctrl-D, and yield them as UTF-8 or, if they are not, as they were typed."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and remembers them
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    print(_HELP, file=sys.stderr)
    while True:
        try:
            yield input("> ").encode("utf-8", "surrogateescape")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Yield a list that grows with the first Ctrl-C in the block; a second one interrupts the program."""
    received: list[int] = []

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
