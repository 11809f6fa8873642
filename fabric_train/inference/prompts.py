"""Prompts: make token ids of them, and write the text of each of a file, or answer turn by turn in a terminal."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from fabric_train.cli.argument_types import parse_size
from fabric_train.cli.errors import InputError, set_memory_advice
from fabric_train.files.regular_file import open_regular, open_to_write, parse_json
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import GeneratedText, TextPrinter, generate
from fabric_train.inference.prompt_file import Prompt, chat_turn, read_prompts
from fabric_train.model.rope_frequencies import choose_frequencies
from fabric_train.reading.documents import BadRowError, Chat, Message
from fabric_train.tokenization.chats.chat_encoder import own_template
from fabric_train.tokenization.chats.chat_template import ChatTemplate, Rendering
from fabric_train.tokenization.chats.shown_messages import ShownMessages

_FIX = "give another --output, or remove it"
_SETTINGS = ("num_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")
"""The arguments that decide a text, with model and prompt."""
_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends; Ctrl-C stops an answer"


class PromptEncoder:
    """Make the token ids of prompts, among which there may be chats if ``prompts_chats``.

    ``end_ids`` has the token that ends the assistant's turn, if chats are prompted and the template writes one.
    """

    def __init__(self, tokenizer: Any, name: str, prompts_chats: bool) -> None:
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._shown: ShownMessages | None = None
        self.not_shown: set[str] = set()  # keys of messages of files, so far
        self.end_ids: tuple[int, ...] = ()
        if prompts_chats:
            self._template = own_template(tokenizer, f"give a model that has learned to chat instead of {name}")
            if self._template is None:
                raise InputError(
                    f"{name} has no chat template: it is a base model, which continues texts; leave --chat, --system "
                    "and messages out, or give a model that has learned to chat"
                )
            self._shown = ShownMessages(self._template)
            if self._template.end_of_turn:
                self.end_ids = (tokenizer.convert_tokens_to_ids(self._template.end_of_turn),)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a prompt: a text after one BOS, or a chat in the template's form.

        InputError if the template refuses a chat, or leaves out a part of one that was read from a file.
        """
        chat = prompt.content
        if isinstance(chat, str):
            return encode_text(self._tokenizer, chat)
        assert self._template is not None
        assert self._shown is not None
        messages = self._shown.messages(chat)
        variables = chat.template_variables
        try:
            text = self._template.render(messages, chat.tools, generation_prompt=True, variables=variables)
            if prompt.is_from_file:
                rendering = Rendering(messages, chat.tools, variables, text, generated=[], is_prompt=True)
                self.not_shown |= self._shown.check(rendering, frozenset())
        except BadRowError as error:
            raise InputError(f"{prompt.place}: {error}") from None
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the text's ids after exactly one BOS, as at the start of a document in training."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


@dataclass(frozen=True)
class PromptLimits:
    """What a model can take: token ids below ``vocab_size``, and ``max_positions`` tokens, None for no limit."""

    vocab_size: int
    max_positions: int | None


def limits_of(model: Any) -> PromptLimits:
    """Return the size of a model's vocabulary and its number of positions, None if it is not limited."""
    vocab_size: int = model.get_input_embeddings().weight.shape[0]
    return PromptLimits(vocab_size, getattr(model.config.get_text_config(), "max_position_embeddings", None))


def encode_prompts(
    encoder: PromptEncoder, prompts: list[Prompt], limits: PromptLimits, num_tokens: int, option: str = "--num_tokens"
) -> list[list[int]]:
    """Return the ids of prompts; an InputError has each that cannot be continued by ``num_tokens`` of ``option``.

    A line on standard error names what the chat template does not show of chats in files.
    """
    encoded = [encoder.encode(prompt) for prompt in prompts]
    faults = []
    if encoder.not_shown:
        print(f"the chat template does not show {', '.join(sorted(encoder.not_shown))}", file=sys.stderr)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            faults.append(f"{prompt.place} has no tokens: give some text")
        elif max(ids) >= limits.vocab_size:
            faults.append(
                f"{prompt.place} has token id {max(ids)}, but the model's vocabulary ends at {limits.vocab_size - 1}: "
                "use the model's own tokenizer"
            )
        elif limits.max_positions is not None and len(ids) + num_tokens > limits.max_positions:
            faults.append(
                f"{prompt.place} has {len(ids)} tokens, which with {option} {num_tokens} exceed the model's "
                f"{limits.max_positions} positions: shorten it, or give a smaller {option}"
            )
    if faults:
        raise InputError(*faults)
    return encoded


