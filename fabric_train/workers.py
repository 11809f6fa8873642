"""Worker processes that apply one function to many items, and that end when their parent process ends.

``concurrent.futures`` is not used: it forks while its own threads run, which can hang on Python 3.10. A fork before any
thread starts gives every process the loaded tokenizer and the imported modules without a copy.
"""

import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

_SECONDS_BETWEEN_LINES = 3.0
ShowShare = Callable[..., None]  # of the work, and perhaps more about it
_ITEMS_AHEAD = 2  # per process: the one it works on and the next one
_NO_MORE = object()
Item = TypeVar("Item")
Result = TypeVar("Result")
# fork only on Linux: elsewhere system libraries do not survive it
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@contextmanager
def progress_of(what: str) -> Iterator[ShowShare]:
    """Yield the function that shows which share of a step, such as ``near duplicates``, is done; call it often.

    It may also be given more words, which show the current work and how long the rest may take.
    """
    started = time.monotonic()
    log = ThrottledLog()

    def show_line(share: float, more: str = "") -> None:
        seconds = time.monotonic() - started
        left = f", about {seconds * (1 - share) / share:.0f} s left" if more and share else ""
        log(f"{what}: {share:.0%}{', ' if more else ''}{more}{left}")

    if not sys.stderr.isatty():
        yield show_line
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from fabric_train.cli.output import open_console

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True)) as bar:
        task = bar.add_task(what, total=1)
        yield lambda share, more="": bar.update(task, completed=share, description=more or what)


@contextmanager
def transient_bar(what: str, *columns: "ProgressColumn") -> Iterator[tuple["Progress", "TaskID"]]:
    """Show a progress bar with one task on standard error, if that is a terminal, until the block ends."""
    from rich.progress import BarColumn, Progress, TextColumn

    from fabric_train.cli.output import open_console

    console = open_console(stderr=True)
    shown = (TextColumn(what), BarColumn(), *columns)
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task("")


class ThrottledLog:
    """A log on standard error that prints at most one line every few seconds."""

    def __init__(self) -> None:
        self._last_printed = time.monotonic()

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_printed >= _SECONDS_BETWEEN_LINES:
            self._last_printed = now
            print(line, file=sys.stderr, flush=True)


class Worker(Generic[Item, Result]):
    """A process that applies ``function`` to the items it is sent."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self.connection, other = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(function, other), daemon=True)
        self.process.start()
        other.close()

    def send(self, item: Item) -> None:
        """Send the next item, which returns soon also while a result is sent; ChildProcessError if it was killed."""
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._killed() from None

    def receive(self) -> Result:
        """Return the next result, or raise the exception of ``function``; ChildProcessError if it was killed."""
        try:
            result, error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._killed() from None
        if error is not None:
            raise error
        return result

    def _killed(self) -> ChildProcessError:
        self.process.join(timeout=5)
        code = self.process.exitcode or 0
        by = f" by {signal.Signals(-code).name}" if code < 0 else ""
        return ChildProcessError(f"a tokenizing process was killed{by}; if memory ran out, use a smaller --num_proc")

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self.process.kill()
        self.connection.close()


class WorkerPool(Generic[Item, Result]):
    """A context manager of ``num_proc`` processes; ``describe`` names what one reads, if it is killed meanwhile."""

    def __init__(self, function: Callable[[Item], Result], num_proc: int, describe: Callable[[Item], str]) -> None:
        self._describe = describe
        gc.freeze()  # a collection would visit all loaded objects, and so copy their memory pages in every process
        gc.enable()
        self._workers: list[Worker[Item, Result]] = [Worker(function) for _ in range(num_proc)]

    def __enter__(self) -> "WorkerPool[Item, Result]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        if kind is not None:  # the caller may remove the files that they write
            for worker in self._workers:
                worker.process.join()

    def run(self, items: Iterator[Item], tick_seconds: float) -> Iterator[tuple[Item, Result] | None]:
        """Yield items with their results in the order in which they finish.

        Yields None too: once after the first items are sent, and whenever ``tick_seconds`` pass without a result. Items
        are taken in order, as processes become free; none of them is None. An exception of the function is raised
        again; ChildProcessError if a process was killed.
        """
        queues: dict[Any, tuple[Worker[Item, Result], deque[Item]]] = {
            worker.connection: (worker, deque()) for worker in self._workers
        }

        def send() -> None:
            for _ in range(_ITEMS_AHEAD):
                for worker, sent in queues.values():
                    if len(sent) < _ITEMS_AHEAD and (item := next(items, None)) is not None:
                        sent.append(item)
                        with self._naming(sent[0]):
                            worker.send(item)

        send()
        yield None
        while busy := [one for one, (_, sent) in queues.items() if sent]:
            ready = connection.wait(busy, timeout=tick_seconds)
            for one in ready:
                worker, sent = queues[one]
                with self._naming(sent[0]):
                    result = worker.receive()
                yield sent.popleft(), result
            if not ready:
                yield None
            send()

    @contextmanager
    def _naming(self, item: Item) -> Iterator[None]:
        try:
            yield
        except ChildProcessError as error:
            raise ChildProcessError(f"while reading {self._describe(item)}, {error}") from None


def _serve(function: Callable[[Any], Any], pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent kills this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, items), daemon=True).start()
    while (item := items.get()) is not _NO_MORE:
        answer: tuple[Any, Exception | None]
        try:
            answer = (function(item), None)
        except Exception as error:  # noqa: BLE001 - the parent raises it again
            answer = (None, error)
        pipe.send(answer)


def _receive(pipe: Any, items: "queue.SimpleQueue[Any]") -> None:
    """Put what comes through the pipe into ``items``; a thread does, as both ends could be sending for ever."""
    while True:
        try:
            items.put(pipe.recv())
        except (EOFError, OSError):
            items.put(_NO_MORE)
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
