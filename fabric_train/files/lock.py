"""A lock file that says whose a folder is, and that any kind of death releases."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fabric_train.cli.errors import InputError


@contextmanager
def hold_lock(path: Path, taken: str, mend: str) -> Iterator[None]:
    """Hold the lock file ``path`` while the block runs. Folders above it are made and, if still empty, removed again.

    Raises:
        InputError: another process holds it; says ``taken``, which process, and ``mend``.
        OSError: the file cannot be made.
    """
    new_parents = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _open_and_lock(path, taken, mend)
    with lock:
        try:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield
        finally:
            path.unlink(missing_ok=True)
            fcntl.flock(lock, fcntl.LOCK_UN)  # forked workers have it open too
            for parent in new_parents:
                with suppress(OSError):  # something else lies in it by now
                    parent.rmdir()


def refuse_if_held(path: Path, taken: str, mend: str) -> None:
    """Refuse where another process holds the lock, as :func:`hold_lock` would, and leave nothing behind.

    Raises:
        InputError: see :func:`hold_lock`.
    """
    if path.is_file():
        with suppress(FileNotFoundError), path.open() as lock:
            _lock(lock, taken, mend)


def _open_and_lock(path: Path, taken: str, mend: str) -> TextIO:
    while True:
        lock = path.open("a+")
        try:
            _lock(lock, taken, mend)
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:  # the holder has just ended and removed it
            pass
        except InputError:
            lock.close()
            raise
        lock.close()


def _lock(lock: TextIO, taken: str, mend: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.readline().strip() or "a process that is just starting"
        raise InputError(f"{taken} ({holder}); {mend}") from None
