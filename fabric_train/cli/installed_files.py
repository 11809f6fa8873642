"""Find the files that come with this program in addition to its code: configs/, launch/ and docker/."""

import sys
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]  # a checkout, or the folder of an installation's packages
_SHARE = "share/fabric-train"


def find_installed(name: str) -> Path | None:
    """Return a file or folder such as ``launch`` in a checkout or an installation; None if it does not exist."""
    folders = (_PROJECT, _PROJECT / _SHARE, Path(sys.prefix) / _SHARE)
    return next((folder / name for folder in folders if (folder / name).exists()), None)
