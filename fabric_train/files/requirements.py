"""What a command needs of the machine beside its arguments: optional packages, and room on a disk.

Every program asks here before it begins to work, so what is missing is one line, before anything is read or written.
``atomic_folder.check_not_taken`` does the same for a folder to write.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.atomic_folder import nearest_existing

_EXTRAS = {"lm_eval": "eval", "phonenumbers": "cleaning", "stdnum": "cleaning", "py3langid": "cleaning"}
"""The extra that installs a module, where it has another name."""
_DISTRIBUTIONS = {"stdnum": "python-stdnum"}


def check_package(module: str, needed_by: str) -> None:
    """Raise an InputError if an optional package is not installed; it is not imported, which may take seconds.

    Args:
        module: the name by which it is imported.
        needed_by: what needs it, such as ``--base_weights nf4``.
    """
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a part of another package that is not there, or half removed
        is_installed = False
    if not is_installed:
        raise InputError(f"{needed_by} needs {_DISTRIBUTIONS.get(module, module)}: {_how_to_install(module)}")


def load_package(module: str, needed_by: str) -> ModuleType:
    """Import an optional package; for an InputError see :func:`check_package`, also if it is damaged."""
    check_package(module, needed_by)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = f"{_DISTRIBUTIONS.get(module, module)}, which cannot be imported ({first_line(error)})"
        raise InputError(f"{needed_by} needs {reason}: {_how_to_install(module)}") from error


def _how_to_install(module: str) -> str:
    return f"pip install 'fabric-train[{_EXTRAS.get(module, module)}]'"


def check_room(target: Path, num_bytes: float, what: str) -> None:
    """Raise an InputError if the disk of ``target``, which need not exist, has less than ``num_bytes`` left."""
    parent = nearest_existing(target.absolute())
    free = free_bytes(parent)
    if free < num_bytes:
        raise InputError(
            f"{target}: {what} takes {show_size(num_bytes)}, and {parent} has {show_size(free)} left; choose a folder "
            "on another disk"
        )


def check_file_to_write(file: Path, option: str) -> None:
    """Raise an InputError if the folder of a file that an option names is not there, or cannot be written to."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{option} {file}: no folder {file.parent}; create it first")
    if file.is_dir() or not os.access(file if file.exists() else folder, os.W_OK):
        raise InputError(f"{option} {file}: it cannot be written; give another file")


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that this user can still write to the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
