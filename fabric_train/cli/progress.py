"""Show the progress of a step on standard error: a bar on a terminal, or a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fabric_train.cli.output import open_console

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

_SECONDS_BETWEEN_LINES = 3.0
ShowShare = Callable[..., None]  # with the share of the work that is done, and perhaps words about the current work


@contextmanager
def progress_of(step: str) -> Iterator[ShowShare]:
    """Yield a function that shows which share of a step, such as ``near duplicates``, is done; call it often.

    It also accepts words about the current work, which are shown together with the remaining time.
    """
    if not sys.stderr.isatty():
        yield _lines_of_progress(step)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True)) as progress:
        task = progress.add_task(step, total=1)

        def update_bar(share: float, current_work: str = "") -> None:
            progress.update(task, completed=share, description=current_work or step)

        yield update_bar


def _lines_of_progress(step: str) -> ShowShare:
    """Return a function that prints lines, for a log file."""
    started = time.monotonic()
    log = ThrottledLog()

    def print_line(share: float, current_work: str = "") -> None:
        line = f"{step}: {share:.0%}"
        if current_work:
            line += f", {current_work}"
            if share:
                seconds = time.monotonic() - started
                remaining_seconds = seconds * (1 - share) / share
                line += f", about {remaining_seconds:.0f} s left"
        log(line)

    return print_line


@contextmanager
def transient_bar(step: str, *columns: "ProgressColumn") -> Iterator[tuple["Progress", "TaskID"]]:
    """Show a progress bar with one task on standard error, if that is a terminal, until the block ends.

    ``columns`` are shown after the name of the step and the bar.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    console = open_console(stderr=True)
    all_columns = (TextColumn(step), BarColumn(), *columns)
    with Progress(*all_columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("")


class ThrottledLog:
    """A log on standard error that prints at most one line every few seconds."""

    def __init__(self) -> None:
        self._last_printed = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_printed >= _SECONDS_BETWEEN_LINES:
            self._last_printed = now
            print(line, file=sys.stderr, flush=True)
