"""Show the progress of tokenization on standard error: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 3.0

ShowProgress = Callable[[int, int, int], None]  # bytes, documents and tokens done
ShowShare = Callable[[float], None]  # of the work


@contextmanager
def progress(total: int) -> Iterator[ShowProgress]:
    """Yield the function that shows the progress; call it often.

    Args:
        total: bytes to read.
    """
    with _bar(total) if sys.stderr.isatty() else _lines(total) as show:
        yield show


@contextmanager
def progress_of(what: str) -> Iterator[ShowShare]:
    """Yield the function that shows which share of a step is done; call it often.

    Args:
        what: the step, such as ``near duplicates``.
    """
    if sys.stderr.isatty():
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        from fabric_train.cli.output import open_console

        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=open_console(stderr=True)) as bar:
            task = bar.add_task(what, total=1)
            yield lambda share: bar.update(task, completed=share)
    else:
        log = ThrottledLog()
        yield lambda share: log(f"{what}: {share:.0%}")


@contextmanager
def _bar(total: int) -> Iterator[ShowProgress]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from fabric_train.cli.output import open_console

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    counts = _Counts()
    with Progress(*columns, console=open_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda done, documents, tokens: bar.update(
            task, completed=min(done, total), description=counts.describe(documents, tokens)
        )


@contextmanager
def _lines(total: int) -> Iterator[ShowProgress]:
    counts = _Counts()
    log = ThrottledLog()

    def show(done: int, documents: int, tokens: int) -> None:
        share = min(done / max(total, 1), 1)
        left = f", about {counts.seconds() * (1 - share) / share:.0f} s left" if done else ""
        log(f"tokenizing: {share:.0%}, {counts.describe(documents, tokens)}{left}")

    yield show


class _Counts:
    """A description of documents and tokens done, with the mean speed."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def describe(self, documents: int, tokens: int) -> str:
        return f"{documents:,} documents, {tokens:,} tokens, {tokens / self.seconds():,.0f} tokens/s"


class ThrottledLog:
    """A log on standard error that prints at most one line every few seconds."""

    def __init__(self) -> None:
        self._last_printed = time.monotonic()

    def __call__(self, line: str) -> None:
        """Print ``line`` unless the last line is too recent."""
        now = time.monotonic()
        if now - self._last_printed >= _SECONDS_BETWEEN_LINES:
            self._last_printed = now
            print(line, file=sys.stderr, flush=True)
