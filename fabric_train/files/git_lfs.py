"""Git LFS pointers: small text files that ``git clone`` leaves in place of large files."""

from pathlib import Path

from fabric_train.cli.errors import InputError


def check_not_pointer(file: Path) -> None:
    """Check that ``file`` is not a Git LFS pointer.

    Raises:
        InputError: it is.
    """
    with file.open("rb") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository"
            )
