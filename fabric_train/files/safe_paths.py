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
    """Check that no link in ``folder`` leads out of it; a copy of the folder would contain the file it leads to.

    Raises:
        InputError: a link does; it is named.
    """
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise InputError(f"{path}: a link to {os.readlink(path)}, outside its folder; put the file itself there")


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
