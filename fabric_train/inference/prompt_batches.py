"""Generate texts for a file of prompts, in batches, into a file of JSON lines that a killed program continues."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular, open_to_write
from fabric_train.files.typed_json import parse_json
from fabric_train.inference.generate import GeneratedText, GenerationSettings, generate
from fabric_train.inference.prompts import Prompt

_FIX = "give another --output, or remove it"


class OutputFile:
    """The file of generated texts: a line for each prompt, in their order.

    A line has ``line`` (of the prompt in its file), ``prompt`` or ``messages``, ``text``, ``num_tokens``, ``ended_by``,
    ``model`` and ``settings``, so that a program that continues the file can check that it is the same work.

    Args:
        path: may have the first lines already; a last line that is cut off is removed when the file is written to.
        prompts: all of them.
        settings: of the generation.

    Raises:
        InputError: a line is damaged, or is of another prompt or other settings.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], settings: GenerationSettings) -> None:
        self.path, self._prompts = path, prompts
        self._settings = asdict(settings) | {"stop": list(settings.stop)}
        self._model: str | None = None
        if not path.absolute().parent.is_dir():
            raise InputError(f"--output {path}: {path.absolute().parent} is not a folder; create it, or give another")
        self._size, self.num_done = self._check_lines() if path.exists() else (0, 0)

    def check_model(self, model: str) -> None:
        """Check that the lines so far are of this model.

        Raises:
            InputError: they are not.
        """
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
        """Return the bytes of the complete lines, and their number."""
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
    settings: GenerationSettings,
    output: OutputFile,
    batch_size: int,
    end_ids: Sequence[int] = (),
) -> None:
    """Generate a text for every prompt whose line is missing, with a progress bar, and print a summary.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: the model's tokenizer.
        prompts: ids of all prompts.
        settings: how tokens are chosen.
        output: the file to write.
        batch_size: prompts that are continued together. Of a greedy text, only rounding depends on it.
        end_ids: tokens that end a text; see ``generate``.
    """
    from rich.progress import Progress

    from fabric_train.cli.output import open_console

    num_tokens, found, start = 0, output.num_done, time.perf_counter()
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


def _given(prompt: Prompt) -> dict[str, Any]:
    content = prompt.content
    return {"line": prompt.line} | ({"prompt": content} if isinstance(content, str) else {"messages": content.messages})
