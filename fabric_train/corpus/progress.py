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


def show_progress(documents: Iterable[EncodedDocument], goal: Goal) -> Iterator[EncodedDocument]:
    """Pass the documents on and show documents, tokens, tokens/s and the time left."""
    console = Console(stderr=True)
    with _bar(console, goal.total) if console.is_terminal else _lines(goal.total, console) as show:
        started = time.monotonic()
        num_tokens = done = 0
        for num_documents, document in enumerate(documents, 1):
            num_tokens += len(document.input_ids)
            done += len(document.input_ids) if goal.unit == "tokens" else document.num_characters
            rate = num_tokens / max(time.monotonic() - started, 1e-9)
            show(done, f"{num_documents:,} documents, {num_tokens:,} tokens, {rate:,.0f} tokens/s")
            yield document


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda done, text: progress.update(task, completed=min(done, total), description=text)


@contextmanager
def _lines(total: int, console: Console) -> Iterator[Callable[[int, str], None]]:
    started = said = time.monotonic()

    def show(done: int, text: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= _SECONDS_BETWEEN_LINES:
            said = now
            left = (now - started) * (total - done) / max(done, 1)
            console.print(
                f"tokenizing: {min(done / total, 1):.0%}, {text}, about {max(left, 0):.0f} s left", soft_wrap=True
            )

    yield show
