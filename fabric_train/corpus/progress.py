"""How far tokenization is: a bar on a terminal, a plain line every few seconds elsewhere; on standard error."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fabric_train.corpus.encoder import EncodedDocument

_SECONDS_BETWEEN_LINES = 3.0


@dataclass(frozen=True)
class Goal:
    """What is counted until it reaches ``total``: characters, or tokens where the cap on tokens ends the work."""

    unit: str
    total: int


def show_progress(batches: Iterable[list[EncodedDocument]], goal: Goal) -> Iterator[EncodedDocument]:
    """Pass the documents on, and show documents, tokens, tokens/s and the time left after each batch."""
    console = Console(stderr=True)
    with _bar(console, goal.total) if console.is_terminal else _lines(goal.total, console) as show:
        started = time.monotonic()
        num_documents = num_tokens = num_characters = 0
        for batch in batches:
            num_documents += len(batch)
            num_tokens += sum(len(document.input_ids) for document in batch)
            num_characters += sum(document.num_characters for document in batch)
            rate = num_tokens / max(time.monotonic() - started, 1e-9)
            done = num_tokens if goal.unit == "tokens" else num_characters
            show(done, f"{num_documents:,} documents, {num_tokens:,} tokens, {rate:,.0f} tokens/s")
            yield from batch


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda done, text: progress.update(task, completed=min(done, total), description=text)


@contextmanager
def _lines(total: int, console: Console) -> Iterator[Callable[[int, str], None]]:
    started = time.monotonic()
    pulse = Pulse(console)

    def show(done: int, text: str) -> None:
        left = (time.monotonic() - started) * (total - done) / max(done, 1)
        pulse(f"tokenizing: {min(done / total, 1):.0%}, {text}, about {max(left, 0):.0f} s left")

    yield show


class Pulse:
    """Prints a line given to it on standard error, when the last one is some seconds ago."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        """Print ``line`` or pass over it."""
        now = time.monotonic()
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
