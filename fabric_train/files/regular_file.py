"""Files and folders of others: reading never waits for a pipe, writing never follows a link, no name leads outside."""

import errno
import os
import shutil
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
    """Open a file, or what a link leads to, to read bytes. A plain ``open`` of a pipe would wait for its writer.

    Raises:
        InputError: ``path`` is a pipe, a socket, a folder or a device; ``advice`` says how to fix that.
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
    """Raise an InputError if ``path`` exists and is no file: a link, a pipe, a socket or a folder."""
    check_no_link(path)
    if path.is_fifo() or path.is_socket() or path.is_dir():
        raise InputError(f"{path} is {_KINDS[stat.S_IFMT(path.lstat().st_mode)]}, not a file; remove it")


def check_no_link(path: Path) -> None:
    """Raise an InputError if a place to write to is a link, which may lead to something else of the user's."""
    if path.is_symlink():
        raise _is_link(path)


def check_no_links_in(folder: Path) -> None:
    """Raise an InputError if a folder, which need not exist, or anything below it is a link."""
    check_no_link(folder)
    for path in folder.rglob("*"):
        check_no_link(path)


def check_no_pipes(folder: Path) -> None:
    """Raise an InputError if a folder has a pipe or a socket, which a library would open and wait for."""
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


def check_file_name(name: object, listing: Path) -> str:
    """Return ``name``, which is in the file ``listing``, or raise an InputError if it is a path such as ``../x``."""
    is_text = isinstance(name, str) and name.encode(errors="ignore").decode() == name  # no half of a surrogate pair
    if not is_text or name in ("", ".", "..") or not set(str(name)).isdisjoint("/\\\0"):
        raise InputError(f"{listing}: it names {name!r}, outside its folder: damaged or forged; fetch it again")
    return str(name)


def check_links(folder: Path) -> None:
    """Raise an InputError if a link in ``folder`` leads out of it, or something in it is no file and no folder.

    A copy of the folder would contain the file that a link leads to, and reading a pipe would wait for its writer.
    """
    inside = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise InputError(f"{path}: a link to {os.readlink(path)}, outside its folder; put the file itself there")
        if not (path.is_file() or path.is_dir()):
            kind = f"a link to {os.readlink(path)}, which is not there" if path.is_symlink() else "not a file"
            raise InputError(f"{path}: {kind}; remove it, or put the file itself there")


def copy_folder(source: Path, target: Path) -> None:
    """Copy ``source`` into ``target``, which may exist; new files get permissions from the umask, not from the source.

    Raises:
        InputError: a link in ``source`` leads out of it.
    """
    check_links(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):  # a folder comes before its content
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, place)


def check_not_pointer(file: Path) -> None:
    """Raise an InputError if ``file`` is a Git LFS pointer, or no regular file; an OSError if it cannot be read."""
    with open_regular(file, "put the file itself there") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository"
            )
