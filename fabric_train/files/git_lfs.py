"""Git LFS pointers: small texts that lie where ``git clone`` has left a file of a repository unfetched."""

from pathlib import Path

from fabric_train.cli.errors import InputError


def refuse_pointer(file: Path) -> None:
    """Raise InputError where ``file`` is a pointer and not the file itself."""
    with file.open("rb") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository"
            )
