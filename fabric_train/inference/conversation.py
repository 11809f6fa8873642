"""Continue one prompt, or have a conversation with a model in the terminal."""

import codecs
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from fabric_train.cli.errors import InputError
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import GeneratedText, TextPrinter, generate
from fabric_train.inference.load_model import load_to_generate
from fabric_train.inference.prompt_file import Prompt, chat_turn
from fabric_train.inference.prompts import PromptEncoder, encode_prompts, limits_of
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.reading.documents import Chat, Message

_HELP = "/reset clears the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def continue_prompt(arguments: GenerateArguments, *, prints: bool = False) -> tuple[Any, GeneratedText]:
    """Return the model and its text after ``--prompt``; with ``prints``, print both while the text is generated."""
    assert arguments.prompt is not None
    model, tokenizer = load_to_generate(arguments)
    encoder = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=arguments.chat)
    if arguments.chat and prints:  # a conversation prints the answer alone, without the question
        return model, Conversation(model, tokenizer, encoder, arguments).answer(arguments.prompt)

    content = chat_turn(arguments.prompt, arguments.system) if arguments.chat else arguments.prompt
    prompts = encode_prompts(encoder, [Prompt(content)], limits_of(model), arguments.num_tokens)
    choose_frequencies(model, len(prompts[0]) + arguments.num_tokens)
    printer = TextPrinter(tokenizer, arguments.stop, shows_prompt=True) if prints else None
    (generated,) = generate(model, tokenizer, prompts, arguments, end_ids=encoder.end_ids, printer=printer)
    return model, generated


class Conversation:
    """A chat with a model. Each answer has its own random stream."""

    def __init__(self, model: Any, tokenizer: Any, encoder: PromptEncoder, settings: GenerateArguments) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._settings = settings
        self._num_answers = 0
        self._history: list[Message] = []

    def reset(self) -> None:
        """Forget the turns so far."""
        self._history = []

    def answer(self, text: str) -> GeneratedText:
        """Print the answer to a user's turn as it is generated; Ctrl-C stops it. Both turns become history.

        Raise an InputError if the conversation is too long for the model or its template refuses it; the turn is
        dropped.
        """
        system = None if self._history else self._settings.system
        messages = [*self._history, *chat_turn(text, system).messages]
        prompt = Prompt(Chat(messages), "the conversation")
        (prompt_ids,) = encode_prompts(self._encoder, [prompt], limits_of(self._model), self._settings.num_tokens)
        choose_frequencies(self._model, len(prompt_ids) + self._settings.num_tokens)
        with _counted_interrupts() as interrupts:
            (generated,) = generate(
                self._model,
                self._tokenizer,
                [prompt_ids],
                self._settings,
                end_ids=self._encoder.end_ids,
                prompt_numbers=[self._num_answers],
                printer=TextPrinter(self._tokenizer, self._settings.stop),
                is_interrupted=lambda: bool(interrupts),
            )
        self._num_answers += 1
        self._history = [*messages, {"role": "assistant", "content": generated.text}]
        return generated


def chat_in_terminal(conversation: Conversation) -> None:
    """Answer the lines of standard input until it ends, or until /exit. Only answers are written to standard output.

    If standard input is not a terminal, a line that cannot be answered ends the program.
    """
    if sys.stdin is None:
        raise InputError("--chat: standard input is closed, so no question can be read; give one with --prompt")
    is_terminal = sys.stdin.isatty()
    lines = _typed_lines() if is_terminal else sys.stdin.buffer
    for line_number, line in enumerate(lines, 1):
        if line_number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip() == b"/exit":
            return
        fault = _answer_line(conversation, line)
        if fault is not None and is_terminal:
            print(f"error: {fault}", file=sys.stderr)
        elif fault is not None:  # nobody is there to ask again
            raise InputError(f"standard input, line {line_number}: {fault}; this and later lines are unanswered")


def _answer_line(conversation: Conversation, line: bytes) -> str | None:
    """Answer a line, or forget the conversation on /reset; return what is wrong with the line, or None."""
    try:
        text = line.decode("utf-8").strip()
        if text == "/reset":
            conversation.reset()
        elif text:
            conversation.answer(text)
    except UnicodeDecodeError as error:
        return f"byte {error.start} is not UTF-8"
    except InputError as error:
        return f"{error}; /reset clears the conversation"
    return None


def _typed_lines() -> Iterator[bytes]:
    """Ask for lines on the terminal until Ctrl-D, and yield them as UTF-8 or, if they are not UTF-8, as typed."""
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

    def receive(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)
        signal.signal(signal.SIGINT, usual_handler)

    usual_handler = signal.signal(signal.SIGINT, receive)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, usual_handler)
