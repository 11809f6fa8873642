"""Open and write files that other users may have made, without waiting for a pipe or following a link."""

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

from fabric_train.cli.errors import InputError

_FILE_TYPES = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, advice: str) -> BinaryIO:
    """Open a file to read bytes.

    Raises:
        InputError: it is a pipe, which would wait, or anything other than a file; ``advice`` ends the message.
        OSError: it cannot be opened.
    """
    _check_regular(path, os.stat(path).st_mode, advice)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor).st_mode, advice)  # it may have become a pipe meanwhile
    except InputError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def open_to_write(
    path: Path, mode: Literal["w", "x", "a", "a+", "r+"], newline: str | None = None, errors: str | None = None
) -> TextIO:
    """Open a UTF-8 file for writing as ``open`` does; InputError if it is a link, a pipe, a socket or a folder."""
    check_regular_or_absent(path)
    return open(path, mode, encoding="utf-8", errors=errors, newline=newline, opener=_open_without_links)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is complete or unchanged after any failure; errors as in ``open_to_write``."""
    check_regular_or_absent(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)  # left by a killed process with the same number, or a link that somebody planted
    with open_to_write(temporary, "x", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def check_regular_or_absent(path: Path) -> None:
    """Raise an InputError if ``path`` exists and is not a file, but a link, a pipe, a socket or a folder."""
    check_no_link(path)
    if path.is_fifo() or path.is_socket() or path.is_dir():
        raise InputError(f"{path} is {_FILE_TYPES[stat.S_IFMT(path.lstat().st_mode)]}, not a file; remove it")


def check_no_link(path: Path) -> None:
    """Raise an InputError if a path to write to is a link, which may lead to another of the user's files."""
    if path.is_symlink():
        raise _link_error(path)


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
        raise InputError(f"{path} is {_FILE_TYPES.get(stat.S_IFMT(mode), 'of an unknown type')}, not a file; {advice}")


def _open_without_links(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it became a link after check_no_link
            raise _link_error(Path(path)) from None
        raise


def _link_error(path: Path) -> InputError:
    return InputError(
        f"{path} is a link to {os.readlink(path)}, and files are never written through links; remove the link"
    )


def check_file_name(name: object, listing: Path) -> str:
    """Return ``name`` if it is the name of a file, and not a path such as ``../x``.

    Args:
        name: A value of the file ``listing``.
        listing: The file that names it, for the message.

    Raises:
        InputError: it is not the name of a file.
    """
    # a text with half of a surrogate pair cannot be a file name
    is_text = isinstance(name, str) and name.encode(errors="ignore").decode() == name
    text = str(name)
    leaves_folder = text in ("", ".", "..") or any(separator in text for separator in "/\\\0")
    if not is_text or leaves_folder:
        raise InputError(
            f"{listing}: it names {name!r}, outside its folder, so it is damaged or forged; download it again"
        )
    return text


def check_links(folder: Path) -> None:
    """Raise an InputError if ``folder`` has a link that leads out of it, or an entry that is no file and no folder."""
    real_folder = os.path.realpath(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(real_folder):
            raise InputError(f"{path}: a link to {os.readlink(path)}, outside its folder; replace it with the file")
        if path.is_file() or path.is_dir():
            continue
        problem = f"a link to {os.readlink(path)}, which does not exist" if path.is_symlink() else "not a file"
        raise InputError(f"{path}: {problem}; remove it, or replace it with the file")


def copy_folder(source: Path, target: Path) -> None:
    """Copy the content of ``source`` into ``target``; new files get permissions from the umask.

    Raises:
        InputError: a link in ``source`` leads out of it.
    """
    check_links(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):  # a folder comes before its content
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, copy)


def check_not_pointer(file: Path) -> None:
    """Raise an InputError if ``file`` is a Git LFS pointer or not a regular file, an OSError if it cannot be read."""
    with open_regular(file, "replace it with the file") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository")
