"""How far tokenization is: a bar on a terminal, a plain line every few seconds elsewhere; on standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 3.0

Show = Callable[[int, int, int], None]  # bytes, documents and tokens done


@contextmanager
def progress(total: int) -> Iterator[Show]:
    """Yield what shows that so many bytes of ``total`` are done, and documents and tokens; to be called often."""
    with _bar(total) if sys.stderr.isatty() else _lines(total) as show:
        yield show


@contextmanager
def _bar(total: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    counts = _Counts()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda done, documents, tokens: bar.update(
            task, completed=min(done, total), description=counts.describe(documents, tokens)
        )


@contextmanager
def _lines(total: int) -> Iterator[Show]:
    counts = _Counts()
    pulse = Pulse()

    def show(done: int, documents: int, tokens: int) -> None:
        share = min(done / max(total, 1), 1)
        left = f", about {counts.seconds() * (1 - share) / share:.0f} s left" if done else ""
        pulse(f"tokenizing: {share:.0%}, {counts.describe(documents, tokens)}{left}")

    yield show


class _Counts:
    """Words for what is done, with the speed since the beginning."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def describe(self, documents: int, tokens: int) -> str:
        return f"{documents:,} documents, {tokens:,} tokens, {tokens / self.seconds():,.0f} tokens/s"


class Pulse:
    """Prints a line given to it on standard error, when the last one is some seconds ago."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        """Print ``line`` or pass over it."""
        now = time.monotonic()
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            print(line, file=sys.stderr, flush=True)
