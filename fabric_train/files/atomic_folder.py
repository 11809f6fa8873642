"""Write a folder that is complete or absent: under a hidden temporary name first, then synced and renamed."""

import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fabric_train.cli.errors import InputError, raise_reached_limit
from fabric_train.files.lock import hold_lock

_MARK = ".incomplete-"


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``target`` to write into; rename it to ``target`` after the block.

    All files and folders are synced to the disk before the rename, and the parent after it. So a folder with the final
    name is complete even after a power failure. After any exception, including ``KeyboardInterrupt``, the temporary
    folder is removed. Temporary folders that killed processes of this machine left for the same target are removed too.

    Raises:
        InputError: ``target`` is a file or a folder that is not empty, another process is writing it, or its parent
            cannot be written to.
    """
    target = Path(os.path.abspath(target))
    check_not_taken(target)
    with ExitStack() as stack:
        try:
            lock, taken = target.parent / f".{target.name}.lock", f"{target}: another process is writing it"
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


def sync_and_rename(temporary: Path, target: Path) -> None:
    """Sync a temporary folder to the disk, rename it to ``target``, and sync the parent.

    A link is on the disk with the folder that it is in, and so is a pipe; what a link leads to may not be there.
    """
    for root, _, names in os.walk(temporary, topdown=False):
        for file in (Path(root, name) for name in names):
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
    """Check that ``target`` can be created; :func:`complete_folder` does so as well, but only after the long work.

    Raises:
        InputError: ``target`` is a file or a folder that is not empty, or its parent cannot be written to.
    """
    check_no_dead_link(target)
    if target.is_dir():
        if any(target.iterdir()):
            raise InputError(f"{target} already exists and is not empty; choose another folder or remove it")
    elif target.exists():
        raise InputError(f"{target} already exists and is a file; choose another name for the folder")
    absolute = Path(os.path.abspath(target))
    if absolute == absolute.parent:
        raise InputError(f"cannot write to {target}: it is the root of the file system; choose another folder")
    parent = next(parent for parent in absolute.parents if parent.exists())
    if not parent.is_dir():
        raise InputError(f"cannot write to {target}: {parent} is a file; choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {parent}: no permission; choose another folder for {target.name}")


def check_not_inside(target: Path, complete: Path) -> None:
    """Check that ``target`` is not in (or equal to) a complete folder: a token dataset or a checkpoint.

    Raises:
        InputError: it is.
    """
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(complete)):
        raise InputError(f"cannot write to {target}: {complete} is complete and stays as it is; choose another folder")


def check_no_dead_link(target: Path) -> None:
    """Check that neither ``target`` nor a folder above it is a dead link, where no folder can be created.

    Raises:
        InputError: one of them is.
    """
    for path in (target, *target.parents):
        if path.is_symlink() and not path.exists():
            raise InputError(f"cannot write to {target}: {path} is a link to {os.readlink(path)}, which is not there")


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of ``target`` whose process on this machine was killed."""
    of_this_machine = re.escape(f".{target.name}{_MARK}{socket.gethostname()}-") + "([1-9][0-9]{0,8})"
    for entry in target.parent.iterdir():
        found = re.fullmatch(of_this_machine, entry.name)
        if found and not _runs(int(found[1])):
            with suppress(OSError):  # of another user
                remove(entry)


def _runs(process: int) -> bool:
    """Whether ``process`` is the id of a running process other than this one."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs and belongs to another user
        return True
    return True
