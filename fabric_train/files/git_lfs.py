"""Git LFS pointers: small text files that ``git clone`` leaves in place of large files."""

from pathlib import Path

from fabric_train.cli.errors import InputError
from fabric_train.files.regular_file import open_regular


def check_not_pointer(file: Path) -> None:
    """Check that ``file`` is not a Git LFS pointer.

    Raises:
        InputError: it is, or it is a pipe, a folder or another kind of file.
        OSError: it cannot be read.
    """
    with open_regular(file, "put the file itself there") as opened:
        if opened.read(64).startswith(b"version https://git-lfs"):
            raise InputError(
                f"{file} is a Git LFS pointer and not the file itself; run `git lfs pull` in its repository"
            )