class OutputFile:
    """The file of generated texts: a line for each prompt, in their order.

    A line has ``line`` (of the prompt in its file), ``prompt`` or ``messages``, ``text``, ``num_tokens``, ``ended_by``,
    ``model`` and ``settings``, so that a program that continues the file can check that it is the same work. The file
    may have the first lines already; a last line that is cut off is removed when it is written to.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], settings: GenerateArguments) -> None:
        self.path = path
        self._prompts = prompts
        self._settings = {name: getattr(settings, name) for name in _SETTINGS}
        self._model: str | None = None
        if not path.absolute().parent.is_dir():
            raise InputError(f"--output {path}: {path.absolute().parent} is not a folder; create it, or give another")
        self._size, self.num_done = self._check_lines() if path.exists() else (0, 0)

    def check_model(self, model: str) -> None:
        """Raise an InputError if the lines so far are of another model."""
        if self._model not in (None, model):
            raise InputError(f"{self.path} has texts of {self._model}, not of {model}; {_FIX}")
        self._model = model

    @contextmanager
    def open(self) -> Iterator[Callable[[Sequence[GeneratedText]], None]]:
        """Yield a function that writes the texts of the next prompts, in their order."""
        with open_to_write(self.path, "a", newline="") as file:
            file.truncate(self._size)
            yield lambda texts: self._write(file, texts)

    def _write(self, file: TextIO, texts: Sequence[GeneratedText]) -> None:
        for prompt, generated in zip(self._prompts[self.num_done :], texts, strict=False):
            row = _given(prompt) | {
                "text": generated.text,
                "num_tokens": len(generated.new_ids),
                "ended_by": generated.ended_by,
                "model": self._model,
                "settings": self._settings,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
        self.num_done += len(texts)

    def _check_lines(self) -> tuple[int, int]:
        with open_regular(self.path, _FIX) as file:
            content = file.read()
        size = content.rfind(b"\n") + 1
        lines = content[:size].splitlines()
        if len(lines) > len(self._prompts):
            raise InputError(f"{self.path} has {len(lines)} lines for {len(self._prompts)} prompts; {_FIX}")
        for number, (line, prompt) in enumerate(zip(lines, self._prompts, strict=False), 1):
            try:
                row = parse_json(line, dict)
            except ValueError as error:
                raise InputError(f"{self.path}, line {number}: damaged ({error}); {_FIX}") from None
            if any(row.get(name) != value for name, value in _given(prompt).items()):
                raise InputError(f"{self.path}, line {number}: not of {prompt.place}; {_FIX}")
            if row.get("settings") != self._settings:
                raise InputError(f"{self.path}, line {number}: generated with other settings; {_FIX}")
            self.check_model(str(row.get("model")))
        return size, len(lines)


def generate_for_file(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerateArguments,
    output: OutputFile,
    end_ids: Sequence[int] = (),
) -> None:
    """Generate a text for every prompt whose line is missing, with a progress bar, and print a summary.

    ``settings.batch_size`` prompts are continued together. Of a greedy text, only rounding depends on it.
    """
    from rich.progress import Progress

    from fabric_train.cli.output import open_console

    num_tokens = 0
    found = output.num_done
    start = time.perf_counter()
    batch_size = settings.batch_size
    with output.open() as write, Progress(console=open_console(stderr=True)) as bar:
        task = bar.add_task("generating", total=len(prompts), completed=found)
        for begin in range(found, len(prompts), batch_size):
            batch = prompts[begin : begin + batch_size]
            numbers = range(begin, begin + len(batch))
            texts = generate(model, tokenizer, batch, settings, end_ids=end_ids, numbers=numbers)
            write(texts)
            num_tokens += sum(len(one.new_ids) for one in texts)
            bar.update(task, completed=begin + len(batch))
    seconds = time.perf_counter() - start
    kept = f", {found:,} were there" if found else ""
    speed = f"{num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s"
    print(f"{len(prompts) - found:,} texts{kept}: {speed} → {output.path}", file=sys.stderr)


def write_texts(arguments: GenerateArguments) -> None:
    """Write a line of ``--output`` for each prompt of the file ``--prompts``."""
    assert arguments.prompts is not None
    assert arguments.output is not None
    prompts = read_prompts(Path(arguments.prompts), chat=arguments.chat, system=arguments.system)
    output = OutputFile(Path(arguments.output), prompts, arguments)
    model, tokenizer = load_model(arguments)
    output.check_model(model.name_or_path)
    encoder = PromptEncoder(tokenizer, arguments.model_name, any(prompt.is_chat for prompt in prompts))
    encoded = encode_prompts(encoder, prompts, limits_of(model), arguments.num_tokens)
    choose_frequencies(model, max(map(len, encoded)) + arguments.num_tokens)
    generate_for_file(model, tokenizer, encoded, arguments, output, encoder.end_ids)


def continue_prompt(arguments: GenerateArguments, *, prints: bool = False) -> tuple[Any, GeneratedText]:
    """Return the model and its text after ``--prompt``; with ``prints``, print both as the text is generated."""
    assert arguments.prompt is not None
    model, tokenizer = load_model(arguments)
    encoder = PromptEncoder(tokenizer, arguments.model_name, arguments.chat)
    if arguments.chat and prints:
        return model, Conversation(model, tokenizer, encoder, arguments).answer(arguments.prompt)
    prompt = Prompt(chat_turn(arguments.prompt, arguments.system) if arguments.chat else arguments.prompt)
    prompts = encode_prompts(encoder, [prompt], limits_of(model), arguments.num_tokens)
    choose_frequencies(model, len(prompts[0]) + arguments.num_tokens)
    printer = TextPrinter(tokenizer, arguments.stop, shows_prompt=True) if prints else None
    return model, generate(model, tokenizer, prompts, arguments, end_ids=encoder.end_ids, printer=printer)[0]


def load_model(arguments: GenerateArguments) -> tuple[Any, Any]:
    """Load the model and its tokenizer."""
    from fabric_train.inference.load_model import load_for_inference

    set_memory_advice("give a smaller --batch_size or --num_tokens, or a smaller --device_memory")
    gpu_bytes = parse_size(arguments.device_memory) if arguments.device_memory else None
    return load_for_inference(arguments.model_name, base_model=arguments.base_model, gpu_bytes=gpu_bytes)


def _given(prompt: Prompt) -> dict[str, Any]:
    content = prompt.content
    return {"line": prompt.line} | ({"prompt": content} if isinstance(content, str) else {"messages": content.messages})


class Conversation:
    """A chat with a model. Each answer has a random stream of its own."""

    def __init__(self, model: Any, tokenizer: Any, encoder: PromptEncoder, settings: GenerateArguments) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._settings = settings
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
        choose_frequencies(self._model, len(ids) + self._settings.num_tokens)
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
