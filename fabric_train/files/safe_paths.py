"""File names and links that come with data, of an index or a tokenizer folder: none leads out of its folder."""

import os
import shutil
from pathlib import Path

from fabric_train.cli.errors import InputError


def plain_name(name: object, listing: Path) -> str:
    """Return ``name``, which the file ``listing`` gives, where it is the bare name of a file or folder beside it.

    Raises:
        InputError: it is none, such as ``../secret`` or ``/etc/passwd``.
    """
    is_text = isinstance(name, str) and name.encode(errors="ignore").decode() == name  # no half surrogate pair
    if not is_text or name in ("", ".", "..") or not set(str(name)).isdisjoint("/\\\0"):
        raise InputError(f"{listing}: it names {name!r}, which lies not beside it: damaged or forged; fetch it again")
    return str(name)


def refuse_foreign_links(folder: Path) -> None:
    """Refuse a folder in which a link leads out of it: a copy of the folder would carry what lies there.

    Raises:
        InputError: naming the link.
    """
    inside = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(inside):
            raise InputError(f"{path}: a link to {os.readlink(path)}, out of its folder; put the file itself there")


def copy_folder(source: Path, target: Path) -> None:
    """Copy the files below ``source`` into ``target``, which may be there; what is new has the rights of the user's
    umask, not the source's.

    Raises:
        InputError: a link in ``source`` leads out of it.
    """
    refuse_foreign_links(source)
    target.mkdir(exist_ok=True)
    for path in sorted(source.rglob("*")):  # folders come before what is in them
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        else:
            shutil.copyfile(path, place)
