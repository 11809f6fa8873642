"""Lock a folder for one process: the lock file names its holder and is released whenever that process ends."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import check_no_link, open_to_write

_LONGEST_WAIT = 120.0  # seconds


@contextmanager
def hold_lock(path: Path, taken: str, fix: str) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs. Missing parent folders are created, and removed if still empty.

    Args:
        path: the lock file; it exists only while a process holds it.
        taken: what is wrong when another process holds it; begins the error message.
        fix: how to fix that; ends the error message, after the holder's process id and host.

    Raises:
        InputError: another process holds the lock, or ``path`` is a link.
        OSError: the file cannot be created.
    """
    new_parents = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _open_and_lock(path, taken, fix)
    with lock:
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: forked workers have the file open too
            for parent in new_parents:
                with suppress(OSError):  # it is not empty any more
                    parent.rmdir()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Hold a lock that other processes hold for less than a second.

    Raises:
        InputError: another process holds it for two minutes, or ``path`` is a link.
    """
    deadline = time.monotonic() + _LONGEST_WAIT
    with ExitStack() as lock:
        while True:
            try:
                lock.enter_context(hold_lock(path, f"{path}: another process holds it", "end that process"))
                break
            except InputError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield


def check_not_held(path: Path, taken: str, fix: str) -> None:
    """Check that no other process holds the lock; creates no file. For the arguments, see :func:`hold_lock`.

    Raises:
        InputError: another process holds it, or ``path`` is a link.
    """
    check_no_link(path)
    if path.is_file():
        with suppress(FileNotFoundError), path.open() as lock:
            _lock(lock, taken, fix)


def _open_and_lock(path: Path, taken: str, fix: str) -> TextIO:
    while True:
        lock = open_to_write(path, "a+")
        try:
            _lock(lock, taken, fix)
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:  # the holder has just ended and removed it
            pass
        except InputError:
            lock.close()
            raise
        lock.close()


def _lock(lock: TextIO, taken: str, fix: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.readline().strip() or "a process that is just starting"
        raise InputError(f"{taken} ({holder}); {fix}") from None
