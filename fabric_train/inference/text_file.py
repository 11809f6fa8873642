"""Write a generated text for each prompt in a file, and continue a file of texts that is not complete."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular, open_to_write
from fabric_train.files.typed_json import parse_json
from fabric_train.inference.arguments import GenerateArguments
from fabric_train.inference.generate import GeneratedText, generate
from fabric_train.inference.load_model import load_to_generate
from fabric_train.inference.prompt_file import Prompt, read_prompts
from fabric_train.inference.prompts import PromptEncoder, encode_prompts, limits_of
from fabric_train.model.rope_frequencies import choose_frequencies

_FIX = "give another --output, or remove it"
_SETTINGS = ("num_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")
"""The arguments that decide a text, in addition to model and prompt."""


def write_texts(arguments: GenerateArguments) -> None:
    """Write a line of ``--output`` for each prompt of the file ``--prompts``."""
    assert arguments.prompts is not None
    assert arguments.output is not None
    prompts = read_prompts(Path(arguments.prompts), chat=arguments.chat, system=arguments.system)
    output = OutputFile(Path(arguments.output), prompts, arguments)
    model, tokenizer = load_to_generate(arguments)
    output.check_model(model.name_or_path)
    has_chats = any(prompt.is_chat for prompt in prompts)
    encoder = PromptEncoder(tokenizer, arguments.model_name, prompts_chats=has_chats)
    encoded = encode_prompts(encoder, prompts, limits_of(model), arguments.num_tokens)
    longest = max(map(len, encoded))
    choose_frequencies(model, longest + arguments.num_tokens)
    generate_for_file(model, tokenizer, encoded, arguments, output, end_ids=encoder.end_ids)


def generate_for_file(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: GenerateArguments,
    output: "OutputFile",
    end_ids: Sequence[int] = (),
) -> None:
    """Generate a text for every prompt whose line is missing, with a progress bar, and print a summary.

    ``prompts`` are the ids of all prompts. ``settings.batch_size`` of them are continued together, which changes a
    greedy text only by rounding.
    """
    from rich.progress import Progress

    from fabric_train.cli.output import open_console

    num_tokens = 0
    num_stored = output.num_done
    start = time.perf_counter()
    with output.open() as write, Progress(console=open_console(stderr=True)) as bar:
        task = bar.add_task("generating", total=len(prompts), completed=num_stored)
        for begin in range(num_stored, len(prompts), settings.batch_size):
            batch = prompts[begin : begin + settings.batch_size]
            end = begin + len(batch)
            prompt_numbers = range(begin, end)  # the random stream of a prompt does not depend on its batch
            texts = generate(model, tokenizer, batch, settings, end_ids=end_ids, prompt_numbers=prompt_numbers)
            write(texts)
            num_tokens += sum(len(text.new_ids) for text in texts)
            bar.update(task, completed=end)
    seconds = time.perf_counter() - start
    stored = f", {num_stored:,} already done" if num_stored else ""
    speed = f"{num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:.1f} tokens/s"
    print(f"{len(prompts) - num_stored:,} texts{stored}: {speed} → {output.path}", file=sys.stderr)


class OutputFile:
    """The file of generated texts, which has a line for each prompt, in order.

    A line has ``line`` (of the prompt in its file), ``prompt`` or ``messages``, ``text``, ``num_tokens``, ``ended_by``,
    ``model`` and ``settings``, so that a program that continues the file can check that it is the same work. The file
    may already have the first lines; a last line that was cut off is removed before more is written.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], settings: GenerateArguments) -> None:
        self.path = path
        self._prompts = prompts
        self._settings = {name: getattr(settings, name) for name in _SETTINGS}
        self._model: str | None = None
        self._size = 0
        """Bytes of the complete lines."""
        self.num_done = 0
        """Lines that are complete."""
        if not path.absolute().parent.is_dir():
            raise InputError(f"--output {path}: {path.absolute().parent} is not a folder; create it, or give another")
        if path.exists():
            self._check_lines()

    def _check_lines(self) -> None:
        """Check that the lines so far have the same prompts, settings and model, and count them."""
        with open_regular(self.path, _FIX) as file:
            content = file.read()
        self._size = content.rfind(b"\n") + 1  # a last line without its end was cut off
        lines = content[: self._size].splitlines()
        if len(lines) > len(self._prompts):
            raise InputError(f"{self.path} has {len(lines)} lines for {len(self._prompts)} prompts; {_FIX}")
        for line_number, (line, prompt) in enumerate(zip(lines, self._prompts, strict=False), 1):
            try:
                row = parse_json(line, dict)
            except ValueError as error:
                raise InputError(f"{self.path}, line {line_number}: damaged ({error}); {_FIX}") from None
            for name, value in _prompt_fields(prompt).items():
                if row.get(name) != value:
                    raise InputError(f"{self.path}, line {line_number}: does not belong to {prompt.place}; {_FIX}")
            if row.get("settings") != self._settings:
                raise InputError(f"{self.path}, line {line_number}: generated with different settings; {_FIX}")
            self.check_model(str(row.get("model")))
        self.num_done = len(lines)

    def check_model(self, model: str) -> None:
        """Raise an InputError if another model wrote the lines so far."""
        if self._model not in (None, model):
            raise InputError(f"{self.path} has texts from {self._model}, not from {model}; {_FIX}")
        self._model = model

    @contextmanager
    def open(self) -> Iterator[Callable[[Sequence[GeneratedText]], None]]:
        """Yield a function that writes the texts of the next prompts, in order."""
        with open_to_write(self.path, "a", newline="") as file:
            file.truncate(self._size)
            yield lambda texts: self._write(file, texts)

    def _write(self, file: TextIO, texts: Sequence[GeneratedText]) -> None:
        """Write the lines of the next prompts, and sync them to the disk."""
        for prompt, generated in zip(self._prompts[self.num_done :], texts, strict=False):
            row = _prompt_fields(prompt) | {
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


def _prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of an output line that identify its prompt."""
    content = prompt.content
    if isinstance(content, str):
        return {"line": prompt.line, "prompt": content}
    return {"line": prompt.line, "messages": content.messages}
