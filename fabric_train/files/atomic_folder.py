"""A folder that is complete or absent: written under a hidden temporary name beside its place, synced, then renamed."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric_train.cli.errors import InputError

_MARK = ".incomplete-"


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``target`` to write into; after the block it carries the name ``target``.

    Every file and folder is synced to the disk before the rename and the parent after it, so that a folder with the
    final name is whole even after a power cut. Whatever exception leaves the block, ``KeyboardInterrupt`` included,
    the temporary folder is removed and passes it on. What a killed process of this machine left behind for the same
    target is removed too.

    Raises:
        InputError: ``target`` is a file or a folder with something in it, or its parent cannot be written to.
    """
    target = Path(os.path.abspath(target))
    refuse_if_taken(target)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        temporary = temporary_for(target, this_process())
        temporary.mkdir()
    except OSError as error:
        raise InputError(
            f"cannot write to {target.parent}: {error.strerror}; choose another folder for {target.name}"
        ) from None
    try:
        yield temporary
        give_name(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):  # something else lies in it by now
                parent.rmdir()
        raise


def this_process() -> str:
    """Return what names this process in the names of its temporary folders: machine and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


def temporary_for(target: Path, process: str) -> Path:
    """Return the hidden sibling of ``target`` that a process, named as ``this_process`` does, writes first."""
    return target.parent / f".{target.name}{_MARK}{process}"


def is_temporary(path: Path) -> bool:
    """Whether a path is such a sibling, of whatever target and process."""
    return path.name.startswith(".") and _MARK in path.name


def give_name(temporary: Path, target: Path) -> None:
    """Sync a temporary folder to the disk, give it its name, and sync that."""
    _sync_tree(temporary)
    temporary.rename(target)
    sync(target.parent)


def write_at_once(path: Path, text: str) -> None:
    """Write a file that is whole, or as it was before, whenever this process is killed."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def sync(path: Path) -> None:
    """Wait until a file, or which files a folder has, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_if_taken(target: Path) -> None:
    """Raise InputError when ``target`` is a file, a folder that is not empty, or where nothing can be written.

    For callers that would otherwise learn it after long work; ``complete_folder`` checks by itself.
    """
    refuse_dead_link(target)
    parent = next(parent for parent in Path(os.path.abspath(target)).parents if parent.exists())
    if not parent.is_dir():
        raise InputError(f"cannot write to {target}: {parent} is a file; choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {parent}: no permission; choose another folder for {target.name}")
    if target.is_dir():
        if any(target.iterdir()):
            raise InputError(f"{target} already exists and is not empty; choose another folder or remove it")
    elif target.exists():
        raise InputError(f"{target} already exists and is a file; choose another name for the folder")


def refuse_inside(target: Path, complete: Path) -> None:
    """Raise InputError where ``target`` is or lies in a folder that is complete: a token dataset, a checkpoint."""
    if target.resolve().is_relative_to(complete.resolve()):
        raise InputError(f"cannot write to {target}: {complete} is complete and stays as it is; choose another folder")


def refuse_dead_link(target: Path) -> None:
    """Raise InputError where ``target``, or a folder above it, is a link to nothing: nothing can be made there."""
    for path in (target, *target.parents):
        if path.is_symlink() and not path.exists():
            raise InputError(f"cannot write to {target}: {path} is a link to {os.readlink(path)}, which is not there")


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary folders of ``target`` whose process, on this machine, no longer runs (it was killed)."""
    prefix = f".{target.name}{_MARK}{socket.gethostname()}-"
    for entry in target.parent.iterdir():
        process = entry.name[len(prefix) :]
        if entry.name.startswith(prefix) and process.isdigit() and not _runs(int(process)):
            shutil.rmtree(entry, ignore_errors=True)


def _runs(process: int) -> bool:
    """Return whether another process than this one has the id ``process``."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it runs, and belongs to somebody else
        return True
    return True


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(root, name))
        sync(Path(root))
