# PYTHON_ARGCOMPLETE_OK
"""Copy the files that start runs on clusters and in containers: ``fabric-train launch-files DIR``."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from fabric_train.cli.argument_types import POSITIONAL
from fabric_train.cli.errors import InputError, run_program
from fabric_train.cli.installed_files import find_installed
from fabric_train.cli.parser import parse_arguments
from fabric_train.files.atomic_folder import check_not_taken, complete_folder

_FOLDERS = ("launch", "docker")


@dataclass(frozen=True)
class LaunchFilesArguments:
    """Copy the launch files for Slurm, PBS, Kubernetes, SkyPilot and containers, so that you can edit them

    PROGRAM jobs
    PROGRAM ~/fabric-train-jobs
    PROGRAM --output_dir jobs
    """

    output_dir: str = field(metadata=POSITIONAL)
    """Folder to write; must not exist yet. For Slurm, edit launch/slurm/settings.sh in it."""


def main() -> None:
    """Copy the folders, and print the names of the new files."""
    arguments = parse_arguments(LaunchFilesArguments)
    target = Path(arguments.output_dir).expanduser()
    check_not_taken(target)
    sources = {name: find_installed(name) for name in _FOLDERS}
    missing = [name for name, source in sources.items() if source is None]
    if missing:
        raise InputError(f"this installation does not have {' and '.join(missing)}; reinstall fabric-train")
    with complete_folder(target) as folder:
        for name, source in sources.items():
            assert source is not None
            shutil.copytree(source, folder / name)
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(path)


if __name__ == "__main__":
    run_program(main)
