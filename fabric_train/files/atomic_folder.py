"""Write a folder that is complete or absent: under a hidden temporary name first, then synced and renamed.

A lock file ensures that only one process at a time writes it.
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

from fabric_train.cli.errors import InputError, raise_if_limit_reached
from fabric_train.files.regular_file import check_no_link, open_to_write

_MAX_WAIT_SECONDS = 120.0
_MARK = ".incomplete-"
_held_locks = set[TextIO]()  # of this process; a forked process closes them, see _close_held_locks


@contextmanager
def hold_lock(path: Path, problem: str, advice: str) -> Iterator[None]:
    """Hold the lock file ``path`` in this context; the file exists only during that time.

    Parent folders that this creates are removed afterwards if they are empty.

    Args:
        path: The lock file.
        problem: The beginning of the error if another process holds the lock; its process id and host are added.
        advice: The end of this error.

    Raises:
        InputError: another process holds the lock, or ``path`` is a link.
    """
    new_parents = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = _open_and_lock(path, problem, advice)
    with lock:
        try:
            _held_locks.add(lock)
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            yield
        finally:
            path.unlink(missing_ok=True)
            _held_locks.discard(lock)
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a worker that was just forked has the file open
            for parent in new_parents:
                with suppress(OSError):  # it is not empty
                    parent.rmdir()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Hold a lock that other processes hold for less than a second.

    Raises:
        InputError: another process has held it for two minutes.
    """
    deadline = time.monotonic() + _MAX_WAIT_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold_lock(path, f"{path}: another process is using it", "stop that process"))
                break
            except InputError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield


def check_not_held(path: Path, problem: str, advice: str) -> None:
    """Raise the InputError of :func:`hold_lock` if another process holds the lock, without creating a file."""
    check_no_link(path)
    if path.is_file():
        with suppress(FileNotFoundError), path.open() as lock:
            _lock(lock, problem, advice)


def _open_and_lock(path: Path, problem: str, advice: str) -> TextIO:
    """Open and lock a lock file; try again if another process has just removed it."""
    while True:
        lock = open_to_write(path, "a+")
        try:
            _lock(lock, problem, advice)
            # another inode has this name if the lock's holder has just removed the file that is locked here
            if os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
                return lock
        except FileNotFoundError:  # there is no file of this name now
            pass
        except InputError:
            lock.close()
            raise
        lock.close()


def _close_held_locks() -> None:
    """Close the lock files that this process has inherited: the lock must end when the process that took it ends."""
    for lock in _held_locks:
        lock.close()
    _held_locks.clear()


os.register_at_fork(after_in_child=_close_held_locks)


def _lock(lock: TextIO, problem: str, advice: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.readline().strip() or "a process that is starting"
        raise InputError(f"{problem} ({holder}); {advice}") from None


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``target`` to write into; rename it to ``target`` after the block.

    Everything is synced to the disk before the rename, and the parent after it, so a folder with the final name is
    complete even after a power failure. After any exception, including ``KeyboardInterrupt``, the temporary folder is
    removed. So are temporary folders for the same target that killed processes of this machine have left behind.

    Raises:
        InputError: ``target`` is a file or a folder that is not empty, another process is writing it, or its parent
            cannot be written to.
    """
    target = Path(os.path.abspath(target))
    check_not_taken(target)
    with ExitStack() as stack:
        # begin: only one process at a time has the lock
        try:
            lock_path = target.parent / f".{target.name}.lock"
            problem = f"{target}: another process is writing to it"
            stack.enter_context(hold_lock(lock_path, problem, "wait for it, or choose another folder"))
            check_not_taken(target)  # again: another process may just have finished it
            _remove_leftovers(target)
            temporary = temporary_for(target, this_process())
            temporary.mkdir()
        except OSError as error:
            raise_if_limit_reached(error)
            raise InputError(
                f"cannot write to {target.parent}: {error.strerror}; choose another folder for {target.name}"
            ) from None

        # write, and finish
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
    """Return whether a path is a temporary folder, of any target and process."""
    return path.name.startswith(".") and _MARK in path.name


def sync_and_rename(temporary: Path, target: Path, synced: str | None = None) -> None:
    """Sync a temporary folder to the disk, rename it to ``target``, and sync the parent folder.

    Targets of links are not synced. Files whose names end with ``synced`` are on the disk already.
    """
    for root, _, names in os.walk(temporary, topdown=False):
        for name in names:
            file = Path(root, name)
            is_synced = synced is not None and name.endswith(synced)
            if not is_synced and stat.S_ISREG(file.lstat().st_mode):
                fsync(file)
        fsync(Path(root))
    temporary.rename(target)
    fsync(target.parent)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file, or a link without its target."""
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
    """Raise the InputError that :func:`complete_folder` would raise for ``target``, before long work begins."""
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
    """Return a path if it exists, or else the nearest folder above it that exists."""
    return next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())


def check_not_inside(target: Path, complete: Path) -> None:
    """Raise an InputError if ``target`` is a complete folder, a token dataset or a checkpoint, or is inside one."""
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(complete)):
        raise InputError(
            f"cannot write to {target}: {complete} is complete and is never changed; choose another folder"
        )


def check_no_dead_link(target: Path) -> None:
    """Raise an InputError if ``target`` or a folder above it is a dead link, where no folder can be created."""
    for path in (target, *target.parents):
        if path.is_symlink() and not path.exists():
            raise InputError(f"cannot write to {target}: {path} is a link to {os.readlink(path)}, which does not exist")


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of ``target`` whose process on this machine was killed."""
    prefix = f".{target.name}{_MARK}{socket.gethostname()}-"
    for entry in target.parent.iterdir():
        match = re.fullmatch(re.escape(prefix) + "([1-9][0-9]{0,8})", entry.name)
        if match is None:
            continue
        process_id = int(match[1])
        if process_id == os.getpid() or not psutil.pid_exists(process_id):
            with suppress(OSError):  # another user's
                remove(entry)
