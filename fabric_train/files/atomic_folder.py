"""Write a folder that is complete or absent: under a hidden temporary name first, then synced and renamed.

Lock files let one process at a time write it.
"""

import fcntl
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

from fabric_train.cli.errors import InputError, raise_reached_limit
from fabric_train.files.regular_file import check_no_link, open_to_write

_LONGEST_WAIT = 120.0  # seconds
_MARK = ".incomplete-"
_held = set[TextIO]()


@contextmanager
def hold_lock(path: Path, taken: str, fix: str) -> Iterator[None]:
    """Hold the lock file ``path``, which exists only then; new parent folders are removed if they are empty.

    InputError if another process holds it: ``taken``, its process id and host, ``fix``; or if ``path`` is a link.
    """
    new_parents = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _open_and_lock(path, taken, fix)
    with lock:
        try:
            _held.add(lock)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield
        finally:
            path.unlink(missing_ok=True)
            _held.discard(lock)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a worker that was just forked has the file open
            for parent in new_parents:
                with suppress(OSError):  # it is not empty any more
                    parent.rmdir()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Hold a lock that others hold for less than a second; an InputError if one holds it for two minutes."""
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
    """Raise the InputError of :func:`hold_lock` if another process holds the lock; creates no file."""
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


def _close_held() -> None:
    """Close the lock files of the process that forked this one: its lock must end when it is killed."""
    for lock in _held:
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


def _lock(lock: TextIO, taken: str, fix: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.readline().strip() or "a process that is just starting"
        raise InputError(f"{taken} ({holder}); {fix}") from None


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``target`` to write into; rename it to ``target`` after the block.

    Everything is synced to the disk before the rename, and the parent after it, so a folder with the final name is
    complete even after a power failure. After any exception, including ``KeyboardInterrupt``, the temporary folder is
    removed, as are those that killed processes of this machine left for the same target. InputError if ``target`` is a
    file or a folder that is not empty, another process is writing it, or its parent cannot be written to.
    """
    target = Path(os.path.abspath(target))
    check_not_taken(target)
    with ExitStack() as stack:
        try:
            lock = target.parent / f".{target.name}.lock"
            taken = f"{target}: another process is writing it"
            stack.enter_context(hold_lock(lock, taken, "wait for it, or choose another folder"))
            check_not_taken(target)  # another process may just have finished it
            _remove_leftovers(target)
            temporary = temporary_for(target, this_process())
            temporary.mkdir()
        except OSError as error:
            raise_reached_limit(error)
            raise InputError(
                f"cannot write to {target.parent}: {error.strerror}; choose another folder for {target.name}"
            ) from None
        try:
            yield temporary
            sync_and_rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def this_process() -> str:
    """Return this process's name for its temporary folders: host and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def temporary_for(target: Path, process: str) -> Path:
    """Return the temporary folder next to ``target`` of a process named by :func:`this_process`."""
    return target.parent / f".{target.name}{_MARK}{process}"


def is_temporary(path: Path) -> bool:
    """Whether a path is a temporary folder, of any target and process."""
    return path.name.startswith(".") and _MARK in path.name


def sync_and_rename(temporary: Path, target: Path, synced: str | None = None) -> None:
    """Sync a temporary folder to the disk, not what links in it lead to; rename it to ``target``, sync the parent.

    Files whose names end with ``synced`` are on the disk already.
    """
    for root, _, names in os.walk(temporary, topdown=False):
        for file in (Path(root, name) for name in names if synced is None or not name.endswith(synced)):
            if stat.S_ISREG(file.lstat().st_mode):
                fsync(file)
        fsync(Path(root))
    temporary.rename(target)
    fsync(target.parent)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link without what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_not_taken(target: Path) -> None:
    """Raise an InputError where :func:`complete_folder` would, after long work, for ``target`` or its parent."""
    check_no_dead_link(target)
    if target.is_dir():
        if any(target.iterdir()):
            raise InputError(f"{target} already exists and is not empty; choose another folder or remove it")
    elif target.exists():
        raise InputError(f"{target} already exists and is a file; choose another name for the folder")
    absolute = Path(os.path.abspath(target))
    if absolute == absolute.parent:
        raise InputError(f"cannot write to {target}: it is the root of the file system; choose another folder")
    parent = nearest_existing(absolute.parent)
    if not parent.is_dir():
        raise InputError(f"cannot write to {target}: {parent} is a file; choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {parent}: no permission; choose another folder for {target.name}")


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def check_not_inside(target: Path, complete: Path) -> None:
    """Raise an InputError if ``target`` is (in) a complete folder: a token dataset or a checkpoint."""
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(complete)):
        raise InputError(f"cannot write to {target}: {complete} is complete and stays as it is; choose another folder")


def check_no_dead_link(target: Path) -> None:
    """Raise an InputError if ``target`` or a folder above it is a dead link, where no folder can be created."""
    for path in (target, *target.parents):
        if path.is_symlink() and not path.exists():
            raise InputError(f"cannot write to {target}: {path} is a link to {os.readlink(path)}, which is not there")


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of ``target`` whose process on this machine was killed."""
    of_this_machine = re.escape(f".{target.name}{_MARK}{socket.gethostname()}-") + "([1-9][0-9]{0,8})"
    for entry in target.parent.iterdir():
        found = re.fullmatch(of_this_machine, entry.name)
        if found and (int(found[1]) == os.getpid() or not psutil.pid_exists(int(found[1]))):
            with suppress(OSError):  # of another user
                remove(entry)
