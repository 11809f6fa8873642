"""Check what a command needs from the machine: optional packages, room on a disk, files that can be written.

Every program checks this before it starts, so the user sees one line before anything is read or written.
``atomic_folder.check_not_taken`` checks a folder to write.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

from fabric_train.cli.argument_types import show_size
from fabric_train.cli.errors import InputError, first_line
from fabric_train.files.atomic_folder import nearest_existing

_EXTRAS = {
    "lm_eval": "eval",
    "phonenumbers": "cleaning",
    "stdnum": "cleaning",
    "py3langid": "cleaning",
    "math_verify": "rl",
    "jsonschema": "rl",
}
"""The extra that installs a module, if its name differs from the module's."""
_DISTRIBUTIONS = {"stdnum": "python-stdnum", "math_verify": "math-verify"}
"""The package with a module, if its name differs from the module's."""


def check_package(module: str, needed_by: str) -> None:
    """Raise an InputError if an optional package is not installed; it is not imported, which may take seconds.

    Args:
        module: The name of the module to import.
        needed_by: The option that needs it, such as ``--base_weights nf4``.
    """
    try:
        is_installed = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module of a package that is missing, or half removed
        is_installed = False
    if not is_installed:
        raise InputError(f"{needed_by} needs {_DISTRIBUTIONS.get(module, module)}; run {_how_to_install(module)}")


def load_package(module: str, needed_by: str) -> ModuleType:
    """Import an optional package.

    Raises:
        InputError: it is not installed, see :func:`check_package`, or it is damaged.
    """
    check_package(module, needed_by)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = _DISTRIBUTIONS.get(module, module)
        raise InputError(
            f"{needed_by} needs {package}, which cannot be imported ({first_line(error)}); run "
            f"{_how_to_install(module)}"
        ) from error


def _how_to_install(module: str) -> str:
    return f"pip install 'fabric-train[{_EXTRAS.get(module, module)}]'"


def check_room(target: Path, num_bytes: float, content: str) -> None:
    """Raise an InputError if the disk of ``target``, which need not exist, has less than ``num_bytes`` bytes free."""
    parent = nearest_existing(target.absolute())
    free = free_bytes(parent)
    if free < num_bytes:
        raise InputError(
            f"{target}: {content} needs {show_size(num_bytes)}, but {parent} has {show_size(free)} left; choose a "
            "folder on another disk"
        )


def check_file_to_write(file: Path, option: str) -> None:
    """Raise an InputError if the folder of a file that an option names is missing, or the file cannot be written."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{option} {file}: folder {file.parent} does not exist; create it first")
    written_path = file if file.exists() else folder
    if file.is_dir() or not os.access(written_path, os.W_OK):
        raise InputError(f"{option} {file}: cannot write to it; give another file")


def free_bytes(folder: Path) -> int:
    """Return the number of bytes that this user can still write to the disk of a folder."""
    disk = os.statvfs(folder)
    num_blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # root may also use the reserved ones
    return disk.f_frsize * num_blocks
