"""Apply one function to many items in worker processes, which end when their parent process ends.

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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

_ITEMS_AHEAD = 2  # per process: the one it works on and the next one
_NO_MORE = object()
Item = TypeVar("Item")
Result = TypeVar("Result")
# fork only on Linux: elsewhere system libraries do not survive it
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


class Worker(Generic[Item, Result]):
    """A process that applies ``function`` to the items that it is sent."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self.connection, process_connection = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(function, process_connection), daemon=True)
        self.process.start()
        process_connection.close()  # the process has a copy

    def send(self, item: Item) -> None:
        """Send the next item. The process may still compute or send a result: it takes the item afterwards.

        Raises:
            ChildProcessError: the process was killed.
        """
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise self._killed_error() from None

    def receive(self) -> Result:
        """Wait for the next result and return it, or raise the exception of ``function``.

        Raises:
            ChildProcessError: the process was killed.
        """
        try:
            result, error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._killed_error() from None
        if error is not None:
            raise error
        return result

    def _killed_error(self) -> ChildProcessError:
        self.process.join(timeout=5)
        exit_code = self.process.exitcode or 0
        killer = f" by {signal.Signals(-exit_code).name}" if exit_code < 0 else ""
        return ChildProcessError(
            f"a tokenizing process was killed{killer}; if memory ran out, use a smaller --num_proc"
        )

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self.process.kill()
        self.connection.close()


class WorkerPool(Generic[Item, Result]):
    """A context manager of ``num_proc`` processes that apply ``function`` to items.

    ``describe`` names what a process reads for an item, for the error if the process is killed meanwhile.
    """

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

        It also yields None: once after the first items are sent, and whenever ``tick_seconds`` pass without a result.
        Items are taken in order, as processes become free. No item may be None.

        Raises:
            Exception: the exception that the function raised.
            ChildProcessError: a process was killed.
        """
        # the items that each process has been sent and has not finished, by connection
        workers = {worker.connection: worker for worker in self._workers}
        sent_items: dict[Any, deque[Item]] = {worker.connection: deque() for worker in self._workers}

        def send_items() -> None:
            # first one item to each process, then the next ones
            for _ in range(_ITEMS_AHEAD):
                for worker_connection, worker in workers.items():
                    queued_items = sent_items[worker_connection]
                    if len(queued_items) == _ITEMS_AHEAD:
                        continue
                    item = next(items, None)
                    if item is None:
                        continue
                    queued_items.append(item)
                    with self._naming(queued_items[0]):
                        worker.send(item)

        send_items()
        yield None
        while True:
            busy = [worker_connection for worker_connection, queued_items in sent_items.items() if queued_items]
            if not busy:
                return
            ready = connection.wait(busy, timeout=tick_seconds)
            for worker_connection in ready:
                queued_items = sent_items[worker_connection]
                with self._naming(queued_items[0]):
                    result = workers[worker_connection].receive()
                yield queued_items.popleft(), result
            if not ready:
                yield None
            send_items()

    @contextmanager
    def _naming(self, item: Item) -> Iterator[None]:
        """Add to the error of a killed process what it was reading for the item."""
        try:
            yield
        except ChildProcessError as error:
            raise ChildProcessError(f"while reading {self._describe(item)}, {error}") from None


def _serve(function: Callable[[Any], Any], pipe: Connection) -> None:
    """Answer each item from the pipe with the result of ``function`` and None, or with None and the exception.

    This is the main function of a worker process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent kills this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # a thread empties the pipe all the time, so that the parent's send does not wait for the end of a long function
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(pipe, items), daemon=True).start()
    while True:
        item = items.get()
        if item is _NO_MORE:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = (function(item), None)
        except Exception as error:  # noqa: BLE001 - the parent raises it again
            answer = (None, error)
        pipe.send(answer)


def _receive(pipe: Connection, items: "queue.SimpleQueue[Any]") -> None:
    """Move the items from the pipe to the queue ``items``, in a thread.

    If the process read the pipe only between two items, both ends could be sending, each waiting for the other to read.
    """
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
