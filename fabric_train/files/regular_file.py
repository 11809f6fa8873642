"""Open files that others may have replaced: reading never waits for a pipe, writing never follows a link."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from fabric_train.cli.errors import InputError

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, advice: str) -> BinaryIO:
    """Open a file for reading in binary mode. A plain ``open`` of a pipe would wait for its writer.

    Args:
        path: the file, or a link to it.
        advice: how to fix a wrong file; ends the error message.

    Raises:
        InputError: ``path`` is a pipe, a socket, a folder or a device.
        OSError: it does not exist or cannot be read.
    """
    _check_regular(path, os.stat(path).st_mode, advice)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have become a pipe meanwhile
    try:
        _check_regular(path, os.fstat(descriptor).st_mode, advice)
    except InputError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def open_to_write(
    path: Path, mode: Literal["w", "x", "a", "a+"], newline: str | None = None, errors: str | None = None
) -> TextIO:
    """Open a text file for writing as ``open`` does, in UTF-8, but never through a link.

    Raises:
        InputError: ``path`` is a link, a pipe, a socket or a folder.
        OSError: it cannot be opened, or mode is ``x`` and it exists.
    """
    check_regular_or_absent(path)
    return open(path, mode, encoding="utf-8", errors=errors, newline=newline, opener=_open_without_links)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is complete or unchanged after a kill or a power failure at any moment.

    Raises:
        InputError: ``path`` is a link, a pipe, a socket or a folder.
    """
    check_regular_or_absent(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)  # of a killed process that had the same number, or a planted link
    with open_to_write(temporary, "x", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def check_regular_or_absent(path: Path) -> None:
    """Check that a file can be written at ``path``, which need not exist.

    Raises:
        InputError: ``path`` is a link, a pipe, a socket or a folder.
    """
    check_no_link(path)
    if path.is_fifo() or path.is_socket() or path.is_dir():
        raise InputError(f"{path} is {_KINDS[stat.S_IFMT(path.lstat().st_mode)]}, not a file; remove it")


def check_no_link(path: Path) -> None:
    """Check that a file or folder to write to is not a link, which may lead to something else of the user's.

    Raises:
        InputError: ``path`` is a link.
    """
    if path.is_symlink():
        raise _is_link(path)


def check_no_links_in(folder: Path) -> None:
    """Check that neither a folder, which need not exist, nor anything below it is a link; see :func:`check_no_link`.

    Raises:
        InputError: naming the link.
    """
    check_no_link(folder)
    for path in folder.rglob("*"):
        check_no_link(path)


def check_no_pipes(folder: Path) -> None:
    """Check that a folder has no pipe and no socket, which a library would open and wait for.

    Raises:
        InputError: naming it.
    """
    for path in sorted(folder.iterdir()):
        if path.is_fifo() or path.is_socket():
            _check_regular(path, path.stat().st_mode, "remove it")


def _check_regular(path: Path, mode: int, advice: str) -> None:
    if not stat.S_ISREG(mode):
        raise InputError(f"{path} is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file; {advice}")


def _open_without_links(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link after check_no_link
            raise _is_link(Path(path)) from None
        raise


def _is_link(path: Path) -> InputError:
    return InputError(f"{path} is a link to {os.readlink(path)}, and no file is written through a link; remove it")
