"""Processes that apply one function to many items, and end with the process that started them, whatever ends that.

``concurrent.futures`` is not used: its processes are forked while its threads run, which Python 3.10 can hang on, and a
fork made before any thread gives every process the loaded tokenizer without a copy and without its imports.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any, Generic, TypeVar

_ITEMS_AHEAD = 2  # given to a process: one to work on, and one to go on with

Item = TypeVar("Item")
Result = TypeVar("Result")

# Linux alone: elsewhere system libraries do not survive a fork
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


class Worker(Generic[Item, Result]):
    """A process that applies ``function`` to what it is sent."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self.connection, other = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(function, other), daemon=True)
        self.process.start()
        other.close()

    def send(self, item: Item) -> None:
        """Give it one more item; they are computed one after another, in this order."""
        try:
            self.connection.send(item)
        except BrokenPipeError:
            raise _killed() from None

    def receive(self) -> Result:
        """Wait for the next result.

        Raises:
            ChildProcessError: the process was killed, as the system does when memory runs out.
            Exception: what ``function`` raised.
        """
        try:
            result, error = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise _killed() from None
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """End the process at once; it may take the system a moment to clear it away."""
        self.process.kill()
        self.connection.close()


class Workers(Generic[Item, Result]):
    """``num_proc`` processes; leaving the block ends them at once."""

    def __init__(self, function: Callable[[Item], Result], num_proc: int) -> None:
        gc.freeze()  # what is loaded is not visited again: not in this process, and not copied for it in those
        gc.enable()
        self._workers: list[Worker[Item, Result]] = [Worker(function) for _ in range(num_proc)]

    def __enter__(self) -> "Workers[Item, Result]":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        if kind is not None:  # what they have begun to write may be removed next
            for worker in self._workers:
                worker.process.join()

    def run(self, items: Iterator[Item], tick: float) -> Iterator[tuple[Item, Result] | None]:
        """Yield items with their results as they come, items being taken in order, and None every ``tick`` seconds and
        once at the beginning, when the first ones are under way.

        Raises:
            ChildProcessError: a process was killed.
            Exception: what the function raised.
        """
        under_way: dict[Any, tuple[Worker[Item, Result], deque[Item]]] = {
            worker.connection: (worker, deque()) for worker in self._workers
        }
        has_begun = False
        while True:
            for _ in range(_ITEMS_AHEAD):
                for worker, own in under_way.values():
                    if len(own) < _ITEMS_AHEAD and (item := next(items, None)) is not None:
                        worker.send(item)
                        own.append(item)
            if not has_begun:
                has_begun = True
                yield None
            busy = [one for one, (_, own) in under_way.items() if own]
            if not busy:
                return
            ready = connection.wait(busy, timeout=tick)
            for one in ready:
                worker, own = under_way[one]
                yield own.popleft(), worker.receive()
            if not ready:
                yield None


def _killed() -> ChildProcessError:
    return ChildProcessError("a tokenizing process was killed; if memory ran out, use fewer with --num_proc")


def _serve(function: Callable[[Any], Any], pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = (function(item), None)
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            answer = (None, error)
        pipe.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
