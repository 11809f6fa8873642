"""Find the files that come with this program beside its code: configs/, launch/ and docker/."""

import sys
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[2]  # a checkout, or the folder of an installation's packages
_SHARE = "share/fabric-train"


def find_installed(name: str) -> Path | None:
    """Return a file or folder such as ``launch``, of a checkout or of an installation; None if it is not there."""
    folders = (_PROJECT, _PROJECT / _SHARE, Path(sys.prefix) / _SHARE)
    return next((folder / name for folder in folders if (folder / name).exists()), None)
