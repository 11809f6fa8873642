"""Check file names and links that come with data: none may lead out of its folder."""

import os
import shutil
from pathlib import Path

from fabric_train.cli.errors import InputError


def check_file_name(name: object, listing: Path) -> str:
    """Return ``name`` if it is the plain name of a file or folder, as a file ``listing`` should contain.

    Raises:
        InputError: it is not, such as ``../secret`` or ``/etc/passwd``.
    """
    is_text = isinstance(name, str) and name.encode(errors="ignore").decode() == name  # no half of a surrogate pair
    if not is_text or name in ("", ".", "..") or not set(str(name)).isdisjoint("/\\\0"):
        raise InputError(f"{listing}: it names {name!r}, outside its folder: damaged or forged; fetch it again")
    return str(name)


def check_links(folder: Path) -> None:
    """Check that no link in ``folder`` leads out of it, and that everything in it is a file or a folder.

    A copy of the folder would contain the file that a link leads to, and reading a pipe would wait for its writer.

    Raises:
        InputError: naming the link, the pipe or the socket.
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
