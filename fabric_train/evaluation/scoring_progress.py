"""Show the progress of scoring on standard error: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fabric_train.cli.output import open_console
from fabric_train.tokenization.progress import ThrottledLog

ShowScored = Callable[[str, int], None]  # the model, and further tokens scored


@contextmanager
def scoring_progress(total: int) -> Iterator[ShowScored]:
    """Yield the function that shows the progress; ``total`` are the tokens to score."""
    with _bar(total) if sys.stderr.isatty() else _lines(total) as show:
        yield show


@contextmanager
def _bar(total: int) -> Iterator[ShowScored]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=open_console(stderr=True)) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda model, tokens: bar.update(task, advance=tokens, description=model)


@contextmanager
def _lines(total: int) -> Iterator[ShowScored]:
    log, started, scored = ThrottledLog(), time.monotonic(), 0

    def show(model: str, tokens: int) -> None:
        nonlocal scored
        scored += tokens
        left = (time.monotonic() - started) * (total - scored) / scored if scored else 0
        log(f"scoring {model}: {scored:,} of {total:,} tokens, about {max(left, 0):.0f} s left")

    yield show
